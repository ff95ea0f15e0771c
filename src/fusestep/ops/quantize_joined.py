"""Cast three matrices to FP8 as one whose columns are theirs, with one scale, without putting them together first.

Their columns stand in stretches, each of which takes `widths` columns of the first, the second and the third:

    a[:, :wa]  b[:, :wb]  c[:, :wc]  a[:, wa : 2 wa]  b[:, wb : 2 wb]  …

One stretch is what torch.cat makes. Such are the gradients of queries, keys and values, of which attention leaves each
by itself, where one product made all three. What the cast computes is what quantize.py says, of the whole matrix.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusestep import dispatch
from fusestep.ops.cast_options import CastOptions, check_options
from fusestep.ops.dtypes import CASTABLE
from fusestep.ops.fp8_cast import has_fp8_type
from fusestep.ops.launch import PreparedLaunch
from fusestep.ops.layouts import keep, maker, row_stride
from fusestep.ops.norm_backward import prepare_sums
from fusestep.ops.quantize_joined_kernel import _amax_joined_kernel, _quantize_joined_kernel
from fusestep.ops.quantize_launch import (
    AMAX_STAGES,
    SUMMED_AT_ONCE,
    amax_launch,
    amax_programs,
    cast_constants,
    quantize_launch,
    search_constants,
)
from fusestep.ops.quantize_plan import as_bytes
from fusestep.ops.quantized import Quantized, padded
from fusestep.ops.settled_slots import may_rely

Three = tuple[Tensor, Tensor, Tensor]
Widths = tuple[int, int, int]


class Joined(NamedTuple):
    """Three matrices that stand for one.

    Attributes:
        matrices: (…, columns), the last dimensions of which may be several, as heads and their size are.
        widths: columns of each in a stretch.
        stretches: how many there are.
    """

    matrices: Three
    widths: Widths
    stretches: int

    def together(self) -> Tensor:
        """The one matrix, (rows, columns), as a tensor of its own."""
        if self.stretches == 1:
            pairs = zip(self.matrices, self.widths, strict=True)
            return torch.cat([matrix.reshape(-1, width) for matrix, width in pairs], 1)
        sizes = [(-1, self.stretches, width) for width in self.widths]
        stretched = [matrix.reshape(size) for matrix, size in zip(self.matrices, sizes, strict=True)]
        return torch.cat(stretched, 2).flatten(1)


class JoinedPlan:
    """Casts three matrices of the layouts that it was made for.

    Args:
        device: of the matrices.
        rows: of each.
        widths, stretches: as of `Joined`.
        strides: elements from row to row of each.
        options: how they are cast.
        sums_dtype: of the column sums; None: they are not wanted.
    """

    __slots__ = (
        *("_amax", "_as_bytes", "_cast", "_data", "_index", "_maxima", "_partials", "_scale_inv", "_settled", "_slots"),
        *("_sums", "_total", "_transposed", "shape"),
    )

    def __init__(
        self,
        device: torch.device,
        rows: int,
        widths: Widths,
        stretches: int,
        strides: Widths,
        options: CastOptions,
        sums_dtype: torch.dtype | None,
    ) -> None:
        columns = sum(widths) * stretches
        self.shape = rows, columns
        self._index = device.index if device.type == "cuda" else None
        inside = padded(rows), columns
        self._data = maker(inside, options.dtype, device) if options.rowwise else None
        self._transposed = maker(inside[::-1], options.dtype, device) if options.columnwise else None
        self._scale_inv = maker((), torch.float32, device)
        self._sums = None if sums_dtype is None else maker((columns,), sums_dtype, device)
        self._as_bytes = not has_fp8_type(device)

        finder = amax_launch(min(widths) * stretches)
        maxima = amax_programs(device, rows, columns, finder)
        self._maxima = maker((maxima,), torch.int32, device)
        whole_widths = tuple([width * stretches for width in widths])
        search = {"ROWS": finder.rows, "COLUMNS": finder.columns, "STAGES": AMAX_STAGES, "num_warps": finder.warps}
        numbers: tuple[int, ...] = (rows, *whole_widths, *strides, options.slot)
        self._amax = PreparedLaunch(_amax_joined_kernel, (maxima,), device, numbers, **search)

        choice = quantize_launch(True, True)
        down = -(-padded(rows) // choice.rows)
        tiles = down if sums_dtype is not None and down <= SUMMED_AT_ONCE else choice.tiles
        down = -(-down // tiles)
        # By what the pass found, and without it by what the slot is known to hold.
        self._cast, self._settled = (
            PreparedLaunch(
                _quantize_joined_kernel,
                (columns // choice.columns * down,),
                device,
                (rows, columns, *widths, *strides, options.slot, read),
                **cast_constants(options, device),
                ROWS=choice.rows,
                COLUMNS=choice.columns,
                TILES=tiles,
                **search_constants(finder),
                num_warps=choice.warps,
            )
            for read in (maxima, 0)
        )
        self._slots = (options.slot,)
        has_parts = sums_dtype is not None and down > 1
        self._partials = maker((down, columns), torch.float32, device) if has_parts else None
        self._total = prepare_sums(device, down, columns) if has_parts else None

    def __call__(self, matrices: Three, slots: Tensor | None, counts: Tensor | None) -> tuple[Quantized, Tensor | None]:
        """Cast them; return the whole and its column sums."""
        index = self._index
        if index is not None and index != torch._C._cuda_getDevice():
            with torch.cuda.device(index):
                return self(matrices, slots, counts)
        data, data_at, transposed, transposed_at = None, 0, None, 0
        if self._data is not None:
            data = self._data()
            data_at = data.data_ptr()
        if self._transposed is not None:
            transposed = self._transposed()
            transposed_at = transposed.data_ptr()
        scale_inv, maxima = self._scale_inv(), self._maxima()
        sums = None if self._sums is None else self._sums()
        summed = sums if self._partials is None else self._partials()
        a, b, c = matrices
        a_at, b_at, c_at = a.data_ptr(), b.data_ptr(), c.data_ptr()
        slots_at, counts_at = 0 if slots is None else slots.data_ptr(), 0 if counts is None else counts.data_ptr()
        maxima_at, summed_at = maxima.data_ptr(), 0 if summed is None else summed.data_ptr()
        # What is allocated here is aligned.
        is_odd = (a_at | b_at | c_at | slots_at | counts_at) & 15
        launch = self._cast
        if self._amax.was_launched and may_rely(slots, slots_at, self._slots):  # as of the cast of one
            launch = self._settled
        elif is_odd or not self._amax.at((a_at, b_at, c_at, slots_at, maxima_at)):
            self._amax(a, b, c, slots, maxima)
        given_at = (scale_inv.data_ptr(), slots_at, maxima_at, counts_at, summed_at)
        if is_odd or not launch.at((a_at, b_at, c_at, data_at, transposed_at, *given_at)):
            written = (data, transposed)
            if self._as_bytes:
                written = as_bytes(data), as_bytes(transposed)
            launch(a, b, c, *written, scale_inv, slots, maxima, counts, summed)
        total = self._total
        if total is not None and sums is not None and not total.at((summed_at, sums.data_ptr(), 0)):
            total(summed, sums, None)
        return Quantized(self.shape, data, transposed, scale_inv, scale_inv), sums


#: By layouts and options; see `keep`.
_plans: dict[tuple[Any, ...], JoinedPlan] = {}


def plan_joined(
    joined: Joined,
    slots: Tensor | None,
    options: CastOptions,
    counts: Tensor | None,
    sums_dtype: torch.dtype | None,
) -> JoinedPlan | None:
    """The plan of casting three matrices as one; None where no kernel takes them as they lie.

    Args: slots, options, counts, sums_dtype: as of plan_cast.
    Raises: UserError for slots, counts or options that do not fit.
    """
    check_options("quantize", options, slots, counts)
    (a, b, c), widths, stretches = joined
    device, dtype = a.device, a.dtype
    if not dispatch.uses_triton("quantize", device) or not a.numel() or dtype not in CASTABLE:
        return None
    if b.dtype is not dtype or c.dtype is not dtype or b.device != device or c.device != device:
        return None
    block = quantize_launch(True, True).columns
    if any(width % block for width in widths):
        return None
    strides = [row_stride(one, width * stretches) for one, width in zip((a, b, c), widths, strict=True)]
    rows = a.numel() // (widths[0] * stretches)
    a_stride, b_stride, c_stride = strides
    if a_stride is None or b_stride is None or c_stride is None:
        return None
    made_for = device, rows, widths, stretches, (a_stride, b_stride, c_stride), options, sums_dtype
    key = (made_for, dtype, slots is not None, counts is None)
    plan = _plans.get(key)
    if plan is None:
        plan = keep(_plans, key, JoinedPlan(*made_for))
    return plan
