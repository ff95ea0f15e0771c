"""The raw ops of LayerNorm and RMSNorm, without a gradient of their own; `centred` tells them apart.

Over rows of `width` elements, the last dimensions of x:

- `norm_forward`: y and the statistics of each row (see norm_forward.py);
- `norm_forward_residual`: the same for x + residual, which it also returns;
- `norm_backward`: dx and the gradients of weight and bias (see norm_backward.py).

`run_forward` and `run_backward` are what the ops do: the kernels where they run, else the reference.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusestep import dispatch
from fusestep.ops.norm_backward import norm_backward as launch_backward
from fusestep.ops.norm_forward import norm_forward as launch_forward
from fusestep.ops.norm_reference import backward_reference, computing_dtype, forward_reference, statistics_columns
from fusestep.ops.registry import define


def row_stride(x: Tensor, width: int) -> int | None:
    """Elements from one row of x, seen as (rows, width), to the next; None if x cannot be seen so without a copy."""
    if x.is_contiguous():
        return width
    covered, stride = 1, None
    for size, step in zip(reversed(x.shape), reversed(x.stride()), strict=True):
        if size == 1:
            continue
        if covered < width:  # inside a row: contiguous
            if step != covered:
                return None
        elif stride is None:
            stride = step
            next_step = step * size
        elif step != next_step:
            return None
        else:
            next_step = step * size
        covered *= size
    return width if stride is None else stride


def _rows(x: Tensor, width: int) -> tuple[Tensor, int]:
    """x, or a contiguous copy where its rows are not evenly spaced, and its row stride."""
    stride = row_stride(x, width)
    return (x, stride) if stride is not None else (x.contiguous(), width)


def op_name(centred: bool) -> str:
    return "layer_norm" if centred else "rms_norm"


def unsupported(compute: torch.dtype) -> str | None:
    """Why the kernels cannot compute in this dtype, or None."""
    return None if compute is torch.float32 else "the kernels compute in fp32, not fp64"


def uses_triton(centred: bool, device: torch.device, compute: torch.dtype) -> bool:
    return dispatch.uses_triton(op_name(centred), device, unsupported(compute))


def sum_dtype(x: Tensor, residual: Tensor) -> torch.dtype:
    """The dtype of x + residual: theirs, or where they differ the wider one, as torch adds."""
    return x.dtype if x.dtype == residual.dtype else torch.promote_types(x.dtype, residual.dtype)


def run_forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    width: int,
    eps: float,
    centred: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """(y, x + residual or None, statistics), through the kernels or the reference."""
    y, total, statistics = _unwritten(x, residual, weight, bias, width, centred, dtype)
    if y.numel() == 0:
        return y, total, statistics
    if not uses_triton(centred, x.device, statistics.dtype):
        y, total, statistics = forward_reference(x, residual, weight, bias, width, eps, centred, dtype)
        # The reference's y is a view to autograd, and a view out of a Function cannot be changed in place.
        y = torch.ops.aten._unsafe_view(y.contiguous(), y.shape)
        return y, None if residual is None else total.contiguous(), statistics
    x, x_stride = _rows(x, width)
    residual_stride = width
    if residual is not None:
        residual, residual_stride = _rows(residual, width)
    weight, bias = _contiguous(weight), _contiguous(bias)
    launch_forward(x, residual, weight, bias, y, total, statistics, width, x_stride, residual_stride, eps)
    return y, total, statistics


def _unwritten(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    width: int,
    centred: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """What the forward returns, not yet written: for the kernels, and for tracing."""
    normed = x.dtype if residual is None else sum_dtype(x, residual)
    y = _unwritten_like(x, dtype)
    total = None if residual is None else _unwritten_like(x, normed)
    rows = x.numel() // width if width else 0
    size = (rows, statistics_columns(normed, centred))
    return y, total, torch.empty(size, dtype=computing_dtype(x, residual, weight, bias), device=x.device)


def _unwritten_like(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A contiguous tensor of x's shape; the first form costs the host a third less."""
    if x.dtype is dtype and x.is_contiguous():
        return torch.empty_like(x)
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def _contiguous(x: Tensor | None) -> Tensor | None:
    return x if x is None or x.is_contiguous() else x.contiguous()


