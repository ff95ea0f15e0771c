"""Backward kernels of LayerNorm and RMSNorm: dx, and weight and bias gradients that repeat bit for bit.

With g = dy · weight, x̂ the normalised row of N values and means taken over the row:

    dx = rstd · (g − mean(g) − x̂ · mean(g · x̂)) + dsum        (RMSNorm without mean(g))
    dweight = Σ_rows dy · x̂,   dbias = Σ_rows dy

dsum is the gradient that reaches x + residual from elsewhere. Everything is computed in fp32. x̂ comes from x and its
statistics or, in the memory-efficient form, from the output: x̂ = (y − bias) / weight.

Persistent programs walk tiles of rows and keep their part of dweight and dbias in registers; each writes it once to
`partials`, fp32, and a small second kernel adds the parts in a fixed order. No atomics, so the same inputs give the
same bits on the same device. Rows too wide for registers take two kernels, one for the two means of each row and one
over blocks of columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fusestep import hardware
from fusestep.language import tl, triton
from fusestep.ops.launch import launch
from fusestep.ops.norm_forward import load_columns
from fusestep.ops.registry import Compilation


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
    partials_ptr,  # (programs, gradients of the parameters that are wanted, WIDTH), fp32
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
    RELOAD: tl.constexpr,
):
    """Whole rows in registers, ROWS at a time; the loads of the next tiles are under way while one is worked on."""
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)[None, :]
    in_width = column < WIDTH
    if not RELOAD:
        kept_weight = load_columns(weight_ptr, column, in_width, 1.0)
    bias = load_columns(bias_ptr, column, in_width, 0.0)
    dweight = tl.zeros([BLOCK], tl.float32)
    dbias = tl.zeros([BLOCK], tl.float32)
    tiles = (rows - 1) // ROWS + 1
    for tile in tl.range(program, tiles, tl.num_programs(0), num_stages=STAGES):
        row = tile * ROWS + tl.arange(0, ROWS)[:, None]
        in_rows = row < rows
        mask = in_rows & in_width
        x = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row * dy_stride + column, mask=mask, other=0.0).to(tl.float32)
        if RELOAD:
            weight = load_columns(weight_ptr, column, in_width, 1.0)
        else:
            weight = kept_weight
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
    columns = tl.arange(0, BLOCK)
    partials_ptr += program * (WEIGHT_GRADIENT + BIAS_GRADIENT) * WIDTH + columns
    if WEIGHT_GRADIENT:
        tl.store(partials_ptr, dweight, mask=columns < WIDTH)
    if BIAS_GRADIENT:
        tl.store(partials_ptr + WEIGHT_GRADIENT * WIDTH, dbias, mask=columns < WIDTH)


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
    partials_ptr,
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
        row = tile * ROWS + tl.arange(0, ROWS)[:, None]
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
    partials_ptr += program * (WEIGHT_GRADIENT + BIAS_GRADIENT) * WIDTH + columns
    if WEIGHT_GRADIENT:
        tl.store(partials_ptr, dweight, mask=columns < WIDTH)
    if BIAS_GRADIENT:
        tl.store(partials_ptr + WEIGHT_GRADIENT * WIDTH, dbias, mask=columns < WIDTH)


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


@dataclass(frozen=True)
class BackwardLaunch:
    """How the backward is launched: tiles of `rows` × `block`, walked by `programs` persistent programs.

    A row wider than `block` takes the wide kernels, with `programs` for each block of columns.
    """

    block: int
    rows: int
    programs: int
    warps: int
    stages: int
    reload: bool = False


def backward_launch(width: int, itemsize: int, multiprocessors: int, centred: bool) -> BackwardLaunch:
    """The launch for rows of a width; `itemsize` is the bytes a column of all tensors that are read."""
    block = 1 << max(width - 1, 0).bit_length()
    if block > 8192:
        return BackwardLaunch(512, 4, max(1, 4 * multiprocessors * 512 // block), 4, 3)
    rows = max(1, min(32, 4096 // block))
    return BackwardLaunch(block, rows, multiprocessors * (2 if block <= 1024 else 1), 4 if block <= 1024 else 8, 3)


def norm_backward(
    dy: Tensor,
    dsum: Tensor | None,
    x: Tensor,
    statistics: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    dx: Tensor,
    dweight: Tensor | None,
    dbias: Tensor | None,
    width: int,
    dy_stride: int,
    x_stride: int,
    from_output: bool,
) -> None:
    """Launch the backward on rows of `width` elements; dweight and dbias are written where given."""
    device = x.device
    rows, columns = statistics.shape
    itemsize = dy.element_size() + x.element_size() + (0 if dsum is None else dsum.element_size())
    choice = backward_launch(width, itemsize, hardware.multiprocessors(device.index or 0), columns > 1)
    programs = min(choice.programs, -(-rows // choice.rows))
    gradients = [gradient for gradient in (dweight, dbias) if gradient is not None]
    partials = (
        torch.empty((programs, len(gradients), width), dtype=torch.float32, device=device) if gradients else statistics
    )
    bias = bias if from_output else None
    constants = {
        "WIDTH": width,
        "BLOCK": choice.block,
        "ROWS": choice.rows,
        "STAGES": choice.stages,
        "STATISTICS": columns,
        "FROM_OUTPUT": from_output,
        "WEIGHT_GRADIENT": dweight is not None,
        "BIAS_GRADIENT": dbias is not None,
        "num_warps": choice.warps,
    }
    if choice.block >= width:
        launch(
            _norm_backward_kernel,
            (programs,),
            device,
            *(dy, dsum, x, weight, bias, statistics, dx, partials, rows, dy_stride, x_stride),
            **constants,
            RELOAD=choice.reload,
        )
    else:
        means = torch.empty((rows, 2), dtype=torch.float32, device=device)
        launch(
            _row_means_kernel,
            (rows,),
            device,
            *(dy, x, weight, bias, statistics, means, rows, dy_stride, x_stride),
            WIDTH=width,
            BLOCK=2048,
            STATISTICS=columns,
            FROM_OUTPUT=from_output,
            num_warps=4,
        )
        launch(
            _norm_backward_wide_kernel,
            (-(-width // choice.block), programs),
            device,
            *(dy, dsum, x, weight, bias, statistics, means, dx, partials, rows, dy_stride, x_stride),
            **constants,
        )
    if gradients:
        # One H200, bf16: a backward at width 768 runs at 0.59 of the byte floor with 32 columns and 32 rows, at 0.68
        # with 8 and 128; from 2048 on 16 columns are as good.
        columns_a_program = 8 if width <= 1024 else 16
        launch(
            _sum_partials_kernel,
            (-(-width // columns_a_program), len(gradients)),
            device,
            *(partials, gradients[0], gradients[1] if len(gradients) > 1 else None, programs),
            WIDTH=width,
            ROWS=128,
            COLUMNS=columns_a_program,
            num_warps=4,
        )


def compilations(centred: bool) -> Iterator[Compilation]:
    return iter(())
