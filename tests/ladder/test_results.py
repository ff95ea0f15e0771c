from __future__ import annotations

import math
from dataclasses import replace

import pytest

from fusestep.ladder.gate import Verdict
from fusestep.ladder.measured import Round
from fusestep.ladder.memory import Peak
from fusestep.ladder.results import RungResult, compare
from fusestep.ladder.rungs import RUNGS, recipe_of
from fusestep.ladder.step import Part
from fusestep.ladder.timing import Timing

PASSED = Verdict(True, 2.0, 0.0, 0.0005, 0.0, "fine")
FAILED = Verdict(False, 2.0, 0.1, 0.0005, 0.0, "its loss is far away")
FUSED = (Part("adam", "triton", "Triton on a GPU"), Part("layer_norm", "triton", "Triton on a GPU"))
NAMES = ["adam", "layer_norm"]


def rung_result(
    times: list[float],
    *,
    place: int = 2,
    verdict: Verdict | None = PASSED,
    parts: tuple[Part, ...] = FUSED,
    doubling: float = 1.0,
    device: float | None = None,
    failure: str | None = None,
) -> RungResult:
    rounds = [
        Round(
            Timing(50.0, 6, True, ((1, ms), (2, 2 * ms * doubling)), (ms,) * 3, device and 1.0, device),
            Peak(None, None, 1000 + place, 500),
            parts,
            "optimizer",
            1,
        )
        for ms in times
    ]
    rung = RUNGS[place]
    return RungResult(rung, recipe_of(rung.name), 1024, (), verdict, tuple(rounds), failure)


BASE = rung_result([10.0, 11.0, 10.5], place=0, parts=())


def test_a_fused_rung_that_is_faster_may_say_so() -> None:
    comparison = compare(rung_result([5.0, 5.5, 5.2]), BASE, NAMES)
    assert comparison.claim == "faster"
    assert comparison.gain is not None
    assert comparison.gain.ratio == pytest.approx(2.0, rel=0.02)
    assert comparison.over == "adam"


def test_a_part_that_ran_as_its_reference_claims_nothing_however_fast() -> None:
    parts = (FUSED[0], Part("layer_norm", "torch", "no GPU"))
    comparison = compare(rung_result([5.0, 5.5, 5.2], parts=parts), BASE, NAMES)
    assert comparison.claim == "none"
    assert comparison.reason == "the fused part layer_norm ran as its reference, not fused: no GPU"
    assert compare(rung_result([5.0, 5.5, 5.2], parts=parts), BASE, NAMES[:1]).claim == "faster"


def test_a_reference_that_is_slower_is_printed_as_a_loss() -> None:
    parts = (FUSED[0], Part("layer_norm", "torch", "no GPU"))
    comparison = compare(rung_result([20.0, 21.0, 20.5], parts=parts), BASE, NAMES)
    assert comparison.claim == "slower"
    assert comparison.reason.endswith("ran as its reference, not fused: no GPU")


def test_a_loss_is_not_put_down_to_the_reference_of_another_rungs_part_alone() -> None:
    parts = (Part("adam", "torch", "no GPU"), FUSED[1])
    reason = compare(rung_result([20.0, 21.0, 20.5], parts=parts), BASE, NAMES).reason
    assert reason.startswith(f"{RUNGS[2].slower_when}; and the fused part adam ran as its reference")


def test_in_a_model_of_the_users_a_rungs_own_part_is_named_before_others() -> None:
    parts = tuple(Part(name, "torch", f"no GPU for {name}") for name in NAMES)
    own = replace(rung_result([5.0, 5.5, 5.2], parts=parts), is_own=True)
    assert compare(own, BASE, ["layer_norm"]).reason.endswith("no GPU for layer_norm")
    others = replace(own, rounds=rung_result([5.0] * 3, parts=parts[:1]).rounds)
    assert compare(others, BASE, ["layer_norm"]).reason.endswith("no GPU for adam")


def test_a_part_that_is_not_in_the_step_claims_nothing() -> None:
    assert "did not call it" in compare(rung_result([5.0, 5.5, 5.2], parts=FUSED[:1]), BASE, NAMES).reason


def test_a_rung_that_fails_its_gate_has_no_speed_at_all() -> None:
    comparison = compare(rung_result([5.0, 5.5, 5.2], verdict=FAILED), BASE, NAMES)
    assert comparison.gain is None
    assert comparison.claim == "none"
    assert "far away" in comparison.reason


def test_nothing_is_claimed_over_a_rung_that_fails_its_gate_or_did_not_run() -> None:
    fast = rung_result([5.0, 5.5, 5.2])
    assert compare(fast, rung_result([9.0] * 3, place=1, verdict=FAILED), NAMES).gain is None
    gone = compare(fast, rung_result([], place=1, failure="out of memory"), NAMES)
    assert gone.gain is None
    assert "fused-adam did not run: out of memory" in gone.reason


def test_a_loss_is_printed_with_its_likely_cause() -> None:
    comparison = compare(rung_result([20.0, 21.0, 20.5]), BASE, NAMES)
    assert comparison.claim == "slower"
    assert comparison.reason == RUNGS[2].slower_when


def test_a_launch_bound_loss_says_so_first() -> None:
    slow = rung_result([20.0, 21.0, 20.5], device=6.0)
    assert slow.is_launch_bound
    assert compare(slow, BASE, NAMES).reason.startswith("launch-bound: the device needs 6.00 of 20.50 ms")
    assert not rung_result([20.0], device=19.5).is_launch_bound


def test_an_interval_that_holds_one_is_no_difference() -> None:
    comparison = compare(rung_result([10.2, 10.8, 10.4]), BASE, NAMES)
    assert (comparison.claim, comparison.reason) == ("no difference", "")
    wide = compare(rung_result([5.0, 40.0, 9.0]), BASE, NAMES)
    assert (wide.claim, wide.reason) == ("no difference", "the rounds scatter too widely")


def test_one_round_claims_nothing() -> None:
    base = rung_result([10.0], place=0)
    assert "one round" in compare(rung_result([5.0]), base, NAMES).reason


def test_a_timer_that_fails_its_self_check_claims_nothing() -> None:
    comparison = compare(rung_result([5.0, 5.5, 5.2], doubling=0.6), BASE, NAMES)
    assert comparison.claim == "none"
    assert "self-check" in comparison.reason


def test_figures_of_a_rung_sum_up_its_rounds() -> None:
    result = rung_result([10.0, 12.0, 11.0])
    assert result.step is not None
    assert result.step.median == 11.0
    assert result.tokens_per_second == pytest.approx(1024 / 0.011)
    assert result.first_step == 50.0
    assert result.peak is not None
    assert result.peak.headline == 1002
    assert result.doubling == pytest.approx(1.0)
    assert rung_result([]).step is None
    assert not math.isnan(result.times[0])
