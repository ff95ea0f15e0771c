"""Adam's step of matrices whose FP8 copies are written in the same pass. Formulas of the step: see adam.py.

A program steps one tile of a matrix, casts the new weights and stores them twice, as they lie and transposed. What is
cast is the weight as it is stored, so that a copy holds the bytes that a cast of the parameter would make:

- one scale a matrix: of the matrix's slot (see roll_scales.py), whose amax the pass raises. A slot that has no scale
  yet (current scaling: at every step) has its matrix cast by a second launch, when the amax is that of the whole; where
  all slots have one, that launch ends at once.
- one scale a tile of 128 × 128: from the tile's own amax. The program walks its tile in strips, and casts them after.

A matrix may be several parameters put together by rows, which one launch steps: each writes its rows of the data and
its columns of the transpose, and all raise the amax of the one slot. Where tiles have scales, each lies in one
parameter.

A step that is skipped changes no weight, and writes the copies of what there is: they may have been stale.
Copies are padded with zeros to multiples of 16, which are written when their memory is made, never here.
The kernels stand in adam_copies_kernel.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from fusestep import hardware
from fusestep.language import tl
from fusestep.ops.adam_copies_kernel import _adam_block_copies_kernel, _adam_copies_kernel, _cast_copies_kernel
from fusestep.ops.adam_kernel import MASTER_WORDS, MOMENT_DTYPES, AdamSignature, Master
from fusestep.ops.dtypes import KERNEL_DTYPES, SHORT_NAMES
from fusestep.ops.fp8_cast import has_fp8_cast
from fusestep.ops.launch import launch
from fusestep.ops.quantized import PAD, Quantized, padded
from fusestep.ops.registry import Compilation
from fusestep.ops.tensor_table import TABLE_SIGNATURE, TensorTable, upload

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
        in_line: parameters that are parts of a matrix begin at multiples of 16 rows.
    """

    by_tile: bool
    dtype: torch.dtype
    transposed: bool
    margin: int
    power_of_two: bool
    aligned: bool
    in_line: bool = True


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


def tile_shape(signature: CopySignature) -> tuple[int, int]:
    """Rows and columns of the tile that a program steps."""
    return (BLOCK_TILE, BLOCK_TILE) if signature.by_tile else (LAUNCH.rows, LAUNCH.columns)


def unsupported(parameters: Sequence[Sequence[Tensor]], by_tile: bool) -> str | None:
    """Why the kernels cannot write the copies of a matrix, or None.

    Args:
        parameters: of each parameter that the matrix is made of the parameter, its gradient and its state.
        by_tile: see CopySignature.
    """
    weights = [tensors[0] for tensors in parameters]
    if any(weight.dim() != 2 or not weight.numel() for weight in weights):
        return "what is no matrix"
    if not all(tensor.is_contiguous() for tensors in parameters for tensor in tensors):
        return "a matrix whose rows do not follow one another in memory"
    if max(sum(weight.shape[0] for weight in weights), weights[0].shape[1]) >= LONGEST:
        return f"a matrix longer than {LONGEST}"
    if by_tile and any(weight.shape[0] % BLOCK_TILE for weight in weights[:-1]):
        return "a tile that two parameters share"
    return None


