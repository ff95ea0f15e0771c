"""The batch of a TrainStep: tensors, alone or in dicts, lists, tuples and what else torch's pytree takes apart."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from types import FunctionType, MemberDescriptorType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from fusestep.errors import UserError
from fusestep.graph.attributes import PLAIN


class Batch:
    """Arguments of a loss function.

    Args:
        arguments: tensors, plain values, and containers of them, by position.
        named: the same, by name.
    Raises: UserError for values that cannot be compared from batch to batch, for tensors with a history, and for
        parameters.
    """

    def __init__(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._leaves, self._form = tree_flatten((arguments, named))
        for leaf in self._leaves:
            if isinstance(leaf, Tensor):
                if leaf.grad_fn is not None or isinstance(leaf, nn.Parameter):
                    what = "is a parameter" if leaf.is_leaf else "was computed from others with gradients"
                    raise UserError(
                        f"TrainStep: a batch has a tensor of shape {tuple(leaf.shape)} that {what}, and gradients end "
                        "at the batch; use it in loss_fn or the model, or pass its detach()."
                    )
            elif not _is_comparable(leaf):
                raise UserError(
                    f"TrainStep: a batch holds a {type(leaf).__name__}, which is neither a tensor nor a plain value; "
                    "pass tensors, numbers and strings, or dicts, lists and tuples of them (dict(batch) makes one of a "
                    "mapping)."
                )

    def loss(self, loss_fn: Callable[..., Any], model: nn.Module) -> Any:
        """What loss_fn returns for the model and what was given, with the tensors of now."""
        arguments, named = tree_unflatten(self._leaves, self._form)
        return loss_fn(model, *arguments, **named)

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
        """The batch with its tensors on a device; they are leaves of their own, whose gradients nobody sees."""
        return self.with_tensors(
            tensor.detach().to(device, non_blocking=True).requires_grad_(tensor.requires_grad)
            for tensor in self.tensors
        )

    def unfit(self) -> str | None:
        """Why a graph cannot be fed such batches, or None."""
        for leaf in self._leaves:
            if type(leaf) not in PLAIN and not isinstance(leaf, Tensor) and not _is_told_apart(leaf):
                return (
                    f"a batch has a {type(leaf).__name__}, which is equal to itself whatever is written in it; pass "
                    "the tensors and numbers that loss_fn reads of it"
                )
        for tensor in self.tensors:
            if tensor.layout is not torch.strided or tensor.is_nested:
                layout = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
                return (
                    f"a batch has a {layout} tensor, whose parts lie elsewhere each time; pass dense tensors, such as "
                    "the parts of it"
                )
        return None

    def parts(self, count: int) -> Sequence[Batch]:
        """So many micro-batches, cut along dimension 0; what has none, and other values than tensors, go to each.

        Raises: UserError where the number does not divide a tensor.
        """
        if count == 1:
            return [self]
        tensors = self.tensors
        for tensor in tensors:
            if tensor.dim() and tensor.shape[0] % count:
                raise UserError(
                    f"TrainStep: a batch has a tensor of shape {tuple(tensor.shape)}, which {count} micro-batches do "
                    "not divide; pass batches whose dimension 0 is a multiple of accumulate, as a DataLoader with "
                    "drop_last=True gives them."
                )
        cut = [tensor.chunk(count) if tensor.dim() else (tensor,) * count for tensor in tensors]
        return [self.with_tensors(part[number] for part in cut) for number in range(count)]

    def _of(self, leaves: list[Any]) -> Batch:
        other = object.__new__(Batch)
        other._leaves, other._form = leaves, self._form
        return other


def _is_comparable(leaf: Any) -> bool:
    """Whether equality says that a value is the same in two batches: not of an object that holds tensors."""
    try:
        hash(leaf)
    except TypeError:
        return False
    return not any(isinstance(value, Tensor) for value in getattr(leaf, "__dict__", {}).values())


def _is_told_apart(leaf: Any) -> bool:
    """Whether the kind of a batch tells when loss_fn would read something else in a value."""
    if isinstance(leaf, FunctionType):
        return leaf.__closure__ is None and leaf.__defaults__ is None and leaf.__kwdefaults__ is None
    return all(type(value) in PLAIN for value in _state(leaf).values())


def _state(leaf: Any) -> dict[str, Any]:
    """What may be written in a value that is equal to itself alone."""
    kind: Any = type(leaf)
    if kind.__eq__ is not object.__eq__ or isinstance(leaf, (type, Enum, FunctionType)):
        return {}
    tables = [vars(base).items() for base in kind.__mro__ if "__slots__" in vars(base)]
    slots = [name for table in tables for name, value in table if isinstance(value, MemberDescriptorType)]
    return {name: getattr(leaf, name) for name in slots if hasattr(leaf, name)} | getattr(leaf, "__dict__", {})


def _kind(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        strides = leaf.stride() if leaf.layout is torch.strided else leaf.layout
        return leaf.shape, leaf.dtype, strides, leaf.requires_grad
    if type(leaf) in PLAIN:
        return type(leaf), leaf  # 1 and True are equal
    return type(leaf), leaf, *((name, type(value), value) for name, value in _state(leaf).items())
