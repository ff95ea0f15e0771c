from __future__ import annotations

import math

import pytest

from fusestep.ladder.gate import judge, last_loss

BASELINE = [5.0 - 0.01 * step for step in range(200)]


def scaled(factor: float) -> list[float]:
    return [value * factor for value in BASELINE]


def test_the_last_tenth_counts() -> None:
    assert last_loss([9.0] * 180 + [1.0] * 20) == 1.0
    assert last_loss([9.0, 1.0]) == 1.0


@pytest.mark.parametrize(
    ("precision", "within", "beyond"), [("fp32", 1.0004, 1.0006), ("bf16", 1.0019, 1.0021), ("fp8", 1.0099, 1.0101)]
)
def test_each_precision_has_its_tolerance(precision: str, within: float, beyond: float) -> None:
    for factor in (within, 2 - within):
        assert judge(scaled(factor), BASELINE, BASELINE, precision).passed  # type: ignore[arg-type]
    for factor in (beyond, 2 - beyond):
        verdict = judge(scaled(factor), BASELINE, BASELINE, precision)  # type: ignore[arg-type]
        assert not verdict.passed
        assert "allowed is" in verdict.reason


def test_three_times_the_noise_of_reordered_sums_is_allowed() -> None:
    reordered = scaled(1.001)
    assert judge(scaled(0.9971), BASELINE, reordered, "fp32").passed
    assert not judge(scaled(0.9969), BASELINE, reordered, "fp32").passed


def test_where_the_noise_is_not_known_the_tolerance_alone_counts_and_only_a_finite_failure_asks_for_it() -> None:
    within, beyond = (judge(scaled(factor), BASELINE, None, "fp32") for factor in (1.0004, 1.001))
    assert (within.passed, within.noise, within.tolerance, within.is_settled) == (True, None, 0.0005, True)
    assert (beyond.passed, beyond.tolerance, beyond.is_settled) == (False, 0.0005, False)
    assert judge([*BASELINE[:-1], math.nan], BASELINE, None, "fp32").is_settled


def test_no_noise_lets_everything_pass() -> None:
    """A loss that is random makes a noise that would allow any other."""
    random = scaled(1.4)
    verdict = judge(scaled(1.3), BASELINE, random, "fp32")
    assert not verdict.passed
    assert verdict.tolerance == 0.05
    assert verdict.is_random
    assert "rung 1's own loss is 40.000% off with its sums reordered" in verdict.reason
    assert judge(scaled(1.04), BASELINE, random, "fp32").passed


def test_a_loss_that_is_not_finite_fails_and_says_at_which_step() -> None:
    for bad in (math.nan, math.inf):
        curve = [*BASELINE[:6], bad, *BASELINE[7:]]
        verdict = judge(curve, BASELINE, BASELINE, "fp32")
        assert not verdict.passed
        assert "step 7" in verdict.reason


def test_noise_that_is_not_finite_allows_nothing_more() -> None:
    verdict = judge(scaled(1.1), BASELINE, [math.nan] * 200, "fp32")
    assert not verdict.passed
    assert verdict.tolerance == 0.0005


def test_a_baseline_that_is_not_finite_lets_no_rung_pass() -> None:
    assert not judge(BASELINE, [math.nan] * 200, BASELINE, "bf16").passed
