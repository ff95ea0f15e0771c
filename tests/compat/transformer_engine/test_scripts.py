"""Whole scripts: the second seed's tutorial, and one of the project's own in its style."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fusestep.compat import install, report

Run = Callable[..., subprocess.CompletedProcess[str]]

OWN = Path(__file__).parent / "scripts" / "arithmetic.py"
SHARED = Path(__file__).parent / "scripts" / "shared.py"


DOCUMENT = Path(__file__).parents[4] / "shared" / "seeds" / "004_2846f0dc342a24d0.txt"

#: What stands in for torch.cuda on a CPU: a Hopper that remembers nothing.
CUDA = """
import types
_cuda = types.SimpleNamespace(
    get_device_properties=lambda _: types.SimpleNamespace(major=9, minor=0, name="no GPU", total_memory=1),
    empty_cache=lambda: None, synchronize=lambda: None, reset_peak_memory_stats=lambda: None,
    max_memory_allocated=lambda: 0,
)
"""


def script() -> str:
    """The tutorial's code, as its blocks stand in the document; skips the test where the document is absent."""
    if not DOCUMENT.exists():
        pytest.skip(f"the document that the tutorial is taken from is not here: {DOCUMENT.name} in ../shared/seeds")
    body = json.loads(DOCUMENT.read_text())["body_md"]
    blocks = re.findall(r"^```[^\n]*\n(.*?)^```", body, re.DOTALL | re.MULTILINE)
    code = "\n".join(textwrap.dedent(block) for block in blocks)
    assert code.count("\n") > 200
    return code


def replaced(code: str, *pairs: tuple[str, str]) -> str:
    """Code with each first text replaced by the second. Each must be there."""
    for old, new in pairs:
        assert old in code, old
        code = code.replace(old, new)
    return code


def for_cpu(code: str, *, in_fp8: bool) -> str:
    """The tutorial for a CPU: another device string, no assertion, no torch.cuda, and smaller.

    Args:
        in_fp8: answer that FP8 is there, which a CPU emulates; else it is asked, and is not.
    """
    code = replaced(
        code,
        ('DEVICE = "cuda"', 'DEVICE = "cpu"'),
        ("assert torch.cuda.is_available()", f"{CUDA}\nassert True"),
        ("torch.cuda.", "_cuda."),
        ("= 96, 768, 12, 4, 3072, 256", "= 96, 48, 4, 2, 96, 20"),
        ("range(1, 61)", "range(1, 13)"),
        ("step % 10", "step % 4"),
        ("lr=3e-4", "lr=1e-2"),
        ("H = 768", "H = 48"),
        ("iters=30, warmup=10", "iters=1, warmup=1"),
        ("gen_len=24", "gen_len=12"),
    )
    return replaced(code, ("= te.fp8.check_fp8_support()", '= True, ""')) if in_fp8 else code


def losses(output: str) -> list[float]:
    return [float(found) for found in re.findall(r"step +\d+ (?:\| )?loss ([\d.]+)", output)]


def strides(output: str) -> list[int]:
    found = re.search(r"step diffs: \[([\d, ]+)\]", output)
    assert found is not None, output
    return [int(one) for one in found.group(1).split(",")]


def test_a_script_of_our_own_trains_generates_and_is_told_of_its_layout(fusestep_run: Run) -> None:
    done = fusestep_run(OWN.read_text())
    curve = losses(done.stdout)
    # Tokens of a sequence never meet: which of the four strides it is cannot be known.
    assert curve[0] > curve[-1] > math.log(4) - 0.3
    assert len(re.search(r"generated \[(.*)\]", done.stdout).group(1).split(",")) == 12
    assert re.search(r"FP8 state of blocks.0.self_attention.layernorm_qkv \[[\d.]+, [\d.]+, 1.0\]", done.stdout)
    assert "transformer_engine.pytorch.TransformerLayer by fusestep.nn.TransformerLayer" in done.stderr
    (hint,) = [line for line in done.stderr.splitlines() if 'attn_input_format="bshd"' in line]
    assert "--te-layout bshd" in hint
    assert "of 10, and not over the second, of 12" in hint


