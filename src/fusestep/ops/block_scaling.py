"""Quantise a matrix to FP8 by blocks: one scale for each block, both directions from one read.

    data = cast(clamp(x · scale)),   read as data · scale_inv

A block is (1, 128) for activations and gradients, (128, 128) for weights, or (1, 32) of MXFP8. With the format's largest
value 448 (E4M3) or 57344 (E5M2) and the block's amax = max |x|:

    (1, 128), (128, 128)    scale = min(largest / amax, 2^126), rounded down to a power of two unless fp32 scales are
                            asked for; 1 where amax is zero or not finite; scale_inv = 1 / scale
    (1, 32)                 scale = 2^(127 − e), e the biased exponent of amax / largest rounded up: 0 for 0, 254 for an
                            infinity, 255 for NaN, whose block is NaN; e itself is stored, as E8M0

x · scale is formed in fp32. Infinities saturate, NaN stays NaN. The last block of a row or column may be partial: its
scale comes from the elements that are there.

A product sums over the last dimension of both its operands, and blocks run along it. So x (rows, columns) has two
forms: `data`, in blocks along its rows, and `transposed`, in blocks along its columns, both cast from x itself. Blocks
of (128, 128) are the same both ways; there the transposed form is the transpose.

Layout of the inverse scales, as cuBLAS wants it (data are padded to multiples of 16):

    (1, w)        (padded rows, ⌈columns/w⌉), the rows contiguous; the padding's scales are as those of zeros
    (128, 128)    (⌈rows/128⌉, ⌈columns/128⌉ padded to a multiple of 4), the columns contiguous

Sources: DeepSeek-V3 technical report, arXiv:2412.19437, section 3.3; OCP Microscaling Formats (MX) v1.0; cuBLAS
documentation, "1D and 2D block scaling".
"""

from __future__ import annotations

from typing import Literal, cast

import torch
from torch import Tensor

from fusestep.errors import UserError
from fusestep.ops.block_scaling_reference import quantize_blocks_reference
from fusestep.ops.dtypes import KERNEL_DTYPES, dtype_name
from fusestep.ops.quantized import Quantized, padded

Block = tuple[int, int]

BLOCKS: tuple[Block, ...] = ((1, 128), (128, 128), (1, 32))
FORMATS = (torch.float8_e4m3fn, torch.float8_e5m2)


def scales_shape(rows: int, columns: int, block: Block) -> tuple[int, int]:
    """Size of the inverse scales of a matrix; see the head of this file."""
    column_blocks = -(-columns // block[1])
    if block[0] == 1:
        return padded(rows), column_blocks
    return -(-rows // block[0]), -(-column_blocks // 4) * 4


def unwritten_scales(rows: int, columns: int, block: Block, device: torch.device) -> Tensor:
    """Inverse scales of a matrix in their layout, not yet written."""
    shape = scales_shape(rows, columns, block)
    if block[0] != 1:
        return torch.empty(shape, dtype=torch.float32, device=device)
    dtype = torch.uint8 if block[1] == 32 else torch.float32
    return torch.empty_strided(shape, (1, max(shape[0], 1)), dtype=dtype, device=device)


def _unwritten(
    x: Tensor, dtype: torch.dtype, block: Block, rowwise: bool, columnwise: bool, column_sums: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(data, scales, transposed, its scales, column sums), not yet written; empty where they are not wanted."""
    rows, columns = x.shape
    nothing = x.new_empty(0, dtype=torch.float32)

    def form(rows: int, columns: int) -> tuple[Tensor, Tensor]:
        data = torch.empty(padded(rows), padded(columns), dtype=dtype, device=x.device)
        return data, unwritten_scales(rows, columns, block, x.device)

    return (
        *(form(rows, columns) if rowwise else (nothing, nothing)),
        *(form(columns, rows) if columnwise else (nothing, nothing)),
        x.new_empty(columns, dtype=torch.float32) if column_sums else nothing,
    )


def run_reference(
    x: Tensor, dtype: torch.dtype, block: Block, rowwise: bool, columnwise: bool, power_of_two: bool, column_sums: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What the kernel computes, in plain PyTorch."""
    outputs = _unwritten(x, dtype, block, rowwise, columnwise, column_sums)
    for wanted, source, data, scales in (
        (rowwise, x, outputs[0], outputs[1]),
        (columnwise, x.t(), outputs[2], outputs[3]),
    ):
        if wanted:
            shapes = (cast("tuple[int, int]", tuple(t.shape)) for t in (data, scales))
            q, scale_inv = quantize_blocks_reference(source, dtype, block, *shapes, power_of_two)
            data.copy_(q)
            scales.copy_(scale_inv)
    if column_sums:
        torch.sum(x, dim=0, dtype=torch.float32, out=outputs[4])
    return outputs


def quantize_blocks(
    x: Tensor,
    dtype: torch.dtype,
    block: Block,
    *,
    rowwise: bool = True,
    columnwise: bool = False,
    power_of_two: bool = True,
    column_sums: bool = False,
) -> tuple[Quantized, Tensor | None]:
    """Quantise a matrix by blocks; see the head of this file.

    Args:
        x: (rows, columns); fp32, bf16 or fp16; any strides.
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        block: (1, 128), (128, 128) or (1, 32).
        rowwise, columnwise: which forms are wanted: `data`, `transposed`.
        power_of_two: round scales down to powers of two, so that scaling loses no bit; (1, 32) always does.
        column_sums: also sum x over its rows, in fp32, in the same order every time: a bias's gradient.
    Returns: the quantised matrix, and the (columns,) sums or None.
    Raises: UserError.
    """
    _check(x, dtype, block)
    outputs = run_reference(x, dtype, block, rowwise, columnwise, power_of_two, column_sums)
    data, scales, transposed, transposed_scales, sums = outputs
    rows, columns = x.shape
    quantized = Quantized(
        shape=(rows, columns),
        data=data if rowwise else None,
        transposed=transposed if columnwise else None,
        scale_inv=scales,
        transposed_scale_inv=transposed_scales,
        block=block,
    )
    return quantized, sums if column_sums else None


def _check(x: Tensor, dtype: torch.dtype, block: Block) -> None:
    if x.dim() != 2:
        raise UserError(f"quantize_blocks: x has shape {tuple(x.shape)}; pass a matrix, (rows, columns).")
    if x.dtype not in KERNEL_DTYPES:
        raise UserError(f"quantize_blocks: x is {dtype_name(x.dtype)}; pass float32, bfloat16 or float16.")
    if dtype not in FORMATS:
        raise UserError(f"quantize_blocks: dtype is {dtype_name(dtype)}; pass float8_e4m3fn or float8_e5m2.")
    if block not in BLOCKS:
        raise UserError(f"quantize_blocks: block is {block!r}; pass (1, 128), (128, 128) or (1, 32).")
