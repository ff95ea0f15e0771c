"""`fusestep plan`: tables with formulas, JSON with the same numbers, one sentence for what cannot be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fusestep.cli import main


def plan(*arguments: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(["plan", *arguments])
    return int(left.value.code or 0)


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert plan(*arguments, "--json") == 0
    out, err = capsys.readouterr()
    assert err == ""
    found: dict[str, Any] = json.loads(out)
    return found


SPREAD = ("--preset", "gpt2", "--gpus", "16", "--parallel", "fsdp,tp=2", "--batch", "32", "--precision", "bf16")


def test_tables_name_every_line_with_its_formula_and_its_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(*SPREAD, "--tokens", "3e11") == 0
    page = capsys.readouterr().out
    found = told(capsys, *SPREAD, "--tokens", "3e11")
    flat = " ".join(page.split())
    for section in ("memory", "sent", "time", "run"):
        for line in found[section]:
            assert line["formula"]
            assert line["symbols"]
            assert line["name"].split()[0] in flat
    for name, figure in found["figures"].items():
        if isinstance(figure, dict):
            assert name in page
            assert figure["source"].split()[0] in flat
    assert "GPU hours for 300 G tokens" in flat


def test_one_of_a_thing_is_told_in_the_singular(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--layers", "1", "--heads", "1", "--batch", "1", "--gpus", "1", "--tokens", "1") == 0
    page = " ".join(capsys.readouterr().out.split())
    for words in (
        "| 1 layer ×",
        " 1 head,",
        "| 1 sequence ×",
        "| 1 GPU,",
        " 1 step for 1 token,",
        "for 1 token Figures",
    ):
        assert words in page


def test_json_adds_up(capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, *SPREAD)
    assert found["schema"] == 1
    totals = found["totals"]
    *parts, reserved = found["memory"]
    assert sum(line["bytes"] for line in parts) == pytest.approx(totals["peak_bytes"])
    assert reserved["bytes"] == totals["reserved_bytes"] > totals["peak_bytes"]
    assert sum(line["seconds"] for line in found["time"]) == pytest.approx(totals["step_seconds"])
    assert sum(line["sent_bytes"] for line in found["sent"]) == pytest.approx(totals["sent_bytes"])
    assert totals["tokens_per_second"] == pytest.approx(32 * 1024 / totals["step_seconds"])
    assert found["mesh"]["shards"] == 8
    used = {
        name for section in ("memory", "sent", "time", "run") for line in found[section] for name in line["figures"]
    }
    assert used == set(found["figures"]) - {"gpu", "date"}


def test_a_file_and_options_say_what_is_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        'preset = "mini"\nbatch = 6\nprecision = "bf16"\nsteps = 70\n'
        "[model]\nlayers = 3\nkv_heads = 2\ngated = true\nbiases = false\n"
    )
    found = told(capsys, "--config", str(path), "--batch", "9", "--width", "384", "--heads", "6")
    assert found["settings"]["batch"] == 9
    assert found["settings"]["precision"] == "bf16"
    model = found["model"]
    assert (model["layers"], model["width"], model["heads"], model["kv_heads"]) == (3, 384, 6, 2)
    assert (model["gated"], model["biases"], model["ffn_width"]) == (True, False, 3072)


def test_figures_that_are_given_are_used(capsys: pytest.CaptureFixture[str]) -> None:
    def line(found: dict[str, Any], section: str, name: str) -> float:
        return next(float(one["seconds"]) for one in found[section] if one["name"] == name)

    bf16 = ("--preset", "scaleup", "--precision", "bf16")
    first = told(capsys, *bf16, "--product-tflops", "500")
    second = told(capsys, *bf16, "--product-tflops", "1000")
    name = "products of blocks"
    assert line(first, "time", name) == pytest.approx(2 * line(second, "time", name))
    # 6 · 12 layers · (4 · 2048² + 2 · 2048 · 8192) · 16 · 256 tokens, at 500 TFLOP/s.
    assert line(first, "time", name) == pytest.approx(6 * 12 * 12 * 2048**2 * 4096 / 500e12)
    assert first["figures"]["products:bf16"]["source"] == "given on the command line"
    wide = ("--preset", "scaleup", "--parallel", "ddp", "--gpus", "2")
    slow, fast = (told(capsys, *wide, "--link-gbps", rate) for rate in ("1", "100"))
    gradients = 605_220_864 * 4
    assert line(slow, "sent", "average gradients") == pytest.approx(gradients / 1e9, rel=0.01)
    assert line(fast, "sent", "average gradients") == pytest.approx(gradients / 100e9, rel=0.01)
    assert slow["totals"]["sent_bytes"] == pytest.approx(gradients, rel=1e-3)


def test_what_does_not_fit_says_so_and_what_to_lower(capsys: pytest.CaptureFixture[str]) -> None:
    large = ("--preset", "llama-8b", "--batch", "64", "--precision", "bf16")
    assert plan(*large) == 0
    page = " ".join(capsys.readouterr().out.split())
    assert "does not fit 139.80 GiB" in page
    assert "The largest parts are activations" in page
    assert told(capsys, *large)["totals"]["fits"] is False
    assert plan(*large, "--gpu-memory", "9000") == 0
    assert "fits 9,000.00 GiB" in capsys.readouterr().out


def test_recipes_take_what_they_were_measured_to_take(capsys: pytest.CaptureFixture[str]) -> None:
    def step(*options: str) -> float:
        found = told(capsys, "--preset", "scaleup", "--precision", "fp8", "--graph", *options)
        return float(found["totals"]["step_seconds"])

    assert step() < step("--recipe", "current") < step("--recipe", "block")
    given = ("--product-tflops", "900")
    assert step("--recipe", "mxfp8", *given) == step("--recipe", "block", *given) == step(*given)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--preset", "huge"), "--preset is 'huge'; choose one of tiny, mini"),
        (("--gpus", "8"), "--gpus is 8 and --parallel none is for one; pass --parallel ddp"),
        (
            ("--gpus", "8", "--parallel", "tp=3"),
            "of the 3 ranks that --parallel tp=3 puts together; pass --gpus 6 or 9, or divisors of 8",
        ),
        (("--parallel", "fsdp", "--context-parallel", "2"), "--context-parallel 2 put together; pass --gpus 2, or div"),
        (("--gpus", "8", "--parallel", "tp=8"), "which do not divide the model's heads 12"),
        (("--gpus", "8", "--parallel", "pp=8"), "of which 'pp=8' cannot be"),
        (("--gpus", "8", "--parallel", "ddp", "--batch", "12"), "8 groups of ranks cannot share evenly; pass 8 or 16"),
        (("--gpus", "8", "--parallel", "ddp", "--shard-over", "4"), "--shard-over is for --parallel fsdp"),
        (("--gpus", "8", "--parallel", "fsdp", "--shard-over", "3"), "--shard-over is 3, which does not divide"),
        (("--batch", "0"), "--batch is 0; pass a whole number of at least 1"),
        (("--batch", "9999999999"), "--batch is 9999999999; pass at most 2147483648"),
        (("--failure-hours", "1e-6", "--tokens", "1e9"), "so this run never ends; plan fewer --gpus"),
        (("--precision", "int8"), "--precision is 'int8'; choose one of fp32, bf16, fp16, fp8"),
        (("--precision", "fp8", "--form", "seed"), "pass --form fused"),
        (("--precision", "fp8", "--recipe", "mxfp8"), "--recipe is mxfp8, which NVIDIA H200 has no units for"),
        (("--weights", "bf16"), "--weights is bf16 and --precision is fp32"),
        (("--heads", "7"), "width 768 is not a multiple of its 7 heads"),
        (("--link-gbps", "-1"), "the figure given for link is -1e+09; pass a number above 0"),
        (("--product-tflops", "nan"), "the figure given for products is nan"),
        (("--tokens", "0"), "--tokens is 0; pass 1 to 1e18"),
        (("--config", "/no/such/file.json"), "--config /no/such/file.json cannot be read"),
    ],
)
def test_what_cannot_be_planned_is_one_sentence(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str
) -> None:
    assert plan(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("fusestep plan: ")
    assert err.count("\n") == 1
    assert words in err
