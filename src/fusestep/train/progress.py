"""What a person sees of a run: a bar in a terminal, plain lines in a pipe, nothing from Python."""

from __future__ import annotations

import sys
import time
from typing import Any, TextIO

from fusestep.memory import GIB

#: Plain lines in a whole run, beside the first and the last.
PLAIN_LINES = 20


class Progress:
    """Says nothing; the base of those that do."""

    def start(self, step: int, steps: int) -> None:
        """The run is at `step` of `steps`."""

    def update(self, row: dict[str, Any], memory: int) -> None:
        """A step's row of metrics.jsonl is known; `memory` is in bytes."""

    def say(self, line: str) -> None:
        """Something to read."""

    def stop(self) -> None:
        """No more steps come."""


class _Pace:
    """Tokens per second of the last few steps, and the time left."""

    def __init__(self, step: int, steps: int) -> None:
        self._steps = steps
        self._first = step
        self._began = time.monotonic()
        self._ms_per_token: float | None = None

    def note(self, row: dict[str, Any]) -> tuple[float, float]:
        """Tokens per second, seconds left."""
        now = row["ms"] / row["tokens"]
        # The first step compiles and warms up, so the second replaces it.
        recent = None if row["step"] <= self._first + 2 else self._ms_per_token
        self._ms_per_token = now if recent is None else 0.9 * recent + 0.1 * now
        elapsed = time.monotonic() - self._began
        left = elapsed / (row["step"] - self._first) * (self._steps - row["step"])
        return 1e3 / max(self._ms_per_token, 1e-9), left


class PlainLines(Progress):
    """A line for every few steps."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def start(self, step: int, steps: int) -> None:
        self._steps = steps
        self._every = -(-steps // PLAIN_LINES)
        self._pace = _Pace(step, steps)
        self._first = step + 1

    def update(self, row: dict[str, Any], memory: int) -> None:
        speed, left = self._pace.note(row)
        step = row["step"]
        if step % self._every == 0 or step in (self._first, self._steps):
            place = f"step {step:>{len(str(self._steps))}}/{self._steps}"
            self.say(f"{place} | {_numbers(row, speed, memory)} | {_clock(left)} left")

    def say(self, line: str) -> None:
        self._stream.write(line + "\n")
        self._stream.flush()


class Bar(Progress):
    """A bar that rich draws, with lines above it."""

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(highlight=False, soft_wrap=True)
        self._bar: Any = None

    def start(self, step: int, steps: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as RichProgress

        columns = [MofNCompleteColumn(), BarColumn(bar_width=24), TextColumn("{task.description}", markup=False)]
        self._bar = RichProgress(*columns, console=self._console)
        self._task = self._bar.add_task("", total=steps, completed=step)
        self._pace = _Pace(step, steps)
        self._bar.start()

    def update(self, row: dict[str, Any], memory: int) -> None:
        speed, left = self._pace.note(row)
        text = f"{_numbers(row, speed, memory)} | {_clock(left)} left"
        self._bar.update(self._task, completed=row["step"], description=text)

    def say(self, line: str) -> None:
        self._console.print(line, markup=False)

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def for_terminal() -> Progress:
    """A bar where stdout is a terminal, else plain lines."""
    return Bar() if sys.stdout.isatty() else PlainLines(sys.stdout)


def _numbers(row: dict[str, Any], speed: float, memory: int) -> str:
    skipped = f" | {row['skipped']} skipped" if row["skipped"] else ""
    return f"loss {row['loss']:.4f} | {speed:,.0f} tokens/s | {memory / GIB:.2f} GiB{skipped}"


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
