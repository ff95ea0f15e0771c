"""The raw ops of LayerNorm and RMSNorm, without a gradient of their own; `centred` tells them apart.

Over rows of `width` elements, the last dimensions of x:

- `norm_forward`: y and the statistics of each row (see norm_forward.py);
- `norm_forward_residual`: the same for x + residual, which it also returns;
- `norm_backward`: dx and the gradients of weight and bias (see norm_backward.py).

`run_forward` and `run_backward` are what the ops do: the kernels where they run, else the reference. Which launches the
kernels need follows from the options and the layouts of the tensors; it is worked out at the first call of each
combination and looked up in all others, which spares the host most of a call.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusestep import dispatch
from fusestep.ops.launch import PreparedLaunch
from fusestep.ops.layouts import keep, layout, row_stride
from fusestep.ops.norm_backward import BackwardLaunches, prepare_backward
from fusestep.ops.norm_forward import prepare_forward
from fusestep.ops.norm_reference import backward_reference, computing_dtype, forward_reference, statistics_columns
from fusestep.ops.registry import define


def _contiguous(x: Tensor | None) -> Tensor | None:
    return x if x is None or x.is_contiguous() else x.contiguous()


def _all_contiguous(*tensors: Tensor | None) -> bool:
    return all(tensor is None or tensor.is_contiguous() for tensor in tensors)


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


def copy_dtype_of(
    dtype: torch.dtype, x_dtype: torch.dtype | None, residual_dtype: torch.dtype | None
) -> torch.dtype | None:
    """What dx is to be written in besides `dtype`, for x or for residual; None for a gradient that nobody needs."""
    if x_dtype is not None and x_dtype is not dtype:
        return x_dtype
    return None if residual_dtype is dtype else residual_dtype


def in_dtype(dtype: torch.dtype, dx: Tensor, dx_copy: Tensor | None) -> Tensor:
    """dx in a dtype: it or its copy, where either is."""
    if dx.dtype is dtype:
        return dx
    return dx_copy if dx_copy is not None and dx_copy.dtype is dtype else dx.to(dtype)


class KnownForward(NamedTuple):
    """The forward of tensors of certain layouts: the layouts of what it writes, and its launch."""

    op: str
    device: torch.device
    y: Tensor
    total: Tensor | None
    statistics: Tensor
    launch: PreparedLaunch

    def __call__(
        self, x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """(y, x + residual or None, statistics), by the kernel."""
        empty = torch.empty_like
        y, statistics = empty(self.y), empty(self.statistics)
        total = None if self.total is None else empty(self.total)
        self.launch(x, residual, weight, bias, y, total, statistics)
        return y, total, statistics


class KnownBackward(NamedTuple):
    """Likewise for the gradients."""

    op: str
    device: torch.device
    dx: Tensor
    dx_copy: Tensor | None
    dweight: Tensor | None
    dbias: Tensor | None
    launches: BackwardLaunches

    def __call__(
        self,
        dy: Tensor,
        dsum: Tensor | None,
        x: Tensor,
        statistics: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """What `run_backward` returns, by the kernels."""
        empty = torch.empty_like
        dx = empty(self.dx)
        dx_copy = None if self.dx_copy is None else empty(self.dx_copy)
        dweight = None if self.dweight is None else empty(self.dweight)
        dbias = None if self.dbias is None else empty(self.dbias)
        self.launches(dy, dsum, x, statistics, weight, bias, dx, dx_copy, dweight, dbias)
        return dx, dweight, dbias, dx_copy


#: By options and layouts; see `keep`.
_forwards: dict[tuple[Any, ...], KnownForward] = {}
_backwards: dict[tuple[Any, ...], KnownBackward] = {}


def known_forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    width: int,
    eps: float,
    centred: bool,
    dtype: torch.dtype,
) -> KnownForward | None:
    """How `run_forward` launches on tensors of these layouts, if it ever did."""
    return _forwards.get((x.device, width, eps, centred, dtype, *layouts(x, residual, weight, bias)))


def known_backward(
    dy: Tensor,
    dsum: Tensor | None,
    x: Tensor,
    statistics: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *options: Any,
) -> KnownBackward | None:
    """How `run_backward` launches on tensors of these layouts, if it ever did; `options` as there."""
    return _backwards.get((x.device, *options, *layouts(dy, dsum, x, statistics, weight, bias)))


def layouts(*tensors: Tensor | None) -> list[tuple[torch.Size, tuple[int, ...], torch.dtype] | None]:
    return [None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors]


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
    key = (x.device, width, eps, centred, dtype, *layouts(x, residual, weight, bias))
    known = _forwards.get(key)
    if known is None or not dispatch.uses_triton(known.op, known.device):
        return _first_forward(key, x, residual, weight, bias, width, eps, centred, dtype)
    return known(x, residual, weight, bias)


def _first_forward(
    key: tuple[Any, ...],
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    width: int,
    eps: float,
    centred: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """What needs no kernel, or copies; else get to know the call and run it again."""
    options = (width, eps, centred, dtype)
    if x.numel() == 0:
        return _unwritten(x, residual, weight, bias, width, centred, dtype)
    if not uses_triton(centred, x.device, computing_dtype(x, residual, weight, bias)):
        y, total, statistics = forward_reference(x, residual, weight, bias, *options)
        # The reference's y is a view to autograd, and a view out of a Function cannot be changed in place.
        y = torch.ops.aten._unsafe_view(y.contiguous(), y.shape)
        return y, None if residual is None else total.contiguous(), statistics
    x_stride = row_stride(x, width)
    residual_stride = width if residual is None else row_stride(residual, width)
    if x_stride is None or residual_stride is None or not _all_contiguous(weight, bias):
        return run_forward(
            x if x_stride is not None else x.contiguous(),
            residual if residual_stride is not None or residual is None else residual.contiguous(),
            _contiguous(weight),
            _contiguous(bias),
            *options,
        )
    total_dtype = x.dtype if residual is None else sum_dtype(x, residual)
    rows, columns = x.numel() // width, statistics_columns(total_dtype, centred)
    itemsize = x.element_size() + (0 if residual is None else residual.element_size())
    launch = prepare_forward(x.device, rows, columns, width, x_stride, residual_stride, eps, itemsize)
    known = KnownForward(
        op_name(centred),
        x.device,
        layout(x.shape, dtype, x.device),
        None if residual is None else layout(x.shape, total_dtype, x.device),
        layout((rows, columns), torch.float32, x.device),
        launch,
    )
    keep(_forwards, key, known)
    return run_forward(x, residual, weight, bias, *options)


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
    copy_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """(dx, dweight, dbias, dx in `copy_dtype`), through the kernels or the reference; None for what is not wanted."""
    options = (width, centred, from_output, dtype, weight_gradient, bias_gradient, copy_dtype)
    key = (x.device, *options, *layouts(dy, dsum, x, statistics, weight, bias))
    known = _backwards.get(key)
    if known is None or not dispatch.uses_triton(known.op, known.device):
        return _first_backward(key, dy, dsum, x, statistics, weight, bias, *options)
    return known(dy, dsum, x, statistics, weight, bias)


def _first_backward(
    key: tuple[Any, ...],
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
    copy_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """What needs no kernel, or copies; else get to know the call and run it again."""
    wanted = (weight if weight_gradient else None, bias if bias_gradient else None)
    if x.numel() == 0:
        dweight, dbias = (None if t is None else _unwritten_like(t, t.dtype).zero_() for t in wanted)
        dx_copy = None if copy_dtype is None else _unwritten_like(x, copy_dtype)
        return _unwritten_like(x, dtype), dweight, dbias, dx_copy
    if not uses_triton(centred, x.device, statistics.dtype):
        dx, *gradients = backward_reference(dy, dsum, x, statistics, weight, bias, width, centred, from_output, dtype)
        # A gradient may share memory with another, or with dy; what an op returns may not.
        dweight, dbias = (
            None if t is None else _unwritten_like(t, t.dtype).copy_(gradient.reshape(t.shape))
            for t, gradient in zip(wanted, gradients, strict=True)
        )
        return dx.contiguous(), dweight, dbias, None if copy_dtype is None else dx.to(copy_dtype).contiguous()
    dy_stride, x_stride = row_stride(dy, width), row_stride(x, width)
    options = (width, centred, from_output, dtype, weight_gradient, bias_gradient, copy_dtype)
    if dy_stride is None or x_stride is None or not _all_contiguous(dsum, weight, bias):
        return run_backward(
            dy if dy_stride is not None else dy.contiguous(),
            _contiguous(dsum),
            x if x_stride is not None else x.contiguous(),
            statistics,
            _contiguous(weight),
            _contiguous(bias),
            *options,
        )
    launches = prepare_backward(
        x.device,
        statistics.shape,
        width,
        dy_stride,
        x_stride,
        sum(tensor.dtype.itemsize for tensor in (dy, dsum, x) if tensor is not None),
        0 if weight is None else weight.dtype.itemsize,
        from_output,
        0 if copy_dtype is None else copy_dtype.itemsize,
        *(tensor is not None for tensor in wanted),
    )
    dweight, dbias = (None if t is None else layout(t.shape, t.dtype, t.device) for t in wanted)
    dx = layout(x.shape, dtype, x.device)
    dx_copy = None if copy_dtype is None else layout(x.shape, copy_dtype, x.device)
    keep(_backwards, key, KnownBackward(op_name(centred), x.device, dx, dx_copy, dweight, dbias, launches))
    return run_backward(dy, dsum, x, statistics, weight, bias, *options)


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


def _backward(dy: Tensor, *parameters: Any) -> tuple[Tensor, ...]:
    # An op cannot return None: what is not wanted is an empty tensor.
    dx, *others = run_backward(dy, *parameters)
    return dx, *[dx.new_empty(0) if other is None else other for other in others]


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
    copy_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dx = _unwritten_like(x, dtype)
    dweight = _unwritten_like(weight, weight.dtype) if weight_gradient and weight is not None else dx.new_empty(0)
    dbias = _unwritten_like(bias, bias.dtype) if bias_gradient and bias is not None else dx.new_empty(0)
    return dx, dweight, dbias, dx.new_empty(0) if copy_dtype is None else _unwritten_like(x, copy_dtype)


_ROW_ARGUMENTS = "Tensor? weight, Tensor? bias, int width, float eps, bool centred, ScalarType dtype"
norm_forward = define(f"norm_forward(Tensor x, {_ROW_ARGUMENTS}) -> (Tensor, Tensor)", _forward, _forward_fake)
norm_forward_residual = define(
    f"norm_forward_residual(Tensor x, Tensor residual, {_ROW_ARGUMENTS}) -> (Tensor, Tensor, Tensor)",
    run_forward,
    _forward_residual_fake,
)
norm_backward = define(
    "norm_backward(Tensor dy, Tensor? dsum, Tensor x, Tensor statistics, Tensor? weight, Tensor? bias, int width, "
    "bool centred, bool from_output, ScalarType dtype, bool weight_gradient, bool bias_gradient, "
    "ScalarType? copy_dtype=None) -> (Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
)
