"""Adam's step of matrices whose FP8 copies are written in the same pass. Formulas of the step: see adam.py.

A program steps one tile of a matrix, casts the new weights and stores them twice, as they lie and transposed. What is
cast is the weight as it is stored, so that a copy holds the bytes that a cast of the parameter would make:

- one scale a matrix: of the matrix's slot (see roll_scales.py), whose amax the pass raises. A slot that has no scale
  yet (current scaling: at every step) has its matrix cast by a second launch, when the amax is that of the whole; where
  all slots have one, that launch ends at once.
- one scale a tile of 128 × 128: from the tile's own amax. The program walks its tile in strips, and casts them after.

A step that is skipped changes no weight, and writes the copies of what there is: they may have been stale.
Copies are padded with zeros to multiples of 16, which are written when their memory is made, never here.

The launches read a `TensorTable` with more rows (below), and `tile_tensor`, which says to which matrix a tile belongs.
Source of the transposed bytes being formed as bytes: triton#11111.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from fusestep import hardware
from fusestep.language import tl, triton
from fusestep.ops.adam_kernel import (
    ADAM_ROWS,
    EXP_AVG,
    EXP_AVG_SQ,
    MASTER,
    MOMENT_DTYPES,
    PARAMETER,
    AdamSignature,
    _coefficients,
    _gate,
    _keep_counts,
    _update,
)
from fusestep.ops.dtypes import KERNEL_DTYPES, SHORT_NAMES
from fusestep.ops.fp8_cast import (
    fp8_code,
    has_fp8_cast,
    magnitude_bits,
    raise_amax_bits,
    scale_from_amax,
    scaled_values,
)
from fusestep.ops.launch import launch
from fusestep.ops.quantized import Quantized
from fusestep.ops.registry import Compilation
from fusestep.ops.tensor_table import GRADIENT, TABLE_SIGNATURE, TensorTable, upload

#: Rows of the table after Adam's.
FIRST_TILE: tl.constexpr = tl.constexpr(ADAM_ROWS)
HEIGHT: tl.constexpr = tl.constexpr(ADAM_ROWS + 1)  # of the matrix
WIDTH: tl.constexpr = tl.constexpr(ADAM_ROWS + 2)
DATA: tl.constexpr = tl.constexpr(ADAM_ROWS + 3)  # addresses, as are the next
TRANSPOSED: tl.constexpr = tl.constexpr(ADAM_ROWS + 4)
SCALE_INV: tl.constexpr = tl.constexpr(ADAM_ROWS + 5)
TRANSPOSED_SCALE_INV: tl.constexpr = tl.constexpr(ADAM_ROWS + 6)
SLOT: tl.constexpr = tl.constexpr(ADAM_ROWS + 7)

#: Parameters whose steps one of the first programs counts, and slots that are looked at in one go.
LANES = 1024

#: A tile's offsets must stay below 2^31.
LONGEST = 1 << 23

#: Height and width of the tiles that share a scale.
BLOCK_TILE = 128


@dataclass(frozen=True)
class CopySignature:
    """What the copies of one launch have in common.

    Attributes:
        by_tile: one scale for each 128 × 128 elements, else one a matrix.
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        transposed, margin, power_of_two: as of ops.quantize.
        aligned: rows of all tensors lie at 16 bytes, see `is_aligned`.
    """

    by_tile: bool
    dtype: torch.dtype
    transposed: bool
    margin: int
    power_of_two: bool
    aligned: bool


@dataclass(frozen=True)
class TileLaunch:
    """Rows and columns that a program steps at once, its warps; and for the second launch its programs a processor."""

    rows: int = 32
    columns: int = 64
    warps: int = 8
    programs_per_multiprocessor: int = 4


#: One scale a matrix; and one a tile, whose strips are as wide as the tile.
LAUNCH = TileLaunch()
BLOCK_LAUNCH = TileLaunch(rows=8, columns=BLOCK_TILE, warps=8)


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
    HAS_MASTER: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Step a tile; returns its weights as they are now stored, in fp32, 0 beyond the matrix."""
    gradient = tl.load(rows + tensors * GRADIENT + tensor).to(tl.pointer_type(GRADIENT_DTYPE))
    parameter = tl.load(rows + tensors * PARAMETER + tensor).to(tl.pointer_type(PARAMETER_DTYPE))
    exp_avg = tl.load(rows + tensors * EXP_AVG + tensor).to(tl.pointer_type(MOMENT_DTYPE))
    exp_avg_sq = tl.load(rows + tensors * EXP_AVG_SQ + tensor).to(tl.pointer_type(MOMENT_DTYPE))
    master = tl.load(rows + tensors * MASTER + tensor).to(tl.pointer_type(tl.float32))
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
            inverse, l2, keep, one_minus_beta1, beta2, one_minus_beta2, step_size, inverse_root, eps, HAS_MASTER,
        )  # fmt: skip
    w = tl.where(mask, w, 0.0)
    return w.to(PARAMETER_DTYPE).to(tl.float32)


