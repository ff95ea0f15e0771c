"""A ladder that is cut off and goes on: with workers that answer from a table, so that only the bookkeeping runs."""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from fusestep.cli import ladder as cli
from fusestep.errors import UserError
from fusestep.ladder import Ladder, LadderConfig, environment, journal, ladder, report, run
from fusestep.ladder.ceilings import Ceilings
from fusestep.ladder.memory import Peak
from fusestep.ladder.plan import plan
from fusestep.ladder.processes import Reply
from fusestep.ladder.request import Request
from fusestep.ladder.rungs import RUNGS
from fusestep.ladder.timing import Timing

CONFIG = LadderConfig(
    preset="tiny", rungs="adam,fused-adam,amp", rounds=3, steps=12, gate_steps=10, device="cpu", natives="none"
)
HERE = {
    "date": "2026-12-01",
    "device": "cpu",
    "gpu": None,
    "cpu": "a CPU",
    "threads": 2,
    "torch": "2.11.0",
    "triton": None,
    "commit": "a",
}
#: Requests of the gate, and of one round.
GATE, ROUND = 3, 3
OUT_OF_MEMORY = "out of memory; lower --batch."


class CutOff(BaseException):
    """What ends a ladder from outside."""


class Table:
    """Stands in for the workers. Every reply depends on the recipe and on how often it was asked for."""

    def __init__(self) -> None:
        self.asked: list[Request] = []
        self.until: int | None = None
        self.failing: str | None = None
        self.off: dict[tuple[str, bool], float] = {}
        self.ceilings = Reply(done={"products": {"fp32": 5e13, "bf16": 7e14}, "copy": 4e12})

    def __enter__(self) -> Table:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def run(self, request: Request) -> Reply:
        if self.until is not None and len(self.asked) >= self.until:
            raise CutOff
        self.asked.append(request)
        if request.task == "ceilings":
            return self.ceilings
        if request.task == "time" and self.failing == request.recipe.precision:
            return Reply(failed=OUT_OF_MEMORY, log="a log")
        key = f"{request.task} {request.recipe.optimizer} {request.recipe.precision} {request.reverse}"
        if request.task == "gate":
            # An FP8 or BF16 run may well meet a loss that is not finite on its way.
            last = 2.0 * (1 + self.off.get((request.recipe.precision, request.reverse), 0.0))
            return Reply(done={"losses": [3.0 - step / 10 for step in range(9)] + [last], "saturation": None})
        ms = 5.0 + sum(map(ord, key)) % 7
        timing = Timing(50.0, 6, True, ((1, ms), (2, 2 * ms)), (ms,) * 3, None, None)
        done = {
            "timing": asdict(timing),
            "peak": asdict(Peak(None, None, 2**20, 2**19)),
            "parts": [],
            "optimizer": key,
            "threads": 2,
            "opening": [3.0] * 7,
            "kernels": [],
            "unprofiled": "",
        }
        return Reply(done=json.loads(json.dumps(done)))


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Table:
    answers = Table()
    monkeypatch.setattr(run, "Workers", lambda: answers)
    monkeypatch.setattr(environment, "describe", lambda device: dict(HERE))
    return answers


def cut_off(table: Table, folder: Path, after: int, config: LadderConfig = CONFIG) -> None:
    """Run a ladder that ends after so many requests."""
    table.until = after
    with pytest.raises(CutOff):
        ladder(config, folder=folder)
    table.until = None
    table.asked.clear()


def go_on(folder: Path, config: LadderConfig = CONFIG) -> Ladder:
    return ladder(config, folder=folder, resume=True)


def counted(table: Table) -> Counter[tuple[str, str]]:
    return Counter((request.task, request.recipe.precision) for request in table.asked)


