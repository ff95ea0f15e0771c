"""Backward kernel of the norms for rows that fit in the cache, and whose sums fit in the registers.

The formulas stand in norm_backward.py. A persistent program walks one row at a time, in chunks of columns, twice: for
the two means, and for dx, when the first level of the cache still has what was read; the next row is on its way to the
second level meanwhile. All registers but few are the sums of dweight and dbias, a tensor for each chunk; they are
written as the other kernel writes them.
"""

from __future__ import annotations

from fusestep.language import tl, triton
from fusestep.ops.norm_forward import in_fp32


@triton.jit
def _add_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit
def store_gradients(
    first_ptr,
    second_ptr,
    program,
    column,
    dweight,
    dbias,
    WIDTH: tl.constexpr,
    WEIGHT_GRADIENT: tl.constexpr,
    BIAS_GRADIENT: tl.constexpr,
):
    """Write a program's part of the gradients that are wanted: side by side, or a lone program's to two tensors."""
    offset = program * (WEIGHT_GRADIENT + BIAS_GRADIENT) * WIDTH + column
    if WEIGHT_GRADIENT:
        tl.store(first_ptr + offset, dweight, mask=column < WIDTH)
    if BIAS_GRADIENT:
        if second_ptr is not None:
            tl.store(second_ptr + column, dbias, mask=column < WIDTH)
        else:
            tl.store(first_ptr + offset + WEIGHT_GRADIENT * WIDTH, dbias, mask=column < WIDTH)


@triton.jit
def _normalised_chunk(
    dy,
    x,
    weight_ptr,
    bias_ptr,
    column,
    inside,
    rstd,
    mean,
    mean_low,
    STATISTICS: tl.constexpr,
    FROM_OUTPUT: tl.constexpr,
    EVICTION: tl.constexpr,
):
    """(dy, x̂, weight) of a chunk of a row in fp32."""
    x = in_fp32(x)
    weight = 1.0
    if weight_ptr is not None:
        weight = in_fp32(tl.load(weight_ptr + column, mask=inside, other=1.0, eviction_policy=EVICTION))
    if FROM_OUTPUT:
        if bias_ptr is not None:
            x -= in_fp32(tl.load(bias_ptr + column, mask=inside, other=0.0, eviction_policy=EVICTION))
        x /= weight
    else:
        if STATISTICS > 1:
            x -= mean
        if STATISTICS == 3:
            x -= mean_low
        x *= rstd
    return in_fp32(dy), x, weight


