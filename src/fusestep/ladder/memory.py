"""The peak memory of training steps, of a process that does nothing else."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fusestep.memory import of_process, peak_resident


@dataclass(frozen=True)
class Peak:
    """Bytes.

    Attributes:
        allocated: of the CUDA allocator, while the timed steps ran (what lived before them included); None on a CPU.
        reserved: the most that the process ever took from the GPU, first step, compilation and capture included; None
            on a CPU.
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
    lives then, so weights and moments stay in it. What was reserved before counts all the same: a graph's capture, and
    the steps before it, have to fit too.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = of_process("VmRSS")
        self._reserved_before = 0
        self.result = Peak(None, None, None, self._before)

    def begin(self) -> None:
        if self._device.type == "cuda":
            self._reserved_before = torch.cuda.max_memory_reserved(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)

    def end(self) -> None:
        allocated = reserved = None
        if self._device.type == "cuda":
            allocated = torch.cuda.max_memory_allocated(self._device)
            reserved = max(self._reserved_before, torch.cuda.max_memory_reserved(self._device))
        self.result = Peak(allocated, reserved, peak_resident(), self._before)
