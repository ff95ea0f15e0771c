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

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fusestep import dispatch
from fusestep.errors import UserError
from fusestep.language import tl, triton
from fusestep.ops.dtypes import dtype_name
from fusestep.ops.launch import PreparedLaunch
from fusestep.ops.norm import _is_plain as is_plain
from fusestep.ops.registry import Compilation, Op, Proof, catalogue, define, relative_error

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
    rotated, rest = t[..., :dim].to(compute), t[..., dim:]
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


@triton.jit
def _cos_sin(angle):
    """cos and sin of fp32 angles up to about 1e5 radians, each within 1e-7.

    The library's own cost hundreds of instructions and a stack each, for the reduction of angles beyond. Quarter turns
    are taken off in three parts, of which the first times their number is exact; the coefficients are minimax.
    """
    turns = tl.floor(angle * 0.6366197723675814 + 0.5)
    r = ((angle - turns * 1.5703125) - turns * 0.0004837512969970703) - turns * 7.549790126404332e-08
    z = r * r
    s = r + r * z * (-0.16666651 + z * (0.00833197 + z * -0.00019495))
    c = 1.0 - 0.5 * z + z * z * (4.16666467e-2 + z * (-1.38873598e-3 + z * 2.44375328e-5))
    quarter = tl.where(turns == turns, turns, 0.0).to(tl.int32)
    is_odd = (quarter & 1) != 0
    cos = tl.where(is_odd, s, c)
    sin = tl.where(is_odd, c, s)
    return tl.where(((quarter + 1) & 2) != 0, -cos, cos), tl.where((quarter & 2) != 0, -sin, sin)


