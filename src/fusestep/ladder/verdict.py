"""The verdict: what to switch on for this model on this device, what not, and why; no more than the figures show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from fusestep.ladder.results import Ladder, RungResult
from fusestep.ladder.statistics import CONFIDENCE, paired_gain
from fusestep.ladder.verdict_remarks import (
    MEMORY_DIFFERS,
    is_held_up,
    listed,
    previous_of,
    remarks,
    share_in_words,
)
from fusestep.ladder.words import gain_in_words, native_of, place

Decision = Literal["switch on", "leave off", "no difference", "cannot tell"]

#: In the order in which a reader wants them.
DECISIONS: tuple[Decision, ...] = get_args(Decision)


@dataclass(frozen=True)
class Finding:
    """What is said of one rung, and the figures behind it in a clause."""

    rung: str
    decision: Decision
    why: str


@dataclass(frozen=True)
class Conclusion:
    """The whole verdict.

    Attributes:
        headline: one sentence.
        best: the earliest rung that no other is shown to be faster than, None where none is shown faster than the
            first. Rungs are cumulative: its figure holds for all rungs up to it together.
        findings: of every rung after the first, in the ladder's order.
        remarks: what else decides: host or device, memory, the gate, how far the figures carry.
    """

    headline: str
    best: str | None
    findings: tuple[Finding, ...]
    remarks: tuple[str, ...]

    def named(self, decision: Decision) -> list[str]:
        """The rungs of one decision."""
        return [finding.rung for finding in self.findings if finding.decision == decision]


def conclude(ladder: Ladder) -> Conclusion:
    """Read the verdict off a ladder."""
    rungs = ladder.rungs
    first, best = rungs[0], _best(rungs)
    findings = tuple(
        _finding(
            result,
            previous_of(rungs, place),
            is_within_best=best is not None and place <= rungs.index(best),
            first_failed=None if first.verdict is None or first.verdict.passed else first.rung.name,
            graphed=best.rung.name if best is not None and best.recipe.graph and place < rungs.index(best) else None,
        )
        for place, result in enumerate(rungs[1:], start=1)
    )
    return Conclusion(
        _headline(ladder, best, findings), None if best is None else best.rung.name, findings, remarks(ladder, best)
    )


def _best(rungs: Sequence[RungResult]) -> RungResult | None:
    faster = [r for r in rungs if r.over_first is not None and r.over_first.claim == "faster"]
    if not faster:
        return None
    fastest = max(faster, key=_gain_over_first)
    # The fewest changes that do: a later rung has to be shown faster, not only to have come out so.
    return next(r for r in faster if not paired_gain(r.times, fastest.times).is_faster)


def _gain_over_first(result: RungResult) -> float:
    gain = result.over_first and result.over_first.gain
    return gain.ratio if gain else 0.0


def _finding(
    result: RungResult, previous: RungResult, *, is_within_best: bool, first_failed: str | None, graphed: str | None
) -> Finding:
    """What is said of a rung.

    Args:
        first_failed: the first rung's name, if it did not pass the gate.
        graphed: a later rung's name that is one graph and within the best.
    """
    name, comparison = result.rung.name, result.over_previous
    if result.failure is not None:
        return Finding(name, "cannot tell", f"it did not run: {result.failure.rstrip('.')}")
    if result.unchanged is not None:
        return Finding(name, "no difference", f"it changes nothing for this model: {result.unchanged}")
    if result.verdict is not None and not result.verdict.passed:
        if first_failed:
            return Finding(name, "cannot tell", f"{first_failed} did not pass the gate either, so nothing judges it")
        if result.verdict.is_random:
            return Finding(name, "cannot tell", f"the correctness gate cannot judge it: {result.verdict.reason}")
        return Finding(name, "leave off", f"it failed the correctness gate: {result.verdict.reason}")
    if comparison is None or comparison.gain is None:
        # The rung before it did not run or failed its gate; what both bring together may still be known.
        why = "it was not compared" if comparison is None else comparison.reason.rstrip(".")
        total = result.over_first
        if total is not None and total.claim == "faster" and total.gain is not None:
            why += f"; with all before it, {gain_in_words(total.gain)} over {total.over}"
        return Finding(name, "cannot tell", why)
    figure = f"{gain_in_words(comparison.gain)} over {comparison.over}"
    memory = _memory_beside(result, previous)
    reason = comparison.reason.rstrip(".")
    if comparison.claim == "none":
        return Finding(name, "cannot tell", f"{figure} was measured, but {reason}")
    if comparison.claim == "slower" and graphed is not None and is_held_up(result, previous):
        why = (
            f"{figure} while the host launches each kernel, but the device needs {result.device:.2f} ms for a step "
            f"where it needed {previous.device:.2f}: {graphed} takes them from the host, with {name} in its figure"
        )
        return Finding(name, "cannot tell", why + memory)
    if comparison.claim == "slower":
        return Finding(name, "leave off", figure + (f", likely because {reason}" if reason else "") + memory)
    if comparison.claim == "no difference":
        why = f"{figure} is a difference that these rounds cannot tell from none"
        return Finding(name, "no difference", why + (f", since {reason}" if reason else "") + memory)
    if not is_within_best:
        why = f"{figure}, but with all before it it is not shown faster than fewer rungs are"
        return Finding(name, "cannot tell", why + memory)
    return Finding(name, "switch on", figure + memory)


def _memory_beside(result: RungResult, other: RungResult) -> str:
    """How much more or less GPU memory a rung takes than the one before it, where that is worth a word."""
    here, there = (None if r.peak is None else r.peak.reserved for r in (result, other))
    if not here or not there or abs(here / there - 1) < MEMORY_DIFFERS:
        return ""
    return f"; its peak memory is {share_in_words(here / there)}"


def _headline(ladder: Ladder, best: RungResult | None, findings: Sequence[Finding]) -> str:
    first, where = ladder.rungs[0], place(ladder)
    name = first.rung.name
    if best is not None and best.over_first is not None and best.over_first.gain is not None:
        gain = best.over_first.gain
        chosen = [finding.rung for finding in findings if finding.decision == "switch on"]
        # All rungs up to the best are in its figure, also those that nothing can be said of one by one.
        what = f"switch on {listed(chosen)}: the rungs up to" if chosen else "take the rungs together up to"
        said = (
            f"On {where}, {what} {best.rung.name} train this model {gain.ratio:.2f} times as fast as {name} alone "
            f"({CONFIDENCE:.0%} interval {gain.low:.2f}–{gain.high:.2f})"
        )
        native = native_of(best)
        if native is not None and native.claim == "slower" and native.gain is not None:
            return f"{said}; PyTorch's own best, {native.over}, is faster still, by {1 / native.gain.ratio:.2f} times."
        return f"{said}."
    if first.failure is not None:
        return f"No gain can be told on {where}: {name}, which all are compared with, did not run."
    if first.verdict is None or not first.verdict.passed:
        why = "" if first.verdict is None else f": {first.verdict.reason}"
        return f"No gain can be told on {where}: {name}, which all are compared with, did not pass the gate{why}."
    if len(ladder.rungs) == 1:
        return f"Only {name} was measured on {where}, so there is nothing to compare; name more with --rungs."
    if ladder.plan["rounds"] == 1:
        return f"No gain can be told on {where} from one round, which shows no spread; pass --rounds 3 or more."
    return (
        f"On {where}, no rung is shown to train this model faster than {name}: nothing to switch on by these figures."
    )
