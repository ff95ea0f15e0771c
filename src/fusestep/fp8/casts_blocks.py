"""Casts with a scale for each block: Float8BlockScaling's and MXFP8BlockScaling's.

No kernel casts a norm or an activation as it computes it here: it is rounded between.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusestep.errors import UserError
from fusestep.fp8.casts import Casts, Norm, Normed
from fusestep.fp8.recipes import Float8BlockScaling, MXFP8BlockScaling
from fusestep.ops.activation import activation_backward, activation_forward, run_activation
from fusestep.ops.block_product import plan_native
from fusestep.ops.block_scaling import plan_blocks, quantize_blocks
from fusestep.ops.block_scaling_launch import MX, ROW, TILE, BlockPlan
from fusestep.ops.norm_ops import norm_forward, norm_forward_residual, run_forward
from fusestep.ops.planned_block_product import PlannedBlockProduct
from fusestep.ops.planned_product import fits
from fusestep.ops.quantized import Quantized
from fusestep.ops.registry import is_plain


class BlockCasts(Casts):
    """A scale for each block: 1 × 128 and 128 × 128, or 1 × 32 with power-of-two scales (MXFP8)."""

    block: tuple[int, int]
    weight_block: tuple[int, int]

    def __init__(self, recipe: Float8BlockScaling | MXFP8BlockScaling) -> None:
        super().__init__(recipe)
        if isinstance(recipe, MXFP8BlockScaling):
            self.block, self.weight_block, self.power_of_two = MX, MX, True
        else:
            self.block, self.weight_block, self.power_of_two = ROW, TILE, not recipe.use_f32_scales

    def _cast(
        self,
        x: Tensor,
        dtype: torch.dtype,
        block: tuple[int, int],
        rowwise: bool,
        columnwise: bool,
        sums_dtype: torch.dtype | None = None,
    ) -> tuple[Quantized, Tensor | None]:
        return quantize_blocks(
            x,
            dtype,
            block,
            rowwise=rowwise,
            columnwise=columnwise,
            power_of_two=self.power_of_two,
            sums_dtype=sums_dtype,
        )

    def input(self, x: Tensor, index: int, columnwise: bool) -> Quantized:  # noqa: ARG002
        return self._cast(x, self.forward_dtype, self.block, True, columnwise)[0]

    def weight(self, weight: Tensor, index: int, columnwise: bool) -> Quantized:  # noqa: ARG002
        return self._cast(weight, self.forward_dtype, self.weight_block, True, columnwise)[0]

    def _plan(
        self,
        x: Tensor,
        dtype: torch.dtype,
        block: tuple[int, int],
        rowwise: bool,
        columnwise: bool,
        sums_dtype: torch.dtype | None = None,
        right: tuple[bool, bool] = (False, False),
    ) -> BlockPlan | None:
        if torch.compiler.is_compiling() or not is_plain(x):
            return None
        return plan_blocks(x, dtype, block, rowwise, columnwise, self.power_of_two, sums_dtype, right)

    def planned_product(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        indices: tuple[int, int],  # noqa: ARG002
        columnwise: tuple[bool, bool],
        dtype: torch.dtype,
        is_known: bool,  # noqa: ARG002
        in_by_out: bool,
    ) -> PlannedBlockProduct | None:
        if self.block != ROW or not fits(x, weight, bias, dtype):
            return None
        of_x = self._plan(x, self.forward_dtype, ROW, True, columnwise[0], right=(False, not in_by_out))
        ways = (columnwise[1], True) if in_by_out else (True, columnwise[1])
        of_weight = self._plan(weight, self.forward_dtype, TILE, *ways, right=(True, True))
        if of_x is None or of_weight is None:
            return None
        device, forward, backward = x.device, self.forward_dtype, self.backward_dtype
        y = plan_native(device, forward, forward, TILE, dtype, bias is not None)
        dx = plan_native(device, backward, forward, TILE, x.dtype, False)
        of_dweight = (forward, backward) if in_by_out else (backward, forward)
        dweight = plan_native(device, *of_dweight, ROW, weight.dtype, False)
        if y is None or dx is None or dweight is None:
            return None
        return PlannedBlockProduct(of_x, of_weight, y, dx, dweight, columnwise[1], in_by_out)

    def gradient_plan(
        self,
        dy: Tensor,
        index: int,  # noqa: ARG002
        rowwise: bool,
        columnwise: bool,
        sums_dtype: torch.dtype | None,
        right: bool,
    ) -> BlockPlan | None:
        return self._plan(dy, self.backward_dtype, self.block, rowwise, columnwise, sums_dtype, (False, right))

    def activation(self, h: Tensor, name: str, index: int, columnwise: bool) -> Quantized:
        compiling = torch.compiler.is_compiling()
        y = activation_forward(h, name) if compiling else run_activation(h, None, name)
        return self.input(y, index, columnwise)

    def norm(
        self,
        x: Tensor,
        residual: Tensor | None,
        norm: Norm,
        index: int,
        columnwise: bool,
        dtype: torch.dtype,
        keep_output: bool = False,
    ) -> Normed:
        width = x.shape[-1]
        _check(x, residual, norm)
        options = (norm.weight, norm.bias, width, norm.eps, norm.centred, dtype)
        total: Tensor | None = None
        if not torch.compiler.is_compiling():
            y, total, statistics = run_forward(x, residual, *options)
        elif residual is None:
            y, statistics = norm_forward(x, *options)
        else:
            y, total, statistics = norm_forward_residual(x, residual, *options)
        quantized = self.input(y.view(-1, width), index, columnwise)
        return Normed(quantized, total, statistics, y if keep_output else None)

    def gradient(
        self,
        dy: Tensor,
        index: int,  # noqa: ARG002
        rowwise: bool,
        columnwise: bool,
        sums_dtype: torch.dtype | None,
    ) -> tuple[Quantized, Tensor | None]:
        return self._cast(dy, self.backward_dtype, self.block, rowwise, columnwise, sums_dtype)

    def activation_gradient(
        self,
        da: Tensor,
        h: Tensor,
        name: str,
        index: int,
        rowwise: bool,
        columnwise: bool,
        sums_dtype: torch.dtype | None,
    ) -> tuple[Quantized, Tensor | None]:
        compiling = torch.compiler.is_compiling()
        dh = activation_backward(da, h, name) if compiling else run_activation(h, da, name)
        return self.gradient(dh, index, rowwise, columnwise, sums_dtype)


def _check(x: Tensor, residual: Tensor | None, norm: Norm) -> None:
    """Raises: UserError for what the norm's kernel, which asks nothing, would read beyond the end of."""
    for name, tensor, shape in (
        ("residual", residual, x.shape),
        ("weight", norm.weight, x.shape[-1:]),
        ("bias", norm.bias, x.shape[-1:]),
    ):
        if tensor is None:
            continue
        if tensor.shape != shape:
            raise UserError(
                f"the norm before a cast: {name} has shape {tuple(tensor.shape)}; pass one of shape {tuple(shape)}."
            )
        if tensor.device != x.device:
            raise UserError(
                f"the norm before a cast: {name} is on {tensor.device} and x on {x.device}; move them to one device."
            )