@pytest.mark.parametrize(
    ("after", "missing"),
    [
        (1, GATE - 1 + 3 * ROUND),  # one curve of the gate is kept
        (GATE, 3 * ROUND),
        (GATE + ROUND, 2 * ROUND),  # the gate and a whole round
        (GATE + ROUND + 2, 2 * ROUND),  # a round that was cut off is measured again, whole
        (GATE + 3 * ROUND - 1, ROUND),
    ],
)
def test_only_what_is_missing_is_measured_and_the_result_is_that_of_a_run_in_one_go(
    table: Table, tmp_path: Path, after: int, missing: int
) -> None:
    whole = ladder(CONFIG)
    table.asked.clear()
    cut_off(table, tmp_path / "out", after)
    resumed = go_on(tmp_path / "out")
    assert len(table.asked) == missing
    assert resumed.plan == whole.plan
    assert resumed.rungs == whole.rungs
    assert resumed.notes[:-1] == whole.notes
    assert resumed.notes[-1] == "Measured in 2 sittings, begun 2026-12-01, 2026-12-01."


@pytest.mark.parametrize(("noise", "passes"), [(0.0005, False), (0.002, True)])
def test_the_noise_is_measured_only_where_a_rung_needs_it(table: Table, noise: float, passes: bool) -> None:
    ladder(CONFIG)
    assert not any(request.reverse for request in table.asked)
    table.off = {("bf16", False): 0.004, ("fp32", True): noise}
    measured = ladder(CONFIG)
    assert [request.recipe.precision for request in table.asked if request.reverse] == ["fp32"]
    verdicts = [result.verdict for result in measured.rungs]
    assert [verdict and verdict.passed for verdict in verdicts] == [True, True, passes]
    assert all(verdict is not None and verdict.noise == pytest.approx(noise) for verdict in verdicts)


def test_a_second_cut_goes_on_from_the_second(table: Table, tmp_path: Path) -> None:
    cut_off(table, tmp_path, GATE + ROUND)
    table.until = ROUND + 1
    with pytest.raises(CutOff):
        go_on(tmp_path)
    table.until = None
    table.asked.clear()
    assert "3 sittings" in go_on(tmp_path).notes[-1]
    assert len(table.asked) == ROUND


def test_a_rung_that_failed_stays_failed_and_is_not_asked_again(table: Table, tmp_path: Path) -> None:
    table.failing = "bf16"
    cut_off(table, tmp_path, GATE + ROUND)
    resumed = go_on(tmp_path)
    assert resumed.rungs[2].failure == "out of memory; lower --batch."
    assert resumed.rungs[2].log == "a log"
    assert counted(table) == {("time", "fp32"): 2 * 2}


@pytest.mark.parametrize(
    ("losses", "why"),
    [
        ([3.0, float("nan"), 2.0], "has a loss that is not finite at step 2"),
        ([0.0, -0.0, 0.0], "has a loss of 0 over 3 steps, so nothing trains"),
        (None, "did not run: out of memory; lower --batch"),
    ],
)
def test_a_first_rung_that_nothing_can_be_judged_by_ends_the_ladder_and_is_not_kept(
    table: Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, losses: list[float] | None, why: str
) -> None:
    reply = Reply(failed=OUT_OF_MEMORY) if losses is None else Reply(done={"losses": losses, "saturation": None})
    asked: list[Request] = []
    monkeypatch.setattr(table, "run", lambda request: asked.append(request) or reply)
    said = f"^adam, which all rungs are compared with, {why}; mend that, or compare with a later rung by --base.$"
    made = tmp_path / "made"
    made.mkdir()
    for folder in (tmp_path / "new", made):
        with pytest.raises(UserError, match=said):
            ladder(CONFIG, folder=folder)
    # A folder that somebody made beforehand is theirs.
    assert list(tmp_path.iterdir()) == [made]
    assert list(made.iterdir()) == []
    assert len(asked) == 2


