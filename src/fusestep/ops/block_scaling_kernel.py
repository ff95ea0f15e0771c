"""The kernel of block scaling: one read of x, both forms written; the formulas stand in block_scaling.py.

A program holds a tile of 128 × 128 in registers, which has whole blocks in both directions. Largest magnitudes are
maxima of the bits of |x| as integers: there NaN is above infinity, and no maximum can lose it.

Data are handled as bytes from the cast on, and clamped by selection before it: a compiler for Hopper was seen to write
foreign bytes where a kernel stores both a matrix of FP8 and its transpose (triton#11111).
"""

from __future__ import annotations

from typing import Any

import torch

from fusestep.language import tl, triton
from fusestep.ops.launch import PreparedLaunch
from fusestep.ops.quantize_kernel import fp8_code, has_fp8_cast, magnitude_bits
from fusestep.ops.roll_scales import LARGEST_SCALE

_LARGEST_SCALE = tl.constexpr(LARGEST_SCALE)

TILE = 128

#: Threads hold 64 elements each.
WARPS = 8


@triton.jit
def _scale(amax_bits, LARGEST: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """(scale, its inverse) of blocks of these largest magnitudes."""
    is_usable = (amax_bits > 0) & (amax_bits < 0x7F800000)
    amax = tl.where(is_usable, amax_bits.to(tl.float32, bitcast=True), 1.0)
    scale = tl.div_rn(tl.zeros_like(amax) + LARGEST, amax)
    scale = tl.where(scale < _LARGEST_SCALE, scale, _LARGEST_SCALE)
    if POWER_OF_TWO:
        scale = (scale.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    scale = tl.where(is_usable, scale, 1.0)
    return scale, tl.div_rn(tl.zeros_like(scale) + 1.0, scale)


@triton.jit
def _microscale(amax_bits, LARGEST: tl.constexpr):
    """(scale, E8M0 exponent) of blocks of these largest magnitudes."""
    amax = amax_bits.to(tl.float32, bitcast=True)
    bits = tl.div_rn(amax, tl.zeros_like(amax) + LARGEST).to(tl.int32, bitcast=True)
    exponent = bits >> 23
    mantissa = bits & 0x7FFFFF
    # E8M0 begins at 2^-127, half of the smallest normal number.
    exponent += tl.where(exponent == 0, mantissa > 0x400000, mantissa > 0).to(tl.int32)
    exponent = tl.where(amax_bits == 0x7F800000, 254, exponent)
    exponent = tl.where(amax_bits > 0x7F800000, 255, exponent)
    scale = tl.where(exponent == 254, 0x400000, (254 - exponent) << 23)
    scale = tl.where(exponent == 255, 0x7FC00000, scale)
    return scale.to(tl.float32, bitcast=True), exponent.to(tl.uint8)


@triton.jit
def _bytes(scaled, E4M3: tl.constexpr, HARDWARE_CAST: tl.constexpr):
    """`fp8_code` with one NaN, that of the instruction, whatever sign a NaN comes with."""
    code = fp8_code(scaled, E4M3, HARDWARE_CAST)
    if not HARDWARE_CAST:
        code = tl.where(scaled == scaled, code, 0x7F).to(tl.uint8)
    return code


@triton.jit(do_not_specialize=["rows"])
def quantize_blocks_kernel(
    x_ptr,  # rows of `columns`, row_stride apart
    data_ptr,  # bytes (padded_rows, padded_columns), or None
    scales_ptr,  # of data, in the layout of block_scaling.py
    transposed_ptr,  # bytes (padded_columns, padded_rows), or None
    transposed_scales_ptr,
    sums_ptr,  # fp32 (row tiles, columns), sums over the tiles' rows, or None
    rows,
    columns,
    row_stride,
    padded_rows,
    padded_columns,
    LARGEST: tl.constexpr,
    E4M3: tl.constexpr,
    HARDWARE_CAST: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    SQUARE: tl.constexpr,  # blocks of 128 × 128, else of 1 × WIDTH
    WIDTH: tl.constexpr,
):
    PARTS: tl.constexpr = 128 // WIDTH
    program = tl.program_id(0).to(tl.int64)
    column_tiles = (padded_columns - 1) // 128 + 1
    row_tiles = (padded_rows - 1) // 128 + 1
    row_tile = program // column_tiles
    column_tile = program % column_tiles
    in_tile = tl.arange(0, 128)
    row = (row_tile * 128 + in_tile)[:, None]
    column = (column_tile * 128 + in_tile)[None, :]
    x = tl.load(x_ptr + row * row_stride + column, mask=(row < rows) & (column < columns), other=0.0).to(tl.float32)
    if sums_ptr is not None:
        sums = tl.sum(x, axis=0, keep_dims=True)
        tl.store(sums_ptr + row_tile * columns + column, sums, mask=column < columns)
    bits = magnitude_bits(x)
    in_data = (row < padded_rows) & (column < padded_columns)
    across, down = (row_tile * 128 + in_tile)[None, :], (column_tile * 128 + in_tile)[:, None]
    in_transposed = (down < padded_columns) & (across < padded_rows)
    if SQUARE:
        amax = tl.max(tl.max(bits, axis=1, keep_dims=True), axis=0, keep_dims=True)
        scale, stored = _scale(amax, LARGEST, POWER_OF_TWO)
        data = _bytes(x * scale, E4M3, HARDWARE_CAST)
        # The padding of a row of scales, to a multiple of 4, is written with its last one.
        ahead = tl.arange(0, 4)[None, :]
        stored = tl.where(ahead == 0, stored, 1.0)
        if data_ptr is not None:
            tl.store(data_ptr + row * padded_columns + column, data, mask=in_data)
            stride = (column_tiles + 3) // 4 * 4
            place = column_tile + ahead
            end = tl.where(column_tile == column_tiles - 1, stride, column_tile + 1)
            tl.store(scales_ptr + row_tile * stride + place, stored, mask=place < end)
        if transposed_ptr is not None:
            tl.store(transposed_ptr + down * padded_rows + across, tl.trans(data), mask=in_transposed)
            stride = (row_tiles + 3) // 4 * 4
            place = row_tile + ahead
            end = tl.where(row_tile == row_tiles - 1, stride, row_tile + 1)
            tl.store(transposed_scales_ptr + column_tile * stride + place, stored, mask=place < end)
    else:
        part = tl.arange(0, PARTS)
        if data_ptr is not None:
            amax = tl.max(tl.reshape(bits, [128, PARTS, WIDTH]), axis=2, keep_dims=True)
            if WIDTH == 32:
                scale, stored = _microscale(amax, LARGEST)
            else:
                scale, stored = _scale(amax, LARGEST, POWER_OF_TWO)
            scale = tl.reshape(tl.broadcast_to(scale, [128, PARTS, WIDTH]), [128, 128])
            data = _bytes(x * scale, E4M3, HARDWARE_CAST)
            tl.store(data_ptr + row * padded_columns + column, data, mask=in_data)
            block = (column_tile * PARTS + part)[None, :, None]
            place = (row_tile * 128 + in_tile)[:, None, None]
            there = (place < padded_rows) & (block * WIDTH < columns)
            tl.store(scales_ptr + block * padded_rows + place, stored, mask=there)
        if transposed_ptr is not None:
            amax = tl.max(tl.reshape(bits, [PARTS, WIDTH, 128]), axis=1, keep_dims=True)
            if WIDTH == 32:
                scale, stored = _microscale(amax, LARGEST)
            else:
                scale, stored = _scale(amax, LARGEST, POWER_OF_TWO)
            scale = tl.reshape(tl.broadcast_to(scale, [PARTS, WIDTH, 128]), [128, 128])
            data = _bytes(x * scale, E4M3, HARDWARE_CAST)
            tl.store(transposed_ptr + down * padded_rows + across, tl.trans(data), mask=in_transposed)
            block = (row_tile * PARTS + part)[:, None, None]
            place = (column_tile * 128 + in_tile)[None, None, :]
            there = (place < padded_columns) & (block * WIDTH < rows)
            tl.store(transposed_scales_ptr + block * padded_columns + place, stored, mask=there)


def constants(dtype: torch.dtype, block: tuple[int, int], power_of_two: bool, hardware_cast: bool) -> dict[str, Any]:
    """The constexprs of a launch."""
    return {
        "LARGEST": torch.finfo(dtype).max,
        "E4M3": dtype == torch.float8_e4m3fn,
        "HARDWARE_CAST": hardware_cast,
        "POWER_OF_TWO": power_of_two,
        "SQUARE": block[0] != 1,
        "WIDTH": block[1],
        "num_warps": WARPS,
    }


def prepare(
    device: torch.device,
    shape: tuple[int, int],
    row_stride: int,
    padded_shape: tuple[int, int],
    dtype: torch.dtype,
    block: tuple[int, int],
    power_of_two: bool,
) -> PreparedLaunch:
    """The launch on (x, data, scales, transposed, its scales, partial sums), None for what is not wanted."""
    tiles = -(-padded_shape[0] // TILE) * -(-padded_shape[1] // TILE)
    numbers = (*shape, row_stride, *padded_shape)
    return PreparedLaunch(
        quantize_blocks_kernel, (tiles,), device, numbers, **constants(dtype, block, power_of_two, has_fp8_cast(device))
    )
