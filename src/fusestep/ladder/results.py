"""What a ladder measured, and what may be claimed from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from fusestep.ladder.ceilings import Ceilings
from fusestep.ladder.contenders import Contender
from fusestep.ladder.gate import Check, Verdict
from fusestep.ladder.measured import Measured, Round
from fusestep.ladder.rungs import SERVED, Recipe, Rung
from fusestep.ladder.statistics import Gain, paired_gain
from fusestep.ladder.step import Part
from fusestep.ladder.timing import DOUBLING_WITHIN

#: An interval whose ends differ by more than this factor tells nothing.
_SCATTER = 1.5

#: Why rounds tell no difference.
SCATTERED, HELD_BY_HOST = "the rounds scatter too widely", "the step is launch-bound, so its wall time is the host's"


@dataclass(frozen=True)
class Comparison:
    """One rung against another.

    Attributes:
        over: the name of the other rung.
        gain: what was measured, or None where nothing may be said of its speed.
        claim: what may be claimed; "none" where the measured gain is not the rung's own.
        reason: why there is no claim or no telling, or what probably makes it slower; else empty.
        device: as `gain`, of the device's time for a step that is queued whole; None where one of them is not known.
    """

    over: str
    gain: Gain | None
    claim: Literal["faster", "slower", "no difference", "none"]
    reason: str
    device: Gain | None = None


@dataclass(frozen=True)
class RungResult(Measured):
    """All of one rung: its gate, its raw rounds (in order), its comparisons, or the sentence why it did not run.

    `saturation` is the worst tensor of an FP8 gate, where that was counted: as `Step.worst_saturation` gives it.
    `flops` and `moved` are the FLOPs and bytes of a step by the formulas of `fusestep.ladder.work`, where known.
    `is_own` tells that the model is the user's. `unchanged` says why the rung changes nothing for this model, so that
    it was not measured; `beside` compares it with the contenders, by their names.
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
    unchanged: str | None = None
    is_own: bool = False
    beside: Mapping[str, Comparison] = field(default_factory=dict)

    @property
    def obstacle(self) -> str | None:
        """Why nothing may be said of its speed, whatever it is compared with; None where something may."""
        name = self.rung.name
        if self.failure is not None:
            return f"{name} did not run: {self.failure}"
        if self.unchanged is not None:
            return f"{name} changes nothing for this model: {self.unchanged}"
        if self.verdict is None or not self.verdict.passed:
            why = "it was not judged" if self.verdict is None else self.verdict.reason
            return f"{name} failed the correctness gate: {why}"
        return None

    def served_by_reference(self, names: Sequence[str]) -> Part | None:
        """The first of the parts `names` that is no kernel in some round, or is not in the step at all.

        Which parts a model of the user's calls depends on the model: there every part that ran has to be a kernel.
        """
        for name in names:
            for r in self.rounds:
                found = [part for part in r.parts if part.name == name]
                if self.is_own and name != "train_step":
                    found += [part for part in r.parts if part.name != name]
                for part in found or [Part(name, "absent", "the step did not call it")]:
                    if part.implementation not in SERVED:
                        return part
        return None


@dataclass(frozen=True)
class ContenderResult(Measured):
    """All of one contender: its raw rounds (in order), or the sentence why it did not run.

    Attributes:
        recipe: of the attempt that was measured, or of the last one that failed.
        absent: why it was not even tried: "not installed" in most cases; else None.
        version: of the peer's package.
        setbacks: sentences on better attempts that did not run.
        check: its first losses against the first rung's.
    """

    contender: Contender
    recipe: Recipe
    tokens: int
    rounds: tuple[Round, ...] = ()
    failure: str | None = None
    log: str = ""
    absent: str | None = None
    version: str | None = None
    setbacks: tuple[str, ...] = ()
    check: Check | None = None
    flops: int | None = None
    moved: int | None = None

    @property
    def obstacle(self) -> str | None:
        """Why no rung is compared with it; None where one may be."""
        name = self.contender.name
        if self.absent is not None:
            return f"{name} was not measured: {self.absent}"
        if self.failure is not None:
            return f"{name} did not run: {self.failure}"
        if self.check is None or not self.check.passed:
            why = "its first losses were not compared" if self.check is None else self.check.reason
            return f"{name} trains otherwise: {why}"
        return None


