"""The raw op of the cast to FP8: launches or the reference; quantize.py says what it computes, quantize_plan.py how.

`run_quantize` is what the op does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusestep import dispatch
from fusestep.ops.activation import activation_backward_reference, activation_reference
from fusestep.ops.cast_options import CastOptions
from fusestep.ops.launch import PreparedLaunch
from fusestep.ops.layouts import keep
from fusestep.ops.quantize_launch import prepare_transpose
from fusestep.ops.quantize_plan import cast_shape, plan_cast
from fusestep.ops.quantize_reference import padded_bytes, quantize_reference
from fusestep.ops.quantized import padded
from fusestep.ops.registry import define
from fusestep.ops.roll_scales import SLOT

#: What run_quantize and the raw op return: data, transposed, scale_inv and column sums.
_Outputs = tuple[Tensor | None, Tensor | None, Tensor, Tensor | None]


def run_quantize(
    x: Tensor,
    h: Tensor | None,
    activation: str,
    slots: Tensor | None,
    options: CastOptions,
    counts: Tensor | None,
    column_sums: bool,
) -> _Outputs:
    """Cast x; with an activation's name, the activation of x; with h too, the gradient of h from x."""
    plan = plan_cast(x, h, activation, slots, options, counts, torch.float32 if column_sums else None)
    if plan is not None:
        quantized, sums = plan(x, h, slots, counts)
        return quantized.data, quantized.transposed, quantized.scale_inv, sums
    rows, columns = cast_shape(x, h, activation)
    if rows * columns and dispatch.uses_triton("quantize", x.device):  # it was for the strides
        if h is None and not activation and not column_sums:
            turned = _run_turned(x.t(), slots, options, counts)
            if turned is not None:
                return turned
        x, h = x.contiguous(), None if h is None else h.contiguous()
        return run_quantize(x, h, activation, slots, options, counts, column_sums)
    with torch.no_grad():
        if h is not None:
            values = activation_backward_reference(x, h, activation)
        elif activation:
            values = activation_reference(x, activation)
        else:
            values = x
        if slots is None:
            slots, options = x.new_zeros(1, SLOT, dtype=torch.float32), options._replace(slot=0)
        return quantize_reference(values, slots, options, counts, column_sums)


def _run_turned(x: Tensor, slots: Tensor | None, options: CastOptions, counts: Tensor | None) -> _Outputs | None:
    """The cast of xᵀ, as whose transpose x lies in memory: x is cast as it lies, and its outputs change places."""
    options = options._replace(rowwise=options.columnwise, columnwise=options.rowwise)
    plan = plan_cast(x, None, "", slots, options, counts, None)
    if plan is None:
        return None
    quantized, _ = plan(x, None, slots, counts)
    return quantized.transposed, quantized.data, quantized.scale_inv, None


def _quantize(
    x: Tensor, h: Tensor | None, activation: str, slots: Tensor | None, *given: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """An op cannot return None: what is not wanted is an empty tensor."""
    *fields, counts, column_sums = given
    options = CastOptions(*fields)
    data, transposed, scale_inv, sums = run_quantize(x, h, activation, slots, options, counts, column_sums)
    nothing = x.new_empty(0, dtype=torch.float32)
    return (
        x.new_empty(0, dtype=options.dtype) if data is None else data,
        x.new_empty(0, dtype=options.dtype) if transposed is None else transposed,
        scale_inv,
        nothing if sums is None else sums,
    )


def _quantize_fake(
    x: Tensor,
    h: Tensor | None,
    activation: str,
    slots: Tensor | None,  # noqa: ARG001
    *given: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *fields, _, column_sums = given
    _, dtype, rowwise, columnwise, *_ = fields
    rows, columns = cast_shape(x, h, activation)
    return (
        x.new_empty((padded(rows), padded(columns)) if rowwise else 0, dtype=dtype),
        x.new_empty((padded(columns), padded(rows)) if columnwise else 0, dtype=dtype),
        x.new_empty((), dtype=torch.float32),
        x.new_empty(columns if column_sums else 0, dtype=torch.float32),
    )


#: By layouts; see `keep`.
_transposes: dict[tuple[Any, ...], PreparedLaunch] = {}


def run_transpose(data: Tensor) -> Tensor:
    """The transpose of a padded FP8 matrix."""
    device = data.device
    if not dispatch.uses_triton("quantize", device) or data.numel() == 0:
        return padded_bytes(data.view(torch.uint8).t().view(data.dtype), *reversed(data.shape))
    key = (device, data.shape, data.dtype)
    launch = _transposes.get(key)
    if launch is None:
        launch = keep(_transposes, key, prepare_transpose(device, *data.shape))
    transposed = torch.empty((data.shape[1], data.shape[0]), dtype=data.dtype, device=device)
    launch(data.view(torch.uint8), transposed.view(torch.uint8))
    return transposed


quantize_op = define(
    "quantize(Tensor x, Tensor? h, str activation, Tensor(a!)? slots, int index, ScalarType dtype, bool rowwise, "
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
