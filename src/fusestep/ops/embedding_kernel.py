"""The forward kernel of the embedding; embedding.py says what it computes."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch

from fusestep.language import tl, triton
from fusestep.ops.dtypes import SHORT_NAMES
from fusestep.ops.launch import PreparedLaunch
from fusestep.ops.registry import Compilation

#: Elements of a program's tile.
TILE = 4096


@triton.jit(do_not_specialize=["tokens", "length", "rows"])
def _rows_kernel(
    ids_ptr,  # (tokens,)
    weight_ptr,  # (rows, width), weight_stride apart
    positions_ptr,  # (at least length, width), positions_stride apart, or None
    y_ptr,  # (tokens, width)
    tokens,
    length,  # of a sequence
    rows,
    width,
    weight_stride,
    positions_stride,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """TOKENS tokens a program, COLUMNS of their elements."""
    across = (width - 1) // COLUMNS + 1
    program = tl.program_id(0)  # widened later
    token = (program // across).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    column = ((program % across) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    in_tokens = token < tokens
    mask = in_tokens[:, None] & (column < width)
    row = tl.load(ids_ptr + token, mask=in_tokens, other=0).to(tl.int64)
    is_known = ((row >= 0) & (row < rows))[:, None]
    found = weight_ptr + row[:, None] * weight_stride + column
    y = tl.load(found, mask=mask & is_known, other=float("nan")).to(tl.float32)
    if positions_ptr is not None:
        place = (token % length)[:, None]
        y += tl.load(positions_ptr + place * positions_stride + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + token[:, None] * width + column, y, mask=mask)


def tile(width: int) -> tuple[int, int]:
    """Tokens and columns of a program: as few columns beyond the width as there can be."""
    columns = min(1024, 1 << max(width - 1, 0).bit_length())
    while columns > 256 and width % columns:
        columns //= 2
    return max(1, TILE // columns), columns


@functools.lru_cache(maxsize=4096)
def prepare(
    device: torch.device,
    dtypes: tuple[torch.dtype | None, ...],  # noqa: ARG001 — a launch serves one set of dtypes
    tokens: int,
    length: int,
    shape: torch.Size,
    strides: tuple[int, int],
) -> PreparedLaunch:
    """The launch on (ids, weight, positions or None, y), for a table of this shape."""
    rows, width = shape
    per_program, columns = tile(width)
    return PreparedLaunch(
        _rows_kernel,
        (-(-tokens // per_program) * -(-width // columns),),
        device,
        (tokens, length, rows, width, *strides),
        TOKENS=per_program,
        COLUMNS=columns,
        num_warps=4,
    )


def compilations() -> Iterator[Compilation]:
    """With positions and without, in each of the dtypes."""
    for dtype, width, ids in ((torch.float32, 768, "i64"), (torch.bfloat16, 2048, "i32"), (torch.float16, 768, "i64")):
        for has_positions in (True, False):
            kind = f"*{SHORT_NAMES[dtype]}"
            pointers = {"ids_ptr": f"*{ids}", "weight_ptr": kind, "y_ptr": kind}
            per_program, columns = tile(width)
            constants: dict[str, Any] = {"TOKENS": per_program, "COLUMNS": columns}
            if has_positions:
                pointers["positions_ptr"] = kind
            else:
                constants["positions_ptr"] = None
            strides = ("width", "weight_stride", "positions_stride")
            yield Compilation(
                _rows_kernel,
                f"forward, {SHORT_NAMES[dtype]}{', with positions' if has_positions else ''}",
                pointers
                | dict.fromkeys(("tokens", "length", "rows", *strides), "i32")
                | dict.fromkeys(constants, "constexpr"),
                constants,
                num_warps=4,
                divisible_by_16=frozenset({*pointers, *strides}),
            )
