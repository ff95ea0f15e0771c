"""The kernels of Adam's step with FP8 copies; what they do, and their launches: see adam_copies.py.

The launches read a `TensorTable` with more rows (below), and `tile_tensor`, which says to which matrix a tile belongs.
Source of the transposed bytes being formed as bytes: triton#11111.
"""

from __future__ import annotations

from fusestep.language import tl, triton
from fusestep.ops.adam_kernel import (
    ADAM_ROWS,
    EXP_AVG,
    EXP_AVG_SQ,
    MASTER,
    PARAMETER,
    _coefficients,
    _gate,
    _keep_counts,
    _master_at,
    _update,
)
from fusestep.ops.fp8_cast import fp8_code, magnitude_bits, raise_amax_bits, scale_from_amax, scaled_values
from fusestep.ops.tensor_table import GRADIENT

#: Rows of the table after Adam's. A parameter that is part of a matrix has the addresses of its own first row there.
FIRST_TILE: tl.constexpr = tl.constexpr(ADAM_ROWS)
HEIGHT: tl.constexpr = tl.constexpr(ADAM_ROWS + 1)  # of the parameter
WIDTH: tl.constexpr = tl.constexpr(ADAM_ROWS + 2)
DATA: tl.constexpr = tl.constexpr(ADAM_ROWS + 3)  # addresses, as are the next
TRANSPOSED: tl.constexpr = tl.constexpr(ADAM_ROWS + 4)
SCALE_INV: tl.constexpr = tl.constexpr(ADAM_ROWS + 5)
TRANSPOSED_SCALE_INV: tl.constexpr = tl.constexpr(ADAM_ROWS + 6)
SLOT: tl.constexpr = tl.constexpr(ADAM_ROWS + 7)
WHOLE_HEIGHT: tl.constexpr = tl.constexpr(ADAM_ROWS + 8)  # of the matrix that the parameter is part of, or is
FILLED: tl.constexpr = tl.constexpr(ADAM_ROWS + 9)  # places that the parameter fills in rows of the transpose


