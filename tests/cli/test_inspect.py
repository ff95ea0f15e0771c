"""`fusestep inspect`."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from typing import Any

import pytest

from fusestep.cli import main
from fusestep.train import TrainConfig, train

MODEL = {"width": 16, "heads": 2, "layers": 2, "ffn_width": 24, "context": 8}


def trained(out: Path, **settings: Any) -> Path:
    common: dict[str, Any] = {"preset": "tiny", "model": MODEL, "steps": 6, "batch": 3, "device": "cpu"}
    train(TrainConfig(out=str(out), eval_every=2, **common, **settings))
    return out


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("counted") / "run", precision="fp8", fp8_stats=True, amax_history=4)


@pytest.fixture(scope="module")
def uncounted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("uncounted") / "run", precision="fp8")


@pytest.fixture
def fusestep(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs `fusestep inspect` in this process; gives exit status, stdout and stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as left:
            main(["inspect", *map(str, arguments)])
        captured = capsys.readouterr()
        return int(left.value.code or 0), captured.out, captured.err

    return run


def test_the_table_has_a_line_for_each_tensor(fusestep: Any, counted: Path) -> None:
    status, out, err = fusestep(counted)
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert "step 6, delayed scaling, amaxes of the last 4 steps" in lines[0]
    rows = [line.split() for line in lines if line.startswith("blocks.")]
    assert len(rows) == 2 * 12
    assert rows[0][:3] == ["blocks.0.self_attention.layernorm_qkv", "input", "E4M3"]
    assert rows[2][:3] == ["blocks.0.self_attention.layernorm_qkv", "grad_output", "E5M2"]
    for row in rows:
        scale, newest, largest, smallest = map(float, row[3:7])
        assert scale > 0
        assert smallest <= newest <= largest
        assert row[7:9] == ["4/4", "0"]
        assert all(share.endswith("%") for share in row[9:11])


def test_shares_that_were_not_counted_are_not_shown(fusestep: Any, uncounted: Path) -> None:
    status, out, _ = fusestep(uncounted)
    assert status == 0
    assert "%" not in out
    assert "6/16" in out
    assert "counted by fusestep train --fp8-stats" in out


def test_json_has_every_amax_oldest_first(fusestep: Any, counted: Path) -> None:
    status, out, _ = fusestep(counted / "checkpoints" / "step-00000006", "--json")
    answer = json.loads(out)
    assert status == 0
    assert (answer["schema"], answer["step"], answer["recipe"], answer["history_length"]) == (1, 6, "delayed", 4)
    assert len(answer["tensors"]) == 24
    for row in answer["tensors"]:
        assert row["history"][-1] == row["amax"]
        assert len(row["history"]) == 4
        assert 0 <= row["saturated"] <= 1
        assert row["scale"] == pytest.approx(
            {"E4M3": 448, "E5M2": 57344}[row["format"]] / max(row["history"]), rel=1e-6
        )


def test_the_plot_is_a_picture(fusestep: Any, counted: Path, tmp_path: Path) -> None:
    status, out, _ = fusestep(counted, "--plot", tmp_path / "new" / "scales.png")
    assert status == 0
    assert out.endswith("scales.png\n")
    picture = (tmp_path / "new" / "scales.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert struct.unpack(">II", picture[16:24]) == (1440, 960)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["scales.png"]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"precision": "bf16"}, "holds no FP8 state, since it was trained in bf16; name a run of fusestep train"),
        ({"precision": "fp8", "recipe": "current"}, "since the recipe current keeps none from step to step"),
    ],
)
def test_a_checkpoint_without_state_is_one_sentence(
    fusestep: Any, tmp_path: Path, settings: dict[str, Any], sentence: str
) -> None:
    status, out, err = fusestep(trained(tmp_path / "run", **settings))
    assert (status, out) == (2, "")
    assert sentence in err
    assert err.count("\n") == 1


def test_what_cannot_be_drawn_is_one_sentence_and_nothing_is_written(
    fusestep: Any, counted: Path, uncounted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder.png").mkdir()
    for run, plot, sentence in (
        (uncounted, tmp_path / "a.png", "has no statistics over steps up to step 6; train with --fp8-stats"),
        (counted, tmp_path / "a.gif", "name a file that ends in .png"),
        (counted, tmp_path / "file" / "a.png", "is not a folder that you may write to; name another file"),
        (counted, tmp_path / "folder.png", "cannot be written (Is a directory); name another file"),
        (counted, tmp_path / f"{'a' * 300}.png", "cannot be written (File name too long); name another file"),
        (tmp_path / "nowhere", tmp_path / "a.png", "nowhere does not exist; name a run's folder"),
    ):
        status, out, err = fusestep(run, "--plot", plot)
        assert (status, out) == (2, "")
        assert sentence in err
        assert err.count("\n") == 1
    monkeypatch.delitem(sys.modules, "fusestep.cli.fp8_plot", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    status, _, err = fusestep(counted, "--plot", tmp_path / "a.png")
    assert status == 2
    assert "the package matplotlib is not installed; run pip install 'fusestep[report]'" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder.png"]
