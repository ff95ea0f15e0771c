"""Two matrices of as many columns cast to FP8 in one launch: an input and a weight, as a product forward takes them.

What is computed is that of quantize.py, twice. One launch instead of two is what small layers gain by: the host needs
longer to launch a cast than the device to make it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusestep import dispatch
from fusestep.language import tl, triton
from fusestep.ops.fp8_cast import has_fp8_cast, has_fp8_type
from fusestep.ops.launch import PreparedLaunch
from fusestep.ops.layouts import keep, layout
from fusestep.ops.quantize_kernel import (
    AMAX_STAGES,
    MOST_MAXIMA,
    SEARCHED_ALWAYS,
    SEARCHED_BY_EACH,
    amax_launch,
    amax_programs,
    cast_scale,
    cast_tiles,
    known_scale,
    largest_bits,
    quantize_launch,
)
from fusestep.ops.quantize_plan import row_stride
from fusestep.ops.quantized import Quantized, padded


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
    """The pass that finds the amaxes, as in quantize_kernel.py: `a_programs` for a, the others for b."""
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


class PairPlan:
    """Casts two matrices of the layouts that it was made for.

    Args:
        device: of the tensors.
        a, b: their (rows, columns), with as many columns, and elements from row to row.
        indices: of their slots.
        dtype: FP8.
        columnwise: whose transposes are wanted.
        has_slots: whether scales are those of slots; else each is the tensor's own.
        record, margin, power_of_two: as of quantize.
        right: hand out b and both transposes as right operands of products: (columns, rows) of the same memory.
    """

    __slots__ = ("_a", "_amax", "_as_bytes", "_b", "_cast", "_maxima", "_scale_inv", "_shapes")

    def __init__(
        self,
        device: torch.device,
        a: tuple[tuple[int, int], int],
        b: tuple[tuple[int, int], int],
        indices: tuple[int, int],
        dtype: torch.dtype,
        columnwise: tuple[bool, bool],
        has_slots: bool,
        record: bool,
        margin: int,
        power_of_two: bool,
        right: bool,
    ) -> None:
        (a_shape, a_stride), (b_shape, b_stride) = a, b
        self._shapes = a_shape, b_shape
        a_inside, b_inside = ((padded(rows), padded(columns)) for rows, columns in self._shapes)

        def kept(rows: int, columns: int, is_right: bool) -> Tensor:
            return layout((rows, columns), dtype, device, transposed=is_right)

        self._a = kept(*a_inside, False), kept(*a_inside[::-1], right) if columnwise[0] else None
        self._b = kept(*b_inside, right), kept(*b_inside[::-1], right) if columnwise[1] else None
        self._scale_inv = layout((), torch.float32, device)
        self._as_bytes = not has_fp8_type(device)
        columns = a_shape[1]
        numbers = a_shape[0], b_shape[0], columns, a_stride, b_stride, *indices
        finder = amax_launch(columns)
        self._amax, self._maxima, maxima = None, None, (0, 0)
        if max(a_shape[0], b_shape[0]) * columns > (SEARCHED_BY_EACH if has_slots else SEARCHED_ALWAYS):
            maxima = (
                amax_programs(device, *a_shape, finder),
                amax_programs(device, *b_shape, finder),
            )
            self._maxima = layout((sum(maxima),), torch.int32, device)
            self._amax = PreparedLaunch(
                _amax_pair_kernel,
                (sum(maxima),),
                device,
                (*numbers, maxima[0]),
                ROWS=finder.rows,
                COLUMNS=finder.columns,
                STAGES=AMAX_STAGES,
                num_warps=finder.warps,
            )
        choice = quantize_launch(any(columnwise), False)
        a_programs, b_programs = (
            -(-padded(columns) // choice.columns) * -(-padded(rows) // (choice.rows * choice.tiles))
            for rows in (a_shape[0], b_shape[0])
        )
        self._cast = PreparedLaunch(
            _quantize_pair_kernel,
            (a_programs + b_programs,),
            device,
            (*numbers, a_programs, *maxima),
            E4M3=dtype is torch.float8_e4m3fn,
            HARDWARE_CAST=has_fp8_cast(device),
            RECORD=record,
            MARGIN=margin,
            POWER_OF_TWO=power_of_two,
            ROWS=choice.rows,
            COLUMNS=choice.columns,
            TILES=choice.tiles,
            MOST_MAXIMA=MOST_MAXIMA,
            SEARCH_ROWS=finder.rows,
            SEARCH_COLUMNS=finder.columns,
            num_warps=choice.warps,
        )

    def __call__(
        self, a: Tensor, b: Tensor, slots: Tensor | None, counts: Tensor | None
    ) -> tuple[Quantized, Quantized]:
        """Cast a and b; not with right operands."""
        a_data, a_transposed, a_scale_inv, b_data, b_transposed, b_scale_inv = self.cast(a, b, slots, counts)
        a_shape, b_shape = self._shapes
        return (
            Quantized(a_shape, a_data, a_transposed, a_scale_inv, a_scale_inv),
            Quantized(b_shape, b_data, b_transposed, b_scale_inv, b_scale_inv),
        )

    def cast(
        self, a: Tensor, b: Tensor, slots: Tensor | None, counts: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor | None, Tensor]:
        """Data, transpose or None, and inverse scale of a and of b."""
        empty = torch.empty_like
        (a_data, a_transposed), (b_data, b_transposed) = self._a, self._b
        a_data, b_data = empty(a_data), empty(b_data)
        if a_transposed is not None:
            a_transposed = empty(a_transposed)
        if b_transposed is not None:
            b_transposed = empty(b_transposed)
        a_scale_inv, b_scale_inv = empty(self._scale_inv), empty(self._scale_inv)
        maxima = None
        if self._amax is not None:
            assert self._maxima is not None
            maxima = empty(self._maxima)
            self._amax(a, b, slots, maxima)
        written: tuple[Tensor | None, ...] = (a_data, a_transposed, b_data, b_transposed)
        if self._as_bytes:
            written = tuple(None if made is None else made.view(torch.uint8) for made in written)
        self._cast(a, b, *written, a_scale_inv, b_scale_inv, slots, maxima, counts)
        return a_data, a_transposed, a_scale_inv, b_data, b_transposed, b_scale_inv


#: By layouts and options; see `keep`.
_plans: dict[tuple[Any, ...], PairPlan] = {}


def plan_pair(
    a: Tensor,
    b: Tensor,
    indices: tuple[int, int],
    dtype: torch.dtype,
    columnwise: tuple[bool, bool],
    slots: Tensor | None,
    record: bool,
    margin: int,
    power_of_two: bool,
    counts: Tensor | None,
    *,
    right: bool = False,
) -> PairPlan | None:
    """The plan of casting two matrices that `check_quantize` has passed; None where no kernel takes both."""
    a_stride, b_stride = row_stride(a), row_stride(b)
    if a_stride is None or b_stride is None or a.shape[1] != b.shape[1] or not a.numel() or not b.numel():
        return None
    if not dispatch.uses_triton("quantize", a.device):
        return None
    a_shape, b_shape = (a.shape[0], a.shape[1]), (b.shape[0], b.shape[1])
    made_for = (
        *(a.device, (a_shape, a_stride), (b_shape, b_stride), indices, dtype, columnwise),
        *(slots is not None, record, margin, power_of_two, right),
    )
    key = (made_for, a.dtype, b.dtype, counts is None)
    plan: PairPlan | None = _plans.get(key)
    if plan is None:
        plan = keep(_plans, key, PairPlan(*made_for))
    return plan
