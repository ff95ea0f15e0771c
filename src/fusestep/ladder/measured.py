"""What the processes of one contender measured, and the figures that come of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fusestep.ladder.memory import Peak
from fusestep.ladder.profiling import Kernel
from fusestep.ladder.statistics import Spread, spread
from fusestep.ladder.step import Part
from fusestep.ladder.timing import Timing

#: A device that is busy for less than this share of the step waits for something: for the host, where that takes longer
#: to queue the step than the device to run it; else clocks that fall under load, and other work of the machine.
_BUSY = 0.9

#: Where the kernels of a step fill this share of the time that the device took, it hardly waited in between.
_FILLED = 0.85


@dataclass(frozen=True)
class Round:
    """What the process of one contender in one round measured.

    Attributes:
        parts: what ran, and as what.
        optimizer: in words.
        threads: that torch computes with on the host.
        opening: losses of the first steps.
        kernels: what took the time of a step, the longest first; only of one round.
        unprofiled: why there are no kernels though they were asked for; else empty.
    """

    timing: Timing
    peak: Peak
    parts: tuple[Part, ...]
    optimizer: str
    threads: int
    opening: tuple[float, ...] = ()
    kernels: tuple[Kernel, ...] = ()
    unprofiled: str = ""

    @classmethod
    def from_reply(cls, reply: Mapping[str, Any]) -> Round:
        """From what `fusestep.ladder.worker.perform` returned, through JSON."""
        timing = dict(reply["timing"])
        timing["windows"] = tuple((steps, ms) for steps, ms in timing["windows"])
        timing["steps"] = tuple(timing["steps"])
        return cls(
            Timing(**timing),
            Peak(**reply["peak"]),
            tuple(Part(**part) for part in reply["parts"]),
            reply["optimizer"],
            reply["threads"],
            tuple(reply["opening"]),
            tuple(Kernel(**kernel) for kernel in reply["kernels"]),
            reply["unprofiled"],
        )


class Measured:
    """The figures of anything that was timed in rounds: a rung, the best of native PyTorch, a peer.

    Attributes:
        rounds: in order; empty where it did not run.
        tokens: of a step.
        flops, moved: FLOPs and bytes of a step by formula, where known.
    """

    rounds: tuple[Round, ...]
    tokens: int
    flops: int | None
    moved: int | None

    @property
    def step(self) -> Spread | None:
        """Wall time of a step in ms: the median over rounds of each round's median, the quartiles of all windows."""
        if not self.rounds:
            return None
        windows = spread([ms / steps for r in self.rounds for steps, ms in r.timing.windows])
        return Spread(windows.low, spread(self.times).median, windows.high, windows.count)

    @property
    def times(self) -> list[float]:
        """Each round's median wall time of a step, in ms."""
        return [r.timing.step for r in self.rounds]

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens of a batch over the median time of a step."""
        return None if self.step is None else self.tokens / self.step.median * 1e3

    @property
    def flops_per_second(self) -> float | None:
        """Model FLOPs of a step over its median time."""
        return None if self.step is None or self.flops is None else self.flops / self.step.median * 1e3

    @property
    def bytes_per_second(self) -> float | None:
        """Model bytes of a step over its median time."""
        return None if self.step is None or self.moved is None else self.moved / self.step.median * 1e3

    @property
    def first_step(self) -> float | None:
        """The slowest first step of any round, in ms: the one that compiled, if any did."""
        return max((r.timing.first_step for r in self.rounds), default=None)

    @property
    def peak(self) -> Peak | None:
        """The peak of the round with the largest."""
        return max((r.peak for r in self.rounds), key=lambda peak: peak.headline or 0, default=None)

    @property
    def host(self) -> float | None:
        """Median over rounds of the host's time to queue a step, in ms."""
        return _median([r.timing.host for r in self.rounds])

    @property
    def device(self) -> float | None:
        """Median over rounds of the device's time for a step that is queued whole, in ms."""
        return _median([r.timing.device for r in self.rounds])

    @property
    def device_times(self) -> list[float] | None:
        """Each round's time of the device for a step, in ms; None on a CPU, and where that is an upper bound."""
        times = [r.timing.device for r in self.rounds if r.timing.device is not None]
        return None if not times or len(times) < len(self.rounds) or self.is_device_bound else times

    @property
    def is_device_bound(self) -> bool:
        """Whether `device` is an upper bound and no more: a step waited for the host while it ran, in some round."""
        if not any(r.timing.is_bound for r in self.rounds):
            return False
        busy = self.kernels_ms
        return busy is None or self.device is None or busy < _FILLED * self.device

    @property
    def is_idle(self) -> bool | None:
        """Whether the device has nothing to do for a good part of a step; None where that is not known."""
        if self.device is None or self.step is None or self.is_device_bound:
            return None
        return self.device < _BUSY * self.step.median

    @property
    def is_launch_bound(self) -> bool | None:
        """Whether the device waits for the host, which queues a step more slowly than the device runs it; None where
        that is not known.
        """
        if self.is_idle is None or self.host is None or self.device is None:
            return None
        return self.is_idle and self.host > self.device

    @property
    def doubling(self) -> float | None:
        """Median of t(2n) / 2·t(n) over all pairs of windows."""
        return _median([ratio for r in self.rounds for ratio in r.timing.doublings])

    @property
    def kernels_ms(self) -> float | None:
        """What all kernels of a step took, in ms, of the round that was profiled; None where none was."""
        return next((kernel.ms / kernel.share for kernel in self.kernels), None)

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """What takes the time of a step, the longest first, from the round that was profiled."""
        return next((r.kernels for r in self.rounds if r.kernels), ())


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return spread(known).median if known else None
