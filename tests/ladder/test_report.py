from __future__ import annotations

import csv
import errno
import io
import json
import math
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fusestep.errors import UserError
from fusestep.ladder import Ladder, report, table
from fusestep.ladder.gate import Verdict
from fusestep.ladder.measured import Round
from fusestep.ladder.memory import Peak
from fusestep.ladder.results import Comparison, RungResult
from fusestep.ladder.rungs import RUNGS, recipe_of
from fusestep.ladder.statistics import Gain, paired_gain
from fusestep.ladder.step import Part
from fusestep.ladder.timing import Timing


def rung_result(place: int, ms: float, implementation: str, comparison: Comparison | None = None) -> RungResult:
    measured = Round(
        Timing(80.0, 6, True, ((1, ms), (2, 2 * ms)), (ms,) * 3, None, None),
        Peak(None, None, 300 * 2**20, 200 * 2**20),
        (Part("adam", implementation, "no GPU here"),) if place else (),
        "torch.optim.AdamW",
        2,
    )
    verdict = Verdict(True, 2.0, 0.0001, 0.0005, 0.0, "fine")
    rung = RUNGS[place]
    return RungResult(
        rung, recipe_of(rung.name), 1024, (3.0, 2.0), verdict, (measured,) * 3, None, "", comparison, comparison
    )


def ladder_of(*rungs: RungResult) -> Ladder:
    plan = {
        "preset": "tiny",
        "parameters": 429568,
        "model": {"layers": 2, "width": 128, "context": 64, "vocab_size": 96},
        "batch": 16,
        "tokens_per_step": 1024,
        "rounds": 3,
        "steps": 24,
        "gate_steps": 40,
        "data": "synthetic",
    }
    environment = {"gpu": None, "cpu": "a CPU", "threads": 2, "torch": "2.11.0", "triton": None, "driver": None}
    return Ladder(plan, environment, rungs, ("Measured on the CPU.",))


REFERENCE = Comparison(
    "adam", paired_gain([10.0] * 3, [9.0, 9.1, 9.2]), "none", "the fused part adam ran as its reference, not fused"
)
SLOWER = Comparison("adam", paired_gain([10.0] * 3, [20.0, 20.1, 20.2]), "slower", "launch-bound")
LADDER = ladder_of(rung_result(0, 10.0, "torch"), rung_result(1, 9.0, "torch", REFERENCE))


def shown(ladder: Ladder, width: int = 160) -> str:
    """What a terminal of that width shows, without its colours."""
    text = io.StringIO()
    table.show(ladder, Console(file=text, width=width, force_terminal=True, color_system=None))
    return text.getvalue()


def test_the_table_says_reference_and_claims_no_speed_up() -> None:
    text = shown(LADDER)
    assert "reference, not fused" in text
    assert "1.10× (1.07–1.13) no claim" in text
    assert "fused-adam: no speed-up is claimed: the fused part adam ran as its reference, not fused." in text
    assert "Measured on the CPU." in text


def test_the_table_prints_a_loss_like_a_gain_with_its_cause() -> None:
    text = shown(ladder_of(rung_result(0, 10.0, "triton"), rung_result(1, 20.0, "triton", SLOWER)))
    assert "0.50× (0.49–0.50)" in text
    assert "slower than adam, 0.50×; likely because launch-bound" in text
    assert "Triton kernel" in text


def test_a_rung_that_did_not_run_is_in_the_table_with_its_sentence() -> None:
    gone = replace(rung_result(1, 9.0, "torch"), rounds=(), failure="out of memory; lower --batch.")
    text = shown(ladder_of(rung_result(0, 10.0, "torch"), gone))
    assert "did not run: out of memory; lower --batch." in text


def test_the_table_fits_a_narrow_window_and_loses_nothing() -> None:
    narrow = shown(LADDER, width=80)
    assert all(len(line) <= 80 for line in narrow.splitlines())
    assert "…" not in narrow
    for figure in ("10.00", "9.00", "1.10×", "(1.07–1.13)", "300 MiB"):
        assert figure in narrow


def test_json_holds_the_schema_every_sample_and_no_nan() -> None:
    unequal = replace(
        LADDER.rungs[1], verdict=Verdict(False, math.nan, math.nan, 0.1, 0.0, "not finite"), losses=(math.inf,)
    )
    text = json.dumps(report.as_dict(ladder_of(LADDER.rungs[0], unequal)), allow_nan=False)
    plain = json.loads(text)
    assert plain["schema"] == report.SCHEMA
    assert plain["rungs"][1]["losses"] == [None]
    assert plain["rungs"][1]["gate"]["deviation"] is None
    assert [r["timing"]["steps"] for r in plain["rungs"][0]["rounds"]] == [[10.0] * 3] * 3
    assert plain["rungs"][1]["over_first"]["gain"]["ratio"] == pytest.approx(1.1, abs=0.02)


