"""Write the figures that `fusestep plan` divides by, from the newest files in benchmarks/results/.

    python tools/plan_rates.py

Rates of products, copies, norms and the optimizer are measured ones as they are. Three are fitted to the ladder on the
scale-up model, whose times they explain together: what share of a copy's rate separate passes reach (rung `amp`), the
rate of FP32 products (`fused-norm`), and the host's time to launch a block. Everything else is a prediction; the table
in docs/planning.md shows how good.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import figures
import plan_cases
from fusestep.plan.duration import duration
from fusestep.plan.rates import SCHEMA, Rates

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "src" / "fusestep" / "plan" / "rates.json"
Data = dict[str, Any]


def rates_data(results: list[Data]) -> Data:
    """What the file holds."""
    parts = {result["part"]: result for result in results if "part" in result}
    fp8, norms, adam = parts["fp8"], parts["norms"], parts["adam"]
    ladder = next(one for one in results if "rungs" in one and one["plan"]["preset"] == plan_cases.FITTED_TO)
    rungs = {rung["name"]: rung for rung in ladder["rungs"]}
    data: Data = {
        "schema": SCHEMA,
        "gpu": fp8["environment"]["gpu"],
        "date": max(one["environment"]["date"][:10] for one in (fp8, norms, adam, ladder)),
        "memory": fp8["environment"]["gpu_memory"],
        "products": products(fp8),
        "attention": attention(parts.get("rates")),
        "norms": norm_shares(norms),
        "host_layer": hosts(fp8, norms, ladder),
        "sources": {
            "products": fp8["file"],
            "norms": norms["file"],
            **({"attention": parts["rates"]["file"]} if "rates" in parts else {}),
        },
        "figures": {
            "copy": figure(statistics.median(one["copy_bytes_per_second"] for one in (fp8, norms, adam)), "B/s", norms),
            "kernel": figure(kernel_seconds(norms), "s", norms),
            "adam": figure(adam_share(adam), "of a copy's rate", adam),
            "reserved": figure(
                rungs["amp"]["peak_bytes"] / rungs["amp"]["peak_allocated_bytes"], "of what is allocated", ladder
            ),
            "current": figure(recipe_time(fp8, "current"), "of delayed scaling's time", fp8),
            "block": figure(recipe_time(fp8, "block"), "of delayed scaling's time", fp8),
            "separate": figure(1.0, "of a copy's rate", ladder),
        },
    }
    # FP32 products, as long as separate passes are not known, at a rate that the fit replaces.
    data["products"]["fp32"] = fp32_shape(parts.get("rates"), float(ladder["plan"]["model"]["width"]))
    fit(data, ladder, rungs)
    return data


def figure(value: float, unit: str, result: Data) -> Data:
    return {"value": rounded(value), "unit": unit, "source": result["file"]}


def rounded(value: float) -> float:
    """To five digits: more are noise, and would make the file change with nothing."""
    return float(f"{value:.5g}")


def products(fp8: Data) -> dict[str, list[list[float]]]:
    """FLOP/s by the weight's smaller side: BF16 of torch's layer, FP8 of its three products; the median of a side."""
    found: dict[str, dict[float, list[float]]] = {"bf16": {}, "fp8": {}}
    for row in fp8["rows"]:
        work = 6.0 * row["tokens"] * row["inputs"] * row["outputs"]
        side = float(min(row["inputs"], row["outputs"]))
        if row["implementation"] == "torch bf16":
            found["bf16"].setdefault(side, []).append(work / row["device_ms"] * 1e3)
            found["fp8"].setdefault(side, []).append(work / row["products_ms"] * 1e3)
    return {
        name: [[side, rounded(statistics.median(rates))] for side, rates in sorted(sides.items())]
        for name, sides in found.items()
    }


def recipe_time(fp8: Data, recipe: str) -> float:
    """A linear layer's time by a recipe over that by delayed scaling: the median over the shapes."""
    times: dict[tuple[int, ...], dict[str, float]] = {}
    for row in fp8["rows"]:
        shape = (row["tokens"], row["inputs"], row["outputs"])
        times.setdefault(shape, {})[row["implementation"]] = float(row["device_ms"])
    return statistics.median(one[recipe] / one["delayed"] for one in times.values())


def attention(rates: Data | None) -> list[list[float]]:
    """(tokens of a sequence, FLOP/s), the median of a length; none as long as it was not measured."""
    found: dict[float, list[float]] = {}
    for row in [] if rates is None else rates["rows"]:
        if row["operation"] == "attention":
            found.setdefault(float(row["length"]), []).append(row["flops_per_second"])
    return [[length, rounded(statistics.median(several))] for length, several in sorted(found.items())]


