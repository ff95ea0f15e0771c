"""Kernels of the cast to FP8: the cast with its transpose, and a transpose of bytes.

A program walks down a strip of columns in tiles. A tile is read once; what comes before the cast (an activation, the
gradient of one) is formed in fp32 in registers, and bytes leave twice, as they are and transposed. Four rows are taken
at a time, every fourth of the tile, and their bytes stay in words of four columns: a thread turns 4 × 4 bytes into
words of four rows with eight instructions, and words cross from thread to thread, not bytes.
"""

from __future__ import annotations

from fusestep.language import tl, triton
from fusestep.ops.fp8_cast import (
    count_cast,
    fp8_words,
    magnitude_bits,
    raise_amax_bits,
    scaled_values,
    sums_of_columns,
    transposed_words,
)
from fusestep.ops.quantize_scale_kernel import cast_scale, values_to_cast


@triton.jit
def _cast_rows(values, scale, counts_ptr, index, E4M3: tl.constexpr, HARDWARE_CAST: tl.constexpr):
    """The words of one row in four of a tile."""
    product = scaled_values(values, scale)
    if counts_ptr is not None:
        count_cast(counts_ptr, index, values, product, E4M3)
    return fp8_words(product, E4M3, HARDWARE_CAST)


@triton.jit
def _store_rows(words, bytes_ptr, place, column, mask, width, IN_WORDS: tl.constexpr):
    """Store such words as they are: at these places, in words, of `bytes_ptr`; `column`, in words, ends at `width`."""
    if IN_WORDS:
        words_ptr = bytes_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
        tl.store(words_ptr + place, words, mask=mask & (column < width // 4))
    else:
        for byte in tl.static_range(4):
            inside = mask & (column * 4 + byte < width)
            tl.store(bytes_ptr + place * 4 + byte, (words >> (8 * byte)).to(tl.uint8), mask=inside)


@triton.jit
def _store_tile(
    tile,
    first_row,
    first_column,
    data_ptr,
    transposed_ptr,
    start,
    width,
    out_rows,
    out_columns,
    IN_HARDWARE: tl.constexpr,
    IN_WORDS: tl.constexpr,
):
    """Store a tile, four tensors of words as `transposed_words` takes them, as it is and transposed: columns up to
    `width` from column `start` of the output on."""
    a, b, c, d = tile
    if data_ptr is not None:
        row = tl.arange(0, a.shape[0])[:, None].to(tl.int64) * 4
        column = first_column // 4 + tl.arange(0, a.shape[1])[None, :]
        place = row * (out_columns // 4) + column
        mask = row < out_rows - first_row
        bytes_ptr = data_ptr.to(tl.pointer_type(tl.uint8), bitcast=True) + (first_row * out_columns + start)
        _store_rows(a, bytes_ptr, place, column, mask, width, IN_WORDS)
        _store_rows(b, bytes_ptr + out_columns, place, column, mask, width, IN_WORDS)
        _store_rows(c, bytes_ptr + 2 * out_columns, place, column, mask, width, IN_WORDS)
        _store_rows(d, bytes_ptr + 3 * out_columns, place, column, mask, width, IN_WORDS)
    if transposed_ptr is not None:
        words = transposed_words(a, b, c, d, IN_HARDWARE)
        column = first_column + tl.arange(0, words.shape[0])[:, None]
        row = tl.arange(0, words.shape[1])[None, :]
        words_ptr = transposed_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + first_row // 4
        place = (start + column) * (out_rows // 4) + row
        tl.store(words_ptr + place, words, mask=(column < width) & (row < (out_rows - first_row) // 4))


@triton.jit
def _largest(magnitudes, values):
    """The larger of magnitudes and |values|; NaN stays."""
    return tl.maximum(magnitudes, tl.abs(values), propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def cast_tiles(
    program,
    scale,
    x_ptr,
    h_ptr,
    data_ptr,
    transposed_ptr,
    scale_inv_ptr,
    slots_ptr,
    counts_ptr,
    partials_ptr,
    rows,
    columns,
    x_stride,
    h_stride,
    index,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    E4M3: tl.constexpr,
    HARDWARE_CAST: tl.constexpr,
    RECORD: tl.constexpr,
    IN_WORDS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILES: tl.constexpr,
):
    """What one program casts, by the names of `_quantize_kernel`: TILES tiles below one another, neighbours in a row
    after one another."""
    HALVES: tl.constexpr = 2 if GATED and h_ptr is not None else 1
    out_rows = (tl.cast(rows, tl.int64) + 15) // 16 * 16
    sums_width = tl.cast(columns, tl.int64) * HALVES
    out_columns = (sums_width + 15) // 16 * 16
    # The last columns of the output are followed by padding, the first of two halves by the second.
    last_width = out_columns - columns * (HALVES - 1)
    first_width = last_width if HALVES == 1 else columns
    across = ((last_width - 1) // COLUMNS + 1).to(tl.int32)
    if program == 0:
        tl.store(scale_inv_ptr, tl.div_rn(tl.full([], 1.0, tl.float32), scale))
        if counts_ptr is not None:
            tl.atomic_add(counts_ptr + index * 3, rows * sums_width, sem="relaxed")  # integer count
    first_column = (program % across) * COLUMNS
    column = first_column + tl.arange(0, COLUMNS)[None, :]
    magnitudes = tl.zeros([ROWS // 4, COLUMNS], tl.float32)
    total = tl.zeros([ROWS // 4, COLUMNS], tl.float32)
    second_total = tl.zeros([ROWS // 4, COLUMNS], tl.float32)
    row = tl.arange(0, ROWS // 4)[:, None].to(tl.int64) * 4
    x_stride, h_stride = tl.cast(x_stride, tl.int64), tl.cast(h_stride, tl.int64)
    x_place, h_place = row * x_stride + column, row * h_stride + column
    inside = column < columns
    for tile in tl.range(0, TILES, num_stages=1):
        first_row = ((program // across).to(tl.int64) * TILES + tile) * ROWS
        left = rows - first_row
        x_row = x_ptr + first_row * x_stride
        h_row = h_ptr
        if h_ptr is not None:
            h_row = h_ptr + first_row * h_stride
        # All is read before anything is stored, since the compiler keeps that order.
        mask = inside & (row < left)
        a, a2 = values_to_cast(x_row, h_row, x_place, h_place, mask, columns, ACTIVATION, GATED)
        mask = inside & (row + 1 < left)
        b, b2 = values_to_cast(x_row, h_row, x_place + x_stride, h_place + h_stride, mask, columns, ACTIVATION, GATED)
        mask = inside & (row + 2 < left)
        c, c2 = values_to_cast(
            x_row, h_row, x_place + 2 * x_stride, h_place + 2 * h_stride, mask, columns, ACTIVATION, GATED
        )
        mask = inside & (row + 3 < left)
        d, d2 = values_to_cast(
            x_row, h_row, x_place + 3 * x_stride, h_place + 3 * h_stride, mask, columns, ACTIVATION, GATED
        )
        total += (a + b) + (c + d)
        magnitudes = _largest(_largest(_largest(_largest(magnitudes, a), b), c), d)
        words = (
            _cast_rows(a, scale, counts_ptr, index, E4M3, HARDWARE_CAST),
            _cast_rows(b, scale, counts_ptr, index, E4M3, HARDWARE_CAST),
            _cast_rows(c, scale, counts_ptr, index, E4M3, HARDWARE_CAST),
            _cast_rows(d, scale, counts_ptr, index, E4M3, HARDWARE_CAST),
        )
        _store_tile(
            words,
            first_row,
            first_column,
            data_ptr,
            transposed_ptr,
            0,
            first_width,
            out_rows,
            out_columns,
            HARDWARE_CAST,
            IN_WORDS,
        )
        if HALVES == 2:
            second_total += (a2 + b2) + (c2 + d2)
            magnitudes = _largest(_largest(_largest(_largest(magnitudes, a2), b2), c2), d2)
            words = (
                _cast_rows(a2, scale, counts_ptr, index, E4M3, HARDWARE_CAST),
                _cast_rows(b2, scale, counts_ptr, index, E4M3, HARDWARE_CAST),
                _cast_rows(c2, scale, counts_ptr, index, E4M3, HARDWARE_CAST),
                _cast_rows(d2, scale, counts_ptr, index, E4M3, HARDWARE_CAST),
            )
            _store_tile(
                words,
                first_row,
                first_column,
                data_ptr,
                transposed_ptr,
                columns,
                last_width,
                out_rows,
                out_columns,
                HARDWARE_CAST,
                IN_WORDS,
            )
    if RECORD:
        raise_amax_bits(slots_ptr, index, magnitude_bits(magnitudes))
    if partials_ptr is not None:
        partials_ptr += (program // across) * sums_width
        column = first_column + tl.arange(0, COLUMNS)
        tl.store(partials_ptr + column, sums_of_columns(total), mask=column < columns)
        if HALVES == 2:
            tl.store(partials_ptr + columns + column, sums_of_columns(second_total), mask=column < columns)


@triton.jit(do_not_specialize=["rows", "index", "maxima"])
def _quantize_kernel(
    x_ptr,  # rows of `columns`, x_stride apart; of a gated activation 2 · columns
    h_ptr,  # with the gradient x of an activation's output, the activation's input, h_stride apart; or None
    data_ptr,  # (padded rows, padded columns) or None
    transposed_ptr,  # (padded columns, padded rows) or None
    scale_inv_ptr,  # 0-d
    slots_ptr,  # (n, 4) or None
    maxima_ptr,  # what _amax_kernel found, or None
    counts_ptr,  # (n, 3) or None
    partials_ptr,  # (programs down, columns of the output) or None
    rows,
    columns,
    x_stride,
    h_stride,
    index,
    maxima,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    E4M3: tl.constexpr,
    HARDWARE_CAST: tl.constexpr,
    RECORD: tl.constexpr,
    MARGIN: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    IN_WORDS: tl.constexpr,  # whether the second of two halves begins at a word of the output
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILES: tl.constexpr,
    MOST_MAXIMA: tl.constexpr,
    SEARCH_ROWS: tl.constexpr,
    SEARCH_COLUMNS: tl.constexpr,
):
    """The cast, its transpose and its column sums, by programs of some tiles."""
    program = tl.program_id(0)  # widened later
    scale = cast_scale(
        x_ptr,
        h_ptr,
        slots_ptr,
        maxima_ptr,
        rows,
        columns,
        x_stride,
        h_stride,
        index,
        maxima,
        program,
        ACTIVATION,
        GATED,
        E4M3,
        MARGIN,
        POWER_OF_TWO,
        MOST_MAXIMA,
        SEARCH_ROWS,
        SEARCH_COLUMNS,
    )
    cast_tiles(
        program,
        scale,
        x_ptr,
        h_ptr,
        data_ptr,
        transposed_ptr,
        scale_inv_ptr,
        slots_ptr,
        counts_ptr,
        partials_ptr,
        rows,
        columns,
        x_stride,
        h_stride,
        index,
        ACTIVATION,
        GATED,
        E4M3,
        HARDWARE_CAST,
        RECORD,
        IN_WORDS,
        ROWS,
        COLUMNS,
        TILES,
    )


@triton.jit(do_not_specialize=["rows", "columns"])
def _transpose_kernel(
    data_ptr,  # (16 · rows, 16 · columns) bytes
    transposed_ptr,
    rows,
    columns,
    IN_HARDWARE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One tile of bytes a program."""
    out_rows = tl.cast(rows, tl.int64) * 16
    out_columns = tl.cast(columns, tl.int64) * 16
    across = ((out_columns - 1) // COLUMNS + 1).to(tl.int32)
    program = tl.program_id(0)  # widened later
    first_row = (program // across).to(tl.int64) * ROWS
    first_column = (program % across) * COLUMNS
    row = first_row + tl.arange(0, ROWS // 4)[:, None] * 4
    stride = out_columns // 4
    column = first_column // 4 + tl.arange(0, COLUMNS // 4)[None, :]
    mask = (row < out_rows) & (column < stride)
    words_ptr = data_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + row * stride + column
    a = tl.load(words_ptr, mask=mask, other=0)
    b = tl.load(words_ptr + stride, mask=mask, other=0)
    c = tl.load(words_ptr + 2 * stride, mask=mask, other=0)
    d = tl.load(words_ptr + 3 * stride, mask=mask, other=0)
    tile = (a, b, c, d)
    _store_tile(
        tile, first_row, first_column, None, transposed_ptr, 0, out_columns, out_rows, out_columns, IN_HARDWARE, True
    )
