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


def keep(known: dict[tuple[Any, ...], Any], key: tuple[Any, ...], value: Any) -> Any:
    """Enter a value, which is returned, emptying a dictionary that holds MOST: shapes may never repeat."""
    if len(known) >= MOST:
        known.clear()
    known[key] = value
    return value
