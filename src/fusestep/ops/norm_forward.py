"""Forward kernels of LayerNorm and RMSNorm, with the residual add folded in.

A row of N values is normalised in fp32 and rounded once:

    y = x̂ · weight + bias,   x̂ = (x − mean) · rstd,   rstd = 1 / √(mean((x − mean)²) + eps)

with mean = 0 for RMSNorm. Given a residual, x is first replaced by x + residual, rounded to its own dtype and stored,
so that backward starts from the very numbers that were normalised.

The variance of a row that is held in registers is two-pass. A row that is walked in blocks of columns is read once for
its statistics, of LayerNorm by Welford's recurrence in each lane, and the lanes' means and squares are combined
two-pass. The mean of fp32 and fp16 rows, and of every row that is walked, is found relative to the row's first element,
and what its rounding to fp32 loses is kept beside it: a row far from zero (1e6 + noise) loses no digits, and a constant
row is centred to exact zeros. Other bf16 rows need neither: a sum of at most 32768 equal values is exact, and
neighbouring bf16 values are far further apart than an fp32 mean is wrong.

Statistics are fp32, (rows, STATISTICS): rstd, and for LayerNorm the mean, and what the mean's rounding lost if kept.

Where the squares of a row overflow fp32 (magnitudes above about 1e19), rstd is 0 and y is the bias.

Sources: Welford 1962, "Note on a method for calculating corrected sums of squares and products"; Chan, Golub and
LeVeque 1979, "Updating formulae and a pairwise algorithm for computing sample variances".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from fusestep import hardware
from fusestep.language import tl, triton
from fusestep.ops.launch import PreparedLaunch


@triton.jit
def in_fp32(x):
    """x in fp32: of bf16 by its bits, since the compiler turns the cast into one and a half instructions a value."""
    if x.dtype == tl.bfloat16:
        x = (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def load_sum(x_ptr, residual_ptr, x_offset, residual_offset, mask, sum_ptr, EVICTION: tl.constexpr):
    """x, or x + residual rounded to the dtype of the stored sum, in fp32; EVICTION tells the cache what comes later."""
    x = in_fp32(tl.load(x_ptr + x_offset, mask=mask, other=0.0, eviction_policy=EVICTION))
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + residual_offset, mask=mask, other=0.0, eviction_policy=EVICTION)
        x += in_fp32(residual)
        x = x.to(sum_ptr.dtype.element_ty).to(tl.float32)
    return x


@triton.jit
def raw_columns(pointer, column, inside, NEUTRAL: tl.constexpr):
    """A weight or bias for a block of columns; where there is none, the number that changes nothing."""
    return NEUTRAL if pointer is None else tl.load(pointer + column, mask=inside, other=NEUTRAL)


@triton.jit
def columns_in_fp32(pointer, raw):
    return raw if pointer is None else in_fp32(raw)


@triton.jit
def load_columns(pointer, column, inside, NEUTRAL: tl.constexpr):
    """raw_columns in fp32."""
    return columns_in_fp32(pointer, raw_columns(pointer, column, inside, NEUTRAL))


@triton.jit
def _zero_padding(x, in_width, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """x with zeros beyond the row's end, where a difference from the mean would be −mean."""
    if WIDTH < BLOCK:
        x = tl.where(in_width, x, 0.0)
    return x