@triton.jit
def _store_copies(
    w, scale, rows, tensors, tensor, height, width, first_row, first_column,
    E4M3: tl.constexpr, HARDWARE_CAST: tl.constexpr, HAS_TRANSPOSED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Cast a tile of weights, and store its bytes both ways."""
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
        down = (height.to(tl.int32) + 15) // 16 * 16
        transposed = tl.multiple_of(transposed + first_column * down + first_row, 16)
        mask = (column < width - first_column)[:, None] & (row < down - first_row)[None, :]
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
    HAS_MASTER: tl.constexpr,
    IS_GATED: tl.constexpr,
    E4M3: tl.constexpr,
    HARDWARE_CAST: tl.constexpr,
    HAS_TRANSPOSED: tl.constexpr,
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
                first_column, PARAMETER_DTYPE, GRADIENT_DTYPE, MOMENT_DTYPE, HAS_MASTER, ALIGNED, ROWS, COLUMNS,
            )  # fmt: skip
            raise_amax_bits(slot, 0, magnitude_bits(w))
            if scale != 0.0:
                _store_copies(
                    w, scale, rows, tensors, tensor, height, width, first_row, first_column,
                    E4M3, HARDWARE_CAST, HAS_TRANSPOSED, ROWS, COLUMNS,
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
    first = tl.where(tl.max(missing) != 0, tl.program_id(0), tiles).to(tl.int32)  # widened later
    for pid in range(first, tiles, tl.num_programs(0)):
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
                E4M3, HARDWARE_CAST, HAS_TRANSPOSED, ROWS, COLUMNS,
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
    HAS_MASTER: tl.constexpr,
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
                    tile_column * TILE, PARAMETER_DTYPE, GRADIENT_DTYPE, MOMENT_DTYPE, HAS_MASTER, ALIGNED, ROWS, TILE,
                )  # fmt: skip
                bits = tl.maximum(bits, magnitude_bits(w))
            amax = tl.max(bits).to(tl.float32, bitcast=True)
            LARGEST: tl.constexpr = 448.0 if E4M3 else 57344.0
            scale = scale_from_amax(amax, LARGEST, 0, POWER_OF_TWO)
            scale_inv = tl.div_rn(tl.full([], 1.0, tl.float32), scale)
            place = tl.load(rows + tensors * SCALE_INV + tensor).to(tl.pointer_type(tl.float32))
            tl.store(place + tile_row * ((across + 3) // 4 * 4) + tile_column, scale_inv)
            if HAS_TRANSPOSED:
                down = (height - 1) // TILE + 1
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
                    E4M3, HARDWARE_CAST, HAS_TRANSPOSED, ROWS, TILE,
                )  # fmt: skip


def tile_shape(signature: CopySignature) -> tuple[int, int]:
    """Rows and columns of the tile that a program steps."""
    return (BLOCK_TILE, BLOCK_TILE) if signature.by_tile else (LAUNCH.rows, LAUNCH.columns)


def unsupported(tensors: Sequence[Tensor]) -> str | None:
    """Why the kernels cannot write the copies of a parameter (first of its gradient and state), or None."""
    parameter = tensors[0]
    if parameter.dim() != 2 or not parameter.numel():
        return "what is no matrix"
    if not all(tensor.is_contiguous() for tensor in tensors):
        return "a matrix whose rows do not follow one another in memory"
    if max(parameter.shape) >= LONGEST:
        return f"a matrix longer than {LONGEST}"
    return None


def tiles_of(signature: CopySignature, height: int, width: int) -> int:
    """How many tiles a matrix has."""
    rows, columns = tile_shape(signature)
    return -(-height // rows) * -(-width // columns)


def is_aligned(tensors: Sequence[Tensor]) -> bool:
    """Whether each row of the parameter, its gradient and its state lies at 16 bytes."""
    return tensors[0].shape[1] % 16 == 0 and all(tensor.data_ptr() % 16 == 0 for tensor in tensors)


def copy_rows(first_tile: int, quantized: Quantized, slot: int) -> tuple[int, ...]:
    """The rows of a matrix in the table, after Adam's.

    Args:
        first_tile: the number of its first tile.
        quantized: its copies, whose memory beyond the matrix holds zeros.
        slot: the address of its slot; 0 for scales of tiles.
    """
    assert quantized.data is not None
    transposed = quantized.transposed
    return (
        first_tile,
        *quantized.shape,
        quantized.data.data_ptr(),
        0 if transposed is None else transposed.data_ptr(),
        quantized.scale_inv.data_ptr(),
        quantized.transposed_scale_inv.data_ptr(),
        slot,
    )


def tile_tensors(signature: CopySignature, shapes: Sequence[tuple[int, int]], device: torch.device) -> Tensor:
    """(tiles,) int32: the matrix that each tile belongs to. No wait for the device."""
    counts = [tiles_of(signature, height, width) for height, width in shapes]
    return torch.repeat_interleave(
        torch.arange(len(counts), dtype=torch.int32, device=device),
        upload(counts, torch.int64, device),
        output_size=sum(counts),
    )


def launch_adam_copies(
    signature: AdamSignature,
    copies: CopySignature,
    table: TensorTable,
    tile_tensor: Tensor,
    hyper: Tensor,
    steps_before: Tensor,
    steps: Tensor,
    counters: Tensor,
    divisor: Tensor | None = None,
    skip: Tensor | None = None,
    is_counting: bool = False,
) -> None:
    """Update and copies: one launch, and with one scale a matrix a second; see `launch_adam`.

    Under current scaling the caller has zeroed the slots.
    """
    tiles = tile_tensor.shape[0]
    is_e4m3 = copies.dtype == torch.float8_e4m3fn
    hardware_cast = has_fp8_cast(table.device)
    arguments = (table.rows, table.count, tile_tensor, tiles)
    shape = BLOCK_LAUNCH if copies.by_tile else LAUNCH
    options = (
        {"POWER_OF_TWO": copies.power_of_two, "TILE": BLOCK_TILE} if copies.by_tile else {"COLUMNS": shape.columns}
    )
    launch(
        _adam_block_copies_kernel if copies.by_tile else _adam_copies_kernel,
        (max(tiles, -(-table.count // LANES)),),
        table.device,
        *arguments,
        hyper,
        steps_before,
        steps,
        steps if divisor is None else divisor,
        steps if skip is None else skip,
        counters,
        int(is_counting),
        PARAMETER_DTYPE=KERNEL_DTYPES[signature.parameter],
        GRADIENT_DTYPE=KERNEL_DTYPES[signature.gradient],
        MOMENT_DTYPE=MOMENT_DTYPES[signature.moment],
        HAS_MASTER=signature.has_master,
        IS_GATED=divisor is not None,
        E4M3=is_e4m3,
        HARDWARE_CAST=hardware_cast,
        HAS_TRANSPOSED=copies.transposed,
        ALIGNED=copies.aligned,
        ROWS=shape.rows,
        LANES=LANES,
        num_warps=shape.warps,
        **options,
    )
    if not copies.by_tile:
        programs = hardware.multiprocessors(table.device.index or 0) * LAUNCH.programs_per_multiprocessor
        launch(
            _cast_copies_kernel,
            (min(tiles, programs),),
            table.device,
            *arguments,
            PARAMETER_DTYPE=KERNEL_DTYPES[signature.parameter],
            E4M3=is_e4m3,
            HARDWARE_CAST=hardware_cast,
            HAS_TRANSPOSED=copies.transposed,
            MARGIN=copies.margin,
            POWER_OF_TWO=copies.power_of_two,
            ALIGNED=copies.aligned,
            ROWS=LAUNCH.rows,
            COLUMNS=LAUNCH.columns,
            LANES=LANES,
            num_warps=LAUNCH.warps,
        )


def compilations() -> Iterator[Compilation]:
    """The launches that training makes: fp32 moments, E4M3 both ways, gated or not."""
    short = SHORT_NAMES
    table = {
        "rows": TABLE_SIGNATURE["rows"],
        "tensors": TABLE_SIGNATURE["tensors"],
        "tile_tensor": "*i32",
        "tiles": "i32",
    }
    state = {
        "hyper": "*fp32",
        "steps_before": "*fp32",
        "steps": "*fp32",
        "divisor": "*fp32",
        "skip": "*fp32",
        "counters": "*i64",
        "is_counting": "i32",
    }

    def compilation(
        kernel: object, label: str, run_time: dict[str, str], constants: dict[str, object], warps: int, capability: int
    ) -> Compilation:
        signature = {**run_time, **dict.fromkeys(constants, "constexpr")}
        aligned = {n for n, kind in run_time.items() if kind.startswith("*")} - {"divisor", "skip"}
        return Compilation(
            kernel,
            label,
            signature,
            constants,
            warps,
            divisible_by_16=frozenset(aligned),
            minimum_capability=capability,
        )

    pairs = (
        (torch.float32, torch.float32, False),
        (torch.float32, torch.bfloat16, False),  # weights that live in FP8: their masters, and gradients in bf16
        (torch.bfloat16, torch.bfloat16, True),
        (torch.bfloat16, torch.float32, True),
    )
    casts = [(True, 90, gated) for gated in (False, True)] + [(False, 80, False)]
    for (parameter, gradient, has_master), (hardware_cast, capability, gated) in product(pairs, casts):
        if not hardware_cast and parameter != torch.float32:
            continue
        cast = {"E4M3": True, "HARDWARE_CAST": hardware_cast, "HAS_TRANSPOSED": True, "ALIGNED": True}
        dtypes = {
            "PARAMETER_DTYPE": KERNEL_DTYPES[parameter],
            "GRADIENT_DTYPE": KERNEL_DTYPES[gradient],
            "MOMENT_DTYPE": tl.float32,
            "HAS_MASTER": has_master,
            "IS_GATED": gated,
        }
        label = f"{short[parameter]} parameters, {short[gradient]} gradients" + "".join(
            word
            for word, is_on in ((", masters", has_master), (", gated", gated), (", integer cast", not hardware_cast))
            if is_on
        )
        yield compilation(
            _adam_copies_kernel,
            f"copies: {label}",
            {**table, **state},
            {**dtypes, **cast, "ROWS": LAUNCH.rows, "COLUMNS": LAUNCH.columns, "LANES": LANES},
            LAUNCH.warps,
            capability,
        )
        yield compilation(
            _adam_block_copies_kernel,
            f"copies by tile: {label}",
            {**table, **state},
            {**dtypes, **cast, "POWER_OF_TWO": True, "ROWS": BLOCK_LAUNCH.rows, "TILE": BLOCK_TILE, "LANES": LANES},
            BLOCK_LAUNCH.warps,
            capability,
        )
        if gradient == parameter and not gated:
            yield compilation(
                _cast_copies_kernel,
                f"copies, cast after: {label}",
                table,
                {
                    "PARAMETER_DTYPE": KERNEL_DTYPES[parameter],
                    **cast,
                    "MARGIN": 0,
                    "POWER_OF_TWO": False,
                    "ROWS": LAUNCH.rows,
                    "COLUMNS": LAUNCH.columns,
                    "LANES": LANES,
                },
                LAUNCH.warps,
                capability,
            )
