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
from fusestep.ops.launch import PreparedLaunch
from fusestep.ops.layouts import layout
from fusestep.ops.quantize_kernel import QuantizeLaunches, prepare_quantize
from fusestep.ops.quantized import Quantized, padded
from fusestep.ops.registry import is_plain
from fusestep.ops.roll_scales import SLOT

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
CASTABLE = (torch.float32, torch.bfloat16, torch.float16)

#: Beyond it a margin leaves nothing of a format's range.
LARGEST_MARGIN = 16

#: By layouts and options; no more than MOST of them, since shapes may never repeat.
_plans: dict[tuple[Any, ...], CastPlan] = {}
MOST = 4096


class CastPlan:
    """Casts tensors of the layouts that it was made for.

    Args:
        device: of the tensors.
        shape: rows and columns of what is cast.
        dtype: FP8.
        rowwise, columnwise: which of data and transposed are wanted.
        sums_dtype: of the column sums; None: they are not wanted.
        launches: as prepare_quantize makes them.
    """

    __slots__ = (
        *("_amax", "_as_bytes", "_cast", "_data", "_maxima", "_partials", "_scale_inv", "_sums", "_total"),
        *("_transposed", "shape"),
    )

    def __init__(
        self,
        device: torch.device,
        shape: tuple[int, int],
        dtype: torch.dtype,
        rowwise: bool,
        columnwise: bool,
        sums_dtype: torch.dtype | None,
        launches: QuantizeLaunches,
    ) -> None:
        self.shape = rows, columns = shape
        inside = padded(rows), padded(columns)
        self._data = layout(inside, dtype, device) if rowwise else None
        self._transposed = layout(inside[::-1], dtype, device) if columnwise else None
        self._scale_inv = layout((), torch.float32, device)
        self._sums = None if sums_dtype is None else layout((columns,), sums_dtype, device)
        partials = launches.partials
        self._partials = None if partials is None else layout(partials, torch.float32, device)
        self._maxima = None if launches.amax is None else layout((launches.maxima,), torch.int32, device)
        self._amax, self._cast, self._as_bytes = launches.amax, launches.cast, launches.as_bytes
        self._total: PreparedLaunch | None = launches.total

    def __call__(
        self, x: Tensor, h: Tensor | None, slots: Tensor | None, counts: Tensor | None
    ) -> tuple[Quantized, Tensor | None]:
        """Cast x, an activation of x, or with h an activation's gradient; return it and the column sums."""
        empty = torch.empty_like
        # Memory of their own, since data is often let go before its transpose.
        data = None if self._data is None else empty(self._data)
        transposed = None if self._transposed is None else empty(self._transposed)
        scale_inv = empty(self._scale_inv)
        sums = None if self._sums is None else empty(self._sums)
        maxima = None
        if self._amax is not None and self._maxima is not None:
            maxima = empty(self._maxima)
            self._amax(x, h, slots, maxima)
        written: tuple[Any, ...] = (data, transposed)
        if self._as_bytes:
            written = tuple(None if made is None else made.view(torch.uint8) for made in written)
        if self._total is None or self._partials is None:  # no sums, or one tile of rows, whose sums are the whole
            self._cast(x, h, *written, scale_inv, slots, maxima, counts, sums)
        else:
            partials = empty(self._partials)
            self._cast(x, h, *written, scale_inv, slots, maxima, counts, partials)
            self._total(partials, sums, None)
        return Quantized(self.shape, data, transposed, scale_inv, scale_inv), sums


def runs_kernels(x: Tensor) -> bool:
    """Whether a cast of x launches kernels itself: nothing traces or watches the call, and the device runs them."""
    return not torch.compiler.is_compiling() and is_plain(x) and dispatch.uses_triton("quantize", x.device)


