"""Which number formats a device computes in: by capability and by trying, never by its name."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from fusestep import hardware, precision
from fusestep.hardware import Device, Support


def gpu(capability: tuple[int, int] = (9, 0), name: str = "Test GPU") -> Device:
    return Device(0, name, capability, 80 << 30, 132)


@pytest.fixture(autouse=True)
def tried_anew() -> None:
    precision.fp8_support.cache_clear()


@pytest.mark.parametrize(
    ("capability", "cuda", "ok", "words"),
    [
        ((7, 5), "13.0", False, "compute capability 7.5; FP8 tensor cores came with 8.9"),
        ((8, 0), "13.0", False, "8.0"),
        ((8, 6), "13.0", False, "8.6"),
        ((8, 9), "12.6", True, "8.9"),
        ((9, 0), "12.6", True, "9.0"),
        ((10, 0), "12.6", False, "needs a torch built for CUDA 12.8 or newer, this one is built for 12.6"),
        ((10, 0), "12.8", True, "10.0"),
        ((12, 0), "12.6", False, "12.8"),
        ((12, 0), "13.0", True, "12.0"),
        ((9, 4), None, False, "ROCm"),
    ],
)
def test_fp8_follows_capability_and_cuda_not_the_name(
    capability: tuple[int, int], cuda: str | None, ok: bool, words: str
) -> None:
    support = precision.fp8_by_capability(gpu(capability, name="RTX 6000 Ada or not"), cuda)
    assert support.ok is ok
    assert words in support.reason


def test_fp8_needs_a_product_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    # The probe itself runs here, on the CPU, whose products torch emulates.
    ones = torch.ones
    monkeypatch.setattr(hardware, "devices", lambda: (gpu(),))
    monkeypatch.setattr(hardware, "probing", lambda index: nullcontext())
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch, "ones", lambda *shape, dtype, device: ones(*shape, dtype=dtype))
    assert precision.fp8_support(0) == Support(True, "FP8 tensor cores (compute capability 9.0)")

    def refuse(*args: object, **options: object) -> None:
        raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED\nat line 3")

    for product, words in (
        (refuse, "but a product failed (RuntimeError: CUBLAS_STATUS_NOT_SUPPORTED)"),
        (lambda *args, **options: torch.zeros(16, 16), "but a product came out wrong"),
    ):
        precision.fp8_support.cache_clear()
        monkeypatch.setattr(torch, "_scaled_mm", product)
        assert words in precision.fp8_support(0).reason
    precision.fp8_support.cache_clear()
    monkeypatch.delattr(torch, "_scaled_mm")
    assert "AttributeError" in precision.fp8_support(0).reason


@pytest.mark.parametrize(("capability", "ok"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_bf16_follows_capability(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], ok: bool) -> None:
    monkeypatch.setattr(hardware, "devices", lambda: (gpu(capability),))
    assert precision.bf16_support(0).ok is ok


@pytest.mark.gpu
def test_what_is_told_holds_on_this_gpu() -> None:
    for device in hardware.devices():
        assert precision.bf16_support(device.index).ok is torch.cuda.is_bf16_supported(including_emulation=False)
        assert precision.fp8_support(device.index).ok is (device.capability >= (8, 9))
