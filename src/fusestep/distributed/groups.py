"""How a tensor lies over processes: what this one holds of it, and how often the whole world holds the same part.

Tensors of torch.distributed.tensor (DTensor) tell it themselves; a plain tensor is whole on every process, unless
`mark_shard` says that it is a part. This file imports torch alone, so that any package may use it, and none of
torch.distributed's parts before a DTensor exists.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.tensor import DTensor

#: The attribute of a plain tensor that is one part of a larger one: the group over which the parts lie.
SHARD_GROUP = "fusestep_shard_group"

_groups: dict[tuple[int, ...], ProcessGroup] = {}


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Whether a value is a DTensor; imports nothing, since none can exist before its module was imported."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def local_of(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor, without a copy and outside autograd: the same object at every call.

    A part that is a wrapper around one tensor of its shape and dtype (a torch subclass that tells so by
    `__tensor_flatten__`, as those for FSDP's all-gather do) is given unwrapped.
    """
    if not is_dtensor(tensor):
        return tensor
    # `to_local` makes a new object of a parameter's at every call, and does not wait for a collective under way.
    return unwrapped(tensor._local_tensor)


def unwrapped(tensor: Tensor) -> Tensor:
    """The one tensor that a wrapper of its shape and dtype holds; another tensor as it is."""
    if type(tensor) is Tensor:
        return tensor
    if hasattr(tensor, "wait"):
        return cast(Tensor, tensor.wait())
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        inner = getattr(tensor, names[0])
        if len(names) == 1 and inner.shape == tensor.shape and inner.dtype == tensor.dtype:
            return cast(Tensor, inner)
    return tensor


def mark_shard(tensor: Tensor, group: ProcessGroup) -> None:
    """Say that a plain tensor is one of the parts of a larger one, a part on each process of a group.

    Optimizers and clip_grad_norm_ then add up the parts' norms. For parameters that no DTensor describes.
    """
    setattr(tensor, SHARD_GROUP, _Mark(group))


class _Mark:
    """Holds a group on a tensor; of a pickle of the tensor it is no part, since a group belongs to a run."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group

    def __reduce__(self) -> tuple[Any, ...]:
        # What even a restricted unpickler takes, and `shard_group` knows for nothing.
        return OrderedDict, ()


def shard_group(tensor: Tensor) -> ProcessGroup | None:
    """The group that `mark_shard` named."""
    mark = getattr(tensor, SHARD_GROUP, None)
    return mark.group if isinstance(mark, _Mark) else None


def holders(tensor: Tensor) -> tuple[frozenset[int], int] | None:
    """(the ranks that hold parts of a tensor, how many different parts there are); None where it is whole everywhere.

    Ranks are those of the world. A DTensor's parts are counted over the dimensions of its mesh that shard it; over the
    others it is replicated.
    """
    if is_dtensor(tensor):
        mesh = tensor.device_mesh
        parts = 1
        for dimension, placement in enumerate(tensor.placements):
            if not placement.is_replicate():
                parts *= mesh.size(dimension)
        return frozenset(mesh.mesh.flatten().tolist()), parts
    group = shard_group(tensor)
    if group is None:
        return None
    return frozenset(torch.distributed.get_process_group_ranks(group)), group.size()


def group_of(ranks: frozenset[int]) -> ProcessGroup:
    """A group of exactly these ranks of the world: the world's own, or one that is made once.

    All of the ranks must ask for it, in one order with the other groups that they ask for.
    """
    distributed = torch.distributed
    if len(ranks) == distributed.get_world_size():
        return distributed.group.WORLD  # type: ignore[return-value]
    key = tuple(sorted(ranks))
    known = _groups.get(key)
    if known is None or not _is_alive(known):
        known = _groups[key] = distributed.new_group(list(key), use_local_synchronization=True)
    return known


def _is_alive(group: ProcessGroup) -> bool:
    """Whether a group belongs to the world as it is now, which may have been left and joined anew."""
    from torch.distributed.distributed_c10d import _world

    return group in _world.pg_map


def wrapped(local: Tensor, like: DTensor) -> DTensor:
    """A DTensor that lies as another does, of what this process holds of it; no communication."""
    from torch.distributed.tensor import DTensor

    made: DTensor = DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return made


def own_part(like: DTensor) -> tuple[slice, ...]:
    """Where this process's part of a DTensor lies in the whole."""
    (chunk,) = like.__create_chunk_list__()
    return tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))


def laid_out(value: Tensor, like: Tensor) -> Tensor:
    """A value of the same shape, laid out over processes as another tensor is; for states and weights, no gradients.

    A plain value is whole on every process, and each takes its part of it; between DTensors and to a plain tensor all
    processes communicate, unless the layouts are equal already.
    """
    if not is_dtensor(like):
        return value.full_tensor() if is_dtensor(value) else value
    mesh, placements = like.device_mesh, like.placements
    if is_dtensor(value):
        if value.device_mesh == mesh:
            return value if value.placements == placements else value.redistribute(mesh, placements)
        value = value.full_tensor()
    return wrapped(value.detach()[own_part(like)].to(like.device, copy=True), like)


def world_size() -> int:
    """Processes that run this program together; 1 without torch.distributed."""
    return torch.distributed.get_world_size() if is_running() else 1


def rank() -> int:
    """This process's number in the world; 0 without torch.distributed."""
    return torch.distributed.get_rank() if is_running() else 0


def is_running() -> bool:
    """Whether this process has joined others."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def gathered(value: Any) -> list[Any]:
    """What all processes of the world pass, by rank. The hosts wait for each other."""
    if not is_running():
        return [value]
    values: list[Any] = [None] * world_size()
    torch.distributed.all_gather_object(values, value)
    return values


def any_dtensor(tensors: Iterable[object]) -> bool:
    """Whether one of these is a DTensor."""
    return any(is_dtensor(one) for one in tensors)
