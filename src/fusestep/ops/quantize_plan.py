"""A cast to FP8 of which all but the tensors is settled: what it writes, and the launches that write it.

Whoever makes the same cast again and again keeps its plan, and spares the host the checks and the look-up.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusestep import dispatch
from fusestep.errors import UserError
from fusestep.ops.activation import base, check_activation, is_gated
from fusestep.ops.cast_options import CastOptions, check_options
from fusestep.ops.dtypes import CASTABLE
from fusestep.ops.launch import PreparedLaunch
from fusestep.ops.layouts import keep, maker, row_stride
from fusestep.ops.quantize_launch import QuantizeLaunches, prepare_quantize
from fusestep.ops.quantized import Quantized, padded
from fusestep.ops.registry import is_plain
from fusestep.ops.settled_slots import may_rely

#: Data, their inverse scale, transpose, its inverse scale, column sums: None for what was not asked for.
Cast = tuple[Tensor | None, Tensor, Tensor | None, Tensor, Tensor | None]

#: By layouts and options; see `keep`.
_plans: dict[tuple[Any, ...], CastPlan] = {}


class CastPlan:
    """Casts tensors of the layouts that it was made for.

    Args:
        device: of the tensors.
        shape: rows and columns of what is cast.
        options: how it is cast.
        sums_dtype: of the column sums; None: they are not wanted.
        launches: as prepare_quantize makes them.
        right: which of data and transpose are handed out as right operands of products: with the summed dimension
            first, of the same memory.
    """

    __slots__ = (
        *("_amax", "_as_bytes", "_cast", "_data", "_index", "_maxima", "_partials", "_scale_inv", "_settled", "_slots"),
        *("_sums", "_total", "_transposed", "shape"),
    )

    def __init__(
        self,
        device: torch.device,
        shape: tuple[int, int],
        options: CastOptions,
        sums_dtype: torch.dtype | None,
        launches: QuantizeLaunches,
        right: tuple[bool, bool] = (False, False),
    ) -> None:
        self.shape = rows, columns = shape
        self._index = device.index if device.type == "cuda" else None
        inside = padded(rows), padded(columns)
        turned, dtype = inside[::-1], options.dtype
        self._data = maker(inside, dtype, device, transposed=right[0]) if options.rowwise else None
        self._transposed = maker(turned, dtype, device, transposed=right[1]) if options.columnwise else None
        self._scale_inv = maker((), torch.float32, device)
        self._sums = None if sums_dtype is None else maker((columns,), sums_dtype, device)
        partials = launches.partials
        self._partials = None if partials is None else maker(partials, torch.float32, device)
        self._maxima = None if launches.amax is None else maker((launches.maxima,), torch.int32, device)
        self._amax, self._cast, self._as_bytes = launches.amax, launches.cast, launches.as_bytes
        self._settled, self._slots = launches.settled, (options.slot,)
        self._total: PreparedLaunch | None = launches.total

    def __call__(
        self, x: Tensor, h: Tensor | None, slots: Tensor | None, counts: Tensor | None
    ) -> tuple[Quantized, Tensor | None]:
        """Cast x, an activation of x, or with h an activation's gradient; return it and the column sums.

        Not with right operands.
        """
        data, scale_inv, transposed, _, sums = self.cast(x, h, slots, counts)
        return Quantized(self.shape, data, transposed, scale_inv, scale_inv), sums

    def cast(self, x: Tensor, h: Tensor | None, slots: Tensor | None, counts: Tensor | None) -> Cast:
        """The same as a `Cast`."""
        index = self._index
        if index is not None and index != torch._C._cuda_getDevice():
            with torch.cuda.device(index):
                return self.cast(x, h, slots, counts)
        # Memory of their own, since data is often let go before its transpose.
        data, data_at, transposed, transposed_at = None, 0, None, 0
        if self._data is not None:
            data = self._data()
            data_at = data.data_ptr()
        if self._transposed is not None:
            transposed = self._transposed()
            transposed_at = transposed.data_ptr()
        scale_inv = self._scale_inv()
        sums = None if self._sums is None else self._sums()
        x_at, h_at = x.data_ptr(), 0 if h is None else h.data_ptr()
        slots_at, counts_at = 0 if slots is None else slots.data_ptr(), 0 if counts is None else counts.data_ptr()
        # What is allocated here is aligned.
        is_odd = (x_at | h_at | slots_at | counts_at) & 15
        launch, maxima, maxima_at = self._cast, None, 0
        if self._amax is not None and self._maxima is not None:
            # Once it is launched whatever is known: a capture of the user's, which needs it, could not load it.
            if self._amax.was_launched and may_rely(slots, slots_at, self._slots):
                launch = self._settled
            else:
                maxima = self._maxima()
                maxima_at = maxima.data_ptr()
                if is_odd or not self._amax.at((x_at, h_at, slots_at, maxima_at)):
                    self._amax(x, h, slots, maxima)
        # One tile of rows has sums that are the whole.
        summed = sums if self._partials is None else self._partials()
        summed_at = 0 if summed is None else summed.data_ptr()
        scale_inv_at = scale_inv.data_ptr()
        given_at = (slots_at, maxima_at, counts_at, summed_at)
        if is_odd or not launch.at((x_at, h_at, data_at, transposed_at, scale_inv_at, *given_at)):
            written = (data, transposed)
            if self._as_bytes:
                written = as_bytes(data), as_bytes(transposed)
            if maxima is None and self._maxima is not None:
                maxima = self._maxima()  # for the compiler, which goes by what is there
            launch(x, h, *written, scale_inv, slots, maxima, counts, summed)
        total = self._total
        if total is not None and sums is not None and not total.at((summed_at, sums.data_ptr(), 0)):
            total(summed, sums, None)
        return data, scale_inv, transposed, scale_inv, sums


def as_bytes(made: Tensor | None) -> Tensor | None:
    """FP8 as uint8, for kernels on devices where Triton knows no FP8."""
    return None if made is None else made.view(torch.uint8)


def runs_kernels(x: Tensor) -> bool:
    """Whether a cast of x launches kernels itself: nothing traces or watches the call, and the device runs them."""
    return not torch.compiler.is_compiling() and is_plain(x) and dispatch.uses_triton("quantize", x.device)


def plan_cast(
    x: Tensor,
    h: Tensor | None,
    activation: str,
    slots: Tensor | None,
    options: CastOptions,
    counts: Tensor | None,
    sums_dtype: torch.dtype | None,
    *,
    right: tuple[bool, bool] = (False, False),
) -> CastPlan | None:
    """The plan of a cast, or None where no kernel takes the tensors as they are.

    Args: those of `run_quantize`; slots: None for a scale that always is the tensor's own, without counts or `record`;
        sums_dtype: of the column sums, None where they are not wanted; right: as of `CastPlan`.

    Raises: UserError, as `quantize`.
    """
    check_quantize(x, h, activation, slots, options, counts)
    rows, columns = cast_shape(x, h, activation)
    device = x.device
    if not dispatch.uses_triton("quantize", device) or rows * columns == 0:
        return None
    x_stride, h_stride = row_stride(x, x.shape[1]), None if h is None else row_stride(h, h.shape[1])
    if x_stride is None or (h is not None and h_stride is None):
        return None
    has_slot = slots is not None
    layouts = (device, rows, columns, x_stride, h_stride, x.dtype, None if h is None else h.dtype)
    key = (layouts, activation, has_slot, options, counts is None, sums_dtype, right)
    plan: CastPlan | None = _plans.get(key)
    if plan is None:
        gated = bool(activation) and is_gated(activation)
        launches = prepare_quantize(
            *(device, rows, columns // 2 if gated and h is not None else columns, x_stride, h_stride),
            *(base(activation) if activation else "", gated, has_slot, options, sums_dtype is not None),
        )
        plan = keep(_plans, key, CastPlan(device, (rows, columns), options, sums_dtype, launches, right))
    return plan


def cast_shape(x: Tensor, h: Tensor | None, activation: str) -> tuple[int, int]:
    """Rows and columns of what is cast."""
    rows, columns = x.shape if h is None else h.shape
    return rows, columns // 2 if activation and h is None and is_gated(activation) else columns


def check_quantize(
    x: Tensor,
    h: Tensor | None,
    activation: str,
    slots: Tensor | None,
    options: CastOptions,
    counts: Tensor | None,
) -> None:
    """One sentence for what cannot be cast.

    Raises: UserError.
    """
    who = "quantize" if not activation else "quantize_activation" if h is None else "quantize_activation_backward"
    check_options(who, options, slots, counts)
    for name, matrix in (("x", x), ("h", h)):
        if matrix is None:
            continue
        if matrix.dim() != 2:
            raise UserError(f"{who}: {name} has shape {tuple(matrix.shape)}; pass (rows, columns).")
        if matrix.dtype not in CASTABLE:
            raise UserError(f"{who}: {name} has dtype {matrix.dtype}; pass float32, bfloat16 or float16.")
    dispatch.one_device(who, x=x, h=h, slots=slots, counts=counts)
    if activation:
        check_activation(who, x if h is None else h, activation)
    if h is not None and (h.shape[0], h.shape[1] // (2 if is_gated(activation) else 1)) != tuple(x.shape):
        raise UserError(
            f"{who}: da has shape {tuple(x.shape)} and h {tuple(h.shape)}; pass the gradient of {activation} of h."
        )
