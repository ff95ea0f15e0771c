"""The kernel of block scaling: x is read once, both forms are written; the formulas stand in block_scaling.py.

A program works on a tile of 128 × 128, which has whole blocks in both directions, HEIGHT rows at a time. The columns'
scales are known when all rows have been seen; the tile is then loaded again, from the cache, which is cheaper than the
registers that would hold it.

Largest magnitudes are maxima of the bits of |x| as integers: there NaN is above infinity, and no maximum can lose it.
Data are handled as bytes from the cast on: a compiler for Hopper was seen to write foreign bytes where a kernel stores
both a matrix of FP8 and its transpose (triton#11111).
"""

from __future__ import annotations

from typing import Any

import torch

from fusestep.language import tl, triton
from fusestep.ops.fp8_cast import fp8_code, has_fp8_cast, magnitude_bits, scaled_values
from fusestep.ops.launch import PreparedLaunch
from fusestep.ops.roll_scales import LARGEST_SCALE

_SMALLEST_INVERSE = tl.constexpr(1.0 / LARGEST_SCALE)

TILE = 128

#: Rows that are worked on at once: a column's block of MXFP8.
HEIGHT = tl.constexpr(32)

WARPS = 8


@triton.jit
def _scale(amax_bits, LARGEST: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """(scale, its inverse) of blocks of these largest magnitudes."""
    is_usable = (amax_bits > 0) & (amax_bits < 0x7F800000)
    amax = tl.where(is_usable, amax_bits.to(tl.float32, bitcast=True), 1.0)
    # Of this amax the scale is the largest one, exactly; below it the quotient might overflow.
    SMALLEST: tl.constexpr = LARGEST * _SMALLEST_INVERSE
    amax = tl.where(amax > SMALLEST, amax, SMALLEST)
    scale = tl.div_rn(tl.zeros_like(amax) + LARGEST, amax)
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
def _load(x_ptr, top, left, rows, columns, row_stride):
    """HEIGHT rows of a tile in fp32, zero beyond the matrix."""
    row = top + tl.arange(0, HEIGHT)[:, None]
    column = left + tl.arange(0, 128)[None, :]
    x = tl.load(x_ptr + row * row_stride + column, mask=(row < rows) & (column < columns), other=0.0)
    return x.to(tl.float32)


@triton.jit
def _store(code, data_ptr, top, left, padded_rows, padded_columns, IS_TRANSPOSED: tl.constexpr):
    """Store the bytes of what `_load` gave, as they stand or transposed."""
    row = top + tl.arange(0, HEIGHT)
    column = left + tl.arange(0, 128)
    bytes_ptr = data_ptr.to(tl.pointer_type(tl.uint8), bitcast=True)
    if IS_TRANSPOSED:
        mask = (column < padded_columns)[:, None] & (row < padded_rows)[None, :]
        tl.store(bytes_ptr + column[:, None] * padded_rows + row[None, :], tl.trans(code), mask=mask)
    else:
        mask = (row < padded_rows)[:, None] & (column < padded_columns)[None, :]
        tl.store(bytes_ptr + row[:, None] * padded_columns + column[None, :], code, mask=mask)


@triton.jit
def _store_square_scale(scale_inv, scales_ptr, row_tile, column_tile, column_tiles):
    """Store the scale of one tile; the padding of a row of scales, to a multiple of 4, is written with its last one."""
    ahead = tl.arange(0, 4)[None, :]
    stride = (column_tiles + 3) // 4 * 4
    end = tl.where(column_tile == column_tiles - 1, stride, column_tile + 1)
    place = column_tile + ahead
    tl.store(scales_ptr + row_tile * stride + place, tl.where(ahead == 0, scale_inv, 1.0), mask=place < end)


@triton.jit(do_not_specialize=["rows"])
def quantize_blocks_kernel(
    x_ptr,  # rows of `columns`, row_stride apart
    data_ptr,  # FP8 (padded_rows, padded_columns), or None
    scales_ptr,  # of data, in the layout of block_scaling.py
    transposed_ptr,  # FP8 (padded_columns, padded_rows), or None
    transposed_scales_ptr,
    sums_ptr,  # fp32 (row tiles, columns), sums over the tiles' rows, or None
    rows,
    columns,  # specialised: where it is a multiple of 16, loads need no mask for each element
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
    PARTS: tl.constexpr = 128 // WIDTH  # blocks across a tile
    column_tiles = (padded_columns - 1) // 128 + 1
    row_tiles = (padded_rows - 1) // 128 + 1
    program = tl.program_id(0)  # widened later
    row_tile, column_tile = (program // column_tiles).to(tl.int64), (program % column_tiles).to(tl.int64)
    top, left = row_tile * 128, column_tile * 128

    total = tl.zeros([HEIGHT, 128], tl.float32)
    column_bits = tl.zeros([HEIGHT, 128], tl.int32)
    for start in tl.static_range(0, 128, HEIGHT):
        x = _load(x_ptr, top + start, left, rows, columns, row_stride)
        total += x
        bits = magnitude_bits(x)
        column_bits = tl.maximum(column_bits, bits)
        if data_ptr is not None and not SQUARE:
            amax = tl.max(tl.reshape(bits, [HEIGHT, PARTS, WIDTH]), axis=2, keep_dims=True)
            if WIDTH == 32:
                scale, stored = _microscale(amax, LARGEST)
            else:
                scale, stored = _scale(amax, LARGEST, POWER_OF_TWO)
            scale = tl.reshape(tl.broadcast_to(scale, [HEIGHT, PARTS, WIDTH]), [HEIGHT, 128])
            code = fp8_code(scaled_values(x, scale), E4M3, HARDWARE_CAST)
            _store(code, data_ptr, top + start, left, padded_rows, padded_columns, False)
            row = top + start + tl.arange(0, HEIGHT)[:, None, None]
            block = column_tile * PARTS + tl.arange(0, PARTS)[None, :, None]
            tl.store(
                scales_ptr + block * padded_rows + row, stored, mask=(row < padded_rows) & (block * WIDTH < columns)
            )
    column = left + tl.arange(0, 128)
    if sums_ptr is not None:
        tl.store(sums_ptr + row_tile * columns + column, tl.sum(total, axis=0), mask=column < columns)

    if SQUARE or transposed_ptr is not None:
        place = left + tl.arange(0, 128)[None, :]
        if SQUARE:
            amax = tl.max(tl.max(column_bits, axis=1, keep_dims=True), axis=0, keep_dims=True)
            scale, scale_inv = _scale(amax, LARGEST, POWER_OF_TWO)
            if data_ptr is not None:
                _store_square_scale(scale_inv, scales_ptr, row_tile, column_tile, column_tiles)
            if transposed_ptr is not None:
                _store_square_scale(scale_inv, transposed_scales_ptr, column_tile, row_tile, row_tiles)
        elif WIDTH == 128:
            scale, stored = _scale(tl.max(column_bits, axis=0, keep_dims=True), LARGEST, POWER_OF_TWO)
            tl.store(transposed_scales_ptr + row_tile * padded_columns + place, stored, mask=place < padded_columns)
        for start in tl.static_range(0, 128, HEIGHT):
            x = _load(x_ptr, top + start, left, rows, columns, row_stride)
            if WIDTH == 32:
                scale, stored = _microscale(tl.max(magnitude_bits(x), axis=0, keep_dims=True), LARGEST)
                block = (top + start) // WIDTH
                end = tl.where(top + start < rows, padded_columns, 0)
                tl.store(transposed_scales_ptr + block * padded_columns + place, stored, mask=place < end)
            code = fp8_code(scaled_values(x, scale), E4M3, HARDWARE_CAST)
            if data_ptr is not None and SQUARE:
                _store(code, data_ptr, top + start, left, padded_rows, padded_columns, False)
            if transposed_ptr is not None:
                _store(code, transposed_ptr, top + start, left, padded_rows, padded_columns, True)


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
    options = constants(dtype, block, power_of_two, has_fp8_cast(device))
    return PreparedLaunch(quantize_blocks_kernel, (tiles,), device, numbers, **options)