def test_csv_has_a_row_a_rung() -> None:
    rows = list(csv.DictReader(io.StringIO(report.as_csv(LADDER))))
    assert [row["name"] for row in rows] == ["adam", "fused-adam"]
    assert float(rows[0]["step_ms"]) == 10.0
    assert rows[0]["gain_over_first"] == ""
    assert rows[1]["claim_over_first"] == "none"
    assert rows[1]["runs_as"] == "reference, not fused"
    assert int(rows[1]["peak_bytes"]) == 300 * 2**20


def test_saving_makes_the_folder_and_leaves_only_its_files(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "ladder"
    assert report.save(LADDER, folder) == []
    assert sorted(path.name for path in folder.iterdir()) == ["ladder.csv", "ladder.html", "ladder.json", "ladder.png"]
    assert json.loads((folder / "ladder.json").read_text())["schema"] == report.SCHEMA


@pytest.mark.parametrize("held", ["ladder.json", "ladder.csv", "ladder.html", "ladder.png"])
def test_a_folder_that_holds_a_ladder_is_left_alone(tmp_path: Path, held: str) -> None:
    (tmp_path / held).write_text("precious")
    with pytest.raises(UserError, match="already holds a ladder"):
        report.check_folder(tmp_path)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["precious"]


def test_a_folder_that_holds_something_else_is_used(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    report.save(LADDER, tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert (tmp_path / "ladder.json").exists()


def test_a_file_or_a_path_below_one_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file"):
        report.check_folder(tmp_path / "file")
    with pytest.raises(UserError, match="not a folder that you may write to"):
        report.check_folder(tmp_path / "file" / "below")


@pytest.mark.parametrize("call", [1, 2, 3, 4])
def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    calls = 0
    real = os.fsync

    def full(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls == call:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        report.save(LADDER, tmp_path / "ladder")
    assert list(tmp_path.iterdir()) == []


def test_an_interval_that_is_not_there_is_not_printed() -> None:
    one = Comparison("adam", Gain(1.5, None, None, 1), "none", "one round shows no spread")
    assert "1.50× no claim" in shown(ladder_of(rung_result(0, 10.0, "torch"), rung_result(1, 9.0, "triton", one)))


def test_the_verdict_is_first_in_the_table_and_in_every_file() -> None:
    said = "On a CPU, 2 threads, no rung is shown to train this model faster than adam"
    text = shown(LADDER, width=200)
    assert text.index(said) < text.index("cannot tell: fused-adam, 1.10×") < text.index("step ms")
    plain = report.as_dict(LADDER)
    assert list(plain)[:2] == ["schema", "verdict"]
    assert plain["verdict"]["headline"].startswith(said)
    assert plain["verdict"]["cannot_tell"] == ["fused-adam"]
    assert plain["verdict"]["switch_on"] == []
    assert [found["decision"] for found in plain["verdict"]["findings"]] == ["cannot tell"]
    rows = list(csv.DictReader(io.StringIO(report.as_csv(LADDER))))
    assert list(rows[0])[:3] == ["name", "decision", "why"]
    assert rows[1]["decision"] == "cannot tell"
    assert "was measured, but the fused part adam ran as its reference" in rows[1]["why"]


def test_rates_stand_beside_their_ceilings_on_a_gpu(make_ladder: Any, made: Any) -> None:
    ladder = make_ladder({"adam": made((40.0, 40.0, 40.0)), "amp": made((10.0, 10.0, 10.0))})
    rung = report.as_dict(ladder)["rungs"][1]
    assert rung["flops_per_s"] == pytest.approx(1e12 / 0.010)
    assert rung["of_product_ceiling"] == pytest.approx(1e14 / 7e14)
    assert rung["bytes_per_s"] == pytest.approx(1e10 / 0.010)
    assert rung["of_copy_ceiling"] == pytest.approx(1e12 / 4e12)
    text = shown(ladder, width=80)
    assert "14% of 700" in text
    assert "25% of 4,000" in text
    assert "FLOPs a token" in text
    assert "TFLOP/s" not in shown(LADDER)


@pytest.mark.parametrize(
    ("absent", "sentence", "left"),
    [
        (["jinja2"], "ladder.html is left out, since jinja2 is not installed; ", ["ladder.png"]),
        (["matplotlib"], "ladder.png is left out, since matplotlib is not installed; ", ["ladder.html"]),
        (["jinja2", "matplotlib"], "ladder.html and ladder.png are left out, since jinja2 and matplotlib are not ", []),
    ],
)
def test_what_an_extra_would_draw_is_left_out_in_one_sentence_and_drawn_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, absent: list[str], sentence: str, left: list[str]
) -> None:
    with monkeypatch.context() as without:
        for name in absent:
            without.setitem(sys.modules, name, None)
        (said,) = report.save(LADDER, tmp_path)
    assert said.startswith(sentence)
    assert "pip install 'fusestep[report]'" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["ladder.csv", "ladder.json", *left])
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert report.complete(json.loads((tmp_path / "ladder.json").read_text()), tmp_path) == []
    assert {"ladder.html", "ladder.png"} <= {path.name for path in tmp_path.iterdir()}
    assert all((tmp_path / name).read_bytes() == content for name, content in before.items())
