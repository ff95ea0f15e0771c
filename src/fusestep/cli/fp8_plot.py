"""The picture of `fusestep inspect`: scale and amax of every tensor over the steps of a run."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fusestep import durable
from fusestep.errors import UserError


def draw(rows: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Draw the rows of fp8.jsonl into a PNG file: a line for each tensor, a colour for each kind of tensor.

    Raises: UserError if the file cannot be written there.
    """
    obstacle = durable.obstacle(file.parent)
    if obstacle is not None:
        raise UserError(
            f"--plot {file} cannot be written: {obstacle.absolute()} is not a folder that you may write to; "
            "name another file."
        )
    lines: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        lines.setdefault((row["module"], row["tensor"]), []).append(row)
    kinds = list(dict.fromkeys(f"{module.rpartition('.')[2]}: {tensor}" for module, tensor in lines))
    # A figure of its own, without pyplot: no window, no state that outlives it.
    figure = Figure(figsize=(12, 8), layout="constrained")
    for axes, value in zip(figure.subplots(2, 1, sharex=True), ("scale", "amax"), strict=True):
        labelled: set[str] = set()
        for (module, tensor), points in lines.items():
            kind = f"{module.rpartition('.')[2]}: {tensor}"
            axes.plot(
                [point["step"] for point in points],
                # What is not positive has no logarithm: a tensor that was never cast leaves a gap.
                [point[value] if point[value] and point[value] > 0 else float("nan") for point in points],
                color=f"C{kinds.index(kind) % 10}",
                linestyle=("-", "--")[kinds.index(kind) // 10 % 2],
                marker=".",
                linewidth=1,
                label=None if kind in labelled else kind,
            )
            labelled.add(kind)
        axes.set_yscale("log")
        axes.set_ylabel(value)
        axes.grid(alpha=0.3)
    figure.axes[0].set_title("FP8 scaling, a line for each tensor")
    figure.axes[1].set_xlabel("step")
    figure.axes[1].xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with durable.replacing(file) as out:
            out.write(picture.getvalue())
    except OSError as error:
        raise UserError(f"--plot {file} cannot be written ({error.strerror}); name another file.") from error
