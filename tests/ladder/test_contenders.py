"""What stands beside the rungs: its choice, its attempts, the check of its losses, and what a reader is told."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from rich.console import Console

from fusestep.errors import UserError
from fusestep.ladder import Ladder, LadderConfig, beside, contenders, ladder, page, profiling, report, table
from fusestep.ladder.contenders import contenders_of_peer, native, native_names, peer_names
from fusestep.ladder.crowd import Asked
from fusestep.ladder.gate import check
from fusestep.ladder.plan import plan
from fusestep.ladder.processes import Reply
from fusestep.ladder.results import ContenderResult
from fusestep.ladder.subject import BuiltIn
from fusestep.ladder.torch_step import native_step
from fusestep.ladder.verdict import conclude
from fusestep.ladder.words import numbers_of, remarks_of, summary_of
from fusestep.models import GPTConfig

CPU, GPU = torch.device("cpu"), torch.device("cuda")
SMALL = LadderConfig(preset="tiny", rungs="adam,amp", rounds=2, steps=12, gate_steps=10, batch=2, device="cpu")


def test_auto_takes_the_native_of_each_precision_and_all_bf16_beside_it() -> None:
    assert native_names("auto", ["fp32"]) == ("native-fp32",)
    assert native_names("auto", ["fp32", "fp8"]) == ("native-fp32", "native-amp", "native-bf16")
    assert native_names("none", ["fp32"]) == ()
    assert native_names("native-amp, native-fp32", []) == ("native-fp32", "native-amp")


@pytest.mark.parametrize(
    ("choose", "text", "sentence"),
    [
        (lambda text: native_names(text, []), "eager", "--natives names 'eager'; choose auto, none, or of native-fp32"),
        (peer_names, "apex,jax", "--peers names 'jax'; choose of apex, te, liger, torchao, quack, or all"),
    ],
)
def test_a_name_that_is_none_is_one_sentence(choose: Callable[[str], object], text: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        choose(text)


def test_a_native_tries_compile_and_graph_together_first_and_ends_with_neither() -> None:
    attempts = [(one.compiled, one.graph) for one in native("native-amp", GPU, compiled=True).attempts]
    assert attempts == [(True, True), (True, False), (False, True), (False, False)]
    assert [(one.compiled, one.graph) for one in native("native-amp", CPU, compiled=False).attempts] == [(False, False)]
    for name, precision, weights in (
        ("native-fp32", "fp32", "fp32"),
        ("native-amp", "bf16", "fp32"),
        ("native-bf16", "bf16", "bf16"),
    ):
        recipe = native(name, GPU, compiled=True).attempts[0]
        assert (recipe.precision, recipe.weights, recipe.optimizer) == (precision, weights, "torch-fused")
        assert (recipe.form, recipe.norm, recipe.loss) == ("plain", "torch", "torch")


def test_peers_on_a_cpu_have_no_graphs_and_on_an_own_model_no_seed_form() -> None:
    assert [one.name for one in contenders_of_peer("te", GPU)] == ["te-fp8", "te-fp8-graph"]
    assert [one.name for one in contenders_of_peer("te", CPU)] == ["te-fp8"]
    assert len(contenders_of_peer("liger", GPU)[0].attempts) == 2
    assert [one.graph for one in contenders_of_peer("liger", CPU)[0].attempts] == [False]
    assert [one.name for one in contenders_of_peer("apex", GPU, is_own=True)] == ["apex"]


@pytest.mark.parametrize(
    ("opening", "passed"),
    [((4.0, 3.0, 2.0), True), ((4.0, 3.0, 2.01), True), ((4.0, 3.0, 2.1), False), ((4.0, float("nan"), 2.0), False)],
)
def test_first_losses_pass_within_the_tolerance(opening: tuple[float, ...], passed: bool) -> None:
    found = check(opening, (4.0, 3.0, 2.0), 0.002)
    assert found.passed is passed
    assert "allowed is 0.20%" in found.reason


class Answers:
    """Stands in for the jobs of a ladder: failures by what an attempt is, and what was asked."""

    def __init__(self, *failing: str) -> None:
        self.failing, self.asked = failing, []  # type: ignore[var-annotated]

    def ask(self, asked: Asked, _text: str) -> Reply:
        assert asked.limit_s == contenders.LIMIT_S
        recipe = asked.request.recipe
        self.asked.append((asked.key, recipe.compiled, recipe.graph))
        if any(getattr(recipe, one) for one in self.failing):
            return Reply(failed="it cannot.", log="a log")
        return Reply(done=DONE)

    def skip(self, kind: str, name: str) -> None:
        self.asked.append(("skipped", kind, name))


DONE = {
    "timing": {
        "first_step": 9.0,
        "warmup_steps": 6,
        "stable": True,
        "windows": [[1, 3.0], [2, 6.0]],
        "steps": [3.0] * 3,
        "host": None,
        "device": None,
    },
    "peak": {"allocated": None, "reserved": None, "resident": 2**28, "resident_before": 2**27},
    "parts": [],
    "optimizer": "torch.optim.AdamW (fused)",
    "threads": 1,
    "opening": [3.0] * 7,
    "kernels": [{"name": "void at::gemm<int>(int)", "calls": 2.0, "ms": 1.5, "share": 0.5}],
    "unprofiled": "",
}


def begun() -> ContenderResult:
    contender = native("native-amp", GPU, compiled=True)
    return ContenderResult(contender, contender.attempts[0], 128)


def test_an_attempt_that_fails_gives_way_to_the_next_which_stays_for_the_later_rounds() -> None:
    planned, jobs = plan(replace(SMALL, natives="none")), Answers("graph")
    result, replies = beside.timed(planned, begun(), "round 1: native-amp", "text", jobs, True)
    assert [asked[1:] for asked in jobs.asked] == [(True, True), (True, False)]
    assert list(replies) == ["round 1: native-amp", "round 1: native-amp, attempt 2"]
    assert result.setbacks == (
        "with the whole step in one graph and torch.compile it did not run (it cannot), so it is measured without",
    )
    assert len(result.rounds) == 1
    assert summary_of(begun()) == begun().contender.summary
    assert summary_of(result) == (
        f"{begun().contender.summary}, but measured with torch.compile, since that did not run"
    )
    jobs.asked.clear()
    again, replies = beside.timed(planned, result, "round 2: native-amp", "text", jobs, False)
    assert jobs.asked == [("round 2: native-amp, attempt 2", True, False)]
    assert len(again.rounds) == 2
    # Later a failure is the end: what other attempts take is not this one's time.
    jobs.failing = ("compiled",)
    gone, _ = beside.timed(planned, again, "round 3: native-amp", "text", jobs, False)
    assert (gone.failure, gone.rounds) == ("it cannot.", ())
    assert beside.timed(planned, gone, "round 4: native-amp", "text", jobs, False) == (gone, {})


def test_a_contender_whose_every_attempt_fails_says_so() -> None:
    jobs = Answers("form")
    result, replies = beside.timed(plan(replace(SMALL, natives="none")), begun(), "key", "text", jobs, True)
    assert result.failure == "it cannot."
    assert result.log == "a log"
    assert len(replies) == len(result.setbacks) + 1 == 4


@pytest.fixture(scope="module")
def measured() -> Ladder:
    """Two rungs with their natives, run eagerly on a CPU, and a peer that is not installed."""
    return ladder(replace(SMALL, natives="native-fp32,native-amp", peers="quack"))


def test_natives_train_as_the_rungs_do_in_processes_of_their_own(measured: Ladder) -> None:
    assert [one.contender.name for one in measured.contenders] == ["native-fp32", "native-amp", "quack"]
    for one in measured.contenders[:2]:
        assert one.failure is None, one.log
        assert len(one.rounds) == 2
        assert one.check is not None
        assert one.check.passed, one.check.reason
        assert one.check.deviation < 0.002
        assert one.rounds[0].parts == ()  # nothing of ours ran
        assert one.rounds[0].optimizer == "torch.optim.AdamW (fused)"
    assert measured.contenders[2].absent == "not installed"
    assert "quack: not installed" not in "\n".join(remarks_of(measured))


def test_each_rung_is_compared_with_the_native_of_its_precision(measured: Ladder) -> None:
    assert set(measured.rungs[0].beside) == {"native-fp32", "quack"}
    assert set(measured.rungs[1].beside) == {"native-amp", "quack"}
    gain = measured.rungs[0].beside["native-fp32"].gain
    assert gain is not None
    ratios = [b / a for a, b in zip(measured.rungs[0].times, measured.contenders[0].times, strict=True)]
    assert gain.ratio == pytest.approx((ratios[0] * ratios[1]) ** 0.5)
    assert measured.rungs[0].beside["quack"].reason == "quack was not measured: not installed"


def test_the_kernels_of_the_first_round_are_known(measured: Ladder) -> None:
    for one in (*measured.rungs, *measured.contenders[:2]):
        assert one.kernels
        assert one.rounds[1].kernels == ()
        shares = [kernel.share for kernel in one.kernels]
        assert shares == sorted(shares, reverse=True)
        assert 0 < sum(shares) <= 1.0001


def shown(ladder: Ladder) -> str:
    text = io.StringIO()
    table.show(ladder, Console(file=text, width=200, force_terminal=True, color_system=None))
    return text.getvalue()


def test_contenders_are_in_every_file_and_in_the_table(measured: Ladder) -> None:
    plain = json.loads(json.dumps(report.as_dict(measured), allow_nan=False))
    first, _, quack = plain["contenders"]
    assert first["step_ms"] == measured.contenders[0].step.median  # type: ignore[union-attr]
    assert first["numbers"] == "FP32, weights and moments FP32"
    assert plain["rungs"][1]["numbers"] == "BF16, weights and moments FP32"
    te = contenders_of_peer("te", CPU)[0].attempts[0]
    assert numbers_of(te) == "FP8, weights BF16, moments and masters FP32"
    assert quack["status"] == "not installed"
    assert plain["rungs"][1]["native"] == "native-amp"
    assert plain["rungs"][1]["gain_over_native"] == pytest.approx(measured.rungs[1].beside["native-amp"].gain.ratio)  # type: ignore[union-attr]
    assert plain["rungs"][1]["gain_over_quack"] is None
    row = list(csv.DictReader(io.StringIO(report.as_csv(measured))))[1]
    assert row["native"] == "native-amp"
    assert row["top_kernel_1"].endswith(measured.rungs[1].kernels[0].short)
    text = shown(measured)
    for said in ("best native PyTorch", "over quack", "not installed", "kernels that take the most"):
        assert said in text
    html = page.draw(plain)
    assert "Beside the rungs" in html
    assert "Which kernels take the time" in html
    assert page.draw({name: value for name, value in plain.items() if name != "contenders"})


def test_the_verdict_sets_the_best_rung_against_native_and_the_fastest_peer(make_ladder: Any, made: Any) -> None:
    measured = make_ladder(
        {"adam": made((40.0, 40.1, 39.9)), "amp": made((10.0, 10.1, 9.9))},
        beside={"native-amp": (12.0, 12.1, 11.9), "liger": (11.0, 11.1, 10.9), "te-fp8": (15.0, 15.1, 14.9)},
    )
    said = "\n".join(conclude(measured).remarks)
    wanted = "amp is 1.20× (1.20–1.20) as fast as the best of native PyTorch with weights in FP32, native-amp."
    assert wanted in said
    assert "The fastest of the other libraries is liger with 11.00 ms; amp is 1.10×" in said
    text = shown(measured)
    assert "1.50× (1.49–1.51)" in text or "1.50× (1.50–1.50)" in text


def test_a_rung_is_only_set_against_native_where_all_that_is_in_it_ran_as_ours(make_ladder: Any, made: Any) -> None:
    """Also what belongs to rungs that were not measured: amp stands on fused-adam and fused-norm."""
    native = {"native-amp": (12.0, 12.1, 11.9)}
    ours = make_ladder({"amp": made((10.0, 10.1, 9.9))}, beside=native)
    assert ours.rungs[0].beside["native-amp"].claim == "faster"
    fallen = make_ladder({"amp": made((10.0, 10.1, 9.9), implementation="torch")}, beside=native)
    comparison = fallen.rungs[0].beside["native-amp"]
    assert comparison.claim == "none"
    assert comparison.reason == "the fused part adam ran as its reference, not fused: as the test says"


def test_a_contender_that_trains_otherwise_is_compared_with_nothing(make_ladder: Any, made: Any) -> None:
    measured = make_ladder(
        {"adam": made((40.0, 40.1, 39.9)), "amp": made((10.0, 10.1, 9.9))},
        beside={"native-amp": (12.0, 12.1, 11.9)},
        opening=(9.0,) * 7,
    )
    comparison = measured.rungs[1].beside["native-amp"]
    assert comparison.gain is None
    assert "native-amp trains otherwise: the mean of its first 7 losses is 9.0000" in comparison.reason
    assert any(line.startswith("native-amp: trains otherwise") for line in remarks_of(measured))


@pytest.mark.gpu
def test_on_a_gpu_natives_are_one_compiled_graph_and_train_as_they_do_eagerly() -> None:
    config = GPTConfig(vocab_size=96, width=128, heads=4, layers=2, ffn_width=512, context=64)
    losses = []
    device = torch.device("cuda")
    for recipe in native("native-amp", device, compiled=True).attempts:
        subject = BuiltIn(config, "synthetic", 8, 0)
        step = native_step(recipe, subject, device, 0)
        stream = subject.batches(device)
        losses.append([float(step(*next(stream))) for _ in range(12)])
        names = {part.name for part in step.parts()}
        assert ("whole-step graph" in names) is recipe.graph
        assert ("torch.compile" in names) is recipe.compiled
        kernels = profiling.measure(partial(step, *next(stream)), device)
        assert len(kernels) > 3
        assert sum(kernel.share for kernel in kernels) <= 1.0001
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], rel=0.01)
    assert losses[0][-1] < losses[0][0]


@pytest.mark.gpu
def test_on_a_gpu_every_rung_is_set_against_its_native() -> None:
    config = LadderConfig(preset="tiny", rounds=2, steps=12, gate_steps=20, device="cuda", base="amp")
    measured = ladder(config)
    for one in measured.contenders:
        assert one.failure is None, one.log
        assert one.setbacks == ()
        assert one.check is not None
        assert one.check.passed, one.check.reason
        assert one.kernels
    for rung in measured.rungs:
        assert rung.failure is None, rung.log
        assert rung.beside["native-amp"].gain is not None, rung.beside["native-amp"].reason
        assert rung.kernels, rung.rounds[0].unprofiled
