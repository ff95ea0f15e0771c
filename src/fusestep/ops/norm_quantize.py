"""LayerNorm or RMSNorm whose output is cast to FP8 in the same pass, with the residual add folded in.

    q = cast(saturate(y · scale)),   y = x̂ · weight + bias       (norm_forward.py says what x̂ is)

The cast takes y as it is in fp32: it is rounded once, to FP8, and never to x's dtype before. The scale is that of a
slot, taken from y's own amax where the slot has none yet, as quantize.py says. The statistics of the rows, and the sum
with a residual, are those of `norm_forward`, so that `norm_backward` gives the gradients.

A weight that is centred at zero is the caller's: pass weight + 1.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusestep import dispatch
from fusestep.errors import UserError
from fusestep.ops.cast_options import CastOptions, check_options
from fusestep.ops.dtypes import CASTABLE, dtype_name
from fusestep.ops.layouts import keep, row_stride
from fusestep.ops.norm_ops import sum_dtype
from fusestep.ops.norm_quantize_kernel import Launches, compilations, prepare
from fusestep.ops.norm_reference import forward_reference, statistics_columns
from fusestep.ops.quantize_reference import quantize_reference
from fusestep.ops.quantized import Quantized, padded
from fusestep.ops.registry import Op, Proof, catalogue, define, is_plain, relative_error


def norm_quantize_reference(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centred: bool,
    slots: Tensor,
    options: CastOptions,
    counts: Tensor | None,
    output: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """(data, scale_inv, x + residual or None, statistics) in plain PyTorch; writes slots, counts and output."""
    width = x.shape[-1]
    if x.numel() == 0:
        y = total = x if residual is None else x + residual
        statistics = x.new_zeros((_rows(x), statistics_columns(total.dtype, centred)), dtype=torch.float32)
    else:
        y, total, statistics = forward_reference(x, residual, weight, bias, width, eps, centred, torch.float32)
    if output is not None:
        output.copy_(y)
    data, _, scale_inv, _ = quantize_reference(y.reshape(_rows(x), width), slots, options, counts, column_sums=False)
    assert data is not None
    return data, scale_inv, None if residual is None else total.contiguous(), statistics


class _Known(NamedTuple):
    """What the kernels need for tensors of certain layouts, beside the tensors."""

    total: torch.dtype
    statistics: tuple[int, int]
    data: tuple[int, int]
    launches: Launches


def _layout(tensor: Tensor | None) -> tuple[Any, ...] | None:
    return None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


NAME = "norm_quantize"

#: By options and layouts, which are checked before; see `keep`.
_known: dict[tuple[Any, ...], _Known] = {}


def run_norm_quantize(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centred: bool,
    slots: Tensor,
    options: CastOptions,
    counts: Tensor | None,
    output: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """(data, scale_inv, x + residual or None, statistics), through the kernels or the reference."""
    device = x.device
    key = (x.shape, x.stride(), x.dtype, device, centred, eps, options, *map(_layout, (residual, weight, bias)))
    key += (_layout(slots), _layout(counts), _layout(output))
    known = _known.get(key)
    if known is None or not dispatch.uses_triton(NAME, device):
        _check(x, residual, weight, bias, slots, options, counts, output)
        if x.numel() == 0 or not dispatch.uses_triton(NAME, device):
            return norm_quantize_reference(x, residual, weight, bias, eps, centred, slots, options, counts, output)
        rows, width = _rows(x), x.shape[-1]
        x_stride = row_stride(x, width)
        residual_stride = width if residual is None else row_stride(residual, width)
        is_dense = all(t is None or t.is_contiguous() for t in (weight, bias))
        if x_stride is None or residual_stride is None or not is_dense:
            return run_norm_quantize(
                x if x_stride is not None else x.contiguous(),
                residual if residual is None or residual_stride is not None else residual.contiguous(),
                None if weight is None else weight.contiguous(),
                None if bias is None else bias.contiguous(),
                *(eps, centred, slots, options, counts, output),
            )
        total_dtype = x.dtype if residual is None else sum_dtype(x, residual)
        columns = statistics_columns(total_dtype, centred)
        launches = prepare(device, rows, columns, width, x_stride, residual_stride, eps, options)
        known = _Known(total_dtype, (rows, columns), (padded(rows), padded(width)), launches)
        keep(_known, key, known)
    data = torch.empty(known.data, dtype=options.dtype, device=device)
    scale_inv = torch.empty((), dtype=torch.float32, device=device)
    statistics = torch.empty(known.statistics, dtype=torch.float32, device=device)
    total = None if residual is None else torch.empty(x.shape, dtype=known.total, device=device)
    written = (data.view(torch.uint8), scale_inv, output, total, statistics)
    known.launches(x, residual, weight, bias, slots, counts, *written)
    return data, scale_inv, total, statistics


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
    *given: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """An op cannot return None: a sum that there is not is an empty tensor."""
    *fields, counts, output = given
    options = CastOptions(index, dtype, True, False, *fields)
    data, scale_inv, total, statistics = run_norm_quantize(
        x, residual, weight, bias, eps, centred, slots, options, counts, output
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
    *_: Any,
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
    options = CastOptions(index, dtype, True, False, record, margin, power_of_two)
    return cast_norm(x, residual, weight, bias, eps, centred, slots, options, counts, output)


def cast_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centred: bool,
    slots: Tensor,
    options: CastOptions,
    counts: Tensor | None,
    output: Tensor | None,
) -> tuple[Quantized, Tensor | None, Tensor]:
    """norm_quantize, for a caller that keeps the options, which ask for data only."""
    if not torch.compiler.is_compiling() and is_plain(x):
        data, scale_inv, total, statistics = run_norm_quantize(
            x, residual, weight, bias, eps, centred, slots, options, counts, output
        )
    else:
        _check(x, residual, weight, bias, slots, options, counts, output)
        index, dtype, _, _, *scaling = options
        data, scale_inv, total, statistics = norm_quantize_op(
            x, residual, weight, bias, eps, centred, slots, index, dtype, *scaling, counts, output
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
    options: CastOptions,
    counts: Tensor | None,
    output: Tensor | None,
) -> None:
    """One sentence for what cannot be normalised and cast."""
    check_options(NAME, options, slots, counts)
    if x.dim() == 0:
        raise UserError(f"{NAME}: x has no dimension; pass (…, columns).")
    row = x.shape[-1:]
    for name, tensor, shape in (
        ("x", x, x.shape),
        ("residual", residual, x.shape),
        ("weight", weight, row),
        ("bias", bias, row),
        ("output", output, x.shape),
    ):
        if tensor is None:
            continue
        if tensor.shape != shape:
            raise UserError(f"{NAME}: {name} has shape {tuple(tensor.shape)}; pass one of shape {tuple(shape)}.")
        if tensor.dtype not in CASTABLE:
            raise UserError(f"{NAME}: {name} has dtype {tensor.dtype}; pass float32, bfloat16 or float16.")
    if output is not None and not output.is_contiguous():
        raise UserError(f"{NAME}: output is not contiguous; pass torch.empty(x.shape, …).")
    dispatch.one_device(
        NAME, x=x, residual=residual, weight=weight, bias=bias, slots=slots, counts=counts, output=output
    )


EPS = 1e-5
# A usual width, an odd one, and one that is walked in blocks; few rows, since the interpreter is slow.
_SHAPES = (("", 9, 768), (" (odd width)", 5, 1001), (" (wide row)", 2, 33000))


def prove(device: torch.device) -> list[Proof]:
    """Values read back from both formats, against a norm in float64; and the amax that was recorded."""
    proofs = []
    for what, rows, width in _SHAPES:
        for dtype, tolerance in ((torch.float8_e4m3fn, 0.04), (torch.float8_e5m2, 0.08)):
            centred = dtype is torch.float8_e4m3fn
            x, residual = (torch.randn(rows, width, device=device).add_(1.0) for _ in range(2))
            weight = torch.rand(width, device=device).add_(0.5)
            slots = torch.zeros(2, 4, device=device)
            quantized, total, _ = norm_quantize(x, residual, weight, None, EPS, centred, slots, 1, dtype, record=True)
            assert total is not None
            y, _, _ = forward_reference(total.double(), None, weight.double(), None, width, EPS, centred, torch.float64)
            name = f"{'LayerNorm' if centred else 'RMSNorm'} to {dtype_name(dtype)}{what}"
            proofs.append(Proof(name, relative_error(quantized.dequantize(), y), tolerance))
            proofs.append(Proof(f"amax, {name}", relative_error(slots[1, 1], y.abs().max()), 1e-5))
    return proofs


catalogue(Op(NAME, "LayerNorm and RMSNorm cast to FP8 in the same pass", prove, compilations))
