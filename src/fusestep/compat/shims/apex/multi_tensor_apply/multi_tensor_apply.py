"""apex.multi_tensor_apply.multi_tensor_apply."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

__all__ = ["MultiTensorApply"]


class MultiTensorApply:
    """Calls a function of amp_C on lists of tensors. `available` is True: they work on any device."""

    available = True
    warned = False

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def check_avail(self) -> None:
        """Nothing: amp_C is always there."""

    def __call__(
        self, op: Callable[..., Any], noop_flag_buffer: Tensor, tensor_lists: Sequence[Sequence[Tensor]], *args: Any
    ) -> Any:
        return op(self.chunk_size, noop_flag_buffer, tensor_lists, *args)
