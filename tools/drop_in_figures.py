"""What programs for Apex and Transformer Engine printed under `fusestep run`, for the pages on those names.

    python tools/figures.py

writes these tables between the pages' marks, from the newest results of `python -m benchmarks drop_in`.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from speed import source, table

Data = dict[str, Any]
DOCS = Path(__file__).resolve().parents[1] / "docs"

#: What stands beside each page's programs, of what the results know.
BESIDE = {
    "apex.md": ("torch Adam, FP32", "Apex FusedAdam and FusedLayerNorm, autocast BF16"),
    "transformer-engine.md": ("Transformer Engine FP8, eager", "Transformer Engine FP8, its graphs"),
}
NATIVE = "torch.compile, autocast BF16, one graph"


def apex(result: Data) -> str:
    """A row for each rung of Apex's program."""
    rows = [row for row in result["rows"] if row["program"].startswith("apex") and "failed" not in row]
    lines = [
        [
            f"`{row['configuration']}`",
            _milliseconds(row["fp32_ms"] if row["bf16_ms"] is None else row["bf16_ms"]),
            f"{row['loss']:.3f}",
            f"{row['peak_gb']:.2f} GB",
        ]
        for row in rows
    ]
    header = ["what the program prints, under `fusestep run`", "a step", "its last loss", "peak memory"]
    return table(header, [*lines, *([f"beside: {name}", time, "", ""] for name, time in _beside("apex.md", rows))])


def transformer_engine(result: Data) -> str:
    """The program as it is and with the layout named: steps, losses, and the strides that it generates."""
    rows = [row for row in result["rows"] if row["configuration"] in ("sbhd", "bshd") and "failed" not in row]
    lines = [
        [
            "as it is" if row["configuration"] == "sbhd" else f"`--te-layout {row['configuration']}`",
            _milliseconds(row["bf16_ms"]),
            _milliseconds(row["fp8_ms"]),
            " / ".join(f"{loss:.2f}" for loss in row["losses"].values()),
            in_runs(row["strides"]),
        ]
        for row in rows
    ]
    lines += [
        [f"beside: {name}", *(["", time] if "FP8" in name else [time, ""]), "", ""]
        for name, time in _beside("transformer-engine.md", rows)
    ]
    steps = " / ".join(rows[0]["losses"]) if rows else ""
    header = ["under `fusestep run`", "a step in BF16", "in FP8", f"loss after {steps} steps in FP8", "strides"]
    return table(header, lines)


def in_runs(strides: list[int] | None) -> str:
    """Strides one after the other, equal ones counted. What is asked for is the first one throughout."""
    if strides is None:
        return ""
    runs = [(stride, len(list(group))) for stride, group in itertools.groupby(strides)]
    shown = [f"{stride}" if count == 1 else f"{stride} ({count} times)" for stride, count in runs[:4]]
    return ", ".join(shown) + (", …" if len(runs) > 4 else "")


def _beside(page: str, rows: list[Data]) -> list[tuple[str, str]]:
    """What such steps took elsewhere."""
    known = rows[0]["beside"] if rows else {}
    return [(name, _milliseconds(known[name])) for name in (*BESIDE[page], NATIVE) if name in known]


def _milliseconds(value: float | None) -> str:
    return "" if value is None else f"{value:.1f} ms"


TABLES = {"apex.md": apex, "transformer-engine.md": transformer_engine}


def figures(page: str, results: list[Data]) -> str:
    """What stands between a page's marks."""
    result = next((one for one in results if one.get("part") == "drop_in"), None)
    return "" if result is None else f"{TABLES[page](result)}\n\n{source(result)}"
