"""The cast to FP8 in plain PyTorch; quantize.py says what it computes. The bytes are those of the kernels."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fusestep.ops.cast_options import CastOptions
from fusestep.ops.quantized import padded
from fusestep.ops.roll_scales import AMAX, SCALE, scale_reference

#: What keeps the sign and the exponent of an fp32 number, and drops its mantissa.
EXPONENT = 0x7F800000


def scale_from_amax_reference(amax: Tensor, dtype: torch.dtype, margin: int, power_of_two: bool) -> Tensor:
    """The scale, fp32 0-d, that an amax calls for; rounded down to a power of two on request."""
    scale = scale_reference(amax, torch.finfo(dtype).max, margin)
    return (scale.view(torch.int32) & EXPONENT).view(torch.float32) if power_of_two else scale


def amax_reference(values: Tensor) -> Tensor:
    """The largest magnitude, fp32 0-d; NaN if there is one, 0 where there is nothing."""
    if values.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=values.device)
    amax: Tensor = torch.linalg.vector_norm(values, math.inf, dtype=torch.float32)
    return amax


def quantize_reference(
    values: Tensor, slots: Tensor, options: CastOptions, counts: Tensor | None, column_sums: bool
) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor | None]:
    """(data, transposed, scale_inv, sums); `values` are (rows, columns), fp32, bf16 or fp16.

    No branch depends on what the device holds, so that a graph could be captured of this as well.
    """
    index, dtype, rowwise, columnwise, record, margin, power_of_two = options
    values = values.float()
    slot = slots[index]
    known = slot[SCALE].clone()
    seen = torch.maximum(slot[AMAX], amax_reference(values))  # NaN wins
    scale = torch.where(known != 0, known, scale_from_amax_reference(seen, dtype, margin, power_of_two))
    slot[AMAX] = seen if record else torch.where(known != 0, slot[AMAX], seen)
    # An infinity becomes NaN, which FP8 can tell.
    scaled = values * scale + values * 0
    largest = torch.finfo(dtype).max
    # One NaN, whatever the sign of one that comes, as the hardware has it.
    q = torch.where(scaled.isnan(), torch.nan, scaled.clamp(-largest, largest)).to(dtype)
    if counts is not None:
        saturated = (scaled.abs() > largest).sum()
        flushed = ((values != 0) & (q.float() == 0)).sum()
        counts[index] += torch.stack((torch.full_like(saturated, values.numel()), saturated, flushed))
    rows, columns = values.shape
    data = transposed = None
    if rowwise:
        data = padded_bytes(q, rows, columns)
    if columnwise:
        transposed = padded_bytes(q.view(torch.uint8).t().view(dtype), columns, rows)
    sums = values.sum(0, dtype=torch.float32) if column_sums else None
    return data, transposed, 1.0 / scale, sums


def padded_bytes(q: Tensor, rows: int, columns: int) -> Tensor:
    """A matrix of FP8 in a new one of (padded(rows), padded(columns)), zero beyond its shape."""
    whole = torch.zeros(padded(rows), padded(columns), dtype=torch.uint8, device=q.device)
    whole[:rows, :columns] = q.view(torch.uint8)
    return whole.view(q.dtype)
