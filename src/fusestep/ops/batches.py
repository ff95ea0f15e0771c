"""How the references of the optimizers' ops go through many tensors.

On a CPU they work through batches that stay in the cache, so that their passes do not each go to memory: twice as fast
as torch.optim.AdamW(foreach=True) on 29 M parameters and one core.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from fusestep.ops.tensor_table import flat, is_dense

#: Elements that a reference takes through all of its passes at once.
BATCH = 1 << 17

Value = TypeVar("Value")


def batches(
    lists: Sequence[Sequence[Tensor]], values: Sequence[Value]
) -> Iterator[tuple[list[list[Tensor]], list[Value]]]:
    """The same lists in shorter pieces, each with its values; empty tensors are left out.

    Args:
        lists: n tensors each, of equal shapes across the lists; all on one device.
        values: n, each of the tensors at its place.
    """
    limit = BATCH if lists[0] and lists[0][0].device.type == "cpu" else sys.maxsize
    batch: list[tuple[Sequence[Tensor], Value]] = []
    elements = 0
    for tensors, value in zip(zip(*lists, strict=True), values, strict=True):
        for piece in _pieces(tensors, limit):
            batch.append((piece, value))
            elements += piece[0].numel()
            if elements >= limit:
                yield _unzipped(batch)
                batch, elements = [], 0
    if elements:
        yield _unzipped(batch)


def _pieces(tensors: Sequence[Tensor], limit: int) -> Iterable[Sequence[Tensor]]:
    """The tensors of one parameter, cut into stretches of memory where they are long and lie alike."""
    first = tensors[0]
    if first.numel() > limit and is_dense(first) and all(t.stride() == first.stride() for t in tensors):
        return zip(*(flat(t).split(limit) for t in tensors), strict=True)
    return [tensors] if first.numel() else []


def _unzipped(batch: Sequence[tuple[Sequence[Tensor], Value]]) -> tuple[list[list[Tensor]], list[Value]]:
    return [list(one) for one in zip(*(tensors for tensors, _ in batch), strict=True)], [value for _, value in batch]


def arithmetic_dtype(stored: Sequence[Tensor]) -> torch.dtype:
    """What a reference computes in: fp32, for float64 tensors float64."""
    return torch.float64 if stored[0].dtype == torch.float64 else torch.float32


def in_dtype(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The list itself where it has this dtype; all of a list have one."""
    return tensors if tensors[0].dtype == dtype else [tensor.to(dtype) for tensor in tensors]
