"""Layouts: tensors that hold no memory, to make others like them.

`torch.empty_like` of one costs the host less than naming size, dtype and device, so what a call allocates in every
step is kept as layouts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def layout(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A contiguous tensor of this shape without memory; only to be handed to `torch.empty_like`."""
    made = torch.empty(shape, dtype=dtype, device=device)
    made.untyped_storage().resize_(0)
    return made