@triton.jit
def load_tile(
    x_ptr, residual_ptr, sum_ptr, row, rows, x_stride, residual_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """Whole rows of x, or of x + residual, in fp32; `row` has shape (n, 1)."""
    column = tl.arange(0, BLOCK)[None, :]
    mask = (row < rows) & (column < WIDTH)
    return load_sum(x_ptr, residual_ptr, row * x_stride + column, row * residual_stride + column, mask, sum_ptr, "")


@triton.jit
def normalised_tile(
    x,
    x_ptr,
    residual_ptr,
    sum_ptr,
    statistics_ptr,
    row,
    rows,
    x_stride,
    residual_stride,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    STATISTICS: tl.constexpr,
):
    """x − mean, and rstd, of the rows x that load_tile has loaded.

    Also stores the sum and the statistics, unless statistics_ptr is None.
    """
    column = tl.arange(0, BLOCK)[None, :]
    in_width = column < WIDTH
    in_rows = row < rows
    if residual_ptr is not None and statistics_ptr is not None:
        tl.store(sum_ptr + row * WIDTH + column, x, mask=in_rows & in_width)
    if STATISTICS == 2:
        mean = tl.div_rn(tl.sum(x, axis=1, keep_dims=True), WIDTH)
        x = _zero_padding(x - mean, in_width, WIDTH, BLOCK)
    if STATISTICS == 3:
        first = load_sum(x_ptr, residual_ptr, row * x_stride, row * residual_stride, in_rows, sum_ptr, "")
        x = _zero_padding(x - first, in_width, WIDTH, BLOCK)
        shift = tl.div_rn(tl.sum(x, axis=1, keep_dims=True), WIDTH)
        mean = first + shift
        if statistics_ptr is not None:
            tl.store(statistics_ptr + row * STATISTICS + 2, shift - (mean - first), mask=in_rows)
        x = _zero_padding(x - shift, in_width, WIDTH, BLOCK)
    if STATISTICS > 1 and statistics_ptr is not None:
        tl.store(statistics_ptr + row * STATISTICS + 1, mean, mask=in_rows)
    rstd = tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) / WIDTH + eps)
    if statistics_ptr is not None:
        tl.store(statistics_ptr + row * STATISTICS, rstd, mask=in_rows)
    return x, rstd


