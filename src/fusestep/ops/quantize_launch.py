"""Launches of the cast to FP8, of the pass that finds its amax, and of a transpose of bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from fusestep import hardware
from fusestep.ops.cast_options import CastOptions
from fusestep.ops.fp8_cast import has_fp8_cast, has_fp8_type
from fusestep.ops.launch import PreparedLaunch
from fusestep.ops.norm_backward import prepare_sums
from fusestep.ops.quantize_kernel import _quantize_kernel, _transpose_kernel
from fusestep.ops.quantize_scale_kernel import _amax_kernel
from fusestep.ops.quantized import PAD, padded


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

#: So many tiles below one another a program walks through rather than leave their column sums to another launch. With
#: that launch the casts of a step took 0.57 ms on one H200, with tickets (tickets.py) in its place 0.64.
SUMMED_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class QuantizeLaunches:
    """The launches of one cast: the pass that finds the amax, the cast, and where columns are summed their total.

    `settled`: the cast by the same kernel where no pass has to come before, since the slot is known to hold a scale
    (settled_slots.py): it reads none of the maxima. `as_bytes`: the cast wants its outputs as uint8, since Triton knows
    no FP8 on the device.
    """

    amax: PreparedLaunch | None  # None: the programs of the cast find it
    maxima: int  # that the pass leaves
    cast: PreparedLaunch
    settled: PreparedLaunch
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
    options: CastOptions,
    column_sums: bool,
) -> QuantizeLaunches:
    """The launches on (rows, columns) tiles: of x, or of a gated activation of one half of it.

    `activation` is the function that an activation is made of, "" for none; `h_stride` is None without an h. Without a
    slot the scale is always the tensor's own.
    """
    gradient = h_stride is not None
    halves = 2 if gated and gradient else 1
    numbers = (rows, columns, x_stride, h_stride or 0, options.slot)
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
    choice = quantize_launch(options.columnwise, column_sums)
    tiles_down = -(-padded(rows) // choice.rows)
    if column_sums and tiles_down <= SUMMED_AT_ONCE:
        choice = replace(choice, tiles=tiles_down)
    across = -(-(padded(columns * halves) - columns * (halves - 1)) // choice.columns)
    down = -(-tiles_down // choice.tiles)
    cast, settled = (
        PreparedLaunch(
            _quantize_kernel,
            (across * down,),
            device,
            (*numbers, read),
            **common,
            **cast_constants(options, device),
            IN_WORDS=halves == 1 or columns % 4 == 0,
            ROWS=choice.rows,
            COLUMNS=choice.columns,
            TILES=choice.tiles,
            **search_constants(finder),
            num_warps=choice.warps,
        )
        for read in (maxima, 0)
    )
    as_bytes = not has_fp8_type(device)
    if not column_sums or down == 1:
        return QuantizeLaunches(amax, maxima, cast, settled, as_bytes, None, None)
    width = columns * halves
    return QuantizeLaunches(amax, maxima, cast, settled, as_bytes, (down, width), prepare_sums(device, down, width))


def cast_constants(options: CastOptions, device: torch.device) -> dict[str, Any]:
    """What the kernels of a cast are compiled for, by its options."""
    return {
        "E4M3": options.dtype is torch.float8_e4m3fn,
        "HARDWARE_CAST": has_fp8_cast(device),
        "RECORD": options.record,
        "MARGIN": options.margin,
        "POWER_OF_TWO": options.power_of_two,
    }


def search_constants(finder: TileLaunch) -> dict[str, Any]:
    """What they are compiled for to find an amax, or the largest of what the pass before found."""
    return {"MOST_MAXIMA": MOST_MAXIMA, "SEARCH_ROWS": finder.rows, "SEARCH_COLUMNS": finder.columns}


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
