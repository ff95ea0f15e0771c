"""te.Fp8Unpadding: the rows that Fp8Padding added, taken away again."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fusestep.compat.report import served
from transformer_engine.pytorch._arguments import PACKAGE
from transformer_engine.pytorch.module.fp8_padding import ALIGNED, aligned

__all__ = ["Fp8Unpadding"]


class Fp8Unpadding(nn.Module):
    """Take the zeros of Fp8Padding away; the same arguments."""

    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        self.num_gemms, self.align_size = num_gemms, align_size or ALIGNED
        served(f"{PACKAGE}.Fp8Unpadding", "torch")

    def forward(self, inp: Tensor, m_splits: list[int]) -> Tensor:
        """(padded rows, width) to (rows, width); m_splits are the groups' numbers of rows without padding."""
        padded = aligned(m_splits, self.align_size)
        if padded == list(m_splits):
            return inp
        parts = inp.split(padded)
        return torch.cat([part[:rows] for part, rows in zip(parts, m_splits, strict=True)])
