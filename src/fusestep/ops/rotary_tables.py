"""Rotary position embedding by tables of cosines and sines, as models compute them once for all of their layers.

Of a head of D elements the first r are turned, the rest is passed on. With left and right halves of those r,

    y_left  = t_left  · cos_left  − t_right · sin_left
    y_right = t_right · cos_right + t_left  · sin_right

which is t · cos + rotate_half(t) · sin. Computed in fp32 and rounded once. The gradient of t is

    dt_left = dy_left · cos_left + dy_right · sin_right,   dt_right = dy_right · cos_right − dy_left · sin_left

Where angles are at hand, rotary.py needs no tables. Source: Su et al. 2021, arXiv:2104.09864.
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
from fusestep.ops.dtypes import dtype_name
from fusestep.ops.launch import PreparedLaunch
from fusestep.ops.registry import (
    TRANSFORMED,
    Compilation,
    Op,
    Proof,
    catalogue,
    define,
    is_plain,
    relative_error,
    runs_mapped,
)
from fusestep.ops.rotary_kernel import RotaryLaunch, rotary_launch
from fusestep.transforms import is_transformed

WHO = "apply_rotary_tables"
OP = "rotary_tables"
FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def rotary_tables_reference(t: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype, inverse: bool) -> Tensor:
    """The rotation in plain PyTorch, or what gradients take, `inverse`; differentiable to any order."""
    dim = cos.shape[-1]
    compute = torch.float64 if torch.float64 in (t.dtype, cos.dtype, sin.dtype) else torch.float32
    rotated, rest = t.split((dim, t.shape[-1] - dim), -1)
    left, right = rotated.to(compute).chunk(2, -1)
    (cos_left, cos_right), (sin_left, sin_right) = (one.unsqueeze(1).to(compute).chunk(2, -1) for one in (cos, sin))
    if inverse:
        pair = left * cos_left + right * sin_right, right * cos_right - left * sin_left
    else:
        pair = left * cos_left - right * sin_left, right * cos_right + left * sin_right
    return torch.cat((*(one.to(dtype) for one in pair), rest.to(dtype)), -1)


@triton.jit(do_not_specialize=["tokens", "length", "heads"])
def _rotary_tables_kernel(
    t_ptr,
    cos_ptr,
    sin_ptr,
    y_ptr,
    tokens,  # of all sequences together
    length,  # of each sequence
    heads,
    batch_stride,
    head_stride,
    sequence_stride,
    element_stride,
    y_batch_stride,
    y_head_stride,
    y_sequence_stride,
    cos_batch_stride,  # 0 where all sequences share a table
    cos_sequence_stride,
    sin_batch_stride,
    sin_sequence_stride,
    DIM: tl.constexpr,
    REST: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    INVERSE: tl.constexpr,
):
    """TOKENS tokens a program: their rows of the tables serve all heads, HEADS at a time."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    in_tokens = token < tokens
    batch = token // length
    place = token % length
    pair = tl.arange(0, BLOCK)
    in_table = in_tokens[:, None] & (pair < DIM // 2)[None, :]
    cos_ptrs = cos_ptr + (batch * cos_batch_stride + place * cos_sequence_stride)[:, None] + pair[None, :]
    sin_ptrs = sin_ptr + (batch * sin_batch_stride + place * sin_sequence_stride)[:, None] + pair[None, :]
    cos_left = tl.load(cos_ptrs, mask=in_table, other=0.0).to(tl.float32)[None]
    cos_right = tl.load(cos_ptrs + DIM // 2, mask=in_table, other=0.0).to(tl.float32)[None]
    sin_left = tl.load(sin_ptrs, mask=in_table, other=0.0).to(tl.float32)[None]
    sin_right = tl.load(sin_ptrs + DIM // 2, mask=in_table, other=0.0).to(tl.float32)[None]
    t_ptr += (batch * batch_stride + place * sequence_stride)[None, :, None]
    y_ptr += (batch * y_batch_stride + place * y_sequence_stride)[None, :, None]
    left = pair[None, None, :]
    right = left + DIM // 2
    for first_head in range(0, heads, HEADS):
        head = (first_head + tl.arange(0, HEADS).to(tl.int64))[:, None, None]
        inside = (head < heads) & in_tokens[None, :, None]
        t_head = t_ptr + head * head_stride
        y_head = y_ptr + head * y_head_stride
        mask = inside & (left < DIM // 2)
        t_left = tl.load(t_head + left * element_stride, mask=mask, other=0.0).to(tl.float32)
        t_right = tl.load(t_head + right * element_stride, mask=mask, other=0.0).to(tl.float32)
        if INVERSE:
            tl.store(y_head + left, t_left * cos_left + t_right * sin_right, mask=mask)
            tl.store(y_head + right, t_right * cos_right - t_left * sin_left, mask=mask)
        else:
            tl.store(y_head + left, t_left * cos_left - t_right * sin_left, mask=mask)
            tl.store(y_head + right, t_right * cos_right + t_left * sin_right, mask=mask)
        for start in tl.static_range(DIM, DIM + REST, BLOCK):
            element = start + left
            passed = inside & (element < DIM + REST)
            tl.store(y_head + element, tl.load(t_head + element * element_stride, mask=passed), mask=passed)


@functools.lru_cache(maxsize=4096)
def _prepare(
    device: torch.device,
    dtypes: tuple[torch.dtype, ...],  # noqa: ARG001 — a launch serves one set of dtypes
    shape: torch.Size,
    strides: tuple[int, ...],
    y_strides: tuple[int, ...],
    table: torch.Size,
    cos_strides: tuple[int, ...],
    sin_strides: tuple[int, ...],
    inverse: bool,
) -> PreparedLaunch:
    """The launch on (t, cos, sin, y)."""
    batch, heads, length, width = shape
    dim = table[-1]
    choice = rotary_launch(dim)
    shared = table[0] == 1
    tables = [0 if shared else cos_strides[0], cos_strides[1], 0 if shared else sin_strides[0], sin_strides[1]]
    return PreparedLaunch(
        _rotary_tables_kernel,
        (-(-batch * length // choice.tokens),),
        device,
        (batch * length, length, heads, *strides, *y_strides[:3], *tables),
        **_constants(dim, width - dim, choice, inverse),
        num_warps=choice.warps,
    )


def _constants(dim: int, rest: int, choice: RotaryLaunch, inverse: bool) -> dict[str, Any]:
    sizes = {"BLOCK": choice.block, "TOKENS": choice.tokens, "HEADS": choice.heads}
    return {"DIM": dim, "REST": rest, **sizes, "INVERSE": inverse}


def compilations() -> Iterator[Compilation]:
    """Whole heads and a part of them, each dtype once."""
    for dim, rest, kinds, inverse in (
        (64, 0, ("bf16", "fp32", "fp32"), False),
        (128, 0, ("bf16", "bf16", "bf16"), True),
        (20, 12, ("fp32", "fp32", "fp16"), False),
        (128, 0, ("fp16", "fp16", "fp16"), False),
    ):
        element, table, result = kinds
        choice = rotary_launch(dim)
        pointers = {"t_ptr": element, "cos_ptr": table, "sin_ptr": table, "y_ptr": result}
        strides = tuple(name for name in _rotary_tables_kernel.arg_names if name.endswith("_stride"))
        integers = ("tokens", "length", "heads", *(name for name in strides if name != "element_stride"))
        constexprs = {"element_stride": 1, **_constants(dim, rest, choice, inverse)}
        yield Compilation(
            _rotary_tables_kernel,
            f"{dim} of {dim + rest}, {element} by {table} to {result}{', backward' if inverse else ''}",
            {name: f"*{kind}" for name, kind in pointers.items()}
            | dict.fromkeys(integers, "i32")
            | dict.fromkeys(constexprs, "constexpr"),
            constexprs,
            choice.warps,
            divisible_by_16=frozenset(pointers).union(set(strides) & set(integers) if rest == 0 else ()),
        )


def _unsupported(*tensors: Tensor) -> str | None:
    is_double = any(tensor.dtype is torch.float64 for tensor in tensors)
    return "the kernel computes in fp32, not fp64" if is_double else None


def _empty(t: Tensor, dtype: torch.dtype) -> Tensor:
    """Laid out as t is where t is a run of memory whose elements of a head are neighbours."""
    if t.stride(-1) == 1:
        return torch.empty_like(t, dtype=dtype)
    return torch.empty(t.shape, dtype=dtype, device=t.device)


def run_rotary_tables(t: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype, inverse: bool) -> Tensor:
    """The rotated t, through the kernel or the reference."""
    y = _empty(t, dtype)
    if t.numel() == 0:
        return y
    if not dispatch.uses_triton(OP, t.device, _unsupported(t, cos, sin)):
        return y.copy_(rotary_tables_reference(t, cos, sin, dtype, inverse))
    cos, sin = (one if one.stride(-1) == 1 else one.contiguous() for one in (cos, sin))
    dtypes = (t.dtype, cos.dtype, sin.dtype, dtype)
    places = (t.shape, t.stride(), y.stride(), cos.shape, cos.stride(), sin.stride())
    _prepare(t.device, dtypes, *places, inverse)(t, cos, sin, y)
    return y


rotary_tables = define(
    f"{OP}(Tensor t, Tensor cos, Tensor sin, ScalarType dtype, bool inverse) -> Tensor",
    run_rotary_tables,
    lambda t, cos, sin, dtype, inverse: _empty(t, dtype),  # noqa: ARG005
)


class _RotaryTables(torch.autograd.Function):
    """The rotation; its gradient is the rotation back, through this same function."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype, inverse: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.dtype, ctx.inverse = t.dtype, inverse
        run = run_rotary_tables if not torch.compiler.is_compiling() and is_plain(t) else rotary_tables
        y: Tensor = run(t, cos, sin, dtype, inverse)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        if runs_mapped(OP, dy):
            dt = rotary_tables_reference(dy, cos, sin, ctx.dtype, not ctx.inverse)
        elif torch.is_grad_enabled() or torch.compiler.is_compiling() or not is_plain(dy):
            dt = _RotaryTables.apply(dy, cos, sin, ctx.dtype, not ctx.inverse)
        else:
            dt = run_rotary_tables(dy, cos, sin, ctx.dtype, not ctx.inverse)
        return dt, None, None, None, None


def apply_rotary_tables(t: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Rotate the queries or keys t by the cosines and sines of their positions: t · cos + rotate_half(t) · sin.

    Args:
        t: (batch, heads, sequence, D), fp32, bf16 or fp16 in the kernel, fp64 in the reference; any strides, a view
            of (batch, sequence, heads, D) among them.
        cos, sin: (batch or 1, sequence, r), r even and at most D, in any of these dtypes. They get a gradient in
            PyTorch's own operations, which is announced.
        dtype: of the result; None: the one that t · cos has.
    Returns: of t's shape, and laid out as t where t is a run of memory.
    Raises: UserError, before anything is launched, for shapes, dtypes or devices that do not fit.
    """
    _check(t, cos, sin)
    if dtype is None:
        dtype = torch.promote_types(t.dtype, torch.promote_types(cos.dtype, sin.dtype))
    wants_tables = torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad)
    is_seen = not torch.compiler.is_compiling() and is_transformed()
    if wants_tables or is_seen:
        if dispatch.uses_triton(OP, t.device, _unsupported(t, cos, sin)):
            dispatch.announce(OP, TRANSFORMED if is_seen else "gradients of tables take PyTorch's own operations")
        return rotary_tables_reference(t, cos, sin, dtype, inverse=False)
    y: Tensor = _RotaryTables.apply(t, cos, sin, dtype, False)
    return y


def _check(t: Tensor, cos: Tensor, sin: Tensor) -> None:
    """One sentence for what cannot be rotated."""
    unknown = [one.dtype for one in (t, cos, sin) if one.dtype not in FLOATING]
    if t.dim() != 4 or unknown:
        what = f"shape {tuple(t.shape)}" if t.dim() != 4 else dtype_name(unknown[0])
        raise UserError(f"{WHO}: got {what}; pass t (batch, heads, sequence, D) and tables in float32 or 16 bits.")
    batch, _, length, width = t.shape
    dim = cos.shape[-1] if cos.dim() else 0
    fits = cos.dim() == 3 and cos.shape[0] in (1, batch) and cos.shape[1] == length and 0 < dim <= width
    if not fits or dim % 2 or sin.shape != cos.shape:
        raise UserError(
            f"{WHO}: cos has shape {tuple(cos.shape)} and sin {tuple(sin.shape)} for t {tuple(t.shape)}; pass both as "
            f"({batch} or 1, {length}, r) with an even r of at most {width}."
        )
    dispatch.one_device(WHO, t=t, cos=cos, sin=sin)


def prove(device: torch.device) -> list[Proof]:
    """Forward and backward on fresh random inputs, against the reference in float64."""
    proofs = []
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 6e-3)):
        t = torch.randn(2, 17, 3, 24, device=device).to(dtype).transpose(1, 2)
        cos, sin = torch.randn(2, 2, 17, 20, device=device).to(dtype).unbind()
        for inverse in (False, True):
            truth = rotary_tables_reference(t.double(), cos.double(), sin.double(), torch.float64, inverse)
            error = relative_error(rotary_tables(t, cos, sin, dtype, inverse), truth)
            proofs.append(Proof(f"{'backward' if inverse else 'forward'}, {dtype_name(dtype)}", error, tolerance))
    return proofs


catalogue(Op(OP, "rotary position embedding by tables of cosines and sines", prove, compilations))
