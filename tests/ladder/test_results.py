from __future__ import annotations

import math
from dataclasses import replace

import pytest

from fusestep.ladder.gate import Verdict
from fusestep.ladder.measured import Round
from fusestep.ladder.memory import Peak
from fusestep.ladder.profiling import Kernel
from fusestep.ladder.results import HELD_BY_HOST, RungResult, compare
from fusestep.ladder.run import _compared
from fusestep.ladder.rungs import RUNGS, recipe_of
from fusestep.ladder.step import Part
from fusestep.ladder.timing import Timing
from fusestep.ladder.words import device_in_words

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
    host: float | None = 1.0,
    is_bound: bool = False,
    failure: str | None = None,
) -> RungResult:
    rounds = [
        Round(
            Timing(50.0, 6, True, ((1, ms), (2, 2 * ms * doubling)), (ms,) * 3, device and host, device, is_bound),
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
    slow = rung_result([20.0, 21.0, 20.5], device=6.0, host=20.0)
    assert slow.is_launch_bound
    reason = compare(slow, BASE, NAMES).reason
    assert reason.startswith("launch-bound: the device needs 6.00 of 20.50 ms")
    assert reason.endswith(RUNGS[2].slower_when)


@pytest.mark.parametrize(
    ("device", "host", "is_bound", "is_idle", "is_launch_bound"),
    [
        (19.5, 25.0, False, False, False),  # busy, whatever the host
        (17.0, 25.0, False, True, True),
        (17.0, 16.0, False, True, False),  # the host is ahead: it is not what the rest of the step waits for
        (17.0, 25.0, True, None, None),  # how long the device is busy is not known
        (None, None, False, None, None),
    ],
)
def test_a_step_is_launch_bound_where_the_device_idles_and_the_host_is_the_slower(
    device: float | None, host: float | None, is_bound: bool, is_idle: bool | None, is_launch_bound: bool | None
) -> None:
    result = rung_result([20.0] * 3, device=device, host=host, is_bound=is_bound)
    assert (result.is_idle, result.is_launch_bound) == (is_idle, is_launch_bound)


@pytest.mark.parametrize(("share", "is_bound"), [(0.3, False), (0.4, True)])
def test_kernels_that_fill_the_devices_time_show_that_it_did_not_wait(share: float, is_bound: bool) -> None:
    """A kernel of 5 ms that is 0.3 of all leaves little of 17 ms, and one that is 0.4 leaves 4.5."""
    result = rung_result([20.0] * 3, device=17.0, host=25.0, is_bound=True)
    seen = replace(result.rounds[0], kernels=(Kernel("gemm", 1.0, 5.0, share),))
    result = replace(result, rounds=(seen, *result.rounds[1:]))
    assert result.is_device_bound == is_bound
    assert (result.device_times is None) == is_bound
    assert device_in_words(result) == ("≤ 17.00" if is_bound else "17.00")


def test_the_devices_times_are_compared_like_the_walls() -> None:
    before = rung_result([20.0, 21.0, 20.5], place=1, device=6.0, host=20.0)
    after = rung_result([20.0, 22.0, 19.5], device=4.0, host=20.0)
    comparison = compare(after, before, NAMES)
    assert (comparison.claim, comparison.reason) == ("no difference", HELD_BY_HOST)
    assert comparison.device is not None
    assert comparison.device.ratio == pytest.approx(1.5)
    assert comparison.device.is_faster
    bound = rung_result([20.0, 22.0, 19.5], device=4.0, host=20.0, is_bound=True)
    assert compare(bound, before, NAMES).device is None
    assert compare(after, BASE, NAMES).device is None


def test_what_the_device_needs_less_time_for_is_not_slower_for_what_its_kernels_cost() -> None:
    before = rung_result([10.0, 11.0, 10.5], place=1, device=6.0, host=10.0)
    slower = rung_result([20.0, 21.0, 20.5], device=4.0, host=20.0)
    assert compare(slower, before, NAMES).reason == (
        "launch-bound: the device needs 4.00 of 20.50 ms and waits for the host the rest"
    )


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


def results_of(*names: str, parts: tuple[Part, ...], times: tuple[tuple[float, ...], ...]) -> dict[str, RungResult]:
    """Rungs in order, with the parts that ran in all of them."""
    found = {}
    for name, milliseconds in zip(names, times, strict=True):
        place = next(number for number, rung in enumerate(RUNGS) if rung.name == name)
        found[name] = rung_result(list(milliseconds), place=place, parts=parts)
    return found


def test_a_rung_that_was_not_chosen_and_is_in_none_above_it_is_not_asked_for_its_part() -> None:
    """fp8 lies below graph on the ladder, and graph runs in BF16 where fp8 is not measured."""
    parts = tuple(
        Part(rung.fused, "triton", "") for rung in RUNGS if rung.fused not in (None, "scaled_mm", "train_step")
    )
    parts += (Part("train_step", "graph", ""),)
    names, times = ("adam", "loss", "graph"), ((9.0, 9.1, 9.2), (5.0, 5.1, 5.2), (3.0, 3.1, 3.2))
    graph = _compared(results_of(*names, parts=parts, times=times), RUNGS)[2]
    for comparison in (graph.over_first, graph.over_previous):
        assert comparison is not None
        assert (comparison.claim, comparison.reason) == ("faster", "")
    with_fp8 = results_of("adam", "loss", "fp8", "graph", parts=parts, times=(*times[:2], times[1], times[2]))
    over_previous = _compared(with_fp8, RUNGS)[2].over_previous
    assert over_previous is not None
    assert over_previous.reason == "the fused part scaled_mm ran as its reference, not fused: the step did not call it"


def test_only_over_the_rung_before_it_is_a_rungs_own_change_the_likely_cause() -> None:
    parts = tuple(Part(rung.fused, "triton", "") for rung in RUNGS if rung.fused is not None)
    results = results_of(
        "adam", "fused-adam", "fused-norm", parts=parts, times=((5.0, 5.1, 5.2), (9.0, 9.1, 9.2), (9.9, 10.0, 10.1))
    )
    _, adam, norm = _compared(results, RUNGS)
    assert adam.over_first is not None
    assert adam.over_first == adam.over_previous
    assert adam.over_first.reason == RUNGS[1].slower_when
    assert norm.over_first is not None
    assert norm.over_previous is not None
    assert (norm.over_first.claim, norm.over_first.reason) == ("slower", "")
    assert norm.over_previous.reason == RUNGS[2].slower_when
