"""The tour of FP8 as a script, with few steps."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

TOUR = Path(__file__).parents[2] / "examples" / "fp8_tour.py"


def tour(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, TOUR, *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_tour_runs_on_a_cpu() -> None:
    out = tour("--device", "cpu", "--steps", "20", "--timed", "1")
    assert "FP8 on cpu: emulated" in out
    assert "amax_history_len=16" in out
    for module in ("Linear", "LayerNorm", "LayerNormLinear", "LayerNormMLP", "TransformerLayer"):
        assert re.search(rf"\n  {module} +\(8, 32, \d+\)", out)
    losses = [float(loss) for loss in re.findall(r"step +\d+  loss (\S+)", out)]
    assert len(losses) == 2
    assert losses[1] < losses[0]
    state = re.findall(r"\n  (\w+) +scale (\S+)  amaxes … (.+)", out)
    assert [name for name, _, _ in state] == ["input", "weight", "grad_output"]
    assert all(float(scale) > 0 and len(amaxes.split()) == 4 for _, scale, amaxes in state)
    assert len(re.search(r"generated ones: \[(.+)\]", out)[1].split(", ")) == 32  # type: ignore[index]
    assert re.search(r"\n  bf16 +\S+ ms\n  fp8 +\S+ ms\n  emulated", out)


def test_the_tour_takes_another_recipe(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--device", "cpu", "--steps", "1", "--timed", "0", "--recipe", "block", "--format", "hybrid"]
    monkeypatch.setattr(sys, "argv", [str(TOUR), *arguments])
    runpy.run_path(str(TOUR), run_name="__main__")
    out = capsys.readouterr().out
    assert "Float8BlockScaling(fp8_format=Format.HYBRID" in out
    assert "FP8 state" not in out


@pytest.mark.parametrize("wrong", ["--device=foo", "--amax-history=0", "--steps=0", "--timed=-1"])
def test_what_the_tour_cannot_take_is_one_sentence(
    wrong: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(TOUR), wrong])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(TOUR), run_name="__main__")
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines()[-1].startswith("fp8_tour.py: error: ")


@pytest.mark.gpu
def test_on_a_gpu_the_tour_learns_the_sequences() -> None:
    out = tour("--device", "cuda", "--steps", "100")
    assert float(re.search(r"final loss (\S+);", out)[1]) < 0.15  # type: ignore[index]
    assert "<- a constant stride" in out
