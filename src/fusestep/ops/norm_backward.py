"""Backward kernels of LayerNorm and RMSNorm: dx, and weight and bias gradients that repeat bit for bit.

With g = dy · weight, x̂ the normalised row of N values and means taken over the row:

    dx = rstd · (g − mean(g) − x̂ · mean(g · x̂)) + dsum        (RMSNorm without mean(g))
    dweight = Σ_rows dy · x̂,   dbias = Σ_rows dy

dsum is the gradient that reaches x + residual from elsewhere. Everything is computed in fp32. Where x and residual
differ in dtype, dx is written in both, each rounded once. x̂ comes from x and its statistics or, in the memory-efficient
form, from the output: x̂ = (y − bias) / weight.

Persistent programs walk tiles of rows and keep their part of dweight and dbias in registers; each writes it once to
`partials`, fp32, and a small second kernel adds the parts in a fixed order. Few rows are left to one program, whose
part is the whole: it writes the gradients themselves, and the second launch is spared. No atomics, so the same inputs
give the same bits on the same device. Rows too wide for that, but not for the registers that the sums alone need, are
walked in chunks of columns (norm_backward_chunks.py). Wider rows take two kernels, one for the two means of each row
and one over blocks of columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fusestep import hardware
from fusestep.language import interpreted, tl, triton
from fusestep.ops.launch import PreparedLaunch
from fusestep.ops.norm_backward_chunks import norm_backward_chunks_kernel, store_gradients
from fusestep.ops.norm_forward import load_columns


@triton.jit
def _normalised(x, statistics_ptr, row, in_rows, weight, bias, STATISTICS: tl.constexpr, FROM_OUTPUT: tl.constexpr):
    """(x̂, rstd) of a tile; `x` holds the input, or with FROM_OUTPUT the output."""
    rstd = tl.load(statistics_ptr + row * STATISTICS, mask=in_rows, other=0.0)
    if FROM_OUTPUT:
        x = (x - bias) / weight
    else:
        if STATISTICS > 1:
            x -= tl.load(statistics_ptr + row * STATISTICS + 1, mask=in_rows, other=0.0)
        if STATISTICS == 3:
            x -= tl.load(statistics_ptr + row * STATISTICS + 2, mask=in_rows, other=0.0)
        x *= rstd
    return x, rstd


@triton.jit(do_not_specialize=["rows"])
def _norm_backward_kernel(
    dy_ptr,  # rows of WIDTH, dy_stride apart
    dsum_ptr,  # (rows, WIDTH), or None
    x_ptr,  # rows of WIDTH, x_stride apart: the input, or with FROM_OUTPUT the output
    weight_ptr,  # (WIDTH,) or None
    bias_ptr,  # (WIDTH,) or None; read with FROM_OUTPUT alone
    statistics_ptr,  # (rows, STATISTICS)
    dx_ptr,  # (rows, WIDTH)
    copy_ptr,  # (rows, WIDTH), dx again in another dtype, or None
    first_ptr,  # partials: (programs, gradients of the parameters that are wanted, WIDTH), fp32; or see LONE_TILES
    second_ptr,  # None; or see LONE_TILES
    rows,
    dy_stride,
    x_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    STATISTICS: tl.constexpr,
    FROM_OUTPUT: tl.constexpr,
    WEIGHT_GRADIENT: tl.constexpr,
    BIAS_GRADIENT: tl.constexpr,
):
    """Whole rows in registers, ROWS at a time; the loads of the next tiles are under way while one is worked on."""
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)[None, :]
    in_width = column < WIDTH
    weight = load_columns(weight_ptr, column, in_width, 1.0)
    bias = load_columns(bias_ptr, column, in_width, 0.0)
    dweight = tl.zeros([BLOCK], tl.float32)
    dbias = tl.zeros([BLOCK], tl.float32)
    tiles = (rows - 1) // ROWS + 1
    for tile in tl.range(program, tiles, tl.num_programs(0), num_stages=STAGES):
        row = tl.arange(0, ROWS)[:, None].to(tl.int64) + tile * ROWS
        in_rows = row < rows
        mask = in_rows & in_width
        x = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row * dy_stride + column, mask=mask, other=0.0).to(tl.float32)
        x_hat, rstd = _normalised(x, statistics_ptr, row, in_rows, weight, bias, STATISTICS, FROM_OUTPUT)
        # dy is 0 on padding, so that nothing of x̂ there, which is not 0, enters a sum.
        if WEIGHT_GRADIENT:
            dweight += tl.sum(dy * x_hat, axis=0)
        if BIAS_GRADIENT:
            dbias += tl.sum(dy, axis=0)
        g = dy * weight
        dx = g - x_hat * (tl.sum(g * x_hat, axis=1, keep_dims=True) / WIDTH)
        if STATISTICS > 1:
            dx -= tl.sum(g, axis=1, keep_dims=True) / WIDTH
        dx *= rstd
        if dsum_ptr is not None:
            dx += tl.load(dsum_ptr + row * WIDTH + column, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx_ptr + row * WIDTH + column, dx, mask=mask)
        if copy_ptr is not None:
            tl.store(copy_ptr + row * WIDTH + column, dx, mask=mask)
    columns = tl.arange(0, BLOCK)
    store_gradients(first_ptr, second_ptr, program, columns, dweight, dbias, WIDTH, WEIGHT_GRADIENT, BIAS_GRADIENT)


@triton.jit(do_not_specialize=["rows"])
def _row_means_kernel(
    dy_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    statistics_ptr,
    means_ptr,  # (rows, 2), fp32: mean(g · x̂), mean(g)
    rows,
    dy_stride,
    x_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    STATISTICS: tl.constexpr,
    FROM_OUTPUT: tl.constexpr,
):
    """The two means that dx of a wide row needs; one row a program, in blocks of columns."""
    row = tl.program_id(0).to(tl.int64)
    in_rows = row < rows
    along = tl.zeros([BLOCK], tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, WIDTH, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < WIDTH
        weight = load_columns(weight_ptr, column, inside, 1.0)
        bias = load_columns(bias_ptr, column, inside, 0.0)
        x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(dy_ptr + row * dy_stride + column, mask=inside, other=0.0).to(tl.float32)
        x_hat, _ = _normalised(x, statistics_ptr, row, in_rows, weight, bias, STATISTICS, FROM_OUTPUT)
        g *= weight
        along += g * x_hat
        if STATISTICS > 1:
            total += g
    tl.store(means_ptr + row * 2, tl.sum(along, axis=0) / WIDTH)
    if STATISTICS > 1:
        tl.store(means_ptr + row * 2 + 1, tl.sum(total, axis=0) / WIDTH)


@triton.jit(do_not_specialize=["rows"])
def _norm_backward_wide_kernel(
    dy_ptr,
    dsum_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    statistics_ptr,
    means_ptr,
    dx_ptr,
    copy_ptr,
    first_ptr,
    second_ptr,
    rows,
    dy_stride,
    x_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    STATISTICS: tl.constexpr,
    FROM_OUTPUT: tl.constexpr,
    WEIGHT_GRADIENT: tl.constexpr,
    BIAS_GRADIENT: tl.constexpr,
):
    """A block of columns (axis 0) over every so many tiles of rows (axis 1); the means of the rows are known."""
    columns = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    program = tl.program_id(1).to(tl.int64)
    column = columns[None, :]
    in_width = column < WIDTH
    weight = load_columns(weight_ptr, column, in_width, 1.0)
    bias = load_columns(bias_ptr, column, in_width, 0.0)
    dweight = tl.zeros([BLOCK], tl.float32)
    dbias = tl.zeros([BLOCK], tl.float32)
    tiles = (rows - 1) // ROWS + 1
    for tile in tl.range(program, tiles, tl.num_programs(1), num_stages=STAGES):
        row = tl.arange(0, ROWS)[:, None].to(tl.int64) + tile * ROWS
        in_rows = row < rows
        mask = in_rows & in_width
        x = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row * dy_stride + column, mask=mask, other=0.0).to(tl.float32)
        x_hat, rstd = _normalised(x, statistics_ptr, row, in_rows, weight, bias, STATISTICS, FROM_OUTPUT)
        if WEIGHT_GRADIENT:
            dweight += tl.sum(dy * x_hat, axis=0)
        if BIAS_GRADIENT:
            dbias += tl.sum(dy, axis=0)
        dx = dy * weight - x_hat * tl.load(means_ptr + row * 2, mask=in_rows, other=0.0)
        if STATISTICS > 1:
            dx -= tl.load(means_ptr + row * 2 + 1, mask=in_rows, other=0.0)
        dx *= rstd
        if dsum_ptr is not None:
            dx += tl.load(dsum_ptr + row * WIDTH + column, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx_ptr + row * WIDTH + column, dx, mask=mask)
        if copy_ptr is not None:
            tl.store(copy_ptr + row * WIDTH + column, dx, mask=mask)
    store_gradients(first_ptr, second_ptr, program, columns, dweight, dbias, WIDTH, WEIGHT_GRADIENT, BIAS_GRADIENT)


@triton.jit(do_not_specialize=["programs"])
def _sum_partials_kernel(
    partials_ptr,  # (programs, gradients, WIDTH)
    first_ptr,  # (WIDTH,) the gradient at place 0 of the partials
    second_ptr,  # (WIDTH,) at place 1, or None
    programs,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Add the parts of all programs, always in the same order; one gradient each along grid axis 1."""
    column = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    place = tl.program_id(1).to(tl.int64)
    stride = WIDTH * tl.num_programs(1)
    inside = column < WIDTH
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, programs, ROWS):
        part = start + tl.arange(0, ROWS)[:, None]
        total += tl.load(
            partials_ptr + part * stride + place * WIDTH + column[None, :],
            mask=(part < programs) & inside[None, :],
            other=0.0,
        )
    gradient = tl.sum(total, axis=0)
    if second_ptr is not None:
        if place == 0:
            tl.store(first_ptr + column, gradient, mask=inside)
        else:
            tl.store(second_ptr + column, gradient, mask=inside)
    else:
        tl.store(first_ptr + column, gradient, mask=inside)


