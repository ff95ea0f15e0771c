"""How a command ends: the sentence, the exit status, and which errors keep their traceback."""

from __future__ import annotations

import errno
import os
import shlex
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from fusestep import cli
from fusestep.cli.errors import exit_status
from fusestep.dispatch import StrictFallbackError
from fusestep.errors import UserError


def raising(error: BaseException) -> Callable[[], None]:
    def program() -> None:
        raise error

    return program


def test_success_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status("fusestep train", lambda: None) == 0
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("error", "status", "sentence"),
    [
        (UserError("--lr is -1.0; give a number above 0."), 2, "--lr is -1.0; give a number above 0."),
        (StrictFallbackError("op cannot run; unset FUSESTEP_STRICT"), 2, "op cannot run; unset FUSESTEP_STRICT"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (
            ModuleNotFoundError("No module named 'rich.table'", name="rich.table"),
            2,
            "the package rich is not installed; run pip install 'fusestep[cli]'.",
        ),
        (
            ModuleNotFoundError("No module named 'jinja2'", name="jinja2"),
            2,
            "the package jinja2 is not installed; run pip install 'fusestep[report]'.",
        ),
        (
            OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "runs/a/model.pt"),
            2,
            "the disk is full while writing runs/a/model.pt (No space left on device); "
            "free some space or choose another folder.",
        ),
        (
            OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)),
            2,
            f"the disk is full ({os.strerror(errno.EDQUOT)}); free some space or choose another folder.",
        ),
        (
            OSError(errno.EFBIG, os.strerror(errno.EFBIG), "runs/a/model.pt"),
            2,
            "runs/a/model.pt would be larger than the limit of a file's size allows (File too large); "
            "raise the limit (ulimit -f), or choose another folder.",
        ),
        (MemoryError(), 2, "out of memory on this machine; take a smaller model or batch."),
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."),
            2,
            "out of GPU memory, after a peak of 0.00 GiB; take a smaller model or batch.",
        ),
    ],
)
def test_what_a_person_can_mend_is_one_sentence(
    capsys: pytest.CaptureFixture[str], error: BaseException, status: int, sentence: str
) -> None:
    assert exit_status("fusestep train", raising(error)) == status
    assert capsys.readouterr() == ("", f"fusestep train: {sentence}\n")


def test_host_memory_that_torch_cannot_get_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    def program() -> None:
        torch.empty(2**60, dtype=torch.int8)

    assert exit_status("fusestep train", program) == 2
    assert "out of memory on this machine" in capsys.readouterr().err


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("shapes cannot be multiplied"),
        ValueError("an error of the code, not of a person"),
        ModuleNotFoundError("No module named 'fusestep.lost'", name="fusestep.lost"),
        FileNotFoundError(errno.ENOENT, "No such file or directory", "x"),
        SystemExit(3),
    ],
)
def test_defects_keep_their_traceback(error: BaseException) -> None:
    with pytest.raises(type(error)):
        exit_status("fusestep train", raising(error))


@pytest.mark.parametrize(
    "prints",
    [
        pytest.param("for i in range(100000): print('line', i)", id="by Python"),
        # Which meets the closed pipe itself.
        pytest.param(
            "from rich.console import Console; show = Console().print\n    for i in range(10000): show('line', i)",
            id="by rich",
        ),
    ],
)
def test_a_closed_pipe_is_quiet(prints: str) -> None:
    script = (
        "import sys; from fusestep.cli.errors import exit_status\n"
        f"def program():\n    {prints}\n"
        "sys.exit(exit_status('fusestep', program))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        assert child.stdout.readline() == "line 0\n"
        child.stdout.close()
        assert child.stderr.read() == ""
        assert child.wait(60) == 141


def test_a_stream_that_was_closed_before_the_start_is_no_defect() -> None:
    command = f"{shlex.quote(sys.executable)} -m fusestep plan --gpus"
    without_output = subprocess.run(f"{command} 1 >&-", shell=True, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (without_output.returncode, without_output.stderr) == (0, "")
    without_errors = subprocess.run(f"{command} 0 2>&-", shell=True, stdout=subprocess.PIPE, text=True, timeout=60)
    assert (without_errors.returncode, without_errors.stdout) == (2, "")


def test_output_that_is_closed_only_at_the_end_is_quiet() -> None:
    """So little is printed that it leaves with the last flush."""
    script = (
        "import sys; from fusestep.cli.errors import exit_status\n"
        "sys.exit(exit_status('fusestep', lambda: print('one line') or input() and None))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None
        assert child.stdin is not None
        assert child.stderr is not None
        child.stdout.close()
        child.stdin.write("go\n")
        child.stdin.close()
        assert child.stderr.read() == ""
        assert child.wait(60) == 141


@pytest.mark.parametrize(
    ("number", "mend"),
    [
        (errno.ENAMETOOLONG, "correct the path"),
        (errno.ELOOP, "correct the path"),
        (errno.ENOTDIR, "correct the path"),
        (errno.EACCES, "change the permissions of runs/a"),
        (errno.EPERM, "change the permissions of runs/a"),
        (errno.EROFS, "make the file system of runs/a writable"),
    ],
)
def test_a_path_that_cannot_be_used_is_named(number: int, mend: str, capsys: pytest.CaptureFixture[str]) -> None:
    error = OSError(number, os.strerror(number), "runs/a")
    assert exit_status("fusestep train", raising(error)) == 2
    sentence = f"runs/a cannot be used ({os.strerror(number)}); {mend}, or choose another."
    assert capsys.readouterr().err == f"fusestep train: {sentence}\n"


@pytest.mark.parametrize("arguments", [["generate"], ["train", "--out"], ["train", "--data", "text:"]])
def test_a_name_too_long_for_the_system_is_one_sentence(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    *first, last = arguments
    arguments = [*arguments, "n" * 300] if not last.endswith(":") else [*first, last + "n" * 300]
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    written = capsys.readouterr()
    assert written.err.count("\n") == 1
    assert f"cannot be used ({os.strerror(errno.ENAMETOOLONG)})" in written.err
