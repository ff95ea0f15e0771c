"""Medians, quartiles, and how sure a gain is: plain Python, no dependencies."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

#: The interval of a gain covers the true one in this share of repetitions.
CONFIDENCE = 0.95

METHOD = (
    "gain = median over rounds of (time of the other rung / time of this one), each time the median of one process; "
    "95 % interval = Student's t over the logarithms of those paired ratios, widened where need be to hold the gain"
)


@dataclass(frozen=True)
class Spread:
    """The quartiles of a sample; `count` values went in."""

    low: float
    median: float
    high: float
    count: int


@dataclass(frozen=True)
class Gain:
    """How many times faster one rung is than another: `ratio` > 1 is faster.

    `low` and `high` bound it with the confidence `CONFIDENCE`; None with fewer than two rounds, which show no spread.
    """

    ratio: float
    low: float | None
    high: float | None
    rounds: int

    @property
    def is_faster(self) -> bool:
        """Whether the whole interval lies above 1."""
        return self.low is not None and self.low > 1

    @property
    def is_slower(self) -> bool:
        """Whether the whole interval lies below 1."""
        return self.high is not None and self.high < 1


def spread(values: Sequence[float]) -> Spread:
    """Median and quartiles of one or more values, interpolated linearly between them."""
    ordered = sorted(values)
    if not ordered:
        raise ValueError("spread: the sample is empty; pass at least one value.")

    def quantile(share: float) -> float:
        position = share * (len(ordered) - 1)
        below = math.floor(position)
        above = min(below + 1, len(ordered) - 1)
        return ordered[below] + (ordered[above] - ordered[below]) * (position - below)

    return Spread(quantile(0.25), quantile(0.5), quantile(0.75), len(ordered))


def paired_gain(other: Sequence[float], this: Sequence[float]) -> Gain:
    """How many times faster `this` is than `other`, from one positive time of each a round.

    Rounds are interleaved, so what a round's moment does to the machine is in both times and leaves their ratio. The
    ratios multiply, hence the logarithm; few rounds, hence Student's t and not a bootstrap, which is too sure of
    itself below about ten (see `METHOD`).
    """
    if len(other) != len(this) or not this:
        raise ValueError(f"paired_gain: got {len(other)} and {len(this)} rounds; pass as many of each, at least one.")
    logarithms = [math.log(a / b) for a, b in zip(other, this, strict=True)]
    rounds = len(logarithms)
    # One round that something else disturbed moves a mean far; it widens the interval, as it should, but not the gain.
    middle = statistics.median(logarithms)
    if rounds < 2:
        return Gain(math.exp(middle), None, None, rounds)
    mean = statistics.fmean(logarithms)
    half = student_quantile((1 + CONFIDENCE) / 2, rounds - 1) * statistics.stdev(logarithms) / math.sqrt(rounds)
    low, high = min(mean - half, middle), max(mean + half, middle)
    return Gain(math.exp(middle), math.exp(low), math.exp(high), rounds)


@functools.cache
def student_quantile(probability: float, freedom: int) -> float:
    """The quantile of Student's t with `freedom` ≥ 1 degrees of freedom, for 0.5 ≤ probability < 1, to about 1e-9.

    Source: Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3 and 26.7.4, inverted by bisection.
    """
    if not 0.5 <= probability < 1 or freedom < 1:
        raise ValueError(f"student_quantile: probability {probability} must be in [0.5, 1), freedom {freedom} ≥ 1.")
    low, high = 0.0, 1.0
    while _student_cumulative(high, freedom) < probability:
        high *= 2
    return _bisect(lambda t: _student_cumulative(t, freedom) - probability, low, high)


def _student_cumulative(t: float, freedom: int) -> float:
    """P(T ≤ t) for t ≥ 0, by the finite series in the angle atan(t / √freedom)."""
    angle = math.atan(t / math.sqrt(freedom))
    cosine, sine = math.cos(angle), math.sin(angle)
    even = freedom % 2 == 0
    term = 1.0 if even else cosine
    total = term if freedom > 1 else 0.0
    for k in range(2 if even else 3, freedom, 2):
        term *= cosine * cosine * (k - 1) / k
        total += term
    return 0.5 + (sine * total / 2 if even else (angle + sine * total) / math.pi)


def _bisect(function: Callable[[float], float], low: float, high: float) -> float:
    for _ in range(200):
        middle = (low + high) / 2
        if function(middle) < 0:
            low = middle
        else:
            high = middle
        if high - low <= 1e-10 * max(1.0, high):
            break
    return (low + high) / 2
