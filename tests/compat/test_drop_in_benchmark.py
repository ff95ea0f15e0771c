"""The benchmarks of drop-in and conversion: what they read of a program's output, and the models that they make."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import drop_in, lookalikes

from fusestep import convert

PRINTED = """
   step  10 | loss 3.1415 | 41 ms/step
   step  60 | loss 0.3100 | 12 ms/step
>> Final loss: 0.3100 (random guess would be ~4.56)
   BF16:    10.5 ms/step | peak mem 1.25 GB
   FP8 :     9.0 ms/step | peak mem 1.75 GB
>> FP8 state of block-0 submodule 'self_attention.layernorm_qkv':
   step diffs: [3, 3, 3, 4, 3] <- constant stride = model learned the rule
"""


def test_a_program_for_transformer_engine_is_read_as_it_prints() -> None:
    found = drop_in.of_transformer_engine(PRINTED)
    assert found["losses"] == {"10": 3.1415, "60": 0.31}
    assert (found["loss"], found["trained_ms"]) == (0.31, 12)
    assert (found["bf16_ms"], found["fp8_ms"], found["peak_gb"]) == (10.5, 9.0, 1.75)
    assert found["fp8_state_of"] == "self_attention.layernorm_qkv"
    assert (found["strides"], found["stride_kept_for"]) == ([3, 3, 3, 4, 3], 3)
    without = drop_in.of_transformer_engine(PRINTED.replace("FP8 ", "").replace("BF16", "FP32"))
    assert (without["bf16_ms"], without["fp8_ms"], without["fp8_state_of"]) == (None, None, None)
    assert without["fp32_ms"] == 10.5
    for row in (found, without):
        assert len(drop_in.cells(row | {"program": "p", "configuration": "c", "seconds": 1.0})) == len(drop_in.COLUMNS)


def test_rungs_of_a_program_for_apex_are_read_as_it_prints() -> None:
    printed = "rung FusedAdam: 35.25 ms/step | peak mem 2.50 GB | loss 4.1\nrung + autocast BF16: 9.5 ms/step | "
    rungs = drop_in.of_apex(printed + "peak mem 2.00 GB | loss 4.0000\n")
    assert [(one["configuration"], one["fp32_ms"], one["bf16_ms"]) for one in rungs] == [
        ("FusedAdam", 35.25, None),
        ("+ autocast BF16", None, 9.5),
    ]
    assert all(len(drop_in.cells(one | {"program": "apex", "seconds": 1.0})) == len(drop_in.COLUMNS) for one in rungs)


def test_code_is_taken_from_python_and_from_documents(tmp_path: Path) -> None:
    body = "Words.\n\n```python\n    x = 1\n```\nmore words\n```\nprint(x)\n```\n"
    for name, text in (("a.txt", json.dumps({"body_md": body})), ("b.md", body)):
        (tmp_path / name).write_text(text)
        assert drop_in.code_of(tmp_path / name) == "x = 1\n\nprint(x)\n"
    (tmp_path / "c.py").write_text("print(2)\n")
    assert drop_in.code_of(tmp_path / "c.py") == "print(2)\n"


def test_the_tutorial_is_what_the_variable_names_and_else_a_program_of_our_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tutorial.py").write_text("print(3)\n")
    monkeypatch.setenv(drop_in.VARIABLE, str(tmp_path / "tutorial.py"))
    assert drop_in.program() == ("tutorial", "print(3)\n")
    monkeypatch.delenv(drop_in.VARIABLE)
    monkeypatch.setattr(drop_in, "USUAL", tmp_path / "absent")
    assert drop_in.program()[0] == "transformer_engine_model.py"


def test_a_program_that_fails_is_a_row_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    done = subprocess.CompletedProcess([], 1, stdout="", stderr="Traceback: out of luck")
    monkeypatch.setattr(drop_in, "under_fusestep", lambda *_: (done, {}, 0.1))
    monkeypatch.setattr(drop_in, "program", lambda: ("tutorial", ""))
    rows = list(drop_in.run(1.0))
    assert [row["configuration"] for row in rows] == ["sbhd", "bshd", "all"]
    assert all("out of luck" in row["failed"] for row in rows)


@pytest.mark.parametrize(("name", "swapped"), [("llama", 12), ("gpt2", 10)])
def test_lookalikes_are_converted_whole(name: str, swapped: int) -> None:
    torch.manual_seed(0)
    shape = lookalikes.Shape(32, 4, 2, 48, 97, 16, 2, key_heads=2)
    make: Any = getattr(lookalikes, name)
    model = make(shape).train()
    tokens = torch.randint(97, (2, 16))
    before = model(input_ids=tokens, labels=tokens)["loss"]
    report = convert(model)
    assert (len(report.swapped), len(report.left)) == (swapped, 0), str(report)
    torch.testing.assert_close(model(input_ids=tokens, labels=tokens)["loss"], before, rtol=1e-5, atol=1e-6)
