"""Measured steps of benchmarks/results/ as what `fusestep plan` would be asked: prediction beside measurement.

A case is one row of a ladder or of a whole step. Those that a figure of the plan was fitted to are marked so: what they
show is the fit, not a prediction.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import figures
from fusestep.plan import Estimate, Rates, Shape, Work, estimate

#: What a step's time and peak may be off by: of one GPU; of a step that waits for the host, which is shared and takes
#: from run to run what it takes; and of several GPUs, whose links are assumed. What exceeds it is explained below.
WITHIN, WITHIN_WAITING, WITHIN_RANKS = (0.08, 0.06), (0.40, 0.06), (0.25, 0.06)

#: Cases beyond that, by name, and why.
EXPLAINED: dict[str, str] = {
    "mini, graph": "the same step of the same model took 3.23 ms in the run of whole steps (step A, fusestep fp8 "
    "delayed), 5% more than the plan, and 3.33 in the ladder.",
}

#: The ladder that figures are fitted to, and the figure that a rung of it gives.
FITTED_TO = "scaleup"
FITTED = {"amp": "the rate of separate passes, the host's time a block", "fused-norm": "the rate of FP32 products"}

#: The whole step whose profile gives figures of kernels, by model and configuration, and these.
PROFILED = ("b", "fusestep fp8 delayed")
FITTED_STEP = "the rates of casts to FP8 and of the optimizer's FP8 copies"

_BATCHES = {"a": 32, "b": 32, "c": 16, "d": 4}
_PRESETS = {"a": "mini", "b": "scaleup", "c": "gpt2-untied", "d": "long"}


@dataclasses.dataclass(frozen=True)
class Case:
    """A measured step.

    Attributes:
        name: where it was measured, and as what.
        work: what was measured.
        step_ms, peak_bytes: as measured; the peak is of what was allocated, or reserved where only that is known.
        is_reserved: whether it is the latter.
        fitted: the figure that was fitted to this step's time; "" for none.
    """

    name: str
    work: Work
    step_ms: float
    peak_bytes: float | None
    is_reserved: bool
    fitted: str = ""

    def within(self, rates: Rates) -> tuple[float, float]:
        """What time and peak may be off by."""
        if self.work.gpus > 1:
            return WITHIN_RANKS
        return WITHIN_WAITING if self.predicted(rates).time.waiting else WITHIN

    def predicted(self, rates: Rates) -> Estimate:
        return estimate(self.work, rates)

    def step_off(self, rates: Rates) -> float:
        """Prediction over measurement, less 1."""
        return self.predicted(rates).seconds * 1e3 / self.step_ms - 1

    def peak_off(self, rates: Rates) -> float | None:
        """Prediction over measurement, less 1; None where there is none."""
        if self.peak_bytes is None:
            return None
        found = self.predicted(rates)
        return (found.reserved.amount if self.is_reserved else found.peak_bytes) / self.peak_bytes - 1


def read(folder: Path) -> list[dict[str, Any]]:
    """The newest results of each name; and of older ladders the rungs that none since has measured on their model."""
    found = figures.newest_results(folder)
    newest = {result["file"] for result in found}
    seen = {
        (result["plan"]["preset"], rung["name"]) for result in found if "rungs" in result for rung in measured(result)
    }
    older = []
    for path in sorted(folder.glob("*.json"), reverse=True):
        if path.name in newest:
            continue
        result = {"file": path.name, **json.loads(path.read_text())}
        if "rungs" in result:
            kept = [rung for rung in measured(result) if (result["plan"]["preset"], rung["name"]) not in seen]
            seen |= {(result["plan"]["preset"], rung["name"]) for rung in kept}
            older += [{**result, "rungs": kept}] if kept else []
    return sorted(older + found, key=lambda result: (result["file"][11:], result["file"]))


def measured(ladder: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rungs of a ladder that were measured."""
    return [rung for rung in ladder["rungs"] if rung["step_ms"] is not None]


