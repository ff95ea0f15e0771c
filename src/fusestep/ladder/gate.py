"""The correctness gate: a rung may claim speed only if it still trains as the first rung does.

Same seed, same text, same order of samples: the mean loss of the last tenth of the steps must lie within a tolerance
of the first rung's, or within three times the noise. The noise is what the first rung's own loss does when the samples
of each batch come in reverse order, which changes the order of its sums and nothing else. It is measured only where a
rung lies outside of its tolerance: it can allow more and never less.

How far two losses are apart is told as a share of the first rung's, which says nothing where that is near 0 or may lie
on either side of it: there it is a share of how large that loss was at the start, by `scale_of`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fusestep.ladder.rungs import Precision
from fusestep.tables import counted

#: The corpus of the gate, whatever is timed: arithmetic sequences are learnt too fast to tell two runs apart.
DATA = "text:stdlib"

TOLERANCE: Mapping[Precision, float] = {"fp32": 0.0005, "bf16": 0.002, "fp8": 0.01}
_TIMES_NOISE = 3

#: A loss smaller than this share of what it was at the start is near 0. A squared error in BF16 cannot be told better
#: than to 2⁻¹⁶ of that, which is about what BF16's tolerance then allows.
_NEAR_ZERO = 0.01

#: Steps of the start, at least: with fewer, one odd batch would be the scale.
_AT_START = 7

#: No noise lets more than this pass: beyond it, losses tell nothing of whether a rung trains as the first one does.
WIDEST = 0.05


@dataclass(frozen=True)
class Verdict:
    """What the gate says of one rung.

    Attributes:
        passed: whether its speed may be claimed.
        loss: mean loss of the last tenth of the steps.
        deviation: |loss − first rung's| / `scale_of` that; NaN when a loss is not finite.
        tolerance: what was allowed.
        noise: what reordered sums did to the first rung; None where nothing depended on it.
        reason: one clause, for a reader.
    """

    passed: bool
    loss: float
    deviation: float
    tolerance: float
    noise: float | None
    reason: str

    @property
    def is_settled(self) -> bool:
        """Whether the noise, however large, would change nothing: it passed, or no tolerance lets it."""
        return self.passed or not math.isfinite(self.deviation)

    @property
    def is_random(self) -> bool:
        """Whether the first rung's own losses differ so much that the gate can judge nothing by them."""
        return self.noise is not None and _is_random(self.noise)


@dataclass(frozen=True)
class Check:
    """What is said of a contender, in place of a gate of many steps: whether its first losses are the first rung's.

    Attributes:
        loss: mean of its first losses; deviation: |loss − first rung's| / `scale_of` that; tolerance: what was allowed.
        reason: one clause, for a reader.
    """

    passed: bool
    loss: float
    deviation: float
    tolerance: float
    reason: str


def check(opening: Sequence[float], baseline: Sequence[float], tolerance: float) -> Check:
    """Compare the first losses of a contender with those of the first rung, from the same weights on the same data."""
    loss, reference = statistics.fmean(opening), statistics.fmean(baseline)
    scale = scale_of(baseline, reference)
    deviation = _apart(loss, reference, scale)
    passed = deviation <= tolerance  # false where a loss is not finite
    said = f"the mean of its first {len(opening)} losses is {_away(loss, deviation, '', reference, scale)}"
    return Check(passed, loss, deviation, tolerance, f"{said}; allowed is {tolerance:.2%}")


def _is_random(noise: float) -> bool:
    return _TIMES_NOISE * noise > WIDEST


def last_loss(curve: Sequence[float]) -> float:
    """Mean of the last tenth of a loss curve, at least one step: of 200 steps, those from 181 on."""
    return statistics.fmean(curve[-max(1, len(curve) // 10) :])


def scale_of(curve: Sequence[float], reference: float) -> float:
    """What losses are compared by: the magnitude of `reference`, a mean of the first rung's `curve`, in most cases.

    At least a hundredth of the loss at the start, which is the median magnitude of its first tenth; all of that where
    losses of both signs are in the curve, since 0 is then a loss as any other.
    """
    at_start = statistics.median(map(abs, curve[: max(_AT_START, len(curve) // 10)]))
    # A loss that is 0 in most of its steps from the start has its mean left.
    size = at_start or statistics.fmean(map(abs, curve))
    return max(abs(reference), size if min(curve) < 0 < max(curve) else _NEAR_ZERO * size)


def is_all_zero(curve: Sequence[float]) -> bool:
    """Whether a loss is 0 at every step, so that any rung that trains nothing would pass beside it."""
    return not any(curve)


def _apart(loss: float, reference: float, scale: float) -> float:
    """How far a loss is from the first rung's; where all of that one's losses are 0, no other is near."""
    distance = abs(loss - reference)
    return distance / scale if scale else distance and math.inf


def _away(loss: float, deviation: float, of_rung_1: str, reference: float, scale: float) -> str:
    """A loss and its distance from the first rung's, in words; digits enough where both are small."""
    if scale == abs(reference):
        return f"{loss:.4f}, {deviation:.3%} from {of_rung_1}{reference:.4f}"
    return f"{loss:.4g} and {of_rung_1}{reference:.4g}, {deviation:.3%} apart {_measured_by(scale)}"


def _measured_by(scale: float) -> str:
    return f"as a share of {scale:.4g}, since that one is near 0 or crosses it"


def judge(
    curve: Sequence[float], baseline: Sequence[float], reordered: Sequence[float] | None, precision: Precision
) -> Verdict:
    """Compare a rung's loss curve with the first rung's, and that one with itself under reordered sums, where known."""
    loss, reference = last_loss(curve), last_loss(baseline)
    scale = scale_of(baseline, reference)
    noise = None if reordered is None else _apart(last_loss(reordered), reference, scale)
    tolerance = TOLERANCE[precision]
    # A NaN noise must not widen the tolerance: every comparison with it is false.
    is_wider = noise is not None and noise * _TIMES_NOISE > tolerance
    if noise is not None and is_wider:
        tolerance = min(_TIMES_NOISE * noise, WIDEST)
    wrong = next((step for step, value in enumerate(curve, start=1) if not math.isfinite(value)), None)
    if wrong is not None:
        return Verdict(False, loss, math.nan, tolerance, noise, f"its loss is not finite at step {wrong}")
    deviation = _apart(loss, reference, scale)
    limit = f"{tolerance:.3%}" + (" (three times the noise of reordered sums)" if is_wider else "")
    if noise is not None and _is_random(noise):
        limit = (
            f"{WIDEST:.0%} at most, and rung 1's own loss is {noise:.3%} off with its sums reordered, so its loss is "
            "random or unstable: let dropout be 0 and random numbers depend on the batch alone"
        )
    if deviation <= tolerance:
        by = "" if scale == abs(reference) else f" {_measured_by(scale)}"
        said = f"loss {deviation:.4%} from rung 1{by}, allowed {limit}"
        return Verdict(True, loss, deviation, tolerance, noise, said)
    of_rung_1 = "rung 1's "
    return Verdict(
        False,
        loss,
        deviation,
        tolerance,
        noise,
        f"its loss after {counted(len(curve), 'step')} is {_away(loss, deviation, of_rung_1, reference, scale)}; "
        f"allowed is {limit}",
    )
