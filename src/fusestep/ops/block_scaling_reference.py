"""Block scaling in plain PyTorch: what the kernel is compared with, and what runs where it cannot.

The formulas stand in block_scaling.py.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from fusestep.ops.quantized import exponent_value
from fusestep.ops.roll_scales import LARGEST_SCALE

#: Both formats' NaN as the hardware writes it; a software cast would keep its sign.
NAN_BYTE = 0x7F

_INFINITY_BITS = 0x7F800000


def quantize_blocks_reference(
    x: Tensor,
    dtype: torch.dtype,
    block: tuple[int, int],
    data_shape: torch.Size,
    scales_shape: torch.Size,
    power_of_two: bool,
) -> tuple[Tensor, Tensor]:
    """(data, inverse scales) of x (rows, columns) by blocks along its rows; the transposed result is that of x.t().

    Args:
        data_shape, scales_shape: of the results, at least as large as x and its blocks; data beyond x are zero.
    """
    largest = torch.finfo(dtype).max
    height, width = block
    row_blocks, column_blocks = -(-data_shape[0] // height), -(-data_shape[1] // width)
    whole = pad(x.float(), (0, column_blocks * width - x.shape[1], 0, row_blocks * height - x.shape[0]))
    blocks = whole.reshape(row_blocks, height, column_blocks, width)
    # Of no element the largest magnitude is zero; torch would refuse to tell.
    amax = blocks.abs().amax(dim=(1, 3)) if whole.numel() else blocks.new_zeros(row_blocks, column_blocks)
    if width == 32:
        scale, scale_inv = microscale(amax, largest)
    else:
        scale = block_scale(amax, largest, power_of_two)
        scale_inv = 1.0 / scale
    # An infinity becomes NaN, which FP8 can tell.
    q = (blocks * scale[:, None, :, None] + blocks * 0).reshape(whole.shape)[: data_shape[0], : data_shape[1]]
    data = q.clamp(-largest, largest).to(dtype).view(torch.uint8).masked_fill(q.isnan(), NAN_BYTE)
    # Scales of blocks that hold padding alone are 1; a product must not meet anything else there.
    more = (0, scales_shape[1] - column_blocks, 0, scales_shape[0] - row_blocks)
    return data.view(dtype), pad(scale_inv, more, value=1)


def block_scale(amax: Tensor, largest: float, power_of_two: bool) -> Tensor:
    """min(largest / amax, 2^126), rounded down to a power of two if asked; 1 where amax is zero or not finite."""
    scale = torch.full_like(amax, largest).div(amax).clamp(max=LARGEST_SCALE)
    if power_of_two:
        scale = (scale.view(torch.int32) & _INFINITY_BITS).view(torch.float32)
    return torch.where((amax > 0) & amax.isfinite(), scale, 1.0)


def microscale(amax: Tensor, largest: float) -> tuple[Tensor, Tensor]:
    """(scale 2^(127 − e), uint8 exponents e): the biased exponent of amax / largest, rounded up.

    0 gives 0, infinity 254, NaN 255, of which the scale is NaN.
    """
    # By a tensor: a GPU divides by a number through its rounded reciprocal.
    bits = amax.div(torch.full_like(amax, largest)).view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    # E8M0 begins at 2^-127, which in fp32 is below the normal numbers: half of the smallest one.
    exponent = exponent + torch.where(exponent == 0, mantissa > 0x400000, mantissa > 0)
    exponent = exponent.masked_fill(amax.isinf(), 254).masked_fill(amax.isnan(), 255)
    return exponent_value(254 - exponent), exponent.to(torch.uint8)