@triton.jit
def _forward_tile(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    sum_ptr,
    statistics_ptr,
    weight,
    bias,
    tile,
    rows,
    x_stride,
    residual_stride,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    STATISTICS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Normalise and store a tile of ROWS rows."""
    column = tl.arange(0, BLOCK)[None, :]
    in_width = column < WIDTH
    row = tl.arange(0, ROWS)[:, None].to(tl.int64) + tile * ROWS
    x = load_tile(x_ptr, residual_ptr, sum_ptr, row, rows, x_stride, residual_stride, WIDTH, BLOCK)
    if COLUMNS == "early":
        weight = raw_columns(weight_ptr, column, in_width, 1.0)
        bias = raw_columns(bias_ptr, column, in_width, 0.0)
    x, rstd = normalised_tile(
        *(x, x_ptr, residual_ptr, sum_ptr, statistics_ptr, row, rows, x_stride, residual_stride, eps),
        *(WIDTH, BLOCK, STATISTICS),
    )
    if COLUMNS == "late":
        weight = raw_columns(weight_ptr, column, in_width, 1.0)
        bias = raw_columns(bias_ptr, column, in_width, 0.0)
    y = x * rstd * columns_in_fp32(weight_ptr, weight) + columns_in_fp32(bias_ptr, bias)
    tl.store(y_ptr + row * WIDTH + column, y, mask=(row < rows) & in_width)


@triton.jit(do_not_specialize=["rows"])
def _norm_forward_kernel(
    x_ptr,  # rows of WIDTH, x_stride apart
    residual_ptr,  # likewise, or None
    weight_ptr,  # (WIDTH,) or None
    bias_ptr,  # (WIDTH,) or None
    y_ptr,  # (rows, WIDTH)
    sum_ptr,  # (rows, WIDTH), None without a residual
    statistics_ptr,  # (rows, STATISTICS)
    rows,
    x_stride,
    residual_stride,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    STATISTICS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Whole rows in registers, ROWS at a time. Where weight and bias are kept, a program walks several tiles, and the
    loads of the next are under way while one is worked on."""
    tile = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)[None, :]
    if COLUMNS == "kept":
        weight = load_columns(weight_ptr, column, column < WIDTH, 1.0)
        bias = load_columns(bias_ptr, column, column < WIDTH, 0.0)
        for following in tl.range(tile, (rows - 1) // ROWS + 1, tl.num_programs(0), num_stages=STAGES):
            _forward_tile(
                *(x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, sum_ptr, statistics_ptr, weight, bias, following),
                *(rows, x_stride, residual_stride, eps, WIDTH, BLOCK, ROWS, STATISTICS, COLUMNS),
            )
    else:
        _forward_tile(
            *(x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, sum_ptr, statistics_ptr, 1.0, 0.0, tile),
            *(rows, x_stride, residual_stride, eps, WIDTH, BLOCK, ROWS, STATISTICS, COLUMNS),
        )


@triton.jit
def row_statistics(
    x_ptr,
    residual_ptr,
    sum_ptr,
    is_row,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    CENTRED: tl.constexpr,
):
    """Mean, what its rounding lost, and rstd of one row, read once in blocks of columns; pointers are to the row."""
    columns = tl.arange(0, BLOCK)
    mean = 0.0
    mean_low = 0.0
    squares = tl.zeros([BLOCK], tl.float32)
    if CENTRED:
        first = load_sum(x_ptr, residual_ptr, 0, 0, is_row, sum_ptr, "")
        shifts = tl.zeros([BLOCK], tl.float32)  # the mean of each lane, less `first`
        for start in tl.range(0, WIDTH, BLOCK, num_stages=STAGES):
            column = start + columns
            inside = column < WIDTH
            x = load_sum(x_ptr, residual_ptr, column, column, inside, sum_ptr, "evict_last")
            difference = tl.where(inside, (x - first) - shifts, 0.0)
            step = difference * (1.0 / (start // BLOCK + 1))
            shifts += step
            squares += difference * (difference - step)
        count = ((WIDTH - columns + (BLOCK - 1)) // BLOCK).to(tl.float32)
        shift = tl.div_rn(tl.sum(shifts * count, axis=0), WIDTH)
        shifts -= shift
        squares += shifts * shifts * count
        mean = first + shift
        mean_low = shift - (mean - first)
    else:
        for start in tl.range(0, WIDTH, BLOCK, num_stages=STAGES):
            column = start + columns
            x = load_sum(x_ptr, residual_ptr, column, column, column < WIDTH, sum_ptr, "evict_last")
            squares += x * x
    rstd = tl.rsqrt(tl.sum(squares, axis=0) / WIDTH + eps)
    return mean, mean_low, rstd


@triton.jit
def store_statistics(statistics_ptr, mean, mean_low, rstd, STATISTICS: tl.constexpr):
    tl.store(statistics_ptr, rstd)
    if STATISTICS > 1:
        tl.store(statistics_ptr + 1, mean)
    if STATISTICS == 3:
        tl.store(statistics_ptr + 2, mean_low)


@triton.jit(do_not_specialize=["rows"])
def _norm_forward_wide_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    sum_ptr,
    statistics_ptr,
    rows,
    x_stride,
    residual_stride,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    STATISTICS: tl.constexpr,
):
    """One row a program, in blocks of columns: the second pass over a row finds it in the L2 cache."""
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    if residual_ptr is not None:
        residual_ptr += row * residual_stride
        sum_ptr += row * WIDTH
    y_ptr += row * WIDTH
    columns = tl.arange(0, BLOCK)
    mean, mean_low, rstd = row_statistics(
        x_ptr, residual_ptr, sum_ptr, row < rows, eps, WIDTH, BLOCK, STAGES, STATISTICS > 1
    )
    store_statistics(statistics_ptr + row * STATISTICS, mean, mean_low, rstd, STATISTICS)
    for start in tl.range(0, WIDTH, BLOCK, num_stages=STAGES):
        column = start + columns
        inside = column < WIDTH
        x = load_sum(x_ptr, residual_ptr, column, column, inside, sum_ptr, "evict_first")
        if residual_ptr is not None:
            tl.store(sum_ptr + column, x, mask=inside)
        weight = load_columns(weight_ptr, column, inside, 1.0)
        bias = load_columns(bias_ptr, column, inside, 0.0)
        tl.store(y_ptr + column, ((x - mean) - mean_low) * rstd * weight + bias, mask=inside)


@dataclass(frozen=True)
class ForwardLaunch:
    """How the forward is launched: tiles of `rows` × `block`, or with `wide` a row a program, in blocks of columns.

    Weight and bias are read once and "kept" in registers by `programs` persistent programs; or by each of one program
    a tile, where `programs` is None, "early", right behind x, or "late", where they are needed.
    """

    block: int
    rows: int
    programs: int | None
    warps: int
    stages: int = 1
    columns: Literal["kept", "early", "late"] = "late"
    wide: bool = False


def forward_launch(width: int, multiprocessors: int, centred: bool, itemsize: int) -> ForwardLaunch:
    """The launch for rows of a width, of LayerNorm (`centred`) or RMSNorm.

    One H200, bf16, 16384 rows, share of the byte floor for LayerNorm and RMSNorm. At width 768 twelve persistent
    programs a multiprocessor, one warp each, with loads three tiles ahead and weight and bias kept in registers: 0.86
    and 0.88 (eight with four tiles ahead: 0.84 and 0.88; 0.73 and 0.82 with weight and bias read in the loop, where
    their loads join the pipeline); programs of two or more warps lose a tenth, since it is instructions, not bytes,
    that bound narrow rows. Three parts of 256 columns, which leave no lane idle, with stores marked as streamed: 0.87
    and 0.90; but what reads the rows next would not find them in the cache, and without the mark they gain nothing.

    Wider rows take one program each, without a loop, which costs 0.01 and more where it goes round once. In registers
    on four warps: 0.92 and 0.94 at 2048 (two: 0.90 and 0.93; at 1536 two: 0.88 and 0.91, four: 0.84 and 0.91),
    LayerNorm 0.95 at 4096 (0.93 with its columns read late, 0.94 on eight warps), and 0.96 at 8192 on eight (0.92 with
    them read early, 0.91 on sixteen). An RMSNorm row of more than 2048 columns is walked in blocks, twice, for less
    than holding it costs: in blocks of 4096 on 16 warps 0.985 at 8192 (0.955 in registers), 0.99 at 12288 (0.96), 0.97
    at 16384; with a residual 0.99 at 4096 and 16384 (0.95 and 0.97). Rows of fewer bytes, or that leave much of their
    last block empty, in blocks of 2048 on eight: 0.956 at 4096 (0.945), 0.97 at 5120 (0.88 in blocks of 4096).
    Persistent programs lose a tenth, loads marked as read once 0.02 to 0.05; weight and bias marked as read again
    change nothing, but cost LayerNorm 0.01 from 16384 columns on.

    A LayerNorm row of 16384 in registers took 1.05 of what torch.compile took. In blocks of 4096 on 16 warps, the first
    pass marked as read again and the second as read for the last time, it took 0.99 (1.05 without the marks, 1.11 with
    8 warps or blocks of 8192). At 40000 columns blocks of 8192 on 16 warps took 0.70 (RMSNorm 0.86), of 4096 0.75.

    Args: itemsize: bytes a column of all that is read of a row: x and the residual.
    """
    block = 1 << max(width - 1, 0).bit_length()
    if block <= 1024:
        return ForwardLaunch(block, min(128, 2048 // block), 12 * multiprocessors, 1, 3, "kept")
    if width <= 1536:
        return ForwardLaunch(block, 1, None, 2)
    if block == 2048:
        return ForwardLaunch(block, 1, None, 4)
    if centred and block == 4096:
        return ForwardLaunch(block, 1, None, 4, columns="early")
    if centred and block == 8192:
        return ForwardLaunch(block, 1, None, 8)
    if block > 8192 or (width * itemsize > 8192 and -(-width // 4096) * 4096 <= 1.25 * width):
        limit = 16384 if centred else 32768
        return ForwardLaunch(4096 if block <= limit else 8192, 1, None, 16, wide=True)
    return ForwardLaunch(2048, 1, None, 8, wide=True)


def prepare_forward(
    device: torch.device,
    rows: int,
    columns: int,
    width: int,
    x_stride: int,
    residual_stride: int,
    eps: float,
    itemsize: int,
) -> PreparedLaunch:
    """The launch on (x, residual, weight, bias, y, x + residual, statistics), None for what is not there.

    Rows of x and of the residual are `x_stride` and `residual_stride` apart, all else is contiguous; `columns` are
    those of the statistics; `itemsize` as in forward_launch.
    """
    choice = forward_launch(width, hardware.multiprocessors(device.index or 0), columns > 1, itemsize)
    numbers = (rows, x_stride, residual_stride, eps)
    constants: dict[str, Any] = {"WIDTH": width, "BLOCK": choice.block, "STAGES": choice.stages}
    constants |= {"STATISTICS": columns, "num_warps": choice.warps}
    if choice.wide:
        return PreparedLaunch(_norm_forward_wide_kernel, (rows,), device, numbers, **constants)
    constants |= {"ROWS": choice.rows, "COLUMNS": choice.columns}
    tiles = -(-rows // choice.rows)
    programs = tiles if choice.programs is None else min(choice.programs, tiles)
    return PreparedLaunch(_norm_forward_kernel, (programs,), device, numbers, **constants)
