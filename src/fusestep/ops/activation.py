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

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fusestep import dispatch
from fusestep.errors import UserError
from fusestep.ops.activation_kernel import (
    CUBIC,
    FLAT,
    LIMIT,
    QUICK,
    SQRT_2_OVER_PI,
    TILE,
    _activation_kernel,
    prepare_activation,
)
from fusestep.ops.activation_sums import compilations as compilations_of_sums
from fusestep.ops.activation_sums import run_activation_sums
from fusestep.ops.column_sums import column_sums
from fusestep.ops.layouts import row_stride
from fusestep.ops.registry import (
    Compilation,
    Op,
    Proof,
    announce_transformed,
    catalogue,
    define,
    is_plain,
    relative_error,
    shows_gradient,
)
from fusestep.transforms import is_transformed

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


def run_activation(h: Tensor, dy: Tensor | None, name: str) -> Tensor:
    """The activation of h, dtype of h; with dy, the gradient of h."""
    gated = is_gated(name)
    width = h.shape[-1]
    columns = width // 2 if gated else width
    shape = h.shape if dy is not None else (*h.shape[:-1], columns)
    if h.numel() == 0 or not uses_triton(h):
        out = activation_reference(h, name) if dy is None else activation_backward_reference(dy, h, name)
        # What an op returns may not be a view.
        return torch.empty(shape, dtype=h.dtype, device=h.device).copy_(out)
    h_stride = row_stride(h, width)
    dy_stride = columns if dy is None else row_stride(dy, columns)
    if h_stride is None or dy_stride is None:
        return run_activation(
            h if h_stride is not None else h.contiguous(),
            dy if dy is None or dy_stride is not None else dy.contiguous(),
            name,
        )
    out = torch.empty(shape, dtype=h.dtype, device=h.device)
    dtypes = (h.dtype, None if dy is None else dy.dtype)
    launch = prepare_activation(h.device, dtypes, h.numel() // width, columns, h_stride, dy_stride, base(name), gated)
    launch(h, dy, out)
    return out


def run_backward_sums(h: Tensor, dy: Tensor, name: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The gradient of h, dtype of h, and in `dtype` the sums of it over all dimensions but the last."""
    gated = is_gated(name)
    width = h.shape[-1]
    if h.numel() == 0 or not uses_triton(h):
        dh = activation_backward_reference(dy, h, name)
        return dh.to(h.dtype), dh.reshape(-1, width).sum(0).to(dtype)
    columns = width // 2 if gated else width
    h_stride, dy_stride = row_stride(h, width), row_stride(dy, columns)
    if h_stride is None:
        h, h_stride = h.contiguous(), width
    if dy_stride is None:
        dy, dy_stride = dy.contiguous(), columns
    return run_activation_sums(h, dy, base(name), gated, h.numel() // width, (h_stride, dy_stride), dtype)


def uses_triton(h: Tensor) -> bool:
    unsupported = "the kernel computes in fp32, not fp64" if h.dtype is torch.float64 else None
    return dispatch.uses_triton("activation", h.device, unsupported)


activation_forward = define(
    "activation_forward(Tensor h, str name) -> Tensor",
    lambda h, name: run_activation(h, None, name),
    lambda h, name: h.new_empty((*h.shape[:-1], h.shape[-1] // 2 if is_gated(name) else h.shape[-1])),
)
activation_backward = define(
    "activation_backward(Tensor dy, Tensor h, str name) -> Tensor",
    lambda dy, h, name: run_activation(h, dy, name),
    lambda dy, h, name: h.new_empty(h.shape),  # noqa: ARG005
)


class _Activation(torch.autograd.Function):
    """The activation, with its gradient in one kernel; keeps h. `bias` takes a gradient, and no other part."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, bias: Tensor | None, name: str, plain: bool) -> Tensor:
        bias = bias if ctx.needs_input_grad[1] else None
        ctx.save_for_backward(h, bias)
        ctx.name, ctx.plain = name, plain
        ctx.sums_dtype = None if bias is None else bias.dtype
        y: Tensor = run_activation(h, None, name) if plain else activation_forward(h, name)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        h, bias = ctx.saved_tensors
        sums_dtype: torch.dtype | None = ctx.sums_dtype
        if shows_gradient("activation", dy):
            exact = activation_backward_reference(dy, _with_bias(h, bias), ctx.name)
            sums = None if sums_dtype is None else exact.reshape(-1, h.shape[-1]).sum(0).to(sums_dtype)
            return exact.to(h.dtype), sums, None, None
        if ctx.plain and is_plain(dy):
            if sums_dtype is not None:
                return *run_backward_sums(h, dy, ctx.name, sums_dtype), None, None
            return run_activation(h, dy, ctx.name), None, None, None
        dh = activation_backward(dy, h, ctx.name)
        sums = None if sums_dtype is None else column_sums(dh.reshape(-1, h.shape[-1]), sums_dtype)
        return dh, sums, None, None


def activation(x: Tensor, name: str, bias: Tensor | None = None) -> Tensor:
    """An activation function by its name, differentiable.

    Args:
        x: (…, N) fp32, bf16, fp16 or fp64; for a gated activation (…, 2N), the gate first; any strides.
        name: one of ACTIVATIONS.
        bias: (N,), gated (2N,), or None: what was added to each row of x, already and without a gradient. It is given
            the gradient that adding it would have brought, which the kernel for x's gradient sums up on its way.

    Returns: (…, N), dtype of x.
    Raises: UserError for an unknown name, a dtype that is none of these, an odd last dimension of a gated one, or a
        bias of another shape.
    """
    check_activation("activation", x, name)
    if bias is not None and bias.shape != x.shape[-1:]:
        raise UserError(f"activation: bias has shape {tuple(bias.shape)}; pass one of shape {tuple(x.shape[-1:])}.")
    compiling = torch.compiler.is_compiling()
    if not compiling and is_transformed():
        if uses_triton(x):
            announce_transformed("activation")
        return activation_reference(_with_bias(x, bias), name).to(x.dtype)
    y: Tensor = _Activation.apply(x, bias, name, not compiling and is_plain(x))
    return y


def _with_bias(x: Tensor, bias: Tensor | None) -> Tensor:
    """x, whose gradient reaches the bias that was added to it without one."""
    return x if bias is None else x + (bias - bias.detach())


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


def prove(device: torch.device) -> list[Proof]:
    """Every activation and its gradient against the reference in float64, on fresh random inputs."""
    proofs = []
    for name in ACTIVATIONS:
        h = torch.randn(9, 202, device=device) * 3
        y, dy = activation(h, name), torch.randn(9, 101 if is_gated(name) else 202, device=device)
        found = activation_backward(dy, h, name)
        proofs += [
            Proof(f"{name} forward", relative_error(y, activation_reference(h.double(), name)), 1e-5),
            Proof(
                f"{name} backward",
                relative_error(found, activation_backward_reference(dy.double(), h.double(), name)),
                1e-5,
            ),
        ]
        both, sums = run_backward_sums(h, dy, name, torch.float32)
        wanted = activation_backward_reference(dy.double(), h.double(), name)
        proofs += [
            Proof(f"{name} backward, with sums", relative_error(both, wanted), 1e-5),
            Proof(f"{name} backward, the sums", relative_error(sums, wanted.sum(0)), 1e-5),
        ]
    return proofs


def compilations() -> Iterator[Compilation]:
    """Forward and backward of each function, plain and gated."""
    # The code of other gated ones is that of swiglu with another function.
    built = {name: kind for name, kind in _BASES.items() if name in _PLAIN or kind not in _PLAIN or name == "swiglu"}
    yield from compilations_of_sums(built, frozenset(_GATED))
    for name, kind in built.items():
        gated = is_gated(name)
        for backward in (False, True):
            constants = {"KIND": kind, "GATED": gated, "ROWS": 1, "COLUMNS": TILE}
            pointers = ["h_ptr", "out_ptr"] + ["dy_ptr"] * backward
            numbers = ["rows", "columns", "h_stride", "dy_stride"]
            if not backward:
                constants["dy_ptr"] = None
            yield Compilation(
                _activation_kernel,
                f"{name}{', backward' if backward else ''}",
                dict.fromkeys(pointers, "*bf16")
                | dict.fromkeys(numbers, "i32")
                | dict.fromkeys(constants, "constexpr"),
                constants,
                num_warps=4,
                divisible_by_16=frozenset({*pointers, *numbers[1:]}),
            )


catalogue(Op("activation", "activations of an MLP, plain and gated", prove, compilations))
