"""te.LayerNorm over fusestep.nn.LayerNorm."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusestep import nn
from transformer_engine.pytorch._arguments import mark
from transformer_engine.pytorch.module._norm import EmptyExtraState, Shape, arguments

__all__ = ["LayerNorm"]


class LayerNorm(EmptyExtraState, nn.LayerNorm):
    """Normalise the last dimensions; see fusestep.nn.LayerNorm.

    hidden_size and params_dtype are old names of normalized_shape and dtype. The input is cast to the weight's dtype.
    """

    SERVED_BY = "fusestep.nn.LayerNorm"

    def __init__(
        self,
        normalized_shape: Shape | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: Shape | None = None,
        **kwargs: Any,
    ) -> None:
        shape, device, dtype = arguments("LayerNorm", normalized_shape, hidden_size, params_dtype, kwargs)
        super().__init__(shape, eps, device=device, dtype=dtype, zero_centered_gamma=zero_centered_gamma)
        if sequence_parallel is not None:
            mark(self, "weight", "bias", sequence_parallel=sequence_parallel)
        self._announce()

    def forward(self, inp: Tensor, residual: Tensor | None = None) -> Any:
        """(…, *normalized_shape) to the same shape. With a residual (y, inp + residual), which only ours has."""
        return super().forward(inp, residual)
