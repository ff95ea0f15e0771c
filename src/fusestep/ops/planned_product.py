"""A linear layer's products in FP8 of which all but the tensors is settled: the casts and the products, and no more.

Forward casts input and weight in one launch and multiplies them; backward multiplies by what was kept of them:

    y = x · weightᵀ + bias        dx = dy · weight        dweight = dyᵀ · x

Right operands are written as cuBLASLt reads them, with the summed dimension first and contiguous in memory, so that no
view of them need be made. This is for sizes that take no padding, one scale a tensor, and devices that multiply FP8;
scaled_mm.py has the products of everything.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusestep.ops.quantize_pair import PairPlan
from fusestep.ops.quantized import PAD, Quantized

#: What backward keeps: the input and its scale, the weight and its scale, as right operands; None where not wanted.
Kept = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


class PlannedProduct:
    """Products of tensors of the layouts that it was made for.

    Args:
        pair: casts input and weight, with right operands.
        dtype: of y.
        x_dtype, weight_dtype: of the gradients.
    """

    __slots__ = ("_dtype", "_pair", "_weight_dtype", "_x_dtype")

    def __init__(self, pair: PairPlan, dtype: torch.dtype, x_dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
        self._pair, self._dtype, self._x_dtype, self._weight_dtype = pair, dtype, x_dtype, weight_dtype

    def forward(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, slots: Tensor | None, counts: Tensor | None
    ) -> tuple[Tensor, Kept]:
        """y, and what backward keeps; gradients are disabled, as within an autograd.Function."""
        x_data, x_kept, x_scale_inv, weight_data, weight_kept, weight_scale_inv = self._pair.cast(
            x, weight, slots, counts
        )
        # By position: keywords cost the host another microsecond.
        y = torch._scaled_mm(x_data, weight_data, x_scale_inv, weight_scale_inv, bias, None, self._dtype, True)
        return y, (x_kept, x_scale_inv, weight_kept, weight_scale_inv)

    def backward(
        self, dy: Quantized, kept: Kept, x_needed: bool, weight_needed: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """The gradients of x and of the weight, None where they are not needed."""
        x_kept, x_scale_inv, weight_kept, weight_scale_inv = kept
        dx = dweight = None
        if x_needed:
            assert dy.data is not None
            assert weight_kept is not None
            assert weight_scale_inv is not None
            if weight_kept.stride(0) != 1:
                weight_kept = _as_right(weight_kept)
            dx = torch._scaled_mm(
                dy.data, weight_kept, dy.scale_inv, weight_scale_inv, None, None, self._x_dtype, False
            )
        if weight_needed:
            assert dy.transposed is not None
            assert x_kept is not None
            assert x_scale_inv is not None
            if x_kept.stride(0) != 1:
                x_kept = _as_right(x_kept)
            dweight = torch._scaled_mm(
                dy.transposed, x_kept, dy.scale_inv, x_scale_inv, None, None, self._weight_dtype, False
            )
        return dx, dweight


def _as_right(kept: Tensor) -> Tensor:
    """A right operand that lost its strides while it was kept, as where hooks for saved tensors bring it elsewhere."""
    return kept.t().contiguous().t()


def fits(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> bool:
    """Whether products of x (rows, in) and a weight (out, in) take no padding, and a bias is added as it is."""
    if any(size % PAD for size in (*x.shape, *weight.shape)):
        return False
    return bias is None or (bias.dtype is dtype is not torch.float32 and bias.is_contiguous())
