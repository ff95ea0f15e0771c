"""What LayerNorm and RMSNorm share: the raw ops and the gradient. `centred` tells them apart: LayerNorm centres rows.

Raw ops (no gradient of their own), over rows of `width` elements, the last dimensions of x:

- `norm_forward`: y and the statistics of each row (see norm_forward.py);
- `norm_forward_residual`: the same for x + residual, which it also returns;
- `norm_backward`: dx and the gradients of weight and bias (see norm_backward.py).

The gradient is an autograd.Function around them. Backward keeps the normalised input, or with memory_efficient=True
the output in its place. From the output x̂ = (y − bias) / weight, which a weight near zero, or small beside its bias,
makes impossible; such weights keep the input instead (`_output_suffices`), so that gradients are right for all weights.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusestep import dispatch
from fusestep.errors import UserError
from fusestep.ops.norm_backward import norm_backward as launch_backward
from fusestep.ops.norm_forward import norm_forward as launch_forward
from fusestep.ops.norm_reference import backward_reference, computing_dtype, forward_reference, statistics_columns
from fusestep.ops.registry import define

FLOATING = frozenset((torch.float32, torch.bfloat16, torch.float16, torch.float64))


# ---- raw ops


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


def _name(centred: bool) -> str:
    return "layer_norm" if centred else "rms_norm"


def _unsupported(*tensors: Tensor | None) -> str | None:
    return "the kernels compute in fp32, not fp64" if computing_dtype(*tensors) == torch.float64 else None


def _uses_triton(centred: bool, device: torch.device, *tensors: Tensor | None) -> bool:
    return dispatch.uses_triton(_name(centred), device, _unsupported(*tensors))


def explain(centred: bool, weight: Tensor | None, bias: Tensor | None) -> dispatch.Choice:
    """What a norm with these parameters gets; one without any is taken to be on torch's default device."""
    device = torch.get_default_device() if weight is None else weight.device
    return dispatch.explain_choice(_name(centred), device.type, device.index, _unsupported(weight, bias))