def compare(this: RungResult, other: RungResult, fused: Sequence[str], *, is_next: bool = True) -> Comparison:
    """What may be said of `this` over `other`, which differ by the ops `fused` (and by what is torch's own).

    `is_next` tells that no rung lies between them: only then is it this one's change that makes the difference.
    """
    over = other.rung.name
    for result in (other, this):
        obstacle = result.obstacle
        if obstacle is not None:
            return Comparison(over, None, "none", obstacle)
    return claim(this, other, over, fused, this.rung.slower_when if is_next else "")


def claim(this: RungResult, other: Measured, over: str, fused: Sequence[str], slower_when: str = "") -> Comparison:
    """What may be claimed of a rung that passed its gate over what was timed in the same rounds, called `over`."""
    gain = paired_gain(other.times, this.times)
    on_device = None if not this.device_times or not other.device_times else (other.device_times, this.device_times)
    device = None if on_device is None else paired_gain(*on_device)

    def compared(claimed: Literal["faster", "slower", "no difference", "none"], reason: str) -> Comparison:
        return Comparison(over, gain, claimed, reason, device)

    part = this.served_by_reference(fused)
    if part is not None:
        what = "was emulated" if part.implementation == "emulated" else "ran as its reference, not fused"
        why = f"the fused part {part.name} {what}: {part.reason}"
        if not gain.is_slower:
            return compared("none", why)
        # What another rung brought is not this one's reason by itself.
        cause = "" if part.name == this.rung.fused else _likely_cause(this, slower_when, device)
        return compared("slower", f"{cause}; and {why}" if cause else why)
    for name, result in ((over, other), (this.rung.name, this)):
        if result.doubling is not None and abs(result.doubling - 1) > DOUBLING_WITHIN:
            return compared(
                "none",
                f"the timer's self-check failed for {name}: twice the steps took {2 * result.doubling:.2f} times as "
                "long",
            )
    if gain.low is None:
        return compared("none", "one round shows no spread; pass --rounds 3 or more")
    if gain.is_faster:
        return compared("faster", "")
    if gain.is_slower:
        return compared("slower", _likely_cause(this, slower_when, device))
    if this.is_launch_bound:
        return compared("no difference", HELD_BY_HOST)
    return compared("no difference", SCATTERED if gain.high is not None and gain.high > _SCATTER * gain.low else "")


def _likely_cause(this: RungResult, slower_when: str, device: Gain | None) -> str:
    """What probably makes a rung slower: not what its kernels cost where the device needs less time for them."""
    causes = [slower_when] if slower_when and not (this.is_launch_bound and device and device.is_faster) else []
    if this.is_launch_bound and this.device is not None and this.step is not None:
        causes.insert(
            0,
            f"launch-bound: the device needs {this.device:.2f} of {this.step.median:.2f} ms and waits for the host "
            "the rest",
        )
    return "; ".join(causes)


@dataclass(frozen=True)
class Ladder:
    """A whole measurement: what was asked, where it ran, the rungs in order, and remarks for the reader.

    `ceilings` is what the device reached in the same run; None on a CPU. `contenders` stand beside the rungs.
    """

    plan: Mapping[str, Any]
    environment: Mapping[str, Any]
    rungs: tuple[RungResult, ...]
    notes: tuple[str, ...] = field(default=())
    ceilings: Ceilings | None = None
    contenders: tuple[ContenderResult, ...] = ()

    def fastest(self, library: str) -> ContenderResult | None:
        """The fastest contender of a peer that trains as the rungs do; None where none did."""
        found = [c for c in self.contenders if c.contender.library == library and c.obstacle is None and c.rounds]
        return min(found, key=lambda c: c.step.median if c.step is not None else 0.0, default=None)
