from __future__ import annotations

import math

import pytest

from fusestep.ladder.gate import check, judge, last_loss

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


def falling(to: float, start: float = 4.0, steps: int = 200) -> list[float]:
    """A loss that halves every five steps, down to a floor."""
    return [(start - to) * 0.5 ** (step / 5) + to for step in range(steps)]


def test_a_loss_that_is_not_small_is_compared_with_itself_alone_bit_for_bit() -> None:
    for baseline in (falling(0.3), [7.0] * 3, [-value for value in falling(2.5)]):
        other = [value * 1.0013 for value in baseline]
        verdict = judge(other, baseline, None, "bf16")
        plain = abs(last_loss(other) - last_loss(baseline)) / abs(last_loss(baseline))
        assert verdict.deviation == plain
        assert verdict.reason == f"loss {plain:.4%} from rung 1, allowed 0.200%"


def test_a_loss_of_0_or_near_it_is_compared_by_a_hundredth_of_what_it_was_at_the_start() -> None:
    for baseline in ([4.0] * 60 + [0.0] * 140, [4.0] * 60 + [1e-7] * 140):
        for off, passes in ((7.9e-5, True), (8.1e-5, False)):
            verdict = judge([*baseline[:-20], *[baseline[-1] + off] * 20], baseline, None, "bf16")
            assert verdict.passed is passes
            assert verdict.deviation == pytest.approx(off / 0.04)
            assert "as a share of 0.04, since that one is near 0 or crosses it" in verdict.reason
        noisy = judge([*baseline[:-20], *[1.0e-4] * 20], baseline, [*baseline[:-20], *[5e-5] * 20], "bf16")
        assert noisy.passed
        assert noisy.noise == pytest.approx(5e-5 / 0.04, rel=0.01)
        assert not judge([4.0] * 200, baseline, None, "fp8").passed


def test_a_loss_that_crosses_0_is_compared_by_what_it_was_at_the_start() -> None:
    baseline = [3.0] * 100 + [-0.02] * 100
    for off, passes in ((0.0059, True), (0.0061, False)):
        verdict = judge([*baseline[:100], *[off - 0.02] * 100], baseline, None, "bf16")
        assert verdict.passed is passes
        assert verdict.deviation == pytest.approx(off / 3.0)
    far = [3.0] * 100 + [-6.0] * 100
    assert judge([*far[:100], *[-6.0 * 1.001] * 100], far, None, "bf16").deviation == pytest.approx(0.001)


def test_a_loss_that_is_0_but_for_few_steps_is_compared_by_its_mean_and_one_of_nothing_but_0_is_like_itself() -> None:
    sparse = [0.0] * 60 + [2.0] * 10 + [0.0] * 130
    assert judge([*sparse[:-20], *[9e-7] * 20], sparse, None, "bf16").deviation == pytest.approx(9e-7 / 1e-3)
    zero = [0.0] * 200
    assert judge(zero, zero, zero, "fp32").passed
    assert not judge([1e-30] * 200, zero, zero, "fp32").passed
    assert not judge([math.nan] * 200, sparse, None, "fp32").passed


def test_first_losses_of_0_and_across_it_are_compared_too() -> None:
    assert check([0.0] * 7, [0.0] * 7, 0.002).passed
    assert not check([0.5] * 7, [0.0] * 7, 0.002).passed
    baseline = [0.4, -0.4, 0.3, -0.3, 0.2, -0.2, 0.001]
    near = check([value + 0.0005 for value in baseline], baseline, 0.002)
    assert near.passed
    assert near.deviation == pytest.approx(0.0005 / 0.3)
    assert "0.167% apart as a share of 0.3" in near.reason
    assert check([4.0, 3.0], [4.0, 3.0], 0.002).reason == (
        "the mean of its first 2 losses is 3.5000, 0.000% from 3.5000; allowed is 0.20%"
    )
