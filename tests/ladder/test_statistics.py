from __future__ import annotations

import math
import random

import pytest

from fusestep.ladder.statistics import CONFIDENCE, paired_gain, spread, student_quantile


@pytest.mark.parametrize(
    ("freedom", "expected"),
    # Tables of Student's t, two-sided 95 %.
    [(1, 12.7062), (2, 4.30265), (3, 3.18245), (4, 2.77645), (7, 2.36462), (9, 2.26216), (30, 2.04227), (101, 1.98373)],
)
def test_student_quantile_agrees_with_the_tables(freedom: int, expected: float) -> None:
    assert student_quantile(0.975, freedom) == pytest.approx(expected, rel=1e-5)


def test_student_quantile_of_one_half_is_zero_and_of_many_degrees_is_normal() -> None:
    assert student_quantile(0.5, 3) == pytest.approx(0.0, abs=1e-8)
    assert student_quantile(0.975, 100_000) == pytest.approx(1.959964, abs=1e-4)


def test_student_quantile_refuses_what_it_cannot_answer() -> None:
    with pytest.raises(ValueError, match="probability"):
        student_quantile(1.0, 3)


def test_spread_of_known_values() -> None:
    assert spread([4.0, 1.0, 3.0, 2.0, 5.0]) == spread([1.0, 2.0, 3.0, 4.0, 5.0])
    known = spread([1.0, 2.0, 3.0, 4.0])
    assert (known.low, known.median, known.high, known.count) == (1.75, 2.5, 3.25, 4)
    assert spread([7.0]).low == spread([7.0]).high == 7.0


def test_spread_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        spread([])


@pytest.mark.parametrize("rounds", [3, 5, 9])
def test_the_interval_covers_the_true_gain_as_often_as_it_says(rounds: int) -> None:
    """Times with a drift that both rungs of a round share, and noise of each process's own."""
    generator = random.Random(rounds)
    true_gain, trials, covered = 1.3, 3000, 0
    for _ in range(trials):
        drifts = [generator.lognormvariate(0, 0.3) for _ in range(rounds)]
        other = [10 * true_gain * drift * generator.lognormvariate(0, 0.03) for drift in drifts]
        this = [10 * drift * generator.lognormvariate(0, 0.03) for drift in drifts]
        gain = paired_gain(other, this)
        assert gain.low is not None
        assert gain.high is not None
        assert gain.low <= gain.ratio <= gain.high
        covered += gain.low <= true_gain <= gain.high
    # Three standard errors of a share of 0.95 in 3000 trials are 0.012; holding the median only widens.
    assert covered / trials == pytest.approx(CONFIDENCE, abs=0.013)


def test_rungs_of_equal_speed_are_rarely_called_faster() -> None:
    generator = random.Random(1)
    claims = 0
    for _ in range(2000):
        other, this = ([generator.lognormvariate(0, 0.05) for _ in range(4)] for _ in range(2))
        claims += paired_gain(other, this).is_faster
    assert claims / 2000 < 0.04  # 0.025 on either side


def test_drift_between_rounds_leaves_the_gain_alone() -> None:
    drifts = [1.0, 3.0, 0.2, 7.0]
    gain = paired_gain([2.0 * drift for drift in drifts], drifts)
    assert gain.ratio == pytest.approx(2.0)
    assert gain.low == pytest.approx(2.0)
    assert gain.is_faster
    assert not gain.is_slower


def test_one_disturbed_round_widens_the_interval_and_leaves_the_gain() -> None:
    gain = paired_gain([2.0, 2.0, 2.0], [1.0, 1.0, 30.0])
    assert gain.ratio == pytest.approx(2.0)
    assert not gain.is_faster
    assert not gain.is_slower


def test_one_round_has_no_interval_and_claims_nothing() -> None:
    gain = paired_gain([3.0], [1.0])
    assert gain.ratio == pytest.approx(3.0)
    assert gain.low is None
    assert not gain.is_faster


def test_a_slower_rung_is_slower() -> None:
    gain = paired_gain([1.0, 1.01, 0.99], [2.0, 2.02, 2.01])
    assert gain.is_slower
    assert math.isclose(gain.ratio, 0.5, rel_tol=0.02)


def test_rounds_that_do_not_pair_are_refused() -> None:
    with pytest.raises(ValueError, match="2 and 1 rounds"):
        paired_gain([1.0, 2.0], [1.0])
