"""Forward kernels of LayerNorm and RMSNorm, with the residual add folded in.

A row of N values is normalised in fp32 and rounded once:

    y = x̂ · weight + bias,   x̂ = (x − mean) · rstd,   rstd = 1 / √(mean((x − mean)²) + eps)

with mean = 0 for RMSNorm. Given a residual, x is first replaced by x + residual, rounded to its own dtype and stored,
so that backward starts from the very numbers that were normalised.

The mean is found relative to the row's first element, and what its rounding to fp32 loses is kept beside it: a row
far from zero (1e6 + noise) loses no digits, and a constant row is centred to exact zeros. The variance is two-pass.
Statistics are fp32, (rows, 3): rstd, mean, what the mean's rounding lost; for RMSNorm (rows, 1): rstd.

Where the squares of a row overflow fp32 (magnitudes above about 1e19), rstd is 0 and y is the bias.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from fusestep.language import tl, triton
from fusestep.ops.launch import launch
from fusestep.ops.registry import Compilation


@triton.jit
def _load_sum(x_ptr, residual_ptr, x_offset, residual_offset, mask, sum_ptr):
    """x, or x + residual rounded to the dtype of the stored sum, in fp32."""
    x = tl.load(x_ptr + x_offset, mask=mask, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        x += tl.load(residual_ptr + residual_offset, mask=mask, other=0.0).to(tl.float32)
        x = x.to(sum_ptr.dtype.element_ty).to(tl.float32)
    return x


@triton.jit
def _scale_shift(x_hat, weight_ptr, bias_ptr, column, inside):
    """x̂ · weight + bias."""
    if weight_ptr is not None:
        x_hat *= tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        x_hat += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
    return x_hat


@triton.jit(do_not_specialize=["rows"])
def _norm_forward_kernel(
    x_ptr,  # rows of WIDTH, x_stride apart
    residual_ptr,  # likewise, or None
    weight_ptr,  # (WIDTH,) or None
    bias_ptr,  # (WIDTH,) or None
    y_ptr,  # (rows, WIDTH)
    sum_ptr,  # (rows, WIDTH), None without a residual
    statistics_ptr,  # (rows, 3 or 1)
    rows,
    x_stride,
    residual_stride,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    CENTRED: tl.constexpr,
):
    """ROWS whole rows a program, kept in registers: each element is read once and written once."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    in_width = column < WIDTH
    in_rows = row < rows
    mask = in_rows & in_width
    x = _load_sum(x_ptr, residual_ptr, row * x_stride + column, row * residual_stride + column, mask, sum_ptr)
    if residual_ptr is not None:
        tl.store(sum_ptr + row * WIDTH + column, x, mask=mask)
    if CENTRED:
        first = _load_sum(x_ptr, residual_ptr, row * x_stride, row * residual_stride, in_rows, sum_ptr)
        # Padding adds 0 to the sum here, and below to the centred sum of squares, where it would be −mean otherwise.
        shift = tl.sum(tl.where(in_width, x - first, 0.0), axis=1, keep_dims=True) / WIDTH
        mean = first + shift
        mean_low = shift - (mean - first)
        x = tl.where(in_width, (x - mean) - mean_low, 0.0)
        tl.store(statistics_ptr + row * 3 + 1, mean, mask=in_rows)
        tl.store(statistics_ptr + row * 3 + 2, mean_low, mask=in_rows)
    rstd = tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) / WIDTH + eps)
    tl.store(statistics_ptr + row * (3 if CENTRED else 1), rstd, mask=in_rows)
    y = _scale_shift(x * rstd, weight_ptr, bias_ptr, column, in_width)
    tl.store(y_ptr + row * WIDTH + column, y, mask=mask)


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
    CENTRED: tl.constexpr,
):
    """One row a program, in blocks of columns: the second and third pass over a row find it in the L2 cache."""
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    if residual_ptr is not None:
        residual_ptr += row * residual_stride
        sum_ptr += row * WIDTH
    y_ptr += row * WIDTH
    columns = tl.arange(0, BLOCK)
    mean = 0.0
    mean_low = 0.0
    if CENTRED:
        first = _load_sum(x_ptr, residual_ptr, 0, 0, row < rows, sum_ptr)
        total = tl.zeros([BLOCK], tl.float32)
        for start in range(0, WIDTH, BLOCK):
            column = start + columns
            inside = column < WIDTH
            x = _load_sum(x_ptr, residual_ptr, column, column, inside, sum_ptr)
            total += tl.where(inside, x - first, 0.0)
        shift = tl.sum(total, axis=0) / WIDTH
        mean = first + shift
        mean_low = shift - (mean - first)
        tl.store(statistics_ptr + row * 3 + 1, mean)
        tl.store(statistics_ptr + row * 3 + 2, mean_low)
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, WIDTH, BLOCK):
        column = start + columns
        inside = column < WIDTH
        x = _load_sum(x_ptr, residual_ptr, column, column, inside, sum_ptr)
        x = tl.where(inside, (x - mean) - mean_low, 0.0)
        squares += x * x
    rstd = tl.rsqrt(tl.sum(squares, axis=0) / WIDTH + eps)
    tl.store(statistics_ptr + row * (3 if CENTRED else 1), rstd)
    for start in range(0, WIDTH, BLOCK):
        column = start + columns
        inside = column < WIDTH
        x = _load_sum(x_ptr, residual_ptr, column, column, inside, sum_ptr)
        if residual_ptr is not None:
            tl.store(sum_ptr + column, x, mask=inside)
        y = _scale_shift(((x - mean) - mean_low) * rstd, weight_ptr, bias_ptr, column, inside)
        tl.store(y_ptr + column, y, mask=inside)


@dataclass(frozen=True)
class ForwardLaunch:
    """How the forward kernel is launched. `block` columns at a time; a row wider than that takes the wide kernel."""

    block: int
    rows: int
    warps: int


def forward_launch(width: int) -> ForwardLaunch:
    """The launch for rows of a width."""
    block = 1 << max(width - 1, 0).bit_length()
    if block > 32768:
        return ForwardLaunch(8192, 1, 16)
    return ForwardLaunch(block, max(1, 1024 // block), min(16, max(1, block // 512)) if block > 1024 else 4)


def norm_forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    y: Tensor,
    total: Tensor | None,
    statistics: Tensor,
    width: int,
    x_stride: int,
    residual_stride: int,
    eps: float,
    centred: bool,
) -> None:
    """Launch the forward on rows of `width` elements, `x_stride` and `residual_stride` apart; the rest is contiguous."""
    choice = forward_launch(width)
    rows = statistics.shape[0]
    arguments = (x, residual, weight, bias, y, total, statistics, rows, x_stride, residual_stride, eps)
    if choice.block < width:
        launch(
            _norm_forward_wide_kernel,
            (rows,),
            x.device,
            *arguments,
            WIDTH=width,
            BLOCK=choice.block,
            CENTRED=centred,
            num_warps=choice.warps,
        )
    else:
        launch(
            _norm_forward_kernel,
            (-(-rows // choice.rows),),
            x.device,
            *arguments,
            WIDTH=width,
            BLOCK=choice.block,
            ROWS=choice.rows,
            CENTRED=centred,
            num_warps=choice.warps,
        )


def compilations(centred: bool) -> Iterator[Compilation]:
    return iter(())
