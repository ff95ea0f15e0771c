"""What stands below the findings of a verdict: what else decides, and how far the figures carry."""

from __future__ import annotations

from collections.abc import Sequence

from fusestep.ladder.results import Ladder, RungResult
from fusestep.ladder.statistics import paired_gain
from fusestep.ladder.words import counted, gain_in_words, native_of, peers_of

#: Times of the device closer than this are no difference.
_DEVICE_DIFFERS = 0.02

#: Peaks closer than this are the allocator's rounding.
MEMORY_DIFFERS = 0.05


def remarks(ladder: Ladder, best: RungResult | None) -> tuple[str, ...]:
    first = ladder.rungs[0]
    measured = [r for r in ladder.rungs if r.rounds]
    lines: list[str] = []
    shown = best or (measured[-1] if measured else None)
    if shown is not None:
        lines += _host_or_device(shown, measured) + _rate(shown, ladder)
        lines += _beside_native(shown) + _beside_bf16(shown, ladder) + _beside_peers(shown, ladder)
    if best is not None:
        lines += _inside(best, ladder.rungs) + _memory(best, first, measured)
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


def _inside(best: RungResult, rungs: Sequence[RungResult]) -> list[str]:
    """Rungs that cost and are in the best one's figure all the same, since rungs are cumulative."""
    before = rungs[1 : rungs.index(best)]
    costly = [
        r
        for r in before
        if r.over_previous is not None
        and r.over_previous.claim == "slower"
        and not (best.recipe.graph and is_held_up(r, previous_of(rungs, rungs.index(r))))
    ]
    lines = []
    if costly:
        names = listed([r.rung.name for r in costly])
        removable = [r for r in costly if r.rung.only_if_chosen]
        left = ",".join(r.rung.name for r in rungs if r not in removable)
        mend = f"; --rungs {left} measures it without {listed([r.rung.name for r in removable])}" if removable else ""
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
    relation = "as much as" if abs(here / there - 1) < 0.005 else f"{share_in_words(here / there)} than"
    line = f"Peak memory of {best.rung.name}: {here / 2**20:,.0f} MiB, {relation} {first.rung.name}'s"
    passing = {r.rung.name for r in measured if r.verdict is not None and r.verdict.passed}
    least = min((name for name in peaks if name in passing), key=lambda name: peaks[name], default=best.rung.name)
    if peaks[least] < (1 - MEMORY_DIFFERS) * here:
        line += f"; the lowest is {least}'s, {peaks[least] / 2**20:,.0f} MiB"
    return [line + "."]


def _gate(ladder: Ladder) -> list[str]:
    judged = [(r.rung.name, r.verdict) for r in ladder.rungs if r.verdict is not None]
    if judged and judged[0][0] == ladder.rungs[0].rung.name and not judged[0][1].passed:
        return ["The correctness gate compares with the first rung's losses, so nothing was judged."]
    failed = [name for name, verdict in judged if not verdict.passed]
    if failed:
        return [f"The correctness gate was failed by {listed(failed)}; a speed with other losses is no gain."]
    if len(judged) < 2:
        return []
    worst, verdict = max(judged[1:], key=lambda pair: pair[1].deviation)
    where = "on text" if ladder.plan.get("factory") is None else "on its own batches"
    return [
        f"The correctness gate was passed by all that were judged: after {ladder.plan['gate_steps']} steps {where} "
        f"the loss furthest from {ladder.rungs[0].rung.name}'s is {worst}'s, {verdict.deviation:.3%} off. A longer "
        "training may tell more."
    ]


def is_held_up(result: RungResult, previous: RungResult) -> bool:
    """Whether a rung is less work for the device, and slower only since the host cannot launch it fast enough."""
    here, there = result.device, previous.device
    return bool(result.is_launch_bound and here and there and here < (1 - _DEVICE_DIFFERS) * there)


def share_in_words(ratio: float) -> str:
    return f"{abs(ratio - 1):.0%} {'lower' if ratio < 1 else 'higher'}"


def listed(names: Sequence[str]) -> str:
    return ", ".join(names[:-1]) + " and " + names[-1] if len(names) > 1 else "".join(names)


def previous_of(rungs: Sequence[RungResult], place: int) -> RungResult:
    """The rung before that changes anything."""
    return next(other for other in reversed(rungs[:place]) if other.unchanged is None)
