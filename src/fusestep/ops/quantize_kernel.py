"""Kernels of the cast to FP8: the pass that finds an amax, the cast with its transpose, and a transpose of bytes.

A tile of ROWS × COLUMNS values is read once; what comes before the cast (an activation, the gradient of one) is formed
in fp32 in registers, and bytes leave twice, as they are and transposed. Bytes are transposed as bytes and stored as
bytes: a compiler fault on Hopper can write foreign bytes where a kernel stores both forms as FP8 (triton#11111).

What others use of this file: `slot_scale`, `raise_amax_bits` and `fp8_code`, for kernels that cast what they compute.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fusestep import hardware
from fusestep.language import interpreted, tl, triton
from fusestep.ops.activation_kernel import activation_derivative, activation_value, gated_gradients, gated_value
from fusestep.ops.launch import PreparedLaunch
from fusestep.ops.norm_backward import SUM_ROWS, _sum_partials_kernel, sum_columns
from fusestep.ops.quantized import PAD, padded
from fusestep.ops.roll_scales import LARGEST_SCALE
from fusestep.precision import FP8_CAPABILITY

#: The same bounds as in roll_scales.py: within them a scale and its inverse are both normal numbers of fp32.
_LARGEST_SCALE = tl.constexpr(LARGEST_SCALE)
_SMALLEST_SCALE = tl.constexpr(1.0 / LARGEST_SCALE)

#: Instructions that round fp32 to FP8 at once came with Hopper; before it Triton goes through fp16 and rounds twice.
CAST_CAPABILITY = (9, 0)


def has_fp8_cast(device: torch.device) -> bool:
    """Whether a device rounds fp32 to FP8 itself; else kernels do it with integers, to the same bytes."""
    return not interpreted() and hardware.devices()[device.index or 0].capability >= CAST_CAPABILITY


def has_fp8_type(device: torch.device) -> bool:
    """Whether Triton takes pointers to E4M3 on a device."""
    return interpreted() or hardware.devices()[device.index or 0].capability >= FP8_CAPABILITY


@triton.jit
def scale_from_amax(amax, LARGEST: tl.constexpr, MARGIN: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """The scale that an amax calls for, as scale_reference of roll_scales.py; rounded down to a power of two if so."""
    is_usable = (amax > 0.0) & (amax < float("inf"))
    scale = tl.div_rn(tl.full([], LARGEST, tl.float32), tl.where(is_usable, amax, 1.0))
    scale = scale * (0.5**MARGIN)
    scale = tl.minimum(tl.maximum(scale, _SMALLEST_SCALE), _LARGEST_SCALE)
    if POWER_OF_TWO:
        scale = (scale.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.where(is_usable, scale, 1.0)


@triton.jit
def slot_scale(slots_ptr, index, LARGEST: tl.constexpr, MARGIN: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """The scale of a slot; where it has none yet, the one that its amax calls for."""
    scale = tl.load(slots_ptr + index * 4)
    amax = tl.load(slots_ptr + index * 4 + 1)
    return tl.where(scale != 0.0, scale, scale_from_amax(amax, LARGEST, MARGIN, POWER_OF_TWO))


@triton.jit
def magnitude_bits(values):
    """The bits of |values|, which are ordered as the magnitudes are, NaN above infinity."""
    return values.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def raise_amax_bits(slots_ptr, index, bits):
    """Raise a slot's amax to the largest of these `magnitude_bits`; the same whatever the order of programs."""
    place = (slots_ptr + index * 4 + 1).to(tl.pointer_type(tl.int32), bitcast=True)
    largest = tl.max(bits)
    # An old value that is read here costs an atomic that changes nothing; few programs need one.
    tl.atomic_max(place, largest, mask=largest > tl.load(place), sem="relaxed")


