"""x · weightᵀ + bias in high precision, with the bias's gradient from a kernel of ours.

torch's own sum over the rows of an output's gradient takes two to six times as long as reading that gradient does; our
column sums take little more. All else, forward and backward, are torch's own products.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from fusestep.language import interpreted
from fusestep.nn.fp8_module import plain_apply
from fusestep.ops import column_sums
from fusestep.ops.registry import is_plain

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
        y = torch.addmm(bias, x.reshape(-1, x.shape[-1]), weight.t())
        if x.dim() == 2:
            return y
        # Not a view to autograd, which would forbid to change the output in place.
        shaped: Tensor = torch.ops.aten._unsafe_view.default(y, (*x.shape[:-1], y.shape[-1]))
        return shaped

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
        and x.numel() // max(x.shape[-1], 1) * weight.shape[0] >= WORTHWHILE
        and is_plain(x)
        and is_plain(weight)
        and is_plain(bias)
        and weight.dtype is bias.dtype is _dtype_of_product(x)
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
        and (x.is_cuda or interpreted())
        and column_sums.serves(weight)
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