def test_with_the_batch_first_the_same_script_learns_the_rule(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FUSESTEP_TE_LAYOUT", "bshd")  # what --te-layout sets
    exec(compile(OWN.read_text(), str(OWN), "exec"), {"__name__": "script"})
    assert losses(capsys.readouterr().out)[-1] < 0.9
    assert report.snapshot().hints == []


def test_layers_that_ranks_share_under_torchrun_learn_as_whole_ones_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "fusestep.run")
    settings = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, *launch, str(SHARED)],
        env={**settings, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "transformer_engine.pytorch.TransformerLayer by fusestep.nn.TransformerLayer" in done.stderr
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    exec(compile(SHARED.read_text(), str(SHARED), "exec"), {"__name__": "script"})
    wanted, found = losses(capsys.readouterr().out), losses(done.stdout)
    assert len(found) == 12
    assert found[:8] == pytest.approx(wanted[:8], rel=2e-6)
    assert found[8:] == pytest.approx(wanted[8:], rel=5e-3)  # in FP8
    assert found[-1] < found[0] - 0.1


def check_the_tutorial(out: str) -> None:
    """What it prints in FP8 and without."""
    assert "Transformer Engine imported OK: unknown version" in out
    assert "te.LayerNormLinear (8, 32, 144)" in out
    curve = losses(out)
    assert curve[-1] < curve[0] < 1.1 * math.log(96)
    assert "Model: TE fused" in out
    assert len(strides(out)) == 19
    assert "Done! Things to try next" in out


def test_the_tutorial_runs_on_a_cpu_in_fp8(fusestep_run: Run) -> None:
    done = fusestep_run(for_cpu(script(), in_fp8=True))
    out = done.stdout
    check_the_tutorial(out)
    assert "FP8 recipe: recipe_type=DelayedScaling, margin=0, format=HYBRID, amax_history_len=16" in out
    state = re.search(r"block-0 submodule '(.*)':\n   scale       : \[(.*)\]\n   amax_history: \[(.*)\]", out)
    assert state is not None
    assert state.group(1) == "self_attention.layernorm_qkv"
    scales = [float(scale) for scale in state.group(2).split(",")]
    assert len(scales) == 3
    assert scales[0] > 1 < scales[1]
    assert scales[2] == 1.0
    assert state.group(3) == "0.0, 0.0, 0.0"
    assert "on the CPU" in done.stderr  # where "cuda" was the default
    assert 'attn_input_format="bshd"' in done.stderr


def test_the_tutorial_takes_no_for_an_answer_about_fp8(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process, which has all imported; what the script starts, pip, finds the shims as under `fusestep run`."""
    monkeypatch.setenv("PYTHONPATH", str(install.SHIMS))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    exec(compile(for_cpu(script(), in_fp8=False), "tutorial", "exec"), {"__name__": "script"})
    out = capsys.readouterr().out
    check_the_tutorial(out)
    assert "TE reports FP8 unsupported" in out
    assert "FP8 is emulated here" in out
    assert 'attn_input_format="bshd"' in report.snapshot().hints[0]


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
def test_the_tutorial_runs_unedited(fusestep_run: Run, layout: str) -> None:
    done = fusestep_run(script(), "--te-layout", layout)
    out = done.stdout
    assert torch.cuda.get_device_name(0) in out
    curve = losses(out)
    assert len(curve) == 6
    if layout == "bshd":
        assert 0.15 < curve[-1] < 0.6
        assert 'attn_input_format="bshd"' not in done.stderr
    else:
        # Over the batch no step can tell the six strides apart.
        assert math.log(6) - 0.1 < curve[-1] < 2.5
        assert 'attn_input_format="bshd"' in done.stderr
    assert curve[0] > curve[-1]
    assert re.search(r"BF16: +[\d.]+ ms/step", out)
    if "FP8=ON" in out:
        assert re.search(r"FP8 : +[\d.]+ ms/step", out)
        assert "FP8 state of block-0 submodule 'self_attention.layernorm_qkv'" in out
    assert len(strides(out)) == 8 + 24 - 1
    print(f"{layout}: losses {curve}, strides {strides(out)}")  # noqa: T201 (one prompt may fail)
