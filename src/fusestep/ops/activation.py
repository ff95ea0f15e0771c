"""Activation functions of an MLP, plain and gated, with their gradients.

    gelu        x · Φ(x), tanh form: x · σ(2u), u = √(2/π) · (x + 0.044715 x³)
    qgelu       x · σ(1.702 x)
    relu        max(x, 0)
    srelu       max(x, 0)²
    silu        x · σ(x)

Gated: the last dimension holds a and b side by side, and the result, half as wide, is act(a) · b.

    geglu, qgeglu, reglu, sreglu, swiglu     of gelu, qgelu, relu, srelu, silu
    glu                                      σ(a) · b
    clamped_swiglu                           qgelu(min(a, 7)) · (min(max(b, −7), 7) + 1)

Everything is computed in fp32 (fp64 for fp64, in the reference) and rounded once.
Sources: Hendrycks and Gimpel 2016, arXiv:1606.08415 (gelu, qgelu); So et al. 2021, arXiv:2109.08668 (srelu);
Shazeer 2020, arXiv:2002.05202 (gated); the published gpt-oss models (clamped_swiglu).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fusestep.errors import UserError
from fusestep.language import tl, triton

#: Each activation's name, with the function of x, or of the gate a, that it is made of.
_PLAIN = {name: name for name in ("gelu", "qgelu", "relu", "srelu", "silu")}
_GATED = {
    "geglu": "gelu",
    "qgeglu": "qgelu",
    "reglu": "relu",
    "sreglu": "srelu",
    "swiglu": "silu",
    "glu": "sigmoid",
    "clamped_swiglu": "clamped",
}
_BASES = _PLAIN | _GATED

#: The names that `activation` knows.
ACTIVATIONS = tuple(_BASES)

#: clamped_swiglu: where it clamps.
LIMIT = 7.0
SQRT_2_OVER_PI = math.sqrt(2 / math.pi)
CUBIC = 0.044715
QUICK = 1.702

#: Beyond it gelu's derivative is 0 or 1 to the last digit, and x² · x could overflow.
FLAT = 32.0

_TWICE_ROOT = tl.constexpr(2 * SQRT_2_OVER_PI)
_CUBIC, _QUICK, _FLAT, _LIMIT = (tl.constexpr(value) for value in (CUBIC, QUICK, FLAT, LIMIT))


def is_gated(name: str) -> bool:
    """Whether an activation takes two values for each that it gives.

    Raises: UserError for a name that is none of ACTIVATIONS.
    """
    base(name)
    return name in _GATED


def base(name: str) -> str:
    """The function that an activation is made of.

    Raises: UserError for a name that is none of ACTIVATIONS.
    """
    known = _BASES.get(name)
    if known is None:
        raise UserError(f"activation: {name!r} is none that is known; pass one of {', '.join(ACTIVATIONS)}.")
    return known


def _computed(x: Tensor) -> Tensor:
    """x in the dtype that the reference computes in."""
    return x if x.dtype is torch.float64 else x.float()


def activation_reference(h: Tensor, name: str) -> Tensor:
    """The activation in fp32, not rounded (fp64 of fp64). h (…, N); gated (…, 2N) to (…, N)."""
    kind, h = base(name), _computed(h)
    if not is_gated(name):
        return _value(h, kind)
    a, b = h.chunk(2, dim=-1)
    if kind == "clamped":
        return _value(a.clamp(max=LIMIT), "qgelu") * (b.clamp(-LIMIT, LIMIT) + 1.0)
    return _value(a, kind) * b


def activation_backward_reference(da: Tensor, h: Tensor, name: str) -> Tensor:
    """The gradient of h, in fp32 and not rounded (fp64 of fp64), from that of the activation."""
    kind, h, da = base(name), _computed(h), _computed(da)
    if not is_gated(name):
        return da * _derivative(h, kind)
    a, b = h.chunk(2, dim=-1)
    if kind == "clamped":
        low, bounded = a.clamp(max=LIMIT), b.clamp(-LIMIT, LIMIT)
        db = da * _value(low, "qgelu")
        da = da * (bounded + 1.0) * _derivative(low, "qgelu")
        return torch.cat((torch.where(a > LIMIT, 0.0, da), torch.where(bounded == b, db, 0.0)), dim=-1)
    return torch.cat((da * b * _derivative(a, kind), da * _value(a, kind)), dim=-1)


def _value(x: Tensor, kind: str) -> Tensor:
    match kind:
        case "gelu":
            return x * torch.sigmoid((2 * SQRT_2_OVER_PI) * (x + CUBIC * (x * x * x)))
        case "qgelu":
            return x * torch.sigmoid(QUICK * x)
        case "silu":
            return x * torch.sigmoid(x)
        case "sigmoid":
            return torch.sigmoid(x)
    positive = torch.where(x < 0, 0.0, x)  # NaN stays
    return positive * positive if kind == "srelu" else positive


def _derivative(x: Tensor, kind: str) -> Tensor:
    match kind:
        case "gelu":
            x = x.clamp(-FLAT, FLAT)
            squared = x * x
            s = torch.sigmoid((2 * SQRT_2_OVER_PI) * (x + CUBIC * (squared * x)))
            return s + x * s * (1.0 - s) * ((2 * SQRT_2_OVER_PI) * (1.0 + (3 * CUBIC) * squared))
        case "qgelu":
            s = torch.sigmoid(QUICK * x)
            return s + QUICK * x * s * (1.0 - s)
        case "silu":
            s = torch.sigmoid(x)
            return s + x * s * (1.0 - s)
        case "sigmoid":
            s = torch.sigmoid(x)
            return s * (1.0 - s)
    if kind == "srelu":
        return torch.where(x < 0, 0.0, 2.0 * x)
    return torch.where(x > 0, 1.0, torch.where(x.isnan(), x, 0.0))


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(−x)); 0 and 1 far out, without overflow."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def activation_value(x, KIND: tl.constexpr):
    """The function of x of that kind, fp32; NaN stays."""
    if KIND == "gelu":
        value = x * sigmoid((x + x * x * x * _CUBIC) * _TWICE_ROOT)
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
        x = tl.where(x > _FLAT, _FLAT, tl.where(x < -_FLAT, -_FLAT, x))
        squared = x * x
        s = sigmoid((x + squared * x * _CUBIC) * _TWICE_ROOT)
        slope = s + x * s * (1.0 - s) * ((squared * (3.0 * _CUBIC) + 1.0) * _TWICE_ROOT)
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


def activation(x: Tensor, name: str) -> Tensor:
    """An activation function by its name, differentiable.

    Args:
        x: (…, N) fp32, bf16, fp16 or fp64; for a gated activation (…, 2N), the gate first.
        name: one of ACTIVATIONS.

    Returns: (…, N), dtype of x.
    Raises: UserError for an unknown name, a dtype that is none of these, or an odd last dimension of a gated one.
    """
    check_activation("activation", x, name)
    return activation_reference(x, name).to(x.dtype)


def check_activation(who: str, h: Tensor, name: str) -> None:
    """Raise UserError, in the words of `who`, where an activation of this name cannot be taken of h."""
    gated = is_gated(name)
    if not h.is_floating_point() or h.dtype.itemsize < 2:
        raise UserError(f"{who}: x has dtype {h.dtype}; pass float32, bfloat16, float16 or float64.")
    if h.dim() == 0 or (gated and h.shape[-1] % 2):
        raise UserError(
            f"{who}: x has shape {tuple(h.shape)}; {name} takes its gate and its values side by side in the last "
            "dimension, so pass an even one."
            if gated and h.dim()
            else f"{who}: x has no dimension; pass (…, N)."
        )
