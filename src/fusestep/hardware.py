"""What this machine can do: devices, driver, compiler, and whether a Triton kernel really launches.

Nothing here runs at import. Every answer is looked up when first asked for and kept for the process; `reset()`
forgets them all, for tests. No answer is guessed from a device's name: capability and a real launch decide.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch

from fusestep.language import TRITON_IMPORT_ERROR, interpreted, tl, triton

#: Triton serves Ampere and newer; older chips lack bf16 arithmetic and the async copies that our kernels expect.
MINIMUM_CAPABILITY = (8, 0)


@dataclass(frozen=True)
class Support:
    """Whether something works here, and why (not), in words."""

    ok: bool
    reason: str


@dataclass(frozen=True)
class Device:
    """One CUDA device, as torch sees it. `memory` is in bytes."""

    index: int
    name: str
    capability: tuple[int, int]
    memory: int
    multiprocessors: int


@functools.cache
def cuda_support() -> Support:
    """Whether torch can use a CUDA device, without raising whatever the driver's state."""
    if torch.version.cuda is None and torch.version.hip is None:
        return Support(False, f"this torch ({torch.__version__}) is a CPU build")
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        # torch raises here for no driver, a driver older than its CUDA, and no device; its first line says which.
        return Support(False, str(error).strip().splitlines()[0].rstrip("."))
    count = torch.cuda.device_count()
    if count == 0:
        return Support(False, "no CUDA device is visible")
    return Support(True, f"{count} CUDA device{'s' if count > 1 else ''}")


@functools.cache
def devices() -> tuple[Device, ...]:
    """Every CUDA device that torch can use; empty without one."""
    if not cuda_support().ok:
        return ()
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append(
            Device(
                index,
                properties.name,
                (properties.major, properties.minor),
                properties.total_memory,
                properties.multi_processor_count,
            )
        )
    return tuple(found)


@functools.cache
def multiprocessors(index: int) -> int:
    """Streaming multiprocessors of a CUDA device; 4 where there is none (the interpreter), so that grids stay small."""
    return torch.cuda.get_device_properties(index).multi_processor_count if devices() else 4


@functools.cache
def driver_version() -> str | None:
    """The NVIDIA driver's version, such as '580.159', or None without one."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    try:
        answer = subprocess.run(
            [program, "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = answer.stdout.strip().splitlines()
    return lines[0].strip() if answer.returncode == 0 and lines else None


@functools.cache
def c_compiler() -> Support:
    """The C compiler that Triton builds its launcher stub with: $CC, else gcc, clang or cc."""
    named = os.environ.get("CC")
    if named:
        found = shutil.which(named.split()[0])
        if found is None:
            return Support(False, f"CC names {named}, which is not there; unset CC or point it at a C compiler")
        return Support(True, found)
    for name in ("gcc", "clang", "cc"):
        found = shutil.which(name)
        if found:
            return Support(True, found)
    return Support(False, "no C compiler on PATH; install one (Debian, Ubuntu: apt install gcc)")


@functools.cache
def python_headers() -> Support:
    """Python.h, which Triton's launcher stub includes."""
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if header.is_file():
        return Support(True, str(header))
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return Support(
        False, f"{header} is missing; install Python's headers (Debian, Ubuntu: apt install python{version}-dev)"
    )


@functools.cache
def triton_support(device_type: str, index: int | None) -> Support:
    """Whether our Triton kernels run for tensors on this device, proved by launching one.

    The launch compiles a kernel of four instructions once a process and device; Triton keeps it on disk.
    """
    if TRITON_IMPORT_ERROR is not None:
        return Support(False, f"Triton cannot be imported ({TRITON_IMPORT_ERROR})")
    if interpreted():
        return Support(True, "Triton's interpreter (TRITON_INTERPRET=1)")
    if device_type != "cuda":
        return Support(False, f"Triton kernels run on CUDA devices, these tensors are on {device_type}")
    if not cuda_support().ok:
        return Support(False, cuda_support().reason)
    device = devices()[torch.cuda.current_device() if index is None else index]
    if device.capability < MINIMUM_CAPABILITY:
        have, need = (".".join(map(str, c)) for c in (device.capability, MINIMUM_CAPABILITY))
        return Support(False, f"{device.name} has compute capability {have}, our kernels need {need} (Ampere)")
    failure = _launch_failure(device.index)
    if failure is None:
        return Support(True, f"Triton {triton.__version__} on {device.name}")
    # The stub is built at the first launch on a machine; these are the parts that it needs.
    missing = [part.reason for part in (c_compiler(), python_headers(), cache_folder()) if not part.ok]
    return Support(False, "Triton's first launch failed: " + ("; ".join(missing) if missing else failure))


@functools.cache
def cache_folder() -> Support:
    """The folder in which Triton keeps compiled kernels; it must be writable."""
    folder = Path(os.environ.get("TRITON_CACHE_DIR") or Path(os.environ.get("TRITON_HOME", Path.home())) / ".triton")
    existing = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    if os.access(existing, os.W_OK):
        return Support(True, str(folder))
    return Support(False, f"Triton's cache folder {folder} is not writable; set TRITON_CACHE_DIR to one that is")


def reset() -> None:
    """Forget every answer, so that the next question looks again."""
    for known in (
        cuda_support,
        devices,
        multiprocessors,
        driver_version,
        c_compiler,
        python_headers,
        triton_support,
        cache_folder,
    ):
        known.cache_clear()


@triton.jit
def _probe_kernel(out_ptr):
    tl.store(out_ptr, tl.load(out_ptr) + 1.0)


def _launch_failure(index: int) -> str | None:
    """Launch the probe on a device; None when it worked, else the first line of what went wrong."""
    try:
        with torch.cuda.device(index):
            value = torch.ones(1, device=f"cuda:{index}")
            _probe_kernel[(1,)](value)
            right = value.item() == 2.0
    except Exception as error:  # whatever Triton, its compiler or the driver raise is the answer here
        text = str(error).strip() or type(error).__name__
        return f"{type(error).__name__}: {text.splitlines()[0]}"
    return None if right else "the probe kernel ran and wrote a wrong value"
