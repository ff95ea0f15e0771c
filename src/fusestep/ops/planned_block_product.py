"""planned_product.py for operands that carry a scale for each block, where cuBLASLt multiplies them.

x and the gradient are in blocks of 1 × 128, weights in blocks of 128 × 128.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fusestep.ops.block_product import NativeProduct
from fusestep.ops.block_scaling_launch import BlockPlan
from fusestep.ops.planned_product import Kept, RightOperands, as_right


class PlannedBlockProduct:
    """Products of tensors of the layouts that it was made for.

    Args:
        x, weight: their casts as they lie, with right operands; the weight's is not used where that is cast already.
        y, dx, dweight: the products.
        keeps_weight: whether the input's gradient will be wanted.
        in_by_out: as of PlannedProduct.

    Attributes:
        in_by_out: as given.
        gradient_casts: for the module, which enters plans of the gradient's cast here.
    """

    __slots__ = ("_dweight", "_dx", "_keeps_weight", "_weight", "_x", "_y", "gradient_casts", "in_by_out")

    def __init__(
        self,
        x: BlockPlan,
        weight: BlockPlan,
        y: NativeProduct,
        dx: NativeProduct,
        dweight: NativeProduct,
        keeps_weight: bool,
        in_by_out: bool,
    ) -> None:
        self._x, self._weight, self._y, self._dx, self._dweight = x, weight, y, dx, dweight
        self._keeps_weight, self.in_by_out = keeps_weight, in_by_out
        self.gradient_casts: dict[Any, BlockPlan] = {}

    def forward(
        self,
        x: Tensor,
        weight: Tensor,
        known: RightOperands | None,
        bias: Tensor | None,
        slots: Tensor | None,  # noqa: ARG002 (of recipes that have some)
        counts: Tensor | None,  # noqa: ARG002
    ) -> tuple[Tensor, Kept]:
        """y, and what backward keeps; gradients are disabled, as within an autograd.Function.

        Args: weight: as it is; known: as it was cast, where it was.
        """
        x_data, x_scales, x_kept, x_kept_scales, _ = self._x.cast(x)
        weight_data: Any
        weight_scales: Any
        if known is not None:
            weight_data, weight_scales, weight_kept, weight_kept_scales = known
        elif self.in_by_out:
            weight_kept, weight_kept_scales, weight_data, weight_scales, _ = self._weight.cast(weight)
        else:
            weight_data, weight_scales, weight_kept, weight_kept_scales, _ = self._weight.cast(weight)
        if not self._keeps_weight:
            weight_kept = weight_kept_scales = None
        y = self._y(x_data, x_scales, weight_data, weight_scales, bias)
        return y, (x_kept, x_kept_scales, weight_kept, weight_kept_scales)

    def backward(self, dy: Any, kept: Any, x_needed: bool, weight_needed: bool) -> tuple[Tensor | None, Tensor | None]:
        """The gradients of x and of the weight, None where they are not needed.

        Args: dy: `Outputs` of what is wanted for them, the transpose as a right operand if `in_by_out`; kept: a `Kept`.
        """
        data, scales, transposed, transposed_scales, _ = dy
        x_kept, x_scales, weight_kept, weight_scales = kept
        dx = dweight = None
        if x_needed:
            if weight_kept.stride(0) != 1 or weight_scales.stride(0) != 1:
                weight_kept, weight_scales = as_right(weight_kept), as_right(weight_scales)
            dx = self._dx(data, scales, weight_kept, weight_scales, None)
        if weight_needed and self.in_by_out:
            if x_scales.stride(0) != 1:
                x_scales = as_right(x_scales)
            dweight = self._dweight(x_kept, x_scales, transposed, transposed_scales, None)
        elif weight_needed:
            if x_kept.stride(0) != 1 or x_scales.stride(0) != 1:
                x_kept, x_scales = as_right(x_kept), as_right(x_scales)
            dweight = self._dweight(transposed, transposed_scales, x_kept, x_scales, None)
        return dx, dweight
