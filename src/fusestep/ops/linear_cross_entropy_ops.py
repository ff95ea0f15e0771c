"""The raw ops of linear_cross_entropy: a pass of linear_cross_entropy_passes.py each, on operands as they are given.

`run_…` are what the ops do: they cast the operands and work out the chunks. x is (tokens, width). Of a vocabulary that
ranks share they are called themselves, as an op takes no process group.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusestep.ops import linear_cross_entropy_passes as passes
from fusestep.ops.cross_entropy_parts import Share
from fusestep.ops.cross_entropy_rows import OPTIONS_SCHEMA, Options, statistics_dtype
from fusestep.ops.registry import define


def run_losses(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    token_weights: Tensor | None,
    dtype: torch.dtype,
    chunk: int,
    *options: Any,
    share: Share | None = None,
) -> tuple[Tensor, Tensor]:
    """(losses, lse) of operands that are cast to `dtype`; chunk 0 is the rule's."""
    chunk = chunk or passes.chunk_of(x.shape[0], weight.shape[0], weight.shape[1], dtype)
    with torch.autocast(x.device.type, enabled=False):
        return passes.losses_pass(
            *_cast(x, weight, bias, dtype), target, token_weights, Options(*options), chunk, share
        )


def run_gradients(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    token_weights: Tensor | None,
    upstream: Tensor,
    dtype: torch.dtype,
    sum_dtype: torch.dtype,
    x_wanted: bool,
    weight_wanted: bool,
    bias_wanted: bool,
    chunk: int,
    *options: Any,
    share: Share | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(losses, dx, dweight, dbias) of operands that are cast to `dtype`; empty for a gradient that is not wanted."""
    chunk = chunk or passes.chunk_of(x.shape[0], weight.shape[0], weight.shape[1], dtype)
    with torch.autocast(x.device.type, enabled=False):
        losses, *gradients = passes.gradients_pass(
            *_cast(x, weight, bias, dtype),
            target,
            token_weights,
            upstream,
            Options(*options),
            chunk,
            sum_dtype,
            (x_wanted, weight_wanted, bias_wanted),
            share,
        )
    dx, dweight, dbias = (losses.new_empty(0) if gradient is None else gradient for gradient in gradients)
    return losses, dx, dweight, dbias


def run_recomputed(
    dlosses: Tensor,
    lse: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    token_weights: Tensor | None,
    dtype: torch.dtype,
    x_wanted: bool,
    weight_wanted: bool,
    bias_wanted: bool,
    *options: Any,
    share: Share | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dweight, dbias) in the dtypes of x, weight and bias; empty for a gradient that is not wanted."""
    columns = passes.slice_of(x.shape[0], weight.shape[0], dtype)
    # A product is written in its operands' dtype, or in a wider one.
    weight_dtype = dtype if weight.dtype.itemsize <= dtype.itemsize else statistics_dtype(dtype)
    with torch.autocast(x.device.type, enabled=False):
        dx, dweight, dbias = passes.recomputing_pass(
            *_cast(x, weight, bias, dtype),
            target,
            token_weights,
            dlosses,
            lse,
            Options(*options),
            columns,
            weight_dtype,
            (x_wanted, weight_wanted, bias_wanted),
            share,
        )
    return (
        lse.new_empty(0) if dx is None else dx.to(x.dtype),
        lse.new_empty(0) if dweight is None else dweight.to(weight.dtype),
        lse.new_empty(0) if dbias is None or bias is None else dbias.to(bias.dtype),
    )


def _cast(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None]:
    return (
        passes.contiguous_rows(x.to(dtype)),
        passes.contiguous_rows(weight.to(dtype)),
        None if bias is None else bias.to(dtype),
    )


def _losses_fake(x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    losses = x.new_empty(x.shape[0], dtype=statistics_dtype(rest[1]))
    return losses, torch.empty_like(losses)


def _gradients_fake(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,  # noqa: ARG001
    target: Tensor,  # noqa: ARG001
    token_weights: Tensor | None,  # noqa: ARG001
    upstream: Tensor,
    dtype: torch.dtype,
    sum_dtype: torch.dtype,
    x_wanted: bool,
    weight_wanted: bool,
    bias_wanted: bool,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        upstream.new_empty(x.shape[0]),
        x.new_empty(x.shape, dtype=passes.input_gradient_dtype(dtype)) if x_wanted else upstream.new_empty(0),
        x.new_empty(weight.shape, dtype=sum_dtype) if weight_wanted else upstream.new_empty(0),
        upstream.new_empty(weight.shape[0]) if bias_wanted else upstream.new_empty(0),
    )


def _recomputed_fake(
    dlosses: Tensor,  # noqa: ARG001
    lse: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,  # noqa: ARG001
    token_weights: Tensor | None,  # noqa: ARG001
    dtype: torch.dtype,  # noqa: ARG001
    x_wanted: bool,
    weight_wanted: bool,
    bias_wanted: bool,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        x.new_empty(x.shape) if x_wanted else lse.new_empty(0),
        weight.new_empty(weight.shape) if weight_wanted else lse.new_empty(0),
        bias.new_empty(bias.shape) if bias_wanted and bias is not None else lse.new_empty(0),
    )


_OPERANDS = "Tensor x, Tensor weight, Tensor? bias, Tensor target, Tensor? token_weights"
_WANTED = "bool x_wanted, bool weight_wanted, bool bias_wanted"
linear_cross_entropy_losses = define(
    f"linear_cross_entropy_losses({_OPERANDS}, ScalarType dtype, int chunk, {OPTIONS_SCHEMA}) -> (Tensor, Tensor)",
    run_losses,
    _losses_fake,
)
linear_cross_entropy_gradients = define(
    f"linear_cross_entropy_gradients({_OPERANDS}, Tensor upstream, ScalarType dtype, ScalarType sum_dtype, {_WANTED}, "
    f"int chunk, {OPTIONS_SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor)",
    run_gradients,
    _gradients_fake,
)
linear_cross_entropy_recomputed = define(
    f"linear_cross_entropy_recomputed(Tensor dlosses, Tensor lse, {_OPERANDS}, ScalarType dtype, {_WANTED}, "
    f"{OPTIONS_SCHEMA}) -> (Tensor, Tensor, Tensor)",
    run_recomputed,
    _recomputed_fake,
)
