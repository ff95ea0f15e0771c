"""The peak memory of training steps, of a process that does nothing else."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Peak:
    """Bytes.

    Attributes:
        allocated, reserved: of the CUDA allocator, while the timed steps ran (what lived before them included); None on
            a CPU. `reserved` is what the process took from the GPU.
        resident: the largest resident set of the process, libraries and all.
        resident_before: the resident set with the libraries loaded and nothing built yet, or None where unknown.
    """

    allocated: int | None
    reserved: int | None
    resident: int | None
    resident_before: int | None

    @property
    def headline(self) -> int | None:
        """What a table shows: reserved GPU memory, or the resident set on a CPU."""
        return self.resident if self.reserved is None else self.reserved


class PeakOfSteps:
    """Watches from its construction, before anything is built; `begin` and `end` go around the steps.

    The allocator's peak is reset at `begin`, when the optimizer's lazy state exists: a reset sets the peak to what
    lives then, so weights and moments stay in it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = _of_process("VmRSS")
        self.result = Peak(None, None, None, self._before)

    def begin(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def end(self) -> None:
        allocated = reserved = None
        if self._device.type == "cuda":
            allocated = torch.cuda.max_memory_allocated(self._device)
            reserved = torch.cuda.max_memory_reserved(self._device)
        self.result = Peak(allocated, reserved, _resident_peak(), self._before)


def _resident_peak() -> int | None:
    """The largest resident set of this process so far.

    Not ru_maxrss where it can be helped: on Linux it starts from the parent's, so that a large parent hides its child.
    """
    peak = _of_process("VmHWM")
    if peak is not None or sys.platform == "win32":
        return peak
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _of_process(field: str) -> int | None:
    """A field of /proc/self/status, in bytes; None where there is no such file."""
    status = Path("/proc/self/status")
    if not status.is_file():
        return None
    line = next((line for line in status.read_text().splitlines() if line.startswith(f"{field}:")), None)
    return None if line is None else int(line.split()[1]) * 1024
