"""A matrix in FP8, as products read it: its bytes, their transpose, and what turns them back into values.

Both are padded with zeros to multiples of 16 in both directions, which FP8 products ask for, so that matrices of any
shape can be multiplied: zeros add nothing to a sum, and what the product has beyond its shape is cut off.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

#: FP8 products want every dimension a multiple of this.
PAD = 16


def padded(n: int) -> int:
    """n, or the next multiple of 16."""
    return -(-n // PAD) * PAD


class Quantized(NamedTuple):
    """A matrix of `shape` = (rows, columns) in FP8; value = byte · scale_inv.

    Attributes:
        shape: rows and columns without padding.
        data: (padded(rows), padded(columns)), or None where it was not asked for.
        transposed: (padded(columns), padded(rows)), or None.
        scale_inv: fp32, of data. One scale for the whole: 0-d. Blocks: one for each block of `block` rows × columns,
            the last ones partial; E8M0 exponents (uint8, 2^(e − 127)) where a block is 1 × 32.
        transposed_scale_inv: likewise of transposed, whose blocks run along its own rows; without blocks the same
            tensor as scale_inv.
        block: rows and columns of a block, None without blocks.
    """

    shape: tuple[int, int]
    data: Tensor | None
    transposed: Tensor | None
    scale_inv: Tensor
    transposed_scale_inv: Tensor
    block: tuple[int, int] | None = None

    @property
    def dtype(self) -> torch.dtype:
        """torch.float8_e4m3fn or torch.float8_e5m2."""
        return self._any().dtype

    @property
    def device(self) -> torch.device:
        return self._any().device

    def _any(self) -> Tensor:
        there = self.data if self.data is not None else self.transposed
        if there is None:
            raise ValueError("a quantised matrix holds its data or their transpose; this one holds neither")
        return there

    def t(self) -> Quantized:
        """The transpose, of the same memory: what products read of a matrix one way they read of it the other way."""
        rows, columns = self.shape
        scales = self.transposed_scale_inv, self.scale_inv
        return Quantized((columns, rows), self.transposed, self.data, *scales, self.block)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The values, (rows, columns), formed in fp32 and rounded once to dtype."""
        rows, columns = self.shape
        if self.data is not None:
            return values(self.data, self.scale_inv, self.block, rows, columns).to(dtype)
        return values(self._any(), self.transposed_scale_inv, self.block, columns, rows).t().contiguous().to(dtype)


def values(data: Tensor, scale_inv: Tensor, block: tuple[int, int] | None, rows: int, columns: int) -> Tensor:
    """fp32 values of padded FP8 data whose scales are for blocks of `block`."""
    found = data[:rows, :columns].float()
    if block is None:
        return found * scale_inv
    if scale_inv.dtype is torch.uint8:
        scale_inv = exponent_value(scale_inv)
    height, width = block
    scale_inv = scale_inv.repeat_interleave(height, 0)[:rows].repeat_interleave(width, 1)[:, :columns]
    return found * scale_inv


def exponent_value(exponents: Tensor) -> Tensor:
    """2^(e − 127) in fp32 of E8M0 exponents, 0 to 255 of any integer dtype: NaN of 255, and of −1.

    Built from bits, since exp2 is not exact everywhere; 2^-127 lies below fp32's normal numbers.
    """
    exponents = exponents.to(torch.int32)
    bits = (exponents << 23).masked_fill(exponents == 0, 0x400000)
    return bits.masked_fill((exponents == 255) | (exponents < 0), 0x7FC00000).view(torch.float32)
