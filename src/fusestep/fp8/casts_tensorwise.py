"""Casts with one scale a tensor: delayed scaling's, from slots, and current scaling's, from the tensors themselves.

What a module casts again and again is planned at the first time (ops/quantize_plan.py), and an input and a weight
together (ops/quantize_pair.py), with their products where no padding is needed (ops/planned_product.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusestep import dispatch
from fusestep.fp8.casts import Casts, Norm, Normed
from fusestep.fp8.recipes import DelayedScaling, Float8CurrentScaling, Recipe
from fusestep.ops.cast_options import CastOptions
from fusestep.ops.layouts import keep
from fusestep.ops.norm_quantize import cast_norm
from fusestep.ops.planned_product import PlannedProduct, fits
from fusestep.ops.quantize import cast
from fusestep.ops.quantize_joined import Joined, JoinedPlan, plan_joined
from fusestep.ops.quantize_pair import PairPlan, plan_pair
from fusestep.ops.quantize_plan import CastPlan, check_quantize, plan_cast, runs_kernels
from fusestep.ops.quantized import Quantized
from fusestep.ops.registry import is_plain
from fusestep.ops.roll_scales import SLOT

#: Plans that one module keeps; shapes may never repeat.
MOST_PLANS = 256


class TensorwiseCasts(Casts):
    """One scale a tensor: what delayed and current scaling share, which is all but where the slots come from."""

    def __init__(self, recipe: Recipe, record: bool = False, margin: int = 0, power_of_two: bool = False) -> None:
        super().__init__(recipe)
        self._scaling = record, margin, power_of_two
        self._plans: dict[tuple[Any, ...], CastPlan] = {}
        self._pairs: dict[tuple[Any, ...], PairPlan | None] = {}
        self._joined: dict[tuple[Any, ...], JoinedPlan | None] = {}

    def _slots(self, index: int, like: Tensor) -> tuple[Tensor, int]:
        """The slots of a norm's cast, and its place in them."""
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
        is_known: bool,
        in_by_out: bool,
    ) -> PlannedProduct | None:
        if not (runs_kernels(x) and is_plain(weight) and dispatch.multiplies_fp8("scaled_mm", x.device)):
            return None
        if not fits(x, weight, bias, dtype):
            return None
        kinds = dtype, x.dtype, weight.dtype
        if not is_known and not in_by_out:
            pair = self._first_pair(x, weight, indices, columnwise, right=True)
            return None if pair is None else PlannedProduct(pair, None, *kinds, columnwise[1], in_by_out)

        def planned(matrix: Tensor, options: CastOptions, right: tuple[bool, bool]) -> CastPlan | None:
            return plan_cast(matrix, None, "", self.slots, options, self.counts, None, right=right)

        options = CastOptions(indices[0], self.forward_dtype, True, columnwise[0], *self._scaling)
        of_x, of_weight = planned(x, options, (False, not in_by_out)), None
        if not is_known:
            # Its transpose is what the product forward reads, so no cast of both takes it.
            options = CastOptions(indices[1], self.forward_dtype, columnwise[1], True, *self._scaling)
            of_weight = planned(weight, options, (True, True))
        if of_x is None or (of_weight is None and not is_known):
            return None
        return PlannedProduct(of_x, of_weight, *kinds, columnwise[1], in_by_out)

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

    def gradient_plan(
        self, dy: Tensor, index: int, rowwise: bool, columnwise: bool, sums_dtype: torch.dtype | None, right: bool
    ) -> CastPlan | None:
        if not runs_kernels(dy):
            return None
        options = CastOptions(index, self.backward_dtype, rowwise, columnwise, *self._scaling)
        return plan_cast(dy, None, "", self.slots, options, self.counts, sums_dtype, right=(False, right))

    def joined_gradient(
        self, dy: Joined, index: int, rowwise: bool, columnwise: bool, sums_dtype: torch.dtype | None
    ) -> tuple[Quantized, Tensor | None]:
        a, b, c = matrices = dy.matrices
        if not (runs_kernels(a) and is_plain(b) and is_plain(c)):
            return super().joined_gradient(dy, index, rowwise, columnwise, sums_dtype)
        layouts = (a.shape, a.stride(), b.shape, b.stride(), c.stride(), a.dtype, a.device)
        key = (index, rowwise, columnwise, sums_dtype, dy.stretches, layouts)
        if key not in self._joined:
            options = CastOptions(index, self.backward_dtype, rowwise, columnwise, *self._scaling)
            keep(self._joined, key, plan_joined(dy, self.slots, options, self.counts, sums_dtype), MOST_PLANS)
        plan = self._joined[key]
        if plan is None:
            return super().joined_gradient(dy, index, rowwise, columnwise, sums_dtype)
        return plan(matrices, self.slots, self.counts)

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
        options = CastOptions(index, dtype, rowwise, columnwise, *self._scaling)
        quantized, sums = cast(x, h, name, self.slots, options, self.counts, sums_dtype is not None)
        return quantized, None if sums is None else sums.to(sums_dtype)


class DelayedCasts(TensorwiseCasts):
    """Scales from the module's slots.

    Args: slots (n, 4), counts (n, 3) or None; record: raise the slots' amaxes. Without it nothing of the slots changes
        but the amax of one that has no scale yet, so pass a copy.
    """

    def __init__(self, recipe: DelayedScaling, slots: Tensor, counts: Tensor | None, record: bool) -> None:
        super().__init__(recipe, record, recipe.margin)
        self.slots, self.counts = slots, counts


class CurrentCasts(TensorwiseCasts):
    """Scales from the tensors themselves: without slots, or with an empty one for each cast."""

    def __init__(self, recipe: Float8CurrentScaling) -> None:
        super().__init__(recipe, power_of_two=recipe.use_power_2_scales)
