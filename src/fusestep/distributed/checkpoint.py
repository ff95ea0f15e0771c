"""A state of several processes, taken apart for files and put together again; and acting as one.

A state is nested dictionaries and lists. What of it is sharded (DTensors) goes to files of shards (storage.py), under
names that tell where it was, and a stand-in takes its place; the rest is small and the same on all processes. Whoever
reads chooses layouts anew: whole tensors, or those of the tensors that they are for, on any number of processes.

`train/checkpoint.py` makes checkpoints of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from fusestep.distributed import groups
from fusestep.distributed.shards import Shards
from fusestep.errors import UserError

T = TypeVar("T")

#: The key of a dictionary that stands for a tensor in shards; its value is the tensor's name there.
STAND_IN = "fusestep.shard"


def together(action: Callable[[], T], doing: str) -> list[T]:
    """Run an action on every process and return what each returned, by rank; all of the world call this.

    Args:
        doing: for the sentence, after "process 3 failed ".
    Raises: what it raised, where it did; on the other processes a UserError with the same words that names that one.
    """
    error: Exception | None = None
    result: T | None = None
    try:
        result = action()
    except Exception as caught:
        error = caught
    if not groups.is_running():
        if error is not None:
            raise error
        return [result]  # type: ignore[list-item]
    said = None if error is None else str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    answers = groups.gathered((said, result))
    if error is not None:
        raise error
    failed = [(rank, words) for rank, (words, _) in enumerate(answers) if words is not None]
    if failed:
        rank, words = failed[0]
        raise UserError(f"process {rank} failed {doing}: {words}")
    return [result for _, result in answers]


def is_sharded(state: Any) -> bool:
    """Whether there is a DTensor anywhere in a nested state."""
    if isinstance(state, Mapping):
        return any(is_sharded(value) for value in state.values())
    if isinstance(state, (list, tuple)):
        return any(is_sharded(value) for value in state)
    return groups.is_dtensor(state)


def taken_apart(state: Any, name: str) -> tuple[Any, dict[str, Tensor]]:
    """(the state with stand-ins for what is sharded, the sharded tensors by name).

    Args:
        name: what the names begin with; keys and places follow, behind dots.
    """
    if groups.is_dtensor(state):
        return {STAND_IN: name}, {name: state.detach()}
    tensors: dict[str, Tensor] = {}

    def rest_of(value: Any, key: object) -> Any:
        rest, own = taken_apart(value, f"{name}.{key}")
        tensors.update(own)
        return rest

    if isinstance(state, Mapping):
        return {key: rest_of(value, key) for key, value in state.items()}, tensors
    if isinstance(state, (list, tuple)):
        return type(state)([rest_of(value, place) for place, value in enumerate(state)]), tensors
    return state, tensors


def put_together(state: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The state that `taken_apart` was given, with these tensors in the place of stand-ins."""
    if isinstance(state, Mapping):
        if set(state) == {STAND_IN}:
            return tensors[state[STAND_IN]]
        return {key: put_together(value, tensors) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)([put_together(value, tensors) for value in state])
    return state


def stand_ins(state: Any) -> list[str]:
    """The names of all tensors for which something stands in a state."""
    if isinstance(state, Mapping):
        if set(state) == {STAND_IN}:
            return [state[STAND_IN]]
        return [name for value in state.values() for name in stand_ins(value)]
    if isinstance(state, (list, tuple)):
        return [name for value in state for name in stand_ins(value)]
    return []


def read_like(shards: Shards, models: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """Tensors, each laid out as another of its shape is; every process reads what it holds of them, by itself.

    Args:
        models: names in the index, and the tensor whose layout is taken; None, or a plain tensor, for a whole one.
    Returns: new tensors with the saved dtypes, on the device of what they are laid out like, or on the CPU.
    """
    from fusestep.distributed.storage import read_into

    found: dict[str, Tensor] = {}
    for name, model in models.items():
        entry = shards.entries[name]
        if model is not None and groups.is_dtensor(model) and tuple(model.shape) == entry.shape:
            found[name] = groups.wrapped(torch.empty_like(groups.local_of(model).detach(), dtype=entry.dtype), model)
    read_into(shards, found)
    rest = {name: name for name in models if name not in found}
    return found | shards.whole(rest)
