"""What a person sees."""

from __future__ import annotations

import io
import re
import sys
from typing import Any

import pytest

from fusestep.train.progress import Bar, PlainLines, for_terminal


def row(step: int, **changes: Any) -> dict[str, Any]:
    return {"step": step, "loss": 2.5, "tokens": 1000, "ms": 10.0, "skipped": 0, **changes}


def test_piped_output_has_plain_lines_for_a_few_steps() -> None:
    stream = io.StringIO()
    lines = PlainLines(stream)
    lines.start(0, 200)
    for step in range(1, 201):
        lines.update(row(step), 3 * 2**30)
    lines.stop()
    printed = stream.getvalue().splitlines()
    assert len(printed) == 21
    assert printed[0].startswith("step   1/200 | loss 2.5000 | 100,000 tokens/s | 3.00 GiB | ")
    assert printed[-1].endswith("0:00 left")
    assert "\x1b" not in stream.getvalue()


def test_skipped_steps_show() -> None:
    stream = io.StringIO()
    lines = PlainLines(stream)
    lines.start(0, 1)
    lines.update(row(1, skipped=2), 0)
    assert "| 2 skipped |" in stream.getvalue()


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdout", Terminal())
    bar = for_terminal()
    assert isinstance(bar, Bar)
    bar._console = Console(file=sys.stdout, force_terminal=True, width=140)
    bar.start(2, 4)
    bar.update(row(3), 2**30)
    bar.say("held-out [loss] 2.0")
    bar.update(row(4), 2**30)
    bar.stop()
    bar.stop()
    printed = re.sub(r"\x1b\[[0-9;]*m", "", sys.stdout.getvalue())
    assert "4/4" in printed
    assert "loss 2.5000" in printed
    assert "100,000 tokens/s" in printed
    assert "held-out [loss] 2.0" in printed


def test_a_pipe_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert isinstance(for_terminal(), PlainLines)
