"""What each step computed, read from its device without making the host wait for it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

#: Steps that the host may run ahead of a GPU before it waits for the oldest; bounds how late a loss is looked at.
MAXIMUM_LAG = 8


@dataclass(frozen=True)
class Reading:
    """One step: its number, its duration in milliseconds, and the numbers that it computed."""

    step: int
    ms: float
    values: tuple[float, ...]


class Readings:
    """A queue of the steps whose numbers have not been read yet.

    On a GPU a step's numbers travel to pinned host memory behind the step's own work, and an event tells when they
    have arrived; `ms` is the time between the device's passing the step's two ends. On a CPU they are there at once.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_gpu = device.type == "cuda"
        self._pending: deque[tuple[int, Tensor, torch.cuda.Event, torch.cuda.Event]] = deque()
        self._done: deque[Reading] = deque()

    def start(self) -> None:
        """A step begins."""
        if self._on_gpu:
            self._start = torch.cuda.Event(enable_timing=True)
            self._start.record()
        else:
            self._began = time.perf_counter()

    def finish(self, step: int, values: Tensor) -> None:
        """A step was handed to the device; `values` is a 1-d tensor that it will fill."""
        if not self._on_gpu:
            ms = 1e3 * (time.perf_counter() - self._began)
            self._done.append(Reading(step, ms, tuple(values.tolist())))
            return
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        host.copy_(values, non_blocking=True)
        end = torch.cuda.Event(enable_timing=True)
        end.record()
        self._pending.append((step, host, self._start, end))

    def ready(self, *, wait: bool = False) -> Iterator[Reading]:
        """The steps that can be read now, oldest first; all of them with `wait`."""
        while self._pending:
            step, host, start, end = self._pending[0]
            if wait or len(self._pending) > MAXIMUM_LAG:
                end.synchronize()
            elif not end.query():
                break
            self._pending.popleft()
            self._done.append(Reading(step, start.elapsed_time(end), tuple(host.tolist())))
        while self._done:
            yield self._done.popleft()
