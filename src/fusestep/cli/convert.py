"""`fusestep convert`: what `fusestep.convert` would do to a model of the user's, changing nothing."""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Annotated, cast, get_args

import typer

from fusestep.convert import convert
from fusestep.errors import UserError
from fusestep.factory import built_model
from fusestep.fp8.recipes import RecipeName, recipe_named


def command(
    model: Annotated[
        str,
        typer.Option(
            metavar="MODULE:FUNCTION", help="A function without arguments that makes the model: pkg.mod:factory."
        ),
    ],
    skip: Annotated[
        list[str] | None, typer.Option(help="Paths that stay as they are, as in '*.layers.0*'; repeat it for several.")
    ] = None,
    fp8: Annotated[
        str | None, typer.Option(metavar="RECIPE", help="Linear layers too: delayed, current, block or mxfp8.")
    ] = None,
    fp8_skip: Annotated[
        list[str] | None, typer.Option(help="Paths of linear layers that stay in the model's dtype; repeat it.")
    ] = None,
    fp8_keep_blocks: Annotated[
        tuple[int, int], typer.Option(metavar="FIRST LAST", help="Blocks at both ends that stay in the model's dtype.")
    ] = (0, 0),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the table.")] = False,
) -> None:
    """Show what would be swapped in a model, and why not the rest.

    Makes the model, tries each swap on random input, and prints the table that fusestep.convert(model) reports. Nothing
    is changed.
    """
    if fp8 is not None and fp8 not in get_args(RecipeName):
        raise UserError(f"--fp8 is {fp8!r}; choose one of {', '.join(get_args(RecipeName))}.")
    recipe = None if fp8 is None else recipe_named(cast(RecipeName, fp8))
    if min(fp8_keep_blocks) < 0:
        raise UserError(f"--fp8-keep-blocks is {' '.join(map(str, fp8_keep_blocks))}; pass two numbers of at least 0.")
    if recipe is None and (fp8_skip or any(fp8_keep_blocks)):
        option = "--fp8-skip" if fp8_skip else "--fp8-keep-blocks"
        raise UserError(f"{option} names linear layers that FP8 leaves, and --fp8 is not given; pass it too.")
    # What the user's code prints does not belong into the object.
    with contextlib.redirect_stdout(sys.stderr if as_json else sys.stdout):
        report = convert(
            built_model("--model", model),
            skip=skip or (),
            fp8=recipe,
            fp8_skip=fp8_skip or (),
            fp8_keep_blocks=fp8_keep_blocks,
            dry_run=True,
        )
    typer.echo(json.dumps(report.as_dict(), indent=2, allow_nan=False) if as_json else str(report))
