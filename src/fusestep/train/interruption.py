"""Ctrl-C and SIGTERM end a run after the step in progress, so that it can be saved."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any


class Interruption:
    """While entered, notes the first SIGINT or SIGTERM in `signal`; a second raises KeyboardInterrupt at once.

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
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self.signal is not None:
            if time.monotonic() - self._came < self._patience:
                return
            raise KeyboardInterrupt
        self._came = time.monotonic()
        self.signal = signal.Signals(number)
        # Python refuses to print while the interrupted code is printing; then the notice is left out.
        with contextlib.suppress(RuntimeError):
            self._on_first(self.signal)
