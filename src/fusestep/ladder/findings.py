"""What the verdict says of one rung: whether to switch it on, and the figures behind that.

Wall time decides. Of a launch-bound rung it is the host's time to queue a step, which tells nothing of what the rung
changes for the device. Where the whole step is one graph in the end, which takes the launches from the host, the
device's time decides in its place, and is called that: what such a rung adds to the graph's wall time was not measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from fusestep.ladder.results import Comparison, RungResult
from fusestep.ladder.words import gain_in_words

Decision = Literal["switch on", "leave off", "no difference", "cannot tell"]

#: In the order in which a reader wants them.
DECISIONS: tuple[Decision, ...] = get_args(Decision)

#: Times of the device closer than this are no difference.
_DEVICE_DIFFERS = 0.02

#: Peaks closer than this are the allocator's rounding.
MEMORY_DIFFERS = 0.05


@dataclass(frozen=True)
class Finding:
    """What is said of one rung, the figures behind it in a clause, and which time decided; None where none did."""

    rung: str
    decision: Decision
    why: str
    by: Literal["wall time", "device time"] | None = None


def find(result: RungResult, previous: RungResult, *, is_within_best: bool, graphed: str | None) -> Finding:
    """What is said of a rung.

    Args:
        previous: the rung before it that changes anything.
        graphed: a later rung's name that is one graph, keeps the device busy and is the best.
    """
    name, comparison = result.rung.name, result.over_previous
    if result.failure is not None:
        return Finding(name, "cannot tell", f"it did not run: {result.failure.rstrip('.')}")
    if result.unchanged is not None:
        return Finding(name, "no difference", f"it changes nothing for this model: {result.unchanged}")
    if result.verdict is not None and not result.verdict.passed:
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
    memory, reason = _memory_beside(result, previous), comparison.reason.rstrip(".")
    if comparison.claim == "none":
        told = _on_device(result, previous, comparison) if result.is_launch_bound else None
        return Finding(name, "cannot tell", f"{figure} was measured, but {reason}" + (f"; {told[1]}" if told else ""))
    if result.is_launch_bound and not result.recipe.graph:
        told = _on_device(result, previous, comparison)
        if told is not None:
            found = _launch_bound(result, comparison, figure, told, graphed, is_within_best=is_within_best)
            return Finding(name, found.decision, found.why + memory, found.by)
    if comparison.claim == "slower":
        return Finding(name, "leave off", figure + _because(reason) + memory, "wall time")
    if comparison.claim == "no difference":
        why = f"{figure} is a difference that these rounds cannot tell from none"
        return Finding(name, "no difference", why + (f", since {reason}" if reason else "") + memory, "wall time")
    if not is_within_best:
        return Finding(name, "cannot tell", _not_beyond_fewer(figure) + memory, "wall time")
    if result.recipe.graph and previous.is_launch_bound and previous.device is not None and result.device is not None:
        figure += (
            f", whose launches it takes from the host: the device's time was {previous.device:.2f} ms and is "
            f"{result.device:.2f}"
        )
    return Finding(name, "switch on", figure + memory, "wall time")


def is_costly(result: RungResult, finding: Finding) -> bool:
    """Whether a rung is to be left off for the time that it takes."""
    return finding.decision == "leave off" and finding.by is not None and bool(result.rounds)


def _launch_bound(
    result: RungResult,
    comparison: Comparison,
    figure: str,
    told: tuple[Literal["less", "more", "as much"], str],
    graphed: str | None,
    *,
    is_within_best: bool,
) -> Finding:
    """What is said of a rung whose wall time is the host's, by what was `told` of the device's time."""
    name, (way, clause) = result.rung.name, told
    takes_ms = f"takes {result.host:.2f} ms to queue a step"
    if comparison.claim == "faster" and not is_within_best:
        return Finding(name, "cannot tell", _not_beyond_fewer(figure), "wall time")
    if comparison.claim == "faster" and (way != "more" or graphed is None):
        return Finding(name, "switch on", f"{figure}; it is launch-bound, and {clause}", "wall time")
    if graphed is not None:
        if comparison.claim == "faster":
            why = f"{figure} while the host launches each kernel, but {clause}, which shows with {graphed}"
            return Finding(name, "cannot tell", why)
        decisions: dict[str, Decision] = {"less": "switch on", "more": "leave off", "as much": "no difference"}
        shows = (
            f"{clause}; until {graphed}" if way == "as much" else f"{clause}, which shows with {graphed}: until then"
        )
        why = f"{shows} it is launch-bound, and wall time, {figure}, is the host's, which {takes_ms}"
        return Finding(name, decisions[way], why, "device time")
    if comparison.claim == "slower":
        also = f"; {clause}, which shows only where the whole step is one graph" if way == "less" else ""
        return Finding(name, "leave off", figure + _because(comparison.reason.rstrip(".")) + also, "wall time")
    wall = f"{figure} of wall time tells nothing, since it is launch-bound: the host {takes_ms}"
    if way == "as much":
        return Finding(name, "no difference", f"{wall}; {clause}")
    return Finding(name, "cannot tell", f"{wall}; {clause}, which shows only where the whole step is one graph")


def _on_device(
    result: RungResult, previous: RungResult, comparison: Comparison
) -> tuple[Literal["less", "more", "as much"], str] | None:
    """How the device's time compares with that of the rung before, and that in a clause; None where it is not known."""
    gain, now, before = comparison.device, result.device, previous.device
    if gain is None or now is None or before is None:
        return None
    times = f"{before:.2f} to {now:.2f} ms"
    if gain.low is None:
        return "as much", f"the device's time of a step went from {times}, by one measurement of each"
    if gain.is_faster and gain.ratio > 1 + _DEVICE_DIFFERS:
        return "less", f"the device's time of a step fell from {times}, {gain_in_words(gain)}"
    if gain.is_slower and gain.ratio < 1 - _DEVICE_DIFFERS:
        return "more", f"the device's time of a step rose from {times}, {gain_in_words(gain)}"
    return (
        "as much",
        f"the device's time of a step hardly differs, {before:.2f} and {now:.2f} ms, {gain_in_words(gain)}",
    )


def _because(reason: str) -> str:
    return f", likely because {reason}" if reason else ""


def _not_beyond_fewer(figure: str) -> str:
    return f"{figure}, but with all before it it is not shown faster than fewer rungs are"


def _memory_beside(result: RungResult, other: RungResult) -> str:
    """How much more or less GPU memory a rung takes than the one before it, where that is worth a word."""
    here, there = (None if r.peak is None else r.peak.reserved for r in (result, other))
    if not here or not there or abs(here / there - 1) < MEMORY_DIFFERS:
        return ""
    return f"; its peak memory is {share_in_words(here / there)}"


def share_in_words(ratio: float) -> str:
    return f"{abs(ratio - 1):.0%} {'lower' if ratio < 1 else 'higher'}"
