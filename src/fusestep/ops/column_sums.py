"""The sums of a matrix's columns: the gradient of a bias, of which every row of the output has its share.

    sums[j] = Σ_i x[i, j]

Computed in fp32 and rounded once. Programs add tiles below one another in registers, and their parts are added in a
fixed order, so the same input gives the same bits on the same device. Nothing is added by floating-point atomics.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusestep import dispatch
from fusestep.errors import UserError
from fusestep.language import tl, triton
from fusestep.ops.dtypes import CASTABLE
from fusestep.ops.launch import PreparedLaunch
from fusestep.ops.layouts import keep, row_stride
from fusestep.ops.registry import Compilation, Op, Proof, catalogue, define, is_plain, relative_error
from fusestep.ops.tickets import counters, last_of, sum_of_parts


@triton.jit(do_not_specialize=["rows", "tiles", "parts"])
def _column_sums_kernel(
    x_ptr,  # rows of `columns`, x_stride apart
    parts_ptr,  # (parts, columns), fp32, or None for one part, which is the whole
    sums_ptr,  # (columns,)
    counters_ptr,  # one for each block of columns, or None for one part
    rows,
    columns,
    x_stride,
    tiles,
    parts,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    PART_ROWS: tl.constexpr,
):
    """A block of columns and `tiles` tiles of rows a program; the last of a block of columns adds the parts."""
    across = (columns - 1) // COLUMNS + 1
    program = tl.program_id(0)  # widened later
    block = program % across
    down = (program // across).to(tl.int64)
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    stride = tl.cast(x_stride, tl.int64)
    for tile in tl.range(0, tiles, num_stages=STAGES):
        row = (down * tiles + tile) * ROWS + tl.arange(0, ROWS)[:, None]
        mask = (row < rows) & inside[None, :]
        total += tl.load(x_ptr + row * stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
    sums = tl.sum(total, axis=0)
    if counters_ptr is None:
        tl.store(sums_ptr + column, sums, mask=inside)
    else:
        tl.store(parts_ptr + down * columns + column, sums, mask=inside)
        if last_of(counters_ptr + block, parts):
            tl.store(sums_ptr + column, sum_of_parts(parts_ptr, parts, columns, column, inside, PART_ROWS), mask=inside)


@dataclass(frozen=True)
class SumsLaunch:
    """Tiles of `rows` × `columns`; of a block of columns there are at most `parts` parts."""

    rows: int = 64
    columns: int = 64
    parts: int = 64
    warps: int = 4
    stages: int = 3


#: A row of a tile is a line of the cache in bf16. 64 parts are added in one go, by the registers of one program.
LAUNCH = SumsLaunch()


def split_rows(rows: int, tile_rows: int, most: int) -> tuple[int, int]:
    """(tiles of a part, parts), at most so many parts of whole tiles."""
    there = -(-rows // tile_rows)
    tiles = -(-there // most)
    return tiles, -(-there // tiles)


@dataclass(frozen=True, slots=True)
class ColumnSums:
    """The launch on matrices of one layout."""

    launch: PreparedLaunch
    columns: int
    parts: int
    blocks: int

    def __call__(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        sums = torch.empty(self.columns, dtype=dtype, device=x.device)
        if self.parts == 1:
            self.launch(x, None, sums, None)
            return sums
        parts = torch.empty((self.parts, self.columns), dtype=torch.float32, device=x.device)
        if x.is_cuda and x.get_device() != torch._C._cuda_getDevice():
            with torch.cuda.device(x.get_device()):
                self.launch(x, parts, sums, counters(x.device, self.blocks))
        else:
            self.launch(x, parts, sums, counters(x.device, self.blocks))
        return sums


def prepare_column_sums(
    device: torch.device, rows: int, columns: int, stride: int, choice: SumsLaunch = LAUNCH
) -> ColumnSums:
    """The launch on matrices of (rows, columns) whose rows are `stride` elements apart."""
    tiles, parts = split_rows(rows, choice.rows, choice.parts)
    blocks = -(-columns // choice.columns)
    launch = PreparedLaunch(
        _column_sums_kernel,
        (blocks * parts,),
        device,
        (rows, columns, stride, tiles, parts),
        ROWS=choice.rows,
        COLUMNS=choice.columns,
        STAGES=choice.stages,
        PART_ROWS=choice.parts,
        num_warps=choice.warps,
    )
    return ColumnSums(launch, columns, parts, blocks)


#: By layouts; see `keep`.
_known: dict[tuple[Any, ...], ColumnSums] = {}


def run_column_sums(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The sums of the columns of x (rows, columns) in `dtype`."""
    rows, columns = x.shape
    if x.numel() == 0 or not uses_triton(x):
        # An op may not return a view, which the sum of one row in the same dtype would be.
        return torch.sum(x, 0, dtype=x.dtype if x.dtype is torch.float64 else torch.float32).to(dtype, copy=True)
    stride = row_stride(x, columns)
    if stride is None:
        x, stride = x.contiguous(), columns
    key = (x.device, rows, columns, stride, x.dtype, dtype)
    known = _known.get(key)
    if known is None:
        known = keep(_known, key, prepare_column_sums(x.device, rows, columns, stride))
    return known(x, dtype)


