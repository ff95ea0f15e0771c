"""What stands below the findings of a verdict: what else decides, and how far the figures carry."""

from __future__ import annotations

from collections.abc import Sequence

from fusestep.ladder.findings import MEMORY_DIFFERS, share_in_words
from fusestep.ladder.results import Ladder, RungResult
from fusestep.ladder.statistics import paired_gain
from fusestep.ladder.words import gain_in_words, native_of, peers_of
from fusestep.tables import counted


def remarks(
    ladder: Ladder, best: RungResult | None, costly: Sequence[RungResult], by_device: Sequence[str]
) -> tuple[str, ...]:
    """The sentences.

    Args:
        costly: rungs before the best that are to be left off for the time that they take.
        by_device: names of rungs that were decided by the device's time.
    """
    first = ladder.rungs[0]
    measured = [r for r in ladder.rungs if r.rounds]
    lines: list[str] = []
    shown = best or (measured[-1] if measured else None)
    if shown is not None:
        lines += _host_or_device(shown, measured) + _rate(shown, ladder)
        lines += _beside_native(shown) + _beside_bf16(shown, ladder) + _beside_peers(shown, ladder)
    if best is not None:
        lines += _inside(best, costly, ladder.rungs) + _by_device(best, by_device) + _memory(best, first, measured)
    lines += _gate(ladder)
    drifting = [r.rung.name for r in measured if r in (first, best) and any(not x.timing.stable for x in r.rounds)]
    if drifting:
        lines.append(f"{listed(drifting)}: still drifting when its warm-up had to end, so take its gain with care.")
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
    if shown.is_idle is None:
        return []
    if not shown.is_idle:
        return [f"{name} is not launch-bound: {busy}, so only faster kernels or less work make it faster."]
    if not shown.is_launch_bound:
        return [
            f"{name} is not launch-bound: the host queues a step in {shown.host:.2f} ms, and the device needs "
            f"{shown.device:.2f} for one by itself. A step in a loop takes {shown.step.median:.2f}; clocks that fall "
            "under load, or other work on the machine, may be the rest."
        ]
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
    name = f"the best of native PyTorch with weights in FP32, {native.over}"
    if native.gain is None or native.claim == "none":
        why = native.reason.rstrip(".")
        return [f"Over {name}, nothing is claimed of {shown.rung.name}: {why}."]
    verb = {"faster": "is", "slower": "is only", "no difference": "is, with no difference that these rounds can tell,"}
    return [f"{shown.rung.name} {verb[native.claim]} {gain_in_words(native.gain)} as fast as {name}."]


def _beside_bf16(shown: RungResult, ladder: Ladder) -> list[str]:
    """PyTorch with everything in BF16, where it is the faster one: other numbers, which a reader may take or not."""
    one = next((one for one in ladder.contenders if one.contender.name == "native-bf16"), None)
    if one is None or one.obstacle is not None or len(one.times) != len(shown.times):
        return []
    gain = paired_gain(shown.times, one.times)
    if not gain.is_faster:
        return []
    return [
        f"native-bf16, PyTorch's own with weights and moments in BF16 too, is {gain_in_words(gain)} as fast as "
        f"{shown.rung.name}; its numbers are coarser, and only its first losses were compared."
    ]


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


def _inside(best: RungResult, costly: Sequence[RungResult], rungs: Sequence[RungResult]) -> list[str]:
    """Rungs that cost and are in the best one's figure all the same, since rungs are cumulative."""
    if not costly:
        return []
    names = listed([r.rung.name for r in costly])
    removable = [r for r in costly if r.rung.only_if_chosen]
    left = ",".join(r.rung.name for r in rungs if r not in removable)
    mend = f"; --rungs {left} measures it without {listed([r.rung.name for r in removable])}" if removable else ""
    return [f"{names} slowed it down and {_is(costly)} in the figure of {best.rung.name} all the same{mend}."]


def _by_device(best: RungResult, names: Sequence[str]) -> list[str]:
    """What stands behind a decision by the device's time, and what does not."""
    if not names:
        return []
    they, adds = ("them", "each of them adds") if len(names) > 1 else ("it", "it adds")
    return [
        f"{listed(names)} {_is(names)} judged by the device's time, which is not wall time: that of a step which is "
        f"queued whole before it starts, taken in the same rounds. {best.rung.name}, with {they} in its figure, takes "
        f"the launches from the host; what {adds} to its wall time was not measured by itself."
    ]


def _is(several: Sequence[object]) -> str:
    return "is" if len(several) == 1 else "are"


def _memory(best: RungResult, first: RungResult, measured: Sequence[RungResult]) -> list[str]:
    """Peaks of GPU memory; a CPU's resident sets hold the libraries, which decide nothing."""
    peaks = {r.rung.name: r.peak.reserved for r in measured if r.peak is not None and r.peak.reserved}
    here, there = peaks.get(best.rung.name), peaks.get(first.rung.name)
    if here is None or there is None:
        return []
    relation = "as much as" if abs(here / there - 1) < 0.005 else f"{share_in_words(here / there)} than"
    line = f"Peak memory of {best.rung.name}: {here / 2**20:,.0f} MiB, {relation} {first.rung.name}'s"
    passing = {r.rung.name for r in measured if r.verdict is not None and r.verdict.passed}
    least = min((name for name in peaks if name in passing), key=lambda name: peaks[name], default=best.rung.name)
    if peaks[least] < (1 - MEMORY_DIFFERS) * here:
        line += f"; the lowest is {least}'s, {peaks[least] / 2**20:,.0f} MiB"
    return [line + "."]


def _gate(ladder: Ladder) -> list[str]:
    judged = [(r.rung.name, r.verdict) for r in ladder.rungs if r.verdict is not None]
    failed = [name for name, verdict in judged if not verdict.passed]
    if failed:
        return [f"The correctness gate was failed by {listed(failed)}; a speed with other losses is no gain."]
    if len(judged) < 2:
        return []
    worst, verdict = max(judged[1:], key=lambda pair: pair[1].deviation)
    where = "on text" if ladder.plan.get("factory") is None else "on its own batches"
    return [
        "The correctness gate was passed by all that were judged: after "
        f"{counted(ladder.plan['gate_steps'], 'step')} {where} the loss furthest from {ladder.rungs[0].rung.name}'s is "
        f"{worst}'s, {verdict.deviation:.3%} off. A longer training may tell more."
    ]


def listed(names: Sequence[str]) -> str:
    return ", ".join(names[:-1]) + " and " + names[-1] if len(names) > 1 else "".join(names)


def previous_of(rungs: Sequence[RungResult], place: int) -> RungResult:
    """The rung before that changes anything."""
    return next(other for other in reversed(rungs[:place]) if other.unchanged is None)