def plan_cast(
    x: Tensor,
    h: Tensor | None,
    activation: str,
    slots: Tensor | None,
    index: int,
    dtype: torch.dtype,
    rowwise: bool,
    columnwise: bool,
    record: bool,
    margin: int,
    power_of_two: bool,
    counts: Tensor | None,
    sums_dtype: torch.dtype | None,
) -> CastPlan | None:
    """The plan of a cast, or None where no kernel takes the tensors as they are.

    Args: those of `run_quantize`; slots: None for a scale that always is the tensor's own, without counts or `record`;
        sums_dtype: of the column sums, None where they are not wanted.

    Raises: UserError, as `quantize`.
    """
    check_quantize(
        *(x, h, activation, slots, index, dtype, rowwise, columnwise),
        *(record, margin, power_of_two, counts, sums_dtype is not None),
    )
    rows, columns = cast_shape(x, h, activation)
    device = x.device
    if not dispatch.uses_triton("quantize", device) or rows * columns == 0:
        return None
    x_stride, h_stride = row_stride(x), None if h is None else row_stride(h)
    if x_stride is None or (h is not None and h_stride is None):
        return None
    has_slot = slots is not None
    options = (activation, index, dtype, rowwise, columnwise, record, margin, power_of_two, counts is None, sums_dtype)
    key = (device, has_slot, rows, columns, x_stride, h_stride, x.dtype, None if h is None else h.dtype, options)
    plan = _plans.get(key)
    if plan is None:
        gated = bool(activation) and is_gated(activation)
        launches = prepare_quantize(
            *(device, rows, columns // 2 if gated and h is not None else columns, x_stride, h_stride),
            *(base(activation) if activation else "", gated, has_slot, index, dtype),
            columnwise,
            record,
            margin,
            power_of_two,
            sums_dtype is not None,
        )
        plan = _plans[key] = CastPlan(device, (rows, columns), dtype, rowwise, columnwise, sums_dtype, launches)
        if len(_plans) > MOST:
            _plans.pop(next(iter(_plans)))
    return plan


def cast_shape(x: Tensor, h: Tensor | None, activation: str) -> tuple[int, int]:
    """Rows and columns of what is cast."""
    rows, columns = x.shape if h is None else h.shape
    return rows, columns // 2 if activation and h is None and is_gated(activation) else columns


def row_stride(x: Tensor) -> int | None:
    """Elements from one row of a matrix to the next, or None where a row is not one run of memory."""
    if x.shape[1] != 1 and x.stride(1) != 1:
        return None
    return x.shape[1] if x.shape[0] == 1 else x.stride(0)


def check_quantize(
    x: Tensor,
    h: Tensor | None,
    activation: str,
    slots: Tensor | None,
    index: int,
    dtype: torch.dtype,
    rowwise: bool,
    columnwise: bool,
    record: bool,  # noqa: ARG001
    margin: int,
    power_of_two: bool,  # noqa: ARG001
    counts: Tensor | None,
    column_sums: bool,  # noqa: ARG001
) -> None:
    """One sentence for what cannot be cast."""
    who = "quantize" if not activation else "quantize_activation" if h is None else "quantize_activation_backward"
    if dtype not in FP8:
        raise UserError(f"{who}: dtype is {dtype}; pass torch.float8_e4m3fn or torch.float8_e5m2.")
    if not rowwise and not columnwise:
        raise UserError(f"{who}: neither data nor its transpose is wanted; pass rowwise=True or columnwise=True.")
    if not 0 <= margin <= LARGEST_MARGIN:
        raise UserError(f"{who}: margin is {margin}; pass an integer from 0 to {LARGEST_MARGIN}.")
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
    if slots is None:
        return
    if slots.dim() != 2 or slots.shape[1] != SLOT or slots.dtype is not torch.float32 or not slots.is_contiguous():
        raise UserError(
            f"{who}: slots are {tuple(slots.shape)} {slots.dtype}; pass contiguous (n, {SLOT}) torch.float32."
        )
    if not 0 <= index < slots.shape[0]:
        raise UserError(f"{who}: there is no slot {index} among {slots.shape[0]}; pass one from 0 on.")
    if counts is not None and (
        counts.shape != (slots.shape[0], 3) or counts.dtype is not torch.int64 or not counts.is_contiguous()
    ):
        raise UserError(
            f"{who}: counts are {tuple(counts.shape)} {counts.dtype}; pass contiguous int64, ({slots.shape[0]}, 3)."
        )
