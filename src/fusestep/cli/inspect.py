"""`fusestep inspect`: the FP8 state of a checkpoint as a table, as JSON, or over the steps of its run as a picture."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from fusestep.errors import UserError
from fusestep.fp8.statistics import TensorStatistics
from fusestep.tables import counted, table
from fusestep.train.inspection import Inspection, inspect, statistics_of_run

SCHEMA = 1


def command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder, or one of its checkpoints.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the table.")] = False,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE.png", help="Also draw scale and amax over the steps; needs a run with --fp8-stats."),
    ] = None,
) -> None:
    """Show what delayed FP8 scaling has seen in a run.

    For every tensor that a module casts: its format; its scale; the newest, largest and smallest amax of its history
    and how much of that is filled; the shares of its elements that were saturated and flushed to zero, where the run
    counted them (--fp8-stats); and how many steps had an amax that was not finite, which kept the old scale.
    """
    if plot is not None and plot.suffix != ".png":
        raise UserError(f"--plot is {plot}; name a file that ends in .png.")
    found = inspect(run)
    if plot is not None:
        # Inside, since it needs an extra.
        from fusestep.cli.fp8_plot import draw

        draw(statistics_of_run(found.checkpoint), plot)
    typer.echo(json.dumps(_as_dict(found)) if as_json else _as_text(found))
    if plot is not None:
        typer.echo(f"drawn in {plot}", err=as_json)


def _as_dict(found: Inspection) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "checkpoint": str(found.checkpoint.path),
        "step": found.checkpoint.step,
        "recipe": found.checkpoint.config.get("recipe"),
        "fp8_format": found.checkpoint.config.get("fp8_format"),
        "history_length": found.history_length,
        "tensors": [asdict(row) for row in found.tensors],
    }


def _as_text(found: Inspection) -> str:
    is_counted = any(row.saturated is not None for row in found.tensors)
    title = ("module", "tensor", "format", "scale", "amax", "largest", "smallest", "filled", "refused")
    rows = [title + ("saturated", "flushed") * is_counted]
    rows += [_cells(row, found.history_length, is_counted=is_counted) for row in found.tensors]
    lines = [
        f"{found.checkpoint.path}: step {found.checkpoint.step}, delayed scaling, "
        f"amaxes of the last {counted(found.history_length, 'step')}",
        "",
        table(rows),
        "",
        "scale multiplies a tensor before the cast; amax is the newest, largest and smallest are of the history.",
    ]
    if not is_counted:
        lines.append("Shares that were saturated and flushed to zero are counted by fusestep train --fp8-stats.")
    return "\n".join(lines)


def _cells(row: TensorStatistics, length: int, *, is_counted: bool) -> tuple[str, ...]:
    return (
        row.module,
        row.tensor,
        row.format,
        f"{row.scale:.4g}",
        f"{row.amax:.4g}",
        f"{max(row.history, default=0.0):.4g}",
        f"{min(row.history, default=0.0):.4g}",
        f"{len(row.history)}/{length}",
        str(row.refused),
        *((_share(row.saturated), _share(row.flushed)) if is_counted else ()),
    )


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.4%}"
