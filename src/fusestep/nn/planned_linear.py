"""Linear layers in FP8 at the least cost to the host: what a call's layouts decide is decided once.

A call takes this way where its casts and products are planned (ops/planned_product.py): sizes that take no padding, on
a device that multiplies FP8, with nothing that traces or watches. All else goes through linear_function.py,
and computes the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusestep.fp8.casts import Casts, Planned
from fusestep.nn.fp8_module import activation_dtype
from fusestep.nn.products import refuse_mapped, refusing_a_second
from fusestep.nn.quantized_weights import whole
from fusestep.ops.layouts import keep
from fusestep.ops.quantize_joined import Joined
from fusestep.ops.quantized import Quantized

#: Plans that one module keeps; shapes may never repeat.
MOST_PLANS = 256


class _PlannedLinear(torch.autograd.Function):
    """y = x · weightᵀ + bias by a plan, or q, k and v that it consists of; `call` is (the plan, the casts that it was
    made by, the sources of the weight, the weight where it is cast already, the bias as it is added, the slot of the
    gradient, whether gradients are enabled, the split into heads or None)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, call: tuple[Any, ...]) -> Any:
        planned, casts, sources, known, added, gradient_slot, grad, split = call
        shape = x.shape
        is_matrix = len(shape) == 2
        # Kernels ask for no more than where rows lie.
        rows = x if is_matrix or x.is_contiguous() else x.reshape(-1, shape[-1])
        if len(sources) > 1 and known is None:
            weight = whole(weight, sources)
        y: Tensor
        y, kept = planned.forward(rows, weight, known, added, casts.slots, casts.counts)
        if grad:
            ctx.save_for_backward(*kept)
            sums_dtype = bias.dtype if bias is not None and ctx.needs_input_grad[2] else None
            ctx.of = planned, casts, gradient_slot, shape, sums_dtype, split
        # In place: a view could not be changed by its user, and costs the host several times as much.
        y = y if is_matrix else y.resize_(*shape[:-1], y.shape[1])
        return y if split is None else split.of(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *others: Tensor) -> Any:
        is_compiling = torch.compiler.is_compiling()
        if not is_compiling:
            refuse_mapped("Linear", dy)
            if torch.is_grad_enabled():
                return refusing_a_second("Linear", _PlannedLinear.backward, ctx, dy, *others)
        kept = ctx.saved_tensors
        x_needed, weight_needed, _, _ = ctx.needs_input_grad
        planned, casts, slot, x_shape, sums_dtype, split = ctx.of
        if split is not None:
            return _of_heads(ctx, kept, split.gradient(dy, *others))
        if not (x_needed or weight_needed):
            if sums_dtype is None:
                return None, None, None, None
            return None, None, dy.reshape(-1, dy.shape[-1]).sum(0, dtype=torch.float32).to(sums_dtype), None
        key = (dy.shape, dy.dtype, x_needed, weight_needed, sums_dtype)
        plan = planned.gradient_casts.get(key)
        is_usual = (
            not is_compiling and type(dy) is Tensor and dy.is_contiguous() and not torch._C._len_torch_dispatch_stack()
        )
        if plan is None and is_usual:
            rows, right = dy.reshape(-1, dy.shape[-1]), planned.in_by_out
            plan = casts.gradient_plan(rows, slot, x_needed, weight_needed, sums_dtype, right)
            if plan is not None:
                keep(planned.gradient_casts, key, plan, MOST_PLANS)
        if plan is not None and is_usual:
            cast = plan.cast(dy, None, casts.slots, casts.counts)
            dbias = cast[4]
        else:
            q, dbias = casts.gradient(dy.reshape(-1, dy.shape[-1]), slot, x_needed, weight_needed, sums_dtype)
            cast = _as_planned(q, planned)
        dx, dweight = planned.backward(cast, kept, x_needed, weight_needed)
        if len(x_shape) != 2 and dx is not None:
            dx = dx.resize_(*x_shape) if is_usual else dx.view(x_shape)
        return dx, dweight, dbias, None


def _of_heads(ctx: Any, kept: Any, dy: Joined) -> Any:
    """The gradients from those of q, k and v."""
    x_needed, weight_needed, _, _ = ctx.needs_input_grad
    planned, casts, slot, x_shape, sums_dtype, _ = ctx.of
    if not (x_needed or weight_needed):
        return None, None, dy.together().sum(0, dtype=torch.float32).to(sums_dtype), None
    q, dbias = casts.joined_gradient(dy, slot, x_needed, weight_needed, sums_dtype)
    dx, dweight = planned.backward(_as_planned(q, planned), kept, x_needed, weight_needed)
    return None if dx is None else dx.view(x_shape), dweight, dbias, None


def _as_planned(q: Quantized, planned: Planned) -> Any:
    """A gradient that no plan of its own cast, as `Planned.backward` takes it."""
    transposed = q.transposed.t() if planned.in_by_out and q.transposed is not None else q.transposed
    return q.data, q.scale_inv, transposed, q.transposed_scale_inv, None


# Straight to backward: on its way torch looks in every call for other kinds of it that a Function may have.
_PlannedLinear._backward_cls.apply = _PlannedLinear.backward  # type: ignore[attr-defined]

# Without the part in Python of Function.apply, which serves torch.func; neither that nor torch.compile comes here.
apply_planned: Any = super(torch.autograd.Function, _PlannedLinear).apply


def call_key(x: Tensor, weight: Tensor, bias: Tensor | None, needed: tuple[bool, bool]) -> tuple[Any, ...]:
    """What decides on a call's plan: layouts, the dtype of y, which gradients of x and of the weight will be wanted.

    Args: bias: as it is added.
    """
    dtype = activation_dtype(x) if torch._C._is_any_autocast_enabled() else x.dtype
    of_bias = None if bias is None else (bias.dtype, bias.stride())
    of_weight = weight.shape, weight.stride(), weight.dtype, weight.device
    return dtype, needed, x.shape, x.stride(), x.dtype, x.device, of_bias, of_weight


def plan_linear(
    casts: Casts,
    key: tuple[Any, ...],
    x: Tensor,
    weight: Tensor,
    sources: tuple[Tensor, ...],
    bias: Tensor | None,
    slots: tuple[int, int],
    is_known: bool,
    in_by_out: bool,
) -> Planned | None:
    """The plan of a call, None where there can be none; either is kept.

    Args: key: as call_key gives it; slots: of x and of the weight; is_known: whether the weight is cast already;
        in_by_out: whether the weight is (in, out).
    """
    dtype, (x_needed, weight_needed) = key[:2]
    plans = casts.products.get(key)
    if plans is None:
        plans = keep(casts.products, key, {}, MOST_PLANS)
    if is_known not in plans:
        with torch.no_grad():
            rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
            of = rows, whole(weight, sources), bias, slots, (weight_needed, x_needed), dtype
            plans[is_known] = casts.planned_product(*of, is_known, in_by_out)
    planned: Planned | None = plans[is_known]
    return planned
