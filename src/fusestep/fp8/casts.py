"""Casts: how a module casts an input, a weight and a gradient without asking which recipe it is in.

A module takes the casts of its region (casting.py) and casts by slot (state.py):

    input, weight          forward operands, in the recipe's forward format; `operands` casts both
    norm, activation       the same for a norm's or an activation's output, fused with it where the recipe allows
    gradient               a gradient, in the backward format, with the column sums that are a bias's gradient
    activation_gradient    the same for the gradient of an activation's input, fused with it

Matrices are (rows, columns), and each cast can give the rowwise and the transposed form in one read (ops/quantized.py).
`block` and `weight_block` are the blocks that share a scale, None where a tensor does: a product passes them on.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusestep.fp8.recipes import Recipe
from fusestep.ops.block_scaling_launch import BlockPlan
from fusestep.ops.planned_block_product import PlannedBlockProduct
from fusestep.ops.planned_product import PlannedProduct
from fusestep.ops.quantize_joined import Joined
from fusestep.ops.quantize_plan import CastPlan
from fusestep.ops.quantized import Quantized

#: What casts and multiplies at once.
Planned = PlannedProduct | PlannedBlockProduct


class Norm(NamedTuple):
    """What a fused norm is given beside its input.

    Attributes: weight and bias (columns,) or None; eps in units of x²; centred: LayerNorm, else RMSNorm.
    """

    weight: Tensor | None
    bias: Tensor | None
    eps: float
    centred: bool


class Normed(NamedTuple):
    """What a fused norm gives.

    Attributes: quantized: of (rows, columns); without the transpose under tensorwise recipes, where
        ops.quantize.transpose_bytes makes it of the data when it is needed. total: x + residual, or None. statistics:
        as norm_backward takes them. output: the norm itself, if it was to be kept.
    """

    quantized: Quantized
    total: Tensor | None
    statistics: Tensor
    output: Tensor | None


class Casts:
    """What modules know of a recipe; see the head of this file.

    Attributes:
        slots, counts: of delayed scaling, as ops.quantize takes them.
        products: for a module, which keeps its planned products here by what they were made for, and whether the weight
            comes cast already; None where there can be none.
    """

    block: tuple[int, int] | None = None
    weight_block: tuple[int, int] | None = None
    slots: Tensor | None = None
    counts: Tensor | None = None

    def __init__(self, recipe: Recipe) -> None:
        self.forward_dtype = recipe.fp8_format.forward
        self.backward_dtype = recipe.fp8_format.backward
        self.products: dict[tuple[Any, ...], dict[bool, Planned | None]] = {}

    def input(self, x: Tensor, index: int, columnwise: bool) -> Quantized:
        """Cast x (rows, columns) for the slot `index`."""
        raise NotImplementedError

    def weight(self, weight: Tensor, index: int, columnwise: bool) -> Quantized:
        """Cast a weight (out, in)."""
        return self.input(weight, index, columnwise)

    def operands(
        self, x: Tensor, weight: Tensor, indices: tuple[int, int], columnwise: tuple[bool, bool]
    ) -> tuple[Quantized, Quantized]:
        """Cast x (rows, columns) and a weight (out, columns), as `input` and `weight` do, together where that is less.

        Args: indices, columnwise: of x and of the weight.
        """
        return self.input(x, indices[0], columnwise[0]), self.weight(weight, indices[1], columnwise[1])

    def planned_product(
        self,
        x: Tensor,  # noqa: ARG002
        weight: Tensor,  # noqa: ARG002
        bias: Tensor | None,  # noqa: ARG002
        indices: tuple[int, int],  # noqa: ARG002
        columnwise: tuple[bool, bool],  # noqa: ARG002
        dtype: torch.dtype,  # noqa: ARG002
        is_known: bool,  # noqa: ARG002
        in_by_out: bool,  # noqa: ARG002
    ) -> Planned | None:
        """What casts and multiplies x (rows, in) and a weight at once, or None where nothing does.

        Args: weight: (out, in), or (in, out) if `in_by_out`; bias (out,) or None; indices, columnwise: of x and of the
            weight as products read them; dtype: of the output; is_known: whether the weight will come cast already.
        """
        return None

    def gradient_plan(
        self,
        dy: Tensor,  # noqa: ARG002
        index: int,  # noqa: ARG002
        rowwise: bool,  # noqa: ARG002
        columnwise: bool,  # noqa: ARG002
        sums_dtype: torch.dtype | None,  # noqa: ARG002
        right: bool,  # noqa: ARG002
    ) -> CastPlan | BlockPlan | None:
        """What casts gradients like this one as `gradient` does, or None where nothing does.

        Args: right: hand out the transpose as the right operand of a product.
        """
        return None

    def activation(self, h: Tensor, name: str, index: int, columnwise: bool) -> Quantized:
        """Cast name(h); h (rows, columns), twice as many columns if the activation is gated."""
        raise NotImplementedError

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
        """Cast the norm of x (…, columns), or of x + residual.

        Where the recipe cannot fuse, the norm is rounded to `dtype` between; so is the output that is kept.
        """
        raise NotImplementedError

    def gradient(
        self, dy: Tensor, index: int, rowwise: bool, columnwise: bool, sums_dtype: torch.dtype | None
    ) -> tuple[Quantized, Tensor | None]:
        """Cast a gradient (rows, columns); with `sums_dtype` also its sums over rows, (columns,), uncast.

        They are formed in fp32 and rounded once.
        """
        raise NotImplementedError

    def joined_gradient(
        self, dy: Joined, index: int, rowwise: bool, columnwise: bool, sums_dtype: torch.dtype | None
    ) -> tuple[Quantized, Tensor | None]:
        """The same of one that is three matrices, which are put together where no kernel takes them as they lie."""
        return self.gradient(dy.together(), index, rowwise, columnwise, sums_dtype)

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
        """Cast the gradient of h, from that of name(h)."""
        raise NotImplementedError