@triton.jit
def _prefetch(x_row, dy_row, WIDTH: tl.constexpr):
    """Have a row of each brought to the L2 cache, in 256 places each; this costs a thread of 512 one instruction."""
    x_step: tl.constexpr = WIDTH * (x_row.dtype.element_ty.primitive_bitwidth // 8) // 256
    dy_step: tl.constexpr = WIDTH * (dy_row.dtype.element_ty.primitive_bitwidth // 8) // 256
    place = tl.arange(0, 512)
    address = tl.where(place < 256, x_row.to(tl.int64) + place * x_step, dy_row.to(tl.int64) + (place - 256) * dy_step)
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [address], tl.int32, False, 1)


@triton.jit(do_not_specialize=["rows"])
def norm_backward_chunks_kernel(
    dy_ptr,
    dsum_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    statistics_ptr,
    dx_ptr,
    copy_ptr,
    first_ptr,
    second_ptr,
    rows,
    dy_stride,
    x_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    STATISTICS: tl.constexpr,
    FROM_OUTPUT: tl.constexpr,
    WEIGHT_GRADIENT: tl.constexpr,
    BIAS_GRADIENT: tl.constexpr,
    AHEAD: tl.constexpr,
    PREFETCH: tl.constexpr,
):
    """A row at a time, in chunks of columns: registers hold the sums of all chunks, and the values of few.

    Elsewhere than in a row that is held AHEAD, evictions tell the cache what comes again. They also keep the two
    passes' loads apart: Triton would make one of two that are alike, and keep its value in registers in between.
    """
    program = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    zero = tl.zeros([BLOCK], tl.float32)
    dweights = (zero,) * CHUNKS
    dbiases = (zero,) * CHUNKS
    xs = (0.0,) * CHUNKS
    dys = (0.0,) * CHUNKS
    if AHEAD:
        for i in tl.static_range(CHUNKS):
            column = i * BLOCK + lane
            xs += (tl.load(x_ptr + program * x_stride + column, mask=column < WIDTH, other=0.0),)
            dys += (tl.load(dy_ptr + program * dy_stride + column, mask=column < WIDTH, other=0.0),)
            xs = xs[1:]
            dys = dys[1:]
    for row in tl.range(program, rows, tl.num_programs(0), num_stages=1):
        rstd = tl.load(statistics_ptr + row * STATISTICS)
        mean = tl.load(statistics_ptr + row * STATISTICS + 1) if STATISTICS > 1 else 0.0
        mean_low = tl.load(statistics_ptr + row * STATISTICS + 2) if STATISTICS == 3 else 0.0
        dy_row = dy_ptr + row * dy_stride
        x_row = x_ptr + row * x_stride
        following = tl.minimum(row + tl.num_programs(0), rows - 1)
        if PREFETCH:
            _prefetch(x_ptr + following * x_stride, dy_ptr + following * dy_stride, WIDTH)
        along = zero
        total = zero
        for i in tl.static_range(CHUNKS):
            column = i * BLOCK + lane
            inside = column < WIDTH
            if AHEAD:
                x = xs[i]
                dy = dys[i]
            else:
                x = tl.load(x_row + column, mask=inside, other=0.0, eviction_policy="evict_last")
                dy = tl.load(dy_row + column, mask=inside, other=0.0, eviction_policy="evict_last")
            dy, x_hat, weight = _normalised_chunk(
                *(dy, x, weight_ptr, bias_ptr, column, inside, rstd, mean, mean_low),
                *(STATISTICS, FROM_OUTPUT, "evict_last"),
            )
            g = dy * weight
            along += g * x_hat
            total += g
        if STATISTICS > 1:
            along_sum, total_sum = tl.reduce((along, total), 0, _add_pairs)
        else:
            along_sum = tl.sum(along, axis=0)
            total_sum = 0.0
        # dx = rstd · g + x̂ · slope + shift
        slope = along_sum / WIDTH * -rstd
        shift = total_sum / WIDTH * -rstd
        for i in tl.static_range(CHUNKS):
            column = i * BLOCK + lane
            inside = column < WIDTH
            if AHEAD:
                x = xs[0]
                dy = dys[0]
            else:
                x = tl.load(x_row + column, mask=inside, other=0.0, eviction_policy="evict_first")
                dy = tl.load(dy_row + column, mask=inside, other=0.0, eviction_policy="evict_first")
            dy, x_hat, weight = _normalised_chunk(
                *(dy, x, weight_ptr, bias_ptr, column, inside, rstd, mean, mean_low), *(STATISTICS, FROM_OUTPUT, "")
            )
            # The first of the sums is this chunk's; added to, it goes to the end.
            dweights += (dweights[0] + dy * x_hat,)
            dbiases += (dbiases[0] + dy,)
            dweights = dweights[1:]
            dbiases = dbiases[1:]
            dx = dy * rstd * weight + (x_hat * slope + shift)
            if dsum_ptr is not None:
                dx += in_fp32(tl.load(dsum_ptr + row * WIDTH + column, mask=inside, other=0.0))
            tl.store(dx_ptr + row * WIDTH + column, dx, mask=inside)
            if copy_ptr is not None:
                tl.store(copy_ptr + row * WIDTH + column, dx, mask=inside)
            if AHEAD:
                xs += (tl.load(x_ptr + following * x_stride + column, mask=inside, other=0.0),)
                dys += (tl.load(dy_ptr + following * dy_stride + column, mask=inside, other=0.0),)
                xs = xs[1:]
                dys = dys[1:]
    for i in tl.static_range(CHUNKS):
        store_gradients(
            *(first_ptr, second_ptr, program, i * BLOCK + lane, dweights[i], dbiases[i]),
            *(WIDTH, WEIGHT_GRADIENT, BIAS_GRADIENT),
        )
