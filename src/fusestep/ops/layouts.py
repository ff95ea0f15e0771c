"""Layouts: tensors that hold no memory, to make others like them.

`torch.empty_like` of one costs the host less than naming size, dtype and device, so what a call allocates in every
step is kept as layouts. What follows from the layouts of a call's tensors, such as its launches, is kept too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
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


#: What allocates for the code that torch.compile writes: (sizes, strides, dtype), on the current device. It takes half
#: the time of `torch.empty_like`, since no dispatch stands between.
_ALLOCATORS = {
    kind: getattr(torch._C._dynamo.guards, f"_empty_strided_{kind}")
    for kind in ("cpu", "cuda")
    if hasattr(torch._C._dynamo.guards, f"_empty_strided_{kind}")
}


def maker(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, *, transposed: bool = False
) -> Callable[[], Tensor]:
    """What makes unwritten contiguous tensors of this shape, or their transposes, where `device` is the current device.

    Only for calls that nothing traces or watches.
    """
    sizes = tuple(shape)
    strides = [1] * len(sizes)
    for place in reversed(range(len(sizes) - 1)):
        strides[place] = strides[place + 1] * max(sizes[place + 1], 1)
    if transposed:
        sizes, strides = sizes[::-1], strides[::-1]
    allocate = _ALLOCATORS.get(device.type)
    if allocate is None:
        return partial(torch.empty_strided, sizes, tuple(strides), dtype=dtype, device=device)
    return partial(allocate, sizes, tuple(strides), dtype)


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
