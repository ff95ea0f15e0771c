"""Kernels of a norm whose output is cast to FP8: norm_forward.py's, with a cast in place of the store of y.

A row of RMSNorm that a forward walks in blocks stays in registers here, where instructions bound it and not bytes.

Each serves two passes. The amax pass, which is told by the absence of data, raises the slot's amax to that of y and
stores nothing else; where the slot has a scale its few programs end at once. The pass that casts also walks the rows
of padding, and writes zeros there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusestep import hardware
from fusestep.language import tl, triton
from fusestep.ops import norm_forward
from fusestep.ops.cast_options import CastOptions
from fusestep.ops.fp8_cast import (
    count_cast,
    fp8_code,
    magnitude_bits,
    raise_amax_bits,
    scaled_values,
    slot_scale,
)
from fusestep.ops.launch import PreparedLaunch
from fusestep.ops.norm_forward import (
    load_columns,
    load_sum,
    load_tile,
    normalised_tile,
    row_statistics,
    store_statistics,
)
from fusestep.ops.quantize_launch import cast_constants
from fusestep.ops.quantized import PAD
from fusestep.ops.registry import Compilation
from fusestep.ops.settled_slots import may_rely


@triton.jit
def _begin_cast(
    slots_ptr,
    counts_ptr,
    scale_inv_ptr,
    rows,
    index,
    WIDTH: tl.constexpr,
    E4M3: tl.constexpr,
    MARGIN: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
):
    """The scale; the first program also stores its inverse and counts the elements."""
    scale = slot_scale(slots_ptr, index, 448.0 if E4M3 else 57344.0, MARGIN, POWER_OF_TWO)
    if tl.program_id(0).to(tl.int64) == 0:
        tl.store(scale_inv_ptr, tl.div_rn(1.0 + 0.0 * scale, scale))
        if counts_ptr is not None:
            tl.atomic_add(counts_ptr + index * 3, rows.to(tl.int64) * WIDTH, sem="relaxed")  # integer count
    return scale


@triton.jit
def _quantize_tile(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    counts_ptr,
    data_ptr,
    y_ptr,
    sum_ptr,
    statistics_ptr,
    weight,
    bias,
    scale,
    largest,
    tile,
    rows,
    out_rows,
    x_stride,
    residual_stride,
    eps,
    index,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    STATISTICS: tl.constexpr,
    KEPT: tl.constexpr,
    E4M3: tl.constexpr,
    HARDWARE_CAST: tl.constexpr,
    RECORD: tl.constexpr,
):
    """Normalise, cast and store a tile of ROWS rows; the largest magnitudes of the rows so far, as bits."""
    OUT_WIDTH: tl.constexpr = (WIDTH + 15) // 16 * 16
    column = tl.arange(0, BLOCK)[None, :]
    in_width = column < WIDTH
    row = tl.arange(0, ROWS)[:, None].to(tl.int64) + tile * ROWS
    mask = (row < rows) & in_width
    x = load_tile(x_ptr, residual_ptr, sum_ptr, row, rows, x_stride, residual_stride, WIDTH, BLOCK)
    x, rstd = normalised_tile(
        *(x, x_ptr, residual_ptr, sum_ptr, statistics_ptr, row, rows, x_stride, residual_stride, eps),
        *(WIDTH, BLOCK, STATISTICS),
    )
    if not KEPT:
        weight = load_columns(weight_ptr, column, in_width, 1.0)
        bias = load_columns(bias_ptr, column, in_width, 0.0)
    y = tl.where(mask, x * rstd * weight + bias, 0.0)
    if RECORD:
        largest = tl.maximum(largest, tl.max(magnitude_bits(y), axis=1, keep_dims=True))
    if y_ptr is not None:
        tl.store(y_ptr + row * WIDTH + column, y, mask=mask)
    if data_ptr is not None:
        product = scaled_values(y, scale)
        code = fp8_code(product, E4M3, HARDWARE_CAST)
        tl.store(data_ptr + row * OUT_WIDTH + column, code, mask=(row < out_rows) & (column < OUT_WIDTH))
        if counts_ptr is not None:
            count_cast(counts_ptr, index, y, product, E4M3)
    return largest


@triton.jit(do_not_specialize=["rows", "index"])
def _norm_quantize_kernel(
    x_ptr,  # rows of WIDTH, x_stride apart
    residual_ptr,  # likewise, or None
    weight_ptr,  # (WIDTH,) or None
    bias_ptr,  # (WIDTH,) or None
    slots_ptr,  # (n, 4)
    counts_ptr,  # (n, 3) or None
    data_ptr,  # (padded rows, padded WIDTH) bytes, or None: find the amax alone
    scale_inv_ptr,  # 0-d
    y_ptr,  # (rows, WIDTH) for y in high precision, or None
    sum_ptr,  # (rows, WIDTH), None without a residual
    statistics_ptr,  # (rows, STATISTICS), None without data: then no sum is stored either
    rows,
    x_stride,
    residual_stride,
    eps,
    index,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    STATISTICS: tl.constexpr,
    KEPT: tl.constexpr,
    E4M3: tl.constexpr,
    HARDWARE_CAST: tl.constexpr,
    RECORD: tl.constexpr,
    MARGIN: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
):
    """Whole rows in registers, as in _norm_forward_kernel; the few programs of the amax pass walk several tiles."""
    first_tile = tl.program_id(0).to(tl.int64)
    has_scale = tl.load(slots_ptr + index * 4) != 0.0
    weight = 1.0
    bias = 0.0
    if KEPT:
        column = tl.arange(0, BLOCK)[None, :]
        weight = load_columns(weight_ptr, column, column < WIDTH, 1.0)
        bias = load_columns(bias_ptr, column, column < WIDTH, 0.0)
    if data_ptr is None:
        out_rows = tl.where(has_scale, 0, rows)
        scale = 1.0
    else:
        out_rows = (rows + 15) // 16 * 16
        scale = _begin_cast(slots_ptr, counts_ptr, scale_inv_ptr, rows, index, WIDTH, E4M3, MARGIN, POWER_OF_TWO)
    largest = tl.zeros([ROWS, 1], tl.int32)
    if data_ptr is None or KEPT:
        for tile in tl.range(first_tile, (out_rows + ROWS - 1) // ROWS, tl.num_programs(0), num_stages=STAGES):
            largest = _quantize_tile(
                *(x_ptr, residual_ptr, weight_ptr, bias_ptr, counts_ptr, data_ptr, y_ptr, sum_ptr),
                *(statistics_ptr, weight, bias, scale, largest, tile, rows, out_rows, x_stride, residual_stride),
                *(eps, index, WIDTH, BLOCK, ROWS, STATISTICS, KEPT, E4M3, HARDWARE_CAST, RECORD),
            )
    else:
        largest = _quantize_tile(
            *(x_ptr, residual_ptr, weight_ptr, bias_ptr, counts_ptr, data_ptr, y_ptr, sum_ptr),
            *(statistics_ptr, weight, bias, scale, largest, first_tile, rows, out_rows, x_stride, residual_stride),
            *(eps, index, WIDTH, BLOCK, ROWS, STATISTICS, KEPT, E4M3, HARDWARE_CAST, RECORD),
        )
    if RECORD:
        if data_ptr is not None:
            # A slot without a scale has its amax already, which other programs are taking their scale from.
            largest = tl.where(has_scale, largest, 0)
        raise_amax_bits(slots_ptr, index, largest)


@triton.jit(do_not_specialize=["rows", "index"])
def _norm_quantize_wide_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    slots_ptr,
    counts_ptr,
    data_ptr,
    scale_inv_ptr,
    y_ptr,
    sum_ptr,
    statistics_ptr,
    rows,
    x_stride,
    residual_stride,
    eps,
    index,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    STATISTICS: tl.constexpr,
    E4M3: tl.constexpr,
    HARDWARE_CAST: tl.constexpr,
    RECORD: tl.constexpr,
    MARGIN: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
):
    """Rows in blocks of columns, as in _norm_forward_wide_kernel."""
    OUT_WIDTH: tl.constexpr = (WIDTH + 15) // 16 * 16
    columns = tl.arange(0, BLOCK)
    has_scale = tl.load(slots_ptr + index * 4) != 0.0
    if data_ptr is None:
        out_rows = tl.where(has_scale, 0, rows)
    else:
        out_rows = (rows + 15) // 16 * 16
        scale = _begin_cast(slots_ptr, counts_ptr, scale_inv_ptr, rows, index, WIDTH, E4M3, MARGIN, POWER_OF_TWO)
    largest = tl.zeros([BLOCK], tl.int32)
    for out_row in range(tl.program_id(0).to(tl.int64), out_rows, tl.num_programs(0)):
        row = tl.where(out_row < rows, out_row, 0)  # a row of padding reads the first, and stores zeros
        width = tl.where(out_row < rows, WIDTH, 0)
        x_row = x_ptr + row * x_stride
        residual_row = None if residual_ptr is None else residual_ptr + row * residual_stride
        mean, mean_low, rstd = row_statistics(
            x_row, residual_row, sum_ptr, True, eps, WIDTH, BLOCK, STAGES, STATISTICS > 1
        )
        if statistics_ptr is not None:
            store_statistics(statistics_ptr + row * STATISTICS, mean, mean_low, rstd, STATISTICS)
        for start in tl.range(0, OUT_WIDTH, BLOCK, num_stages=STAGES):
            column = start + columns
            inside = column < width
            x = load_sum(x_row, residual_row, column, column, inside, sum_ptr, "evict_first")
            if residual_ptr is not None and statistics_ptr is not None:
                tl.store(sum_ptr + row * WIDTH + column, x, mask=inside)
            weight = load_columns(weight_ptr, column, inside, 1.0)
            bias = load_columns(bias_ptr, column, inside, 0.0)
            y = tl.where(inside, ((x - mean) - mean_low) * rstd * weight + bias, 0.0)
            if RECORD:
                largest = tl.maximum(largest, magnitude_bits(y))
            if y_ptr is not None:
                tl.store(y_ptr + row * WIDTH + column, y, mask=inside)
            if data_ptr is not None:
                product = scaled_values(y, scale)
                code = fp8_code(product, E4M3, HARDWARE_CAST)
                tl.store(data_ptr + out_row * OUT_WIDTH + column, code, mask=column < OUT_WIDTH)
                if counts_ptr is not None:
                    count_cast(counts_ptr, index, y, product, E4M3)
    if RECORD:
        if data_ptr is not None:
            largest = tl.where(has_scale, largest, 0)
        raise_amax_bits(slots_ptr, index, largest)


class Launches(NamedTuple):
    """The pass that finds an amax where there is no scale, and the pass that casts."""

    amax: PreparedLaunch
    cast: PreparedLaunch
    slot: int

    def __call__(
        self,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        slots: Tensor,
        counts: Tensor | None,
        data: Tensor,
        scale_inv: Tensor,
        y: Tensor | None,
        total: Tensor | None,
        statistics: Tensor,
    ) -> None:
        """Run both, or the cast alone where the slot is settled (settled_slots.py).

        `data` are bytes, since GPUs before Ada's know no pointer to E4M3; None for what is not there.
        """
        if not (self.amax.was_launched and may_rely(slots, slots.data_ptr(), (self.slot,))):
            self.amax(x, residual, weight, bias, slots, None, None, None, None, total, None)
        self.cast(x, residual, weight, bias, slots, counts, data, scale_inv, y, total, statistics)


#: Wider rows are walked in blocks.
WIDEST_ROW = 32768

#: Programs of the amax pass on each multiprocessor: few, since mostly they end at once.
AMAX_PROGRAMS = 4


def quantize_launch(width: int, multiprocessors: int) -> norm_forward.ForwardLaunch:
    """The launch for rows of a width; its blocks hold the padding.

    Up to 1024 columns the forward's. Wider rows are bound by instructions and stay in registers: one H200, bf16, 8192
    rows, share of the byte floor for LayerNorm and RMSNorm, with a residual: 0.84 and 0.88 at 2048, 0.91 and 0.93 at
    4096 on four warps, 0.94 and 0.95 at 8192 on eight. Weight and bias read early cost LayerNorm up to 0.09, twice as
    many warps up to 0.15, a loop that goes round once up to 0.17. Rows of 32768 take 32 warps, so that a thread holds
    32 values, as at 8192.
    """
    block = 1 << max(width - 1, PAD - 1).bit_length()
    if block <= 1024:
        return norm_forward.forward_launch(max(width, PAD), multiprocessors, centred=False, itemsize=2)
    if block > WIDEST_ROW:
        return norm_forward.ForwardLaunch(8192, 1, None, 16, wide=True)
    return norm_forward.ForwardLaunch(block, 1, None, 32 if block == WIDEST_ROW else min(8, block // 1024))


def prepare(
    device: torch.device,
    rows: int,
    statistics_columns: int,
    width: int,
    x_stride: int,
    residual_stride: int,
    eps: float,
    options: CastOptions,
) -> Launches:
    """The launches for these options; rows of x and of the residual are `x_stride` and `residual_stride` apart."""
    multiprocessors = hardware.multiprocessors(device.index or 0)
    choice = quantize_launch(width, multiprocessors)
    numbers = (rows, x_stride, residual_stride, eps, options.slot)
    constants: dict[str, Any] = {
        "WIDTH": width,
        "BLOCK": choice.block,
        "STAGES": choice.stages,
        "STATISTICS": statistics_columns,
        **cast_constants(options, device),
        "num_warps": choice.warps,
    }
    kernel, tile_rows = _norm_quantize_wide_kernel, 1
    if not choice.wide:
        kernel, tile_rows = _norm_quantize_kernel, choice.rows
        constants |= {"ROWS": choice.rows, "KEPT": choice.columns == "kept"}
    tiles = -(-rows // tile_rows)
    out_tiles = -(-(-(-rows // PAD) * PAD) // tile_rows)
    programs = out_tiles if choice.programs is None else min(choice.programs, out_tiles)
    few = min(tiles, AMAX_PROGRAMS * multiprocessors)
    # Which format and how it is scaled changes nothing for the amax: one compiled kernel serves them all.
    amax = constants | {"E4M3": True, "HARDWARE_CAST": False, "MARGIN": 0, "POWER_OF_TWO": False, "RECORD": True}
    return Launches(
        PreparedLaunch(kernel, (few,), device, numbers, **amax),
        PreparedLaunch(kernel, (programs,), device, numbers, **constants),
        options.slot,
    )


def compilations() -> Iterator[Compilation]:
    """The cast at each kind of launch, and the amax pass of both kernels."""
    for width, element, more, data, has_cast in (
        (768, "bf16", False, "E4M3", True),
        (768, "bf16", False, None, False),
        (3072, "fp32", True, "E5M2", False),
        (2000, "bf16", False, "E4M3", True),
        (8176, "bf16", True, "E4M3", True),
        (12288, "bf16", True, "E4M3", True),
        (30000, "bf16", True, "E4M3", True),
        (40000, "bf16", True, "E4M3", True),
        (40000, "fp32", False, None, False),
    ):
        choice = quantize_launch(width, 132)
        kernel = _norm_quantize_wide_kernel
        constexprs: dict[str, Any] = {
            "WIDTH": width,
            "BLOCK": choice.block,
            "STAGES": choice.stages,
            "STATISTICS": (2 if element == "bf16" else 3) if not more else 1,
            "E4M3": data != "E5M2",
            "HARDWARE_CAST": has_cast,
            "RECORD": not more or data is None,
            "MARGIN": 0,
            "POWER_OF_TWO": more,
        }
        if not choice.wide:
            kernel = _norm_quantize_kernel
            constexprs |= {"ROWS": choice.rows, "KEPT": choice.columns == "kept"}
        pointers = {
            "x_ptr": element,
            "residual_ptr": element if more else None,
            "weight_ptr": element,
            "bias_ptr": None if more else element,
            "slots_ptr": "fp32",
            "counts_ptr": "i64" if more else None,
            "data_ptr": "u8" if data else None,
            "scale_inv_ptr": None if data is None else "fp32",
            "y_ptr": element if more else None,
            "sum_ptr": element if more else None,
            "statistics_ptr": None if data is None else "fp32",
        }
        there = {name: f"*{kind}" for name, kind in pointers.items() if kind is not None}
        constexprs |= {name: None for name, kind in pointers.items() if kind is None}
        numbers = {"rows": "i32", "x_stride": "i32", "residual_stride": "i32", "eps": "fp32", "index": "i32"}
        yield Compilation(
            kernel,
            f"{width}, {element} to {data or 'an amax'}{', all outputs' if more else ''}"
            f"{', rounded by integers' if data and not has_cast else ''}",
            there | numbers | dict.fromkeys(constexprs, "constexpr"),
            constexprs,
            choice.warps,
            divisible_by_16=frozenset(there) - {"scale_inv_ptr"} | {"x_stride", "residual_stride"},
            minimum_capability=90 if has_cast else 80,
        )
