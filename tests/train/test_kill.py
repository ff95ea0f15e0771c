"""kill -9 at any moment leaves the last good checkpoint."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("kill_loop.py")


def kill_many(folder: Path, kills: int, seed: int, timeout: float) -> tuple[int, int]:
    """Returns how many kills hit a checkpoint that was being written, and the last step."""
    answer = subprocess.run(
        [sys.executable, str(PROGRAM), str(folder), str(kills), str(seed)],
        capture_output=True,
        text=True,
        timeout=timeout,
        # Without a GPU, since autograd's threads for one do not survive a fork.
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        check=False,
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr[-2000:]
    match = re.search(r"torn (\d+) step (\d+)", answer.stdout)
    assert match is not None
    return int(match[1]), int(match[2])


@pytest.mark.slow
def test_a_few_kills_leave_the_last_good_checkpoint(tmp_path: Path) -> None:
    torn, step = kill_many(tmp_path, 25, 1, 120)
    assert torn > 0
    assert step > 3


@pytest.mark.endurance
@pytest.mark.timeout(1800)
def test_a_thousand_kills_leave_the_last_good_checkpoint(tmp_path: Path) -> None:
    torn, step = kill_many(tmp_path, 1000, 2, 1700)
    assert torn > 100
    assert step > 200