@triton.jit
def fp8_code(scaled, E4M3: tl.constexpr, HARDWARE_CAST: tl.constexpr):
    """The bytes (uint8) of fp32 values in E4M3, else E5M2: saturated, rounded to nearest, ties to even; NaN is 0x7F."""
    if HARDWARE_CAST:
        # The instruction saturates, infinities too.
        if E4M3:
            code = scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        else:
            code = scaled.to(tl.float8e5).to(tl.uint8, bitcast=True)
    else:
        SHIFT: tl.constexpr = 20 if E4M3 else 21  # bits of mantissa that are lost
        EXPONENT: tl.constexpr = 121 if E4M3 else 113  # of the smallest normal number, biased as in fp32
        LARGEST: tl.constexpr = 0x43E00000 if E4M3 else 0x47600000  # 448 or 57344
        bits = scaled.to(tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        is_nan = magnitude > 0x7F800000
        magnitude = tl.where(magnitude > LARGEST, LARGEST, magnitude)
        odd = (magnitude >> SHIFT) & 1
        normal = ((magnitude + odd + ((1 << (SHIFT - 1)) - 1)) >> SHIFT) - ((EXPONENT - 1) << (23 - SHIFT))
        # Adding a number whose last place is the format's smallest one rounds a subnormal number.
        SMALL: tl.constexpr = (EXPONENT + SHIFT) << 23
        anchor = (magnitude & 0 | SMALL).to(tl.float32, bitcast=True)
        tiny = (magnitude.to(tl.float32, bitcast=True) + anchor).to(tl.int32, bitcast=True) - SMALL
        code = tl.where(magnitude < (EXPONENT << 23), tiny, normal)
        code = tl.where(is_nan, 0x7F, code | ((bits >> 24) & 0x80)).to(tl.uint8)
    return code


@triton.jit
def _values(
    x_ptr, h_ptr, row, column, mask, columns, x_stride, h_stride, ACTIVATION: tl.constexpr, GATED: tl.constexpr
):
    """A tile of what is cast, twice over: the gradient of a gated activation has one for each half of h."""
    x = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    if h_ptr is None:
        first = x
        if GATED:
            b = tl.load(x_ptr + row * x_stride + columns + column, mask=mask, other=0.0).to(tl.float32)
            first = gated_value(x, b, ACTIVATION)
        elif ACTIVATION != "":
            first = activation_value(x, ACTIVATION)
        second = first
    else:
        a = tl.load(h_ptr + row * h_stride + column, mask=mask, other=0.0).to(tl.float32)
        if GATED:
            b = tl.load(h_ptr + row * h_stride + columns + column, mask=mask, other=0.0).to(tl.float32)
            first, second = gated_gradients(x, a, b, ACTIVATION)
        else:
            first = x * activation_derivative(a, ACTIVATION)
            second = first
        # A product with 0 may be −0, and padding is +0.
        first = tl.where(mask, first, 0.0)
        second = tl.where(mask, second, 0.0)
    return first, second


@triton.jit(do_not_specialize=["rows", "index"])
def _amax_kernel(
    x_ptr,
    h_ptr,
    slots_ptr,
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
    """Raise a slot's amax to that of the tensor, if the slot has no scale; persistent programs, so that else each
    ends at once."""
    scale = tl.load(slots_ptr + index * 4)
    across = (columns - 1) // COLUMNS + 1
    tiles = ((rows - 1) // ROWS + 1) * across
    first_tile = tl.where(scale != 0.0, tiles, tl.program_id(0))
    bits = tl.zeros([ROWS, COLUMNS], tl.int32)
    for tile in tl.range(first_tile, tiles, tl.num_programs(0), num_stages=STAGES):
        row = (tile // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
        column = (tile % across) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        mask = (row < rows) & (column < columns)
        first, second = _values(x_ptr, h_ptr, row, column, mask, columns, x_stride, h_stride, ACTIVATION, GATED)
        bits = tl.maximum(bits, magnitude_bits(first))
        if GATED and h_ptr is not None:
            bits = tl.maximum(bits, magnitude_bits(second))
    raise_amax_bits(slots_ptr, index, bits)


@triton.jit
def _store_bytes(code, data_ptr, row, column, start, width, out_rows, out_columns):
    """Store a tile as it is: columns up to `width` from column `start` of the output on, padding included."""
    if data_ptr is not None:
        bytes_ptr = data_ptr.to(tl.pointer_type(tl.uint8), bitcast=True)
        mask = (row < out_rows) & (column < width)
        tl.store(bytes_ptr + row * out_columns + (start + column), code, mask=mask)


@triton.jit
def _store_transposed(code, transposed_ptr, first_row, first_column, start, width, out_rows):
    """Store a tile transposed; arguments as of `_store_bytes`."""
    if transposed_ptr is not None:
        bytes_ptr = transposed_ptr.to(tl.pointer_type(tl.uint8), bitcast=True)
        row = first_row + tl.arange(0, code.shape[0])[None, :]
        column = first_column + tl.arange(0, code.shape[1])[:, None]
        mask = (column < width) & (row < out_rows)
        tl.store(bytes_ptr + (start + column) * out_rows + row, tl.trans(code), mask=mask)


@triton.jit
def _count(counts_ptr, index, values, scaled, code, E4M3: tl.constexpr):
    """Count what was saturated, and what was flushed from something to zero."""
    LARGEST: tl.constexpr = 0x43E00000 if E4M3 else 0x47600000
    bits = magnitude_bits(scaled)
    saturated = tl.sum(((bits > LARGEST) & (bits <= 0x7F800000)).to(tl.int32)).to(tl.int64)
    flushed = tl.sum(((magnitude_bits(values) != 0) & ((code & 0x7F) == 0)).to(tl.int32)).to(tl.int64)
    tl.atomic_add(counts_ptr + index * 3 + 1, saturated, mask=saturated > 0, sem="relaxed")
    tl.atomic_add(counts_ptr + index * 3 + 2, flushed, mask=flushed > 0, sem="relaxed")


@triton.jit(do_not_specialize=["rows", "index"])
def _quantize_kernel(
    x_ptr,  # rows of `columns`, x_stride apart; of a gated activation 2 · columns
    h_ptr,  # with the gradient x of an activation's output, the activation's input, h_stride apart; or None
    data_ptr,  # (padded rows, padded columns) or None
    transposed_ptr,  # (padded columns, padded rows) or None
    scale_inv_ptr,  # 0-d
    slots_ptr,  # (n, 4)
    counts_ptr,  # (n, 3) or None
    partials_ptr,  # (tiles of rows, columns of the output) or None
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
    MARGIN: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One tile a program, neighbours in a row after one another."""
    scale = slot_scale(slots_ptr, index, 448.0 if E4M3 else 57344.0, MARGIN, POWER_OF_TWO)
    HALVES: tl.constexpr = 2 if GATED and h_ptr is not None else 1
    out_rows = (tl.cast(rows, tl.int64) + 15) // 16 * 16
    sums_width = tl.cast(columns, tl.int64) * HALVES
    out_columns = (sums_width + 15) // 16 * 16
    # The last columns of the output are followed by padding, the first of two halves by the second.
    last_width = out_columns - columns * (HALVES - 1)
    first_width = last_width if HALVES == 1 else columns
    across = ((last_width - 1) // COLUMNS + 1).to(tl.int32)
    program = tl.program_id(0)
    if program == 0:
        tl.store(scale_inv_ptr, tl.div_rn(tl.full([], 1.0, tl.float32), scale))
        if counts_ptr is not None:
            tl.atomic_add(counts_ptr + index * 3, rows * sums_width, sem="relaxed")
    first_row = (program // across).to(tl.int64) * ROWS
    first_column = (program % across) * COLUMNS
    column = first_column + tl.arange(0, COLUMNS)[None, :]
    row = first_row + tl.arange(0, ROWS)[:, None]
    mask = (row < rows) & (column < columns)
    values, second = _values(x_ptr, h_ptr, row, column, mask, columns, x_stride, h_stride, ACTIVATION, GATED)
    scaled = values * scale
    code = fp8_code(scaled, E4M3, HARDWARE_CAST)
    _store_bytes(code, data_ptr, row, column, 0, first_width, out_rows, out_columns)
    _store_transposed(code, transposed_ptr, first_row, first_column, 0, first_width, out_rows)
    bits = magnitude_bits(values)
    if counts_ptr is not None:
        _count(counts_ptr, index, values, scaled, code, E4M3)
    if HALVES == 2:
        scaled = second * scale
        code = fp8_code(scaled, E4M3, HARDWARE_CAST)
        _store_bytes(code, data_ptr, row, column, columns, last_width, out_rows, out_columns)
        _store_transposed(code, transposed_ptr, first_row, first_column, columns, last_width, out_rows)
        bits = tl.maximum(bits, magnitude_bits(second))
        if counts_ptr is not None:
            _count(counts_ptr, index, second, scaled, code, E4M3)
    if RECORD:
        raise_amax_bits(slots_ptr, index, bits)
    if partials_ptr is not None:
        partials_ptr += (first_row // ROWS) * sums_width
        column = first_column + tl.arange(0, COLUMNS)
        tl.store(partials_ptr + column, tl.sum(values, axis=0), mask=column < columns)
        if HALVES == 2:
            tl.store(partials_ptr + columns + column, tl.sum(second, axis=0), mask=column < columns)


@triton.jit(do_not_specialize=["rows", "columns"])
def _transpose_kernel(
    data_ptr,  # (16 · rows, 16 · columns) bytes
    transposed_ptr,
    rows,
    columns,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One tile of bytes a program."""
    out_rows = tl.cast(rows, tl.int64) * 16
    out_columns = tl.cast(columns, tl.int64) * 16
    across = ((out_columns - 1) // COLUMNS + 1).to(tl.int32)
    program = tl.program_id(0)
    first_row = (program // across).to(tl.int64) * ROWS
    first_column = (program % across) * COLUMNS
    column = first_column + tl.arange(0, COLUMNS)[None, :]
    bytes_ptr = data_ptr.to(tl.pointer_type(tl.uint8), bitcast=True)
    row = first_row + tl.arange(0, ROWS)[:, None]
    code = tl.load(bytes_ptr + row * out_columns + column, mask=(row < out_rows) & (column < out_columns), other=0)
    _store_transposed(code, transposed_ptr, first_row, first_column, 0, out_columns, out_rows)


@dataclass(frozen=True)
class TileLaunch:
    """How a kernel over tiles of `rows` × `columns` is launched."""

    rows: int
    columns: int
    warps: int


def quantize_launch(columnwise: bool, gradient: bool) -> TileLaunch:
    """The launch of a cast: of what is also stored transposed, and of an activation's gradient."""
    if not columnwise:
        return TileLaunch(4, 1024, 4)
    return TileLaunch(64, 64, 4 if not gradient else 8)


def transpose_launch() -> TileLaunch:
    return TileLaunch(64, 64, 4)


def amax_launch(columns: int) -> TileLaunch:
    """The launch of the pass that finds an amax: whole stretches of rows."""
    block = min(1024, 1 << max(columns - 1, 0).bit_length())
    return TileLaunch(4096 // block, block, 4)


#: Programs of the amax pass on each multiprocessor.
AMAX_PROGRAMS = 4
AMAX_STAGES = 3


@dataclass(frozen=True, slots=True)
class QuantizeLaunches:
    """The launches of one cast: the pass that finds the amax, the cast, and where columns are summed their total.

    `as_bytes`: the cast wants its outputs as uint8, since Triton knows no FP8 on the device.
    """

    amax: PreparedLaunch
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
    index: int,
    dtype: torch.dtype,
    columnwise: bool,
    record: bool,
    margin: int,
    power_of_two: bool,
    column_sums: bool,
) -> QuantizeLaunches:
    """The launches on (rows, columns) tiles: of x, or of a gated activation of one half of it.

    `activation` is the function that an activation is made of, "" for none; `h_stride` is None without an h.
    """
    gradient = h_stride is not None
    halves = 2 if gated and gradient else 1
    numbers = (rows, columns, x_stride, h_stride or 0, index)
    common = {"ACTIVATION": activation, "GATED": gated}
    finder = amax_launch(columns)
    tiles = -(-rows // finder.rows) * -(-columns // finder.columns)
    amax = PreparedLaunch(
        _amax_kernel,
        (min(tiles, AMAX_PROGRAMS * hardware.multiprocessors(device.index or 0)),),
        device,
        numbers,
        **common,
        ROWS=finder.rows,
        COLUMNS=finder.columns,
        STAGES=AMAX_STAGES,
        num_warps=finder.warps,
    )
    # Flat tiles would write as many partial sums as the tensor has bytes.
    choice = quantize_launch(columnwise or column_sums, gradient)
    across = -(-(padded(columns * halves) - columns * (halves - 1)) // choice.columns)
    down = -(-padded(rows) // choice.rows)
    cast = PreparedLaunch(
        _quantize_kernel,
        (across * down,),
        device,
        numbers,
        **common,
        E4M3=dtype is torch.float8_e4m3fn,
        HARDWARE_CAST=has_fp8_cast(device),
        RECORD=record,
        MARGIN=margin,
        POWER_OF_TWO=power_of_two,
        ROWS=choice.rows,
        COLUMNS=choice.columns,
        num_warps=choice.warps,
    )
    as_bytes = not has_fp8_type(device)
    if not column_sums or down == 1:
        return QuantizeLaunches(amax, cast, as_bytes, None, None)
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
    return QuantizeLaunches(amax, cast, as_bytes, (down, width), total)


def prepare_transpose(device: torch.device, rows: int, columns: int) -> PreparedLaunch:
    """The launch that transposes (rows, columns) bytes, both multiples of 16."""
    choice = transpose_launch()
    grid = (-(-rows // choice.rows) * -(-columns // choice.columns),)
    return PreparedLaunch(
        _transpose_kernel,
        grid,
        device,
        (rows // PAD, columns // PAD),
        ROWS=choice.rows,
        COLUMNS=choice.columns,
        num_warps=choice.warps,
    )
