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
) -> None:
    """Show what this machine can do, and prove it.

    Names the devices, versions and tools, and for every op the implementation that this machine gets and why. Each op
    is run on each device and compared with its reference; the exit status is 1 if one disagrees.

    --require knows cuda, triton, bf16, fp8, compiler, headers, cache, and every op by its name: an op is required to
    run its Triton kernel.
    """
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
