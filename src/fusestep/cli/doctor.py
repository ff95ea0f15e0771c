"""`fusestep doctor`: the report of `fusestep.doctor`, as a page or as JSON, and an exit status for scripts."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console

import fusestep
from fusestep.errors import UserError
from fusestep.examine import requirement_names


def command(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the page.")] = False,
    require: Annotated[
        str, typer.Option(metavar="NAME,…", help="Exit with status 1, and the reason, unless each of these holds.")
    ] = "",
    distributed: Annotated[
        bool, typer.Option("--distributed", help="Under torchrun: prove that all ranks reach each other, and how fast.")
    ] = False,
    device: Annotated[
        str | None, typer.Option(help="With --distributed: auto, cpu or cuda. [default: auto]", show_default=False)
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(
            help="With --distributed: seconds that no rank may be slow or silent; then one is named. [default: 60]",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Show what this machine can do, and prove it.

    Names the devices, versions and tools, and for every op the implementation that this machine gets and why. Each op
    is run on each device and compared with its reference; the exit status is 1 if one disagrees.

    --require knows cuda, triton, bf16, fp8, compiler, headers, cache, and every op by its name: an op is required to
    run its Triton kernel.

    --distributed, under torchrun, tries every collective between all ranks instead, with values that are checked, and
    shows bandwidth and latency. A rank that is dead or slow is named; the exit status is 1 where a value is wrong.
    """
    if distributed:
        if require:
            raise UserError("--require and --distributed ask for different things; run fusestep doctor twice.")
        _prove_ranks("auto" if device is None else device, 60.0 if timeout is None else timeout, as_json)
        return
    if device is not None or timeout is not None:
        raise UserError("--device and --timeout are of --distributed; pass it too, or leave them out.")
    required = [name for name in (part.strip() for part in require.split(",")) if name]
    known = requirement_names()
    for name in required:
        if name not in known:
            raise UserError(f"--require {name!r} is unknown; known are {', '.join(known)}.")
    with Console(stderr=True).status("looking") as status:
        report = fusestep.doctor(progress=lambda what: status.update(f"proving {what}"))
    typer.echo(json.dumps(report.as_dict(), indent=2) if as_json else str(report))
    unmet = [name for name in required if not report.requirements[name].ok]
    for name in unmet:
        typer.echo(f"fusestep doctor: {name} is required: {report.requirements[name].reason}", err=True)
    if unmet or not report.ok:
        raise typer.Exit(1)


def _prove_ranks(device: str, timeout: float, as_json: bool) -> None:
    """`--distributed`: rank 0 shows the report."""
    # What needs torch.distributed is not imported for the page of one machine.
    from fusestep import hardware
    from fusestep.cli.several import as_one_of_several
    from fusestep.distributed.launch import join, launched_rank, launched_size
    from fusestep.distributed.probe import RanksReport, probe
    from fusestep.train.config import LONGEST_TIMEOUT, SHORTEST_TIMEOUT

    def planned() -> str:
        if not SHORTEST_TIMEOUT <= timeout <= LONGEST_TIMEOUT:
            raise UserError(f"--timeout is {timeout:g}; pass {SHORTEST_TIMEOUT:g} to {LONGEST_TIMEOUT:,.0f} seconds.")
        return hardware.device_named(device).type

    def proved(device_type: str) -> RanksReport:
        with join(device_type, timeout) as world:
            return probe(world)

    is_one_of_several = launched_size() > 1
    report = as_one_of_several("fusestep doctor", planned, proved) if is_one_of_several else proved(planned())
    if launched_rank() == 0:
        typer.echo(json.dumps(report.as_dict(), indent=2) if as_json else str(report))
    if not report.ok:
        raise typer.Exit(1)
