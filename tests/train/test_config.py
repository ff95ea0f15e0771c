"""Every value that cannot be trained with is refused in one sentence that names it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fusestep import hardware
from fusestep.errors import UserError
from fusestep.train import TrainConfig
from fusestep.train.config import read_config_file, settings_of


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"preset": "huge"}, "--preset is 'huge'; choose one of auto, tiny, mini, scaleup, gpt2"),
        ({"form": "quick"}, "--form is 'quick'; choose one of seed, plain, fused"),
        ({"steps": 0}, "--steps is 0; pass 1 or more"),
        ({"steps": 2.5}, "--steps is 2.5; pass a whole number"),
        ({"steps": True}, "--steps is True; pass a whole number"),
        ({"batch": 0}, "--batch is 0"),
        ({"accumulate": -1}, "--accumulate is -1"),
        ({"lr": -1e-3}, "--lr is -0.001; pass a learning rate above 0"),
        ({"lr": 0}, "--lr is 0"),
        ({"lr": float("nan")}, "--lr is nan; pass a finite number"),
        ({"lr": float("inf")}, "--lr is inf; pass a finite number"),
        ({"lr": 1e39}, "--lr is 1e+39"),
        ({"batch": 2**20, "accumulate": 2**20}, "make steps of 1099511627776 sequences; pass at most"),
        ({"lr": "fast"}, "--lr is 'fast'; pass a number"),
        ({"warmup": -1}, "--warmup is -1"),
        ({"warmup": 20, "steps": 10}, "--warmup is 20, longer than the schedule of 10 steps"),
        ({"warmup": 20, "schedule_steps": 15}, "longer than the schedule of 15 steps"),
        ({"schedule_steps": -1}, "--schedule-steps is -1"),
        ({"weight_decay": -0.1}, "--weight-decay is -0.1"),
        ({"clip": -1.0}, "--clip is -1.0"),
        ({"dropout": 1.0}, "--dropout is 1.0"),
        ({"dropout": -0.1}, "--dropout is -0.1"),
        ({"precision": "int8"}, "--precision is 'int8'; choose one of fp32, bf16, fp16, fp8"),
        ({"weights": "bf16"}, "--weights is bf16 and --precision is fp32"),
        ({"weights": "fp16", "precision": "bf16"}, "--weights is fp16 and --precision is bf16"),
        ({"eval_every": -5}, "--eval-every is -5"),
        ({"save_every": -5}, "--save-every is -5"),
        ({"deterministic": "yes"}, "--deterministic is 'yes'; pass true or false"),
        ({"device": "tpu"}, "--device is 'tpu'; choose one of auto, cpu, cuda"),
        ({"out": ""}, "--out is ''; name a folder"),
        ({"out": "a\0b"}, "--out is 'a\\x00b'; name a folder"),
        ({"steps": 10**23}, f"--steps is {10**23}; pass one below 2^63"),
        ({"schedule_steps": 2**63}, "--schedule-steps is 9223372036854775808; pass one below 2^63"),
        ({"seed": -1}, "--seed is -1"),
        ({"seed": 2**63}, "below 2^63"),
        ({"model": {"depth": 3}}, "the model table has 'depth'; it may set vocab_size, width"),
        ({"model": {"width": "wide"}}, "model.width is 'wide'; pass a whole number"),
        ({"model": {"layers": 10**30}}, "pass at most 16777216"),
        ({"model": 3}, "--model is 3; pass a table"),
    ],
)
def test_bad_setting_is_one_sentence(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError) as raised:
        TrainConfig(**settings)
    assert sentence in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_missing_gpu_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "cuda_support", lambda: hardware.Support(False, "no CUDA device is visible"))
    with pytest.raises(UserError, match="--device is cuda, but no CUDA device is visible"):
        TrainConfig(device="cuda")
    assert TrainConfig(device="auto").torch_device().type == "cpu"
    assert TrainConfig(device="auto").resolved().preset == "tiny"


@pytest.mark.parametrize(
    ("precision", "capability", "refused"),
    [("bf16", (7, 5), True), ("fp16", (7, 5), False), ("fp16", (6, 1), True), ("bf16", (8, 0), False)],
)
def test_a_precision_without_units_for_it_is_refused(
    monkeypatch: pytest.MonkeyPatch, precision: Any, capability: tuple[int, int], refused: bool
) -> None:
    monkeypatch.setattr(hardware, "cuda_support", lambda: hardware.Support(True, "1 CUDA device"))
    monkeypatch.setattr(hardware, "devices", lambda: (hardware.Device(0, "Old card", capability, 2**33, 40),))
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    if refused:
        with pytest.raises(UserError, match=r"needs compute capability .*; Old card has"):
            TrainConfig(precision=precision)
    else:
        TrainConfig(precision=precision)
    TrainConfig(precision=precision, device="cpu")


def test_the_vocabulary_follows_the_data_and_the_model_table_may_only_raise_it() -> None:
    assert TrainConfig(preset="tiny").gpt_config(256).vocab_size == 256
    padded = TrainConfig(preset="tiny", model={"vocab_size": 128}).gpt_config(96)
    assert (padded.vocab_size, padded.symbols) == (128, 96)
    with pytest.raises(UserError, match="vocab_size 64, the data has 96"):
        TrainConfig(preset="tiny", model={"vocab_size": 64}).gpt_config(96)


def test_impossible_dimensions_are_refused() -> None:
    with pytest.raises(UserError, match="heads"):
        TrainConfig(preset="tiny", model={"width": 30, "heads": 7}).gpt_config(96)


@pytest.mark.parametrize("name", ["run.toml", "run.json"])
def test_config_files_give_settings_under_the_command_lines(tmp_path: Path, name: str) -> None:
    text = {
        "run.toml": "steps = 7\neval-every = 3\nlr = 1\n[model]\nwidth = 32\n",
        "run.json": json.dumps({"steps": 7, "eval-every": 3, "lr": 1, "model": {"width": 32}}),
    }
    (tmp_path / name).write_text(text[name])
    settings = settings_of({"steps": 9}, file=str(tmp_path / name), resume=False)
    config = TrainConfig(**settings)
    assert (config.steps, config.eval_every, config.lr, config.model) == (9, 3, 1.0, {"width": 32})


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.json", b"{", "; correct it."),
        ("a.toml", b"steps = ", "; correct it."),
        ("a.json", b"{", "is not JSON"),
        ("a.toml", b"steps = ", "is not TOML"),
        ("a.conf", b"steps = 3", "; correct it, or name it .toml if it is TOML."),
        ("a.json", b"[1]", "holds no table of settings"),
        ("a.json", b'{"step": 3}', "sets 'step', which is no setting; did you mean steps?"),
        ("a.json", b'{"zzzz": 3}', "the settings are "),
        ("a.json", b"\xff\xfe", "not UTF-8"),
    ],
)
def test_bad_config_file_is_one_sentence(tmp_path: Path, name: str, content: bytes, sentence: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as raised:
        read_config_file(tmp_path / name)
    assert sentence in str(raised.value)
    assert str(tmp_path / name) in str(raised.value)


def test_a_missing_config_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere\.json cannot be read \(No such file"):
        read_config_file(tmp_path / "nowhere.json")


def test_a_file_nested_without_end_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "deep.json"
    path.write_text("[" * 100_000)
    with pytest.raises(UserError, match="is not JSON"):
        read_config_file(path)


def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"steps": 5}', encoding="utf-8-sig")
    assert read_config_file(path) == {"steps": 5}
