"""Rotary position embedding: pairs of a head's elements are rotated by angles that grow with the position.

Of a head of D elements the first `dim` are rotated, the rest passed on. Pair j at position p turns by θ = freqs[p, j]:

    y₁ = t₁ · cos θ − t₂ · sin θ,   y₂ = t₂ · cos θ + t₁ · sin θ

where (t₁, t₂) are elements j and j + dim/2, or 2j and 2j + 1 when interleaved. Each angle stands twice in freqs, once
for each element of its pair; the first is read. Computed in fp32 and rounded once. The gradient is the rotation by −θ,
and so has a gradient of its own.

Formats: "bshd" (batch, sequence, heads, D), "sbhd", and "thd" (tokens, heads, D), where sequences follow each other and
`cu_seqlens` holds the offsets of their first tokens and, last, their end; tokens beyond it are passed on.

A position outside of freqs gives NaN: positions may be known to the device alone, and a wrong angle would not be seen.
Source: Su et al. 2021, arXiv:2104.09864.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from fusestep import dispatch
from fusestep.errors import UserError
from fusestep.ops.dtypes import dtype_name
from fusestep.ops.registry import (
    Op,
    Proof,
    announce_transformed,
    catalogue,
    define,
    is_plain,
    relative_error,
    runs_mapped,
)
from fusestep.ops.rotary_kernel import compilations, prepare
from fusestep.transforms import is_transformed

TensorFormat = Literal["bshd", "sbhd", "thd"]
FORMATS = ("bshd", "sbhd", "thd")
FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def rotary_reference(
    t: Tensor,
    freqs: Tensor,
    start_positions: Tensor | None,
    cu_seqlens: Tensor | None,
    tensor_format: str,
    interleaved: bool,
    inverse: bool,
) -> Tensor:
    """The rotation in plain PyTorch, differentiable to any order; by −θ if `inverse`."""
    dim = freqs.shape[-1]
    compute = torch.float64 if t.dtype is torch.float64 else torch.float32
    angles = _angles_reference(t, freqs, start_positions, cu_seqlens, tensor_format, interleaved).to(compute)
    cos, sin = angles.cos(), angles.sin()
    if inverse:
        sin = -sin
    rotated, rest = t.split((dim, t.shape[-1] - dim), -1)
    rotated = rotated.to(compute)
    first, second = rotated.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else rotated.chunk(2, -1)
    pairs = first * cos - second * sin, second * cos + first * sin
    turned = torch.stack(pairs, -1).flatten(-2) if interleaved else torch.cat(pairs, -1)
    return torch.cat((turned.to(t.dtype), rest), -1)


def _angles_reference(
    t: Tensor,
    freqs: Tensor,
    start_positions: Tensor | None,
    cu_seqlens: Tensor | None,
    tensor_format: str,
    interleaved: bool,
) -> Tensor:
    """The angle of every pair of t, with one in place of heads, in fp32."""
    dim = freqs.shape[-1]
    table = freqs.reshape(-1, dim)
    table = table[:, ::2] if interleaved else table[:, : dim // 2]
    passed_on = None
    if tensor_format == "thd":
        assert cu_seqlens is not None
        token = torch.arange(t.shape[0], device=t.device)
        offsets = cu_seqlens.long()
        sequence = torch.searchsorted(offsets, token, right=True) - 1
        passed_on = sequence >= offsets.shape[0] - 1
        sequence = sequence.clamp(0, max(offsets.shape[0] - 2, 0))
        position = token - offsets[sequence]
        if start_positions is not None:
            position = position + start_positions[sequence]
    else:
        position = torch.arange(t.shape[0 if tensor_format == "sbhd" else 1], device=t.device)[None]
        if start_positions is not None:
            position = position + start_positions[:, None]
        if tensor_format == "sbhd":
            position = position.t()
    is_known = (position >= 0) & (position < table.shape[0])
    angles = table[position.clamp(0, table.shape[0] - 1)]
    angles = torch.where(is_known[..., None], angles, float("nan"))
    if passed_on is not None:
        angles = torch.where(passed_on[:, None], 0.0, angles)
    return angles.unsqueeze(-2)


def _unsupported(dtype: torch.dtype) -> str | None:
    return "the kernel computes in fp32, not fp64" if dtype is torch.float64 else None


def run_rotary(
    t: Tensor,
    freqs: Tensor,
    start_positions: Tensor | None,
    cu_seqlens: Tensor | None,
    tensor_format: str,
    interleaved: bool,
    inverse: bool,
) -> Tensor:
    """The rotated t, contiguous, through the kernel or the reference."""
    if t.numel() == 0:
        return torch.empty_like(t, memory_format=torch.contiguous_format)
    options = (tensor_format, interleaved, inverse)
    if not dispatch.uses_triton("rotary", t.device, _unsupported(t.dtype)):
        return rotary_reference(t, freqs, start_positions, cu_seqlens, *options).contiguous()
    freqs = freqs.contiguous()
    start_positions = None if start_positions is None else start_positions.contiguous()
    cu_seqlens = None if cu_seqlens is None else cu_seqlens.contiguous()
    dtypes = tuple(None if other is None else other.dtype for other in (t, start_positions, cu_seqlens))
    sequences = 0 if cu_seqlens is None else cu_seqlens.shape[0] - 1
    prepared = prepare(t.device, dtypes, t.shape, t.stride(), freqs.shape, sequences, *options)
    y = torch.empty_like(t, memory_format=torch.contiguous_format)
    prepared(t, freqs, start_positions, cu_seqlens, y)
    return y


def _fake(
    t: Tensor,
    freqs: Tensor,  # noqa: ARG001
    start_positions: Tensor | None,  # noqa: ARG001
    cu_seqlens: Tensor | None,  # noqa: ARG001
    tensor_format: str,  # noqa: ARG001
    interleaved: bool,  # noqa: ARG001
    inverse: bool,  # noqa: ARG001
) -> Tensor:
    return torch.empty_like(t, memory_format=torch.contiguous_format)


rotary = define(
    "rotary(Tensor t, Tensor freqs, Tensor? start_positions, Tensor? cu_seqlens, str tensor_format, "
    "bool interleaved, bool inverse) -> Tensor",
    run_rotary,
    _fake,
)


class _Rotary(torch.autograd.Function):
    """The rotation; its gradient is the rotation back, through this same function."""

    @staticmethod
    def forward(
        ctx: Any,
        t: Tensor,
        freqs: Tensor,
        start_positions: Tensor | None,
        cu_seqlens: Tensor | None,
        options: tuple[str, bool, bool],
    ) -> Tensor:
        ctx.save_for_backward(freqs, start_positions, cu_seqlens)
        ctx.options = options
        run = run_rotary if not torch.compiler.is_compiling() and is_plain(t) else rotary
        result: Tensor = run(t, freqs, start_positions, cu_seqlens, *options)
        return result

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        tensor_format, interleaved, inverse = ctx.options
        freqs, start_positions, cu_seqlens = ctx.saved_tensors
        if runs_mapped("rotary", dy):
            dt = rotary_reference(dy, freqs, start_positions, cu_seqlens, tensor_format, interleaved, not inverse)
        elif torch.is_grad_enabled() or torch.compiler.is_compiling() or not is_plain(dy):
            dt = _Rotary.apply(dy, freqs, start_positions, cu_seqlens, (tensor_format, interleaved, not inverse))
        else:
            dt = run_rotary(dy, freqs, start_positions, cu_seqlens, tensor_format, interleaved, not inverse)
        return dt, None, None, None, None


def apply_rotary_pos_emb(
    t: Tensor,
    freqs: Tensor,
    tensor_format: TensorFormat = "bshd",
    start_positions: Tensor | None = None,
    interleaved: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Rotate the queries or keys t by the angles of their positions.

    Args:
        t: (batch, sequence, heads, D) for "bshd", (sequence, batch, heads, D) for "sbhd", (tokens, heads, D) for
            "thd"; fp32, bf16 or fp16 in the kernel, fp64 in the reference; any strides.
        freqs: (positions, 1, 1, dim) or (positions, dim) fp32 angles in radians, each twice as RotaryPositionEmbedding
            gives them; dim is even and at most D. It gets no gradient.
        tensor_format: the order of t's dimensions.
        start_positions: (batch,) int32 or int64, the position of each sequence's first token; 0 if None.
        interleaved: pairs are neighbours instead of halves apart.
        cu_seqlens: (sequences + 1,) int32 or int64 offsets of packed sequences, for "thd" alone.
    Returns: of t's shape and dtype, contiguous. NaN where a position is not in freqs.
    Raises: UserError, before anything is launched, for shapes, dtypes or devices that do not fit.
    """
    _check(t, freqs, tensor_format, start_positions, cu_seqlens)
    options = (tensor_format, interleaved, False)
    if not torch.compiler.is_compiling() and is_transformed():
        if dispatch.uses_triton("rotary", t.device, _unsupported(t.dtype)):
            announce_transformed("rotary")
        return rotary_reference(t, freqs, start_positions, cu_seqlens, *options)
    result: Tensor = _Rotary.apply(t, freqs, start_positions, cu_seqlens, options)
    return result


