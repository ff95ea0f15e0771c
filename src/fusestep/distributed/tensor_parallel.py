"""Tensor and sequence parallelism: what the ranks that share a layer agree on.

A column-parallel layer holds some rows of its weight, out_features / size of them, and gives that many features; a
row-parallel one holds columns and takes that many features, and its products add up over the ranks. A column-parallel
layer, whatever works feature by feature, and a row-parallel layer need one collective forward and one backward. With
sequence parallelism what stands between such pairs (norms, dropout, residual adds) works on a slice of the sequence on
each rank, and the collective is cut in two:

    all ranks have x            enter: nothing           leave: all-reduce          backward the other way round
    a slice of the sequence     enter: all-gather        leave: reduce-scatter

The bias of a row-parallel layer is added once, after the products. Parameters that every rank has, but of whose use it
sees a part (norms and that bias under sequence parallelism, norms of heads), have the sum of all ranks' gradients when
backward is through: one all-reduce for each module, in backward itself, so that nothing is left for the optimizer to
know, however gradients are accumulated.

Sources: Shoeybi et al. 2019, arXiv:1909.08053; Korthikanti et al. 2022, arXiv:2205.05198.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from fusestep.distributed.collectives import added, copied, gathered, scattered, with_added_gradients
from fusestep.distributed.groups import is_dtensor, mark_shard
from fusestep.errors import UserError

Mode = Literal["column", "row"]


class TensorParallel:
    """A group of ranks that share layers, as one of them sees it. Copies of a module share it.

    Args:
        who: the module, for error messages.
        group: a process group of torch.distributed, or a one-dimensional DeviceMesh; None where `join` will give it.
        size: of the group, where it is not there yet.
        sequence_dim: the dimension of activations along which ranks hold slices outside of parallel layers; None
            without sequence parallelism.
        adds_gradients: whether gradients of parameters that all ranks have are summed in backward. Transformer Engine
            leaves that to the caller, for parameters that it marks `sequence_parallel`.
    Raises: UserError for a group that this rank is not in, or before there is one.
    """

    def __init__(
        self,
        who: str,
        group: Any,
        size: int | None = None,
        sequence_dim: int | None = None,
        *,
        adds_gradients: bool = True,
    ) -> None:
        self.who, self.sequence_dim, self.adds_gradients = who, sequence_dim, adds_gradients
        self.size = 1 if size is None else size
        self.rank: int | None = None
        self._group: Any = None
        if group is not None:
            self._group, self.size, self.rank = _group_of(who, group)

    def join(self, group: Any) -> None:
        """Take the group that was not there when the layers were made.

        Raises: UserError for a group of another size than was said then, or one that this rank is not in.
        """
        group, size, rank = _group_of(self.who, group)
        if size != self.size:
            raise UserError(
                f"{self.who}: the layer was made for {self.size} ranks and the group has {size}; make it with "
                f"tp_size={size}, or pass a group of {self.size}."
            )
        self._group, self.rank = group, rank

    @property
    def group(self) -> Any:
        """The process group. Raises: UserError as long as there is none."""
        if self._group is None:
            raise UserError(
                f"{self.who}: it was made for {self.size} ranks and has no group; call set_tensor_parallel_group "
                "before the first forward, or pass tp_group."
            )
        return self._group

    def __deepcopy__(self, memo: Any) -> TensorParallel:
        return self

    def __reduce__(self) -> Any:
        raise UserError(
            f"{self.who}: a layer that is shared by ranks cannot be pickled, since its process group is of this run; "
            "save its state_dict()."
        )

    # Activations

    def enter(self, x: Tensor) -> Tensor:
        """What a column-parallel layer multiplies, of what all ranks have, or of their slices of the sequence."""
        if self.sequence_dim is None:
            return copied(x, self.group)
        if x.dim() < self.sequence_dim + 2:
            raise UserError(
                f"{self.who}: x has shape {tuple(x.shape)} and the sequence is said to run along dimension "
                f"{self.sequence_dim}; pass (…, features) with the sequence there, or another sequence_dim."
            )
        return gathered(x, self.sequence_dim, self.group)

    def leave(self, y: Tensor, bias: Tensor | None) -> Tensor:
        """The sum of the products of all ranks, whole or this rank's slice of the sequence, and the bias."""
        if self.sequence_dim is None:
            y = added(y, self.group)
        else:
            self.check_sequence(y)
            y = scattered(y, self.sequence_dim, self.group)
        return y if bias is None else y + bias.to(y.dtype)

    def check_sequence(self, x: Tensor) -> None:
        """Raise UserError unless the ranks can hold equal slices of x's sequence; of the shape alone, so on all ranks
        alike and before anything is sent."""
        dim = self.sequence_dim
        if dim is None:
            return
        if x.dim() < dim + 2 or x.shape[dim] % self.size:
            length = f"has no dimension {dim} for it" if x.dim() < dim + 2 else f"is {x.shape[dim]} long"
            raise UserError(
                f"{self.who}: the sequence of a tensor {tuple(x.shape)} {length}, and sequence_parallel cuts it into "
                f"{self.size} slices; pad it to a multiple of {self.size}, or leave sequence_parallel out."
            )

    # Parameters

    def shared(self, *parameters: Any) -> tuple[Any, ...]:
        """Parameters that all ranks have and that this one uses on a slice of the sequence, for autograd."""
        if self.sequence_dim is None or not self.adds_gradients:
            return parameters
        return self.partial(*parameters)

    def partial(self, *parameters: Any) -> tuple[Any, ...]:
        """Parameters that all ranks have, of whose use each sees a part in any case."""
        return with_added_gradients(self.group, *parameters)

    def share(self, what: str, size: int) -> int:
        """This rank's part of so many. Raises: UserError where the ranks do not divide it."""
        if size % self.size:
            raise UserError(
                f"{self.who}: {what} {size} cannot be shared out over {self.size} ranks of tensor parallelism; choose "
                f"a multiple of {self.size}, or a group of a size that divides it."
            )
        return size // self.size

    def rows(self, full: Tensor, blocks: Sequence[int] | None = None, dim: int = 0) -> Tensor:
        """This rank's part of a full tensor along `dim`: of each block its part, one after the other. A copy."""
        assert self.rank is not None
        parts = [full] if blocks is None else full.split(list(blocks), dim)
        mine = [part.chunk(self.size, dim)[self.rank] for part in parts]
        return torch.cat(mine, dim) if len(mine) > 1 else mine[0].clone()

    def embedded(self, ids: Tensor, weight: Tensor) -> Tensor:
        """Rows of a table whose rows the ranks share, in order; whole, or this rank's slice of the sequence.

        Args:
            ids: (…), the same on all ranks. weight: (rows / ranks, features), this rank's.
        """
        if is_dtensor(weight):
            raise UserError(
                f"{self.who}: its parameters are sharded by fully_shard here; call the forward of what was given to "
                "fully_shard, or name the method with register_fsdp_forward_method."
            )
        rows = weight.shape[0]
        mine = ids - (self.rank or 0) * rows
        is_here = (mine >= 0) & (mine < rows)
        found = torch.nn.functional.embedding(torch.where(is_here, mine, 0), weight)
        return self.leave(torch.where(is_here[..., None], found, 0.0), None)

    # Random numbers

    def dropped(self, x: Tensor, probability: float, training: bool) -> Tensor:
        """Dropout of what all ranks have, the same on all of them, or of a slice of the sequence, of each its own."""
        if self.sequence_dim is None or not training or not probability:
            return torch.nn.functional.dropout(x, probability, training)
        with self.own_randomness(x.device):
            return torch.nn.functional.dropout(x, probability)

    @contextmanager
    def own_randomness(self, device: torch.device) -> Iterator[None]:
        """Draw random numbers that differ between the ranks, for what each has a part of; see `own_stream`."""
        with own_stream(self.who, 0 if self.rank is None else self.rank, device):
            yield


