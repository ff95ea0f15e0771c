"""The raw op of the cast to FP8: launches or the reference; quantize.py says what it computes.

`run_quantize` is what the op does. Which launches it needs follows from the options and the layouts of the tensors; it
is worked out and checked at the first call of each combination and looked up in all others.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusestep import dispatch
from fusestep.errors import UserError
from fusestep.ops.activation import (
    activation_backward_reference,
    activation_reference,
    base,
    check_activation,
    is_gated,
)
from fusestep.ops.launch import PreparedLaunch
from fusestep.ops.quantize_kernel import QuantizeLaunches, prepare_quantize, prepare_transpose
from fusestep.ops.quantize_reference import padded_bytes, quantize_reference
from fusestep.ops.quantized import padded
from fusestep.ops.registry import define
from fusestep.ops.roll_scales import SLOT

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
CASTABLE = (torch.float32, torch.bfloat16, torch.float16)

#: Beyond it a margin leaves nothing of a format's range.
LARGEST_MARGIN = 16

#: What run_quantize and the raw op return: data, transposed, scale_inv and column sums.
_Outputs = tuple[Tensor | None, Tensor | None, Tensor, Tensor | None]


#: Sizes and strides.
_Shape = tuple[tuple[int, ...], tuple[int, ...]]


class _Plan(NamedTuple):
    """What a cast of tensors of certain layouts needs beside them: the layouts of what it writes, and launches."""

    data: _Shape | None
    transposed: _Shape | None
    sums: _Shape | None
    partials: _Shape | None
    launches: QuantizeLaunches


#: By options and layouts; emptied where it would hold more than MOST, since shapes may never repeat.
_plans: dict[tuple[Any, ...], _Plan] = {}
MOST = 4096


def run_quantize(
    x: Tensor,
    h: Tensor | None,
    activation: str,
    slots: Tensor,
    index: int,
    dtype: torch.dtype,
    rowwise: bool,
    columnwise: bool,
    record: bool,
    margin: int,
    power_of_two: bool,
    counts: Tensor | None,
    column_sums: bool,
) -> _Outputs:
    """Cast x; with an activation's name, the activation of x; with h too, the gradient of h from x."""
    device = x.device
    options = (activation, index, dtype, rowwise, columnwise, record, margin, power_of_two, column_sums)
    key = (*_layout(x), *_layout(h), *_layout(slots), *_layout(counts), options)
    plan = _plans.get(key)
    if plan is None or not dispatch.uses_triton("quantize", device):
        return _first(key, x, h, slots, counts, options)
    # Memory of their own, since data is often let go before its transpose.
    empty = torch.empty_strided
    data = None if plan.data is None else empty(*plan.data, dtype=dtype, device=device)
    transposed = None if plan.transposed is None else empty(*plan.transposed, dtype=dtype, device=device)
    scale_inv = empty((), (), dtype=torch.float32, device=device)
    launches = plan.launches
    written = data, transposed
    if launches.as_bytes:
        written = _as_bytes(data), _as_bytes(transposed)
    launches.amax(x, h, slots)
    if plan.sums is None:
        launches.cast(x, h, *written, scale_inv, slots, counts, None)
        return data, transposed, scale_inv, None
    sums = empty(*plan.sums, dtype=torch.float32, device=device)
    if plan.partials is None or launches.total is None:  # one tile of rows, whose sums are the whole
        launches.cast(x, h, *written, scale_inv, slots, counts, sums)
    else:
        partials = empty(*plan.partials, dtype=torch.float32, device=device)
        launches.cast(x, h, *written, scale_inv, slots, counts, partials)
        launches.total(partials, sums, None)
    return data, transposed, scale_inv, sums


def _dense(rows: int, columns: int) -> _Shape:
    return (rows, columns), (columns, 1)


