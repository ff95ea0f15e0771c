"""The batch of a TrainStep: tensors, alone or in dicts, lists, tuples and what else torch's pytree takes apart."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from fusestep.errors import UserError


class Batch:
    """Arguments of a loss function.

    Args:
        arguments: tensors, plain values, and containers of them.
    Raises: UserError for values that cannot be compared from batch to batch.
    """

    def __init__(self, arguments: tuple[Any, ...]) -> None:
        self._leaves, self._form = tree_flatten(arguments)
        for leaf in self._leaves:
            try:
                hash(leaf)
            except TypeError:
                raise UserError(
                    f"TrainStep: a batch holds a {type(leaf).__name__}, which is neither a tensor nor a plain value; "
                    "pass tensors, numbers and strings, or dicts, lists and tuples of them (dict(batch) makes one of a "
                    "mapping)."
                ) from None

    @property
    def arguments(self) -> tuple[Any, ...]:
        """What was given, with the tensors of now."""
        arguments: tuple[Any, ...] = tree_unflatten(self._leaves, self._form)
        return arguments

    @property
    def tensors(self) -> list[Tensor]:
        return [leaf for leaf in self._leaves if isinstance(leaf, Tensor)]

    def kind(self) -> Any:
        """What has to be equal for a graph to serve a batch; hashable."""
        return repr(self._form), *map(_kind, self._leaves)

    def with_tensors(self, tensors: Iterable[Tensor]) -> Batch:
        """The same batch of other tensors."""
        places = iter(tensors)
        return self._of([next(places) if isinstance(leaf, Tensor) else leaf for leaf in self._leaves])

    def on(self, device: torch.device) -> Batch:
        """The batch with its tensors on a device."""
        return self.with_tensors([tensor.to(device, non_blocking=True) for tensor in self.tensors])

    def parts(self, count: int) -> Sequence[Batch]:
        """So many micro-batches, cut along dimension 0; other values than tensors go to each.

        Raises: UserError where the number does not divide a tensor.
        """
        if count == 1:
            return [self]
        tensors = self.tensors
        for tensor in tensors:
            if not tensor.dim() or tensor.shape[0] % count:
                raise UserError(
                    f"TrainStep: a batch has a tensor of shape {tuple(tensor.shape)}, which {count} micro-batches do "
                    "not divide; pass batches whose dimension 0 is a multiple of accumulate."
                )
        cut = [tensor.chunk(count) for tensor in tensors]
        return [self.with_tensors(part[number] for part in cut) for number in range(count)]

    def _of(self, leaves: list[Any]) -> Batch:
        other = object.__new__(Batch)
        other._leaves, other._form = leaves, self._form
        return other


def _kind(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return type(leaf), leaf  # 1 and True are equal
    return leaf.shape, leaf.dtype, leaf.stride() if leaf.layout is torch.strided else leaf.layout
