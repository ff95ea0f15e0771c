"""LayerNorm or RMSNorm whose output is cast to FP8 in the same pass, with the residual add folded in.

    q = cast(saturate(y · scale)),   y = x̂ · weight + bias       (norm_forward.py says what x̂ is)

The cast takes y as it is in fp32: it is rounded once, to FP8, and never to x's dtype before. The scale is that of a
slot, taken from y's own amax where the slot has none yet, as quantize.py says. The statistics of the rows, and the sum
with a residual, are those of `norm_forward`, so that `norm_backward` gives the gradients.

A weight that is centred at zero is the caller's: pass weight + 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusestep.errors import UserError
from fusestep.ops.norm_ops import sum_dtype
from fusestep.ops.norm_reference import forward_reference, statistics_columns
from fusestep.ops.quantize import CASTABLE
from fusestep.ops.quantize import _check as check_cast
from fusestep.ops.quantize_reference import quantize_reference
from fusestep.ops.quantized import Quantized, padded
from fusestep.ops.registry import define


def norm_quantize_reference(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centred: bool,
    slots: Tensor,
    index: int,
    dtype: torch.dtype,
    record: bool,
    margin: int,
    power_of_two: bool,
    counts: Tensor | None,
    output: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """(data, scale_inv, x + residual or None, statistics) in plain PyTorch; writes slots, counts and output."""
    width = x.shape[-1]
    y, total, statistics = forward_reference(x, residual, weight, bias, width, eps, centred, torch.float32)
    if output is not None:
        output.copy_(y)
    data, _, scale_inv, _ = quantize_reference(
        y.reshape(-1, width), slots, index, dtype, True, False, record, margin, power_of_two, counts, False
    )
    assert data is not None
    return data, scale_inv, None if residual is None else total.contiguous(), statistics


def run_norm_quantize(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centred: bool,
    slots: Tensor,
    index: int,
    dtype: torch.dtype,
    record: bool,
    margin: int,
    power_of_two: bool,
    counts: Tensor | None,
    output: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """(data, scale_inv, x + residual or None, statistics), through the kernels or the reference."""
    return norm_quantize_reference(
        *(x, residual, weight, bias, eps, centred, slots, index, dtype),
        *(record, margin, power_of_two, counts, output),
    )


def _norm_quantize(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centred: bool,
    slots: Tensor,
    index: int,
    dtype: torch.dtype,
    record: bool,
    margin: int,
    power_of_two: bool,
    counts: Tensor | None,
    output: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """An op cannot return None: a sum that there is not is an empty tensor."""
    data, scale_inv, total, statistics = run_norm_quantize(
        *(x, residual, weight, bias, eps, centred, slots, index, dtype),
        *(record, margin, power_of_two, counts, output),
    )
    return data, scale_inv, x.new_empty(0) if total is None else total, statistics


def _fake(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,  # noqa: ARG001
    bias: Tensor | None,  # noqa: ARG001
    eps: float,  # noqa: ARG001
    centred: bool,
    slots: Tensor,  # noqa: ARG001
    index: int,  # noqa: ARG001
    dtype: torch.dtype,
    record: bool,  # noqa: ARG001
    margin: int,  # noqa: ARG001
    power_of_two: bool,  # noqa: ARG001
    counts: Tensor | None,  # noqa: ARG001
    output: Tensor | None,  # noqa: ARG001
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, width = _rows(x), x.shape[-1]
    normed = x.dtype if residual is None else sum_dtype(x, residual)
    return (
        x.new_empty((padded(rows), padded(width)), dtype=dtype),
        x.new_empty((), dtype=torch.float32),
        x.new_empty(0 if residual is None else x.shape, dtype=normed),
        x.new_empty((rows, statistics_columns(normed, centred)), dtype=torch.float32),
    )


norm_quantize_op = define(
    "norm_quantize(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, float eps, bool centred, "
    "Tensor(a!) slots, int index, ScalarType dtype, bool record, int margin, bool power_of_two, Tensor(b!)? counts, "
    "Tensor(c!)? output) -> (Tensor, Tensor, Tensor, Tensor)",
    _norm_quantize,
    _fake,
)


def norm_quantize(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centred: bool,
    slots: Tensor,
    index: int,
    dtype: torch.dtype,
    *,
    record: bool = False,
    margin: int = 0,
    power_of_two: bool = False,
    counts: Tensor | None = None,
    output: Tensor | None = None,
) -> tuple[Quantized, Tensor | None, Tensor]:
    """Normalise rows and cast them to FP8; see the head of this file. No gradient flows through it.

    Args:
        x: (…, columns) fp32, bf16 or fp16; copied unless its rows are contiguous and evenly apart.
        residual: of x's shape, or None. x + residual is formed first, rounded as torch rounds it, and normalised.
        weight, bias: (columns,) or None.
        eps: in units of x².
        centred: LayerNorm, else RMSNorm.
        slots, index, dtype, record, margin, power_of_two, counts: as of `quantize`.
        output: a contiguous tensor of x's shape that receives y as well, rounded once to its dtype, or None.

    Returns: the quantised matrix of (rows, columns), data only; x + residual or None; and the statistics of the rows,
        as `norm_backward` takes them.
    Raises: UserError, before anything is written, for shapes, dtypes or devices that do not fit.
    """
    _check(x, residual, weight, bias, slots, index, dtype, counts, output)
    data, scale_inv, total, statistics = norm_quantize_op(
        *(x, residual, weight, bias, eps, centred, slots, index, dtype),
        *(record, margin, power_of_two, counts, output),
    )
    quantized = Quantized((_rows(x), x.shape[-1]), data, None, scale_inv, scale_inv)
    return quantized, None if residual is None else total, statistics


def _rows(x: Tensor) -> int:
    rows = 1
    for size in x.shape[:-1]:
        rows *= size
    return rows


def _check(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    slots: Tensor,
    index: int,
    dtype: torch.dtype,
    counts: Tensor | None,
    output: Tensor | None,
) -> None:
    """One sentence for what cannot be normalised and cast."""
    who = "norm_quantize"
    if x.dim() == 0:
        raise UserError(f"{who}: x has no dimension; pass (…, columns).")
    check_cast(who, x.reshape(-1, x.shape[-1]), None, "", slots, index, dtype, True, False, counts)
    for name, tensor in (("residual", residual), ("weight", weight), ("bias", bias), ("output", output)):
        if tensor is None:
            continue
        shape = x.shape if name in ("residual", "output") else x.shape[-1:]
        if tensor.shape != shape:
            raise UserError(f"{who}: {name} has shape {tuple(tensor.shape)}; pass one of shape {tuple(shape)}.")
        if tensor.dtype not in CASTABLE:
            raise UserError(f"{who}: {name} has dtype {tensor.dtype}; pass float32, bfloat16 or float16.")
        if tensor.device != x.device:
            raise UserError(f"{who}: {name} is on {tensor.device} and x on {x.device}; move them to one device.")
    if output is not None and not output.is_contiguous():
        raise UserError(f"{who}: output is not contiguous; pass torch.empty(x.shape, …).")
