"""The command line as a whole: help, version, unknown commands, missing packages, lazy commands."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest
import typer

from fusestep.cli import app, main
from fusestep.errors import UserError


def fusestep(*arguments: str) -> int:
    """Run the command line in this process and return its exit status."""
    with pytest.raises(SystemExit) as left:
        main(arguments)
    return int(left.value.code or 0)


def install(monkeypatch: pytest.MonkeyPatch, name: str, function: object) -> None:
    """Put a module with this `command` in the place of a command's own."""
    module = ModuleType(f"fusestep.cli.{name}")
    module.command = function  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)


def test_help_lists_every_command_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    assert fusestep("--help") == 0
    page = capsys.readouterr().out
    for name, summary in app.COMMANDS.items():
        assert f"  {name}" in page
        assert summary in page


def test_defaults_that_others_decide_are_marked_as_such(capsys: pytest.CaptureFixture[str]) -> None:
    assert fusestep("doctor", "--help") == 0
    page = " ".join(capsys.readouterr().out.split())
    assert "auto, cpu or cuda. [default: auto]" in page
    assert "[default: 60]" in page
    assert fusestep("ladder", "--help") == 0
    page = " ".join(capsys.readouterr().out.split())
    assert "those before it are left out. [default: adam]" in page
    assert "in a new process each. [default: 5 on a GPU, 3 on a CPU]" in page


@pytest.mark.parametrize("name", list(app.COMMANDS))
def test_every_command_exists_and_has_its_own_help(capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert fusestep(name, "--help") == 0
    page = capsys.readouterr().out
    assert page.startswith(f"Usage: fusestep {name} [OPTIONS]")
    assert "--help" in page
    assert "[default: (" not in " ".join(page.split())


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert fusestep("--version") == 0
    assert capsys.readouterr().out == f"fusestep {version('fusestep')}\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["doktor"], "No such command 'doktor'. Did you mean 'doctor'?"),
        (["--verbose"], "No such option"),
        (["doctor", "--jsn"], "No such option"),
        (["doctor", "surplus"], "surplus"),
    ],
)
def test_usage_errors_are_told_with_status_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert fusestep(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err
    assert err.startswith("Usage: fusestep")


def test_no_command_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert fusestep() == 2
    out, err = capsys.readouterr()
    assert "Commands:" in out + err


def test_a_command_gets_its_options_and_its_failure_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(steps: int = 3) -> None:
        """Count."""
        if steps < 0:
            raise UserError(f"--steps is {steps}; give 0 or more.")
        typer.echo(steps)

    install(monkeypatch, "train", command)
    assert fusestep("train", "--steps", "7") == 0
    assert fusestep("train", "--steps", "-1") == 2
    assert capsys.readouterr() == ("7\n", "fusestep train: --steps is -1; give 0 or more.\n")


def test_an_interrupted_command_ends_with_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def command() -> None:
        """Stop at once."""
        raise KeyboardInterrupt

    install(monkeypatch, "train", command)
    assert fusestep("train") == 130
    assert capsys.readouterr().err == "fusestep train: interrupted\n"


def interrupt_while_imported(folder: Path) -> None:
    """A NumPy that interrupts whoever imports it, and cannot be imported."""
    (folder / "numpy.py").write_text(
        "import os, signal\n"
        "try:\n    os.kill(os.getpid(), signal.SIGINT)\nexcept BaseException:\n    pass\n"
        "raise ModuleNotFoundError('numpy')\n"
    )


@pytest.mark.parametrize(
    ("arrangement", "status", "said"),
    [(signal.SIG_DFL, 130, "fusestep: interrupted\n"), (signal.SIG_IGN, 0, "")],
)
def test_no_import_takes_an_interrupt_for_its_own_failure(
    arrangement: signal.Handlers, status: int, said: str, tmp_path: Path
) -> None:
    """torch does without NumPy where its import fails; the command went on as if nobody had pressed Ctrl-C."""
    interrupt_while_imported(tmp_path)
    ended = subprocess.run(
        [sys.executable, "-m", "fusestep", "plan"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, arrangement),
    )
    assert ended.returncode == status
    assert [line for line in ended.stderr.splitlines(keepends=True) if "interrupted" in line] == said.splitlines(True)


def test_so_it_does_where_nobody_reads_what_it_says(tmp_path: Path) -> None:
    interrupt_while_imported(tmp_path)
    reader, writer = os.pipe()
    os.close(reader)
    ended = subprocess.run(
        [sys.executable, "-m", "fusestep", "plan"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=writer,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    )
    os.close(writer)
    assert (ended.returncode, ended.stdout) == (130, b"")


def test_a_command_that_has_begun_gets_an_interrupt_as_an_exception(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def command() -> None:
        """Be interrupted."""
        try:
            os.kill(os.getpid(), signal.SIGINT)
        finally:
            typer.echo("put in order")

    install(monkeypatch, "train", command)
    kept = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert fusestep("train") == 130
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, kept)
    assert capsys.readouterr() == ("put in order\n", "fusestep train: interrupted\n")


def test_a_defect_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def command() -> None:
        """Fail."""
        raise ZeroDivisionError

    install(monkeypatch, "train", command)
    with pytest.raises(ZeroDivisionError):
        main(["train"])


def test_a_missing_extra_is_told_when_the_command_is_called(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "fusestep.cli.doctor", raising=False)
    for name in [name for name in sys.modules if name.partition(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rich", None)  # type: ignore[arg-type]
    assert fusestep("doctor") == 2
    assert capsys.readouterr().err == (
        "fusestep: the package rich is not installed; run pip install 'fusestep[cli]'.\n"
    )


def test_without_typer_there_is_a_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delitem(sys.modules, "fusestep.cli.app")
    monkeypatch.setitem(sys.modules, "typer", None)  # type: ignore[arg-type]
    assert fusestep("--help") == 2
    assert capsys.readouterr().err == (
        "fusestep: the package typer is not installed; run pip install 'fusestep[cli]'.\n"
    )


def test_help_and_version_wait_for_nothing() -> None:
    """Neither torch nor any command's module is imported for them, and `python -m fusestep` is the command."""
    script = (
        "import runpy, sys\n"
        "sys.argv = ['fusestep', '--help']\n"
        "try: runpy.run_module('fusestep', run_name='__main__')\n"
        "except SystemExit as left: assert not left.code, left.code\n"
        "heavy = {'torch', 'triton', 'safetensors'} | {f'fusestep.cli.{n}' for n in ('doctor', 'train', 'ladder')}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert answer.stdout.startswith("Usage: fusestep [OPTIONS] COMMAND")
    assert answer.stdout.endswith("\n[]\n")
