"""What a measurement ran on: hardware, driver, versions, the commit, the command."""

from __future__ import annotations

import datetime
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path

import torch

import fusestep
from fusestep import examine, hardware

#: Environment variables that change how fast it runs.
_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "CUDA_LAUNCH_BLOCKING",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
)


def describe(device: torch.device) -> dict[str, object]:
    """The environment of a run on `device`, as plain values for a report."""
    here = examine.environment()
    gpu = hardware.devices()[device.index or 0] if device.type == "cuda" else None
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": _command(),
        "device": str(device),
        "gpu": None if gpu is None else gpu.name,
        "capability": None if gpu is None else list(gpu.capability),
        "gpu_memory": None if gpu is None else gpu.memory,
        "driver": here.driver,
        "cuda": here.torch_cuda,
        "cpu": _cpu_name(),
        "cpu_count": here.cores,
        "threads": torch.get_num_threads(),
        "system": here.platform,
        "python": here.python,
        "torch": here.torch,
        "triton": here.triton,
        "fusestep": here.fusestep,
        "commit": _commit(),
        "variables": {name: _unplaced(value) for name, value in (here.variables | _set_variables()).items()},
    }


def _set_variables() -> dict[str, str]:
    return {name: os.environ[name] for name in _VARIABLES if name in os.environ}


def _unplaced(value: str) -> str:
    """A program's name where a variable gives its path: where it lies on this machine is nobody's business."""
    return Path(value).name if Path(value).is_absolute() else value


def _command() -> str:
    program = Path(sys.argv[0])
    name = ["python", "-m", program.parent.name] if program.name == "__main__.py" else [program.name]
    return shlex.join([*name, *sys.argv[1:]])


def _cpu_name() -> str:
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.is_file() else []
    named = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return named or platform.processor() or platform.machine()


def _commit() -> str | None:
    """The commit that this package is checked out at, with "+changes" when its files differ; None when installed.

    FUSESTEP_COMMIT names it for a copy without its history. The package may lie inside somebody else's checkout, so
    git must know this very file.
    """
    if named := os.environ.get("FUSESTEP_COMMIT"):
        return named
    here = Path(__file__).resolve()

    def git(*arguments: str) -> str | None:
        try:
            answer = subprocess.run(
                ["git", *arguments], cwd=here.parent, capture_output=True, text=True, timeout=20, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return answer.stdout.strip() if answer.returncode == 0 else None

    if git("ls-files", "--error-unmatch", here.name) is None:
        return None
    commit = git("rev-parse", "HEAD")
    changes = git("status", "--porcelain", "--untracked-files=no", "--", str(Path(fusestep.__file__).parent))
    return commit and commit + ("+changes" if changes else "")
