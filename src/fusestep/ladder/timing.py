"""Time a training step, on the host's clock and on the device's, so that neither can be mistaken for the other.

Work on a GPU is asynchronous: a host clock around a call reads how long the launches took. So every window of steps is
synchronised at both ends, windows of n and of 2n steps alternate and must take times in the ratio 1 : 2, and on CUDA
each step's time is also read from device events.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

#: Two warm-up windows whose times agree this closely end the warm-up.
STABLE_WITHIN = 0.05
_WARMUP_WINDOW = 3
_WARMUP_WINDOWS = 10
_WARMUP_LIMIT_MS = 5000.0

#: Windows of n and 2n steps come in pairs.
PAIRS = 4

#: A step that takes this long is told apart from its launches by fewer repeats.
_LONG_MS = 100.0

#: A step that is queued whole takes no longer than one in a loop, but for noise of this factor.
_NOISE = 1.05

#: How far t(2n) / 2·t(n) may be from 1 before the timer's figures are not believed.
DOUBLING_WITHIN = 0.25


class Clock(Protocol):
    """A host clock and a device's queue."""

    def now(self) -> float:
        """Seconds on the host."""

    def synchronize(self) -> None:
        """Wait until the device has done all that was queued."""

    def mark(self) -> Any:
        """A mark in the device's queue."""

    def elapsed_ms(self, start: Any, end: Any) -> float:
        """Milliseconds between two marks, once both were reached."""

    def hold(self, ms: float) -> bool:
        """Queue a pause of about `ms` on the device; False where nothing is queued, as on a CPU."""


class HostClock:
    """For devices that have done the work when the call returns."""

    def now(self) -> float:
        return time.perf_counter()

    def synchronize(self) -> None:
        return

    def mark(self) -> float:
        return time.perf_counter()

    def elapsed_ms(self, start: float, end: float) -> float:
        return (end - start) * 1e3

    def hold(self, ms: float) -> bool:  # noqa: ARG002
        return False


