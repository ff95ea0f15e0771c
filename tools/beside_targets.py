"""Sections of docs/speed.md for measurements without a row among the targets, and which of their rows owe a reason."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

Data = dict[str, Any]

#: What a way to spread a model may cost in a world of one, where nothing is sent, over the plain step.
OVER_PLAIN = 1.02

#: What a piece may take the device, over the fastest that was timed beside it, and the host, over torch's.
OVER_FASTEST, OVER_TORCHS_HOST = 1.03, 1.5

PIECES = f"""\
Operations without a target of their own. The aim is at most {OVER_FASTEST} of the fastest beside ours on the device,
and at most {OVER_TORCHS_HOST} of torch's own on the host, which launches one kernel at a time."""

WORLD = f"""\
What it costs to spread a model over ranks where there is one rank, so that all code runs and nothing is sent: whole
steps of models A and B, captured, with FP32 weights, in turns with the plain step. The aim is at most {OVER_PLAIN} of
the plain step. "ddp", "fsdp" and "tp=1" are what the trainer does for one rank. "Wrapped" and "sharded" replicate and
shard on purpose, which the trainer does not do for one rank: they tell what DistributedDataParallel and FSDP2 copy on
each of several."""


@dataclasses.dataclass(frozen=True)
class Section:
    """A heading, the part that it shows, words before the table, and the table."""

    title: str
    part: str
    header: list[str]
    rows: list[list[str]]
    words: str = ""


def sections(by_part: dict[str, Data]) -> Iterator[Section]:
    """What was measured."""
    for part, make in (("world", _world), ("mlp", _mlp), ("pieces", _pieces), ("convert", _convert)):
        if part in by_part:
            yield make(by_part[part]["rows"])


def owing(by_part: Mapping[str, Data]) -> dict[str, tuple[str, str]]:
    """Rows beside the targets that need a reason, by name: what they are called and by how much they are worse.

    Whole steps of ours that take longer than native PyTorch's, and steps in a world of one and pieces beyond the aim.
    """
    found: dict[str, tuple[str, str]] = {}
    for part, result in sorted(by_part.items()):
        if part == "pieces":
            found |= _slow_pieces(result["rows"])
        for row in result["rows"] if part == "world" or part.startswith("steps-") else []:
            if "failed" in row:
                continue
            if part == "world" and row["over_plain"] > OVER_PLAIN:
                label = f"{row['configuration']}, {row['precision']}, {row['path']}"
                name = f"world/{row['configuration']}/{row['precision']}/{row['path']}"
                found[name] = (label, f"{row['over_plain']:.2f} times the plain step")
            if part != "world" and row["configuration"].startswith("fusestep") and (row["over_native"] or 1) < 1:
                label = f"{row['model'].upper()}: {row['configuration']}, {row['weights']} weights"
                found[f"{part}/{row['configuration']}"] = (label, f"{1 / row['over_native'] - 1:.1%} over native, amp")
    return found


def _slow_pieces(rows: list[Data]) -> dict[str, tuple[str, str]]:
    found: dict[str, tuple[str, str]] = {}
    by_case: dict[tuple[str, str], dict[str, Data]] = {}
    for row in rows:
        if "failed" not in row:
            by_case.setdefault((row["operation"], row["shape"]), {})[row["implementation"]] = row
    for (operation, shape), case in by_case.items():
        label, ours = f"{operation} {shape.replace('x', '×')}", case.pop("fusestep", None)
        if ours is None or not case:
            continue
        fastest = min(case, key=lambda name: case[name]["device_us"])
        ratio = ours["device_us"] / case[fastest]["device_us"]
        if ratio > OVER_FASTEST:
            found[f"pieces/{operation}/{shape}/device"] = (label, f"{ratio:.2f} times {fastest}")
        if "torch" in case and ours["host_us"] > OVER_TORCHS_HOST * case["torch"]["host_us"]:
            ratio = ours["host_us"] / case["torch"]["host_us"]
            found[f"pieces/{operation}/{shape}/host"] = (f"{label}, host", f"{ratio:.2f} times torch's")
    return found


def _world(rows: list[Data]) -> Section:
    lines = []
    for row in rows:
        name = f"{row['configuration']}, {row['precision']}, {row['path']}"
        if "failed" in row:
            lines.append([name, "failed", "", "", "", ""])
            continue
        low, high = row["device_ms_quartiles"]
        verdict = "met" if row["over_plain"] <= OVER_PLAIN else f"missed: by {row['over_plain'] / OVER_PLAIN - 1:.1%}"
        times = [f"{row['device_ms']:.2f} ({low:.2f}–{high:.2f})", f"{row['plain_ms']:.2f}"]
        lines.append([name, *times, f"{row['over_plain']:.3f}", f"{row['loss']:.4f}", verdict])
    header = ["model, precision, path", "step, ms (quartiles)", "plain, ms", "over plain", "loss", ""]
    return Section("A world of one", "world", header, lines, WORLD)


def _mlp(rows: list[Data]) -> Section:
    lines = [
        [
            f"{row['tokens']} × {row['width']} × {row['hidden']} {row['activation']}, {row['implementation']}",
            f"{row['device_ms']:.3f}",
            f"{row['products_ms']:.3f}",
            f"{row['over_torch']:.2f}×",
        ]
        for row in rows
    ]
    header = ["tokens × width × features, implementation", "ms", "its products alone, ms", "over torch"]
    return Section("LayerNormMLP, forward and backward", "mlp", header, lines)


def _pieces(rows: list[Data]) -> Section:
    lines = [
        [
            f"{row['operation']} {row['shape'].replace('x', '×')}, {row['implementation']}",
            *(["failed", "", "", ""] if "failed" in row else _piece(row)),
        ]
        for row in rows
    ]
    title = "Rotary embedding, cross entropy of logits and embedding, forward and backward"
    return Section(title, "pieces", ["operation", "µs", "floor, µs", "of floor", "host, µs"], lines, PIECES)


def _piece(row: Data) -> list[str]:
    host = "" if row["host_us"] is None else f"{row['host_us']:.0f}"
    return [f"{row['device_us']:.0f}", f"{row['floor_us']:.0f}", f"{row['of_floor']:.2f}", host]


def _convert(rows: list[Data]) -> Section:
    lines = []
    for row in rows:
        name = f"{row['model']}, {row['configuration']}"
        if "failed" in row:
            lines.append([name, "failed", "", "", "", ""])
            continue
        name += f" ({row['fallback']})" if row.get("fallback") else ""
        times = [f"{row[field]:.2f}" for field in ("device_ms", "wall_ms")]
        memory = "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e9:.2f} GB"
        lines.append([name, *times, f"{row['wall_over_as_it_is']:.2f}×", memory, f"{row['loss']:.4f}"])
    words = (
        "Training steps of models that `fusestep.convert` took in, with FP32 weights under torch.autocast in BF16: as "
        "they are with torch's fused AdamW, then converted with FusedAdam, one launch at a time and as one graph by "
        "TrainStep. Where the host is slower than the device, its time is what a loop takes."
    )
    header = ["model", "device, ms", "in a loop, ms", "over as it is", "peak memory", "loss"]
    return Section("Converted models", "convert", header, lines, words)
