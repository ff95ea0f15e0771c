"""Transformer Engine's names, and scripts as `fusestep run` runs them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fusestep.compat import report

SETTINGS = ("FUSESTEP_IMPL", "FUSESTEP_STRICT", "FUSESTEP_TE_LAYOUT", "FUSESTEP_RUN_FOLDER", "TRITON_INTERPRET")


@pytest.fixture(autouse=True)
def fresh_report() -> Iterator[None]:
    report.reset()
    yield
    report.reset()


@pytest.fixture
def te() -> ModuleType:
    import transformer_engine.pytorch as te

    return te


@pytest.fixture
def recipe() -> ModuleType:
    from transformer_engine.common import recipe

    return recipe


@pytest.fixture
def fusestep_run(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run code with `fusestep run` in a process of its own; fails the test unless its status is 0."""

    def run(code: str, *options: str, timeout: int = 250, **environment: str) -> subprocess.CompletedProcess[str]:
        script = tmp_path / "script.py"
        script.write_text(code)
        kept: dict[str, Any] = {name: value for name, value in os.environ.items() if name not in SETTINGS}
        done = subprocess.run(
            [sys.executable, "-m", "fusestep.run", *options, str(script)],
            env={**kept, "OMP_NUM_THREADS": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", **environment},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    return run
