"""Where an optimizer test runs: the reference on the CPU, the kernels through the interpreter, and a GPU."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(
    params=[
        pytest.param("cpu", id="cpu"),
        pytest.param("cpu", id="interpreter", marks=pytest.mark.interpreter),
        pytest.param("cuda", id="cuda", marks=pytest.mark.gpu),
    ]
)
def place(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param, 0) if request.param == "cuda" else torch.device("cpu")
