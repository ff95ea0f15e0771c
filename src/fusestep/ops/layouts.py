"""Layouts: tensors that hold no memory, to make others like them.

`torch.empty_like` of one costs the host less than naming size, dtype and device, so what a call allocates in every
step is kept as layouts. What follows from the layouts of a call's tensors, such as its launches, is kept too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

#: Entries of a table that `keep` fills.
MOST = 4096


def layout(shape: Sequence[int], dtype: torch.dtype, device: torch.device, *, transposed: bool = False) -> Tensor:
    """A contiguous tensor of this shape, or its transpose, without memory; only to be handed to `torch.empty_like`."""
    made = torch.empty(shape, dtype=dtype, device=device)
    if transposed:
        made = made.t()
    made.untyped_storage().resize_(0)
    return made


def row_stride(x: Tensor, width: int) -> int | None:
    """Elements from one row of x, seen as (rows, width), to the next; None if x cannot be seen so without a copy."""
    if x.is_contiguous():
        return width
    covered, stride = 1, None
    for size, step in zip(reversed(x.shape), reversed(x.stride()), strict=True):
        if size == 1:
            continue
        if covered < width:  # inside a row: contiguous
            if step != covered:
                return None
        elif stride is None:
            stride = step
            next_step = step * size
        elif step != next_step:
            return None
        else:
            next_step = step * size
        covered *= size
    return width if stride is None else stride


def keep(known: dict[Any, Any], key: Any, value: Any, most: int = MOST) -> Any:
    """Enter a value, which is returned, emptying a dictionary that holds `most`: shapes may never repeat."""
    if len(known) >= most:
        known.clear()
    known[key] = value
    return value
