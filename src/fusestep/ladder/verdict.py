"""The verdict: what to switch on for this model on this device, what not, and why; no more than the figures show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fusestep.ladder.findings import DECISIONS, Decision, Finding, find, is_costly
from fusestep.ladder.results import Ladder, RungResult
from fusestep.ladder.statistics import CONFIDENCE, paired_gain
from fusestep.ladder.verdict_remarks import listed, previous_of, remarks
from fusestep.ladder.words import native_of, place

__all__ = ["DECISIONS", "Conclusion", "Decision", "Finding", "conclude"]


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
    best = _best(rungs)
    end = -1 if best is None else rungs.index(best)
    # A graph that keeps the device busy turns what the device needs into wall time.
    graphed = best.rung.name if best is not None and best.recipe.graph and best.is_idle is False else None
    findings = tuple(
        find(
            result,
            previous_of(rungs, number),
            is_within_best=number <= end,
            graphed=graphed if number < end else None,
        )
        for number, result in enumerate(rungs[1:], start=1)
    )
    costly = [r for r, finding in zip(rungs[1:end], findings, strict=False) if is_costly(r, finding)]
    by_device = [finding.rung for finding in findings if finding.by == "device time"]
    return Conclusion(
        _headline(ladder, best, findings),
        None if best is None else best.rung.name,
        findings,
        remarks(ladder, best, costly, by_device),
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


def _as_it_is(ladder: Ladder) -> str:
    """The first rung, and what is in it where others stand below it on the ladder."""
    name, within = ladder.rungs[0].rung.name, ladder.plan.get("within_base", [])
    return f"{name} with {listed(within)} in it" if within else f"{name} alone"


def _headline(ladder: Ladder, best: RungResult | None, findings: Sequence[Finding]) -> str:
    first, where = ladder.rungs[0], place(ladder)
    name = first.rung.name
    if best is not None and best.over_first is not None and best.over_first.gain is not None:
        gain = best.over_first.gain
        chosen = [finding.rung for finding in findings if finding.decision == "switch on"]
        # All rungs up to the best are in its figure, also those that nothing can be said of one by one.
        within = ladder.rungs[1 : ladder.rungs.index(best)]
        others = [r.rung.name for r in within if r.unchanged is None and r.rung.name not in chosen]
        what = f"take the rungs together up to {best.rung.name}, which"
        if chosen:
            what = f"switch on {listed(chosen)}: the rungs up to {best.rung.name}"
            what += f", with {listed(others)} among them," if others else ""
        said = (
            f"On {where}, {what} train this model {gain.ratio:.2f} times as fast as {_as_it_is(ladder)} "
            f"({CONFIDENCE:.0%} interval {gain.low:.2f}–{gain.high:.2f})"
        )
        native = native_of(best)
        if native is not None and native.claim == "slower" and native.gain is not None:
            return f"{said}; PyTorch's own best, {native.over}, is faster still, by {1 / native.gain.ratio:.2f} times."
        return f"{said}."
    if first.failure is not None:
        return f"No gain can be told on {where}: {name}, which all are compared with, did not run."
    if len(ladder.rungs) == 1:
        return f"Only {name} was measured on {where}, so there is nothing to compare; name more with --rungs."
    if ladder.plan["rounds"] == 1:
        return f"No gain can be told on {where} from one round, which shows no spread; pass --rounds 3 or more."
    return (
        f"On {where}, no rung is shown to train this model faster than {name}: nothing to switch on by these figures."
    )
