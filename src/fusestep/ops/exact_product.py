"""The product of two FP8 matrices in fp32, exact but for the order of its sums: what emulation is built on."""

from __future__ import annotations

import torch
from torch import Tensor

from fusestep import hardware, precision


def exact_product(a: Tensor, b: Tensor) -> Tensor:
    """a · bᵀ in fp32, of matrices whose values bf16 holds exactly, as it does all of E4M3 and E5M2.

    A product of two FP8 values takes eight bits of mantissa, so that only sums are rounded.
    """
    with torch.autocast(a.device.type, enabled=False):
        if a.is_cuda and hardware.devices()[a.device.index].capability >= precision.BF16_CAPABILITY:
            return torch.mm(a.to(torch.bfloat16), b.to(torch.bfloat16).t(), out_dtype=torch.float32)
        return torch.mm(a.float(), b.float().t())
