"""An activation's gradient together with the sums of its columns: the gradient of a bias that the input was given.

Where h = x · weightᵀ + bias, bias has the column sums of h's gradient for its own. The kernel that forms that gradient
has it in registers in fp32, so it is summed before it is rounded, and read by nobody for the sums alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusestep.language import tl, triton
from fusestep.ops.activation_kernel import activation_derivative, gated_gradients
from fusestep.ops.column_sums import split_rows
from fusestep.ops.launch import PreparedLaunch
from fusestep.ops.layouts import keep
from fusestep.ops.registry import Compilation
from fusestep.ops.tickets import counters, last_of, sum_of_parts


@triton.jit(do_not_specialize=["rows", "tiles", "parts"])
def _activation_sums_kernel(
    h_ptr,  # rows of `columns`, h_stride apart; gated 2 · columns
    dy_ptr,  # (rows, columns), rows dy_stride apart
    dh_ptr,  # the gradient of h, contiguous
    parts_ptr,  # (parts, columns), gated 2 · columns; fp32; or None for one part, which is the whole
    sums_ptr,  # (columns,), gated 2 · columns
    counters_ptr,  # one for each block of columns, or None for one part
    rows,
    columns,
    h_stride,
    dy_stride,
    tiles,
    parts,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PART_ROWS: tl.constexpr,
):
    """A block of columns and `tiles` tiles of rows a program; the last of a block of columns adds the parts."""
    HALVES: tl.constexpr = 2 if GATED else 1
    across = (columns - 1) // COLUMNS + 1
    program = tl.program_id(0)  # widened later
    block = program % across
    down = (program // across).to(tl.int64)
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    width = tl.cast(columns, tl.int64) * HALVES
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    second = tl.zeros([ROWS, COLUMNS], tl.float32)
    for tile in tl.range(0, tiles, num_stages=1):
        row = (down * tiles + tile) * ROWS + tl.arange(0, ROWS)[:, None]
        mask = (row < rows) & inside[None, :]
        h_place = row * h_stride + column[None, :]
        a = tl.load(h_ptr + h_place, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row * dy_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
        place = row * width + column[None, :]
        if GATED:
            b = tl.load(h_ptr + h_place + columns, mask=mask, other=0.0).to(tl.float32)
            da, db = gated_gradients(dy, a, b, KIND)
            tl.store(dh_ptr + place + columns, db, mask=mask)
            second += db
        else:
            da = dy * activation_derivative(a, KIND)
        tl.store(dh_ptr + place, da, mask=mask)
        total += da
    sums = tl.sum(total, axis=0)
    second_sums = tl.sum(second, axis=0)
    if counters_ptr is None:
        tl.store(sums_ptr + column, sums, mask=inside)
        if GATED:
            tl.store(sums_ptr + columns + column, second_sums, mask=inside)
    else:
        tl.store(parts_ptr + down * width + column, sums, mask=inside)
        if GATED:
            tl.store(parts_ptr + down * width + columns + column, second_sums, mask=inside)
        if last_of(counters_ptr + block, parts):
            tl.store(sums_ptr + column, sum_of_parts(parts_ptr, parts, width, column, inside, PART_ROWS), mask=inside)
            if GATED:
                second_sums = sum_of_parts(parts_ptr + columns, parts, width, column, inside, PART_ROWS)
                tl.store(sums_ptr + columns + column, second_sums, mask=inside)


@dataclass(frozen=True)
class ActivationSumsLaunch:
    """Tiles of `rows` × `columns`; of a block of columns there are at most `parts` parts."""

    rows: int = 32
    columns: int = 64
    parts: int = 64
    warps: int = 4


#: A row of a tile is a line of the cache in bf16. 64 parts are added in one go, by the registers of one program.
LAUNCH = ActivationSumsLaunch()

#: By layouts; see `keep`.
_known: dict[tuple[Any, ...], tuple[PreparedLaunch, int, int]] = {}


def run_activation_sums(
    h: Tensor, dy: Tensor, kind: str, gated: bool, rows: int, strides: tuple[int, int], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The gradient of h, and the sums of its columns in `dtype`.

    Args: h (…, columns), gated (…, 2 · columns): `rows` rows, as those of dy, that are `strides` elements apart; kind:
        the function that the activation is made of.
    """
    device = h.device
    if h.is_cuda and h.get_device() != torch._C._cuda_getDevice():
        with torch.cuda.device(device):
            return run_activation_sums(h, dy, kind, gated, rows, strides, dtype)
    width = h.shape[-1]
    key = (device, rows, width, strides, h.dtype, dy.dtype, dtype, kind, gated)
    known = _known.get(key)
    if known is None:
        known = keep(_known, key, _prepare(device, rows, width // 2 if gated else width, strides, kind, gated))
    launch, blocks, parts = known
    dh = torch.empty(h.shape, dtype=h.dtype, device=device)
    sums = torch.empty(width, dtype=dtype, device=device)
    if parts == 1:
        launch(h, dy, dh, None, sums, None)
    else:
        launch(h, dy, dh, h.new_empty((parts, width), dtype=torch.float32), sums, counters(device, blocks))
    return dh, sums


def _prepare(
    device: torch.device, rows: int, columns: int, strides: tuple[int, int], kind: str, gated: bool
) -> tuple[PreparedLaunch, int, int]:
    """The launch, its blocks of columns and their parts."""
    tiles, parts = split_rows(rows, LAUNCH.rows, LAUNCH.parts)
    blocks = -(-columns // LAUNCH.columns)
    launch = PreparedLaunch(
        _activation_sums_kernel,
        (blocks * parts,),
        device,
        (rows, columns, *strides, tiles, parts),
        KIND=kind,
        GATED=gated,
        ROWS=LAUNCH.rows,
        COLUMNS=LAUNCH.columns,
        PART_ROWS=LAUNCH.parts,
        num_warps=LAUNCH.warps,
    )
    return launch, blocks, parts


def compilations(bases: dict[str, str], gated: frozenset[str]) -> Iterator[Compilation]:
    """Each function of `bases`, by the activation's name; one part and several."""
    for name, kind in bases.items():
        for is_whole in (False, True) if name in ("gelu", "swiglu") else (False,):
            constants: dict[str, Any] = {
                "KIND": kind,
                "GATED": name in gated,
                "ROWS": LAUNCH.rows,
                "COLUMNS": LAUNCH.columns,
                "PART_ROWS": LAUNCH.parts,
            }
            pointers = dict.fromkeys(("h_ptr", "dy_ptr", "dh_ptr", "sums_ptr"), "*bf16")
            if is_whole:
                constants |= {"parts_ptr": None, "counters_ptr": None}
            else:
                pointers |= {"parts_ptr": "*fp32", "counters_ptr": "*i32"}
            numbers = ["rows", "columns", "h_stride", "dy_stride", "tiles", "parts"]
            yield Compilation(
                _activation_sums_kernel,
                f"{name}, backward with sums{', one part' if is_whole else ''}",
                pointers | dict.fromkeys(numbers, "i32") | dict.fromkeys(constants, "constexpr"),
                constants,
                num_warps=LAUNCH.warps,
                divisible_by_16=frozenset({*pointers, "columns", "h_stride", "dy_stride"}),
            )