def uses_triton(x: Tensor) -> bool:
    unsupported = None if x.dtype in CASTABLE else f"the kernel adds in fp32, not {x.dtype}"
    return dispatch.uses_triton("column_sums", x.device, unsupported)


def serves(x: Tensor) -> bool:
    """Whether the kernel runs on x; a dtype that it was not made for is no fallback to who has another way."""
    return x.dtype in CASTABLE and uses_triton(x)


column_sums_op = define(
    "column_sums(Tensor x, ScalarType dtype) -> Tensor",
    run_column_sums,
    lambda x, dtype: x.new_empty(x.shape[1], dtype=dtype),
)


def column_sums(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The sums of a matrix's columns. No gradient flows through it.

    Args:
        x: (rows, columns) fp32, bf16, fp16 or fp64; any strides.
        dtype: of the sums; that of x by default.

    Returns: (columns,), added in fp32 (fp64 of fp64) and rounded once.
    Raises: UserError for another number of dimensions, or a dtype that is none of these.
    """
    if x.dim() != 2:
        raise UserError(f"column_sums: x has shape {tuple(x.shape)}; pass a matrix.")
    if x.dtype not in CASTABLE and x.dtype is not torch.float64:
        raise UserError(f"column_sums: x has dtype {x.dtype}; pass float32, bfloat16, float16 or float64.")
    wanted = x.dtype if dtype is None else dtype
    if not torch.compiler.is_compiling() and is_plain(x):
        return run_column_sums(x.detach(), wanted)
    sums: Tensor = column_sums_op(x.detach(), wanted)
    return sums


def prove(device: torch.device) -> list[Proof]:
    """One part and several, against float64, on fresh random matrices."""
    proofs = []
    for what, rows, columns in (("one part", 9, 101), ("several", 700, 130)):
        x = torch.randn(rows, columns, device=device).add_(0.5)
        proofs.append(Proof(f"column sums, {what}", relative_error(column_sums(x), x.double().sum(0)), 1e-6))
    return proofs


def compilations() -> Iterator[Compilation]:
    """One part and several, of bf16 and fp32."""
    constants = {
        "ROWS": LAUNCH.rows,
        "COLUMNS": LAUNCH.columns,
        "STAGES": LAUNCH.stages,
        "PART_ROWS": LAUNCH.parts,
    }
    numbers = ["rows", "columns", "x_stride", "tiles", "parts"]
    for element in ("bf16", "fp32"):
        for is_whole in (False, True):
            pointers = {"x_ptr": f"*{element}", "sums_ptr": f"*{element}"}
            given: dict[str, Any] = dict(constants)
            if is_whole:
                given |= {"parts_ptr": None, "counters_ptr": None}
            else:
                pointers |= {"parts_ptr": "*fp32", "counters_ptr": "*i32"}
            yield Compilation(
                _column_sums_kernel,
                f"{element}, {'one part' if is_whole else 'several'}",
                pointers | dict.fromkeys(numbers, "i32") | dict.fromkeys(given, "constexpr"),
                given,
                num_warps=LAUNCH.warps,
                divisible_by_16=frozenset({*pointers, "columns", "x_stride"}),
            )


catalogue(Op("column_sums", "sums of a matrix's columns, the gradient of a bias", prove, compilations))
