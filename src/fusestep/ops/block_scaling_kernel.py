"""The kernel of block scaling: x is read once, both forms are written; the formulas stand in block_scaling.py.

A program works on a tile of 128 columns, and of 128 rows where blocks run down: whole blocks in both directions. The
tile is held in registers, each half of it in four parts, which are every fourth row: their bytes stay in words of four
columns, and a thread turns 4 × 4 of them into words of four rows by itself. It is cast by the scales of its rows, and
again by those of its columns.

Maxima never lose a NaN: they either propagate it, or are of the bits of |x| as integers, where NaN is above infinity.
"""

from __future__ import annotations

from fusestep.language import tl, triton
from fusestep.ops.fp8_cast import fp8_words, scaled_values, sums_of_columns, transposed_words, turned
from fusestep.ops.roll_scales import LARGEST_SCALE

_SMALLEST_INVERSE = tl.constexpr(1.0 / LARGEST_SCALE)


@triton.jit
def _scale(amax_bits, E4M3: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """(scale, its inverse) of blocks of these largest magnitudes."""
    is_usable = (amax_bits > 0) & (amax_bits < 0x7F800000)
    if POWER_OF_TWO:
        # Without a division. The largest value is 1.75 · 2^8 or 2^15, so exponents subtract, and one more is lost
        # where the amax has a mantissa above 1.75. At 2^126 a scale ends.
        EXPONENT: tl.constexpr = 127 + 127 + (8 if E4M3 else 15)
        exponent = tl.minimum(EXPONENT - ((amax_bits + 0x1FFFFF) >> 23), 253)
        exponent = tl.where(is_usable, exponent, 127)
        scale = (exponent << 23).to(tl.float32, bitcast=True)
        inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    else:
        LARGEST: tl.constexpr = 448.0 if E4M3 else 57344.0
        # Of the smallest amax the scale is the largest one, exactly; below it the quotient might overflow.
        SMALLEST: tl.constexpr = LARGEST * _SMALLEST_INVERSE
        amax = tl.where(is_usable, amax_bits.to(tl.float32, bitcast=True), 1.0)
        amax = tl.where(amax > SMALLEST, amax, SMALLEST)
        scale = tl.where(is_usable, tl.div_rn(tl.zeros_like(amax) + LARGEST, amax), 1.0)
        inverse = tl.div_rn(tl.zeros_like(scale) + 1.0, scale)
    return scale, inverse


@triton.jit
def _microscale(amax_bits, E4M3: tl.constexpr):
    """(scale, E8M0 exponent) of blocks of these largest magnitudes."""
    LARGEST: tl.constexpr = 448.0 if E4M3 else 57344.0
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
def _scales(amax_bits, E4M3: tl.constexpr, POWER_OF_TWO: tl.constexpr, WIDTH: tl.constexpr):
    """(scale, what is stored of it) of blocks of these largest magnitudes, 1 × WIDTH."""
    if WIDTH == 32:
        scale, stored = _microscale(amax_bits, E4M3)
    else:
        scale, stored = _scale(amax_bits, E4M3, POWER_OF_TWO)
    return scale, stored


@triton.jit
def _widened(x, IN_HARDWARE: tl.constexpr):
    """x in fp32. Of two bf16 in a register the compiler would first move the upper one down, then up again."""
    if IN_HARDWARE and x.dtype == tl.bfloat16:
        wide = tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000;", "=r,=r,r", [x], dtype=tl.float32, is_pure=True, pack=2
        )
    else:
        wide = x.to(tl.float32)
    return wide


