"""The correctness gate: a rung may claim speed only if it still trains as the first rung does.

Same seed, same text, same order of samples: the mean loss of the last tenth of the steps must lie within a tolerance
of the first rung's, or within three times the noise. The noise is what the first rung's own loss does when the samples
of each batch come in reverse order, which changes the order of its sums and nothing else. It is measured only where a
rung lies outside of its tolerance: it can allow more and never less.
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

#: No noise lets more than this pass: beyond it, losses tell nothing of whether a rung trains as the first one does.
WIDEST = 0.05


@dataclass(frozen=True)
class Verdict:
    """What the gate says of one rung.

    Attributes:
        passed: whether its speed may be claimed.
        loss: mean loss of the last tenth of the steps.
        deviation: |loss − first rung's| / first rung's; NaN when a loss is not finite.
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


def _is_random(noise: float) -> bool:
    return _TIMES_NOISE * noise > WIDEST


def last_loss(curve: Sequence[float]) -> float:
    """Mean of the last tenth of a loss curve, at least one step: of 200 steps, those from 181 on."""
    return statistics.fmean(curve[-max(1, len(curve) // 10) :])


def judge(
    curve: Sequence[float], baseline: Sequence[float], reordered: Sequence[float] | None, precision: Precision
) -> Verdict:
    """Compare a rung's loss curve with the first rung's, and that one with itself under reordered sums, where known."""
    loss, reference = last_loss(curve), last_loss(baseline)
    noise = None if reordered is None else abs(last_loss(reordered) - reference) / abs(reference)
    tolerance = TOLERANCE[precision]
    # A NaN noise must not widen the tolerance: every comparison with it is false.
    is_wider = noise is not None and noise * _TIMES_NOISE > tolerance
    if noise is not None and is_wider:
        tolerance = min(_TIMES_NOISE * noise, WIDEST)
    wrong = next((step for step, value in enumerate(curve, start=1) if not math.isfinite(value)), None)
    if wrong is not None:
        return Verdict(False, loss, math.nan, tolerance, noise, f"its loss is not finite at step {wrong}")
    deviation = abs(loss - reference) / abs(reference)
    limit = f"{tolerance:.3%}" + (" (three times the noise of reordered sums)" if is_wider else "")
    if noise is not None and _is_random(noise):
        limit = (
            f"{WIDEST:.0%} at most, and rung 1's own loss is {noise:.3%} off with its sums reordered, so its loss is "
            "random or unstable: let dropout be 0 and random numbers depend on the batch alone"
        )
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
