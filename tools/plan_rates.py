"""Write the figures that `fusestep plan` divides by, from the newest files in benchmarks/results/.

    python tools/plan_rates.py

Rates of products, attention, copies, norms and the optimizer are measured ones of single kernels. Three are fitted to
ladders on the scale-up model, whose times they explain together: what share of a copy's rate separate passes reach
(rung `amp`), the rate of FP32 products (`fused-norm`), and the host's time to launch a block. Two are those of kernels
in the profile of one whole step of that model: the shares of a copy's rate that casts to FP8 and the optimizer's step
with FP8 copies reach. Everything else is a prediction; the table in docs/planning.md shows how good.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from pathlib import Path
from typing import Any

import figures
import plan_cases
from fusestep.plan import Work, passes
from fusestep.plan.duration import duration
from fusestep.plan.memory import copied_bytes
from fusestep.plan.rates import SCHEMA, Rates, between

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "src" / "fusestep" / "plan" / "rates.json"
Data = dict[str, Any]


def rates_data(results: list[Data]) -> Data:
    """What the file holds."""
    parts = {result["part"]: result for result in results if "part" in result}
    fp8, norms, adam, rates, loss = (parts[name] for name in ("fp8", "norms", "adam", "rates", "loss"))
    rungs = fitted_rungs(results)
    amp, steps = rungs["amp"].ladder, parts[f"steps-{plan_cases.PROFILED[0]}"]
    data: Data = {
        "schema": SCHEMA,
        "gpu": fp8["environment"]["gpu"],
        "date": max(one["environment"]["date"][:10] for one in (fp8, norms, adam, loss, steps, amp)),
        "memory": fp8["environment"]["gpu_memory"],
        "products": {
            **products(fp8, bias_sums(results, fp8["copy_bytes_per_second"])),
            "fp32": fp32_products(rates),
            "head": head(loss),
        },
        "attention": attention(rates),
        "norms": norm_shares(norms),
        "host_layer": hosts(fp8, norms, rungs),
        "sources": {
            "products": fp8["file"],
            "products:fp32": rungs["fused-norm"].ladder["file"],
            "products:head": loss["file"],
            "norms": norms["file"],
            "attention": rates["file"],
        },
        "figures": {
            "copy": figure(statistics.median(one["copy_bytes_per_second"] for one in (fp8, norms, adam)), "B/s", norms),
            "kernel": figure(kernel_seconds(norms), "s", norms),
            "adam": figure(adam_share(adam), "of a copy's rate", adam),
            "reserved": figure(
                rungs["amp"].rung["peak_bytes"] / rungs["amp"].rung["peak_allocated_bytes"],
                "of what is allocated",
                amp,
            ),
            "block": figure(recipe_products(fp8, "block"), "of delayed scaling's products", fp8),
            "separate": figure(1.0, "of a copy's rate", amp),
            "casts": figure(1.0, "of a copy's rate", steps),
            "adam_copies": figure(1.0, "of a copy's rate", steps),
        },
    }
    fit_casts(data, steps)
    fit(data, rungs)
    return data


@dataclasses.dataclass(frozen=True)
class Measured:
    """A rung, and the result that it is from."""

    rung: Data
    ladder: Data

    @property
    def work(self) -> Work:
        """What was measured."""
        plan = self.ladder["plan"]
        return plan_cases.of_recipe(self.rung["recipe"], plan_cases.shape_of(plan["model"]), plan["batch"])


def fitted_rungs(results: list[Data]) -> dict[str, Measured]:
    """The rungs on the model that figures are fitted to, by name: see plan_cases.read."""
    ladders = [one for one in results if "rungs" in one and one["plan"]["preset"] == plan_cases.FITTED_TO]
    return {
        rung["name"]: Measured(rung, ladder)
        for ladder in ladders
        for rung in ladder["rungs"]
        if rung["step_ms"] is not None
    }


def figure(value: float, unit: str, result: Data) -> Data:
    return {"value": rounded(value), "unit": unit, "source": result["file"]}


def rounded(value: float) -> float:
    """To five digits: more are noise, and would make the file change with nothing."""
    return float(f"{value:.5g}")


def products(fp8: Data, sums: list[tuple[float, float]]) -> dict[str, list[list[float]]]:
    """FLOP/s by the weight's smaller side, the median of a side.

    FP8 of its three products alone. BF16 of torch's layer, without the sum of the bias's gradient, a pass that is
    counted among the others.

    Args:
        sums: bytes a second of such sums by the width, as `bias_sums` has them.
    """
    found: dict[str, dict[float, list[float]]] = {"bf16": {}, "fp8": {}}
    for row in fp8["rows"]:
        work = 6.0 * row["tokens"] * row["inputs"] * row["outputs"]
        side = float(min(row["inputs"], row["outputs"]))
        if row["implementation"] == "torch bf16":
            bias = 2.0 * row["tokens"] * row["outputs"] / between(sums, side)
            found["bf16"].setdefault(side, []).append(work / (row["device_ms"] * 1e-3 - bias))
            found["fp8"].setdefault(side, []).append(work / row["products_ms"] * 1e3)
    return {name: medians(sides) for name, sides in found.items()}


def bias_sums(results: list[Data], copy: float) -> list[tuple[float, float]]:
    """(width, bytes a second) of torch's sums of biases' gradients, by profiles of the rung `amp`.

    A copy's rate as long as no ladder has such a profile.
    """
    found: dict[float, float] = {}
    for result in results:
        for rung in result.get("rungs", ()):
            if rung["name"] != "amp" or result["plan"].get("factory") is not None:
                continue
            one = Measured(rung, result)
            shape = one.work.shape
            sums = 4 * shape.layers
            for kernel in rung.get("kernels") or ():
                if "reduce_kernel" in kernel["name"] and kernel["calls"] == sums:
                    bytes_ = (
                        2 * shape.layers * one.work.micro_tokens * (3 * shape.width + 2 * shape.width + shape.hidden)
                    )
                    found[float(shape.width)] = bytes_ / (kernel["ms"] * 1e-3)
    return sorted(found.items()) or [(1.0, copy)]


def medians(found: dict[float, list[float]]) -> list[list[float]]:
    """(place, median of what was found there)."""
    return [[place, rounded(statistics.median(several))] for place, several in sorted(found.items())]


def head(loss: Data) -> list[list[float]]:
    """(width, FLOP/s) of the three products of a head in BF16 by themselves."""
    found: dict[float, list[float]] = {}
    for row in loss["rows"]:
        work = 6.0 * row["tokens"] * row["width"] * row["vocabulary"]
        found.setdefault(float(row["width"]), []).append(work / row["products_ms"] * 1e3)
    return medians(found)


def recipe_products(fp8: Data, recipe: str) -> float:
    """What products take by a recipe over delayed scaling's, if its layer is slower by them: the median of the shapes.

    The rest of the layer is the same: casts of as many bytes.
    """
    times: dict[tuple[int, ...], dict[str, float]] = {}
    for row in fp8["rows"]:
        shape = (row["tokens"], row["inputs"], row["outputs"])
        times.setdefault(shape, {"products": float(row["products_ms"])})[row["implementation"]] = row["device_ms"]
    return statistics.median(1 + (one[recipe] - one["delayed"]) / one["products"] for one in times.values())


def attention(rates: Data) -> list[list[float]]:
    """(tokens of a sequence, elements of a head, FLOP/s), the median of several."""
    found: dict[tuple[float, float], list[float]] = {}
    for row in rates["rows"]:
        if row["operation"] == "attention":
            size = float(row["shape"].rpartition("x")[2])
            found.setdefault((float(row["length"]), size), []).append(row["flops_per_second"])
    return [[*where, rounded(statistics.median(several))] for where, several in sorted(found.items())]


def fp32_products(rates: Data) -> list[list[float]]:
    """(side, FLOP/s) of FP32 products by themselves; `fit` moves all of them, since a step runs hotter."""
    rows = [row for row in rates["rows"] if row["operation"] == "products, fp32"]
    return sorted([float(row["side"]), float(row["flops_per_second"])] for row in rows)


def norm_shares(norms: Data) -> list[list[float]]:
    """(width, floor / time) of LayerNorm, both directions together, without the start and the end of their kernels.

    Forward is one kernel and backward two. Shares were measured with 8,192 or 16,384 rows; that of so many bytes beside
    a start and an end would be another with other rows.
    """
    found, starts = [], 3 * 1e6 * kernel_seconds(norms)
    for row in norms["rows"]:
        if row["implementation"] == "fusestep" and row["kind"] == "layer_norm":
            floor = row["forward_us"] * row["forward_of_floor"] + row["backward_us"] * row["backward_of_floor"]
            found.append([float(row["width"]), rounded(floor / (row["forward_us"] + row["backward_us"] - starts))])
    return sorted(found)


def kernel_seconds(norms: Data) -> float:
    """What a forward norm takes beyond its bytes: the start and the end of a kernel."""
    rows = [row for row in norms["rows"] if row["implementation"] == "fusestep"]
    beyond = [float(row["forward_us"]) * (1 - float(row["forward_of_floor"])) for row in rows]
    return 1e-6 * statistics.median(beyond)


def adam_share(adam: Data) -> float:
    """Of the plain step: the median over the sets."""
    return statistics.median(float(row["of_floor"]) for row in adam["rows"] if row["implementation"] == "fusestep")


def hosts(fp8: Data, norms: Data, rungs: dict[str, Measured]) -> dict[str, list[float | str]]:
    """Seconds a block, by form and precision: of the ladders' rungs where they have them, else the sum of its modules.

    A block's modules are four linear layers, two norms, and attention and the activation, which count as a linear layer
    each. Of several rungs it is the median.
    """
    linear = {
        name: statistics.median(row["host_us"] for row in fp8["rows"] if row["implementation"] == name) * 1e-6
        for name in ("torch bf16", "delayed")
    }
    norm = statistics.median(row["host_us"] for row in norms["rows"] if row["implementation"] == "fusestep") * 1e-6
    plain = 6 * linear["torch bf16"] + 2 * norm
    found = {f"{form}/{precision}": plain for form in ("seed", "plain", "fused") for precision in ("fp32", "bf16")}
    found["fused/fp8"] = 4 * linear["delayed"] + 2 * linear["torch bf16"] + 2 * norm
    measured: dict[str, list[Measured]] = {}
    for one in rungs.values():
        recipe = one.rung["recipe"]
        if not recipe.get("graph", False):
            measured.setdefault(f"{recipe['form']}/{recipe['precision']}", []).append(one)
    modules: dict[str, list[float | str]] = {key: [rounded(one), fp8["file"]] for key, one in found.items()}
    for key, those in measured.items():
        blocks = [one.rung["host_ms"] * 1e-3 / one.ladder["plan"]["model"]["layers"] for one in those]
        modules[key] = [rounded(statistics.median(blocks)), max(one.ladder["file"] for one in those)]
    return modules


def fit_casts(data: Data, steps: Data) -> None:
    """The two figures of kernels that no benchmark times by themselves, from the profile of a whole step.

    A share is bytes / (time · copy's rate), the time without starts and ends of kernels.
    """
    (case,) = (one for one in plan_cases.step_cases(steps) if one.fitted)
    (row,) = (one for one in steps["rows"] if one["configuration"] == plan_cases.PROFILED[1])
    work, kernels = case.work, row["kernels"]
    copy, start = data["figures"]["copy"]["value"], data["figures"]["kernel"]["value"]

    def share(bytes_: float, *names: str) -> float:
        those = [one for one in kernels if one["name"] in names]
        seconds = 1e-3 * sum(one["ms"] for one in those) - start * sum(one["calls"] for one in those)
        return rounded(bytes_ / seconds / copy)

    there, back = passes.forward(work), passes.backward(work)
    casts = work.shape.layers * work.micro_tokens * (there.casts + back.casts)
    data["figures"]["casts"]["value"] = share(casts, "_quantize_kernel", "_quantize_joined_kernel")
    stepped = (28 + copied_bytes(work)[0]) * work.shape.layers * work.shape.block_matrices
    data["figures"]["adam_copies"]["value"] = share(stepped, "_adam_copies_kernel")


def fit(data: Data, rungs: dict[str, Measured]) -> None:
    """Find the two figures that explain rungs' times; the device's time is linear in the inverse of each."""
    amp, plain = rungs["amp"], rungs["fused-norm"]
    lines = duration(amp.work, of(data))
    passing = sum(line.amount for line in lines.lines if "separate" in line.figures)
    data["figures"]["separate"]["value"] = rounded(passing / (amp.rung["device_ms"] * 1e-3 - (lines.device - passing)))
    alone = data["products"]["fp32"]
    once = duration(plain.work, of(data)).device
    data["products"]["fp32"] = [[side, 2 * rate] for side, rate in alone]
    multiplying = 2 * (once - duration(plain.work, of(data)).device)
    level = multiplying / (plain.rung["device_ms"] * 1e-3 - (once - multiplying))
    data["products"]["fp32"] = [[side, rounded(level * rate)] for side, rate in alone]


def of(data: Data) -> Rates:
    return Rates.read(json.dumps(data))


def text(data: Data) -> str:
    return json.dumps(data, indent=2, ensure_ascii=False) + "\n"


def main() -> None:
    FILE.write_text(text(rates_data(plan_cases.read(figures.RESULTS))))


if __name__ == "__main__":
    main()