@triton.jit
def _load(x_ptr, stride, rows, columns, HALF: tl.constexpr, IN_HARDWARE: tl.constexpr):
    """Half a tile in fp32, zero beyond `rows` and `columns`: four parts (HALF / 4, 128), each every fourth row."""
    row = tl.arange(0, HALF // 4)[:, None] * 4
    column = tl.arange(0, 128)[None, :]
    x_ptr += row.to(tl.int64) * stride + column
    inside = column < columns
    a = tl.load(x_ptr, mask=inside & (row < rows), other=0.0)
    b = tl.load(x_ptr + stride, mask=inside & (row + 1 < rows), other=0.0)
    c = tl.load(x_ptr + 2 * stride, mask=inside & (row + 2 < rows), other=0.0)
    d = tl.load(x_ptr + 3 * stride, mask=inside & (row + 3 < rows), other=0.0)
    return _widened(a, IN_HARDWARE), _widened(b, IN_HARDWARE), _widened(c, IN_HARDWARE), _widened(d, IN_HARDWARE)


@triton.jit
def _larger(a, b):
    """The larger of |a| and |b|; NaN if one is."""
    return tl.maximum(tl.abs(a), tl.abs(b), propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _bits(magnitudes):
    """The bits of magnitudes, as integers; NaN is above infinity there."""
    return magnitudes.to(tl.int32, bitcast=True)


@triton.jit
def _cast_rows(x, E4M3: tl.constexpr, HARDWARE_CAST: tl.constexpr, POWER_OF_TWO: tl.constexpr, WIDTH: tl.constexpr):
    """(words, stored scales) of rows (rows, 128), whose blocks run along them."""
    PARTS: tl.constexpr = 128 // WIDTH
    ROWS: tl.constexpr = x.shape[0]
    # Of four columns first, which a thread holds: no thread need tell another more than that.
    even, odd = tl.split(tl.reshape(x, [ROWS, 32, 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    bits = _bits(_larger(_larger(first, second), _larger(third, fourth)))
    amax = tl.max(tl.reshape(bits, [ROWS, PARTS, WIDTH // 4]), axis=2, keep_dims=True)
    scale, stored = _scales(amax, E4M3, POWER_OF_TWO, WIDTH)
    wide = tl.reshape(tl.broadcast_to(scale, [ROWS, PARTS, WIDTH]), [ROWS, 128])
    return fp8_words(scaled_values(x, wide), E4M3, HARDWARE_CAST), tl.reshape(stored, [ROWS, PARTS])


@triton.jit
def _store_rows(words_ptr, words, rows, columns, stride):
    """Store one part of half a tile, words of four columns; `columns` and `stride` in words."""
    row = tl.arange(0, words.shape[0])[:, None] * 4
    column = tl.arange(0, words.shape[1])[None, :]
    tl.store(words_ptr + row.to(tl.int64) * stride + column, words, mask=(row < rows) & (column < columns))


@triton.jit
def _store_half(words_ptr, half, rows, columns, stride):
    """Store four such parts."""
    a, b, c, d = half
    _store_rows(words_ptr, a, rows, columns, stride)
    _store_rows(words_ptr + stride, b, rows, columns, stride)
    _store_rows(words_ptr + 2 * stride, c, rows, columns, stride)
    _store_rows(words_ptr + 3 * stride, d, rows, columns, stride)


@triton.jit
def _store_transposed(words_ptr, half, rows, columns, stride, IN_HARDWARE: tl.constexpr):
    """Store them transposed, in words of four rows; `rows` and `stride` in words."""
    a, b, c, d = half
    words = transposed_words(a, b, c, d, IN_HARDWARE)
    column = tl.arange(0, words.shape[0])[:, None]
    row = tl.arange(0, words.shape[1])[None, :]
    tl.store(words_ptr + column.to(tl.int64) * stride + row, words, mask=(column < columns) & (row < rows))


@triton.jit
def _in_turn(a, b, c, d):
    """(rows, columns) of four parts (rows / 4, columns), each of which is every fourth row."""
    joined = tl.permute(tl.join(tl.join(a, c), tl.join(b, d)), [0, 2, 3, 1])
    return tl.reshape(joined, [a.shape[0] * 4, a.shape[1]])


@triton.jit
def _cast_half_by_rows(
    half,
    words_ptr,
    scales_ptr,  # of the half's first row
    rows,
    columns,
    stride,  # of words
    scale_stride,
    blocks,
    E4M3: tl.constexpr,
    HARDWARE_CAST: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Cast half a tile in blocks along its rows, and store bytes and scales of `rows` rows."""
    a, b, c, d = half
    a, a_scales = _cast_rows(a, E4M3, HARDWARE_CAST, POWER_OF_TWO, WIDTH)
    b, b_scales = _cast_rows(b, E4M3, HARDWARE_CAST, POWER_OF_TWO, WIDTH)
    c, c_scales = _cast_rows(c, E4M3, HARDWARE_CAST, POWER_OF_TWO, WIDTH)
    d, d_scales = _cast_rows(d, E4M3, HARDWARE_CAST, POWER_OF_TWO, WIDTH)
    _store_half(words_ptr, (a, b, c, d), rows, columns, stride)
    stored = _in_turn(a_scales, b_scales, c_scales, d_scales)
    row = tl.arange(0, stored.shape[0])[:, None]
    block = tl.arange(0, stored.shape[1])[None, :]
    tl.store(scales_ptr + block * scale_stride + row, stored, mask=(row < rows) & (block < blocks))


@triton.jit
def _column_magnitudes(half):
    """The largest of four rows, (HALF / 4, 128)."""
    a, b, c, d = half
    return _larger(_larger(a, b), _larger(c, d))


@triton.jit
def _column_scales(
    magnitudes,
    scales_ptr,  # of the first block and column
    columns,
    scale_stride,
    blocks,
    PARTS: tl.constexpr,
    E4M3: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The scales of PARTS blocks down of these, wide as they are; stored."""
    ROWS: tl.constexpr = magnitudes.shape[0]
    even, odd = turned(magnitudes, PARTS)
    scale, stored = _scales(tl.max(_bits(_larger(even, odd)), axis=1), E4M3, POWER_OF_TWO, WIDTH)
    block = tl.arange(0, PARTS)[:, None]
    column = tl.arange(0, 128)[None, :]
    tl.store(
        scales_ptr + block * scale_stride + column,
        tl.reshape(stored, [PARTS, 128]),
        mask=(block < blocks) & (column < columns),
    )
    return tl.reshape(tl.broadcast_to(tl.reshape(scale, [PARTS, 1, 128]), [PARTS, ROWS // PARTS, 128]), [ROWS, 128])


@triton.jit
def _cast_half(half, scale, E4M3: tl.constexpr, HARDWARE_CAST: tl.constexpr):
    """Half a tile in words, by one scale or those of its columns."""
    a, b, c, d = half
    return (
        fp8_words(scaled_values(a, scale), E4M3, HARDWARE_CAST),
        fp8_words(scaled_values(b, scale), E4M3, HARDWARE_CAST),
        fp8_words(scaled_values(c, scale), E4M3, HARDWARE_CAST),
        fp8_words(scaled_values(d, scale), E4M3, HARDWARE_CAST),
    )


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
    sums_ptr,  # (row tiles, columns), sums over the tiles' rows, or None
    rows,
    columns,  # specialised: where it is a multiple of 16, loads need no mask for each element
    row_stride,
    padded_rows,
    padded_columns,
    E4M3: tl.constexpr,
    HARDWARE_CAST: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    SQUARE: tl.constexpr,  # blocks of 128 × 128, else of 1 × WIDTH
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,  # of a tile: 128, fewer only where nothing runs down
):
    """One tile a program, neighbours in a row after one another."""
    HALF: tl.constexpr = ROWS // 2
    column_tiles = (padded_columns - 1) // 128 + 1
    program = tl.program_id(0)  # widened later
    row_tile, column_tile = (program // column_tiles).to(tl.int64), (program % column_tiles).to(tl.int64)
    first_row, first_column = row_tile * ROWS, column_tile * 128
    # What is left from here on of the matrix and of its padding, as far as the tile reaches.
    left = tl.minimum(rows - first_row, ROWS).to(tl.int32)
    width = tl.minimum(columns - first_column, 128).to(tl.int32)
    padded_left = tl.minimum(padded_rows - first_row, ROWS).to(tl.int32)
    padded_width = tl.minimum(padded_columns - first_column, 128).to(tl.int32)

    # All is read before anything is stored, since the compiler keeps that order.
    stride = tl.cast(row_stride, tl.int64)
    x_ptr += first_row * stride + first_column
    top = _load(x_ptr, stride, left, width, HALF, HARDWARE_CAST)
    bottom = _load(x_ptr + HALF * stride, stride, left - HALF, width, HALF, HARDWARE_CAST)

    if data_ptr is not None:
        words_ptr = data_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
        words_stride = tl.cast(padded_columns, tl.int64) // 4
        words_ptr += first_row * words_stride + first_column // 4
        low_words_ptr = words_ptr + HALF * words_stride
        words_width = padded_width // 4
        if not SQUARE:
            PARTS: tl.constexpr = 128 // WIDTH  # blocks across a tile
            scales_ptr += column_tile * PARTS * padded_rows + first_row
            blocks = (width - 1) // WIDTH + 1
            _cast_half_by_rows(
                *(top, words_ptr, scales_ptr, padded_left, words_width, words_stride, padded_rows, blocks),
                *(E4M3, HARDWARE_CAST, POWER_OF_TWO, WIDTH),
            )
            _cast_half_by_rows(
                *(bottom, low_words_ptr, scales_ptr + HALF, padded_left - HALF, words_width, words_stride),
                *(padded_rows, blocks, E4M3, HARDWARE_CAST, POWER_OF_TWO, WIDTH),
            )
    if sums_ptr is not None:
        a, b, c, d = top
        e, f, g, h = bottom
        total = sums_of_columns(((a + b) + (c + d)) + ((e + f) + (g + h)))
        column = tl.arange(0, 128)
        tl.store(sums_ptr + row_tile * columns + first_column + column, total, mask=column < width)

    if SQUARE or transposed_ptr is not None:
        tl.static_assert(ROWS == 128, "blocks that run down need whole tiles")
        high, low = _column_magnitudes(top), _column_magnitudes(bottom)
        if SQUARE:
            amax = tl.max(tl.max(_bits(_larger(high, low)), axis=1, keep_dims=True), axis=0, keep_dims=True)
            high_scale, scale_inv = _scale(amax, E4M3, POWER_OF_TWO)
            low_scale = high_scale
            if data_ptr is not None:
                _store_square_scale(scale_inv, scales_ptr, row_tile, column_tile, column_tiles)
            if transposed_ptr is not None:
                row_tiles = (padded_rows - 1) // 128 + 1
                _store_square_scale(scale_inv, transposed_scales_ptr, column_tile, row_tile, row_tiles)
        else:
            scales_ptr = transposed_scales_ptr + row_tile * (128 // WIDTH) * padded_columns + first_column
            options = (padded_width, padded_columns)
            blocks = (left - 1) // WIDTH + 1
            if WIDTH == 128:
                high_scale = _column_scales(_larger(high, low), scales_ptr, *options, 1, 1, E4M3, POWER_OF_TWO, WIDTH)
                low_scale = high_scale
            else:
                high_scale = _column_scales(high, scales_ptr, *options, blocks, 2, E4M3, POWER_OF_TWO, WIDTH)
                scales_ptr += 2 * padded_columns
                low_scale = _column_scales(low, scales_ptr, *options, blocks - 2, 2, E4M3, POWER_OF_TWO, WIDTH)
        top = _cast_half(top, high_scale, E4M3, HARDWARE_CAST)
        bottom = _cast_half(bottom, low_scale, E4M3, HARDWARE_CAST)
        if SQUARE and data_ptr is not None:
            _store_half(words_ptr, top, padded_left, words_width, words_stride)
            _store_half(low_words_ptr, bottom, padded_left - HALF, words_width, words_stride)
        if transposed_ptr is not None:
            turned_ptr = transposed_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
            turned_stride = tl.cast(padded_rows, tl.int64) // 4
            turned_ptr += first_column * turned_stride + first_row // 4
            turned_left = padded_left // 4
            _store_transposed(turned_ptr, top, turned_left, padded_width, turned_stride, HARDWARE_CAST)
            turned_ptr += HALF // 4
            _store_transposed(turned_ptr, bottom, turned_left - HALF // 4, padded_width, turned_stride, HARDWARE_CAST)
