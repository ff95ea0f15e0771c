"""Which kernels take the time of a step, from torch.profiler."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

#: Steps that are profiled, and kernels that are kept of them.
STEPS, KEPT = 3, 12

_LONGEST_NAME = 240


@dataclass(frozen=True)
class Kernel:
    """One kernel, or on a CPU one operator of torch's, by what it took of a step.

    Attributes: name: as the profiler has it; calls: a step; ms: a step, of its own; share: of what all kernels took.
    """

    name: str
    calls: float
    ms: float
    share: float

    @property
    def short(self) -> str:
        """The name without its template arguments and parameters, for a cell."""
        return shortened(self.name)


def measure(
    step: Callable[[], object], device: torch.device, *, steps: int = STEPS, kept: int | None = KEPT
) -> tuple[Kernel, ...]:
    """The kernels of a step that runs on `device`, the `kept` longest first; copies and fills are kernels too.

    Raises: RuntimeError where the machine does not let itself be profiled.
    """
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU], acc_events=True) as profiler:
        for _ in range(steps):
            step()
        if on_gpu:
            torch.cuda.synchronize(device)
    rows = []
    for event in profiler.key_averages():
        # A range that somebody named holds kernels that are counted by themselves.
        if getattr(event, "is_user_annotation", False) or (on_gpu and event.device_type.name != "CUDA"):
            continue
        microseconds = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        if microseconds > 0:
            rows.append((event.key, event.count, microseconds))
    total = sum(microseconds for _, _, microseconds in rows)
    if not rows:
        raise RuntimeError(f"the profiler saw no kernel on {device}")
    rows.sort(key=lambda row: (-row[2], row[0]))
    return tuple(
        Kernel(name[:_LONGEST_NAME], count / steps, microseconds / steps / 1e3, microseconds / total)
        for name, count, microseconds in rows[:kept]
    )


def shortened(name: str, longest: int = 44) -> str:
    """A kernel's name as a person says it: "void ns::f<int, 4>(int*)" is "f"."""
    bare = re.sub(r"\(anonymous namespace\)::", "", name).removeprefix("void ")
    # What stands before the first bracket, without its namespaces.
    bare = re.split(r"[<(]", bare, maxsplit=1)[0].rpartition("::")[2] or name
    return bare if len(bare) <= longest else bare[: longest - 1] + "…"