@triton.jit(do_not_specialize=["tokens", "length", "positions", "steps"])
def _rotary_kernel(
    t_ptr,
    freqs_ptr,  # (positions, DIM)
    start_ptr,  # (batch,) or None
    offsets_ptr,  # (length + 1,) for packed tokens, else None
    y_ptr,
    tokens,  # of all sequences together
    length,  # of each sequence; of packed tokens the number of sequences
    heads,
    positions,
    steps,  # of the search for a token's sequence among `length`
    batch_stride,  # 0 for packed tokens
    sequence_stride,
    head_stride,
    element_stride,
    y_batch_stride,
    y_sequence_stride,
    DIM: tl.constexpr,
    REST: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    INVERSE: tl.constexpr,
):
    """TOKENS tokens a program: their angles' sines and cosines serve all heads, HEADS at a time."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    in_tokens = token < tokens
    if offsets_ptr is None:
        batch = token // length
        place = token % length
        position = place
        passed_on = batch < 0
    else:
        # The last of the offsets that is not beyond the token.
        batch = tl.zeros([TOKENS], tl.int64)
        above = batch + length + 1
        for _ in range(steps):
            middle = (batch + above) // 2
            is_begun = tl.load(offsets_ptr + middle) <= token
            batch = tl.where(is_begun, middle, batch)
            above = tl.where(is_begun, above, middle)
        passed_on = batch >= length
        place = token
        position = token - tl.load(offsets_ptr + batch)
    if start_ptr is not None:
        position += tl.load(start_ptr + batch, mask=in_tokens & (passed_on == 0), other=0)
    pair = tl.arange(0, BLOCK)
    in_pairs = pair < DIM // 2
    is_known = in_tokens & (position >= 0) & (position < positions)
    angle_ptrs = freqs_ptr + position[:, None] * DIM + (pair * 2 if INTERLEAVED else pair)[None, :]
    angle = tl.load(angle_ptrs, mask=is_known[:, None] & in_pairs[None, :], other=float("nan"))
    angle = tl.where(passed_on[:, None], 0.0, angle)
    cos, sin = _cos_sin(angle)
    cos = cos[None]
    sin = sin[None]
    if INVERSE:
        sin = -sin
    t_ptr += (batch * batch_stride + place * sequence_stride)[None, :, None]
    y_ptr += (batch * y_batch_stride + place * y_sequence_stride)[None, :, None]
    both = tl.arange(0, 2 * BLOCK)[None, None, :]
    for first_head in range(0, heads, HEADS):
        head = (first_head + tl.arange(0, HEADS).to(tl.int64))[:, None, None]
        inside = (head < heads) & in_tokens[None, :, None]
        t_head = t_ptr + head * head_stride
        y_head = y_ptr + head * (DIM + REST)
        if INTERLEAVED:
            mask = inside & (both < DIM)
            t = tl.load(t_head + both * element_stride, mask=mask, other=0.0).to(tl.float32)
            first, second = tl.split(tl.reshape(t, [HEADS, TOKENS, BLOCK, 2]))
            y = tl.join(first * cos - second * sin, second * cos + first * sin)
            tl.store(y_head + both, tl.reshape(y, [HEADS, TOKENS, 2 * BLOCK]), mask=mask)
        else:
            left = pair[None, None, :]
            right = left + DIM // 2
            mask = inside & in_pairs[None, None, :]
            first = tl.load(t_head + left * element_stride, mask=mask, other=0.0).to(tl.float32)
            second = tl.load(t_head + right * element_stride, mask=mask, other=0.0).to(tl.float32)
            tl.store(y_head + left, first * cos - second * sin, mask=mask)
            tl.store(y_head + right, second * cos + first * sin, mask=mask)
        for start in tl.static_range(DIM, DIM + REST, 2 * BLOCK):
            element = start + both
            mask = inside & (element < DIM + REST)
            tl.store(y_head + element, tl.load(t_head + element * element_stride, mask=mask), mask=mask)


@dataclass(frozen=True)
class RotaryLaunch:
    """How the kernel is launched: `tokens` a program, `heads` at a time, of `block` pairs each."""

    block: int
    tokens: int
    heads: int
    warps: int


def rotary_launch(dim: int) -> RotaryLaunch:
    """The launch for heads of which `dim` elements are rotated."""
    block = max(8, 1 << (dim // 2 - 1).bit_length())
    return RotaryLaunch(block, max(1, 512 // block), 2, 2)


@functools.lru_cache(maxsize=4096)
def _prepare(
    device: torch.device,
    dtypes: tuple[torch.dtype | None, ...],  # noqa: ARG001 — a launch serves one set of dtypes
    shape: torch.Size,
    strides: tuple[int, ...],
    freqs_shape: torch.Size,
    sequences: int,
    tensor_format: str,
    interleaved: bool,
    inverse: bool,
) -> PreparedLaunch:
    """The launch on (t, freqs, start_positions, cu_seqlens, y)."""
    positions, dim = freqs_shape[0], freqs_shape[-1]
    heads, width = shape[-2:]
    if tensor_format == "thd":
        tokens, length, steps = shape[0], sequences, (sequences + 1).bit_length()
        batch_stride, sequence_stride, y_batch_stride, y_sequence_stride = 0, strides[0], 0, heads * width
    else:
        sequence_axis, batch_axis = (1, 0) if tensor_format == "bshd" else (0, 1)
        tokens, length, steps = shape[0] * shape[1], shape[sequence_axis], 0
        batch_stride, sequence_stride = strides[batch_axis], strides[sequence_axis]
        y_strides = shape[1] * heads * width, heads * width
        y_batch_stride, y_sequence_stride = y_strides[batch_axis], y_strides[sequence_axis]
    choice = rotary_launch(dim)
    numbers = (tokens, length, heads, positions, steps, batch_stride, sequence_stride, *strides[-2:])
    return PreparedLaunch(
        _rotary_kernel,
        (-(-tokens // choice.tokens),),
        device,
        (*numbers, y_batch_stride, y_sequence_stride),
        DIM=dim,
        REST=width - dim,
        BLOCK=choice.block,
        TOKENS=choice.tokens,
        HEADS=choice.heads,
        INTERLEAVED=interleaved,
        INVERSE=inverse,
        num_warps=choice.warps,
    )


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
    prepared = _prepare(t.device, dtypes, t.shape, t.stride(), freqs.shape, sequences, *options)
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
        back = (tensor_format, interleaved, not inverse)
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or not is_plain(dy):
            dt = _Rotary.apply(dy, *ctx.saved_tensors, back)
        else:
            dt = run_rotary(dy, *ctx.saved_tensors, *back)
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
    # What functorch calls a transform cannot look into our kernels; into PyTorch's own operations it can.
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
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


class RotaryPositionEmbedding(torch.nn.Module):
    """Angles of rotary position embedding: position · base^(−2j / dim) for pair j.

    They are computed in fp32 from fp64 frequencies, whatever dtype the module is cast to, and have no state.

    Args:
        dim: of a head's elements.
        rotary_percent: the share of dim that is rotated, in (0, 1].
        seq_len_interpolation_factor: positions are divided by it, if pretrained_max_position_embeddings is given too.
        pretrained_max_position_embeddings: the longest sequence of pretraining. A sequence longer than this times the
            factor is squeezed to this length instead.
        rotary_base: base of the frequencies.
        interleaved: as of apply_rotary_pos_emb.
        device: of the angles; moves with the module.
    Raises: UserError for a share without an even, positive number of elements.
    """

    inverse_frequencies: Tensor

    def __init__(
        self,
        dim: int,
        rotary_percent: float = 1.0,
        seq_len_interpolation_factor: float | None = None,
        pretrained_max_position_embeddings: int | None = None,
        rotary_base: float = 10000.0,
        interleaved: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.dim = int(dim * rotary_percent)
        if not 0 < rotary_percent <= 1 or self.dim < 2 or self.dim % 2:
            raise UserError(
                f"RotaryPositionEmbedding: {rotary_percent} of {dim} elements are rotated; pass a rotary_percent in "
                "(0, 1] that leaves a positive, even number."
            )
        self.seq_len_interpolation_factor = seq_len_interpolation_factor
        self.pretrained_max_position_embeddings = pretrained_max_position_embeddings
        self.rotary_base = rotary_base
        self.interleaved = interleaved
        self.register_buffer("inverse_frequencies", self._inverse_frequencies(device), persistent=False)

    def _inverse_frequencies(self, device: torch.device | str | None) -> Tensor:
        exponents = torch.arange(0, self.dim, 2, dtype=torch.float64, device=device) / self.dim
        return (self.rotary_base**-exponents).float()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RotaryPositionEmbedding:
        """Follow to another device, but not to another dtype; memory without values, of to_empty, gets its values."""
        super()._apply(fn, recurse)
        self.inverse_frequencies = self._inverse_frequencies(self.inverse_frequencies.device)
        return self

    def forward(self, max_seq_len: int, offset: int = 0) -> Tensor:
        """(max_seq_len, 1, 1, dim) fp32 angles in radians of positions offset, offset + 1, …"""
        position = torch.arange(max_seq_len, dtype=torch.float32, device=self.inverse_frequencies.device) + offset
        factor, longest = self.seq_len_interpolation_factor, self.pretrained_max_position_embeddings
        if factor is not None and longest is not None:
            position = position / (max_seq_len / longest if max_seq_len > longest * factor else factor)
        angles = position[:, None] * self.inverse_frequencies
        both = angles.repeat_interleave(2, dim=1) if self.interleaved else torch.cat((angles, angles), 1)
        return both[:, None, None, :]


def prove(device: torch.device) -> list[Proof]:
    """Forward and backward on fresh random inputs, against the reference in float64."""
    proofs = []
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 6e-3)):
        for tensor_format, interleaved in (("bshd", False), ("thd", True)):
            t = torch.randn(2, 17, 3, 24, device=device).to(dtype)
            freqs = RotaryPositionEmbedding(20, interleaved=interleaved, device=device)(17)
            offsets = None
            if tensor_format == "thd":
                t, offsets = t.flatten(0, 1), torch.tensor([0, 13, 30], dtype=torch.int32, device=device)
            for inverse in (False, True):
                options = (None, offsets, tensor_format, interleaved, inverse)
                error = relative_error(rotary(t, freqs, *options), rotary_reference(t.double(), freqs, *options))
                what = f"{'backward' if inverse else 'forward'}, {tensor_format}, {dtype_name(dtype)}"
                proofs.append(Proof(what, error, tolerance))
    return proofs


def compilations() -> Iterator[Compilation]:
    """Halves and neighbours, each format and dtype once."""
    for dim, rest, element, interleaved, packed in (
        (64, 0, "bf16", False, False),
        (128, 0, "bf16", True, False),
        (20, 4, "fp32", False, True),
        (128, 0, "fp16", True, True),
    ):
        choice = rotary_launch(dim)
        absent = "offsets_ptr" if not packed else None
        pointers = {"t_ptr": element, "freqs_ptr": "fp32", "start_ptr": "i32", "offsets_ptr": "i32", "y_ptr": element}
        strides = ("batch_stride", "sequence_stride", "head_stride", "y_batch_stride", "y_sequence_stride")
        integers = ("tokens", "length", "heads", "positions", "steps", *strides)
        there = {name: f"*{kind}" for name, kind in pointers.items() if name != absent}
        constexprs: dict[str, Any] = {
            "element_stride": 1,
            "DIM": dim,
            "REST": rest,
            "BLOCK": choice.block,
            "TOKENS": choice.tokens,
            "HEADS": choice.heads,
            "INTERLEAVED": interleaved,
            "INVERSE": packed,
        } | ({absent: None} if absent else {})
        yield Compilation(
            _rotary_kernel,
            f"{'neighbours' if interleaved else 'halves'} of {dim + rest}, {element}{', packed' if packed else ''}",
            there | dict.fromkeys(integers, "i32") | dict.fromkeys(constexprs, "constexpr"),
            constexprs,
            choice.warps,
            divisible_by_16=frozenset(there).union(strides if rest == 0 else ()),
        )


catalogue(Op("rotary", "rotary position embedding", prove, compilations))