def _empty_forward(
    total: Tensor, weight: Tensor | None, bias: Tensor | None, width: int, centred: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Unwritten y and statistics, for the kernels and for tracing."""
    y = torch.empty_like(total, dtype=dtype, memory_format=torch.contiguous_format)
    rows = total.numel() // width if width else 0
    return y, total.new_empty((rows, statistics_columns(total.dtype, centred)), dtype=computing_dtype(total, weight, bias))


def _forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    width: int,
    eps: float,
    centred: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    if x.numel() == 0:
        return _empty_forward(x, weight, bias, width, centred, dtype)
    if not _uses_triton(centred, x.device, x, weight, bias):
        y, _, statistics = forward_reference(x, None, weight, bias, width, eps, centred, dtype)
        return y.contiguous(), statistics
    y, statistics = _empty_forward(x, weight, bias, width, centred, dtype)
    x, x_stride = _rows(x, width)
    launch_forward(x, None, weight, bias, y, None, statistics, width, x_stride, width, eps)
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
    return _empty_forward(x, weight, bias, width, centred, dtype)


def _forward_residual(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    width: int,
    eps: float,
    centred: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    if x.numel() == 0:
        return _forward_residual_fake(x, residual, weight, bias, width, eps, centred, dtype)
    if not _uses_triton(centred, x.device, x, residual, weight, bias):
        y, total, statistics = forward_reference(x, residual, weight, bias, width, eps, centred, dtype)
        return y.contiguous(), total.contiguous(), statistics
    y, total, statistics = _forward_residual_fake(x, residual, weight, bias, width, eps, centred, dtype)
    x, x_stride = _rows(x, width)
    residual, residual_stride = _rows(residual, width)
    launch_forward(x, residual, weight, bias, y, total, statistics, width, x_stride, residual_stride, eps)
    return y, total, statistics


def _forward_residual_fake(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    width: int,
    eps: float,  # noqa: ARG001
    centred: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    total = torch.empty_like(x, dtype=sum_dtype(x, residual), memory_format=torch.contiguous_format)
    y, statistics = _empty_forward(total, weight, bias, width, centred, dtype)
    return y, total, statistics


def sum_dtype(x: Tensor, residual: Tensor) -> torch.dtype:
    """The dtype of x + residual: theirs, or where they differ the wider one, as torch adds."""
    return x.dtype if x.dtype == residual.dtype else torch.promote_types(x.dtype, residual.dtype)


def _backward(
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
) -> tuple[Tensor, Tensor, Tensor]:
    dx, dweight, dbias = _backward_fake(
        dy,
        dsum,
        x,
        statistics,
        weight,
        bias,
        width,
        centred,
        from_output,
        dtype,
        weight_gradient,
        bias_gradient,
    )
    if x.numel() == 0:
        return dx, dweight.zero_(), dbias.zero_()
    if not _uses_triton(centred, x.device, x, weight, bias, dy, dsum):
        dx, *gradients = backward_reference(dy, dsum, x, statistics, weight, bias, width, centred, from_output, dtype)
        for target, gradient in zip((dweight, dbias), gradients, strict=True):
            if target.numel():
                target.copy_(gradient.reshape(target.shape))
        return dx.contiguous(), dweight, dbias
    dy, dy_stride = _rows(dy, width)
    x, x_stride = _rows(x, width)
    launch_backward(
        dy,
        None if dsum is None else dsum.contiguous(),
        x,
        statistics,
        weight,
        bias,
        dx,
        dweight if weight_gradient else None,
        dbias if bias_gradient else None,
        width,
        dy_stride,
        x_stride,
        from_output,
    )
    return dx, dweight, dbias


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
    dx = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    # A gradient that nobody wants is an empty tensor, since an op cannot return None.
    dweight = torch.empty_like(weight) if weight_gradient and weight is not None else x.new_empty(0)
    dbias = torch.empty_like(bias) if bias_gradient and bias is not None else x.new_empty(0)
    return dx, dweight, dbias


_ROW_ARGUMENTS = "Tensor? weight, Tensor? bias, int width, float eps, bool centred, ScalarType dtype"
norm_forward = define(f"norm_forward(Tensor x, {_ROW_ARGUMENTS}) -> (Tensor, Tensor)", _forward, _forward_fake)
norm_forward_residual = define(
    f"norm_forward_residual(Tensor x, Tensor residual, {_ROW_ARGUMENTS}) -> (Tensor, Tensor, Tensor)",
    _forward_residual,
    _forward_residual_fake,
)
norm_backward = define(
    "norm_backward(Tensor dy, Tensor? dsum, Tensor x, Tensor statistics, Tensor? weight, Tensor? bias, int width, "
    "bool centred, bool from_output, ScalarType dtype, bool weight_gradient, bool bias_gradient) "
    "-> (Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
)


# ---- gradient


class _Norm(torch.autograd.Function):
    """y, or (y, x + residual), with the gradient in one kernel."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        width: int,
        eps: float,
        centred: bool,
        dtype: torch.dtype,
        keep_output: bool,
    ) -> Any:
        if residual is None:
            y, statistics = norm_forward(x, weight, bias, width, eps, centred, dtype)
            total = x
        else:
            y, total, statistics = norm_forward_residual(x, residual, weight, bias, width, eps, centred, dtype)
        ctx.save_for_backward(y if keep_output else total, statistics, weight, bias)
        ctx.settings = (width, eps, centred, keep_output, total.dtype)
        ctx.input_dtypes = (x.dtype, None if residual is None else residual.dtype)
        ctx.set_materialize_grads(False)
        return y if residual is None else (y, total)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dsum: Tensor | None = None) -> Any:
        kept, statistics, weight, bias = ctx.saved_tensors
        width, eps, centred, from_output, dtype = ctx.settings
        _, _, weight_gradient, bias_gradient, *_ = ctx.needs_input_grad
        if dy is None:  # only the sum was used
            dx, dweight, dbias = dsum, None, None
        elif torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph=True
            dx, dweight, dbias = _differentiable_backward(
                dy, dsum, kept, weight, bias, width, eps, centred, from_output, dtype
            )
        else:
            dx, dweight, dbias = norm_backward(
                dy,
                dsum,
                kept,
                statistics,
                weight,
                bias,
                width,
                centred,
                from_output,
                dtype,
                weight_gradient,
                bias_gradient,
            )
        x_dtype, residual_dtype = ctx.input_dtypes
        x_needed, residual_needed, *_ = ctx.needs_input_grad
        return (
            _cast(dx, x_dtype) if x_needed else None,
            _cast(dx, residual_dtype) if residual_needed else None,
            dweight if weight_gradient else None,
            dbias if bias_gradient else None,
            *(None,) * 5,
        )


