"""What the first steps cost: configuration A in a fresh process, until its step is captured, with and without caches.

"Empty" has no compiled kernel anywhere (Triton's, Inductor's and the driver's caches are new folders), "warm" is the
same process once more. `capture_seconds` is of all steps up to the first replay of the graph, kernels compiled and
steps of warm-up included; `process_seconds` has Python's start, the imports and the model's initial weights too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import timing
from benchmarks.steps import MODELS, SETUPS
from benchmarks.training import Prepared, Work

NAMES = ("fusestep bf16", "fusestep fp8 delayed")
IS_TINY = False
TINY = {"IS_TINY": True} | {"NAMES": NAMES[:1]}
#: Where compiled code is kept, and the variables that say so.
CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH")

COLUMNS = ("configuration", "cache", "compile + capture s", "first step s", "process s")
IDENTITY = ("configuration", "cache")
#: Seconds of a host, which differ from one machine to the next: compared with nothing.
RATIOS: dict[str, str] = {}


def cells(row: dict[str, Any]) -> list[str]:
    """A row as the terminal shows it."""
    times = [row["capture_seconds"], row["first_step_seconds"], row["process_seconds"]]
    return [row["configuration"], row["cache"], *(f"{one:.1f}" for one in times)]


def run(copy: float) -> Iterator[dict[str, Any]]:  # noqa: ARG001 (no bytes here)
    """Each configuration twice, with an empty cache and with what it left."""
    for name in NAMES:
        with tempfile.TemporaryDirectory() as folder:
            for cache in ("empty", "warm"):
                yield {"configuration": name, "cache": cache, **in_a_process(name, Path(folder))}


def in_a_process(name: str, caches: Path) -> dict[str, Any]:
    """The first steps of a configuration in a process whose caches are in that folder."""
    command = [sys.executable, "-m", "benchmarks.startup", name, "tiny" if IS_TINY else "whole"]
    environment = os.environ | {variable: str(caches / variable.lower()) for variable in CACHES}
    begun = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=300)
    if done.returncode != 0:
        return {"failed": done.stderr[-2000:]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found | {"process_seconds": time.perf_counter() - begun}


def first_steps(name: str, size: str) -> dict[str, Any]:
    """In that process: build the step and run it until it is captured."""
    models, setups = MODELS, SETUPS
    if size == "tiny":
        from benchmarks import steps

        models, setups = steps.TINY["MODELS"], steps.TINY["SETUPS"]  # type: ignore[assignment]
    model = models["a"]
    setup = next(one for one in setups if one.name == name)
    prepared = Prepared(Work(setup, model.config, model.batch, model.steps, str(timing.DEVICE)))
    return {"first_step_seconds": prepared.seconds[0], "capture_seconds": sum(prepared.seconds)}


if __name__ == "__main__":
    print(json.dumps(first_steps(*sys.argv[1:])))
