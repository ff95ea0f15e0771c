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


def _uses_triton(centred: bool, device: torch.device, compute: torch.dtype) -> bool:
    return dispatch.uses_triton(_name(centred), device, None if compute is torch.float32 else _NO_DOUBLE)


_NO_DOUBLE = "the kernels compute in fp32, not fp64"


def explain(centred: bool, weight: Tensor | None, bias: Tensor | None) -> dispatch.Choice:
    """What a norm with these parameters gets; one without any is taken to be on torch's default device."""
    device = torch.get_default_device() if weight is None else weight.device
    unsupported = None if computing_dtype(weight, bias) is torch.float32 else _NO_DOUBLE
    return dispatch.explain_choice(_name(centred), device.type, device.index, unsupported)


def sum_dtype(x: Tensor, residual: Tensor) -> torch.dtype:
    """The dtype of x + residual: theirs, or where they differ the wider one, as torch adds."""
    return x.dtype if x.dtype == residual.dtype else torch.promote_types(x.dtype, residual.dtype)


def _run_forward(
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
    if not _uses_triton(centred, x.device, statistics.dtype):
        y, total, statistics = forward_reference(x, residual, weight, bias, width, eps, centred, dtype)
        return y.contiguous(), None if residual is None else total.contiguous(), statistics
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


def _run_backward(
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
    if not _uses_triton(centred, x.device, statistics.dtype):
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
    y, _, statistics = _run_forward(x, None, *parameters)
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
    dx, dweight, dbias = _run_backward(dy, *parameters)
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
    _run_forward,
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


def _is_plain(x: Tensor) -> bool:
    """Whether nothing watches or traces the call, so that the op's implementation can be called without the op.

    That spares the host a third of the call. Tracing, fake tensors, other subclasses and dispatch modes (activation
    checkpointing that selects ops, counters of operations) see the op.
    """
    return (type(x) is Tensor or type(x) is torch.nn.Parameter) and torch._C._len_torch_dispatch_stack() == 0


class _Norm(torch.autograd.Function):
    """y, or (y, x + residual), with the gradient in one kernel.

    `settings` are (width, eps, centred, dtype of y, whether to keep the output for backward, whether x is plain).
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        settings: tuple[int, float, bool, torch.dtype, bool, bool],
    ) -> Any:
        width, eps, centred, dtype, keep_output, plain = settings
        if plain:
            y, total, statistics = _run_forward(x, residual, weight, bias, width, eps, centred, dtype)
        elif residual is None:
            y, statistics = norm_forward(x, weight, bias, width, eps, centred, dtype)
            total = None
        else:
            y, total, statistics = norm_forward_residual(x, residual, weight, bias, width, eps, centred, dtype)
        normed = x if total is None else total
        ctx.save_for_backward(y if keep_output else normed, statistics, weight, bias)
        ctx.settings = settings
        ctx.dtypes = (normed.dtype, x.dtype, None if residual is None else residual.dtype)
        if total is None:
            return y
        ctx.set_materialize_grads(False)
        return y, total

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dsum: Tensor | None = None) -> Any:
        kept, statistics, weight, bias = ctx.saved_tensors
        width, eps, centred, _, from_output, plain = ctx.settings
        dtype, x_dtype, residual_dtype = ctx.dtypes
        x_needed, residual_needed, weight_needed, bias_needed, _ = ctx.needs_input_grad
        if dy is None:  # only the sum was used
            dx, dweight, dbias = dsum, None, None
        elif plain and _is_plain(dy):
            if torch.is_grad_enabled():  # create_graph=True
                run = _differentiable_backward
                dx, dweight, dbias = run(dy, dsum, kept, weight, bias, width, eps, centred, from_output, dtype)
            else:
                dx, dweight, dbias = _run_backward(
                    *(dy, dsum, kept, statistics, weight, bias, width, centred, from_output, dtype),
                    weight_needed,
                    bias_needed,
                )
        else:
            dx, dweight, dbias = norm_backward(
                *(dy, dsum, kept, statistics, weight, bias, width, centred, from_output, dtype),
                weight_needed,
                bias_needed,
            )
        dresidual = dx if residual_needed else None
        if dx is not None and dx.dtype != x_dtype:
            dx = dx.to(x_dtype)
        if dresidual is not None and dresidual.dtype != residual_dtype:
            dresidual = dresidual.to(residual_dtype)
        return (
            dx if x_needed else None,
            dresidual,
            dweight if weight_needed else None,
            dbias if bias_needed else None,
            None,
        )


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
    others = _described("weight", weight), _described("bias", bias), _described("residual", residual)
    compiling = torch.compiler.is_compiling()
    check = _check.__wrapped__ if compiling else _check  # dynamo warns of a cache
    width = check(who, shape, x.shape, x.dtype, x.device, *others)
    dtype = x.dtype if residual is None else sum_dtype(x, residual)
    if x.is_cuda and dtype is not torch.float64 and torch.is_autocast_enabled("cuda"):
        dtype = torch.float32
    if eps is None:
        eps = torch.finfo(computing_dtype(x, residual, weight, None)).eps
    # What functorch calls a transform cannot look into our kernels; into PyTorch's own operations it can.
    if not compiling and torch._C._are_functorch_transforms_active():
        if _uses_triton(centred, x.device, computing_dtype(x, residual, weight, bias)):
            dispatch.announce(who, "transforms of torch.func work on PyTorch's own operations")
        y, total, _ = forward_reference(x, residual, weight, bias, width, eps, centred, dtype)
        return y if residual is None else (y, total)
    keep_output = memory_efficient and torch.is_grad_enabled() and _output_suffices(x, weight, bias, centred)
    plain = not compiling and _is_plain(x)
    return _Norm.apply(x, residual, weight, bias, (width, eps, centred, dtype, keep_output, plain))


@functools.lru_cache(maxsize=4096)
def _check(
    who: str,
    shape: tuple[int, ...],
    x_shape: torch.Size,
    x_dtype: torch.dtype,
    device: torch.device,
    *others: tuple[str, torch.Size, torch.dtype, torch.device] | None,
) -> int:
    """The width of a row; one sentence for what cannot be normalised, before anything is written.

    `others` are weight, bias and residual. Kept for each combination, since it is asked for in every call.
    """
    if not shape or x_shape[-len(shape) :] != shape:
        last = f"last dimension {x_shape[-1]}" if len(shape) == 1 and x_shape else f"shape {tuple(x_shape)}"
        mend = f"(..., {', '.join(map(str, shape))})" if shape else "at least one dimension to normalise over"
        raise UserError(
            f"{who}: x has {last} but normalized_shape is {shape}; pass x of shape {mend}, or normalise over "
            f"{tuple(x_shape[-len(shape) :]) if shape else 'the last dimension'}."
        )
    if x_dtype not in FLOATING:
        raise UserError(f"{who}: x has dtype {x_dtype}; pass float32, bfloat16, float16 or float64.")
    for other in others:
        if other is None:
            continue
        name, other_shape, dtype, other_device = other
        wanted = x_shape if name == "residual" else shape
        if other_shape != wanted:
            raise UserError(f"{who}: {name} has shape {tuple(other_shape)}; pass one of shape {tuple(wanted)}.")
        if dtype not in FLOATING:
            raise UserError(f"{who}: {name} has dtype {dtype}; pass a floating-point tensor.")
        if other_device != device:
            raise UserError(f"{who}: {name} is on {other_device} and x on {device}; move them to one device.")
    return math.prod(shape)


def _described(name: str, tensor: Tensor | None) -> tuple[str, torch.Size, torch.dtype, torch.device] | None:
    return None if tensor is None else (name, tensor.shape, tensor.dtype, tensor.device)
