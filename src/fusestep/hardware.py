"""What this machine can do: devices, driver, compiler, and whether a Triton kernel really launches.

Nothing here runs at import. Every answer is looked up when first asked for and kept for the process; `reset()`
forgets them all, for tests. No answer is guessed from a device's name: capability and a real launch decide.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from fusestep.errors import UserError
from fusestep.language import TRITON_IMPORT_ERROR, interpreted, tl, triton

#: Triton serves Ampere and newer; older chips lack bf16 arithmetic and the async copies that our kernels expect.
MINIMUM_CAPABILITY = (8, 0)

#: Where Linux says which NVIDIA driver is loaded.
KERNEL_MODULE = Path("/proc/driver/nvidia/version")


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


def dotted(version: tuple[int, ...]) -> str:
    """(8, 6) as '8.6'."""
    return ".".join(map(str, version))


def first_line(error: BaseException) -> str:
    """What an error says, in one line; its kind if it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


# Devices and driver


@functools.cache
def cuda_support() -> Support:
    """Whether torch can use a CUDA device, without raising whatever the driver's state."""
    if torch.version.cuda is None and torch.version.hip is None:
        reason = f"this torch ({torch.__version__}) is a CPU build"
        if driver_version() is not None:
            reason += ", though the machine has an NVIDIA driver: install the CUDA build from https://pytorch.org"
        return Support(False, reason)
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError, torch.cuda.DeferredCudaCallError) as error:
        # torch raises here for no driver, a driver older than its CUDA, and no device; its first line says which.
        reason = first_line(error).rstrip(".")
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if visible is not None:
            reason += f" (CUDA_VISIBLE_DEVICES is {visible!r})"
        return Support(False, reason)
    count = torch.cuda.device_count()
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


def device_named(name: str) -> torch.device:
    """The device that a person means by auto, cpu, cuda or cuda:N; auto is the current CUDA device, or else the CPU.

    Raises: UserError for any other word, and for a CUDA device that is not there.
    """
    if name == "cpu" or (name == "auto" and not cuda_support().ok):
        return torch.device("cpu")
    if re.fullmatch(r"auto|cuda(:\d{1,4})?", name) is None:
        raise UserError(f"--device is {name!r}; choose auto, cpu, cuda or cuda:N.")
    support = cuda_support()
    if not support.ok:
        raise UserError(f"--device is {name}, but {support.reason}; use --device cpu, or auto.")
    number = name.partition(":")[2]
    index = int(number) if number else torch.cuda.current_device()
    if index >= len(devices()):
        raise UserError(
            f"--device is {name}, but there is {support.reason}; choose one of cuda:0 to cuda:{len(devices()) - 1}."
        )
    return torch.device("cuda", index)


@functools.cache
def multiprocessors(index: int) -> int:
    """Streaming multiprocessors of a CUDA device; 4 where there is none (the interpreter), so that grids stay small."""
    return torch.cuda.get_device_properties(index).multi_processor_count if devices() else 4


@functools.cache
def driver_version() -> str | None:
    """The NVIDIA driver's version, such as '580.159', or None without one."""
    if KERNEL_MODULE.is_file():
        found = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", KERNEL_MODULE.read_text(errors="replace"))
        if found:
            return found[1]
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = answer.stdout.strip().splitlines()
    return lines[0].strip() if answer.returncode == 0 and lines else None


@functools.cache
def driver_cuda_version() -> str | None:
    """The newest CUDA that the driver serves, such as '13.0', or None without a driver. Touches no device."""
    try:
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        version = ctypes.c_int()
        if driver.cuDriverGetVersion(ctypes.byref(version)) != 0:
            return None
    except (OSError, AttributeError):
        return None
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


@functools.cache
def host_memory() -> int | None:
    """Bytes of memory that this process may have: the machine's, or less where a container limits it."""
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else "max"
    return min(total, int(text)) if text.isdigit() else total


# What Triton's first launch needs: it builds a small C stub against Python's headers, and keeps it on disk


@functools.cache
def c_compiler() -> Support:
    """The C compiler that Triton builds its launcher stub with: $CC, else gcc or clang."""
    named = os.environ.get("CC")
    if named is not None:
        # Triton runs the whole value as one program, so that CC="ccache gcc" fails there too.
        found = shutil.which(named)
        if found is None:
            return Support(False, f"CC is {named!r}, which is no program; unset CC or set it to a C compiler")
        return Support(True, found)
    for name in ("gcc", "clang"):
        found = shutil.which(name)
        if found:
            return Support(True, found)
    other = shutil.which("cc")
    if other:
        return Support(False, f"Triton looks for gcc and clang and there is only {other}; set CC={other}")
    return Support(
        False, "there is no C compiler on PATH; install one (Debian, Ubuntu: apt install gcc; Fedora: dnf install gcc)"
    )