@triton.jit
def _places(height, width, first_row, first_column, ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """(start of a tile, offsets of its elements from there, which of them are within the matrix)."""
    step = width.to(tl.int32)
    if ALIGNED:
        # Said so, it is known to be a multiple of 16, and loads are as wide as they can be, masked ones too.
        step = step // 16 * 16
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    mask = (row < height - first_row) & (column < step - first_column.to(tl.int32))
    return first_row * step + first_column, row * step + column, mask


@triton.jit
def _step_tile(
    rows, tensors, tensor, hyper, steps_before, inverse, is_skipped, height, width, first_row, first_column,
    PARAMETER_DTYPE: tl.constexpr, GRADIENT_DTYPE: tl.constexpr, MOMENT_DTYPE: tl.constexpr,
    MASTER_KIND: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Step a tile; returns its weights as they are now stored, in fp32, 0 beyond the matrix."""
    gradient = tl.load(rows + tensors * GRADIENT + tensor).to(tl.pointer_type(GRADIENT_DTYPE))
    parameter = tl.load(rows + tensors * PARAMETER + tensor).to(tl.pointer_type(PARAMETER_DTYPE))
    exp_avg = tl.load(rows + tensors * EXP_AVG + tensor).to(tl.pointer_type(MOMENT_DTYPE))
    exp_avg_sq = tl.load(rows + tensors * EXP_AVG_SQ + tensor).to(tl.pointer_type(MOMENT_DTYPE))
    master = _master_at(tl.load(rows + tensors * MASTER + tensor), MASTER_KIND)
    l2, keep, one_minus_beta1, beta2, one_minus_beta2, step_size, inverse_root, eps = _coefficients(
        rows, tensors, tensor, hyper, steps_before
    )
    start, at, mask = _places(height, width, first_row, first_column, ALIGNED, ROWS, COLUMNS)
    parameter += start
    gradient += start
    exp_avg += start
    exp_avg_sq += start
    master += start
    if ALIGNED:
        parameter = tl.multiple_of(parameter, 16)
        gradient = tl.multiple_of(gradient, 16)
        exp_avg = tl.multiple_of(exp_avg, 16)
        exp_avg_sq = tl.multiple_of(exp_avg_sq, 16)
        master = tl.multiple_of(master, 16)
    if is_skipped != 0.0:
        w = tl.load(parameter + at, mask=mask).to(tl.float32)
    else:
        w = _update(
            parameter, gradient, exp_avg, exp_avg_sq, master, at, at, at, mask,
            inverse, l2, keep, one_minus_beta1, beta2, one_minus_beta2, step_size, inverse_root, eps, MASTER_KIND,
        )  # fmt: skip
    return tl.where(mask, w, 0.0)


@triton.jit
def _store_copies(
    w, scale, rows, tensors, tensor, height, width, first_row, first_column,
    E4M3: tl.constexpr, HARDWARE_CAST: tl.constexpr, HAS_TRANSPOSED: tl.constexpr, IN_LINE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Cast a tile of weights, and store its bytes both ways.

    IN_LINE: whether parameters begin and end at multiples of 16 in the transpose, so that stores can be wide.
    """
    code = fp8_code(scaled_values(w, scale), E4M3, HARDWARE_CAST)
    row = tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    data = tl.load(rows + tensors * DATA + tensor).to(tl.pointer_type(tl.uint8))
    across = (width.to(tl.int32) + 15) // 16 * 16
    data = tl.multiple_of(data + first_row * across + first_column, 16)
    mask = (row < height - first_row)[:, None] & (column < across - first_column)[None, :]
    tl.store(data + row[:, None] * across + column[None, :], code, mask=mask)
    if HAS_TRANSPOSED:
        transposed = tl.load(rows + tensors * TRANSPOSED + tensor).to(tl.pointer_type(tl.uint8))
        down = (tl.load(rows + tensors * WHOLE_HEIGHT + tensor).to(tl.int32) + 15) // 16 * 16
        filled = tl.load(rows + tensors * FILLED + tensor).to(tl.int32)
        transposed += first_column * down + first_row
        if IN_LINE:
            filled = filled // 16 * 16
            transposed = tl.multiple_of(transposed, 16)
        mask = (column < width - first_column)[:, None] & (row < filled - first_row)[None, :]
        tl.store(transposed + column[:, None] * down + row[None, :], tl.trans(code), mask=mask)


@triton.jit(
    do_not_specialize=["tensors", "tiles", "is_counting"],
    do_not_specialize_on_alignment=["divisor", "skip"],
)
def _adam_copies_kernel(
    rows,  # (rows, tensors) int64: the table
    tensors,
    tile_tensor,  # (tiles,) int32
    tiles,
    hyper,  # as of _adam_kernel, and so are the next six
    steps_before,
    steps,
    divisor,
    skip,
    counters,
    is_counting,
    PARAMETER_DTYPE: tl.constexpr,
    GRADIENT_DTYPE: tl.constexpr,
    MOMENT_DTYPE: tl.constexpr,
    MASTER_KIND: tl.constexpr,
    IS_GATED: tl.constexpr,
    E4M3: tl.constexpr,
    HARDWARE_CAST: tl.constexpr,
    HAS_TRANSPOSED: tl.constexpr,
    IN_LINE: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    LANES: tl.constexpr,
):
    """One scale a matrix: step a tile, raise its slot's amax, and cast where the slot has a scale."""
    pid = tl.program_id(0).to(tl.int64)
    is_skipped, inverse = _gate(divisor, skip, IS_GATED)
    _keep_counts(rows, tensors, pid, steps_before, steps, is_skipped, counters, is_counting, LANES)
    if pid < tiles:
        tensor = tl.load(tile_tensor + pid)
        if tl.load(rows + tensors * GRADIENT + tensor) != 0:
            height = tl.load(rows + tensors * HEIGHT + tensor)
            width = tl.load(rows + tensors * WIDTH + tensor)
            slot = tl.load(rows + tensors * SLOT + tensor).to(tl.pointer_type(tl.float32))
            tile = (pid - tl.load(rows + tensors * FIRST_TILE + tensor)).to(tl.int32)
            across = ((width - 1) // COLUMNS + 1).to(tl.int32)
            first_row = (tile // across).to(tl.int64) * ROWS
            first_column = (tile % across).to(tl.int64) * COLUMNS
            scale = tl.load(slot)
            w = _step_tile(
                rows, tensors, tensor, hyper, steps_before, inverse, is_skipped, height, width, first_row,
                first_column, PARAMETER_DTYPE, GRADIENT_DTYPE, MOMENT_DTYPE, MASTER_KIND, ALIGNED, ROWS, COLUMNS,
            )  # fmt: skip
            raise_amax_bits(slot, 0, magnitude_bits(w))
            if scale != 0.0:
                _store_copies(
                    w, scale, rows, tensors, tensor, height, width, first_row, first_column,
                    E4M3, HARDWARE_CAST, HAS_TRANSPOSED, IN_LINE, ROWS, COLUMNS,
                )  # fmt: skip
                if tile == 0:
                    scale_inv = tl.load(rows + tensors * SCALE_INV + tensor).to(tl.pointer_type(tl.float32))
                    tl.store(scale_inv, tl.div_rn(tl.full([], 1.0, tl.float32), scale))


@triton.jit(do_not_specialize=["tensors", "tiles"])
def _cast_copies_kernel(
    rows,
    tensors,
    tile_tensor,
    tiles,
    PARAMETER_DTYPE: tl.constexpr,
    E4M3: tl.constexpr,
    HARDWARE_CAST: tl.constexpr,
    HAS_TRANSPOSED: tl.constexpr,
    MARGIN: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    IN_LINE: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Cast the matrices whose slots have no scale yet, by their amaxes; persistent programs, that end where none is."""
    missing = tl.zeros([LANES], tl.int32)
    for start in range(0, tensors, LANES):
        tensor = start + tl.arange(0, LANES)
        there = tensor < tensors
        there = there & (tl.load(rows + tensors * GRADIENT + tensor, mask=there, other=0) != 0)
        slot = tl.load(rows + tensors * SLOT + tensor, mask=there, other=0).to(tl.pointer_type(tl.float32))
        scale = tl.load(slot, mask=there, other=1.0)
        missing = tl.maximum(missing, (scale == 0.0).to(tl.int32))
    # From a first tile that is computed, Triton 3.9 would take nothing for a multiple of 16 and store single bytes.
    stop = tl.where(tl.max(missing) != 0, tiles, 0).to(tl.int32)
    for pid in range(tl.program_id(0), stop, tl.num_programs(0)):  # widened later
        tensor = tl.load(tile_tensor + pid)
        slot = tl.load(rows + tensors * SLOT + tensor).to(tl.pointer_type(tl.float32))
        has_gradient = tl.load(rows + tensors * GRADIENT + tensor) != 0
        if has_gradient & (tl.load(slot) == 0.0):
            LARGEST: tl.constexpr = 448.0 if E4M3 else 57344.0
            scale = scale_from_amax(tl.load(slot + 1), LARGEST, MARGIN, POWER_OF_TWO)
            height = tl.load(rows + tensors * HEIGHT + tensor)
            width = tl.load(rows + tensors * WIDTH + tensor)
            tile = (pid - tl.load(rows + tensors * FIRST_TILE + tensor)).to(tl.int32)
            across = ((width - 1) // COLUMNS + 1).to(tl.int32)
            first_row = (tile // across).to(tl.int64) * ROWS
            first_column = (tile % across).to(tl.int64) * COLUMNS
            w = _load_tile(
                rows, tensors, tensor, height, width, first_row, first_column, PARAMETER_DTYPE, ALIGNED, ROWS, COLUMNS
            )
            _store_copies(
                w, scale, rows, tensors, tensor, height, width, first_row, first_column,
                E4M3, HARDWARE_CAST, HAS_TRANSPOSED, IN_LINE, ROWS, COLUMNS,
            )  # fmt: skip
            if tile == 0:
                scale_inv = tl.load(rows + tensors * SCALE_INV + tensor).to(tl.pointer_type(tl.float32))
                tl.store(scale_inv, tl.div_rn(tl.full([], 1.0, tl.float32), scale))


@triton.jit
def _load_tile(
    rows, tensors, tensor, height, width, first_row, first_column,
    PARAMETER_DTYPE: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The parameter's values in a tile, fp32, 0 beyond the matrix."""
    parameter = tl.load(rows + tensors * PARAMETER + tensor).to(tl.pointer_type(PARAMETER_DTYPE))
    start, at, mask = _places(height, width, first_row, first_column, ALIGNED, ROWS, COLUMNS)
    parameter += start
    if ALIGNED:
        parameter = tl.multiple_of(parameter, 16)
    return tl.load(parameter + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit(
    do_not_specialize=["tensors", "tiles", "is_counting"],
    do_not_specialize_on_alignment=["divisor", "skip"],
)
def _adam_block_copies_kernel(
    rows,  # all as of _adam_copies_kernel
    tensors,
    tile_tensor,
    tiles,
    hyper,
    steps_before,
    steps,
    divisor,
    skip,
    counters,
    is_counting,
    PARAMETER_DTYPE: tl.constexpr,
    GRADIENT_DTYPE: tl.constexpr,
    MOMENT_DTYPE: tl.constexpr,
    MASTER_KIND: tl.constexpr,
    IS_GATED: tl.constexpr,
    E4M3: tl.constexpr,
    HARDWARE_CAST: tl.constexpr,
    HAS_TRANSPOSED: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    LANES: tl.constexpr,
):
    """One scale a tile: step its strips, find its amax, and cast the strips, which are still near."""
    pid = tl.program_id(0).to(tl.int64)
    is_skipped, inverse = _gate(divisor, skip, IS_GATED)
    _keep_counts(rows, tensors, pid, steps_before, steps, is_skipped, counters, is_counting, LANES)
    if pid < tiles:
        tensor = tl.load(tile_tensor + pid)
        if tl.load(rows + tensors * GRADIENT + tensor) != 0:
            height = tl.load(rows + tensors * HEIGHT + tensor)
            width = tl.load(rows + tensors * WIDTH + tensor)
            tile = pid - tl.load(rows + tensors * FIRST_TILE + tensor)
            across = (width - 1) // TILE + 1
            tile_row = tile // across
            tile_column = tile % across
            end = tl.minimum((tile_row + 1) * TILE, height)
            bits = tl.zeros([ROWS, TILE], tl.int32)
            for first_row in range(tile_row * TILE, end, ROWS):
                w = _step_tile(
                    rows, tensors, tensor, hyper, steps_before, inverse, is_skipped, height, width, first_row,
                    tile_column * TILE, PARAMETER_DTYPE, GRADIENT_DTYPE, MOMENT_DTYPE, MASTER_KIND, ALIGNED, ROWS, TILE,
                )  # fmt: skip
                bits = tl.maximum(bits, magnitude_bits(w))
            amax = tl.max(bits).to(tl.float32, bitcast=True)
            LARGEST: tl.constexpr = 448.0 if E4M3 else 57344.0
            scale = scale_from_amax(amax, LARGEST, 0, POWER_OF_TWO)
            scale_inv = tl.div_rn(tl.full([], 1.0, tl.float32), scale)
            place = tl.load(rows + tensors * SCALE_INV + tensor).to(tl.pointer_type(tl.float32))
            tl.store(place + tile_row * ((across + 3) // 4 * 4) + tile_column, scale_inv)
            if HAS_TRANSPOSED:
                down = (tl.load(rows + tensors * WHOLE_HEIGHT + tensor) - 1) // TILE + 1
                place = tl.load(rows + tensors * TRANSPOSED_SCALE_INV + tensor).to(tl.pointer_type(tl.float32))
                tl.store(place + tile_column * ((down + 3) // 4 * 4) + tile_row, scale_inv)
            # What other threads of this program stored is read below.
            tl.debug_barrier()
            for first_row in range(tile_row * TILE, end, ROWS):
                w = _load_tile(
                    rows,
                    tensors,
                    tensor,
                    height,
                    width,
                    first_row,
                    tile_column * TILE,
                    PARAMETER_DTYPE,
                    ALIGNED,
                    ROWS,
                    TILE,
                )
                _store_copies(
                    w, scale, rows, tensors, tensor, height, width, first_row, tile_column * TILE,
                    E4M3, HARDWARE_CAST, HAS_TRANSPOSED, True, ROWS, TILE,
                )  # fmt: skip