def fp32_shape(rates: Data | None, width: float) -> list[list[float]]:
    """(side, rate relative to that of `width`) of FP32 products; of that width alone as long as no other was measured.

    The level is fitted: a step runs hotter than a product by itself.
    """
    measured = {
        float(row["side"]): float(row["flops_per_second"])
        for row in ([] if rates is None else rates["rows"])
        if row["operation"] == "products, fp32"
    }
    if width not in measured:
        return [[width, 1.0]]
    return [[side, rate / measured[width]] for side, rate in sorted(measured.items())]


def norm_shares(norms: Data) -> list[list[float]]:
    """(width, floor / time) of LayerNorm, both directions together."""
    found = []
    for row in norms["rows"]:
        if row["implementation"] == "fusestep" and row["kind"] == "layer_norm":
            floor = row["forward_us"] * row["forward_of_floor"] + row["backward_us"] * row["backward_of_floor"]
            found.append([float(row["width"]), rounded(floor / (row["forward_us"] + row["backward_us"]))])
    return sorted(found)


def kernel_seconds(norms: Data) -> float:
    """What a forward norm takes beyond its bytes: the start and the end of a kernel."""
    rows = [row for row in norms["rows"] if row["implementation"] == "fusestep"]
    beyond = [float(row["forward_us"]) * (1 - float(row["forward_of_floor"])) for row in rows]
    return 1e-6 * statistics.median(beyond)


def adam_share(adam: Data) -> float:
    """Of the plain step: the median over the sets."""
    return statistics.median(float(row["of_floor"]) for row in adam["rows"] if row["implementation"] == "fusestep")


def hosts(fp8: Data, norms: Data, ladder: Data) -> dict[str, list[float | str]]:
    """Seconds a block, by form and precision: of the ladder's rungs where it has them, else the sum of its modules.

    A block's modules are four linear layers, two norms, and attention and the activation, which count as a linear layer
    each.
    """
    linear = {
        name: statistics.median(row["host_us"] for row in fp8["rows"] if row["implementation"] == name) * 1e-6
        for name in ("torch bf16", "delayed")
    }
    norm = statistics.median(row["host_us"] for row in norms["rows"] if row["implementation"] == "fusestep") * 1e-6
    plain = 6 * linear["torch bf16"] + 2 * norm
    found = {f"{form}/{precision}": plain for form in ("seed", "plain", "fused") for precision in ("fp32", "bf16")}
    found["fused/fp8"] = 4 * linear["delayed"] + 2 * linear["torch bf16"] + 2 * norm
    rungs: dict[str, float] = {}
    for rung in ladder["rungs"]:
        if rung["step_ms"] is not None and not rung["recipe"].get("graph", False):
            key = f"{rung['recipe']['form']}/{rung['recipe']['precision']}"
            rungs[key] = rung["host_ms"] * 1e-3 / ladder["plan"]["model"]["layers"]
    modules: dict[str, list[float | str]] = {key: [rounded(one), fp8["file"]] for key, one in found.items()}
    return modules | {key: [rounded(one), ladder["file"]] for key, one in rungs.items()}


def fit(data: Data, ladder: Data, rungs: dict[str, Data]) -> None:
    """Find the three figures that explain the ladder; the device's time is linear in the inverse of each."""
    shape, batch = plan_cases.shape_of(ladder["plan"]["model"]), ladder["plan"]["batch"]
    amp = plan_cases.of_recipe(rungs["amp"]["recipe"], shape, batch)
    named = {line.name: line.amount for line in duration(amp, of(data)).lines}
    passes = "norms, adds, activations, casts"
    device = duration(amp, of(data)).device
    data["figures"]["separate"]["value"] = rounded(
        named[passes] / (rungs["amp"]["device_ms"] * 1e-3 - (device - named[passes]))
    )
    plain = plan_cases.of_recipe(rungs["fused-norm"]["recipe"], shape, batch)
    shares = data["products"]["fp32"]
    once = duration(plain, of(data)).device
    data["products"]["fp32"] = [[side, 2 * share] for side, share in shares]
    at_one = 2 * (once - duration(plain, of(data)).device)
    level = at_one / (rungs["fused-norm"]["device_ms"] * 1e-3 - (once - at_one))
    data["products"]["fp32"] = [[side, rounded(level * share)] for side, share in shares]


def of(data: Data) -> Rates:
    return Rates.read(json.dumps(data))


def text(data: Data) -> str:
    return json.dumps(data, indent=2, ensure_ascii=False) + "\n"


def main() -> None:
    FILE.write_text(text(rates_data(figures.newest_results(figures.RESULTS))))


if __name__ == "__main__":
    main()