def _cast(gradient: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return gradient if gradient is None or gradient.dtype == dtype else gradient.to(dtype)


def _differentiable_backward(
    dy: Tensor,
    dsum: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    width: int,
    eps: float,
    centred: bool,
    from_output: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The gradients as a graph of PyTorch's own operations, for a gradient of theirs; x is the normalised input."""
    if from_output:
        raise RuntimeError(
            f"{_name(centred)} with memory_efficient=True keeps no input and cannot be differentiated twice; "
            "build it with memory_efficient=False."
        )
    _, _, statistics = forward_reference(x, None, weight, bias, width, eps, centred, dtype)
    dx, dweight, dbias = backward_reference(dy, dsum, x, statistics, weight, bias, width, centred, False, dtype)
    return (
        dx,
        None if weight is None else dweight.to(weight.dtype).reshape(weight.shape),
        None if bias is None else dbias.to(bias.dtype).reshape(bias.shape),
    )


def _output_suffices(x: Tensor, weight: Tensor | None, bias: Tensor | None, centred: bool) -> bool:
    """Whether x̂ can be had from the output: |weight| ≥ 1/64 and |bias| ≤ 4 |weight| everywhere.

    Then the rounding of y to its dtype, unit roundoff u, costs x̂ at most u · (|x̂| + 4). The answer is on the device:
    asking for it costs the host a wait in every forward. Where waiting is impossible, in a captured graph and under
    torch.compile (whose partitioner decides itself what is kept), the input is kept.
    """
    if weight is None and bias is None:
        return True
    if torch.compiler.is_compiling():
        return False
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    scale = torch.ones((), device=x.device) if weight is None else weight.detach().abs()
    fine = (scale >= 1 / 64).all()
    if bias is not None:
        fine &= (bias.detach().abs() <= 4 * scale).all()
    if fine.item():
        return True
    _tell_that_input_is_kept(_name(centred))
    return False


@functools.cache
def _tell_that_input_is_kept(who: str) -> None:
    """Say so once a process: no gradient suffers, but no memory is saved."""
    dispatch.logger.warning(
        "%s(memory_efficient=True) keeps its input: a weight is below 1/64 or below a quarter of its bias, so that the "
        "output does not determine the normalised input",
        who,
    )


# ---- the function behind both


def normalise(
    centred: bool,
    who: str,
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float | None,
    residual: Tensor | None,
    memory_efficient: bool,
) -> Any:
    """Check the arguments, choose the output's dtype, and run; see layer_norm.layer_norm and rms_norm.rms_norm."""
    shape = tuple(normalized_shape)
    _check(who, x, shape, weight, bias, residual)
    normed_dtype = x.dtype if residual is None else sum_dtype(x, residual)
    dtype = normed_dtype
    if x.is_cuda and dtype != torch.float64 and torch.is_autocast_enabled("cuda"):
        dtype = torch.float32
    width = math.prod(shape)
    if eps is None:
        eps = torch.finfo(computing_dtype(x, residual, weight)).eps
    # What functorch calls a transform cannot look into our kernels; PyTorch's own operations it can.
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        if _uses_triton(centred, x.device, x, residual, weight, bias):
            dispatch.announce(who, "transforms of torch.func work on PyTorch's own operations")
        y, total, _ = forward_reference(x, residual, weight, bias, width, eps, centred, dtype)
        return y if residual is None else (y, total)
    keep_output = memory_efficient and torch.is_grad_enabled() and _output_suffices(x, weight, bias, centred)
    return _Norm.apply(x, residual, weight, bias, width, float(eps), centred, dtype, keep_output)


def _check(
    who: str, x: Tensor, shape: tuple[int, ...], weight: Tensor | None, bias: Tensor | None, residual: Tensor | None
) -> None:
    """One sentence for what cannot be normalised, before anything is written."""
    if not shape or x.shape[-len(shape) :] != shape:
        last = f"last dimension {x.shape[-1]}" if len(shape) == 1 and x.dim() else f"shape {tuple(x.shape)}"
        mend = f"(..., {', '.join(map(str, shape))})" if shape else "at least one dimension to normalise over"
        raise UserError(
            f"{who}: x has {last} but normalized_shape is {shape}; pass x of shape {mend}, or normalise over "
            f"{tuple(x.shape[-len(shape) :]) if shape else 'the last dimension'}."
        )
    if x.dtype not in FLOATING:
        raise UserError(f"{who}: x has dtype {x.dtype}; pass float32, bfloat16, float16 or float64.")
    dispatch.one_device(who, x=x, weight=weight, bias=bias, residual=residual)
    for name, tensor, wanted in (("weight", weight, shape), ("bias", bias, shape), ("residual", residual, x.shape)):
        if tensor is None:
            continue
        if tensor.shape != wanted:
            raise UserError(f"{who}: {name} has shape {tuple(tensor.shape)}; pass one of shape {tuple(wanted)}.")
        if tensor.dtype not in FLOATING:
            raise UserError(f"{who}: {name} has dtype {tensor.dtype}; pass a floating-point tensor.")
