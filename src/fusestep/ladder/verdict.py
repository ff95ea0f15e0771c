"""The verdict: what to switch on for this model on this device, what not, and why; no more than the figures show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from fusestep.ladder.results import Ladder, RungResult
from fusestep.ladder.statistics import CONFIDENCE, paired_gain
from fusestep.ladder.words import counted, gain_in_words, native_of, peers_of, place

Decision = Literal["switch on", "leave off", "no difference", "cannot tell"]

#: In the order in which a reader wants them.
DECISIONS: tuple[Decision, ...] = get_args(Decision)

#: Peaks closer than this are the allocator's rounding.
_MEMORY_DIFFERS = 0.05


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
    best = _best(rungs)
    findings = tuple(
        _finding(result, _previous(rungs, place), is_within_best=best is not None and place <= rungs.index(best))
        for place, result in enumerate(rungs[1:], start=1)
    )
    return Conclusion(
        _headline(ladder, best, findings), None if best is None else best.rung.name, findings, _remarks(ladder, best)
    )


def _previous(rungs: Sequence[RungResult], place: int) -> RungResult:
    """The rung before that changes anything."""
    return next(other for other in reversed(rungs[:place]) if other.unchanged is None)


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


def _finding(result: RungResult, previous: RungResult, *, is_within_best: bool) -> Finding:
    name, comparison = result.rung.name, result.over_previous
    if result.failure is not None:
        return Finding(name, "cannot tell", f"it did not run: {result.failure.rstrip('.')}")
    if result.unchanged is not None:
        return Finding(name, "no difference", f"it changes nothing for this model: {result.unchanged}")
    if result.verdict is not None and not result.verdict.passed:
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
    if not here or not there or abs(here / there - 1) < _MEMORY_DIFFERS:
        return ""
    return f"; its peak memory is {_share(here / there)}"


def _share(ratio: float) -> str:
    return f"{abs(ratio - 1):.0%} {'lower' if ratio < 1 else 'higher'}"


def _headline(ladder: Ladder, best: RungResult | None, findings: Sequence[Finding]) -> str:
    first, where = ladder.rungs[0], place(ladder)
    name = first.rung.name
    if best is not None and best.over_first is not None and best.over_first.gain is not None:
        gain = best.over_first.gain
        chosen = [finding.rung for finding in findings if finding.decision == "switch on"]
        # All rungs up to the best are in its figure, also those that nothing can be said of one by one.
        what = f"switch on {_listed(chosen)}: the rungs up to" if chosen else "take the rungs together up to"
        return (
            f"On {where}, {what} {best.rung.name} train this model {gain.ratio:.2f} times as fast as {name} alone "
            f"({CONFIDENCE:.0%} interval {gain.low:.2f}–{gain.high:.2f})."
        )
    if first.failure is not None:
        return f"No gain can be told on {where}: {name}, which all are compared with, did not run."
    if first.verdict is None or not first.verdict.passed:
        return f"No gain can be told on {where}: {name}, which all are compared with, did not pass the gate."
    if len(ladder.rungs) == 1:
        return f"Only {name} was measured on {where}, so there is nothing to compare; name more with --rungs."
    if ladder.plan["rounds"] == 1:
        return f"No gain can be told on {where} from one round, which shows no spread; pass --rounds 3 or more."
    return (
        f"On {where}, no rung is shown to train this model faster than {name}: nothing to switch on by these figures."
    )


def _remarks(ladder: Ladder, best: RungResult | None) -> tuple[str, ...]:
    first = ladder.rungs[0]
    measured = [r for r in ladder.rungs if r.rounds]
    lines: list[str] = []
    shown = best or (measured[-1] if measured else None)
    if shown is not None:
        lines += _host_or_device(shown, measured) + _rate(shown, ladder)
        lines += _beside_native(shown) + _beside_peers(shown, ladder)
    if best is not None:
        lines += _inside(best, ladder.rungs) + _memory(best, first, measured)
    lines += _gate(ladder)
    drifting = [r.rung.name for r in measured if r in (first, best) and any(not x.timing.stable for x in r.rounds)]
    if drifting:
        lines.append(f"{_listed(drifting)}: still drifting when its warm-up had to end, so take its gain with care.")
    if measured:
        lines.append(
            f"This holds for this model, batch, data and machine, over {counted(ladder.plan['rounds'], 'round')}; "
            "another model or machine can turn it around."
        )
    return tuple(lines)


def _host_or_device(shown: RungResult, measured: Sequence[RungResult]) -> list[str]:
    if shown.device is None or shown.step is None:
        return []
    name, busy = shown.rung.name, f"the device is busy {shown.device:.2f} of {shown.step.median:.2f} ms of a step"
    if not shown.is_launch_bound:
        return [f"{name} is not launch-bound: {busy}, so only faster kernels or less work make it faster."]
    graphed = [r for r in measured if r.recipe.graph]
    mend = (
        "a larger batch, or longer sequences, would use the rest"
        if graphed
        else "the rung graph, which was not measured, takes the launches from the host"
    )
    return [f"{name} is launch-bound: {busy} and waits for the host the rest; {mend}."]


def _rate(shown: RungResult, ladder: Ladder) -> list[str]:
    flops, ceilings = shown.flops_per_second, ladder.ceilings
    ceiling = None if ceilings is None else ceilings.products.get(shown.recipe.precision)
    if flops is None or ceiling is None:
        return []
    return [
        f"{shown.rung.name} reaches {flops / 1e12:,.1f} TFLOP/s of the model's products, {flops / ceiling:.0%} of what "
        f"a large product in {shown.recipe.precision.upper()} reached here."
    ]


def _beside_native(shown: RungResult) -> list[str]:
    """The best rung against the best of native PyTorch, so that its gain is not over a straw man."""
    native = native_of(shown)
    if native is None:
        return []
    name = f"the best of native PyTorch in the same precision, {native.over}"
    if native.gain is None or native.claim == "none":
        why = native.reason.rstrip(".")
        return [f"Over {name}, nothing is claimed of {shown.rung.name}: {why}."]
    verb = {"faster": "is", "slower": "is only", "no difference": "is, with no difference that these rounds can tell,"}
    return [f"{shown.rung.name} {verb[native.claim]} {gain_in_words(native.gain)} as fast as {name}."]


def _beside_peers(shown: RungResult, ladder: Ladder) -> list[str]:
    fastest = [one for one in (ladder.fastest(peer) for peer in peers_of(ladder)) if one is not None]
    if not fastest:
        return []
    best = min(fastest, key=lambda one: one.step.median if one.step is not None else 0.0)
    comparison = shown.beside.get(best.contender.name)
    if comparison is None or comparison.gain is None or comparison.claim == "none" or best.step is None:
        return []
    return [
        f"The fastest of the other libraries is {best.contender.name} with {best.step.median:.2f} ms; "
        f"{shown.rung.name} is {gain_in_words(comparison.gain)} as fast."
    ]


def _inside(best: RungResult, rungs: Sequence[RungResult]) -> list[str]:
    """Rungs that cost and are in the best one's figure all the same, since rungs are cumulative."""
    before = rungs[1 : rungs.index(best)]
    costly = [r for r in before if r.over_previous is not None and r.over_previous.claim == "slower"]
    lines = []
    if costly:
        names = _listed([r.rung.name for r in costly])
        removable = [r for r in costly if r.rung.only_if_chosen]
        left = ",".join(r.rung.name for r in rungs if r not in removable)
        mend = f"; --rungs {left} measures it without {_listed([r.rung.name for r in removable])}" if removable else ""
        lines.append(f"{names} slowed it down and {_is(costly)} in the figure of {best.rung.name} all the same{mend}.")
    return lines


