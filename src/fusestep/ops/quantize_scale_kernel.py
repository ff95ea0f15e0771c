"""The scale of a cast to FP8: what is cast, its amax, and what a slot makes of that.

The amax of a tensor whose slot has no scale yet is found by a pass of its own, or by each program of the cast.
"""

from __future__ import annotations

from fusestep.language import tl, triton
from fusestep.ops.activation_kernel import activation_derivative, activation_value, gated_gradients, gated_value
from fusestep.ops.fp8_cast import magnitude_bits, scale_from_amax


@triton.jit
def values_to_cast(x_ptr, h_ptr, x_place, h_place, mask, columns, ACTIVATION: tl.constexpr, GATED: tl.constexpr):
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
        first, second = values_to_cast(x_ptr, h_ptr, x_place, h_place, mask, columns, ACTIVATION, GATED)
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
