"""A linear layer's products in FP8 of which all but the tensors is settled: the casts and the products, and no more.

Forward casts input and weight and multiplies them; backward multiplies the cast gradient by what was kept of them:

    y = x · weightᵀ + bias        dx = dy · weight        dweight = dyᵀ · x

Of a weight that is (in, out), as GPT-2's are, the transpose is what the product forward reads, and its gradient is
xᵀ · dy: (in, out) and contiguous, which autograd takes as it is.

Right operands are written as cuBLASLt reads them, with the summed dimension first and contiguous in memory, so that no
view of them need be made. This is for sizes that take no padding and devices that multiply FP8; scaled_mm.py has the
products of everything. Here are those of one scale a tensor; planned_block_product.py has those of blocks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusestep.ops.quantize_pair import PairPlan
from fusestep.ops.quantize_plan import CastPlan
from fusestep.ops.quantized import PAD

#: What backward keeps: the input and its scales, the weight and its scales, as right operands (but the input as a left
#: one for a weight that is (in, out)); None where not wanted.
Kept = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]

#: A weight that is cast already: its data with their scales, its transpose with its own, as right operands.
RightOperands = tuple[Tensor, Tensor, Tensor | None, Tensor | None]


class PlannedProduct:
    """Products of tensors of the layouts that it was made for.

    Args:
        casts: of input and weight at once, with right operands, or of the input by itself.
        weight_cast: of the weight by itself, as it lies, with right operands; None where it is cast with the input, or
            already.
        dtype: of y.
        x_dtype, weight_dtype: of the gradients.
        keeps_weight: whether the input's gradient will be wanted.
        in_by_out: whether the weight is (in, out), as its gradient then is.

    Attributes:
        in_by_out: as given.
        gradient_casts: for the module, which enters plans of the gradient's cast here.
    """

    __slots__ = (
        *("_dtype", "_keeps_weight", "_pair", "_weight", "_weight_dtype", "_x", "_x_dtype"),
        *("gradient_casts", "in_by_out"),
    )

    def __init__(
        self,
        casts: PairPlan | CastPlan,
        weight_cast: CastPlan | None,
        dtype: torch.dtype,
        x_dtype: torch.dtype,
        weight_dtype: torch.dtype,
        keeps_weight: bool,
        in_by_out: bool,
    ) -> None:
        self._pair = casts if isinstance(casts, PairPlan) else None
        self._x = casts if isinstance(casts, CastPlan) else None
        self._weight, self.in_by_out = weight_cast, in_by_out
        self._dtype, self._x_dtype, self._weight_dtype, self._keeps_weight = dtype, x_dtype, weight_dtype, keeps_weight
        self.gradient_casts: dict[Any, CastPlan] = {}

    def forward(
        self,
        x: Tensor,
        weight: Tensor,
        known: RightOperands | None,
        bias: Tensor | None,
        slots: Tensor | None,
        counts: Tensor | None,
    ) -> tuple[Tensor, Kept]:
        """y, and what backward keeps; gradients are disabled, as within an autograd.Function.

        Args: weight: as it is; known: as it was cast, where the plan is for one that was.
        """
        x_data: Any
        weight_data: Any
        x_kept: Tensor | None
        weight_kept: Tensor | None
        if self._pair is not None:
            x_data, x_kept, x_scale_inv, weight_data, weight_kept, weight_scale_inv = self._pair.cast(
                x, weight, slots, counts
            )
        else:
            assert self._x is not None
            x_data, x_scale_inv, x_kept, _, _ = self._x.cast(x, None, slots, counts)
            if known is not None:
                weight_data, weight_scale_inv, weight_kept, _ = known
            else:
                assert self._weight is not None
                weight_kept, weight_scale_inv, weight_data, _, _ = self._weight.cast(weight, None, slots, counts)
            if not self._keeps_weight:
                weight_kept = None
        # By position: keywords cost the host another microsecond.
        y = torch._scaled_mm(x_data, weight_data, x_scale_inv, weight_scale_inv, bias, None, self._dtype, True)
        return y, (x_kept, x_scale_inv, weight_kept, weight_scale_inv)

    def backward(self, dy: Any, kept: Any, x_needed: bool, weight_needed: bool) -> tuple[Tensor | None, Tensor | None]:
        """The gradients of x and of the weight, None where they are not needed.

        Args: dy: a `Cast` of what is wanted for them, its transpose as a right operand if `in_by_out`; kept: a `Kept`.
        """
        data, scale_inv, transposed, _, _ = dy
        x_kept, x_scale_inv, weight_kept, weight_scale_inv = kept
        dx = dweight = None
        if x_needed:
            if weight_kept.stride(0) != 1:
                weight_kept = as_right(weight_kept)
            dx = torch._scaled_mm(data, weight_kept, scale_inv, weight_scale_inv, None, None, self._x_dtype, False)
        if weight_needed and self.in_by_out:
            dweight = torch._scaled_mm(
                x_kept, transposed, x_scale_inv, scale_inv, None, None, self._weight_dtype, False
            )
        elif weight_needed:
            if x_kept.stride(0) != 1:
                x_kept = as_right(x_kept)
            dweight = torch._scaled_mm(
                transposed, x_kept, scale_inv, x_scale_inv, None, None, self._weight_dtype, False
            )
        return dx, dweight


def as_right(kept: Tensor) -> Tensor:
    """A right operand that hooks for saved tensors copied, with the strides that it lost."""
    return kept.t().contiguous().t()


def fits(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> bool:
    """Whether products of x (rows, in) and a weight, however it lies, take no padding, and a bias is added as it is."""
    if any(size % PAD for size in (*x.shape, *weight.shape)):
        return False
    return bias is None or (bias.dtype is dtype is not torch.float32 and bias.is_contiguous())