def _check(
    t: Tensor, freqs: Tensor, tensor_format: str, start_positions: Tensor | None, cu_seqlens: Tensor | None
) -> None:
    """One sentence for what cannot be rotated."""
    who = "apply_rotary_pos_emb"
    if tensor_format not in FORMATS:
        raise UserError(f'{who}: tensor_format is {tensor_format!r}; pass "bshd", "sbhd" or "thd".')
    is_packed = tensor_format == "thd"
    if t.dim() != (3 if is_packed else 4):
        wanted = "(tokens, heads, D)" if is_packed else "four dimensions"
        raise UserError(f"{who}: t has shape {tuple(t.shape)}; pass {wanted} for {tensor_format!r}.")
    if t.dtype not in FLOATING:
        raise UserError(f"{who}: t has dtype {t.dtype}; pass float32, bfloat16, float16 or float64.")
    dim = freqs.shape[-1] if freqs.dim() else 0
    if freqs.dim() not in (2, 4) or freqs.numel() != freqs.shape[0] * dim or dim == 0 or dim % 2 or dim > t.shape[-1]:
        raise UserError(
            f"{who}: freqs has shape {tuple(freqs.shape)} for heads of {t.shape[-1]}; pass (positions, 1, 1, dim) "
            f"with an even dim of at most {t.shape[-1]}."
        )
    if freqs.dtype is not torch.float32:
        raise UserError(f"{who}: freqs has dtype {freqs.dtype}, too coarse for angles; pass them in float32.")
    if freqs.requires_grad and torch.is_grad_enabled():
        raise UserError(f"{who}: freqs requires a gradient, which angles do not get; pass freqs.detach().")
    if is_packed != (cu_seqlens is not None):
        raise UserError(
            f"{who}: tensor_format is {tensor_format!r} and cu_seqlens is {'given' if cu_seqlens is not None else None}"
            '; pass cu_seqlens with "thd" and with no other format.'
        )
    if cu_seqlens is not None:
        sequences = cu_seqlens.shape[0] - 1 if cu_seqlens.dim() == 1 else 0
    else:
        length, sequences = (t.shape[0], t.shape[1]) if tensor_format == "sbhd" else (t.shape[1], t.shape[0])
        if length > freqs.shape[0]:
            raise UserError(
                f"{who}: t has {length} positions and freqs {freqs.shape[0]}; make freqs for at least {length}."
            )
    for name, tensor, size in (
        ("start_positions", start_positions, sequences),
        ("cu_seqlens", cu_seqlens, max(sequences, 1) + 1),
    ):
        if tensor is None:
            continue
        if tensor.shape != (size,) or tensor.dtype not in (torch.int32, torch.int64):
            wanted = f"({size},)" if name == "start_positions" else "(sequences + 1,)"
            raise UserError(
                f"{who}: {name} has shape {tuple(tensor.shape)} and dtype {tensor.dtype}; pass {wanted} of int32 or "
                "int64."
            )
    dispatch.one_device(who, t=t, freqs=freqs, start_positions=start_positions, cu_seqlens=cu_seqlens)


def prove(device: torch.device) -> list[Proof]:
    """Forward and backward on fresh random inputs, against the reference in float64."""
    proofs = []
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 6e-3)):
        for tensor_format, interleaved in (("bshd", False), ("thd", True)):
            t = torch.randn(2, 17, 3, 24, device=device).to(dtype)
            # Each angle stands twice.
            angles = torch.rand(17, 10, device=device).mul_(200.0)
            freqs = angles.repeat_interleave(2, 1) if interleaved else torch.cat((angles, angles), 1)
            offsets = None
            if tensor_format == "thd":
                t, offsets = t.flatten(0, 1), torch.tensor([0, 13, 30], dtype=torch.int32, device=device)
            for inverse in (False, True):
                options = (None, offsets, tensor_format, interleaved, inverse)
                error = relative_error(rotary(t, freqs, *options), rotary_reference(t.double(), freqs, *options))
                what = f"{'backward' if inverse else 'forward'}, {tensor_format}, {dtype_name(dtype)}"
                proofs.append(Proof(what, error, tolerance))
    return proofs


catalogue(Op("rotary", "rotary position embedding", prove, compilations))