@functools.cache
def python_headers() -> Support:
    """Python.h, which Triton's launcher stub includes."""
    # Debian's own scheme points into /usr/local, where its headers are not; Triton corrects it in the same way.
    scheme = sysconfig.get_default_scheme()
    folder = sysconfig.get_path("include", "posix_prefix" if scheme == "posix_local" else scheme)
    header = Path(folder) / "Python.h"
    if header.is_file():
        return Support(True, str(header))
    version = dotted(sys.version_info[:2])
    return Support(
        False,
        f"{header} is missing; install Python's headers "
        f"(Debian, Ubuntu: apt install python{version}-dev; Fedora: dnf install python3-devel)",
    )


@functools.cache
def cache_folder() -> Support:
    """The folder in which Triton keeps compiled kernels; a small file must fit into it."""
    home = os.environ.get("TRITON_HOME") or str(Path("~").expanduser())
    folder = Path(os.environ.get("TRITON_CACHE_DIR") or Path(home, ".triton", "cache")).absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(bytes(2**16))
    except OSError as error:
        return Support(
            False,
            f"Triton's cache folder {folder} cannot be written ({error.strerror}); "
            "set TRITON_CACHE_DIR to a folder that can",
        )
    return Support(True, str(folder))


# Kernels


def triton_support(device_type: str, index: int | None) -> Support:
    """Whether our Triton kernels run for tensors on this device, proved by launching one.

    The launch compiles a kernel of four instructions once a process and device; Triton keeps it on disk.
    """
    if device_type == "cuda" and index is None and cuda_support().ok:
        index = torch.cuda.current_device()
    return _triton_support(device_type, index)


@functools.cache
def _triton_support(device_type: str, index: int | None) -> Support:
    if TRITON_IMPORT_ERROR is not None:
        return Support(False, _import_failure(TRITON_IMPORT_ERROR))
    if interpreted():
        return Support(True, "Triton's interpreter (TRITON_INTERPRET=1)")
    if device_type != "cuda":
        return Support(False, f"Triton kernels run on CUDA devices, these tensors are on {device_type}")
    if index is None or not cuda_support().ok:
        return Support(False, cuda_support().reason)
    device = devices()[index]
    if device.capability < MINIMUM_CAPABILITY:
        have, need = dotted(device.capability), dotted(MINIMUM_CAPABILITY)
        return Support(False, f"{device.name} has compute capability {have}, our kernels need {need} (Ampere)")
    failure = _launch_failure(index)
    if failure is None:
        return Support(True, f"Triton {triton.__version__} on {device.name}")
    missing = "; ".join(part.reason for part in (c_compiler(), python_headers(), cache_folder()) if not part.ok)
    return Support(False, f"Triton's first launch failed: {f'{missing} ({failure})' if missing else failure}")


def _import_failure(error: str) -> str:
    if "No module named 'triton'" not in error:
        return f"Triton cannot be imported ({error})"
    if sys.platform != "linux":
        return f"Triton exists for Linux only, this is {sys.platform}"
    return "Triton is not installed; run pip install triton"


@triton.jit
def _probe_kernel(out_ptr):
    tl.store(out_ptr, tl.load(out_ptr) + 1.0)


@contextmanager
def probing(index: int) -> Iterator[None]:
    """Run a probe, which reads its result, on a CUDA device.

    Raises: UserError while a CUDA graph is captured, which reading would spoil.
    """
    if torch.cuda.is_current_stream_capturing():
        raise UserError(
            f"a CUDA graph is being captured before any op of fusestep has run on cuda:{index}; "
            "run one step before the capture."
        )
    # Reading waits for the device, which a user may have told torch to forbid.
    forbids_waiting = torch.cuda.get_sync_debug_mode()
    if forbids_waiting:
        torch.cuda.set_sync_debug_mode(0)
    try:
        with torch.cuda.device(index):
            yield
    finally:
        if forbids_waiting:
            torch.cuda.set_sync_debug_mode(forbids_waiting)


def _launch_failure(index: int) -> str | None:
    """Launch the probe on a device; None when it worked, else the first line of what went wrong."""
    try:
        with probing(index):
            value = torch.ones(1, device=f"cuda:{index}", dtype=torch.float32)
            _probe_kernel[(1,)](value, enable_fp_fusion=True)  # as every launch of ours
            right = value.item() == 2.0
    except UserError:
        raise
    except Exception as error:  # whatever Triton, its compiler or the driver raise is the answer here
        return f"{type(error).__name__}: {first_line(error)}"
    return None if right else "the probe kernel ran and wrote a wrong value"


def reset() -> None:
    """Forget every answer, so that the next question looks again."""
    for known in (
        cuda_support,
        devices,
        multiprocessors,
        driver_version,
        driver_cuda_version,
        host_memory,
        c_compiler,
        python_headers,
        cache_folder,
        _triton_support,
    ):
        known.cache_clear()
