"""Kernels of the cast to FP8 of three matrices as if they stood side by side; quantize_joined.py says how they stand.

A tile of columns lies in one of the three, so that all but where a program reads is the cast of one matrix.
"""

from __future__ import annotations

from fusestep.language import tl, triton
from fusestep.ops.quantize_kernel import cast_tiles
from fusestep.ops.quantize_scale_kernel import cast_scale, known_scale, largest_bits


@triton.jit
def _largest_of(
    x_ptr,
    rows,
    columns,
    x_stride,
    known,
    program,
    programs,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """`largest_bits` of one of the three."""
    return largest_bits(
        x_ptr, None, rows, columns, x_stride, 0, known, program, programs, "", False, ROWS, COLUMNS, STAGES
    )


@triton.jit(do_not_specialize=["rows", "index"])
def _amax_joined_kernel(
    a_ptr,  # rows of a_columns, a_stride apart; and so the others
    b_ptr,
    c_ptr,
    slots_ptr,  # (n, 4) or None
    maxima_ptr,  # a number for each program
    rows,
    a_columns,
    b_columns,
    c_columns,
    a_stride,
    b_stride,
    c_stride,
    index,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The largest magnitude that each program finds in all three, if the slot has no scale; else each ends at once."""
    program = tl.program_id(0)  # widened later
    programs = tl.num_programs(0)
    known = known_scale(slots_ptr, index)
    of_a = _largest_of(a_ptr, rows, a_columns, a_stride, known, program, programs, ROWS, COLUMNS, STAGES)
    of_b = _largest_of(b_ptr, rows, b_columns, b_stride, known, program, programs, ROWS, COLUMNS, STAGES)
    of_c = _largest_of(c_ptr, rows, c_columns, c_stride, known, program, programs, ROWS, COLUMNS, STAGES)
    tl.store(maxima_ptr + program, tl.maximum(tl.maximum(of_a, of_b), of_c))


@triton.jit(do_not_specialize=["rows", "index", "maxima"])
def _quantize_joined_kernel(
    a_ptr,  # rows a_stride apart, of a_width columns for each stretch; and so the others
    b_ptr,
    c_ptr,
    data_ptr,  # (padded rows, columns) or None
    transposed_ptr,  # (columns, padded rows) or None
    scale_inv_ptr,  # 0-d
    slots_ptr,  # (n, 4) or None
    maxima_ptr,  # what _amax_joined_kernel found
    counts_ptr,  # (n, 3) or None
    partials_ptr,  # (programs down, columns) or None
    rows,
    columns,  # of all together
    a_width,
    b_width,
    c_width,
    a_stride,
    b_stride,
    c_stride,
    index,
    maxima,
    E4M3: tl.constexpr,
    HARDWARE_CAST: tl.constexpr,
    RECORD: tl.constexpr,
    MARGIN: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,  # divides the three widths
    TILES: tl.constexpr,
    MOST_MAXIMA: tl.constexpr,
    SEARCH_ROWS: tl.constexpr,
    SEARCH_COLUMNS: tl.constexpr,
):
    """The cast, its transpose and its column sums, by programs of some tiles."""
    program = tl.program_id(0)  # widened later
    scale = cast_scale(
        a_ptr,
        None,
        slots_ptr,
        maxima_ptr,
        rows,
        columns,
        a_stride,
        0,
        index,
        maxima,
        program,
        "",
        False,
        E4M3,
        MARGIN,
        POWER_OF_TWO,
        MOST_MAXIMA,
        SEARCH_ROWS,
        SEARCH_COLUMNS,
    )
    column = program % (columns // COLUMNS) * COLUMNS
    stretch = column // (a_width + b_width + c_width)
    inside = column - stretch * (a_width + b_width + c_width)
    is_a, is_b = inside < a_width, inside < a_width + b_width
    # The column of the matrix that the program reads, less its place in the output, by which the tiles go.
    in_a = stretch * a_width + inside - column
    in_b = stretch * b_width + inside - a_width - column
    in_c = stretch * c_width + inside - a_width - b_width - column
    x_ptr = tl.where(is_a, a_ptr + in_a, tl.where(is_b, b_ptr + in_b, c_ptr + in_c))
    x_stride = tl.where(is_a, a_stride, tl.where(is_b, b_stride, c_stride))
    cast_tiles(
        program,
        scale,
        x_ptr,
        None,
        data_ptr,
        transposed_ptr,
        scale_inv_ptr,
        slots_ptr,
        counts_ptr,
        partials_ptr,
        rows,
        columns,
        x_stride,
        0,
        index,
        "",
        False,
        E4M3,
        HARDWARE_CAST,
        RECORD,
        True,
        ROWS,
        COLUMNS,
        TILES,
    )
