"""Measured steps of benchmarks/results/ as what `fusestep plan` would be asked: prediction beside measurement.

A case is one row of a ladder or of a whole step. Those that a figure of the plan was fitted to are marked so: what they
show is the fit, not a prediction.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from fusestep.plan import Estimate, Rates, Shape, Work, estimate

#: What a step's time and peak may be off by: of the tutorials' form, from whose larger model three figures are fitted;
#: and of all other steps, of whose parts none was. What exceeds it is explained below.
WITHIN_SEED, WITHIN_OTHERS = (0.15, 0.10), (0.25, 0.25)

#: Cases beyond that, by name, and why.
EXPLAINED: dict[str, str] = {}

#: The ladder that figures are fitted to, and the figure that a rung of it gives.
FITTED_TO = "scaleup"
FITTED = {"amp": "the rate of separate passes, the host's time a block", "fused-norm": "the rate of FP32 products"}

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

    @property
    def within(self) -> tuple[float, float]:
        """What time and peak may be off by."""
        return WITHIN_SEED if self.work.form == "seed" else WITHIN_OTHERS

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
    for rung in result["rungs"]:
        if rung["step_ms"] is None:
            continue
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
            weights="bf16" if "masters" in name else "fp32",
            remainders=row.get("remainders", False),
            loss="torch" if "torch's loss" in name else "fused",
            graph=True,
        )
        yield Case(f"step {row['model'].upper()}, {name}", work, row["device_ms"], row["peak_reserved_bytes"], True)


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
