"""What the verdict says of made-up results, case by case."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fusestep.ladder import Ladder
from fusestep.ladder.verdict import Conclusion, Finding, conclude

Make = Callable[..., Ladder]

SLOW, MIDDLE, FAST = (40.0, 40.4, 39.8), (20.0, 20.2, 19.9), (5.0, 5.05, 4.98)


def finding(conclusion: Conclusion, rung: str) -> Finding:
    (found,) = [finding for finding in conclusion.findings if finding.rung == rung]
    return found


def remark(conclusion: Conclusion, beginning: str) -> str:
    (found,) = [remark for remark in conclusion.remarks if remark.startswith(beginning)]
    return found


def test_rungs_that_pay_are_to_be_switched_on_and_the_headline_holds_the_whole_gain(
    make_ladder: Make, made: Any
) -> None:
    said = conclude(make_ladder({"adam": made(SLOW), "fused-adam": made(MIDDLE), "amp": made(FAST)}))
    assert said.best == "amp"
    assert said.named("switch on") == ["fused-adam", "amp"]
    assert said.headline.startswith("On A GPU, switch on fused-adam and amp: the rungs up to amp train this model 8.0")
    assert "times as fast as adam alone (95% interval 7.9" in said.headline
    assert finding(said, "amp").why.startswith("4.00× (3.9")
    assert finding(said, "amp").why.endswith(") over fused-adam")


def test_a_rung_that_costs_is_to_be_left_off_with_its_figure_and_cause(make_ladder: Make, made: Any) -> None:
    said = conclude(make_ladder({"adam": made(SLOW), "amp": made(FAST), "blocks": made(MIDDLE)}))
    assert said.best == "amp"
    assert said.named("leave off") == ["blocks"]
    why = finding(said, "blocks").why
    assert why.startswith("0.25× (0.2")
    assert "over amp, likely because attention without a mask" in why
    assert "blocks" not in said.headline


def test_a_later_rung_that_is_not_shown_faster_does_not_become_the_best(make_ladder: Make, made: Any) -> None:
    """It came out ahead in the median, within what the rounds scatter."""
    said = conclude(make_ladder({"adam": made(SLOW), "amp": made((10.0, 10.4, 9.6)), "blocks": made((9.9, 10.5, 9.5))}))
    assert said.best == "amp"
    assert said.named("no difference") == ["blocks"]
    assert "a difference that these rounds cannot tell from none" in finding(said, "blocks").why


def test_what_only_makes_up_for_the_rung_before_it_cannot_be_told_alone(make_ladder: Make, made: Any) -> None:
    rungs = {"adam": made(SLOW), "amp": made((10.0, 10.4, 9.6)), "fp8": made(MIDDLE), "graph": made((10.1, 10.3, 9.7))}
    said = conclude(make_ladder(rungs))
    assert said.best == "amp"
    assert said.named("leave off") == ["fp8"]
    assert finding(said, "graph").decision == "cannot tell"
    assert "over fp8, but with all before it it is not shown faster than fewer rungs are" in finding(said, "graph").why


def test_a_costly_rung_below_the_best_is_named_with_the_way_to_measure_without_it(make_ladder: Make, made: Any) -> None:
    said = conclude(make_ladder({"adam": made(SLOW), "amp": made(MIDDLE), "fp8": made(SLOW), "graph": made(FAST)}))
    assert said.best == "graph"
    assert said.named("leave off") == ["fp8"]
    assert remark(said, "fp8 slowed it down and is in the figure of graph all the same").endswith(
        "; --rungs adam,amp,graph measures it without fp8."
    )


def test_a_rung_that_others_always_contain_has_no_such_way(make_ladder: Make, made: Any) -> None:
    said = conclude(make_ladder({"adam": made(MIDDLE), "fused-adam": made(SLOW), "amp": made(FAST)}))
    assert remark(said, "fused-adam slowed it down and is in the figure of amp all the same.")
    assert not any("--rungs" in line for line in said.remarks)


def test_a_rung_that_fails_its_gate_is_left_off_and_what_stands_on_it_cannot_be_told(
    make_ladder: Make, made: Any
) -> None:
    said = conclude(make_ladder({"adam": made(SLOW), "amp": made(FAST, passed=False), "blocks": made(MIDDLE)}))
    assert finding(said, "amp") == Finding(
        "amp", "leave off", "it failed the correctness gate: its loss after 3 steps is 9.0000"
    )
    blocks = finding(said, "blocks")
    assert blocks.decision == "cannot tell"
    assert blocks.why.startswith("amp failed the correctness gate")
    assert "; with all before it, 2.0" in blocks.why
    assert remark(said, "The correctness gate was failed by amp; a speed with other losses is no gain.")
    # It is the only one with a gain, though which of the two brings it nobody can tell.
    assert said.headline.startswith("On A GPU, take the rungs together up to blocks train this model")


def test_a_rung_that_did_not_run_says_why(make_ladder: Make, made: Any) -> None:
    said = conclude(make_ladder({"adam": made(SLOW), "amp": made(failure="out of memory; lower --batch.")}))
    assert finding(said, "amp") == Finding("amp", "cannot tell", "it did not run: out of memory; lower --batch")
    assert said.best is None


def test_references_claim_nothing_however_fast(make_ladder: Make, made: Any) -> None:
    rungs = {"adam": made(SLOW), "fused-adam": made(FAST, implementation="torch")}
    said = conclude(make_ladder(rungs, gpu=False))
    assert said.best is None
    assert said.headline == "On a CPU, 2 threads, no rung is shown to train this model faster than adam: " + (
        "nothing to switch on by these figures."
    )
    found = finding(said, "fused-adam")
    assert found.decision == "cannot tell"
    assert "was measured, but the fused part adam ran as its reference, not fused" in found.why


def test_one_round_tells_nothing(make_ladder: Make, made: Any) -> None:
    said = conclude(make_ladder({"adam": made((40.0,)), "amp": made((5.0,))}))
    assert said.best is None
    assert said.named("switch on") == []
    assert "from one round, which shows no spread; pass --rounds 3 or more" in said.headline


@pytest.mark.parametrize(
    ("first", "words"),
    [
        ({"failure": "its process crashed."}, "did not run"),
        ({"passed": False}, "did not pass the gate: its loss after 3 steps is 9.0000"),
    ],
)
def test_nothing_can_be_told_without_the_first_rung(
    make_ladder: Make, made: Any, first: dict[str, Any], words: str
) -> None:
    said = conclude(make_ladder({"adam": made(SLOW, **first), "amp": made(FAST)}))
    assert said.headline == f"No gain can be told on A GPU: adam, which all are compared with, {words}."
    assert finding(said, "amp").decision == "cannot tell"


def test_what_fails_with_the_first_rung_is_not_blamed_for_it(make_ladder: Make, made: Any) -> None:
    said = conclude(make_ladder({"adam": made(SLOW, passed=False), "amp": made(FAST, passed=False)}))
    assert finding(said, "amp").decision == "cannot tell"
    assert finding(said, "amp").why == "adam did not pass the gate either, so nothing judges it"
    assert not any("failed by" in line for line in said.remarks)


@pytest.mark.parametrize(("busy", "decision"), [(0.2, "cannot tell"), (0.28, "leave off")])
def test_what_only_the_host_holds_up_is_not_to_be_left_off_where_a_graph_follows(
    make_ladder: Make, made: Any, busy: float, decision: str
) -> None:
    """The rung before needs 5 ms of the device; this one 4 or 5.6 of its 20."""
    rungs = {"adam": made(SLOW), "amp": made((10.0, 10.1, 9.9), busy=0.5), "fp8": made(MIDDLE, busy=busy)}
    said = conclude(make_ladder({**rungs, "graph": made(FAST)}))
    assert said.best == "graph"
    assert finding(said, "fp8").decision == decision
    assert ("the device needs 4.00 ms for a step where it needed 5.00" in finding(said, "fp8").why) == (busy == 0.2)
    assert any(line.startswith("fp8 slowed it down") for line in said.remarks) == (busy == 0.28)
    # Nothing takes the launches away where no graph follows.
    assert finding(conclude(make_ladder(rungs)), "fp8").decision == "leave off"


def test_the_headline_says_where_pytorch_itself_is_faster(make_ladder: Make, made: Any) -> None:
    rungs = {"adam": made(SLOW), "amp": made((10.0, 10.1, 9.9))}
    said = conclude(make_ladder(rungs, beside={"native-amp": (8.0, 8.08, 7.92), "native-bf16": FAST}))
    assert said.headline.endswith("; PyTorch's own best, native-amp, is faster still, by 1.25 times.")
    assert "with weights and moments in BF16 too, is 2.0" in remark(said, "native-bf16, PyTorch's own")
    said = conclude(make_ladder(rungs, beside={"native-amp": MIDDLE, "native-bf16": MIDDLE}))
    assert said.headline.endswith(").")
    assert not any(line.startswith("native-bf16") for line in said.remarks)


def test_one_rung_alone_has_nothing_to_be_compared_with(make_ladder: Make, made: Any) -> None:
    said = conclude(make_ladder({"adam": made(SLOW)}))
    assert "Only adam was measured on A GPU" in said.headline
    assert said.findings == ()


def test_everything_slower_gives_nothing_to_switch_on(make_ladder: Make, made: Any) -> None:
    said = conclude(make_ladder({"adam": made(FAST), "fused-adam": made(MIDDLE), "amp": made(SLOW)}))
    assert "no rung is shown to train this model faster than adam" in said.headline
    assert said.named("leave off") == ["fused-adam", "amp"]


def test_a_launch_bound_step_names_the_rung_that_takes_the_host_out(make_ladder: Make, made: Any) -> None:
    said = conclude(make_ladder({"adam": made(SLOW), "amp": made((10.0, 10.1, 9.9), busy=0.4)}))
    line = remark(said, "amp is launch-bound: the device is busy 4.00 of 10.00 ms of a step and waits for the host")
    assert line.endswith("the rung graph, which was not measured, takes the launches from the host.")


def test_a_launch_bound_step_with_graphs_measured_asks_for_more_work(make_ladder: Make, made: Any) -> None:
    said = conclude(make_ladder({"adam": made(SLOW), "graph": made((10.0, 10.1, 9.9), busy=0.4)}))
    assert remark(said, "graph is launch-bound").endswith("a larger batch, or longer sequences, would use the rest.")


def test_a_busy_device_is_said_to_be_busy(make_ladder: Make, made: Any) -> None:
    said = conclude(make_ladder({"adam": made(SLOW), "amp": made((10.0, 10.1, 9.9), busy=0.97)}))
    assert remark(said, "amp is not launch-bound: the device is busy 9.70 of 10.00 ms")


def test_memory_is_beside_the_gain_where_it_differs_and_the_lowest_is_named(make_ladder: Make, made: Any) -> None:
    gib = 2**30
    said = conclude(
        make_ladder(
            {
                "adam": made(SLOW, reserved=4 * gib),
                "fused-adam": made(MIDDLE, reserved=4 * gib + 2**20),
                "amp": made((15.0, 15.1, 14.9), reserved=2 * gib),
                "blocks": made(FAST, reserved=5 * gib),
            }
        )
    )
    assert "memory" not in finding(said, "fused-adam").why
    assert finding(said, "amp").why.endswith("; its peak memory is 50% lower")
    assert finding(said, "blocks").why.endswith("; its peak memory is 150% higher")
    assert remark(said, "Peak memory of blocks") == (
        "Peak memory of blocks: 5,120 MiB, 25% higher than adam's; the lowest is amp's, 2,048 MiB."
    )


def test_a_cpu_says_nothing_of_memory_and_of_a_host(make_ladder: Make, made: Any) -> None:
    said = conclude(make_ladder({"adam": made(SLOW), "amp": made(FAST)}, gpu=False))
    assert not any("memory" in line or "launch-bound" in line or "TFLOP" in line for line in said.remarks)


def test_the_rate_is_beside_the_ceiling_of_its_own_precision(make_ladder: Make, made: Any) -> None:
    said = conclude(make_ladder({"adam": made(SLOW), "amp": made((10.0, 10.1, 9.9))}))
    assert remark(said, "amp reaches") == (
        "amp reaches 100.0 TFLOP/s of the model's products, 14% of what a large product in BF16 reached here."
    )


def test_what_still_drifted_is_to_be_taken_with_care(make_ladder: Make, made: Any) -> None:
    said = conclude(make_ladder({"adam": made(SLOW), "amp": made(FAST, stable=False)}))
    assert remark(said, "amp: still drifting when its warm-up had to end, so take its gain with care.")


def test_how_far_it_carries_comes_last(make_ladder: Make, made: Any) -> None:
    said = conclude(make_ladder({"adam": made(SLOW), "amp": made(FAST)}))
    assert said.remarks[-1].startswith("This holds for this model, batch, data and machine, over 3 rounds;")
    assert remark(said, "The correctness gate was passed by all").endswith("A longer training may tell more.")