@pytest.mark.parametrize("reverse", [False, True])
def test_a_first_rung_that_fails_after_its_gate_ends_the_ladder_and_what_there_is_goes_on(
    table: Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reverse: bool
) -> None:
    """In the first round, or in the run for the noise."""
    honest, config = table.run, replace(CONFIG, rungs="adam,amp")
    table.off["bf16", False] = 0.01

    def run_first(request: Request) -> Reply:
        reply = honest(request)
        fails = request.reverse if reverse else request.task == "time"
        return Reply(failed=OUT_OF_MEMORY) if request.recipe.optimizer == "torch" and fails else reply

    monkeypatch.setattr(table, "run", run_first)
    with pytest.raises(UserError, match="did not run: out of memory; lower --batch; mend that and go on by --resume"):
        ladder(config, folder=tmp_path)
    monkeypatch.setattr(table, "run", honest)
    table.asked.clear()
    assert [len(rung.rounds) for rung in go_on(tmp_path, config).rungs] == [3, 3]
    assert [request.reverse for request in table.asked if request.task == "gate"] == [True] * reverse


def test_a_first_rung_that_fails_after_a_whole_round_leaves_the_others_their_gains(
    table: Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = table.run

    def run_first(request: Request) -> Reply:
        reply = honest(request)
        is_later = len(table.asked) > GATE + ROUND
        return Reply(failed=OUT_OF_MEMORY) if request.recipe.optimizer == "torch" and is_later else reply

    monkeypatch.setattr(table, "run", run_first)
    first, second, third = ladder(CONFIG).rungs
    assert first.failure == OUT_OF_MEMORY
    assert [len(rung.rounds) for rung in (second, third)] == [3, 3]
    assert second.over_first is not None
    assert second.over_first.gain is None
    assert third.over_previous is not None
    assert third.over_previous.gain is not None


def test_a_loss_that_is_not_finite_survives(table: Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "run", lambda request: Reply(done={"losses": [float("nan")], "saturation": None}))
    kept = journal.Journal({}, HERE, tmp_path)
    kept.keep({"gate: adam": table.run(None)})  # type: ignore[arg-type]
    again = journal.Journal({}, HERE, tmp_path, resume=True).kept("gate: adam")
    assert again is not None
    assert again.done is not None
    assert str(again.done["losses"]) == "[nan]"


def test_the_file_is_replaced_whole_and_leftovers_of_a_kill_go(table: Table, tmp_path: Path) -> None:
    cut_off(table, tmp_path, GATE + ROUND)
    assert [path.name for path in tmp_path.iterdir()] == [journal.FILE]
    (tmp_path / ".writing-1-ladder.unfinished.json").write_text("{ half")
    measured = go_on(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [journal.FILE]
    report.save(measured, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "ladder.csv",
        "ladder.html",
        "ladder.json",
        "ladder.png",
    ]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"steps": 24}, "holds a ladder with --steps 12 and this one has 24"),
        ({"rounds": 4}, "holds a ladder with --rounds 3 and this one has 4"),
        ({"rungs": "adam,amp"}, "with --rungs adam,fused-adam,amp and this one has adam,amp"),
        ({"rungs": "adam,fp8", "scaling": "current"}, "--rungs"),
        ({"seed": 1}, "--seed 0 and this one has 1"),
    ],
)
def test_another_configuration_is_refused_and_nothing_is_touched(
    table: Table, tmp_path: Path, change: dict[str, Any], sentence: str
) -> None:
    cut_off(table, tmp_path, GATE + ROUND)
    before = (tmp_path / journal.FILE).read_bytes()
    with pytest.raises(UserError, match=sentence) as caught:
        go_on(tmp_path, replace(CONFIG, **change))
    assert "\n" not in str(caught.value)
    assert "or name another folder" in str(caught.value)
    assert table.asked == []
    assert (tmp_path / journal.FILE).read_bytes() == before


@pytest.mark.parametrize(
    ("name", "value"), [("torch", "2.12.0"), ("cpu", "another CPU"), ("gpu", "A GPU"), ("commit", "b"), ("threads", 1)]
)
def test_another_machine_or_version_is_refused(
    table: Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: object
) -> None:
    cut_off(table, tmp_path, GATE + ROUND)
    monkeypatch.setattr(environment, "describe", lambda device: {**HERE, name: value})
    with pytest.raises(UserError, match=f"was measured with {name} .* and here it is {value}, so times would not"):
        go_on(tmp_path)
    assert table.asked == []


