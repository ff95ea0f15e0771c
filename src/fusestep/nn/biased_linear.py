"""x · weightᵀ + bias in high precision, with gradients that no pass of their own sums up or casts.

torch's own sum over the rows of an output's gradient takes two to six times as long as reading that gradient does; our
column sums take little more. Where a product multiplies by copies in 16 bits of parameters in fp32 (operands.py), it
writes the weight's gradient in fp32 at once, and the sums as well: rounded once, to what the optimizer reads. All else,
forward and backward, are torch's own products.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fusestep.language import interpreted
from fusestep.nn.fp8_module import plain_apply
from fusestep.nn.operands import wholes
from fusestep.ops import column_sums
from fusestep.ops.registry import is_plain
from fusestep.transforms import is_transformed

#: From so many elements of the output on. Of fewer, torch's sums take the device less than a backward in Python, in
#: place of one in C++, takes the host.
WORTHWHILE = 1 << 22


class _BiasedLinear(torch.autograd.Function):
    """The product of operands of one dtype; keeps of x and weight what a gradient needs, as torch does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        x_needed, weight_needed, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if weight_needed else None, weight if x_needed else None)
        ctx.shape = x.shape
        return _product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = dy.reshape(-1, dy.shape[-1])
        dx = None if weight is None else torch.mm(rows, weight).view(ctx.shape)
        dweight = None if x is None else torch.mm(rows.t(), x.reshape(-1, x.shape[-1]))
        # With create_graph=True the sums are differentiated, too.
        dbias = rows.sum(0) if torch.is_grad_enabled() else column_sums.column_sums(rows)
        return dx, dweight, dbias if ctx.needs_input_grad[2] else None


_apply = plain_apply(_BiasedLinear)


class _CopiedLinear(torch.autograd.Function):
    """The product by copies of a weight and a bias, both in x's dtype; gradients go to the parameters, in fp32.

    `weights` says how many of the parameters are the weight's, in order; the others are the bias's.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, weights: int, *parameters: Tensor) -> Tensor:
        x_needed, _, _, _, *needed = ctx.needs_input_grad
        # By its version a saved copy tells a backward that comes after the next step of the optimizer.
        ctx.save_for_backward(x if any(needed[:weights]) else None, weight if x_needed else None)
        ctx.shape, ctx.weights, ctx.sums = x.shape, weights, any(needed[weights:])
        # Not saved, which would have them moved or copied by hooks on saved tensors.
        ctx.parameters = parameters
        return _product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        parameters, count = ctx.parameters, ctx.weights
        dtype = parameters[0].dtype
        rows = dy.reshape(-1, dy.shape[-1])
        is_differentiated = torch.is_grad_enabled()  # create_graph=True
        dx = dweight = dbias = None
        if weight is not None:
            if is_differentiated:
                (weight,) = wholes((weight,), (count,), *parameters[:count])
            dx = torch.mm(rows, weight).view(ctx.shape)
        if x is not None:
            x = x.reshape(-1, x.shape[-1])
            if rows.is_cuda and _WRITES_WIDE and not is_differentiated and rows.shape[0]:
                dweight = torch.mm(rows.t(), x, out_dtype=dtype)
            else:
                dweight = torch.mm(rows.t(), x).to(dtype)
        if ctx.sums:
            is_ours = not is_differentiated and dy.numel() >= WORTHWHILE and _runs_sums(rows)
            dbias = column_sums.column_sums(rows, dtype) if is_ours else rows.sum(0, dtype=dtype)
        return dx, None, None, None, *_split(dweight, parameters[:count]), *_split(dbias, parameters[count:])


_apply_copied = plain_apply(_CopiedLinear)

#: Whether torch multiplies 16-bit matrices into one in fp32 on the devices that it calls CUDA: not for ROCm.
_WRITES_WIDE = torch.version.hip is None


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x · weightᵀ + bias within a Function's forward."""
    rows = x.reshape(-1, x.shape[-1])
    y = torch.mm(rows, weight.t()) if bias is None else torch.addmm(bias, rows, weight.t())
    if x.dim() == 2:
        return y
    # Not a view to autograd, which would forbid to change the output in place.
    shaped: Tensor = torch.ops.aten._unsafe_view.default(y, (*x.shape[:-1], y.shape[-1]))
    return shaped


def _split(gradient: Tensor | None, parameters: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """The rows of a gradient that are each parameter's."""
    if gradient is None or len(parameters) == 1:
        return [gradient] * len(parameters)
    rows: Sequence[Tensor] = gradient.split([parameter.shape[0] for parameter in parameters])
    return rows


def linear_by_copies(
    x: Tensor, weight: Tensor, bias: Tensor | None, weights: Sequence[Tensor], biases: Sequence[Tensor] | None
) -> Tensor:
    """x (…, in_features) by the copies of parameters that `autocast_operands` gave, in their dtype.

    Args:
        weight, bias: the copies.
        weights, biases: the parameters that they are of, which get the gradients, in their own dtype; None for a bias
            that gets none, or that is not there.
    """
    y: Tensor = _apply_copied(x.to(weight.dtype), weight, bias, len(weights), *weights, *(biases or ()))
    return y


def sums_copied_bias(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the gradient of a bias that a product adds as a copy, as `weight` is one, is worth a kernel of ours."""
    return bias is not None and _is_large(x, weight) and _runs_sums(weight)


def _is_large(x: Tensor, weight: Tensor) -> bool:
    """Whether the output has so many elements that a kernel of column sums is worth it."""
    return x.numel() // max(x.shape[-1], 1) * weight.shape[0] >= WORTHWHILE


def _runs_sums(like: Tensor) -> bool:
    """Whether the kernel runs on such tensors."""
    return (like.is_cuda or interpreted()) and column_sums.serves(like)


def sums_bias(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the gradient of this bias is worth a kernel of ours, and nothing stands against it.

    The device runs the kernel; no trace and no transform has to see torch's own operation; and x, weight and bias have
    one dtype, once torch.autocast has cast x.
    """
    return (
        bias is not None
        and bias.requires_grad
        and torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and _is_large(x, weight)
        and is_plain(x)
        and is_plain(weight)
        and is_plain(bias)
        and weight.dtype is bias.dtype is _dtype_of_product(x)
        and not is_transformed()
        and _runs_sums(weight)
    )


def _dtype_of_product(x: Tensor) -> torch.dtype:
    """The dtype in which torch.autocast, where it is enabled, multiplies x."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind) or x.dtype is torch.float64:
        return x.dtype
    return torch.get_autocast_dtype(kind)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """torch.nn.functional.linear: x (…, in_features) by weight (out_features, in_features), plus bias."""
    if bias is not None and sums_bias(x, weight, bias):
        y: Tensor = _apply(x.to(weight.dtype), weight, bias)
        return y
    return nn.functional.linear(x, weight, bias)
