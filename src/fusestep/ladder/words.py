"""What a reader is told of a ladder in words: gains, what ran as what, and every remark beside the figures."""

from __future__ import annotations

from fusestep.ladder.contenders import NATIVE_OF
from fusestep.ladder.measured import Measured
from fusestep.ladder.results import SCATTERED, Comparison, ContenderResult, Ladder, RungResult
from fusestep.ladder.rungs import Recipe
from fusestep.ladder.statistics import CONFIDENCE, Gain
from fusestep.tables import counted


def place(ladder: Ladder) -> str:
    """Where it was measured: the GPU, or the CPU and how many threads the measured processes computed with."""
    environment = ladder.environment
    if environment["gpu"] is not None:
        return str(environment["gpu"])
    threads = next((r.threads for result in ladder.rungs for r in result.rounds), environment["threads"])
    return f"{environment['cpu']}, {counted(threads, 'thread')}"


def model(ladder: Ladder) -> str:
    """The model and what was fed to it."""
    plan = ladder.plan
    if plan.get("factory") is not None:
        return (
            f"--model {plan['factory']}: {plan['described']['kind']} of {_parameters(plan['parameters'])}, "
            f"{counted(plan['tokens_per_step'], 'token')} a step"
        )
    sizes = plan["model"]
    return (
        f"preset {plan['preset']}: {_parameters(plan['parameters'])}, {counted(sizes['layers'], 'layer')} × "
        f"{sizes['width']} wide, context {sizes['context']}, vocabulary {sizes['vocab_size']}, "
        f"batch {plan['batch']} ({counted(plan['tokens_per_step'], 'token')} a step)"
    )


def _parameters(count: int) -> str:
    """A number of parameters: "950 parameters", "12.3 K parameters", "28.9 M parameters"."""
    units = ((1e6, "M"), (1e3, "K"))
    short = next((f"{count / unit:,.1f} {name} parameters" for unit, name in units if count >= unit), None)
    return counted(count, "parameter") if short is None else short


def steps_in_words(ladder: Ladder) -> str:
    """Timed steps of a process, "36" or "12–36": those that take long are timed less often."""
    counts = {len(r.timing.steps) for one in (*ladder.rungs, *ladder.contenders) for r in one.rounds}
    if not counts:
        return str(ladder.plan["steps"])
    return "–".join(str(count) for count in sorted({min(counts), max(counts)}))


def claim_in_words(comparison: Comparison | None) -> str:
    """A gain and whether it is claimed, for a cell."""
    if comparison is None:
        return ""
    if comparison.gain is None:
        return "no claim"
    return gain_in_words(comparison.gain) + (" no claim" if comparison.claim == "none" else "")


def gain_in_words(gain: Gain) -> str:
    """How many times faster, with the interval where there is one."""
    interval = "" if gain.low is None else f" ({gain.low:.2f}–{gain.high:.2f})"
    return f"{gain.ratio:.2f}×{interval}"


def device_in_words(result: Measured) -> str:
    """The device's time for a step, in ms, for a cell."""
    return "" if result.device is None else bounded(f"{result.device:.2f}", result.is_device_bound)


def bounded(figure: str, is_bound: bool) -> str:
    """A figure as it is shown: with "≤" where it is an upper bound and no more."""
    return f"≤ {figure}" if is_bound else figure


def native_of(result: RungResult) -> Comparison | None:
    """The comparison of a rung with the best of native PyTorch in its precision; None where that was not asked for."""
    return result.beside.get(NATIVE_OF[result.recipe.precision])


def over_peer(result: RungResult, ladder: Ladder, peer: str) -> Comparison | None:
    """The comparison of a rung with a peer's fastest contender; None where none of the peer's ran as it should."""
    fastest = ladder.fastest(peer)
    return None if fastest is None else result.beside.get(fastest.contender.name)


def peers_of(ladder: Ladder) -> list[str]:
    """The peers that were asked for, in order."""
    return list(dict.fromkeys(one.contender.library for one in ladder.contenders if one.contender.library))


def status_of(contender: ContenderResult) -> str:
    """What became of a contender, in a few words."""
    if contender.absent is not None:
        return contender.absent
    if contender.failure is not None:
        return f"did not run: {contender.failure}"
    if contender.check is not None and not contender.check.passed:
        return f"trains otherwise: {contender.check.reason}"
    return "measured" if contender.rounds else "not measured"


def ways_in_words(recipe: Recipe) -> str:
    """How the steps of a contender run, where that is not one launch at a time."""
    ways = {"graph": "the whole step in one graph", "compiled": "torch.compile"}
    return " and ".join(words for name, words in ways.items() if getattr(recipe, name))


