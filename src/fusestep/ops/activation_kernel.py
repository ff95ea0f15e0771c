"""Activations in Triton: their values and derivatives, for any kernel, and a kernel of their own.

Which function is meant by which name, and the formulas, stand in activation.py.
"""

from __future__ import annotations

import functools
import math

import torch

from fusestep.language import tl, triton
from fusestep.ops.approximate import LOG2_E, exp2, reciprocal
from fusestep.ops.launch import PreparedLaunch

#: clamped_swiglu: where it clamps.
LIMIT = 7.0
SQRT_2_OVER_PI = math.sqrt(2 / math.pi)
CUBIC = 0.044715
QUICK = 1.702

#: Beyond it gelu's derivative is 0 or 1 to the last digit, and x² · x could overflow.
FLAT = 32.0

_TWICE_ROOT = tl.constexpr(2 * SQRT_2_OVER_PI)
#: Of gelu's x and x³, as a power of two below one.
_LINEAR_POWER = tl.constexpr(-2 * SQRT_2_OVER_PI * LOG2_E)
_CUBIC_POWER = tl.constexpr(-2 * SQRT_2_OVER_PI * LOG2_E * CUBIC)
_POWER = tl.constexpr(-LOG2_E)
_CUBIC, _QUICK, _FLAT, _LIMIT = (tl.constexpr(value) for value in (CUBIC, QUICK, FLAT, LIMIT))


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(−x)); 0 and 1 far out, without overflow."""
    return reciprocal(1.0 + exp2(x * _POWER))


@triton.jit
def _gelu_gate(x, squared):
    """The sigmoid by which gelu multiplies x."""
    return reciprocal(1.0 + exp2(x * (squared * _CUBIC_POWER + _LINEAR_POWER)))


@triton.jit
def activation_value(x, KIND: tl.constexpr):
    """The function of x of that kind, fp32; NaN stays."""
    if KIND == "gelu":
        value = x * _gelu_gate(x, x * x)
    elif KIND == "qgelu":
        value = x * sigmoid(x * _QUICK)
    elif KIND == "silu":
        value = x * sigmoid(x)
    elif KIND == "sigmoid":
        value = sigmoid(x)
    else:
        tl.static_assert(KIND == "relu" or KIND == "srelu", "an activation that no kernel knows")
        value = tl.where(x < 0.0, 0.0, x)
        if KIND == "srelu":
            value *= value
    return value


@triton.jit
def activation_derivative(x, KIND: tl.constexpr):
    """Its derivative."""
    if KIND == "gelu":
        x = tl.clamp(x, -_FLAT, _FLAT, propagate_nan=tl.PropagateNan.ALL)
        squared = x * x
        s = _gelu_gate(x, squared)
        slope = s + x * s * (1.0 - s) * (squared * (3.0 * _CUBIC * _TWICE_ROOT) + _TWICE_ROOT)
    elif KIND == "qgelu":
        s = sigmoid(x * _QUICK)
        slope = s + x * _QUICK * s * (1.0 - s)
    elif KIND == "silu":
        s = sigmoid(x)
        slope = s + x * s * (1.0 - s)
    elif KIND == "sigmoid":
        s = sigmoid(x)
        slope = s * (1.0 - s)
    elif KIND == "srelu":
        slope = tl.where(x < 0.0, 0.0, 2.0 * x)
    else:
        tl.static_assert(KIND == "relu", "an activation that no kernel knows")
        slope = tl.where(x > 0.0, 1.0, tl.where(x == x, 0.0, x))
    return slope


@triton.jit
def _bounded(a, b):
    """What clamped_swiglu makes of gate and value before all else; NaN stays."""
    return tl.where(a > _LIMIT, _LIMIT, a), tl.where(b > _LIMIT, _LIMIT, tl.where(b < -_LIMIT, -_LIMIT, b))


@triton.jit
def gated_value(a, b, KIND: tl.constexpr):
    """A gated activation of gate a and value b."""
    if KIND == "clamped":
        low, bounded = _bounded(a, b)
        value = activation_value(low, "qgelu") * (bounded + 1.0)
    else:
        value = activation_value(a, KIND) * b
    return value


@triton.jit
def gated_gradients(dy, a, b, KIND: tl.constexpr):
    """The gradients of a and of b from that of a gated activation."""
    if KIND == "clamped":
        low, bounded = _bounded(a, b)
        da = tl.where(a > _LIMIT, 0.0, dy * (bounded + 1.0) * activation_derivative(low, "qgelu"))
        db = tl.where(bounded == b, dy * activation_value(low, "qgelu"), 0.0)
    else:
        da = dy * b * activation_derivative(a, KIND)
        db = dy * activation_value(a, KIND)
    return da, db


@triton.jit(do_not_specialize=["rows"])
def _activation_kernel(
    h_ptr,  # rows of `columns`, h_stride apart; gated 2 · columns
    dy_ptr,  # (rows, columns) rows dy_stride apart, or None for the forward
    out_ptr,  # y (rows, columns), or with dy the gradient of h
    rows,
    columns,
    h_stride,
    dy_stride,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One tile a program, forward or backward."""
    across = (columns - 1) // COLUMNS + 1
    program = tl.program_id(0)  # widened later
    row = (program // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = (program % across) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    mask = (row < rows) & (column < columns)
    a = tl.load(h_ptr + row * h_stride + column, mask=mask, other=0.0).to(tl.float32)
    if GATED:
        b = tl.load(h_ptr + row * h_stride + columns + column, mask=mask, other=0.0).to(tl.float32)
    if dy_ptr is None:
        y = gated_value(a, b, KIND) if GATED else activation_value(a, KIND)
        tl.store(out_ptr + row * columns + column, y, mask=mask)
    else:
        dy = tl.load(dy_ptr + row * dy_stride + column, mask=mask, other=0.0).to(tl.float32)
        if GATED:
            da, db = gated_gradients(dy, a, b, KIND)
            tl.store(out_ptr + row * columns * 2 + column, da, mask=mask)
            tl.store(out_ptr + row * columns * 2 + columns + column, db, mask=mask)
        else:
            tl.store(out_ptr + row * columns + column, dy * activation_derivative(a, KIND), mask=mask)


#: Elements a program of the kernel.
TILE = 2048


@functools.lru_cache(maxsize=4096)
def prepare_activation(
    device: torch.device,
    dtypes: tuple[torch.dtype, torch.dtype | None],  # noqa: ARG001 (a prepared launch serves these dtypes alone)
    rows: int,
    columns: int,
    h_stride: int,
    dy_stride: int,
    kind: str,
    gated: bool,
) -> PreparedLaunch:
    """The launch on (h, dy or None, output) of these dtypes, for (rows, columns) of the activation."""
    block = min(TILE, 1 << max(columns - 1, 0).bit_length())
    tile_rows = TILE // block
    return PreparedLaunch(
        _activation_kernel,
        (-(-rows // tile_rows) * -(-columns // block),),
        device,
        (rows, columns, h_stride, dy_stride),
        KIND=kind,
        GATED=gated,
        ROWS=tile_rows,
        COLUMNS=block,
        num_warps=4,
    )
