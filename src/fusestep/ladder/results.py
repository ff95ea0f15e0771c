"""What a ladder measured, and what may be claimed from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from fusestep.ladder.ceilings import Ceilings
from fusestep.ladder.gate import Verdict
from fusestep.ladder.memory import Peak
from fusestep.ladder.rungs import SERVED, Recipe, Rung
from fusestep.ladder.statistics import Gain, Spread, paired_gain, spread
from fusestep.ladder.step import Part
from fusestep.ladder.timing import DOUBLING_WITHIN, Timing

#: An interval whose ends differ by more than this factor tells nothing.
_SCATTER = 1.5

#: A device that is busy for less than this share of the step waits for the host.
_BUSY = 0.9


@dataclass(frozen=True)
class Round:
    """What the process of one rung in one round measured."""

    timing: Timing
    peak: Peak
    parts: tuple[Part, ...]
    optimizer: str
    threads: int

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
        )


@dataclass(frozen=True)
class Comparison:
    """One rung against another.

    Attributes:
        over: the name of the other rung.
        gain: what was measured, or None where nothing may be said of its speed.
        claim: what may be claimed; "none" where the measured gain is not the rung's own.
        reason: why there is no claim or no telling, or what probably makes it slower; else empty.
    """

    over: str
    gain: Gain | None
    claim: Literal["faster", "slower", "no difference", "none"]
    reason: str


@dataclass(frozen=True)
class RungResult:
    """All of one rung: its gate, its raw rounds (in order), its comparisons, or the sentence why it did not run.

    `saturation` is the worst tensor of an FP8 gate, where that was counted: as `Step.worst_saturation` gives it.
    `flops` and `moved` are the FLOPs and bytes of a step by the formulas of `fusestep.ladder.work`, where known.
    """

    rung: Rung
    recipe: Recipe
    tokens: int
    losses: tuple[float, ...] = ()
    verdict: Verdict | None = None
    rounds: tuple[Round, ...] = ()
    failure: str | None = None
    log: str = ""
    over_first: Comparison | None = None
    over_previous: Comparison | None = None
    saturation: Mapping[str, Any] | None = None
    flops: int | None = None
    moved: int | None = None

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
    def is_launch_bound(self) -> bool | None:
        """Whether the device waits for the host; None on a CPU."""
        if self.device is None or self.step is None:
            return None
        return self.device < _BUSY * self.step.median

    @property
    def doubling(self) -> float | None:
        """Median of t(2n) / 2·t(n) over all pairs of windows."""
        return _median([ratio for r in self.rounds for ratio in r.timing.doublings])

    def served_by_reference(self, names: Sequence[str]) -> Part | None:
        """The first of the parts `names` that is no kernel in some round, or is not in the step at all."""
        for name in names:
            for r in self.rounds:
                found = [part for part in r.parts if part.name == name]
                for part in found or [Part(name, "absent", "the step did not call it")]:
                    if part.implementation not in SERVED:
                        return part
        return None


def compare(this: RungResult, other: RungResult, fused: Sequence[str]) -> Comparison:
    """What may be said of `this` over `other`, which differ by the ops `fused` (and by what is torch's own)."""
    over = other.rung.name

    def nothing(reason: str, gain: Gain | None = None) -> Comparison:
        return Comparison(over, gain, "none", reason)

    for result in (other, this):
        if result.failure is not None:
            return nothing(f"{result.rung.name} did not run: {result.failure}")
        if result.verdict is None or not result.verdict.passed:
            why = "it was not judged" if result.verdict is None else result.verdict.reason
            return nothing(f"{result.rung.name} failed the correctness gate: {why}")
    gain = paired_gain(other.times, this.times)
    part = this.served_by_reference(fused)
    if part is not None:
        what = "was emulated" if part.implementation == "emulated" else "ran as its reference, not fused"
        why = f"the fused part {part.name} {what}: {part.reason}"
        return Comparison(over, gain, "slower", why) if gain.is_slower else nothing(why, gain)
    for result in (other, this):
        if result.doubling is not None and abs(result.doubling - 1) > DOUBLING_WITHIN:
            return nothing(
                f"the timer's self-check failed for {result.rung.name}: twice the steps took "
                f"{2 * result.doubling:.2f} times as long",
                gain,
            )
    if gain.low is None:
        return nothing("one round shows no spread; pass --rounds 3 or more", gain)
    if gain.is_faster:
        return Comparison(over, gain, "faster", "")
    if not gain.is_slower:
        scattered = gain.high is not None and gain.high > _SCATTER * gain.low
        return Comparison(over, gain, "no difference", "the rounds scatter too widely" if scattered else "")
    return Comparison(over, gain, "slower", _likely_cause(this))


def _likely_cause(this: RungResult) -> str:
    causes = [this.rung.slower_when] if this.rung.slower_when else []
    if this.is_launch_bound and this.device is not None and this.step is not None:
        causes.insert(
            0,
            f"launch-bound: the device needs {this.device:.2f} of {this.step.median:.2f} ms and waits for the host "
            "the rest",
        )
    return "; ".join(causes)


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return spread(known).median if known else None


@dataclass(frozen=True)
class Ladder:
    """A whole measurement: what was asked, where it ran, the rungs in order, and remarks for the reader.

    `ceilings` is what the device reached in the same run; None on a CPU.
    """

    plan: Mapping[str, Any]
    environment: Mapping[str, Any]
    rungs: tuple[RungResult, ...]
    notes: tuple[str, ...] = field(default=())
    ceilings: Ceilings | None = None