#: Columns that the kernel for the means of a wide row takes at a time, and rows of partials that are added at a time.
MEANS_BLOCK = 2048
SUM_ROWS = 128

#: So many tiles of rows are left to one program where a parameter's gradient is wanted. It is handed the gradients in
#: place of partials: the weight's and the bias's, or the one that is wanted. Its tiles take turns, on a device that so
#: few rows leave idle; the launch that this spares costs the host more.
LONE_TILES = 8


def sum_columns(width: int) -> int:
    """Columns a program of the second kernel.

    One H200, bf16: with 32 columns (and 32 rows at a time) a backward of 16384 × 768 runs at 0.59 of the byte floor,
    with 8 (and 128) at 0.68; from 2048 on 16 columns are as good, in half the programs.
    """
    return 8 if width <= 1024 else 16


def prepare_sums(device: torch.device, partials: int, width: int, gradients: int = 1) -> PreparedLaunch:
    """The launch of the second kernel: it sums `partials` rows of `width` columns of each gradient.

    It takes 2.3 µs on one H200, and as long where it is up before the first kernel ends (griddepcontrol).
    """
    columns = sum_columns(width)
    grid = (-(-width // columns), gradients)
    options = {"WIDTH": width, "ROWS": SUM_ROWS, "COLUMNS": columns, "num_warps": 4}
    return PreparedLaunch(_sum_partials_kernel, grid, device, (partials,), **options)


@dataclass(frozen=True)
class BackwardLaunch:
    """How the backward is launched: tiles of `rows` × `block`, walked by `programs` persistent programs.

    A row wider than `block` takes the wide kernels, with `programs` for each block of columns, or with `chunks` the
    kernel that walks it whole, in chunks of `block` columns, with `ahead` while the next row is loaded into registers.
    """

    block: int
    rows: int
    programs: int
    warps: int
    stages: int
    chunks: bool = False
    ahead: bool = False


#: Columns of a chunk, in which rows of more than 8192 columns and at most twice as many are walked, and the most bytes
#: a column of all that is read there, for the first level of the cache to hold it (160 KB: chips of 8.0, 9.0 and 10.0;
#: others read again from the second).
CHUNK, CHUNKS_ITEMSIZE = 4096, 10

#: Bytes of shared memory for the tiles that are under way; every GPU since Ampere has at least 99 KiB a block.
SHARED_MEMORY = 98304


def backward_launch(
    width: int, itemsize: int, weight_itemsize: int, multiprocessors: int, centred: bool, copy_itemsize: int = 0
) -> BackwardLaunch:
    """The launch for rows of a width.

    One H200, bf16, 16384 rows, share of the byte floor for LayerNorm and RMSNorm: 0.70 and 0.77 at width 768, 0.87 and
    0.89 at 2048, 0.92 and 0.95 at 4096, 0.94 and 0.97 at 8192. Fewer stages, more programs or more warps each cost
    0.02 to 0.2. At 16384 columns 16 warps hold the sums of a whole row, in chunks of 4096 (2048 spill), without a
    spill. Beside RMSNorm's one sum they also hold the next row while one is worked on: 0.93 (0.73 without, 0.84 with
    the whole row as one block, whose weight is read again for each row). LayerNorm, with two sums, has it brought to
    the L2 cache: 0.71 (0.67 without; 0.60 with the wide kernels, which read all rows twice from memory, and also at
    12288 columns). 32 warps reach 0.66.

    Args:
        width: columns of a row.
        itemsize: bytes a column of all rows that are read: dy, x and dsum.
        weight_itemsize: bytes a column of the weight.
        multiprocessors: of the device.
        centred: LayerNorm, whose bias gradient needs as many registers again.
        copy_itemsize: bytes a column of dx's copy, where x̂ comes from the output: a tile of it then has a place of its
            own in shared memory.
    """
    itemsize += copy_itemsize
    block = 1 << max(width - 1, 0).bit_length()
    if block == 16384 and itemsize + weight_itemsize <= CHUNKS_ITEMSIZE:
        # Beside one sum there is room for the 16-bit values of a whole row, beside two there is not.
        return BackwardLaunch(CHUNK, 1, multiprocessors, 16, 1, chunks=True, ahead=not centred and itemsize == 4)
    if block <= 1024:
        rows, programs, warps, stages = min(128, 4096 // block), 2 * multiprocessors, 4, 4
    elif block <= 4096:
        rows, programs, warps, stages = 2, (2 if block == 2048 else 1) * multiprocessors, 8, 3
    elif block <= 8192:
        rows, programs, warps, stages = 1, multiprocessors, 8, 3
    else:
        block = 2048
        rows, programs, warps, stages = 4, max(1, multiprocessors * block // width), 8, 3
    # Of wider dtypes, and with dsum, fewer rows or stages fit.
    while rows > 1 and (stages - 1) * rows * block * itemsize > SHARED_MEMORY:
        rows //= 2
    while stages > 1 and (stages - 1) * rows * block * itemsize > SHARED_MEMORY:
        stages -= 1
    return BackwardLaunch(block, rows, programs, warps, stages)


@dataclass(frozen=True, slots=True)
class BackwardLaunches:
    """The launches of one backward; `means` for wide rows, `total` where there are partials to add."""

    partials: tuple[tuple[int, int], tuple[int, int]]  # size and strides
    rows: PreparedLaunch
    means: PreparedLaunch | None
    total: PreparedLaunch | None
    from_output: bool

    def __call__(
        self,
        dy: Tensor,
        dsum: Tensor | None,
        x: Tensor,
        statistics: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        dx: Tensor,
        dx_copy: Tensor | None,
        dweight: Tensor | None,
        dbias: Tensor | None,
    ) -> None:
        """Write dx, and its copy, dweight and dbias where given; bias is read where x is the output."""
        if not self.from_output:
            bias = None
        first, second = (dbias, None) if dweight is None else (dweight, dbias)
        targets = first, second
        if self.total is not None:
            targets = torch.empty_strided(*self.partials, dtype=torch.float32, device=x.device), None
        if self.means is None:
            self.rows(dy, dsum, x, weight, bias, statistics, dx, dx_copy, *targets)
        else:
            means = torch.empty((statistics.shape[0], 2), dtype=torch.float32, device=x.device)
            self.means(dy, x, weight, bias, statistics, means)
            self.rows(dy, dsum, x, weight, bias, statistics, means, dx, dx_copy, *targets)
        if self.total is not None:
            self.total(targets[0], first, second)


def prepare_backward(
    device: torch.device,
    statistics: Sequence[int],
    width: int,
    dy_stride: int,
    x_stride: int,
    itemsize: int,
    weight_itemsize: int,
    from_output: bool,
    copy_itemsize: int,
    weight_gradient: bool,
    bias_gradient: bool,
) -> BackwardLaunches:
    """The launches on rows of `width`; those of dy and x are `dy_stride` and `x_stride` apart, all else is contiguous.

    `statistics` is their shape; for the item sizes see `backward_launch`. `copy_itemsize`: of dx's copy, 0 without one.
    """
    rows, columns = statistics
    multiprocessors = hardware.multiprocessors(device.index or 0)
    choice = backward_launch(
        width, itemsize, weight_itemsize, multiprocessors, columns > 1, copy_itemsize if from_output else 0
    )
    tiles = -(-rows // choice.rows)
    gradients = weight_gradient + bias_gradient
    programs = 1 if gradients and tiles <= LONE_TILES else min(choice.programs, tiles)
    common = {"WIDTH": width, "STATISTICS": columns, "FROM_OUTPUT": from_output}
    constants = common | {
        "BLOCK": choice.block,
        "ROWS": choice.rows,
        "STAGES": choice.stages,
        "WEIGHT_GRADIENT": weight_gradient,
        "BIAS_GRADIENT": bias_gradient,
        "num_warps": choice.warps,
    }
    numbers = (rows, dy_stride, x_stride)
    means = None
    if choice.chunks:
        del constants["ROWS"], constants["STAGES"]
        constants |= {"CHUNKS": -(-width // choice.block), "AHEAD": choice.ahead}
        constants["PREFETCH"] = not (choice.ahead or interpreted())
        main = PreparedLaunch(norm_backward_chunks_kernel, (programs,), device, numbers, **constants)
    elif choice.block >= width:
        main = PreparedLaunch(_norm_backward_kernel, (programs,), device, numbers, **constants)
    else:
        means = PreparedLaunch(_row_means_kernel, (rows,), device, numbers, **common, BLOCK=MEANS_BLOCK, num_warps=4)
        blocks = -(-width // choice.block)
        main = PreparedLaunch(_norm_backward_wide_kernel, (blocks, programs), device, numbers, **constants)
    total = None
    if gradients and programs > 1:
        total = prepare_sums(device, programs, width, gradients)
    size = (programs, gradients * width)
    return BackwardLaunches((size, (size[1], 1)), main, means, total, from_output)
