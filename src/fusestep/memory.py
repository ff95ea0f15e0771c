"""The memory of this process, and whether an error means that there is no more of it. Imports nothing."""

from __future__ import annotations

import re
import sys
from pathlib import Path

GIB = 2**30

_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": GIB}


def ran_out(error: BaseException) -> bool:
    """Whether an error means that memory is exhausted, on a GPU or on the host."""
    if isinstance(error, MemoryError) or ran_out_on_gpu(error):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


def ran_out_on_gpu(error: BaseException) -> bool:
    """Whether an error means that a GPU's memory is exhausted."""
    # torch is looked up, not imported: an error of its kind cannot come from a process that never loaded it.
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(error, torch.OutOfMemoryError)


def asked(error: BaseException) -> int:
    """Bytes of the allocation that failed, as torch tells of it; 0 where nothing is told."""
    found = re.search(r"[Tt]ried to allocate ([0-9.]+) (bytes|[KMG]iB)", str(error))
    return 0 if found is None else int(float(found[1]) * _UNITS[found[2]])


def peak_resident() -> int | None:
    """The largest resident set of this process so far, in bytes; None where it cannot be told.

    Not ru_maxrss where it can be helped: on Linux it starts from the parent's, so that a large parent hides its child.
    """
    peak = of_process("VmHWM")
    if peak is not None or sys.platform == "win32":
        return peak
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def of_process(field: str) -> int | None:
    """A field of /proc/self/status, in bytes; None where there is no such file."""
    status = Path("/proc/self/status")
    if not status.is_file():
        return None
    line = next((line for line in status.read_text().splitlines() if line.startswith(f"{field}:")), None)
    return None if line is None else int(line.split()[1]) * 1024
