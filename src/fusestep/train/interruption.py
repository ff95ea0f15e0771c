"""Ctrl-C, SIGTERM and a terminal that closes end a run after the step in progress, so that it can be saved."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import termios
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

#: Those that end a run after the step in progress.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interruption:
    """While entered, notes the first of SIGNALS in `signal`; a second raises KeyboardInterrupt at once.

    SIGHUP is left alone where it is ignored, as nohup has it. One after another counts for nothing: the shell and the
    system both send it when a terminal closes. What is written to that terminal from then on goes nowhere, since it
    would end the run.

    Where a launcher looks after several processes it may pass a signal on to one that has it already, so a second one
    that follows within `patience` seconds counts for nothing.

    Signals reach the main thread alone; in another thread this does nothing.

    Args:
        on_first: called when the first arrives, to tell the person what happens now.
        patience: see above.
    """

    def __init__(self, on_first: Callable[[signal.Signals], None], *, patience: float = 0.0) -> None:
        self._patience = patience
        self._came = 0.0
        self.signal: signal.Signals | None = None
        self._on_first = on_first
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            _leave_closed_terminals()
        if self.signal is not None:
            if number == signal.SIGHUP or time.monotonic() - self._came < self._patience:
                return
            raise KeyboardInterrupt
        self._came = time.monotonic()
        self.signal = signal.Signals(number)
        # Python refuses to print while the interrupted code is printing; then the notice is left out.
        with contextlib.suppress(RuntimeError):
            self._on_first(self.signal)


def _leave_closed_terminals() -> None:
    """Send stdout and stderr to nowhere where their terminal is gone."""
    for descriptor in (1, 2):
        try:
            termios.tcgetattr(descriptor)
        except termios.error as error:
            # A file or a pipe has none to lose.
            if error.args[0] == errno.EIO:
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, descriptor)
                os.close(nowhere)