def cases(results: list[dict[str, Any]]) -> list[Case]:
    """Every case of the results, in their order."""
    found: list[Case] = []
    for result in results:
        if "rungs" in result:
            found += ladder_cases(result)
        elif str(result.get("part", "")).startswith("steps-"):
            found += step_cases(result)
        elif "parallel" in result and result["environment"]["gpu"] is not None:
            found += scaling_cases(result)
    return found


def ladder_cases(result: Mapping[str, Any]) -> Iterator[Case]:
    """Rungs of a ladder on one of our models, of one GPU."""
    plan = result["plan"]
    if plan.get("factory") is not None or plan["preset"] is None or result["environment"]["gpu"] is None:
        return
    for rung in measured(result):
        fits = plan["preset"] == FITTED_TO
        # What is allocated leaves out a graph's pool.
        in_graph = rung["recipe"].get("graph", False)
        yield Case(
            f"{plan['preset']}, {rung['name']}",
            of_recipe(rung["recipe"], shape_of(plan["model"]), plan["batch"]),
            rung["step_ms"],
            rung["peak_bytes"] if in_graph else rung["peak_allocated_bytes"],
            in_graph,
            FITTED.get(rung["name"], "") if fits else "",
        )


def step_cases(result: Mapping[str, Any]) -> Iterator[Case]:
    """Whole steps in one graph, of ours."""
    from fusestep.plan import SHAPES

    for row in result["rows"]:
        name = str(row["configuration"])
        if "failed" in row or not name.startswith("fusestep"):
            continue
        work = Work(
            SHAPES[_PRESETS[row["model"]]],
            batch=_BATCHES[row["model"]],
            precision=row["precision"],
            recipe="current" if "current" in name else "delayed",
            weights=row["weights"],
            remainders=row.get("remainders", False),
            loss="torch" if "torch's loss" in name else "fused",
            graph=True,
        )
        fitted = FITTED_STEP if (row["model"], name) == PROFILED else ""
        title = f"step {row['model'].upper()}, {name}"
        yield Case(title, work, row["device_ms"], row["peak_reserved_bytes"], True, fitted)


def scaling_cases(result: Mapping[str, Any]) -> Iterator[Case]:
    """Rows of a ladder over ranks: strong and weak."""
    for row in result["rows"]:
        if row["ms"] is not None:
            work = Work(
                shape_of(result["model"]),
                batch=row["batch"],
                precision=result["precision"],
                parallel=result["parallel"] if row["ranks"] > 1 else "none",
                gpus=row["ranks"],
            )
            yield Case(f"{row['ranks']} ranks, {result['parallel']}, {row['kind']}", work, row["ms"], None, False)


def shape_of(model: Mapping[str, Any]) -> Shape:
    """Of a model as results name its sizes."""
    names = {field.name for field in dataclasses.fields(Shape)}
    return Shape(**{name: value for name, value in model.items() if name in names})


def of_recipe(recipe: Mapping[str, Any], shape: Shape, batch: int) -> Work:
    """A rung's recipe as the plan's settings."""
    return Work(
        shape,
        batch=batch,
        precision=recipe["precision"],
        weights=recipe.get("weights", "fp32"),
        recipe=recipe.get("scaling", "delayed"),
        form=recipe["form"],
        optimizer=recipe["optimizer"],
        loss=recipe.get("loss", "torch"),
        graph=recipe.get("graph", False),
        # Ladders before the rung `loss` was there freed gradients after the forward pass.
        keeps_gradients="loss" not in recipe,
    )


def table_rows(results: list[dict[str, Any]], rates: Rates) -> list[list[str]]:
    """A row for each case: step and memory, measured, predicted, off by."""
    rows = []
    for case in cases(results):
        found = case.predicted(rates)
        peak = case.peak_off(rates)
        planned = found.reserved.amount if case.is_reserved else found.peak_bytes
        rows.append(
            [
                case.name + (f" (fitted: {case.fitted})" if case.fitted else ""),
                f"{case.step_ms:.2f}",
                f"{found.seconds * 1e3:.2f}",
                f"{case.step_off(rates):+.1%}",
                "" if case.peak_bytes is None else f"{case.peak_bytes / 2**30:.2f}",
                f"{planned / 2**30:.2f}",
                "" if peak is None else f"{peak:+.1%}",
            ]
        )
    return rows