def tensor_parallel(
    who: str, group: Any, sequence_parallel: bool = False, sequence_dim: int = 1, *, size: int | None = None
) -> TensorParallel | None:
    """How a layer is shared by a group, or None for a group of one, which leaves the layer as it is.

    Args:
        group: a process group, a one-dimensional DeviceMesh, a TensorParallel that layers share, or None.
        sequence_parallel: whether ranks hold slices of the sequence outside of parallel layers.
        sequence_dim: the dimension of the sequence: 1 for (batch, sequence, features), 0 for (sequence, batch,
            features) and packed tokens.
        size: of a group that comes later.
    Raises: UserError.
    """
    if isinstance(group, TensorParallel):
        return group
    if group is None and (size is None or size == 1):
        return None
    found = TensorParallel(who, group, size, sequence_dim if sequence_parallel else None)
    return found if found.size > 1 else None


def checked_mode(who: str, mode: str | None, allowed: Sequence[str] = ("column", "row")) -> Any:
    """Raises: UserError for a parallel_mode that there is not."""
    if mode is not None and mode not in allowed:
        raise UserError(
            f"{who}: parallel_mode is {mode!r}; pass {' or '.join(repr(one) for one in allowed)}, or None for a layer "
            "that every rank has whole."
        )
    return mode


