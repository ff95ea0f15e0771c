"""te.Fp8Padding and te.Fp8Unpadding, for scripts that pad; products of ours take any number of rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fusestep.compat.report import served
from transformer_engine.pytorch._arguments import PACKAGE

__all__ = ["Fp8Padding"]

ALIGNED = 16


def aligned(m_splits: Sequence[int], size: int) -> list[int]:
    """Each number of rows, or the next multiple of the size."""
    return [-(-rows // size) * size for rows in m_splits]


class Fp8Padding(nn.Module):
    """Pad each of the `num_gemms` groups of rows with zeros to a multiple of align_size, 16 if None."""

    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        self.num_gemms, self.align_size = num_gemms, align_size or ALIGNED
        served(f"{PACKAGE}.Fp8Padding", "torch")

    def forward(self, inp: Tensor, m_splits: list[int]) -> tuple[Tensor, list[int]]:
        """(rows, width) to (padded rows, width), with the groups' new numbers of rows."""
        wanted = aligned(m_splits, self.align_size)
        if wanted == list(m_splits):
            return inp, wanted
        parts = []
        for part, rows in zip(inp.split(list(m_splits)), wanted, strict=True):
            parts.append(nn.functional.pad(part, (0, 0, 0, rows - part.shape[0])))
        return torch.cat(parts), wanted
