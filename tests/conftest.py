"""Shared by all tests: which of them run in this process, and fresh choices for each."""

from __future__ import annotations

import importlib.util
import os
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import hypothesis
import pytest
import torch

from fusestep import dispatch

# How long an example takes says more about the machine's other work than about ours.
hypothesis.settings.register_profile("fusestep", deadline=None)
hypothesis.settings.load_profile("fusestep")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run interpreter tests only in the interpreter's process and the others only outside it; GPU tests on a GPU.

    They are deselected, not skipped: `make test` runs both processes, so nothing is missed in silence.
    """
    has_gpu = torch.cuda.is_available()

    def belongs(item: pytest.Item) -> bool:
        if (item.get_closest_marker("interpreter") is not None) != INTERPRETED:
            return False
        if item.get_closest_marker("endurance") is not None and "endurance" not in config.getoption("markexpr"):
            return False
        return has_gpu or item.get_closest_marker("gpu") is None

    dropped = [item for item in items if not belongs(item)]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if belongs(item)]


@pytest.fixture(autouse=True, scope="session")
def a_closing_terminal_is_heard() -> Iterator[None]:
    """Under nohup SIGHUP is ignored, and processes inherit that: tests that send it would wait for nothing."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture(autouse=True, scope="session")
def language_is_patched_once_a_launch() -> Iterator[None]:
    """The interpreter's kernels run in four fifths of their time.

    A launch puts the interpreter's functions into Triton's language; each call of a function within the kernel does so
    again, which changes nothing and takes longer than most of these functions.
    """
    if not INTERPRETED or importlib.util.find_spec("triton") is None:
        yield
        return
    from triton import language
    from triton.runtime import interpreter

    patch = interpreter._patch_lang

    def patch_once(function: Callable[..., Any]) -> Any:
        parts = [part for part in function.__globals__.values() if part is language or part is language.core]
        is_patched = bool(parts) and not any(language.core.is_builtin(part.load) for part in parts)
        return interpreter._LangPatchScope() if is_patched else patch(function)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(interpreter, "_patch_lang", patch_once)
        yield


@pytest.fixture(autouse=True)
def fresh_dispatch() -> Iterator[None]:
    """Each test decides anew, from its own environment."""
    dispatch.reset()
    yield
    dispatch.reset()


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(20240229)


@pytest.fixture
def no_waiting() -> Callable[[], AbstractContextManager[None]]:
    """A context in which any wait for the GPU that torch knows of raises."""

    @contextmanager
    def context() -> Iterator[None]:
        torch.cuda.synchronize()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch says once that the mode is a prototype
            torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return context


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Fresh memory holds NaN, so that a kernel which forgets an element is caught."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.fixture
def multiplies_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices in FP8 of one scale a tensor are multiplied by torch's own product, which a CPU has as well."""
    monkeypatch.setattr(dispatch, "multiplies_fp8", lambda _op, _device, scaling="tensor": scaling == "tensor")


@pytest.fixture(params=[pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Run the test on the CPU, and once more on the GPU where there is one."""
    return torch.device(request.param, 0) if request.param == "cuda" else torch.device("cpu")
