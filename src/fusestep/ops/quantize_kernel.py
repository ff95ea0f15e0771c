"""Kernels of the cast to FP8: the pass that finds an amax, the cast with its transpose, and a transpose of bytes.

A program walks down a strip of columns in tiles. A tile is read once; what comes before the cast (an activation, the
gradient of one) is formed in fp32 in registers, and bytes leave twice, as they are and transposed. Four rows are taken
at a time, every fourth of the tile, and their bytes stay in words of four columns: a thread turns 4 × 4 bytes into
words of four rows with eight instructions, and words cross from thread to thread, not bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from fusestep import hardware
from fusestep.language import tl, triton
from fusestep.ops.activation_kernel import activation_derivative, activation_value, gated_gradients, gated_value
from fusestep.ops.fp8_cast import (
    count_cast,
    fp8_words,
    has_fp8_cast,
    has_fp8_type,
    magnitude_bits,
    raise_amax_bits,
    scale_from_amax,
    scaled_values,
    sums_of_columns,
    transposed_words,
)
from fusestep.ops.launch import PreparedLaunch
from fusestep.ops.norm_backward import SUM_ROWS, _sum_partials_kernel, sum_columns
from fusestep.ops.quantized import PAD, padded


@triton.jit
def _values(x_ptr, h_ptr, x_place, h_place, mask, columns, ACTIVATION: tl.constexpr, GATED: tl.constexpr):
    """What is cast at some places, twice over: the gradient of a gated activation has one for each half of h."""
    x = tl.load(x_ptr + x_place, mask=mask, other=0.0).to(tl.float32)
    if h_ptr is None:
        first = x
        if GATED:
            b = tl.load(x_ptr + columns + x_place, mask=mask, other=0.0).to(tl.float32)
            first = gated_value(x, b, ACTIVATION)
        elif ACTIVATION != "":
            first = activation_value(x, ACTIVATION)
        second = first
    else:
        a = tl.load(h_ptr + h_place, mask=mask, other=0.0).to(tl.float32)
        if GATED:
            b = tl.load(h_ptr + columns + h_place, mask=mask, other=0.0).to(tl.float32)
            first, second = gated_gradients(x, a, b, ACTIVATION)
        else:
            first = x * activation_derivative(a, ACTIVATION)
            second = first
        # A product with 0 may be −0, and padding is +0.
        first = tl.where(mask, first, 0.0)
        second = tl.where(mask, second, 0.0)
    return first, second


@triton.jit
def largest_bits(
    x_ptr,
    h_ptr,
    rows,
    columns,
    x_stride,
    h_stride,
    known,
    program,
    programs,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The largest `magnitude_bits` of what this one of some programs walks over of a tensor: nothing, where a scale is
    known."""
    across = (columns - 1) // COLUMNS + 1
    tiles = ((rows - 1) // ROWS + 1) * across
    first_tile = tl.where(known != 0.0, tiles, program)
    bits = tl.zeros([ROWS, COLUMNS], tl.int32)
    for tile in tl.range(first_tile, tiles, programs, num_stages=STAGES):
        row = (tile // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
        column = (tile % across) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        mask = (row < rows) & (column < columns)
        x_place, h_place = row * x_stride + column, row * h_stride + column
        first, second = _values(x_ptr, h_ptr, x_place, h_place, mask, columns, ACTIVATION, GATED)
        bits = tl.maximum(bits, magnitude_bits(first))
        if GATED and h_ptr is not None:
            bits = tl.maximum(bits, magnitude_bits(second))
    return tl.max(bits)


@triton.jit
def known_scale(slots_ptr, index):
    """The scale of a slot: 0 where it has none, or where there is no slot."""
    known = tl.full([], 0.0, tl.float32)
    if slots_ptr is not None:
        known = tl.load(slots_ptr + index * 4)
    return known


@triton.jit(do_not_specialize=["rows", "index"])
def _amax_kernel(
    x_ptr,
    h_ptr,
    slots_ptr,  # (n, 4) or None
    maxima_ptr,  # a number for each program
    rows,
    columns,
    x_stride,
    h_stride,
    index,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The largest magnitude that each program finds in a tensor whose slot has no scale; else each ends at once."""
    program = tl.program_id(0)  # widened later
    known = known_scale(slots_ptr, index)
    largest = largest_bits(
        x_ptr,
        h_ptr,
        rows,
        columns,
        x_stride,
        h_stride,
        known,
        program,
        tl.num_programs(0),
        ACTIVATION,
        GATED,
        ROWS,
        COLUMNS,
        STAGES,
    )
    tl.store(maxima_ptr + program, largest)


@triton.jit
def cast_scale(
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
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    E4M3: tl.constexpr,
    MARGIN: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    MOST_MAXIMA: tl.constexpr,
    SEARCH_ROWS: tl.constexpr,
    SEARCH_COLUMNS: tl.constexpr,
):
    """The scale of a cast: its slot's; where that has none yet, the one that the amax calls for.

    The amax is the largest of the `maxima` numbers that a pass before left, and of the slot's. Without such a pass each
    program finds it by itself. It is entered in the slot.
    """
    known = known_scale(slots_ptr, index)
    if maxima_ptr is not None:
        place = tl.arange(0, MOST_MAXIMA)
        largest = tl.max(tl.load(maxima_ptr + place, mask=place < tl.where(known == 0.0, maxima, 0), other=0))
    else:
        largest = largest_bits(
            x_ptr,
            h_ptr,
            rows,
            columns,
            x_stride,
            h_stride,
            known,
            0,
            1,
            ACTIVATION,
            GATED,
            SEARCH_ROWS,
            SEARCH_COLUMNS,
            1,
        )
    if slots_ptr is not None:
        place = slots_ptr + index * 4 + 1
        largest = tl.maximum(largest, magnitude_bits(tl.load(place)))
        place = place.to(tl.pointer_type(tl.int32), bitcast=True)
        tl.atomic_max(place, largest, mask=(program == 0) & (known == 0.0), sem="relaxed")  # integer maximum
    amax = largest.to(tl.float32, bitcast=True)
    found = scale_from_amax(amax, 448.0 if E4M3 else 57344.0, MARGIN, POWER_OF_TWO)
    return tl.where(known != 0.0, known, found)


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
        a, a2 = _values(x_row, h_row, x_place, h_place, mask, columns, ACTIVATION, GATED)
        mask = inside & (row + 1 < left)
        b, b2 = _values(x_row, h_row, x_place + x_stride, h_place + h_stride, mask, columns, ACTIVATION, GATED)
        mask = inside & (row + 2 < left)
        c, c2 = _values(x_row, h_row, x_place + 2 * x_stride, h_place + 2 * h_stride, mask, columns, ACTIVATION, GATED)
        mask = inside & (row + 3 < left)
        d, d2 = _values(x_row, h_row, x_place + 3 * x_stride, h_place + 3 * h_stride, mask, columns, ACTIVATION, GATED)
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


@dataclass(frozen=True)
class TileLaunch:
    """How a kernel over tiles of `rows` × `columns` is launched; a program takes `tiles` of them, one below another."""

    rows: int
    columns: int
    warps: int
    tiles: int = 1


def quantize_launch(columnwise: bool, column_sums: bool) -> TileLaunch:
    """The launch of a cast: what is also stored transposed, or summed, goes in squares.

    More tiles a program would leave fewer partial sums, but take twice the registers.
    """
    return TileLaunch(64, 64, 4) if columnwise or column_sums else TileLaunch(4, 1024, 4)


def transpose_launch() -> TileLaunch:
    return TileLaunch(64, 64, 4)


def amax_launch(columns: int) -> TileLaunch:
    """The launch of the pass that finds an amax: whole stretches of rows."""
    block = min(1024, 1 << max(columns - 1, 0).bit_length())
    return TileLaunch(4096 // block, block, 4)


#: Programs of the amax pass on each multiprocessor, and at most: every program of the cast reads a number of each.
AMAX_PROGRAMS = 4
MOST_MAXIMA = 512
AMAX_STAGES = 3

#: Up to so many elements of a tensor with a slot, the programs of the cast find its amax themselves, each the whole of
#: it: a slot has no scale only until its first tensor that is not zero, and a pass that finds nothing to do in every
#: other step costs the host more.
SEARCHED_BY_EACH = 1 << 21

#: The same where there is no slot, so that they search every time.
SEARCHED_ALWAYS = 1 << 15

#: So many tiles below one another a program walks through rather than leave their column sums to another launch.
SUMMED_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class QuantizeLaunches:
    """The launches of one cast: the pass that finds the amax, the cast, and where columns are summed their total.

    `as_bytes`: the cast wants its outputs as uint8, since Triton knows no FP8 on the device.
    """

    amax: PreparedLaunch | None  # None: the programs of the cast find it
    maxima: int  # that the pass leaves
    cast: PreparedLaunch
    as_bytes: bool
    partials: tuple[int, int] | None  # rows and columns
    total: PreparedLaunch | None


def prepare_quantize(
    device: torch.device,
    rows: int,
    columns: int,
    x_stride: int,
    h_stride: int | None,
    activation: str,
    gated: bool,
    has_slot: bool,
    index: int,
    dtype: torch.dtype,
    columnwise: bool,
    record: bool,
    margin: int,
    power_of_two: bool,
    column_sums: bool,
) -> QuantizeLaunches:
    """The launches on (rows, columns) tiles: of x, or of a gated activation of one half of it.

    `activation` is the function that an activation is made of, "" for none; `h_stride` is None without an h. Without a
    slot the scale is always the tensor's own.
    """
    gradient = h_stride is not None
    halves = 2 if gated and gradient else 1
    numbers = (rows, columns, x_stride, h_stride or 0, index)
    common = {"ACTIVATION": activation, "GATED": gated}
    finder = amax_launch(columns)
    amax, maxima = None, 0
    if rows * columns > (SEARCHED_BY_EACH if has_slot else SEARCHED_ALWAYS):
        maxima = amax_programs(device, rows, columns, finder)
        amax = PreparedLaunch(
            _amax_kernel,
            (maxima,),
            device,
            numbers,
            **common,
            ROWS=finder.rows,
            COLUMNS=finder.columns,
            STAGES=AMAX_STAGES,
            num_warps=finder.warps,
        )
    # Flat tiles would write as many partial sums as the tensor has bytes.
    choice = quantize_launch(columnwise, column_sums)
    tiles_down = -(-padded(rows) // choice.rows)
    if column_sums and tiles_down <= SUMMED_AT_ONCE:
        choice = replace(choice, tiles=tiles_down)
    across = -(-(padded(columns * halves) - columns * (halves - 1)) // choice.columns)
    down = -(-tiles_down // choice.tiles)
    cast = PreparedLaunch(
        _quantize_kernel,
        (across * down,),
        device,
        (*numbers, maxima),
        **common,
        E4M3=dtype is torch.float8_e4m3fn,
        HARDWARE_CAST=has_fp8_cast(device),
        RECORD=record,
        MARGIN=margin,
        POWER_OF_TWO=power_of_two,
        IN_WORDS=halves == 1 or columns % 4 == 0,
        ROWS=choice.rows,
        COLUMNS=choice.columns,
        TILES=choice.tiles,
        MOST_MAXIMA=MOST_MAXIMA,
        SEARCH_ROWS=finder.rows,
        SEARCH_COLUMNS=finder.columns,
        num_warps=choice.warps,
    )
    as_bytes = not has_fp8_type(device)
    if not column_sums or down == 1:
        return QuantizeLaunches(amax, maxima, cast, as_bytes, None, None)
    width = columns * halves
    sums = sum_columns(width)
    total = PreparedLaunch(
        _sum_partials_kernel,
        (-(-width // sums), 1),
        device,
        (down,),
        WIDTH=width,
        ROWS=SUM_ROWS,
        COLUMNS=sums,
        num_warps=4,
    )
    return QuantizeLaunches(amax, maxima, cast, as_bytes, (down, width), total)


def amax_programs(device: torch.device, rows: int, columns: int, finder: TileLaunch) -> int:
    """Programs of the pass that finds the amax of a matrix."""
    tiles = -(-rows // finder.rows) * -(-columns // finder.columns)
    return min(tiles, AMAX_PROGRAMS * hardware.multiprocessors(device.index or 0), MOST_MAXIMA)


def prepare_transpose(device: torch.device, rows: int, columns: int) -> PreparedLaunch:
    """The launch that transposes (rows, columns) bytes, both multiples of 16."""
    choice = transpose_launch()
    grid = (-(-rows // choice.rows) * -(-columns // choice.columns),)
    return PreparedLaunch(
        _transpose_kernel,
        grid,
        device,
        (rows // PAD, columns // PAD),
        IN_HARDWARE=has_fp8_cast(device),
        ROWS=choice.rows,
        COLUMNS=choice.columns,
        num_warps=choice.warps,
    )
