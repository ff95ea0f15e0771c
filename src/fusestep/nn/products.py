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
from fusestep.ops.quantize_joined import Joined
from fusestep.ops.quantized import Quantized
from fusestep.ops.scaled_mm import multiply
from fusestep.transforms import is_mapped


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
    casts: Casts,
    dy: Quantized,
    x_transposed: Tensor,
    x_scale_inv: Tensor,
    features: int,
    dtype: torch.dtype,
    in_by_out: bool = False,
) -> Tensor:
    """dyᵀ · x, (out, features), in the dtype of the weight, or for one that is (in, out) xᵀ · dy; contiguous."""
    assert dy.transposed is not None
    of_dy, of_x = (dy.transposed, dy.transposed_scale_inv, dy.shape[1]), (x_transposed, x_scale_inv, features)
    (left, left_scale_inv, rows), (right, right_scale_inv, columns) = (of_x, of_dy) if in_by_out else (of_dy, of_x)
    return multiply(
        left,
        left_scale_inv,
        right,
        right_scale_inv,
        rows,
        columns,
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


def refuse_mapped(who: str, dy: Tensor | Joined | None) -> None:
    """Raise UserError for a gradient that belongs to a transform, or to is_grads_batched=True."""
    tensor = dy.matrices[0] if isinstance(dy, Joined) else dy
    if tensor is not None and is_mapped(tensor):
        raise UserError(
            f"{who}: transforms of torch.func and batched gradients cannot look into FP8; take one gradient after the "
            "other, or call the module outside of fp8_autocast there."
        )


def differentiated(who: str, backward: Callable[..., tuple[Tensor | None, ...]], ctx: Any, *dy: Any) -> Any:
    """The gradients of a backward in FP8 from those of its outputs, unless more is asked than a cast can give.

    With create_graph=True they are such that differentiating them again raises.

    Raises: UserError for gradients that belong to a transform.
    """
    if torch.compiler.is_compiling():
        return backward(ctx, *dy)
    for one in dy:
        refuse_mapped(who, one)
    if torch.is_grad_enabled():
        return refusing_a_second(who, backward, ctx, *dy)
    return backward(ctx, *dy)


def refusing_a_second(who: str, backward: Callable[..., tuple[Tensor | None, ...]], ctx: Any, *dy: Any) -> Any:
    """The gradients of a backward with create_graph=True, such that differentiating them again raises."""
    with torch.no_grad():
        gradients = backward(ctx, *dy)
    # They hang on dy as well, so that torch.autograd.grad, which goes no other way than to its inputs, meets it too.
    tensors = [tensor for one in dy for tensor in (one.matrices if isinstance(one, Joined) else (one,))]
    message = (
        f"{who} in FP8 cannot be differentiated twice, since a cast has no gradient; run the module outside of "
        "fp8_autocast where gradients of gradients are needed"
    )
    leaves = [None if gradient is None else gradient.detach().requires_grad_() for gradient in gradients]
    refuse: Any = torch._C._functions.DelayedError(message.encode(), len(leaves) + len(tensors))
    return tuple(refuse(*leaves, *tensors)[: len(leaves)])


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
