"""docs/measured.md, made from the results files: every table of what was measured, a section for each part.

Beside the targets (speed.py) these have all of what a file holds: each recipe, both natives, the host's time.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import speed
from fusestep.ladder.words import bounded
from speed import table

PAGE = Path(__file__).resolve().parents[1] / "docs" / "measured.md"
#: Held-out prompts of a seed, as benchmarks/learning.py has them.
PROMPTS = 64

HEAD = """\
# Measured: all tables

This page is written by `make figures` from the files in `benchmarks/results/`; [speed.md](speed.md) sets them beside
targets and other libraries, and says why where one is missed. [measuring.md](measuring.md) tells how a figure comes
about.

A rung's step is wall time; the time of a kernel, or of a whole step in one graph, is the device's alone, and "of floor"
is the share of the speed at which the same bytes could be copied, measured in the same run. The host's time to enqueue
a call was noisy on these machines: a norm's does not depend on its width, yet rows of one module differ by half. Where
a rung's step takes much longer than the device's part of it, it waits for the host, and what it spares the device shows
with `graph`. An FP8 layer's floor is its three products by themselves plus the bytes of its casts.
"""


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


#: The parts that are shown, in this order, under their titles; ladders come first.
PARTS: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    **{f"steps-{model}": (f"Whole step {model.upper()}", steps) for model in "abcd"},
    "learning": ("What FP8 learns", learning),
    "adam": ("AdamW", adam),
    "norms": ("Norms", norms),
    "fp8": ("FP8 linear layers", fp8),
    "loss": ("Linear + cross entropy", loss),
}


def page(results: list[dict[str, Any]]) -> str:
    """The whole page."""
    shown = [(f"Ladder of {one['plan']['preset']}", ladder(one), one) for one in results if "rungs" in one]
    shown += [
        (title, show(one), one) for part, (title, show) in PARTS.items() for one in results if one.get("part") == part
    ]
    return (
        "\n\n".join((HEAD.strip(), *(f"## {title}\n\n{text}\n\n{speed.source(one)}" for title, text, one in shown)))
        + "\n"
    )
