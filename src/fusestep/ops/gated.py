"""Gated activations whose gate and value come from two products, each in a tensor of its own.

    y = act(a) · b

The names and functions are those of the gated activations in activation.py, which take gate and value side by side.
Here nothing has to be copied beside anything: the kernel reads a and b as they lie, and backward writes da and db.

Computed in fp32 (fp64 for fp64, in the reference) and rounded once.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fusestep import dispatch
from fusestep.errors import UserError
from fusestep.language import tl, triton
from fusestep.ops.activation import (
    ACTIVATIONS,
    activation_backward_reference,
    activation_reference,
    base,
    is_gated,
)
from fusestep.ops.activation_kernel import TILE, gated_gradients, gated_value
from fusestep.ops.launch import PreparedLaunch
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

#: The names that `gated_activation` knows.
GATED = tuple(name for name in ACTIVATIONS if is_gated(name))


def gated_reference(a: Tensor, b: Tensor, name: str) -> Tensor:
    """act(a) · b in fp32, not rounded (fp64 of fp64)."""
    kind = base(name)
    if kind in ACTIVATIONS:
        return activation_reference(a, kind) * b
    return activation_reference(torch.cat((a, b), -1), name)


def gated_backward_reference(dy: Tensor, a: Tensor, b: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """The gradients of a and b, in fp32 and not rounded (fp64 of fp64)."""
    kind = base(name)
    if kind in ACTIVATIONS:
        value = activation_reference(a, kind)
        wide = dy.to(value.dtype)
        return activation_backward_reference(wide * b, a, kind), wide * value
    da, db = activation_backward_reference(dy, torch.cat((a, b), -1), name).chunk(2, -1)
    return da, db


@triton.jit(do_not_specialize=["rows"])
def _gated_kernel(
    a_ptr,  # the gate: rows of `columns`, a_stride apart
    b_ptr,  # the value, likewise
    dy_ptr,  # likewise, or None for the forward
    first_ptr,  # y (rows, columns), or with dy the gradient of a
    second_ptr,  # with dy the gradient of b, else None
    rows,
    columns,
    a_stride,
    b_stride,
    dy_stride,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One tile a program, forward or backward."""
    across = (columns - 1) // COLUMNS + 1
    program = tl.program_id(0)  # widened later
    row = (program // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = (program % across) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    mask = (row < rows) & (column < columns)
    a = tl.load(a_ptr + row * a_stride + column, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + row * b_stride + column, mask=mask, other=0.0).to(tl.float32)
    place = row * columns + column
    if dy_ptr is None:
        tl.store(first_ptr + place, gated_value(a, b, KIND), mask=mask)
    else:
        dy = tl.load(dy_ptr + row * dy_stride + column, mask=mask, other=0.0).to(tl.float32)
        da, db = gated_gradients(dy, a, b, KIND)
        tl.store(first_ptr + place, da, mask=mask)
        tl.store(second_ptr + place, db, mask=mask)


@functools.lru_cache(maxsize=4096)
def _prepare(
    device: torch.device,
    dtypes: tuple[torch.dtype, torch.dtype | None],  # noqa: ARG001 (a prepared launch serves these dtypes alone)
    rows: int,
    columns: int,
    strides: tuple[int, int, int],
    kind: str,
) -> PreparedLaunch:
    """The launch on (a, b, dy or None, y or da, db or None) of these dtypes."""
    block = min(TILE, 1 << max(columns - 1, 0).bit_length())
    tile_rows = TILE // block
    return PreparedLaunch(
        _gated_kernel,
        (-(-rows // tile_rows) * -(-columns // block),),
        device,
        (rows, columns, *strides),
        KIND=kind,
        ROWS=tile_rows,
        COLUMNS=block,
        num_warps=4,
    )


def _uses_triton(a: Tensor) -> bool:
    unsupported = "the kernel computes in fp32, not fp64" if a.dtype is torch.float64 else None
    return dispatch.uses_triton("gated", a.device, unsupported)


def _run(a: Tensor, b: Tensor, dy: Tensor | None, name: str) -> tuple[Tensor, Tensor | None]:
    """(y, None), or with dy the gradients of a and b."""
    width = a.shape[-1]
    first = torch.empty(a.shape, dtype=a.dtype, device=a.device)
    second = None if dy is None else torch.empty(a.shape, dtype=a.dtype, device=a.device)
    if a.numel() == 0:
        return first, second
    if not _uses_triton(a):
        if dy is None or second is None:
            return first.copy_(gated_reference(a, b, name)), None
        da, db = gated_backward_reference(dy, a, b, name)
        return first.copy_(da), second.copy_(db)
    strides = []
    operands: list[Tensor | None] = []
    for tensor in (a, b, dy):
        if tensor is None:
            strides.append(width)
        elif (stride := row_stride(tensor, width)) is None:
            tensor = tensor.contiguous()
            strides.append(width)
        else:
            strides.append(stride)
        operands.append(tensor)
    dtypes = (a.dtype, None if dy is None else dy.dtype)
    launch = _prepare(a.device, dtypes, a.numel() // width, width, (strides[0], strides[1], strides[2]), base(name))
    launch(*operands, first, second)
    return first, second


def _run_backward(dy: Tensor, a: Tensor, b: Tensor, name: str) -> tuple[Tensor, Tensor]:
    da, db = _run(a, b, dy, name)
    assert db is not None
    return da, db


gated_forward = define(
    "gated_forward(Tensor a, Tensor b, str name) -> Tensor",
    lambda a, b, name: _run(a, b, None, name)[0],
    lambda a, b, name: a.new_empty(a.shape),  # noqa: ARG005
)
gated_backward = define(
    "gated_backward(Tensor dy, Tensor a, Tensor b, str name) -> (Tensor, Tensor)",
    _run_backward,
    lambda dy, a, b, name: (a.new_empty(a.shape), a.new_empty(a.shape)),  # noqa: ARG005
)


class _Gated(torch.autograd.Function):
    """The activation, with both gradients in one kernel; keeps a and b."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, name: str, plain: bool) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.name, ctx.plain = name, plain
        y: Tensor = _run(a, b, None, name)[0] if plain else gated_forward(a, b, name)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None, None]:
        a, b = ctx.saved_tensors
        if shows_gradient("gated", dy):
            da, db = (gradient.to(a.dtype) for gradient in gated_backward_reference(dy, a, b, ctx.name))
        elif ctx.plain and is_plain(dy):
            da, db = _run_backward(dy, a, b, ctx.name)
        else:
            da, db = gated_backward(dy, a, b, ctx.name)
        return da, db, None, None


def gated_activation(gate: Tensor, value: Tensor, name: str) -> Tensor:
    """act(gate) · value, differentiable; `name` says which function of the gate.

    Args:
        gate, value: (…, N), both of one shape, device and dtype: fp32, bf16, fp16 or fp64; any strides.
        name: one of GATED: "swiglu" of SiLU, "geglu" of GELU in its tanh form, "reglu" of ReLU, …; see activation.py.

    Returns: (…, N), contiguous, in their dtype.
    Raises: UserError for an unknown name, and for shapes, dtypes or devices that do not fit.
    """
    if not is_gated(name):
        raise UserError(f"gated_activation: {name!r} has no gate; pass one of {', '.join(GATED)}.")
    if gate.shape != value.shape or gate.dtype != value.dtype or gate.device != value.device or not gate.dim():
        raise UserError(
            f"gated_activation: gate is {tuple(gate.shape)} {gate.dtype} on {gate.device} and value "
            f"{tuple(value.shape)} {value.dtype} on {value.device}; pass two alike, with at least one dimension."
        )
    if not gate.is_floating_point() or gate.dtype.itemsize < 2:
        raise UserError(f"gated_activation: gate has dtype {gate.dtype}; pass float32, bfloat16, float16 or float64.")
    compiling = torch.compiler.is_compiling()
    if not compiling and is_transformed():
        if _uses_triton(gate):
            announce_transformed("gated")
        return gated_reference(gate, value, name).to(gate.dtype)
    y: Tensor = _Gated.apply(gate, value, name, not compiling and is_plain(gate) and is_plain(value))
    return y


def prove(device: torch.device) -> list[Proof]:
    """Every gated activation and its gradients against the reference in float64, on fresh random inputs."""
    proofs = []
    for name in GATED:
        a, b, dy = (torch.randn(9, 101, device=device) * 3 for _ in range(3))
        h = torch.cat((a, b), -1).double()
        y, found = gated_activation(a, b, name), gated_backward(dy, a, b, name)
        wanted = activation_backward_reference(dy.double(), h, name)
        proofs += [
            Proof(f"{name} forward", relative_error(y, activation_reference(h, name)), 1e-5),
            Proof(f"{name} backward", relative_error(torch.cat(found, -1), wanted), 1e-5),
        ]
    return proofs


def compilations() -> Iterator[Compilation]:
    """Forward and backward; the other functions' code is that of swiglu with another function."""
    for name in ("swiglu", "geglu", "clamped_swiglu"):
        for backward in (False, True):
            constants: dict[str, Any] = {"KIND": base(name), "ROWS": 1, "COLUMNS": TILE}
            pointers = ["a_ptr", "b_ptr", "first_ptr"]
            numbers = ["rows", "columns", "a_stride", "b_stride", "dy_stride"]
            if backward:
                pointers += ["dy_ptr", "second_ptr"]
            else:
                constants |= {"dy_ptr": None, "second_ptr": None}
            yield Compilation(
                _gated_kernel,
                f"{name}{', backward' if backward else ''}",
                dict.fromkeys(pointers, "*bf16")
                | dict.fromkeys(numbers, "i32")
                | dict.fromkeys(constants, "constexpr"),
                constants,
                num_warps=4,
                divisible_by_16=frozenset({*pointers, *numbers[1:]}),
            )


catalogue(Op("gated", "gated activations of two products", prove, compilations))
