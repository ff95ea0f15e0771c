"""Runs so small that a step takes a millisecond."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fusestep.train import TrainConfig

MODEL = {"width": 16, "heads": 2, "layers": 2, "ffn_width": 24, "context": 8}


@pytest.fixture
def tiny(tmp_path: Path) -> Callable[..., TrainConfig]:
    """A configuration with everything at its smallest, changed by keyword."""

    def build(**changes: Any) -> TrainConfig:
        settings: dict[str, Any] = {
            "preset": "tiny",
            "model": MODEL,
            "steps": 10,
            "batch": 3,
            "lr": 1e-2,
            "dropout": 0.2,
            "eval_every": 0,
            "save_every": 0,
            "device": "cpu",
            "out": str(tmp_path / "run"),
        }
        return TrainConfig(**{**settings, **changes})

    return build


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
