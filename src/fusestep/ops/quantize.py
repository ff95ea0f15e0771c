"""Cast a matrix to FP8 with one scale, and its transpose in the same read, with what comes before folded in.

    q = cast(saturate(x · scale)),   read as q · scale_inv,   scale_inv = 1 / scale

x · scale is formed in fp32, saturates at the format's largest value (infinities and NaN become the byte 0x7F) and
is rounded to nearest, ties to even. x is a matrix, the activation of one, or the gradient of an activation's input.

The scale belongs to a *slot*, a row of `slots` (see roll_scales.py) on the device. A slot that has a scale is used as
it is. One that has none yet takes its scale from its amax, which is raised to max|x| first:

    scale = largest / amax / 2^margin, bounded by 2^±126      (1 where amax is 0 or not finite)

Without slots, the amax is that of what is cast. Nothing of this waits for the device, nor does a branch in Python
depend on it. With `record` the slot's amax is raised by every cast.

Outputs are padded with zeros to multiples of 16 (see quantized.py). Column sums, the gradient of a bias, are of what
is cast, before the cast, in fp32 and in a fixed order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusestep.errors import UserError
from fusestep.ops.cast_options import CastOptions
from fusestep.ops.dtypes import FP8
from fusestep.ops.quantize_ops import quantize_op, run_quantize, run_transpose, transpose_bytes_op
from fusestep.ops.quantize_plan import cast_shape, check_quantize
from fusestep.ops.quantized import PAD, Quantized
from fusestep.ops.registry import is_plain


def quantize(
    x: Tensor,
    slots: Tensor | None,
    index: int,
    dtype: torch.dtype,
    *,
    rowwise: bool = True,
    columnwise: bool = False,
    record: bool = False,
    margin: int = 0,
    power_of_two: bool = False,
    counts: Tensor | None = None,
    column_sums: bool = False,
) -> tuple[Quantized, Tensor | None]:
    """Cast a matrix; see the head of this file. No gradient flows through it.

    Args:
        x: (rows, columns) fp32, bf16 or fp16; copied if its last stride is not 1.
        slots: (n, 4) fp32 on x's device; contiguous. None: the scale is the one that x's own amax calls for.
        index: the slot.
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        rowwise, columnwise: which of data and transposed are wanted.
        record: raise the slot's amax, also where it has a scale; there must be slots, as for counts.
        margin: a scale that is taken from the amax is smaller by 2^margin.
        power_of_two: such a scale is rounded down to a power of two.
        counts: (n, 3) int64, contiguous: to the slot's row is added how many elements were cast, saturated, and
            flushed from something to zero.
        column_sums: also return the fp32 sums over the rows of x, (columns,).

    Returns: the quantised matrix and the sums, None where they were not asked for.
    Raises: UserError, before anything is written, for shapes, dtypes or devices that do not fit.
    """
    options = CastOptions(index, dtype, rowwise, columnwise, record, margin, power_of_two)
    return cast(x, None, "", slots, options, counts, column_sums)


def quantize_activation(
    h: Tensor,
    name: str,
    slots: Tensor | None,
    index: int,
    dtype: torch.dtype,
    *,
    rowwise: bool = True,
    columnwise: bool = False,
    record: bool = False,
    margin: int = 0,
    power_of_two: bool = False,
    counts: Tensor | None = None,
) -> Quantized:
    """Cast activation(h), which is formed in fp32 and never stored; see `quantize` and activation.py.

    Args:
        h: (rows, columns) fp32, bf16 or fp16; of a gated activation (rows, 2 · columns), the gate first.
        name: one of ACTIVATIONS.
    """
    options = CastOptions(index, dtype, rowwise, columnwise, record, margin, power_of_two)
    return cast(h, None, name, slots, options, counts, False)[0]


def quantize_activation_backward(
    da: Tensor,
    h: Tensor,
    name: str,
    slots: Tensor | None,
    index: int,
    dtype: torch.dtype,
    *,
    rowwise: bool = True,
    columnwise: bool = False,
    record: bool = False,
    margin: int = 0,
    power_of_two: bool = False,
    counts: Tensor | None = None,
    column_sums: bool = True,
) -> tuple[Quantized, Tensor | None]:
    """Cast the gradient of h, given that of activation(h); see `quantize` and activation.py.

    Args:
        da: (rows, columns) fp32, bf16 or fp16.
        h: what the forward was given: da's shape, of a gated activation (rows, 2 · columns).
    """
    options = CastOptions(index, dtype, rowwise, columnwise, record, margin, power_of_two)
    return cast(da, h, name, slots, options, counts, column_sums)


def transpose_bytes(data: Tensor) -> Tensor:
    """The transpose of a padded FP8 matrix as a new one: (R, C) to (C, R), both multiples of 16.

    Raises: UserError for another dtype, shape or layout.
    """
    if data.dtype not in FP8 or data.dim() != 2 or data.shape[0] % PAD or data.shape[1] % PAD:
        raise UserError(
            f"transpose_bytes: data are {tuple(data.shape)} {data.dtype}; pass FP8 padded to multiples of {PAD}."
        )
    if not data.is_contiguous():
        raise UserError("transpose_bytes: data are not contiguous; pass what a cast returned.")
    if not torch.compiler.is_compiling() and is_plain(data):
        return run_transpose(data)
    transposed: Tensor = transpose_bytes_op(data)
    return transposed


def cast(
    x: Tensor,
    h: Tensor | None,
    activation: str,
    slots: Tensor | None,
    options: CastOptions,
    counts: Tensor | None,
    column_sums: bool,
) -> tuple[Quantized, Tensor | None]:
    """What the functions above do: cast x, or with a name an activation of x, or with h too the gradient of h from x.

    Returns: the quantised matrix, and the column sums or None.
    Raises: UserError, as `quantize`.
    """
    if not torch.compiler.is_compiling() and is_plain(x):
        data, transposed, scale_inv, sums = run_quantize(x, h, activation, slots, options, counts, column_sums)
    else:
        check_quantize(x, h, activation, slots, options, counts)
        h = None if h is None else h.detach()
        data, transposed, scale_inv, sums = quantize_op(x.detach(), h, activation, slots, *options, counts, column_sums)
        data = data if options.rowwise else None
        transposed = transposed if options.columnwise else None
        sums = sums if column_sums else None
    return Quantized(cast_shape(x, h, activation), data, transposed, scale_inv, scale_inv), sums
