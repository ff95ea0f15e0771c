"""`fusestep ladder --parallel …` under torchrun: rows over ranks instead of rungs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import typer

from fusestep import hardware
from fusestep.cli.several import as_one_of_several
from fusestep.distributed.launch import join, launched_rank, launched_size
from fusestep.distributed.mesh import Parallel
from fusestep.errors import UserError
from fusestep.ladder.plan import BATCH
from fusestep.ladder.report import check_place
from fusestep.ladder.scaling import CSV, JSON, Scaling, ScalingRow, check, scaling
from fusestep.models import PRESETS
from fusestep.tables import counted, table

#: Timed steps a round, and seconds that no rank may be slow or silent.
STEPS, TIMEOUT = {"cuda": 20, "cpu": 3}, 600.0


def measure_scaling(
    *,
    parallel: str,
    preset: str,
    batch: int | None,
    steps: int | None,
    device: str,
    out: Path,
    as_json: bool,
    others: list[str],
) -> None:
    """Measure, show and keep the rows.

    Args: others: options that were given and that say nothing here.
    Raises: UserError for what cannot be measured.
    """

    def planned() -> tuple[Parallel, str, str, int, int]:
        if others:
            raise UserError(f"{others[0]} is about rungs, and --parallel about ranks; leave one of them out.")
        kind = hardware.device_named(device).type
        name = ("mini" if kind == "cuda" else "tiny") if preset == "auto" else preset
        if name not in PRESETS:
            raise UserError(f"--preset is {preset!r}; choose one of auto, {', '.join(PRESETS)}.")
        wanted = Parallel.of(parallel)
        sequences, timed = batch or BATCH[name], steps or STEPS[kind]
        check(wanted, sequences, timed)
        wanted.data_ranks(launched_size())
        if any((out / file).exists() for file in (JSON, CSV)):
            raise UserError(f"{out} holds rows over ranks already; choose another --out.")
        return wanted, kind, name, sequences, timed

    def work(plan: tuple[Parallel, str, str, int, int]) -> Scaling:
        wanted, kind, name, sequences, timed = plan
        with join(kind, TIMEOUT) as world:
            # The folder is rank 0's, and not of every machine.
            world.from_first(lambda: check_place(out))
            found = scaling(
                world,
                wanted,
                parallel,
                PRESETS[name],
                batch=sequences,
                steps=timed,
                say=_say if world.is_first else _hush,
            )
            # Those who wait hear of it where the disk is full.
            files = world.from_first(lambda: [str(path) for path in found.save(out)])
        if launched_rank() == 0:
            typer.echo(json.dumps(found.as_dict(), indent=1) if as_json else page(found))
            typer.echo(f"kept in {', '.join(files)}", err=as_json)
        return found

    found = as_one_of_several("fusestep ladder", planned, work) if launched_size() > 1 else work(planned())
    if any(row.failure is not None for row in found.rows):
        raise typer.Exit(1)


def page(found: Scaling) -> str:
    """The rows, as a person reads them."""
    rows: list[tuple[str, ...]] = [
        ("", "ranks", "batch", "step", "tokens/s", "efficiency", "communication", "first loss")
    ]
    rows += [_cells(row) for row in found.rows]
    lines = [f"--parallel {found.parallel}, {found.precision}", "", table(rows, indent="  "), ""]
    lines += [
        f"{row.kind}, {counted(row.ranks, 'rank')}: no times, since {row.failure}" for row in found.rows if row.failure
    ]
    return "\n".join([*lines, *(f"left out: {words}" for words in found.left_out)])


def _cells(row: ScalingRow) -> tuple[str, ...]:
    def told(value: float | None, form: str) -> str:
        return "–" if value is None else format(value, form)

    step = "–" if row.ms is None else f"{row.ms:.2f} ms ({row.low:.2f}–{row.high:.2f})"
    shares = told(row.efficiency, ".0%"), told(row.communication, ".0%")
    return (
        row.kind,
        str(row.ranks),
        str(row.batch),
        step,
        told(row.tokens_per_second, ",.0f"),
        *shares,
        f"{row.loss:.4f}",
    )


def _say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)  # noqa: T201


def _hush(_words: str) -> None:
    """The other ranks say nothing."""
