"""Write what the README, pages in docs/ and the plan's rates say of speed from the results files.

    python tools/figures.py

Reads the newest file of each part in benchmarks/results/ and replaces what stands between the two marks of the README
and of the pages on Apex's and Transformer Engine's names. docs/speed.md is made whole, docs/planning.md by other marks.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import drop_in_figures
import scaling_chart
import speed
from fusestep.ladder.words import bounded
from speed import table

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"
#: Held-out prompts of a seed, as benchmarks/learning.py has them.
PROMPTS = 64

BEGIN, END = "<!-- figures: written by tools/figures.py -->", "<!-- end of figures -->"


def newest_results(folder: Path) -> list[dict[str, Any]]:
    """The newest file of each name, after the date that it begins with, in the order of the names."""
    newest: dict[str, Path] = {}
    for path in sorted(folder.glob("*.json")):
        newest[re.sub(r"^\d{4}-\d{2}-\d{2}-", "", path.stem)] = path
    return [{"file": path.name, **json.loads(path.read_text())} for _, path in sorted(newest.items())]


def adam(result: dict[str, Any]) -> str:
    """A row for each set of parameters, plain and with clipping."""
    by_name = {(row["set"], row["implementation"]): row for row in result["rows"]}
    rows = []
    for name in dict.fromkeys(row["set"] for row in result["rows"]):
        for suffix, words in (("", ""), ("+clip", ", clipped by global norm")):
            ours, theirs = by_name[name, f"fusestep{suffix}"], by_name[name, f"torch fused{suffix}"]
            rows.append(
                [
                    f"{ours['parameters'] / 1e6:,.0f} M in {ours['tensors']} tensors{words}",
                    f"{ours['device_ms']:.3f} ms",
                    f"{theirs['device_ms']:.3f} ms",
                    f"{ours['of_floor']:.2f}",
                    f"{theirs['of_floor']:.2f}",
                    f"{ours['host_ms']:.2f} / {theirs['host_ms']:.2f}",
                ]
            )
    header = ["AdamW step, fp32", "FusedAdam", "torch, fused", "of floor", "torch's", "host, ms"]
    return table(header, rows)


def norms(result: dict[str, Any]) -> str:
    """A row for each norm and shape: forward, backward, and the host's time for both."""
    names = {"layer_norm": "LayerNorm", "rms_norm": "RMSNorm"}
    by_name = {(row["kind"], row["width"], row["implementation"]): row for row in result["rows"]}
    rows = []
    for kind in names:
        for count, width in dict.fromkeys((row["rows"], row["width"]) for row in result["rows"]):
            candidates = [by_name[kind, width, name] for name in ("fusestep", "torch", "torch.compile")]
            rows.append(
                [
                    f"{names[kind]} {count} × {width}",
                    *(" / ".join(f"{one[f'{way}_us']:.0f}" for one in candidates) for way in ("forward", "backward")),
                    f"{candidates[0]['forward_of_floor']:.2f} / {candidates[0]['backward_of_floor']:.2f}",
                    " / ".join(f"{one['host_us']:.0f}" for one in candidates),
                ]
            )
    return table(
        ["bf16, µs: ours / torch / torch.compile", "forward", "backward", "ours, of floor", "host, both"], rows
    )


def fp8(result: dict[str, Any]) -> str:
    """A row for each shape: device time of every recipe and of torch's bf16, and the host's time."""
    by_name = {(row["tokens"], row["inputs"], row["outputs"], row["implementation"]): row for row in result["rows"]}
    recipes = ("delayed", "current", "block")
    rows = []
    for shape in dict.fromkeys(name[:3] for name in by_name):
        ours, native = [by_name[*shape, recipe] for recipe in recipes], by_name[*shape, "torch bf16"]
        rows.append(
            [
                " × ".join(map(str, shape)),
                " / ".join(f"{one['device_ms']:.3f}" for one in ours),
                f"{native['device_ms']:.3f}",
                " / ".join(f"{one['of_floor']:.2f}" for one in ours),
                " / ".join(f"{one['host_us']:.0f}" for one in (*ours, native)),
            ]
        )
    return table(
        [
            "Linear, forward and backward: tokens × in × out",
            "FP8 delayed / current / block, ms",
            "torch bf16, ms",
            "times the floor",
            "host, µs: delayed / current / block / torch",
        ],
        rows,
    )


def learning(result: dict[str, Any]) -> str:
    """A row for each recipe: its worst loss on sequences, strides kept by all seeds together, text beside bf16."""
    rows = []
    for recipe in dict.fromkeys(row["recipe"] for row in result["rows"]):
        seeds = [row for row in result["rows"] if row["recipe"] == recipe]
        cells = [recipe]
        for step in (60, 100):
            kept, prompts = sum(one[f"kept_{step}"] for one in seeds), PROMPTS * len(seeds)
            cells.append(f"{max(one[f'loss_{step}'] for one in seeds):.3f}, {kept / prompts:.0%}")
        texts = [one for one in seeds if "text_loss" in one]
        relative = [one["text_over_bf16"] - 1 for one in texts]
        cells.append(" / ".join(f"{one['text_loss']:.3f}" for one in texts))
        cells.append(f"{min(relative):+.2%} to {max(relative):+.2%}" if relative else "")
        rows.append(cells)
    return table(
        [
            "mini GPT, three seeds",
            "60 steps on sequences: worst loss, strides kept",
            "100 steps",
            "text, 2000 steps: loss",
            "beside bf16",
        ],
        rows,
    )


