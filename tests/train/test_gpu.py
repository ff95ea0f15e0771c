"""What only a GPU can show: no waiting for it, its generator, its determinism."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

from fusestep.data import arithmetic_sequences
from fusestep.fp8 import count_saturation
from fusestep.train import TrainConfig, checkpoint, train
from fusestep.train.readings import MAXIMUM_LAG, Readings
from fusestep.train.trainer import Trainer

NoWaiting = Callable[[], AbstractContextManager[None]]

pytestmark = pytest.mark.gpu

Build = Callable[..., TrainConfig]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"precision": "bf16", "accumulate": 2},
        {"precision": "fp16"},
        {"precision": "bf16", "weights": "bf16"},
        {"precision": "fp8", "fp8_stats": True},
        {"precision": "fp8", "recipe": "current", "accumulate": 2},
        {"precision": "fp8", "recipe": "block", "weights": "bf16"},
    ],
    ids=lambda changes: "-".join(map(str, changes.values())) or "fp32",
)
def test_a_step_never_waits_for_the_gpu(tiny: Build, changes: dict[str, Any], no_waiting: NoWaiting) -> None:
    config = tiny(device="cuda", warmup=2, **changes)
    device = config.torch_device()
    source = arithmetic_sequences(seed=0)
    trainer = Trainer(config, config.gpt_config(source.vocab_size), source, device)
    readings = Readings(device)
    count_saturation(config.fp8_stats)
    try:
        for _ in range(3):
            trainer.train_step()
        with no_waiting():
            for _ in range(3):
                readings.start()
                readings.finish(trainer.step, trainer.train_step())
    finally:
        count_saturation(False)
    assert [reading.values[0] > 0 and reading.ms > 0 for reading in readings.ready(wait=True)] == [True] * 3


def test_readings_lag_by_a_few_steps_at_most() -> None:
    device = torch.device("cuda", 0)
    readings = Readings(device)
    seen = []
    for step in range(1, 51):
        readings.start()
        torch.cuda._sleep(1_000_000)
        readings.finish(step, torch.full((2,), float(step), device=device))
        seen += [(reading.step, *reading.values) for reading in readings.ready()]
        assert step - len(seen) <= MAXIMUM_LAG
    seen += [(reading.step, *reading.values) for reading in readings.ready(wait=True)]
    assert seen == [(step, step, step) for step in range(1, 51)]


@pytest.mark.parametrize(
    "changes",
    [
        {"precision": "fp32"},
        {"precision": "bf16"},
        {"precision": "fp16"},
        {"precision": "fp8", "fp8_stats": True},
        {"precision": "fp8", "weights": "bf16", "accumulate": 2, "activation_checkpointing": True},
        {"precision": "fp8", "recipe": "current"},
        {"precision": "fp8", "recipe": "block"},
        {"precision": "fp8", "recipe": "mxfp8"},
    ],
    ids=lambda changes: "-".join(map(str, changes.values())),
)
def test_a_deterministic_run_resumes_bit_for_bit(tiny: Build, tmp_path: Path, changes: dict[str, Any]) -> None:
    common = {"device": "cuda", "deterministic": True, "schedule_steps": 10, **changes}
    straight = tiny(out=str(tmp_path / "straight"), **common)
    train(straight)
    broken = tiny(out=str(tmp_path / "broken"), steps=5, **common)
    train(broken)
    torch.cuda.manual_seed(9)
    train(dataclasses.replace(broken, steps=10, resume=True))

    def rows(out: str) -> list[dict[str, Any]]:
        lines = (Path(out) / "metrics.jsonl").read_text().splitlines()
        return [{**json.loads(line), "ms": 0} for line in lines]

    assert rows(broken.out) == rows(straight.out)
    found, expected = checkpoint.newest(Path(broken.out)), checkpoint.newest(Path(straight.out))
    assert found is not None
    assert expected is not None
    assert all(torch.equal(value, expected.weights()[name]) for name, value in found.weights().items())


def test_a_run_moves_from_the_gpu_to_the_cpu(tiny: Build) -> None:
    train(tiny(device="cuda", steps=5))
    result = train(tiny(device="cpu", steps=10, resume=True))
    assert result.step == 10


def test_out_of_gpu_memory_is_one_sentence(tiny: Build) -> None:
    too_large = tiny(device="cuda", batch=2**20, model={"width": 4096, "heads": 8, "context": 64})
    with pytest.raises(ValueError, match=r"out of memory on .* after a peak of .*; lower --batch, such as --batch"):
        train(too_large)
    assert not Path(too_large.out).exists()
