"""Shared by the tests of several processes: where their ranks compute."""

from __future__ import annotations

import pytest

import harness


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def ranks_device(request: pytest.FixtureRequest) -> str:
    """Run a test with ranks on the CPU over gloo, and once more on GPUs over NCCL where there are any."""
    device: str = request.param
    return device


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tell the harness before any fixture starts ranks, those of a module included."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    harness.device_type = parameters.get("ranks_device", "cpu")
    if harness.device_type == "cuda":
        harness.need_gpus(2)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    harness.device_type = "cpu"