def test_nothing_to_go_on_with_is_a_sentence(table: Table, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no ladder to go on with; leave --resume out"):
        go_on(tmp_path / "nowhere")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("{ half", "is not a ladder's"),
        ("[]", "is not a ladder's"),
        ('{"schema": 99}', "has schema 99 and this version"),
    ],
)
def test_a_file_that_cannot_be_read_is_a_sentence(tmp_path: Path, table: Table, content: str, sentence: str) -> None:
    (tmp_path / journal.FILE).write_text(content)
    with pytest.raises(UserError, match=sentence):
        go_on(tmp_path)


def test_without_resume_a_ladder_that_was_cut_off_is_left_alone(table: Table, tmp_path: Path) -> None:
    cut_off(table, tmp_path, GATE)
    with pytest.raises(UserError, match="holds a ladder that was cut off; go on with it by --resume"):
        report.check_folder(tmp_path)
    report.check_folder(tmp_path, resume=True)


def command(out: Path, **options: Any) -> None:
    """`fusestep ladder` with CONFIG, in this process."""
    names = ("preset", "rungs", "rounds", "steps", "gate_steps", "device", "natives")
    cli.command(out=out, **{**{name: getattr(CONFIG, name) for name in names}, **options})


def test_the_command_goes_on_and_says_so_of_a_finished_ladder_and_measures_nothing(
    table: Table, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cut_off(table, tmp_path, GATE + ROUND)
    command(tmp_path, resume=True)
    assert len(table.asked) == 2 * ROUND
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "ladder.csv",
        "ladder.html",
        "ladder.json",
        "ladder.png",
    ]
    kept = (tmp_path / "ladder.json").read_text()
    table.asked.clear()
    (tmp_path / "ladder.html").unlink()
    capsys.readouterr()
    command(tmp_path, resume=True)
    said = capsys.readouterr().out
    assert json.loads(kept)["verdict"]["headline"] in said
    assert f"the ladder in {tmp_path} is finished, so nothing was measured; kept in" in said
    assert (tmp_path / "ladder.html").exists()
    command(tmp_path, resume=True, as_json=True)
    assert json.loads(capsys.readouterr().out) == json.loads(kept)
    with pytest.raises(UserError, match="holds a ladder with --steps 12 and this one has 24"):
        command(tmp_path, resume=True, steps=24)
    assert table.asked == []
    assert (tmp_path / "ladder.json").read_text() == kept


def test_the_command_says_in_one_sentence_what_an_extra_would_draw(
    table: Table, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    command(tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("ladder.html and ladder.png are left out")
    assert lines[-2] == f"kept in {tmp_path / 'ladder.json'}, {tmp_path / 'ladder.csv'}"


def test_on_a_gpu_the_ceilings_are_measured_once_between_the_gate_and_the_rounds(table: Table, tmp_path: Path) -> None:
    on_gpu = replace(plan(CONFIG), device="cuda:0")

    def measure(kept: journal.Journal) -> Ladder:
        return run.run(on_gpu, dict(HERE), RUNGS, lambda share, text: None, kept)

    table.until = GATE + 1 + ROUND
    with pytest.raises(CutOff):
        measure(journal.Journal(on_gpu.as_dict(), HERE, tmp_path))
    assert [request.task for request in table.asked] == ["gate"] * GATE + ["ceilings"] + ["time"] * ROUND
    table.until = None
    table.asked.clear()
    resumed = measure(journal.Journal(on_gpu.as_dict(), HERE, tmp_path, resume=True))
    assert resumed.ceilings == Ceilings({"fp32": 5e13, "bf16": 7e14}, 4e12)
    assert {request.task for request in table.asked} == {"time"}


def test_ceilings_that_cannot_be_measured_are_a_note_and_the_rungs_go_on(table: Table) -> None:
    table.ceilings = Reply(failed="out of GPU memory.")
    on_gpu = replace(plan(CONFIG), device="cuda:0")
    measured = run.run(on_gpu, dict(HERE), RUNGS, lambda share, text: None, journal.Journal({}, HERE))
    assert measured.ceilings is None
    assert "The device's ceilings could not be measured: out of GPU memory." in measured.notes
    assert all(len(result.rounds) == 3 for result in measured.rungs)
