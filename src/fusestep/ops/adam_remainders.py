"""fp32 masters of bf16 parameters, kept as the parameter and 16 bits more: 2 bytes a parameter instead of 4.

    bits = the master's 32 bits
    remainder = the low 16 of them, as int16
    parameter = the high 16 of them, plus 1 where the remainder is negative: the master rounded, ties away from zero

and back, exactly, for every number and infinity:

    master = (parameter's bits << 16) + remainder

A NaN becomes the parameter 0x7FC0 and the remainder 0, since rounding its bits could end at another number's. What no
master becomes, a zero with a negative remainder, comes of a script that writes zeros into parameters, and is zero.
Source of the layout: Transformer Engine's FusedAdam(store_param_remainders=True).
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusestep.language import tl, triton


def whole(parameter: Tensor, remainder: Tensor) -> Tensor:
    """The fp32 master, of one shape and order of memory with the parameter.

    Args:
        parameter: bf16.
        remainder: int16, of the same shape.
    """
    values = parameter.detach()
    low = torch.where(values == 0, remainder.clamp(min=0), remainder)
    return (values.float().view(torch.int32) + low).view(torch.float32)


def parted(master: Tensor) -> tuple[Tensor, Tensor]:
    """(the bf16 parameter, the int16 remainder) of an fp32 master, each of its shape."""
    bits = torch.where(master.isnan(), 0x7FC00000, master.view(torch.int32))
    return ((bits + 0x8000) >> 16).short().view(torch.bfloat16), bits.short()


@triton.jit
def whole_weight(parameter, remainder):
    """`whole`, in a kernel: of bf16 values and int16 ones."""
    high = parameter.to(tl.int16, bitcast=True).to(tl.int32)
    low = remainder.to(tl.int32)
    low = tl.where((high & 0x7FFF) == 0, tl.maximum(low, 0), low)
    return ((high << 16) + low).to(tl.float32, bitcast=True)


@triton.jit
def parted_weight(master):
    """`parted`, in a kernel."""
    bits = tl.where(master != master, 0x7FC00000, master.to(tl.int32, bitcast=True))
    high = (bits + 0x8000) >> 16
    return high.to(tl.int16).to(tl.bfloat16, bitcast=True), bits.to(tl.int16)
