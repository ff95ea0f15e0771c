"""What the verdict says of made-up results, case by case."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from fusestep.ladder import Ladder
from fusestep.ladder.gate import judge
from fusestep.ladder.run import _compared
from fusestep.ladder.rungs import RUNGS
from fusestep.ladder.verdict import Conclusion, Finding, conclude
from fusestep.ladder.words import model

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
    assert said.headline.startswith("On A GPU, take the rungs together up to blocks, which train this model")


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


def test_nothing_can_be_told_without_the_first_rung(make_ladder: Make, made: Any) -> None:
    said = conclude(make_ladder({"adam": made(SLOW, failure="its process crashed."), "amp": made(FAST)}))
    assert said.headline == "No gain can be told on A GPU: adam, which all are compared with, did not run."
    assert finding(said, "amp").decision == "cannot tell"


#: As on a GPU that a host cannot feed: 9.3, 9.5 and 10.9 ms of launches, for what the device needs less and less time.
HELD = {
    "adam": ((38.9, 38.8, 38.8), (38.5, 38.5, 38.5)),
    "amp": ((13.3, 9.3, 8.5), (6.56, 6.54, 6.55)),
    "blocks": ((12.0, 9.5, 7.2), (3.96, 3.97, 3.97)),
    "loss": ((10.9, 10.1, 11.8), (3.96, 3.94, 3.94)),
    "fp8": ((14.2, 11.0, 9.0), (3.44, 3.46, 3.44)),
    "graph": ((3.33, 3.36, 3.29), (3.24, 3.24, 3.24)),
}


def held(made: Any, *names: str) -> dict[str, Any]:
    return {name: made(HELD[name][0], busy=HELD[name][1]) for name in names or HELD}


def test_rungs_that_the_host_holds_up_are_judged_by_the_devices_time_where_a_graph_follows(
    make_ladder: Make, made: Any
) -> None:
    said = conclude(make_ladder(held(made)))
    assert said.named("switch on") == ["amp", "blocks", "fp8", "graph"]
    assert said.named("no difference") == ["loss"]
    assert [found.by for found in said.findings] == ["wall time", *["device time"] * 3, "wall time"]
    assert said.headline.startswith(
        "On A GPU, switch on amp, blocks, fp8 and graph: the rungs up to graph, with loss among them, train this model "
        "11.6"
    )
    blocks = finding(said, "blocks").why
    assert blocks.startswith("the device's time of a step fell from 6.55 to 3.97 ms, 1.65× (1.6")
    assert "), which shows with graph: until then it is launch-bound, and wall time, 1.11× (0.8" in blocks
    assert ") over amp, is the host's, which takes 8.55 ms to queue a step" in blocks
    assert "hardly differs, 3.97 and 3.94 ms, 1.01× (" in finding(said, "loss").why
    # Wall time shows it for amp too, however it scatters; and for the graph, which takes the launches away.
    assert "over adam; it is launch-bound, and the device's time of a step fell from 38.50 to 6.55 ms" in (
        finding(said, "amp").why
    )
    assert finding(said, "graph").why.endswith("from the host: the device's time was 3.44 ms and is 3.24")
    line = remark(said, "blocks, loss and fp8 are judged by the device's time, which is not wall time: ")
    assert line.endswith("what each of them adds to its wall time was not measured by itself.")
    assert not any("slowed it down" in line for line in said.remarks)


def test_without_a_graph_the_devices_time_is_told_and_switches_nothing_on_or_off(make_ladder: Make, made: Any) -> None:
    said = conclude(make_ladder(held(made, "adam", "amp", "blocks", "loss")))
    assert said.best == "amp"
    blocks = finding(said, "blocks")
    assert (blocks.decision, blocks.by) == ("cannot tell", None)
    assert (
        "of wall time tells nothing, since it is launch-bound: the host takes 8.55 ms to queue a step; " in blocks.why
    )
    assert blocks.why.endswith("), which shows only where the whole step is one graph")
    loss = finding(said, "loss")
    assert (loss.decision, loss.by) == ("no difference", None)
    assert "the device's time of a step hardly differs" in loss.why
    assert not any("judged by the device's time" in line for line in said.remarks)


def test_one_round_is_one_measurement_of_the_device(make_ladder: Make, made: Any) -> None:
    rungs = {name: made(HELD[name][0][:1], busy=HELD[name][1][:1]) for name in HELD}
    found = finding(conclude(make_ladder(rungs)), "blocks")
    assert found.decision == "cannot tell"
    assert found.why.endswith("; the device's time of a step went from 6.56 to 3.96 ms, by one measurement of each")


def test_the_host_decides_nothing_where_the_devices_time_is_not_known(make_ladder: Make, made: Any) -> None:
    ladder = make_ladder(held(made))
    waiting = [replace(r, timing=replace(r.timing, is_bound=True), kernels=()) for r in ladder.rungs[2].rounds]
    results = {r.rung.name: r for r in ladder.rungs} | {"blocks": replace(ladder.rungs[2], rounds=tuple(waiting))}
    said = conclude(replace(ladder, rungs=_compared(results, RUNGS)))
    found = finding(said, "blocks")
    assert (found.decision, found.by) == ("no difference", "wall time")
    assert found.why.endswith("cannot tell from none, since the rounds scatter too widely")


@pytest.mark.parametrize(
    ("times", "device", "decision", "words"),
    [
        (MIDDLE, 4.0, "switch on", "fell from 5.00 to 4.00 ms, 1.25×"),  # slower by its launches alone
        (MIDDLE, 5.6, "leave off", "rose from 5.00 to 5.60 ms, 0.89×"),
        (MIDDLE, 5.05, "no difference", "hardly differs, 5.00 and 5.05 ms"),
        ((10.0, 14.0, 8.0), 5.6, "leave off", "rose from 5.00 to 5.60 ms"),
        # Fewer launches of slower kernels.
        (
            (8.0, 8.1, 7.9),
            5.6,
            "cannot tell",
            "while the host launches each kernel, but the device's time of a step rose",
        ),
        ((8.0, 8.1, 7.9), 4.0, "switch on", "it is launch-bound, and the device's time of a step fell"),
    ],
)
def test_below_a_graph_the_devices_time_decides_of_what_the_host_holds_up(
    make_ladder: Make, made: Any, times: tuple[float, ...], device: float, decision: str, words: str
) -> None:
    def busy(ms: float) -> tuple[float, ...]:
        return ms, ms * 1.002, ms * 0.999

    rungs = {"adam": made(SLOW), "amp": made((10.0, 10.1, 9.9), busy=busy(5.0)), "fp8": made(times, busy=busy(device))}
    said = conclude(make_ladder({**rungs, "graph": made(FAST)}))
    assert said.best == "graph"
    assert finding(said, "fp8").decision == decision
    assert words in finding(said, "fp8").why
    costs = [line for line in said.remarks if line.startswith("fp8 slowed it down and is in the figure of graph")]
    assert len(costs) == (decision == "leave off")
    assert ("the rungs up to graph, with fp8 among them, train" in said.headline) == (decision != "switch on")
    if times == MIDDLE:  # nothing takes the launches away where no graph follows
        assert finding(conclude(make_ladder(rungs)), "fp8").decision == "leave off"


def test_a_graph_that_does_not_keep_the_device_busy_makes_nothing_of_its_time(make_ladder: Make, made: Any) -> None:
    rungs = held(made) | {"graph": made((3.33, 3.36, 3.29), busy=0.5)}
    said = conclude(make_ladder(rungs))
    assert said.best == "graph"
    assert finding(said, "blocks").decision == "cannot tell"


def test_the_headline_says_what_a_base_has_in_it(make_ladder: Make, made: Any) -> None:
    rungs = {"amp": made(MIDDLE), "blocks": made(FAST)}
    said = conclude(make_ladder(rungs, within_base=["fused-adam", "fused-norm"]))
    assert "times as fast as amp with fused-adam and fused-norm in it (95% interval" in said.headline


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


def test_a_device_that_idles_though_the_host_is_ahead_is_not_put_down_to_launches(make_ladder: Make, made: Any) -> None:
    said = conclude(make_ladder({"adam": made(SLOW), "amp": made((10.0, 10.1, 9.9), busy=0.88, host=0.86)}))
    line = remark(said, "amp is not launch-bound: the host queues a step in 8.60 ms, and the device needs 8.80 for one")
    assert "A step in a loop takes 10.00" in line


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


def test_one_of_a_thing_is_told_in_the_singular(make_ladder: Make, made: Any) -> None:
    measured = make_ladder({"adam": made(SLOW), "amp": made(FAST)})
    plan = measured.plan | {"gate_steps": 1, "tokens_per_step": 1, "parameters": 1}
    one = replace(measured, plan=plan | {"model": measured.plan["model"] | {"layers": 1}})
    assert "after 1 step on text" in remark(conclude(one), "The correctness gate was passed by all")
    assert ": 1 parameter, 1 layer × " in model(one)
    assert model(one).endswith("(1 token a step)")
    assert "its loss after 1 step is" in judge([9.0], [1.0], [1.0], "fp32").reason
