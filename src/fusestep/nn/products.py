"""The products of linear layers: in FP8, of what casts made, and torch's own elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fusestep.errors import UserError
from fusestep.fp8.casts import Casts
from fusestep.fp8.context import Region
from fusestep.nn.biased_linear import linear
from fusestep.nn.fp8_module import FP8Module
from fusestep.ops.quantized import Quantized
from fusestep.ops.scaled_mm import multiply


def forward_product(casts: Casts, x: Quantized, weight: Quantized, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x · weightᵀ + bias, (rows, out); contiguous."""
    assert x.data is not None
    assert weight.data is not None
    return multiply(
        x.data,
        x.scale_inv,
        weight.data,
        weight.scale_inv,
        x.shape[0],
        weight.shape[0],
        dtype,
        bias,
        True,
        casts.block,
        casts.weight_block,
    )


def input_gradient(
    casts: Casts, dy: Quantized, weight_transposed: Tensor, weight_scale_inv: Tensor, features: int, dtype: torch.dtype
) -> Tensor:
    """dy · weight, (rows, features); contiguous."""
    assert dy.data is not None
    return multiply(
        dy.data,
        dy.scale_inv,
        weight_transposed,
        weight_scale_inv,
        dy.shape[0],
        features,
        dtype,
        None,
        False,
        casts.block,
        casts.weight_block,
    )


def weight_gradient(
    casts: Casts, dy: Quantized, x_transposed: Tensor, x_scale_inv: Tensor, features: int, dtype: torch.dtype
) -> Tensor:
    """dyᵀ · x, (out, features), in the dtype of the weight; contiguous."""
    assert dy.transposed is not None
    return multiply(
        dy.transposed,
        dy.transposed_scale_inv,
        x_transposed,
        x_scale_inv,
        dy.shape[1],
        features,
        dtype,
        None,
        False,
        casts.block,
        casts.block,
    )


def shaped(y: Tensor, x: Tensor) -> Tensor:
    """y (rows, columns) with x's leading dimensions."""
    if x.dim() == 2:
        return y
    # Not a view to autograd, which would forbid to change the output in place.
    result: Tensor = torch.ops.aten._unsafe_view.default(y, (*x.shape[:-1], y.shape[-1]))
    return result


def refusing_a_second(who: str, backward: Callable[..., tuple[Tensor | None, ...]], ctx: Any, *dy: Any) -> Any:
    """The gradients of a backward with create_graph=True, such that differentiating them again raises."""
    with torch.no_grad():
        gradients = backward(ctx, *dy)
    message = (
        f"{who} in FP8 cannot be differentiated twice, since a cast has no gradient; run the module outside of "
        "fp8_autocast where gradients of gradients are needed"
    )
    refuse: Any = torch._C._functions.DelayedError(message.encode(), len(gradients))
    return refuse(*(None if gradient is None else gradient.detach().requires_grad_() for gradient in gradients))


def plain_linear(module: FP8Module, x: Tensor, weight: Tensor, bias: Tensor | None, region: Region | None) -> Tensor:
    """torch's own product, in the dtype of torch.autocast where it is enabled.

    Raises: UserError where dtypes differ and nothing settles them: an FP8 region, as torch.autocast, does.
    """
    if x.dtype is not weight.dtype and not torch.is_autocast_enabled(x.device.type):
        if region is None or not region.enabled:
            raise UserError(
                f"{module._described()}: x has dtype {x.dtype} and the weight {weight.dtype}; convert one of them, or "
                "run under torch.autocast."
            )
        weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
    return linear(x, weight, bias)
