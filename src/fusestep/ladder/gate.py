"""The correctness gate: a rung may claim speed only if it still trains as the first rung does.

Same seed, same text, same order of samples: the mean loss of the last tenth of the steps must lie within a tolerance
of the first rung's, or within three times the noise. The noise is what the first rung's own loss does when the samples
of each batch come in reverse order, which changes the order of its sums and nothing else.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fusestep.ladder.rungs import Precision

#: The corpus of the gate, whatever is timed: arithmetic sequences are learnt too fast to tell two runs apart.
DATA = "text:stdlib"

TOLERANCE: Mapping[Precision, float] = {"fp32": 0.0005, "bf16": 0.002, "fp8": 0.01}
_TIMES_NOISE = 3


@dataclass(frozen=True)
class Verdict:
    """What the gate says of one rung.

    Attributes:
        passed: whether its speed may be claimed.
        loss: mean loss of the last tenth of the steps.
        deviation: |loss − first rung's| / first rung's; NaN when a loss is not finite.
        tolerance: what was allowed, and `noise` what reordered sums did to the first rung.
        reason: one clause, for a reader.
    """

    passed: bool
    loss: float
    deviation: float
    tolerance: float
    noise: float
    reason: str


@dataclass(frozen=True)
class Check:
    """What is said of a contender, in place of a gate of many steps: whether its first losses are the first rung's.

    Attributes:
        loss: mean of its first losses; deviation: |loss − first rung's| / first rung's; tolerance: what was allowed.
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
    deviation = abs(loss - reference) / abs(reference)
    passed = deviation <= tolerance  # false where a loss is not finite
    said = f"the mean of its first {len(opening)} losses is {loss:.4f}, {deviation:.3%} from {reference:.4f}"
    return Check(passed, loss, deviation, tolerance, f"{said}; allowed is {tolerance:.2%}")


def last_loss(curve: Sequence[float]) -> float:
    """Mean of the last tenth of a loss curve, at least one step: of 200 steps, those from 181 on."""
    return statistics.fmean(curve[-max(1, len(curve) // 10) :])


def judge(
    curve: Sequence[float], baseline: Sequence[float], reordered: Sequence[float], precision: Precision
) -> Verdict:
    """Compare a rung's loss curve with the first rung's, and that one with itself under reordered sums."""
    loss, reference = last_loss(curve), last_loss(baseline)
    noise = abs(last_loss(reordered) - reference) / abs(reference)
    allowed = TOLERANCE[precision]
    # A NaN noise must not widen the tolerance: every comparison with it is false.
    tolerance = _TIMES_NOISE * noise if _TIMES_NOISE * noise > allowed else allowed
    wrong = next((step for step, value in enumerate(curve, start=1) if not math.isfinite(value)), None)
    if wrong is not None:
        return Verdict(False, loss, math.nan, tolerance, noise, f"its loss is not finite at step {wrong}")
    deviation = abs(loss - reference) / abs(reference)
    limit = f"{tolerance:.3%}" + (" (three times the noise of reordered sums)" if tolerance > allowed else "")
    if deviation <= tolerance:
        return Verdict(True, loss, deviation, tolerance, noise, f"loss {deviation:.4%} from rung 1, allowed {limit}")
    return Verdict(
        False,
        loss,
        deviation,
        tolerance,
        noise,
        f"its loss after {len(curve)} steps is {loss:.4f}, {deviation:.3%} from rung 1's {reference:.4f}; "
        f"allowed is {limit}",
    )
