"""From a recipe to casts: the one place that knows how each recipe casts an input, a weight and a gradient.

A module asks for the casts of the region that it is in, and casts by slot (see state.py) without asking which recipe:

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

from fusestep import dispatch
from fusestep.errors import UserError
from fusestep.fp8.recipes import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    Recipe,
)
from fusestep.fp8.state import Slots
from fusestep.ops.activation import activation_backward, activation_forward, run_activation
from fusestep.ops.block_scaling import quantize_blocks
from fusestep.ops.block_scaling_launch import MX, ROW, TILE
from fusestep.ops.cast_options import CastOptions
from fusestep.ops.layouts import keep
from fusestep.ops.norm_ops import norm_forward, norm_forward_residual, run_forward
from fusestep.ops.norm_quantize import cast_norm
from fusestep.ops.planned_product import PlannedProduct, fits
from fusestep.ops.quantize import cast
from fusestep.ops.quantize_pair import PairPlan, plan_pair
from fusestep.ops.quantize_plan import CastPlan, check_quantize, plan_cast, runs_kernels
from fusestep.ops.quantized import Quantized
from fusestep.ops.registry import is_plain
from fusestep.ops.roll_scales import SLOT

#: Plans that one module keeps; shapes may never repeat.
MOST_PLANS = 256


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
    """What modules know of a recipe; see the head of this file."""

    block: tuple[int, int] | None = None
    weight_block: tuple[int, int] | None = None

    def __init__(self, recipe: Recipe) -> None:
        self.forward_dtype = recipe.fp8_format.forward
        self.backward_dtype = recipe.fp8_format.backward

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
    ) -> PlannedProduct | None:
        """What casts and multiplies x (rows, in) and a weight (out, in) at once, or None where nothing does.

        Args: bias (out,) or None; indices, columnwise: of x and of the weight; dtype: of the output.
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


class _TensorwiseCasts(Casts):
    """One scale a tensor: what delayed and current scaling share, which is all but where the slots come from."""

    counts: Tensor | None = None
    slots: Tensor | None = None

    def __init__(self, recipe: Recipe, record: bool = False, margin: int = 0, power_of_two: bool = False) -> None:
        super().__init__(recipe)
        self._scaling = record, margin, power_of_two
        self._plans: dict[tuple[Any, ...], CastPlan] = {}
        self._pairs: dict[tuple[Any, ...], PairPlan | None] = {}
        self._products: dict[tuple[Any, ...], PlannedProduct | None] = {}

    def _slots(self, index: int, like: Tensor) -> tuple[Tensor, int]:
        """The slots of a cast that no plan makes, and its place in them."""
        if self.slots is not None:
            return self.slots, index
        return torch.zeros(1, SLOT, dtype=torch.float32, device=like.device), 0

    def input(self, x: Tensor, index: int, columnwise: bool) -> Quantized:
        key = (index, columnwise, x.shape, x.stride(), x.dtype, x.device)
        plan = self._plans.get(key) if runs_kernels(x) else None
        if plan is not None:
            return plan(x, None, self.slots, self.counts)[0]
        return self._first(key, x, None, "", index, self.forward_dtype, True, columnwise, None)[0]

    def operands(
        self, x: Tensor, weight: Tensor, indices: tuple[int, int], columnwise: tuple[bool, bool]
    ) -> tuple[Quantized, Quantized]:
        if runs_kernels(x) and is_plain(weight):
            layouts = (x.shape, x.stride(), x.dtype, x.device, weight.shape, weight.stride(), weight.dtype)
            key = (layouts, indices, columnwise)
            if key not in self._pairs:
                keep(self._pairs, key, self._first_pair(x, weight, indices, columnwise), MOST_PLANS)
            pair = self._pairs[key]
            if pair is not None:
                return pair(x, weight, self.slots, self.counts)
        return self.input(x, indices[0], columnwise[0]), self.input(weight, indices[1], columnwise[1])

    def planned_product(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        indices: tuple[int, int],
        columnwise: tuple[bool, bool],
        dtype: torch.dtype,
    ) -> PlannedProduct | None:
        if not (runs_kernels(x) and is_plain(weight) and dispatch.multiplies_fp8("scaled_mm", x.device)):
            return None
        key = (
            *(x.shape, x.stride(), x.dtype, x.device, weight.shape, weight.stride(), weight.dtype),
            None if bias is None else (bias.dtype, bias.stride()),
            *(indices, columnwise, dtype),
        )
        product = self._products.get(key)
        if product is None and key not in self._products:
            if fits(x, weight, bias, dtype):
                pair = self._first_pair(x, weight, indices, columnwise, right=True)
                product = None if pair is None else PlannedProduct(pair, dtype, x.dtype, weight.dtype)
            keep(self._products, key, product, MOST_PLANS)
        return product

    def _first_pair(
        self,
        x: Tensor,
        weight: Tensor,
        indices: tuple[int, int],
        columnwise: tuple[bool, bool],
        right: bool = False,
    ) -> PairPlan | None:
        """The plan of casting both; None where each is cast by itself."""
        dtype, scaling, slots, counts = self.forward_dtype, self._scaling, self.slots, self.counts
        of_x = CastOptions(indices[0], dtype, True, columnwise[0], *scaling)
        of_weight = CastOptions(indices[1], dtype, True, columnwise[1], *scaling)
        check_quantize(x, None, "", slots, of_x, counts)
        check_quantize(weight, None, "", slots, of_weight, counts)
        return plan_pair(x, weight, (of_x, of_weight), slots, counts, right=right)

    def activation(self, h: Tensor, name: str, index: int, columnwise: bool) -> Quantized:
        key = (index, columnwise, h.shape, h.stride(), h.dtype, h.device, name)
        plan = self._plans.get(key) if runs_kernels(h) else None
        if plan is not None:
            return plan(h, None, self.slots, self.counts)[0]
        return self._first(key, h, None, name, index, self.forward_dtype, True, columnwise, None)[0]

    def norm(
        self,
        x: Tensor,
        residual: Tensor | None,
        norm: Norm,
        index: int,
        columnwise: bool,  # noqa: ARG002 (made in backward, from the data)
        dtype: torch.dtype,
        keep_output: bool = False,
    ) -> Normed:
        slots, place = self._slots(index, x)
        options = CastOptions(place, self.forward_dtype, True, False, *self._scaling)
        output = torch.empty(x.shape, dtype=dtype, device=x.device) if keep_output else None
        quantized, total, statistics = cast_norm(x, residual, *norm, slots, options, self.counts, output)
        return Normed(quantized, total, statistics, output)

    def gradient(
        self, dy: Tensor, index: int, rowwise: bool, columnwise: bool, sums_dtype: torch.dtype | None
    ) -> tuple[Quantized, Tensor | None]:
        key = (index, rowwise, columnwise, sums_dtype, dy.shape, dy.stride(), dy.dtype, dy.device)
        plan = self._plans.get(key) if runs_kernels(dy) else None
        if plan is not None:
            return plan(dy, None, self.slots, self.counts)
        return self._first(key, dy, None, "", index, self.backward_dtype, rowwise, columnwise, sums_dtype)

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
        layouts = (da.shape, da.stride(), da.dtype, da.device, h.shape, h.stride(), h.dtype)
        key = (index, rowwise, columnwise, sums_dtype, name, layouts)
        plan = self._plans.get(key) if runs_kernels(da) else None
        if plan is not None:
            return plan(da, h, self.slots, self.counts)
        return self._first(key, da, h, name, index, self.backward_dtype, rowwise, columnwise, sums_dtype)

    def _first(
        self,
        key: tuple[Any, ...],
        x: Tensor,
        h: Tensor | None,
        name: str,
        index: int,
        dtype: torch.dtype,
        rowwise: bool,
        columnwise: bool,
        sums_dtype: torch.dtype | None,
    ) -> tuple[Quantized, Tensor | None]:
        """Cast x, or name(x), or the gradient of h from x, that of name(h); keep the plan, if kernels do it."""
        if runs_kernels(x):
            options = CastOptions(index, dtype, rowwise, columnwise, *self._scaling)
            plan = plan_cast(x, h, name, self.slots, options, self.counts, sums_dtype)
            if plan is not None:
                keep(self._plans, key, plan, MOST_PLANS)
                return plan(x, h, self.slots, self.counts)
        slots, place = self._slots(index, x)
        options = CastOptions(place, dtype, rowwise, columnwise, *self._scaling)
        quantized, sums = cast(x, h, name, slots, options, self.counts, sums_dtype is not None)
        return quantized, None if sums is None else sums.to(sums_dtype)


