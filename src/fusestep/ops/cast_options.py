"""How a matrix is cast to FP8 with one scale: what all who make, plan or check such a cast pass on."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fusestep.errors import UserError
from fusestep.ops.dtypes import FP8
from fusestep.ops.roll_scales import SLOT

#: Beyond it a margin leaves nothing of a format's range.
LARGEST_MARGIN = 16


class CastOptions(NamedTuple):
    """All that a cast is told beside its tensors; in the order of the raw ops' arguments.

    Attributes:
        slot: whose scale it is, a row of `slots`.
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        rowwise, columnwise: which of data and transposed are wanted.
        record: raise the slot's amax, also where it has a scale.
        margin: a scale that is taken from the amax is smaller by 2^margin.
        power_of_two: such a scale is rounded down to a power of two.
    """

    slot: int
    dtype: torch.dtype
    rowwise: bool = True
    columnwise: bool = False
    record: bool = False
    margin: int = 0
    power_of_two: bool = False


def check_options(who: str, options: CastOptions, slots: Tensor | None, counts: Tensor | None) -> None:
    """Refuse a cast that no tensor could be given to.

    Args:
        slots: (n, 4) fp32 contiguous; None for a scale that is the tensor's own, without counts.
        counts: (n, 3) int64 contiguous, or None.
    Raises: UserError.
    """
    if options.dtype not in FP8:
        raise UserError(f"{who}: dtype is {options.dtype}; pass torch.float8_e4m3fn or torch.float8_e5m2.")
    if not options.rowwise and not options.columnwise:
        raise UserError(f"{who}: neither data nor its transpose is wanted; pass rowwise=True or columnwise=True.")
    if not 0 <= options.margin <= LARGEST_MARGIN:
        raise UserError(f"{who}: margin is {options.margin}; pass an integer from 0 to {LARGEST_MARGIN}.")
    if slots is None:
        if options.record or counts is not None:
            raise UserError(f"{who}: without slots there is nothing to record or count in; pass slots.")
        return
    if slots.dim() != 2 or slots.shape[1] != SLOT or slots.dtype is not torch.float32 or not slots.is_contiguous():
        raise UserError(
            f"{who}: slots are {tuple(slots.shape)} {slots.dtype}; pass contiguous (n, {SLOT}) torch.float32."
        )
    if not 0 <= options.slot < slots.shape[0]:
        raise UserError(f"{who}: there is no slot {options.slot} among {slots.shape[0]}; pass one from 0 on.")
    if counts is not None and (
        counts.shape != (slots.shape[0], 3) or counts.dtype is not torch.int64 or not counts.is_contiguous()
    ):
        raise UserError(
            f"{who}: counts are {tuple(counts.shape)} {counts.dtype}; pass contiguous int64, ({slots.shape[0]}, 3)."
        )
