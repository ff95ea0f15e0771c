"""The chart of docs/speed.md: a step's time and its share of the floor, against tokens, width and depth."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

COLOURS = {"fusestep bf16": "#4c72b0", "fusestep fp8 delayed": "#c44e52"}
WORDS = {"tokens": "tokens a step", "width": "width", "depth": "layers"}


def draw(result: dict[str, Any], file: Path) -> None:
    """Write the chart of a results file of the part scaling as SVG, which names that file in its description."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    drawn = io.StringIO()
    # Text as text keeps the file small; ids that are the same in every process keep its history readable.
    with plt.rc_context({"svg.fonttype": "none", "svg.hashsalt": "fusestep"}):
        figure, axes = plt.subplots(2, 3, figsize=(10, 5.5), sharex="col", layout="constrained")
        for column, (axis, words) in enumerate(WORDS.items()):
            for name, colour in COLOURS.items():
                rows = [row for row in result["rows"] if (row["axis"], row["configuration"]) == (axis, name)]
                sizes = [row["size"] for row in rows]
                label = name.removeprefix("fusestep ")
                times, shares = axes[0, column], axes[1, column]
                times.plot(sizes, [row["device_ms"] for row in rows], "o-", color=colour, label=label)
                times.plot(sizes, [row["floor_ms"] for row in rows], ":", color=colour, label=f"floor, {label}")
                shares.plot(sizes, [row["of_floor"] for row in rows], "o-", color=colour)
                shares.set(ylim=(0, 1), xlabel=words, xscale="log")
                times.set(yscale="log", xscale="log")
                shares.set_xticks(sizes, [f"{size:,}" for size in sizes])
                shares.minorticks_off()
        axes[0, 0].set_ylabel("device time of a step, ms")
        axes[1, 0].set_ylabel("share of the floor")
        axes[0, 0].legend(frameon=False, fontsize="small")
        figure.savefig(drawn, format="svg", metadata={"Date": None, "Description": f"drawn from {result['file']}"})
        plt.close(figure)
    file.write_text(with_numbered_clips(drawn.getvalue()))


def with_numbered_clips(svg: str) -> str:
    """A drawing whose clip paths are named by their order.

    Matplotlib names them by a hash of unrounded coordinates, whose last bits differ from one processor to the next.
    """
    for number, name in enumerate(re.findall(r'<clipPath id="(\w+)">', svg)):
        svg = svg.replace(f'"{name}"', f'"clip-{number}"').replace(f"#{name})", f"#clip-{number})")
    return svg
