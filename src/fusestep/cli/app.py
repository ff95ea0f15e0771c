"""The commands and their one-line summaries; a command's module is imported only when it is called."""

from __future__ import annotations

import functools
import importlib
import signal
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from fusestep.cli.errors import at_interrupt, exit_status

COMMANDS = {
    "doctor": "Show what this machine can do, and prove it.",
    "train": "Train a GPT on text, token files or arithmetic sequences.",
    "generate": "Continue prompts with a trained model.",
    "inspect": "Show the FP8 scales and amaxes of a run.",
    "convert": "Show what would be swapped in a model, and why.",
    "ladder": "Measure what each speed-up buys, rung by rung.",
    "plan": "Estimate memory, communication and step time of a run.",
    "run": "Run a script whose apex and transformer_engine are fusestep's.",
}


def run(arguments: list[str]) -> None:
    """Parse `arguments` and run the command that they name; always leaves through SystemExit."""
    build()(args=arguments, prog_name="fusestep")


def build() -> typer.Typer:
    """The application, with a stand-in for each command that holds its name and summary."""
    app = typer.Typer(
        cls=_Commands,
        help="Train transformers as fast as the chip allows, and know what each speed-up bought.",
        no_args_is_help=True,
        add_completion=False,
        # Plain help reads the same in a terminal, a pipe and a narrow window; defects keep Python's own traceback.
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["--help", "-h"]},
    )
    app.callback()(_options)
    for name, summary in COMMANDS.items():
        app.command(name, help=summary)(_stand_in)
    return app


class _Commands(TyperGroup):
    """Replaces the stand-in of the called command by the command itself."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, _, rest = super().resolve_command(ctx, args)
        return name, _load(str(name)), rest


def _load(name: str) -> Any:
    """Import the module of a command, and let the command end with the exit status of what stopped it."""
    function: Callable[..., None] = importlib.import_module(f"fusestep.cli.{name}").command

    @functools.wraps(function)
    def guarded(*args: Any, **options: Any) -> None:
        with at_interrupt(signal.default_int_handler):
            raise typer.Exit(exit_status(f"fusestep {name}", lambda: function(*args, **options)))

    single = typer.Typer(
        add_completion=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["--help", "-h"]},
    )
    single.command(name)(guarded)
    return typer.main.get_command(single)


def _stand_in() -> None:
    """Never called: `_Commands` replaces it."""


def _print_version(wanted: bool) -> None:
    if wanted:
        import fusestep

        typer.echo(f"fusestep {fusestep.__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """The options of `fusestep` itself."""
