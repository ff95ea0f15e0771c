"""Two matrices of as many columns cast to FP8 in one launch: an input and a weight, as a product forward takes them.

What is computed is that of quantize.py, twice. One launch instead of two is what small layers gain by: the host needs
longer to launch a cast than the device to make it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fusestep import dispatch
from fusestep.ops.cast_options import CastOptions
from fusestep.ops.fp8_cast import has_fp8_type
from fusestep.ops.launch import PreparedLaunch
from fusestep.ops.layouts import keep, maker, row_stride
from fusestep.ops.quantize_launch import (
    AMAX_STAGES,
    SEARCHED_ALWAYS,
    SEARCHED_BY_EACH,
    amax_launch,
    amax_programs,
    cast_constants,
    quantize_launch,
    search_constants,
)
from fusestep.ops.quantize_pair_kernel import _amax_pair_kernel, _quantize_pair_kernel
from fusestep.ops.quantize_plan import as_bytes
from fusestep.ops.quantized import Quantized, padded
from fusestep.ops.settled_slots import may_rely


class PairPlan:
    """Casts two matrices of the layouts that it was made for.

    Args:
        device: of the tensors.
        a, b: their (rows, columns), with as many columns, and elements from row to row.
        options: how each is cast, with data; they differ in index and columnwise alone.
        has_slots: whether scales are those of slots; else each is the tensor's own.
        right: hand out b and both transposes as right operands of products: (columns, rows) of the same memory.
    """

    __slots__ = (
        *("_a", "_a_kept", "_amax", "_as_bytes", "_b", "_b_kept", "_cast", "_index", "_maxima", "_scale_inv"),
        *("_settled", "_shapes", "_slots"),
    )

    def __init__(
        self,
        device: torch.device,
        a: tuple[tuple[int, int], int],
        b: tuple[tuple[int, int], int],
        options: tuple[CastOptions, CastOptions],
        has_slots: bool,
        right: bool,
    ) -> None:
        (a_shape, a_stride), (b_shape, b_stride) = a, b
        self._shapes = a_shape, b_shape
        a_inside, b_inside = ((padded(rows), padded(columns)) for rows, columns in self._shapes)

        a_options, b_options = options

        def made(rows: int, columns: int, is_right: bool) -> Callable[[], Tensor]:
            return maker((rows, columns), a_options.dtype, device, transposed=is_right)

        self._index = device.index if device.type == "cuda" else None
        self._a, self._b = made(*a_inside, False), made(*b_inside, right)
        self._a_kept = made(*a_inside[::-1], right) if a_options.columnwise else None
        self._b_kept = made(*b_inside[::-1], right) if b_options.columnwise else None
        self._scale_inv = maker((), torch.float32, device)
        self._as_bytes = not has_fp8_type(device)
        self._slots = a_options.slot, b_options.slot
        columns = a_shape[1]
        numbers = a_shape[0], b_shape[0], columns, a_stride, b_stride, *self._slots
        finder = amax_launch(columns)
        self._amax, self._maxima, maxima = None, None, (0, 0)
        if max(a_shape[0], b_shape[0]) * columns > (SEARCHED_BY_EACH if has_slots else SEARCHED_ALWAYS):
            maxima = amax_programs(device, *a_shape, finder), amax_programs(device, *b_shape, finder)
            self._maxima = maker((sum(maxima),), torch.int32, device)
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
        choice = quantize_launch(a_options.columnwise or b_options.columnwise, False)
        a_programs, b_programs = (
            -(-padded(columns) // choice.columns) * -(-padded(rows) // (choice.rows * choice.tiles))
            for rows in (a_shape[0], b_shape[0])
        )
        # As of one cast: `settled` is the same kernel where no pass comes before.
        self._cast, self._settled = (
            PreparedLaunch(
                _quantize_pair_kernel,
                (a_programs + b_programs,),
                device,
                (*numbers, a_programs, *read),
                **cast_constants(a_options, device),
                ROWS=choice.rows,
                COLUMNS=choice.columns,
                TILES=choice.tiles,
                **search_constants(finder),
                num_warps=choice.warps,
            )
            for read in (maxima, (0, 0))
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
        index = self._index
        if index is not None and index != torch._C._cuda_getDevice():
            with torch.cuda.device(index):
                return self.cast(a, b, slots, counts)
        a_data, b_data = self._a(), self._b()
        a_transposed, a_transposed_at, b_transposed, b_transposed_at = None, 0, None, 0
        if self._a_kept is not None:
            a_transposed = self._a_kept()
            a_transposed_at = a_transposed.data_ptr()
        if self._b_kept is not None:
            b_transposed = self._b_kept()
            b_transposed_at = b_transposed.data_ptr()
        a_scale_inv, b_scale_inv = self._scale_inv(), self._scale_inv()
        a_at, b_at = a.data_ptr(), b.data_ptr()
        slots_at, counts_at = 0 if slots is None else slots.data_ptr(), 0 if counts is None else counts.data_ptr()
        # What is allocated here is aligned.
        is_odd = (a_at | b_at | slots_at | counts_at) & 15
        launch, maxima, maxima_at = self._cast, None, 0
        if self._amax is not None and self._maxima is not None:
            # Once it is launched whatever is known: a capture of the user's, which needs it, could not load it.
            if self._amax.was_launched and may_rely(slots, slots_at, self._slots):
                launch = self._settled
            else:
                maxima = self._maxima()
                maxima_at = maxima.data_ptr()
                if is_odd or not self._amax.at((a_at, b_at, slots_at, maxima_at)):
                    self._amax(a, b, slots, maxima)
        written_at = (a_data.data_ptr(), a_transposed_at, b_data.data_ptr(), b_transposed_at)
        scales_at = (a_scale_inv.data_ptr(), b_scale_inv.data_ptr())
        if is_odd or not launch.at((a_at, b_at, *written_at, *scales_at, slots_at, maxima_at, counts_at)):
            written: tuple[Tensor | None, ...] = (a_data, a_transposed, b_data, b_transposed)
            if self._as_bytes:
                written = tuple([as_bytes(one) for one in written])
            if maxima is None and self._maxima is not None:
                maxima = self._maxima()  # for the compiler, which goes by what is there
            launch(a, b, *written, a_scale_inv, b_scale_inv, slots, maxima, counts)
        return a_data, a_transposed, a_scale_inv, b_data, b_transposed, b_scale_inv


#: By layouts and options; see `keep`.
_plans: dict[tuple[Any, ...], PairPlan] = {}


def plan_pair(
    a: Tensor,
    b: Tensor,
    options: tuple[CastOptions, CastOptions],
    slots: Tensor | None,
    counts: Tensor | None,
    *,
    right: bool = False,
) -> PairPlan | None:
    """The plan of casting two matrices that `check_quantize` has passed; None where no kernel takes both.

    Args: options, right: as of `PairPlan`.
    """
    a_stride, b_stride = row_stride(a, a.shape[1]), row_stride(b, b.shape[1])
    if a_stride is None or b_stride is None or a.shape[1] != b.shape[1] or not a.numel() or not b.numel():
        return None
    if not dispatch.uses_triton("quantize", a.device):
        return None
    a_shape, b_shape = (a.shape[0], a.shape[1]), (b.shape[0], b.shape[1])
    made_for = (a.device, (a_shape, a_stride), (b_shape, b_stride), options, slots is not None, right)
    key = (made_for, a.dtype, b.dtype, counts is None)
    plan: PairPlan | None = _plans.get(key)
    if plan is None:
        plan = keep(_plans, key, PairPlan(*made_for))
    return plan