def _as_bytes(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.view(torch.uint8)


def _layout(tensor: Tensor | None) -> tuple[Any, ...]:
    return (None,) if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


def _first(
    key: tuple[Any, ...],
    x: Tensor,
    h: Tensor | None,
    slots: Tensor,
    counts: Tensor | None,
    options: tuple[Any, ...],
) -> _Outputs:
    """What needs no kernel, or copies; else get to know the call and run it again."""
    activation, index, dtype, rowwise, columnwise, record, margin, power_of_two, column_sums = options
    check_quantize(
        *(x, h, activation, slots, index, dtype, rowwise, columnwise),
        *(record, margin, power_of_two, counts, column_sums),
    )
    rows, columns = cast_shape(x, h, activation)
    if rows * columns == 0 or not dispatch.uses_triton("quantize", x.device):
        with torch.no_grad():
            if h is not None:
                values = activation_backward_reference(x, h, activation)
            elif activation:
                values = activation_reference(x, activation)
            else:
                values = x
            return quantize_reference(
                *(values, slots, index, dtype, rowwise, columnwise, record, margin, power_of_two, counts, column_sums)
            )
    x_stride, h_stride = _row_stride(x), None if h is None else _row_stride(h)
    if x_stride is None or (h is not None and h_stride is None):
        return run_quantize(
            x if x_stride is not None else x.contiguous(),
            h if h is None or h_stride is not None else h.contiguous(),
            *(activation, slots, index, dtype, rowwise, columnwise, record, margin, power_of_two, counts, column_sums),
        )
    gated = bool(activation) and is_gated(activation)
    launches = prepare_quantize(
        *(x.device, rows, columns // 2 if gated and h is not None else columns, x_stride, h_stride),
        *(base(activation) if activation else "", gated, index, dtype),
        *(columnwise, record, margin, power_of_two, column_sums),
    )
    if len(_plans) >= MOST:
        _plans.clear()
    _plans[key] = _Plan(
        _dense(padded(rows), padded(columns)) if rowwise else None,
        _dense(padded(columns), padded(rows)) if columnwise else None,
        ((columns,), (1,)) if column_sums else None,
        None if launches.partials is None else _dense(*launches.partials),
        launches,
    )
    return run_quantize(
        *(x, h, activation, slots, index, dtype, rowwise, columnwise),
        *(record, margin, power_of_two, counts, column_sums),
    )


def _row_stride(x: Tensor) -> int | None:
    """Elements from one row of a matrix to the next, or None where a row is not one run of memory."""
    if x.shape[1] != 1 and x.stride(1) != 1:
        return None
    return x.shape[1] if x.shape[0] == 1 else x.stride(0)


def _quantize(x: Tensor, *options: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """An op cannot return None: what is not wanted is an empty tensor."""
    data, transposed, scale_inv, sums = run_quantize(x, *options)
    dtype = options[4]
    nothing = x.new_empty(0, dtype=torch.float32)
    return (
        x.new_empty(0, dtype=dtype) if data is None else data,
        x.new_empty(0, dtype=dtype) if transposed is None else transposed,
        scale_inv,
        nothing if sums is None else sums,
    )


def _quantize_fake(
    x: Tensor,
    h: Tensor | None,
    activation: str,
    slots: Tensor,  # noqa: ARG001
    index: int,  # noqa: ARG001
    dtype: torch.dtype,
    rowwise: bool,
    columnwise: bool,
    record: bool,  # noqa: ARG001
    margin: int,  # noqa: ARG001
    power_of_two: bool,  # noqa: ARG001
    counts: Tensor | None,  # noqa: ARG001
    column_sums: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, columns = cast_shape(x, h, activation)
    return (
        x.new_empty((padded(rows), padded(columns)) if rowwise else 0, dtype=dtype),
        x.new_empty((padded(columns), padded(rows)) if columnwise else 0, dtype=dtype),
        x.new_empty((), dtype=torch.float32),
        x.new_empty(columns if column_sums else 0, dtype=torch.float32),
    )


def cast_shape(x: Tensor, h: Tensor | None, activation: str) -> tuple[int, int]:
    """Rows and columns of what is cast."""
    rows, columns = x.shape if h is None else h.shape
    return rows, columns // 2 if activation and h is None and is_gated(activation) else columns


_transposes: dict[tuple[Any, ...], PreparedLaunch] = {}


def run_transpose(data: Tensor) -> Tensor:
    """The transpose of a padded FP8 matrix."""
    device = data.device
    key = (device, data.shape, data.dtype)
    launch = _transposes.get(key)
    if not dispatch.uses_triton("quantize", device) or data.numel() == 0:
        return padded_bytes(data.view(torch.uint8).t().view(data.dtype), *reversed(data.shape))
    if launch is None:
        if len(_transposes) >= MOST:
            _transposes.clear()
        launch = _transposes[key] = prepare_transpose(device, *data.shape)
    transposed = torch.empty((data.shape[1], data.shape[0]), dtype=data.dtype, device=device)
    launch(data.view(torch.uint8), transposed.view(torch.uint8))
    return transposed


quantize_op = define(
    "quantize(Tensor x, Tensor? h, str activation, Tensor(a!) slots, int index, ScalarType dtype, bool rowwise, "
    "bool columnwise, bool record, int margin, bool power_of_two, Tensor(b!)? counts, bool column_sums) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _quantize,
    _quantize_fake,
)
transpose_bytes_op = define(
    "transpose_bytes(Tensor data) -> Tensor",
    run_transpose,
    lambda data: data.new_empty(data.shape[1], data.shape[0]),
)


def check_quantize(
    x: Tensor,
    h: Tensor | None,
    activation: str,
    slots: Tensor,
    index: int,
    dtype: torch.dtype,
    rowwise: bool,
    columnwise: bool,
    record: bool,  # noqa: ARG001
    margin: int,
    power_of_two: bool,  # noqa: ARG001
    counts: Tensor | None,
    column_sums: bool,  # noqa: ARG001
) -> None:
    """One sentence for what cannot be cast."""
    who = "quantize" if not activation else "quantize_activation" if h is None else "quantize_activation_backward"
    if dtype not in FP8:
        raise UserError(f"{who}: dtype is {dtype}; pass torch.float8_e4m3fn or torch.float8_e5m2.")
    if not rowwise and not columnwise:
        raise UserError(f"{who}: neither data nor its transpose is wanted; pass rowwise=True or columnwise=True.")
    if not 0 <= margin <= LARGEST_MARGIN:
        raise UserError(f"{who}: margin is {margin}; pass an integer from 0 to {LARGEST_MARGIN}.")
    for name, matrix in (("x", x), ("h", h)):
        if matrix is None:
            continue
        if matrix.dim() != 2:
            raise UserError(f"{who}: {name} has shape {tuple(matrix.shape)}; pass (rows, columns).")
        if matrix.dtype not in CASTABLE:
            raise UserError(f"{who}: {name} has dtype {matrix.dtype}; pass float32, bfloat16 or float16.")
    dispatch.one_device(who, x=x, h=h, slots=slots, counts=counts)
    if activation:
        check_activation(who, x if h is None else h, activation)
    if h is not None and (h.shape[0], h.shape[1] // (2 if is_gated(activation) else 1)) != tuple(x.shape):
        raise UserError(
            f"{who}: da has shape {tuple(x.shape)} and h {tuple(h.shape)}; pass the gradient of {activation} of h."
        )
    if slots.dim() != 2 or slots.shape[1] != SLOT or slots.dtype is not torch.float32 or not slots.is_contiguous():
        raise UserError(
            f"{who}: slots are {tuple(slots.shape)} {slots.dtype}; pass contiguous (n, {SLOT}) torch.float32."
        )
    if not 0 <= index < slots.shape[0]:
        raise UserError(f"{who}: there is no slot {index} among {slots.shape[0]}; pass one from 0 on.")
    if counts is not None and (
        counts.shape != (slots.shape[0], 3) or counts.dtype is not torch.int64 or not counts.is_contiguous()
    ):
        raise UserError(
            f"{who}: counts are {tuple(counts.shape)} {counts.dtype}; pass contiguous int64, ({slots.shape[0]}, 3)."
        )