def tiles_of(signature: CopySignature, height: int, width: int) -> int:
    """How many tiles a matrix has."""
    rows, columns = tile_shape(signature)
    return -(-height // rows) * -(-width // columns)


def is_aligned(parameters: Sequence[Sequence[Tensor]]) -> bool:
    """Whether each row of the parameters, their gradients and their state lies at 16 bytes; see `unsupported`."""
    return parameters[0][0].shape[1] % 16 == 0 and all(
        tensor.data_ptr() % 16 == 0 for tensors in parameters for tensor in tensors
    )


def is_in_line(parameters: Sequence[Sequence[Tensor]]) -> bool:
    """Whether each parameter begins at a multiple of 16 rows of the matrix; see `unsupported`."""
    return not any(tensors[0].shape[0] % PAD for tensors in parameters[:-1])


def copy_rows(first_tile: int, quantized: Quantized, slot: int, first_row: int, height: int) -> tuple[int, ...]:
    """The rows of a parameter in the table, after Adam's.

    Args:
        first_tile: the number of its first tile.
        quantized: the copies of its matrix, whose memory beyond the matrix holds zeros.
        slot: the address of the matrix's slot; 0 for scales of tiles.
        first_row, height: the rows of the matrix that the parameter is.
    """
    assert quantized.data is not None
    whole_height, width = quantized.shape
    transposed, scales, transposed_scales = quantized.transposed, quantized.scale_inv, quantized.transposed_scale_inv
    tile_row = 0 if quantized.block is None else first_row // BLOCK_TILE
    return (
        first_tile,
        height,
        width,
        quantized.data.data_ptr() + first_row * padded(width),
        0 if transposed is None else transposed.data_ptr() + first_row,
        scales.data_ptr() if not tile_row else scales[tile_row].data_ptr(),
        transposed_scales.data_ptr() + tile_row * transposed_scales.element_size(),
        slot,
        whole_height,
        # Where the matrix ends, the place beyond it as well: stores are wider then.
        padded(whole_height) - first_row if first_row + height == whole_height else height,
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
        {"POWER_OF_TWO": copies.power_of_two, "TILE": BLOCK_TILE}
        if copies.by_tile
        else {"IN_LINE": copies.in_line, "COLUMNS": shape.columns}
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
        MASTER_KIND=int(signature.master),
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
            IN_LINE=copies.in_line,
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
        (torch.float32, torch.float32, Master.NONE),
        (torch.float32, torch.bfloat16, Master.NONE),  # weights that live in FP8: their masters, and gradients in bf16
        (torch.bfloat16, torch.bfloat16, Master.WHOLE),
        (torch.bfloat16, torch.float32, Master.WHOLE),
        (torch.bfloat16, torch.bfloat16, Master.REMAINDER),
        (torch.bfloat16, torch.float32, Master.REMAINDER),
    )
    casts = [(True, 90, gated) for gated in (False, True)] + [(False, 80, False)]
    for (parameter, gradient, master), (hardware_cast, capability, gated) in product(pairs, casts):
        if not hardware_cast and parameter != torch.float32:
            continue
        # Remainders differ from masters in one way only: the most code of them.
        if master == Master.REMAINDER and not gated:
            continue
        cast = {"E4M3": True, "HARDWARE_CAST": hardware_cast, "HAS_TRANSPOSED": True, "ALIGNED": True}
        dtypes = {
            "PARAMETER_DTYPE": KERNEL_DTYPES[parameter],
            "GRADIENT_DTYPE": KERNEL_DTYPES[gradient],
            "MOMENT_DTYPE": tl.float32,
            "MASTER_KIND": int(master),
            "IS_GATED": gated,
        }
        tile = {"ROWS": LAUNCH.rows, "COLUMNS": LAUNCH.columns, "LANES": LANES}
        label = f"{short[parameter]} parameters, {short[gradient]} gradients{MASTER_WORDS[master]}" + "".join(
            word for word, is_on in ((", gated", gated), (", integer cast", not hardware_cast)) if is_on
        )
        # Parameters that do not begin in line are rare: of their launches one each, the most code.
        for in_line in (True, False) if gradient == parameter == torch.float32 and gated else (True,):
            yield compilation(
                _adam_copies_kernel,
                f"copies: {label}{'' if in_line else ', parts out of line'}",
                {**table, **state},
                {**dtypes, **cast, "IN_LINE": in_line, **tile},
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
            for in_line in (True, False) if hardware_cast and parameter == torch.float32 else (True,):
                yield compilation(
                    _cast_copies_kernel,
                    f"copies, cast after: {label}{'' if in_line else ', parts out of line'}",
                    table,
                    {
                        "PARAMETER_DTYPE": KERNEL_DTYPES[parameter],
                        **cast,
                        "IN_LINE": in_line,
                        "MARGIN": 0,
                        "POWER_OF_TWO": False,
                        **tile,
                    },
                    LAUNCH.warps,
                    capability,
                )
