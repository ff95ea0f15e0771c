"""Which number formats a CUDA device computes in itself: bf16 and FP8, told in words."""

from __future__ import annotations

import functools
from typing import Literal

import torch

from fusestep import hardware
from fusestep.hardware import Device, Support, dotted, first_line

#: bf16 arithmetic came with Ampere.
BF16_CAPABILITY = (8, 0)

#: What shares a scale in an FP8 matrix: all of it, 1 × 128 or 128 × 128 elements, or 32 with a scale in E8M0 (MXFP8).
Scaling = Literal["tensor", "block", "mx"]

#: FP8 tensor cores came with Ada (8.9) and Hopper (9.0); Blackwell's need a torch built for CUDA 12.8.
FP8_CAPABILITY = (8, 9)
BLACKWELL_CAPABILITY = (10, 0)
BLACKWELL_CUDA = (12, 8)

#: cuBLASLt scales fp32 blocks on Hopper alone, and has done so since CUDA 12.9.
BLOCK_CAPABILITY = (9, 0)
BLOCK_CUDA = (12, 9)

#: MXFP8 came with the data-centre Blackwells (10.x, 11.x); cuBLASLt does not serve it on 12.x.
MX_CAPABILITY = (10, 0)
MX_CAPABILITY_END = (12, 0)


def bf16_support(index: int) -> Support:
    """Whether a CUDA device computes in bf16 itself."""
    return _at_least(hardware.devices()[index], BF16_CAPABILITY, "bf16 arithmetic")


@functools.cache
def fp8_support(index: int, scaling: Scaling = "tensor") -> Support:
    """Whether a CUDA device multiplies FP8 matrices: by capability and torch's CUDA, then by doing it."""
    told = fp8_by_capability(hardware.devices()[index], torch.version.cuda, scaling)
    if not told.ok:
        return told
    if scaling == "mx":
        return Support(False, f"{told.reason}, but products of MXFP8 are emulated on every device so far")
    with hardware.probing(index):
        try:
            # Ones on both sides: every element of the product is the inner dimension.
            ones = torch.ones(16, 32, dtype=torch.float32, device=f"cuda:{index}").to(torch.float8_e4m3fn)
            scale = torch.ones((), dtype=torch.float32, device=f"cuda:{index}")
            product = torch._scaled_mm(ones, ones.t(), scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16)
            right = bool((product == 32).all())
        except (RuntimeError, AttributeError, NotImplementedError) as error:
            return Support(False, f"{told.reason}, but a product failed ({type(error).__name__}: {first_line(error)})")
    return told if right else Support(False, f"{told.reason}, but a product came out wrong")


def fp8_by_capability(device: Device, cuda: str | None, scaling: Scaling = "tensor") -> Support:
    """What the table says of FP8 on a device, for a torch that was built for this CUDA (None: for ROCm)."""
    if cuda is None:
        return Support(False, "FP8 is served on NVIDIA devices only, this torch is built for ROCm")
    have = f"compute capability {dotted(device.capability)}"
    told = _at_least(device, FP8_CAPABILITY, "FP8 tensor cores")
    needed_cuda = BLACKWELL_CUDA if device.capability >= BLACKWELL_CAPABILITY else (0, 0)
    if told.ok and scaling == "block":
        needed_cuda = max(needed_cuda, BLOCK_CUDA)
        told = _at_least(device, BLOCK_CAPABILITY, "FP8 products with fp32 scales of blocks")
        if device.capability >= BLACKWELL_CAPABILITY:
            told = Support(False, f"{have}; FP8 products with fp32 scales of blocks run on Hopper (9.0) alone")
    elif told.ok and scaling == "mx":
        told = _at_least(device, MX_CAPABILITY, "MXFP8 tensor cores")
        if device.capability >= MX_CAPABILITY_END:
            told = Support(False, f"{have}; MXFP8 products run on 10.x and 11.x")
    if told.ok and tuple(map(int, cuda.split(".")[:2])) < needed_cuda:
        return Support(
            False, f"{have} needs a torch built for CUDA {dotted(needed_cuda)} or newer, this one is built for {cuda}"
        )
    return told


def _at_least(device: Device, needed: tuple[int, int], what: str) -> Support:
    have = f"compute capability {dotted(device.capability)}"
    if device.capability < needed:
        return Support(False, f"{have}; {what} came with {dotted(needed)}")
    return Support(True, f"{what} ({have})")


def reset() -> None:
    """Forget every answer, so that the next question looks again."""
    fp8_support.cache_clear()
