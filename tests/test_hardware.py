"""What this machine can do, told in words: on mocked machines, and on this one."""

from __future__ import annotations

import errno
import os
import stat
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fusestep import hardware, language
from fusestep.errors import UserError
from fusestep.hardware import Device, Support

needs_compiled_triton = pytest.mark.skipif(language.TRITON_IMPORT_ERROR is not None, reason="Triton cannot be imported")


def gpu(capability: tuple[int, int] = (9, 0), index: int = 0, name: str = "Test GPU") -> Device:
    return Device(index, name, capability, 80 << 30, 132)


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with one Hopper GPU whose probe launch works."""
    monkeypatch.setattr(hardware, "cuda_support", lambda: Support(True, "1 CUDA device"))
    monkeypatch.setattr(hardware, "devices", lambda: (gpu(),))
    monkeypatch.setattr(hardware, "_launch_failure", lambda index: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


def program(path: Path, script: str = "#!/bin/sh\n") -> Path:
    path.write_text(script)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


# Devices by name


def test_a_device_name_means_the_same_everywhere(monkeypatch: pytest.MonkeyPatch, one_gpu: None) -> None:
    monkeypatch.setattr(hardware, "devices", lambda: (gpu(), gpu(index=1)))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert hardware.device_named("cpu") == torch.device("cpu")
    assert hardware.device_named("auto") == hardware.device_named("cuda") == torch.device("cuda", 1)
    assert hardware.device_named("cuda:0") == torch.device("cuda", 0)


@pytest.mark.parametrize("name", ["tpu", "cuda:", "cuda:x", "cuda:-1", "cpu:0", "", "cuda:0 "])
def test_a_word_that_names_no_device_is_refused(one_gpu: None, name: str) -> None:
    with pytest.raises(UserError, match=f"--device is '{name}'; choose auto, cpu, cuda or cuda:N"):
        hardware.device_named(name)


def test_a_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch, one_gpu: None) -> None:
    with pytest.raises(UserError, match="--device is cuda:3, but there is 1 CUDA device; choose one of cuda:0 to"):
        hardware.device_named("cuda:3")
    monkeypatch.setattr(hardware, "cuda_support", lambda: Support(False, "no CUDA device is visible"))
    with pytest.raises(UserError, match="--device is cuda, but no CUDA device is visible; use --device cpu"):
        hardware.device_named("cuda")
    assert hardware.device_named("auto") == torch.device("cpu")


# CUDA, mocked at torch's edge


def cuda_build(monkeypatch: pytest.MonkeyPatch, error: Exception | None = None) -> None:
    def init() -> None:
        if error is not None:
            raise error

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", init)


def test_cpu_build_of_torch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(hardware, "driver_version", lambda: None)
    assert hardware.cuda_support() == Support(False, f"this torch ({torch.__version__}) is a CPU build")


def test_cpu_build_beside_a_driver_names_the_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(hardware, "driver_version", lambda: "580.159")
    support = hardware.cuda_support()
    assert not support.ok
    assert "install the CUDA build" in support.reason


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RuntimeError("Found no NVIDIA driver on your system. Please check.\nmore"), "Found no NVIDIA driver"),
        (RuntimeError("The NVIDIA driver on your system is too old (found version 11040). Update."), "too old"),
        (AssertionError("Torch not compiled with CUDA enabled"), "not compiled"),
        (torch.cuda.DeferredCudaCallError("CUDA call failed lazily at initialization"), "failed lazily"),
    ],
)
def test_driver_troubles_are_sentences(monkeypatch: pytest.MonkeyPatch, error: Exception, words: str) -> None:
    cuda_build(monkeypatch, error)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    support = hardware.cuda_support()
    assert not support.ok
    assert words in support.reason
    assert "\n" not in support.reason
    assert not support.reason.endswith(".")
    assert hardware.devices() == ()
    assert hardware.multiprocessors(0) == 4


def test_empty_visible_devices_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda_build(monkeypatch, RuntimeError("No CUDA GPUs are available"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert hardware.cuda_support() == Support(False, "No CUDA GPUs are available (CUDA_VISIBLE_DEVICES is '')")


def test_devices_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda_build(monkeypatch)
    properties = SimpleNamespace(name="Chip", major=8, minor=6, total_memory=24 << 30, multi_processor_count=84)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    assert hardware.cuda_support() == Support(True, "2 CUDA devices")
    assert [(d.index, d.capability) for d in hardware.devices()] == [(0, (8, 6)), (1, (8, 6))]
    assert hardware.multiprocessors(1) == 84


# The driver


@pytest.mark.parametrize(
    "line",
    [
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.03  Wed Nov 5",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.03  Release Build",
    ],
)
def test_driver_version_from_the_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, line: str) -> None:
    file = tmp_path / "version"
    file.write_text(f"{line}\nGCC version: gcc version 12.3.0\n")
    monkeypatch.setattr(hardware, "KERNEL_MODULE", file)
    assert hardware.driver_version() == "580.159.03"


@pytest.mark.parametrize(
    ("script", "answer"),
    [
        ("#!/bin/sh\necho 575.51\necho 575.51\n", "575.51"),
        ("#!/bin/sh\necho 'failed because it could not communicate with the driver'; exit 9\n", None),
        ("#!/no/such/shell\n", None),
    ],
)
def test_driver_version_from_nvidia_smi(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, answer: str | None
) -> None:
    program(tmp_path / "nvidia-smi", script)
    monkeypatch.setattr(hardware, "KERNEL_MODULE", tmp_path / "absent")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.defpath}")
    assert hardware.driver_version() == answer


def test_driver_cuda_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def get_version(pointer: object) -> int:
        pointer._obj.value = 12080  # type: ignore[attr-defined]
        return 0

    monkeypatch.setattr(hardware.ctypes, "CDLL", lambda name: SimpleNamespace(cuDriverGetVersion=get_version))
    assert hardware.driver_cuda_version() == "12.8"


def test_no_driver_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(hardware.ctypes, "CDLL", absent)
    assert hardware.driver_cuda_version() is None


def test_host_memory_is_what_the_machine_has() -> None:
    memory = hardware.host_memory()
    assert memory is not None
    assert 2**28 < memory < 2**50


# What Triton's first launch needs


def test_cc_naming_a_missing_file_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CC", str(tmp_path / "no-such-gcc"))
    support = hardware.c_compiler()
    assert not support.ok
    assert "no-such-gcc" in support.reason
    assert "unset CC" in support.reason


@pytest.mark.parametrize("value", ["", "ccache gcc"])
def test_cc_that_triton_cannot_run_is_told(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("CC", value)
    assert not hardware.c_compiler().ok


def test_no_compiler_on_path_names_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    support = hardware.c_compiler()
    assert not support.ok
    assert "apt install gcc" in support.reason


def test_a_compiler_that_triton_does_not_look_for_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = program(tmp_path / "cc")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    support = hardware.c_compiler()
    assert not support.ok
    assert f"set CC={found}" in support.reason
    hardware.reset()
    monkeypatch.setenv("CC", str(found))
    assert hardware.c_compiler() == Support(True, str(found))


def test_gcc_goes_before_clang(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program(tmp_path / "clang")
    gcc = program(tmp_path / "gcc")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert hardware.c_compiler() == Support(True, str(gcc))


def test_missing_headers_name_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name, scheme: str(tmp_path))
    support = hardware.python_headers()
    assert not support.ok
    assert "-dev" in support.reason
    hardware.reset()
    (tmp_path / "Python.h").touch()
    assert hardware.python_headers().ok


def test_headers_are_looked_for_where_triton_does_on_debian(monkeypatch: pytest.MonkeyPatch) -> None:
    schemes = []
    monkeypatch.setattr(sysconfig, "get_default_scheme", lambda: "posix_local")
    monkeypatch.setattr(sysconfig, "get_path", lambda name, scheme: schemes.append(scheme) or "/nowhere")
    hardware.python_headers()
    assert schemes == ["posix_prefix"]


@pytest.mark.parametrize("code", [errno.EROFS, errno.ENOSPC, errno.EACCES])
def test_cache_that_cannot_be_written_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int) -> None:
    def refuse(**options: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.setattr(hardware.tempfile, "TemporaryFile", refuse)
    support = hardware.cache_folder()
    assert not support.ok
    assert os.strerror(code) in support.reason
    assert "set TRITON_CACHE_DIR" in support.reason


def test_cache_below_a_file_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "kernels"))
    support = hardware.cache_folder()
    assert not support.ok
    assert "(Not a directory)" in support.reason


def test_cache_folder_follows_triton_and_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setenv("TRITON_HOME", str(tmp_path))
    assert hardware.cache_folder() == Support(True, str(tmp_path / ".triton" / "cache"))
    assert list(tmp_path.iterdir()) == []


# Kernels


def test_no_triton_is_told_with_the_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "TRITON_IMPORT_ERROR", "ModuleNotFoundError: No module named 'triton'")
    monkeypatch.setattr(hardware.sys, "platform", "linux")
    assert hardware.triton_support("cuda", 0) == Support(False, "Triton is not installed; run pip install triton")
    hardware.reset()
    monkeypatch.setattr(hardware.sys, "platform", "darwin")
    assert "Linux only" in hardware.triton_support("cuda", 0).reason


def test_broken_triton_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "TRITON_IMPORT_ERROR", "ImportError: libtriton.so: undefined symbol")
    support = hardware.triton_support("cuda", 0)
    assert support == Support(False, "Triton cannot be imported (ImportError: libtriton.so: undefined symbol)")


@needs_compiled_triton
@pytest.mark.parametrize("device_type", ["cpu", "mps", "xpu"])
def test_tensors_elsewhere_get_the_reference(one_gpu: None, device_type: str) -> None:
    support = hardware.triton_support(device_type, 0)
    assert not support.ok
    assert device_type in support.reason


@needs_compiled_triton
@pytest.mark.parametrize(("capability", "ok"), [((7, 0), False), ((7, 5), False), ((8, 0), True), ((12, 0), True)])
def test_capability_decides(
    monkeypatch: pytest.MonkeyPatch, one_gpu: None, capability: tuple[int, int], ok: bool
) -> None:
    monkeypatch.setattr(hardware, "devices", lambda: (gpu(capability, name="Some H100 by name"),))
    support = hardware.triton_support("cuda", 0)
    assert support.ok is ok
    if not ok:
        assert f"compute capability {hardware.dotted(capability)}, our kernels need 8.0" in support.reason


@needs_compiled_triton
def test_no_gpu_gives_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "cuda_support", lambda: Support(False, "no CUDA device is visible"))
    assert hardware.triton_support("cuda", None) == Support(False, "no CUDA device is visible")


@needs_compiled_triton
def test_a_failed_launch_names_what_is_missing_and_what_was_said(
    monkeypatch: pytest.MonkeyPatch, one_gpu: None
) -> None:
    monkeypatch.setattr(hardware, "_launch_failure", lambda index: "RuntimeError: Failed to find C compiler.")
    monkeypatch.setattr(hardware, "c_compiler", lambda: Support(False, "there is no C compiler on PATH"))
    monkeypatch.setattr(hardware, "python_headers", lambda: Support(False, "Python.h is missing"))
    monkeypatch.setattr(hardware, "cache_folder", lambda: Support(True, "/cache"))
    assert hardware.triton_support("cuda", 0).reason == (
        "Triton's first launch failed: there is no C compiler on PATH; Python.h is missing "
        "(RuntimeError: Failed to find C compiler.)"
    )


@needs_compiled_triton
def test_a_failed_launch_with_nothing_missing_blames_nothing_else(
    monkeypatch: pytest.MonkeyPatch, one_gpu: None
) -> None:
    monkeypatch.setattr(hardware, "_launch_failure", lambda index: "RuntimeError: no kernel image")
    for part in ("c_compiler", "python_headers", "cache_folder"):
        monkeypatch.setattr(hardware, part, lambda: Support(True, "there"))
    support = hardware.triton_support("cuda", 0)
    assert support == Support(False, "Triton's first launch failed: RuntimeError: no kernel image")


@needs_compiled_triton
def test_the_current_device_is_asked_for_each_time(monkeypatch: pytest.MonkeyPatch, one_gpu: None) -> None:
    monkeypatch.setattr(hardware, "devices", lambda: (gpu((7, 5)), gpu((9, 0), index=1)))
    assert not hardware.triton_support("cuda", None).ok
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert hardware.triton_support("cuda", None).ok


def test_the_probe_refuses_to_spoil_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(UserError, match="run one step before the capture"):
        hardware._launch_failure(0)


def test_whatever_the_probe_raises_is_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(index: int) -> None:
        raise OSError("libcuda.so.1: bad magic\nsecond line")

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", broken)
    assert hardware._launch_failure(0) == "OSError: libcuda.so.1: bad magic"


@pytest.mark.gpu
def test_the_probe_launches_on_every_gpu() -> None:
    for device in hardware.devices():
        assert hardware.triton_support("cuda", device.index).ok is (device.capability >= (8, 0))
