"""The kernel of the rotation; rotary.py says what it computes."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from fusestep.language import tl, triton
from fusestep.ops.launch import PreparedLaunch
from fusestep.ops.registry import Compilation


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
def prepare(
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