class CudaClock:
    """For one CUDA device: events on its current stream."""

    #: Device cycles a millisecond, at the highest clock of any chip that we serve: a pause may be longer, not shorter.
    CYCLES_PER_MS = 2_500_000

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> float:
        return time.perf_counter()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def elapsed_ms(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return float(start.elapsed_time(end))

    def hold(self, ms: float) -> bool:
        with torch.cuda.device(self._device):
            torch.cuda._sleep(int(ms * self.CYCLES_PER_MS))
        return True


def clock_of(device: torch.device) -> Clock:
    """The clock that times work on `device`."""
    return CudaClock(device) if device.type == "cuda" else HostClock()


@dataclass(frozen=True)
class Timing:
    """What one process measured, in milliseconds.

    Attributes:
        first_step: the first step alone: compilation, library handles and the optimizer's lazy state are in it.
        warmup_steps: steps after the first that were run and not counted.
        stable: whether the warm-up ended because two windows agreed (and not because it had to end).
        windows: (steps, ms) of each window, synchronised at both ends.
        steps: every timed step, between marks in the device's queue.
        host: median time to queue one step from an empty queue (a driver's queue that fills up makes it an upper
            bound); None on a CPU, where queuing is doing.
        device: median time that the device needs for one step which is queued whole before it starts, but no more than
            `step`; None on a CPU.
        is_bound: whether `device` is an upper bound and no more: a step that waits for the device itself, or does not
            fit in a driver's queue, starts before it is queued whole, and the device may then wait for the host.
    """

    first_step: float
    warmup_steps: int
    stable: bool
    windows: tuple[tuple[int, float], ...]
    steps: tuple[float, ...]
    host: float | None
    device: float | None
    is_bound: bool = False

    @property
    def step(self) -> float:
        """Median wall time of one step over the windows."""
        return statistics.median(ms / steps for steps, ms in self.windows)

    @property
    def doublings(self) -> tuple[float, ...]:
        """t(2n) / 2·t(n) for every pair of windows."""
        pairs = zip(self.windows[::2], self.windows[1::2], strict=True)
        return tuple(long / (2 * short) for (_, short), (_, long) in pairs)


def measure(
    step: Callable[[], object],
    clock: Clock,
    *,
    steps: int,
    warmup_ms: float = 0.0,
    enough_ms: float | None = None,
    ready: tuple[int, Callable[[], None]] | None = None,
    after_warmup: Callable[[], None] = lambda: None,
    after_windows: Callable[[], None] = lambda: None,
) -> Timing:
    """Warm `step` up until its time is stable, then time it in pairs of windows.

    Args:
        steps: timed steps in all, rounded up to whole pairs of windows (`steps_in_windows`).
        warmup_ms: the least time to warm up; a GPU's clocks need some.
        enough_ms: fewer steps are timed where a window of the shorter kind would take longer than this; at least one in
            each such window.
        ready: steps to take after the first, and what is then called before the warm-up: it returns when the device is
            this process's alone.
        after_warmup, after_windows: called, synchronised, around the timed windows, for the memory's bookkeeping.
    """

    def window(count: int) -> tuple[float, list[Any]]:
        clock.synchronize()
        start = clock.now()
        marks = [clock.mark()]
        for _ in range(count):
            step()
            marks.append(clock.mark())
        clock.synchronize()
        return (clock.now() - start) * 1e3, marks

    first_step, _ = window(1)
    taken = 0
    if ready is not None:
        taken, wait = ready
        window(taken)
        wait()
    warmup_steps, stable, step_ms = _warm_up(window, warmup_ms)

    after_warmup()
    windows: list[tuple[int, float]] = []
    step_times: list[float] = []
    short = _steps_in_short_window(steps)
    if enough_ms is not None:
        short = max(1, min(short, math.ceil(enough_ms / step_ms)))
    for _ in range(PAIRS):
        for count in (short, 2 * short):
            ms, marks = window(count)
            windows.append((count, ms))
            step_times += [clock.elapsed_ms(a, b) for a, b in itertools.pairwise(marks)]
    after_windows()

    host, device, is_whole = _apart(step, clock, 5 if step_ms < _LONG_MS else 3)
    timing = Timing(first_step, taken + warmup_steps, stable, tuple(windows), tuple(step_times), host, device)
    if device is None:
        return timing
    return replace(timing, device=min(device, timing.step), is_bound=not is_whole or device > _NOISE * timing.step)


def steps_in_windows(steps: int) -> int:
    """How many steps are timed when `steps` are asked for: whole pairs of windows."""
    return 3 * PAIRS * _steps_in_short_window(steps)


def _steps_in_short_window(steps: int) -> int:
    return max(1, -(-steps // (3 * PAIRS)))


def _warm_up(window: Callable[[int], tuple[float, list[Any]]], least_ms: float) -> tuple[int, bool, float]:
    """Run windows until two in a row agree, or enough have run.

    Returns: how many steps, whether the last two windows agreed, and the ms of a step in the last.
    """
    spent, count, previous = 0.0, 0, float("inf")
    while True:
        ms, _ = window(_WARMUP_WINDOW)
        spent += ms
        count += 1
        agree = abs(ms - previous) <= STABLE_WITHIN * ms
        previous = ms
        if spent >= least_ms and (agree or (count > 1 and (count >= _WARMUP_WINDOWS or spent >= _WARMUP_LIMIT_MS))):
            return count * _WARMUP_WINDOW, agree, max(ms / _WARMUP_WINDOW, 1e-6)


def _apart(step: Callable[[], object], clock: Clock, repeats: int) -> tuple[float | None, float | None, bool]:
    """The host's and the device's time for one step, each without the other; None for both on a CPU.

    Returns: both, and whether the device's is of steps that were queued whole.
    """
    clock.synchronize()
    if not clock.hold(0.0):
        return None, None, False
    host, device, whole = [], [], []
    for _ in range(repeats):
        clock.synchronize()
        start = clock.now()
        step()
        host.append((clock.now() - start) * 1e3)
    for _ in range(repeats):
        clock.synchronize()
        # The device waits while the host queues the step, so it never waits for the host inside it.
        held_ms = 2 * statistics.median(host) + 1
        start = clock.now()
        clock.hold(held_ms)
        start_mark = clock.mark()
        step()
        end_mark = clock.mark()
        queued_ms = (clock.now() - start) * 1e3
        clock.synchronize()
        device.append(clock.elapsed_ms(start_mark, end_mark))
        if queued_ms < held_ms:
            whole.append(device[-1])
    return statistics.median(host), statistics.median(whole or device), bool(whole)