def summary_of(contender: ContenderResult) -> str:
    """What a contender is, and how it was measured where its best attempt did not run."""
    first, measured = contender.contender.attempts[0], contender.recipe
    if measured == first or not contender.rounds:
        return contender.contender.summary
    how = f"with {ways_in_words(measured)}" if ways_in_words(measured) else "one launch at a time"
    return f"{contender.contender.summary}, but measured {how}, since that did not run"


def numbers_of(recipe: Recipe) -> str:
    """In what a step computes and what it keeps: "BF16, weights and moments FP32"."""
    weights = recipe.weights.upper()
    # Transformer Engine's optimizer keeps masters of its weights, and its moments as it keeps those.
    kept = f"weights {weights}, moments and masters FP32" if recipe.peer == "te" else f"weights and moments {weights}"
    return f"{recipe.precision.upper()}, {kept}"


def peer_in_words(result: RungResult, ladder: Ladder, peer: str) -> str:
    """A cell: how many times faster the rung is than the peer, or why there is no such figure."""
    comparison = over_peer(result, ladder, peer)
    if comparison is not None:
        return claim_in_words(comparison)
    absent = [one.absent for one in ladder.contenders if one.contender.library == peer and one.absent is not None]
    return absent[0] if absent else "did not run"


def runs_as(result: RungResult) -> str:
    """What the part that a rung is about ran as."""
    if result.rung.fused is None:
        return "torch's own"
    part = result.served_by_reference([result.rung.fused])
    if part is not None:
        return "emulated" if part.implementation == "emulated" else "reference, not fused"
    if result.rung.fused == "train_step":
        return "one CUDA graph"
    return "Triton kernel" if result.recipe.precision != "fp8" else "the device's FP8"


def remarks_of(ladder: Ladder) -> list[str]:
    """Everything beside the figures: failures, missing claims, losses and their cause, the method."""
    remarks: dict[str, list[str]] = {}

    def remark(text: str, name: str) -> None:
        names = remarks.setdefault(text, [])
        if name not in names:
            names.append(name)

    for result in ladder.rungs:
        name = result.rung.name
        if result.failure is not None:
            remark(f"did not run: {result.failure}", name)
            continue
        if result.unchanged is not None:
            remark(f"changes nothing for this model: {result.unchanged}", name)
            continue
        for comparison in (result.over_first, result.over_previous):
            if comparison is None:
                continue
            if comparison.claim == "none":
                remark(f"no speed-up is claimed: {comparison.reason}", name)
            elif comparison.claim == "slower" and comparison.gain is not None:
                remark(
                    f"slower than {comparison.over}, {comparison.gain.ratio:.2f}×"
                    + (f"; likely because {comparison.reason}" if comparison.reason else ""),
                    name,
                )
            elif comparison.claim == "no difference":
                why = f"; {comparison.reason}" if comparison.reason else ""
                if comparison.reason == SCATTERED:
                    why += ", so raise --rounds on a machine that is otherwise idle"
                remark(f"no difference from {comparison.over} in wall time that these rounds can tell{why}", name)
        if result.saturation is not None:
            worst = result.saturation
            remark(
                f"of the elements of {worst['module']}'s {worst['tensor']}, the worst of {worst['tensors']} tensors, "
                f"{worst['saturated']:.4%} were saturated and {worst['flushed']:.4%} flushed to zero during the gate",
                name,
            )
        if result.is_launch_bound:
            remark(
                f"launch-bound: the host takes {result.host:.2f} ms to queue a step for which the device needs "
                f"{result.device:.2f}",
                name,
            )
        if any(not r.timing.stable for r in result.rounds):
            remark("still drifting when its warm-up had to end", name)
        for why in {r.unprofiled for r in result.rounds if r.unprofiled}:
            remark(f"its kernels are not known, since they could not be profiled: {why}", name)
    for contender in ladder.contenders:
        name = contender.contender.name
        for setback in contender.setbacks:
            remark(setback, name)
        if contender.absent is None and contender.obstacle is not None:
            remark(contender.obstacle.removeprefix(f"{name} "), name)
        if any(not r.timing.stable for r in contender.rounds):
            remark("still drifting when its warm-up had to end", name)
    if any(native_of(result) is not None and result.recipe.precision == "fp8" for result in ladder.rungs):
        remark("PyTorch by itself trains nothing in FP8, so beside it stands the best of native BF16", "fp8")
    lines = [f"{', '.join(names)}: {text.rstrip('.')}." for text, names in remarks.items()]
    lines += ladder.notes
    baseline = next((r.optimizer for r in ladder.rungs[0].rounds), None)
    lines.append(
        (f"{ladder.rungs[0].rung.name}'s optimizer is {baseline}; " if baseline else "")
        + "FP32 is full FP32, TF32 is off. × is times as fast, with its "
        f"{CONFIDENCE:.0%} interval over the rounds; first ms is the slowest first step"
        + (", with others made ready beside it on this host." if ladder.environment["gpu"] is not None else ".")
    )
    return lines