def _is(several: Sequence[object]) -> str:
    return "is" if len(several) == 1 else "are"


def _memory(best: RungResult, first: RungResult, measured: Sequence[RungResult]) -> list[str]:
    """Peaks of GPU memory; a CPU's resident sets hold the libraries, which decide nothing."""
    peaks = {r.rung.name: r.peak.reserved for r in measured if r.peak is not None and r.peak.reserved}
    here, there = peaks.get(best.rung.name), peaks.get(first.rung.name)
    if here is None or there is None:
        return []
    relation = "as much as" if abs(here / there - 1) < 0.005 else f"{_share(here / there)} than"
    line = f"Peak memory of {best.rung.name}: {here / 2**20:,.0f} MiB, {relation} {first.rung.name}'s"
    passing = {r.rung.name for r in measured if r.verdict is not None and r.verdict.passed}
    least = min((name for name in peaks if name in passing), key=lambda name: peaks[name], default=best.rung.name)
    if peaks[least] < (1 - _MEMORY_DIFFERS) * here:
        line += f"; the lowest is {least}'s, {peaks[least] / 2**20:,.0f} MiB"
    return [line + "."]


def _gate(ladder: Ladder) -> list[str]:
    judged = [(r.rung.name, r.verdict) for r in ladder.rungs if r.verdict is not None]
    failed = [name for name, verdict in judged if not verdict.passed]
    if failed:
        return [f"The correctness gate was failed by {_listed(failed)}; a speed with other losses is no gain."]
    if len(judged) < 2:
        return []
    worst, verdict = max(judged[1:], key=lambda pair: pair[1].deviation)
    where = "on text" if ladder.plan.get("factory") is None else "on its own batches"
    return [
        f"The correctness gate was passed by all that were judged: after {ladder.plan['gate_steps']} steps {where} "
        f"the loss furthest from {ladder.rungs[0].rung.name}'s is {worst}'s, {verdict.deviation:.3%} off. A longer "
        "training may tell more."
    ]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:-1]) + " and " + names[-1] if len(names) > 1 else "".join(names)