def run_backward(
    dy: Tensor,
    dsum: Tensor | None,
    x: Tensor,
    statistics: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    width: int,
    centred: bool,
    from_output: bool,
    dtype: torch.dtype,
    weight_gradient: bool,
    bias_gradient: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(dx, dweight, dbias), through the kernels or the reference; None for a gradient that is not wanted."""
    dx = _unwritten_like(x, dtype)
    dweight = _unwritten_like(weight, weight.dtype) if weight_gradient and weight is not None else None
    dbias = _unwritten_like(bias, bias.dtype) if bias_gradient and bias is not None else None
    if dx.numel() == 0:
        return dx, None if dweight is None else dweight.zero_(), None if dbias is None else dbias.zero_()
    if not uses_triton(centred, x.device, statistics.dtype):
        dx, *gradients = backward_reference(dy, dsum, x, statistics, weight, bias, width, centred, from_output, dtype)
        for target, gradient in zip((dweight, dbias), gradients, strict=True):
            if target is not None:
                target.copy_(gradient.reshape(target.shape))
        return dx.contiguous(), dweight, dbias
    dy, dy_stride = _rows(dy, width)
    x, x_stride = _rows(x, width)
    dsum, weight, bias = _contiguous(dsum), _contiguous(weight), _contiguous(bias)
    launch_backward(dy, dsum, x, statistics, weight, bias, dx, dweight, dbias, width, dy_stride, x_stride, from_output)
    return dx, dweight, dbias


def _forward(x: Tensor, *parameters: Any) -> tuple[Tensor, Tensor]:
    y, _, statistics = run_forward(x, None, *parameters)
    return y, statistics


def _forward_fake(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    width: int,
    eps: float,  # noqa: ARG001
    centred: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    y, _, statistics = _unwritten(x, None, weight, bias, width, centred, dtype)
    return y, statistics


def _forward_residual_fake(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    width: int,
    eps: float,  # noqa: ARG001
    centred: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None, Tensor]:
    return _unwritten(x, residual, weight, bias, width, centred, dtype)


def _backward(dy: Tensor, *parameters: Any) -> tuple[Tensor, Tensor, Tensor]:
    dx, dweight, dbias = run_backward(dy, *parameters)
    # An op cannot return None: a gradient that is not wanted is an empty tensor.
    return dx, dx.new_empty(0) if dweight is None else dweight, dx.new_empty(0) if dbias is None else dbias


def _backward_fake(
    dy: Tensor,  # noqa: ARG001
    dsum: Tensor | None,  # noqa: ARG001
    x: Tensor,
    statistics: Tensor,  # noqa: ARG001
    weight: Tensor | None,
    bias: Tensor | None,
    width: int,  # noqa: ARG001
    centred: bool,  # noqa: ARG001
    from_output: bool,  # noqa: ARG001
    dtype: torch.dtype,
    weight_gradient: bool,
    bias_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    dx = _unwritten_like(x, dtype)
    dweight = _unwritten_like(weight, weight.dtype) if weight_gradient and weight is not None else dx.new_empty(0)
    dbias = _unwritten_like(bias, bias.dtype) if bias_gradient and bias is not None else dx.new_empty(0)
    return dx, dweight, dbias


_ROW_ARGUMENTS = "Tensor? weight, Tensor? bias, int width, float eps, bool centred, ScalarType dtype"
norm_forward = define(f"norm_forward(Tensor x, {_ROW_ARGUMENTS}) -> (Tensor, Tensor)", _forward, _forward_fake)
norm_forward_residual = define(
    f"norm_forward_residual(Tensor x, Tensor residual, {_ROW_ARGUMENTS}) -> (Tensor, Tensor, Tensor)",
    run_forward,
    _forward_residual_fake,
)
norm_backward = define(
    "norm_backward(Tensor dy, Tensor? dsum, Tensor x, Tensor statistics, Tensor? weight, Tensor? bias, int width, "
    "bool centred, bool from_output, ScalarType dtype, bool weight_gradient, bool bias_gradient) "
    "-> (Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
)
