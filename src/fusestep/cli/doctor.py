"""`fusestep doctor`."""

from __future__ import annotations

import typer

from fusestep import hardware


def command() -> None:
    """Show what this machine can do, and prove every kernel that it runs."""
    typer.echo(hardware.cuda_support().reason)
