"""`fusestep ladder`."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Annotated, cast, get_args

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from fusestep.cli.errors import at_signal
from fusestep.distributed.launch import launched_size
from fusestep.errors import UserError
from fusestep.fp8.recipes import AMAX_HISTORY, FormatName, RecipeName
from fusestep.ladder import Ladder, LadderConfig, journal, ladder, report
from fusestep.ladder.jobs import Progress as Report
from fusestep.ladder.plan import BATCH, plan
from fusestep.ladder.table import show
from fusestep.models import PRESETS

#: A table in a pipe is as wide as it needs to be, not as a terminal that is not there.
_PIPE_WIDTH = 180


def command(
    preset: Annotated[
        str, typer.Option(help=f"auto (mini on a GPU, tiny on a CPU), {', '.join(PRESETS)}: the built-in GPT.")
    ] = "auto",
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION",
            help="A model of your own in place of a preset: pkg.mod:factory. See docs/ladder-model.md.",
        ),
    ] = None,
    rungs: Annotated[
        str,
        typer.Option(
            help="Which rungs: names, numbers and ranges, as in adam,amp or 1-8; auto is all, without fp8 where it "
            "would be emulated and graph where there is no GPU."
        ),
    ] = "auto",
    base: Annotated[
        str | None,
        typer.Option(help="The rung that all are compared with; those before it are left out. [default: adam]"),
    ] = None,
    natives: Annotated[
        str,
        typer.Option(
            help="The best of native PyTorch beside the rungs: auto, none, or of native-fp32,native-amp,native-bf16."
        ),
    ] = "auto",
    compiled: Annotated[
        bool | None,
        typer.Option("--compile/--no-compile", help="Whether natives go through torch.compile; on a GPU they do."),
    ] = None,
    peers: Annotated[
        str, typer.Option(help="Other libraries beside the rungs: of apex,te,liger,torchao,quack, or all.")
    ] = "",
    data: Annotated[
        str,
        typer.Option(
            help="What is timed on: synthetic, random (ids of the whole vocabulary), text:PATH or tokens:PATH; auto is "
            "random for a large vocabulary."
        ),
    ] = "auto",
    rounds: Annotated[
        int | None,
        typer.Option(help="Times that each rung is timed, in a new process each. [default: 5 on a GPU, 3 on a CPU]"),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            help="Timed steps a process, rounded up to a multiple of 12. [default: up to 36 on a GPU, 24 on a CPU, "
            "12 of long ones]"
        ),
    ] = None,
    gate_steps: Annotated[
        int | None, typer.Option(help="Steps of the correctness gate. [default: 200 on a GPU, 40 on a CPU]")
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(
            help=f"Sequences a step. [default: {', '.join(f'{size} for {name}' for name, size in BATCH.items())}]"
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    seed: Annotated[int, typer.Option(help="Of weights, data and the order of the rungs.")] = 0,
    recipe: Annotated[str, typer.Option(help="Of the rung fp8: delayed, current, block or mxfp8.")] = "delayed",
    fp8_format: Annotated[str, typer.Option(help="Of the rung fp8: auto, hybrid or e4m3.")] = "auto",
    amax_history: Annotated[
        int | None,
        typer.Option(help=f"Of the rung fp8: steps that delayed scaling remembers. [default: {AMAX_HISTORY}]"),
    ] = None,
    fp8_stats: Annotated[
        bool, typer.Option("--fp8-stats", help="Count what the rung fp8 saturates during its gate; shows the worst.")
    ] = False,
    parallel: Annotated[
        str,
        typer.Option(
            help="Under torchrun: rows for 1, 2, 4 … ranks in the place of rungs, strong and weak, that share the work "
            "as ddp, fsdp or tp=N."
        ),
    ] = "none",
    out: Annotated[
        str, typer.Option(help="The folder for ladder.json, ladder.csv, ladder.html and ladder.png.")
    ] = "ladder",
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on in --out with a ladder that was cut off."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print ladder.json instead of the table.")] = False,
) -> None:
    """Measure what each speed-up buys, rung by rung.

    Every rung first trains on the same text as rung 1 and must reach the same loss; then all are timed in rounds, each
    time in a process of its own.
    """
    if not out:
        # As from a variable that is not set; Path takes it for the working folder.
        raise UserError("--out is ''; name a folder for the ladder.")
    folder = Path(out)
    if parallel != "none" or launched_size() > 1:
        # What needs torch.distributed is not imported for a ladder of one process.
        from fusestep.cli.scaling import measure_scaling

        about_rungs = {
            "--model": model, "--rungs": rungs != "auto", "--base": base, "--peers": peers, "--rounds": rounds,
            "--gate-steps": gate_steps, "--fp8-stats": fp8_stats, "--resume": resume,
        }  # fmt: skip
        others = [option for option, given in about_rungs.items() if given]
        measure_scaling(
            parallel=parallel, preset=preset, batch=batch, steps=steps, device=device, out=folder, as_json=as_json,
            others=others,
        )  # fmt: skip
        return
    for option, name, known in (("--recipe", recipe, RecipeName), ("--fp8-format", fp8_format, FormatName)):
        if name not in get_args(known):
            raise UserError(f"{option} is {name!r}; choose one of {', '.join(get_args(known))}.")
    config = LadderConfig(
        preset,
        rungs,
        data,
        rounds,
        steps,
        gate_steps,
        batch,
        device,
        seed,
        scaling=cast(RecipeName, recipe),
        fp8_format=cast(FormatName, fp8_format),
        amax_history=amax_history,
        fp8_stats=fp8_stats,
        model=model,
        base=base,
        natives=natives,
        compiled=compiled,
        peers=peers,
    )
    report.check_folder(folder, resume=resume)
    kept = report.finished(folder, plan(config)) if resume else None
    if kept is not None:
        left_out = report.complete(kept, folder)
        typer.echo(json.dumps(kept, indent=1) if as_json else kept["verdict"]["headline"])
        _say_where(folder, left_out, f"the ladder in {folder} is finished, so nothing was measured;", err=as_json)
        return
    try:
        with at_signal(signal.SIGTERM, _terminate, (signal.SIG_DFL,)):
            measured = _measure(config, folder, resume)
        try:
            # Before it is shown, since whoever reads that may leave first, as head does.
            left_out = report.save(measured, folder)
        finally:
            _print(measured, as_json=as_json)
    except (KeyboardInterrupt, _Terminated, OSError):
        if (folder / journal.FILE).exists():
            typer.echo(
                f"{folder / journal.FILE} keeps what is measured; the same command with --resume goes on.", err=True
            )
        raise
    _say_where(folder, left_out, "", err=as_json)
    if all(result.failure is not None for result in measured.rungs):
        raise typer.Exit(1)


class _Terminated(SystemExit):
    """SIGTERM came; the exit status says so."""


def _terminate(number: int, _frame: FrameType | None) -> None:
    """Raise instead of ending the process at once, so that it is told how to go on."""
    raise _Terminated(128 + number)


def _measure(config: LadderConfig, out: Path, resume: bool) -> Ladder:
    """Run the ladder, with a bar in a terminal and plain lines in a pipe."""
    errors = Console(stderr=True)
    if not errors.is_terminal:
        return ladder(config, progress=_lines(), folder=out, resume=resume)
    with Progress(
        TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=errors, transient=True
    ) as bar:
        task = bar.add_task("", total=1.0)
        return ladder(
            config,
            progress=lambda share, text: bar.update(task, completed=share, description=text),
            folder=out,
            resume=resume,
        )


def _print(measured: Ladder, *, as_json: bool) -> None:
    """The table, or ladder.json, on stdout."""
    if as_json:
        typer.echo(json.dumps(report.as_dict(measured), indent=1, allow_nan=False))
        return
    # A name such as :llama: is no picture, and [1] no style.
    console = Console(emoji=False, markup=False)
    show(measured, console if console.is_terminal else Console(width=_PIPE_WIDTH, emoji=False, markup=False))


def _say_where(out: Path, left_out: list[str], before: str, *, err: bool) -> None:
    """Say which files there are, and which are left out."""
    files = [str(out / name) for name in (report.JSON, report.CSV, report.HTML, report.PNG) if (out / name).exists()]
    typer.echo(f"{before} kept in {', '.join(files)}".strip(), err=err)
    for sentence in left_out:
        typer.echo(sentence, err=err)


def _lines() -> Report:
    """Progress in plain lines, for a pipe."""

    def line(share: float, text: str) -> None:
        print(f"{share:4.0%} {text}", file=sys.stderr, flush=True)  # noqa: T201

    return line
