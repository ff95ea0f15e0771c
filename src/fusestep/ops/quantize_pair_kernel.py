"""Kernels of two casts in one launch: those of quantize_kernel.py, with some of the programs for either matrix."""

from __future__ import annotations

from fusestep.language import tl, triton
from fusestep.ops.quantize_kernel import cast_tiles
from fusestep.ops.quantize_scale_kernel import cast_scale, known_scale, largest_bits


@triton.jit(do_not_specialize=["a_rows", "b_rows", "a_index", "b_index", "a_programs"])
def _amax_pair_kernel(
    a_ptr,
    b_ptr,
    slots_ptr,
    maxima_ptr,  # a number for each program, those of a first
    a_rows,
    b_rows,
    columns,
    a_stride,
    b_stride,
    a_index,
    b_index,
    a_programs,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The pass that finds the amaxes, as `_amax_kernel`: `a_programs` for a, the others for b."""
    program = tl.program_id(0)  # widened later
    if program < a_programs:
        known = known_scale(slots_ptr, a_index)
        largest = largest_bits(
            a_ptr, None, a_rows, columns, a_stride, 0, known, program, a_programs, "", False, ROWS, COLUMNS, STAGES
        )
    else:
        known = known_scale(slots_ptr, b_index)
        largest = largest_bits(
            b_ptr,
            None,
            b_rows,
            columns,
            b_stride,
            0,
            known,
            program - a_programs,
            tl.num_programs(0) - a_programs,
            "",
            False,
            ROWS,
            COLUMNS,
            STAGES,
        )
    tl.store(maxima_ptr + program, largest)


@triton.jit
def _cast_one(
    program,
    x_ptr,
    data_ptr,
    transposed_ptr,
    scale_inv_ptr,
    slots_ptr,
    maxima_ptr,
    counts_ptr,
    rows,
    columns,
    stride,
    index,
    maxima,
    E4M3: tl.constexpr,
    HARDWARE_CAST: tl.constexpr,
    RECORD: tl.constexpr,
    MARGIN: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILES: tl.constexpr,
    MOST_MAXIMA: tl.constexpr,
    SEARCH_ROWS: tl.constexpr,
    SEARCH_COLUMNS: tl.constexpr,
):
    scale = cast_scale(
        x_ptr,
        None,
        slots_ptr,
        maxima_ptr,
        rows,
        columns,
        stride,
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
        None,
        rows,
        columns,
        stride,
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


@triton.jit(do_not_specialize=["a_rows", "b_rows", "a_index", "b_index", "a_programs", "a_maxima", "b_maxima"])
def _quantize_pair_kernel(
    a_ptr,
    b_ptr,
    a_data_ptr,
    a_transposed_ptr,
    b_data_ptr,
    b_transposed_ptr,
    a_scale_inv_ptr,
    b_scale_inv_ptr,
    slots_ptr,
    maxima_ptr,
    counts_ptr,
    a_rows,
    b_rows,
    columns,
    a_stride,
    b_stride,
    a_index,
    b_index,
    a_programs,
    a_maxima,
    b_maxima,
    E4M3: tl.constexpr,
    HARDWARE_CAST: tl.constexpr,
    RECORD: tl.constexpr,
    MARGIN: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILES: tl.constexpr,
    MOST_MAXIMA: tl.constexpr,
    SEARCH_ROWS: tl.constexpr,
    SEARCH_COLUMNS: tl.constexpr,
):
    """`_quantize_kernel` of a by `a_programs`, and of b by the others."""
    program = tl.program_id(0)  # widened later
    if program < a_programs:
        _cast_one(
            program,
            a_ptr,
            a_data_ptr,
            a_transposed_ptr,
            a_scale_inv_ptr,
            slots_ptr,
            maxima_ptr,
            counts_ptr,
            a_rows,
            columns,
            a_stride,
            a_index,
            a_maxima,
            E4M3,
            HARDWARE_CAST,
            RECORD,
            MARGIN,
            POWER_OF_TWO,
            ROWS,
            COLUMNS,
            TILES,
            MOST_MAXIMA,
            SEARCH_ROWS,
            SEARCH_COLUMNS,
        )
    else:
        b_maxima_ptr = maxima_ptr
        if maxima_ptr is not None:
            b_maxima_ptr += a_maxima
        _cast_one(
            program - a_programs,
            b_ptr,
            b_data_ptr,
            b_transposed_ptr,
            b_scale_inv_ptr,
            slots_ptr,
            b_maxima_ptr,
            counts_ptr,
            b_rows,
            columns,
            b_stride,
            b_index,
            b_maxima,
            E4M3,
            HARDWARE_CAST,
            RECORD,
            MARGIN,
            POWER_OF_TWO,
            ROWS,
            COLUMNS,
            TILES,
            MOST_MAXIMA,
            SEARCH_ROWS,
            SEARCH_COLUMNS,
        )