def ladder(result: dict[str, Any]) -> str:
    """A row for each rung, its gain with the confidence interval, and for what was measured beside them.

    A step's wall time is the host's where it launches more slowly than the device runs, so the device's stands beside.
    """
    plan = result["plan"]
    first = result["rungs"][0]["name"]
    rows = []
    for rung in result["rungs"]:
        if rung["step_ms"] is None:
            rows.append([f"`{rung['name']}`", "did not run", "", "", "", ""])
            continue
        gain, low, high = (rung[f"gain_over_first{end}"] for end in ("", "_low", "_high"))
        claim = "" if gain is None else f"{gain:.2f}×" + ("" if low is None else f" ({low:.2f}–{high:.2f})")
        deviation = "" if rung["loss_deviation"] is None else f"{rung['loss_deviation']:.3%}"
        rows.append([f"`{rung['name']}`", *_costs(rung), claim, deviation])
    # Beside the rungs, and none of them: native PyTorch and other libraries.
    others = [other for other in result.get("contenders", ()) if other["step_ms"] is not None]
    rows += [[f"beside: {other['name']}", *_costs(other), "", ""] for other in others]
    model = plan["model"]
    heading = (
        f"`fusestep ladder --preset {plan['preset']}`: {plan['parameters'] / 1e6:.0f} M parameters, "
        f"{model['layers']} layers × {model['width']}, {plan['batch']} sequences of {model['context']}\n\n"
    )
    return heading + table(
        ["rung (cumulative)", "step", "of it the device", "peak memory", f"over {first}", "loss off by"], rows
    )


def _costs(measured: dict[str, Any]) -> list[str]:
    """Wall time and the device's time of a step, and the peak of memory."""
    device = measured["device_ms"]
    # Of a step that waits for the device itself no more is known; older results have the wall's time there.
    is_bound = measured.get("device_is_upper_bound", device == measured["step_ms"])
    return [
        f"{measured['step_ms']:.2f} ms",
        "" if device is None else bounded(f"{device:.2f} ms", is_bound),
        f"{measured['peak_bytes'] / 2**20:,.0f} MiB",
    ]


def loss(result: dict[str, Any]) -> str:
    """A row for each shape: ours, torch's and torch.compile's, time and memory."""
    by_name = {(row["tokens"], row["width"], row["vocabulary"], row["implementation"]): row for row in result["rows"]}
    rows = []
    for shape in dict.fromkeys(name[:3] for name in by_name):
        candidates = [by_name[*shape, name] for name in ("fusestep", "torch", "torch.compile")]
        rows.append(
            [
                " × ".join(map(str, shape)),
                " / ".join(f"{one['device_ms']:.2f}" for one in candidates),
                f"{candidates[0]['of_products']:.2f}",
                " / ".join(f"{one['extra_bytes'] / 1e9:.2f}" for one in candidates),
            ]
        )
    header = ["Linear + cross entropy, forward and backward: tokens × width × classes", "ours / torch / compile, ms"]
    return table([*header, "ours, times its three products", "extra memory, GB"], rows)


def steps(result: dict[str, Any]) -> str:
    """A row for each configuration of a whole step."""
    rows = [
        [
            f"{row['configuration']} ({row['weights']} weights)",
            f"{row['device_ms']:.2f} ms",
            "" if row["over_native"] is None else f"{row['over_native']:.2f}×",
            f"{row['peak_reserved_bytes'] / 1e9:.2f} GB",
        ]
        for row in result["rows"]
        if "failed" not in row
    ]
    words = next(row for row in result["rows"] if "failed" not in row)
    heading = f"step {words['model'].upper()}, one graph: {words['parameters'] / 1e6:.0f} M, {words['tokens']} tokens"
    return table([heading, "device time", "over native amp", "memory"], rows)


#: The parts that the README shows; docs/speed.md has all.
PARTS = {
    "adam": adam,
    "norms": norms,
    "fp8": fp8,
    "learning": learning,
    "loss": loss,
    **{f"steps-{model}": steps for model in "abcd"},
}


def figures(results: list[dict[str, Any]]) -> str:
    """The text between the marks."""
    parts = []
    for result in results:
        show = ladder if "rungs" in result else PARTS.get(result["part"])
        if show is not None:
            parts.append(f"{show(result)}\n\n{speed.source(result, 'benchmarks/results')}")
    return "\n\n".join(parts)


def with_figures(text: str, shown: str) -> str:
    """A page with today's figures between its marks."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n{shown}\n\n{END}{after}"


def marked_pages(results: list[dict[str, Any]]) -> dict[Path, str]:
    """What stands between the marks of each page that has them."""
    drop_in = {drop_in_figures.DOCS / page: drop_in_figures.figures(page, results) for page in drop_in_figures.TABLES}
    return {README: figures(results), **drop_in}


def main() -> None:
    # Both read the results as this module does.
    import plan_page
    import plan_rates

    results = newest_results(RESULTS)
    plan_rates.main()
    plan_page.main()
    for path, shown in marked_pages(results).items():
        path.write_text(with_figures(path.read_text(), shown))
    speed.PAGE.write_text(speed.page(results, speed.explained()))
    grown = speed.of_parts(results).get("scaling")
    if grown is not None:
        scaling_chart.draw(grown, speed.PAGE.parent / speed.CHART)


if __name__ == "__main__":
    main()