def fill_part(
    parameter: Tensor,
    fill: Callable[[Tensor], Any],
    parallel: TensorParallel | None,
    blocks: Sequence[int] | None = None,
    dim: int = 0,
) -> None:
    """Fill a parameter with this rank's part of the full matrix, as `fill` fills it in one process.

    All ranks draw the full matrix, so that from the same seed they get parts of the same one. Without a group yet, the
    part is drawn by itself.
    """
    if parallel is None or parallel.rank is None:
        fill(parameter)
        return
    shape = list(parameter.shape)
    shape[dim] *= parallel.size
    full = torch.empty(shape, device=parameter.device, dtype=parameter.dtype)
    fill(full)
    with torch.no_grad():
        parameter.copy_(parallel.rows(full, blocks, dim))


def mark_split(parameter: Any, dim: int, parallel: TensorParallel) -> None:
    """Say on a parameter that it is this rank's part along `dim`: in the words of Megatron and Transformer Engine, and
    to fusestep's optimizers, whose gradient norm is over all parts."""
    parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = True, dim, 1
    if parallel.rank is not None:
        mark_shard(parameter, parallel.group)


@contextmanager
def own_stream(who: str, rank: int, device: torch.device) -> Iterator[None]:
    """Draw from a stream of this rank's own, which follows from the state of the default generator.

    The default generator goes on in step on all ranks, as it would by itself, so that what they draw together stays the
    same; and since its state tells all, a run that is resumed, or a forward that is computed again for backward, draws
    the same numbers.

    Raises: UserError while a CUDA graph is captured, which fixes the generator's seed.
    """
    if device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            raise UserError(
                f"{who}: dropout on what ranks share cannot be captured in a CUDA graph, since each rank draws from a "
                "stream of its own; set the dropout to 0, or run without the graph."
            )
        index = torch.cuda.current_device() if device.index is None else device.index
        generator = torch.cuda.default_generators[index]
        seed, offset = generator.initial_seed(), generator.get_offset()
        generator.manual_seed(_mixed(seed, rank))
        generator.set_offset(offset)
        try:
            yield
        finally:
            offset = generator.get_offset()
            generator.manual_seed(seed)
            generator.set_offset(offset)
        return
    generator = torch.default_generator
    drawn = int(torch.randint(2**62, (), generator=generator))
    state = generator.get_state()
    generator.manual_seed(_mixed(drawn, rank))
    try:
        yield
    finally:
        generator.set_state(state)


def _mixed(seed: int, rank: int) -> int:
    """A seed for a rank, far from those of other ranks and of neighbouring seeds (Steele et al. 2014, SplitMix64)."""
    mask = 2**64 - 1
    z = (seed + (rank + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return (z ^ (z >> 31)) >> 1


def _group_of(who: str, group: Any) -> tuple[Any, int, int]:
    """(process group, its size, this rank in it)."""
    if not dist.is_available() or not dist.is_initialized():
        raise UserError(
            f"{who}: tp_group was given and torch.distributed has no process group; call "
            "torch.distributed.init_process_group first, under torchrun."
        )
    if hasattr(group, "get_group"):  # a DeviceMesh
        if group.ndim != 1:
            raise UserError(
                f"{who}: tp_group is a mesh of {group.ndim} dimensions; pass the one of tensor parallelism, "
                'such as mesh["tp"].'
            )
        group = group.get_group()
    if not isinstance(group, dist.ProcessGroup) or (rank := dist.get_rank(group)) < 0:
        raise UserError(
            f"{who}: rank {dist.get_rank()} is not in the tp_group that it was given; pass the group that "
            "torch.distributed.new_group returned for this rank."
        )
    return group, dist.get_world_size(group), rank