class DelayedCasts(_TensorwiseCasts):
    """Scales from the module's slots.

    Args: slots (n, 4), counts (n, 3) or None; record: raise the slots' amaxes. Without it nothing of the slots changes
        but the amax of one that has no scale yet, so pass a copy.
    """

    def __init__(self, recipe: DelayedScaling, slots: Tensor, counts: Tensor | None, record: bool) -> None:
        super().__init__(recipe, record, recipe.margin)
        self.slots, self.counts = slots, counts


class CurrentCasts(_TensorwiseCasts):
    """Scales from the tensors themselves: without slots, or with an empty one for each cast."""

    def __init__(self, recipe: Float8CurrentScaling) -> None:
        super().__init__(recipe, power_of_two=recipe.use_power_2_scales)


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


def stateless_casts(recipe: Recipe) -> Casts:
    """The casts of a recipe that keeps no state from step to step.

    Raises: UserError for a recipe of no known kind.
    """
    if isinstance(recipe, Float8CurrentScaling):
        return CurrentCasts(recipe)
    if isinstance(recipe, Float8BlockScaling | MXFP8BlockScaling):
        return BlockCasts(recipe)
    raise UserError(
        f"fp8_autocast: recipe is {recipe!r}; pass DelayedScaling, Float8CurrentScaling, Float8BlockScaling or "
        "MXFP8BlockScaling."
    )


def recording_casts(recipe: DelayedScaling, state: Slots) -> Casts:
    """The casts of a training step under delayed scaling: amaxes enter the module's state."""
    return DelayedCasts(recipe, state.slots, state.counts if _counting else None, record=True)


def passing_casts(recipe: DelayedScaling, state: Slots | None, slots: int, device: torch.device) -> Casts:
    """The casts of evaluation under delayed scaling, by the scales of training: nothing of the state changes.

    Args: state: None for a module that has not trained; then scales come from the tensors. slots: how many.
    """
    copy = torch.zeros(slots, SLOT, dtype=torch.float32, device=device) if state is None else state.slots.clone()
    return DelayedCasts(recipe, copy, None, record=False)


_counting = False


def count_saturation(enabled: bool = True) -> None:
    """Count, in training under delayed scaling, how many elements each cast saturates and how many it flushes to zero.

    The counts stay on the device, in the modules' `fp8_state.counts`: (slots, 3) int64 of elements, saturated, flushed.
    """
    global _counting
    _counting = enabled


def is_counting() -> bool:
    """Whether casts are counted now."""
    return _counting
