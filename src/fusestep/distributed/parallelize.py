"""A GPT over the ranks of a mesh: replicated with its gradients averaged, or sharded block by block.

    spread = spread_gpt(config, mesh, Parallel.of("fsdp"), dtype=torch.float32, compute=torch.bfloat16)
    with spread.micro_batch(is_last=True):
        spread.loss(tokens, targets, reduction="mean").backward()
    optimizer.step()             # over spread.model.parameters()

The same seed gives the same weights on any number of ranks, sharded or not: initial values are those of the whole
model, of which each rank keeps its part.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed, nn

from fusestep.distributed.mesh import DATA, TENSOR, Parallel
from fusestep.models import GPT, GPTConfig
from fusestep.models.gpt import INITIAL_STD

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

#: Elements of gradients that are reduced at a time where no engine of torch's does it.
_REDUCED_AT_ONCE = 1 << 24


class Spread:
    """A model and how its ranks work together.

    Attributes:
        model: what the optimizer steps and a checkpoint holds; its parameters are DTensors where they are sharded.
        parallel, mesh: as given.
    """

    def __init__(self, model: GPT, mesh: DeviceMesh, parallel: Parallel, *, reduces_main_grads: bool) -> None:
        self.model = model
        self.mesh = mesh
        self.parallel = parallel
        self._reduces_main_grads = reduces_main_grads
        self._replicated: nn.parallel.DistributedDataParallel | None = None
        if parallel.data == "ddp" and not reduces_main_grads:
            devices = {parameter.device for parameter in model.parameters()}
            self._replicated = nn.parallel.DistributedDataParallel(
                _Loss(model),
                device_ids=[devices.pop()] if mesh.device_type == "cuda" else None,
                process_group=mesh[DATA].get_group(),
                gradient_as_bucket_view=True,
            )

    @property
    def is_sharded(self) -> bool:
        """Whether parameters are DTensors, each rank holding a part."""
        return self.parallel.data == "fsdp"

    def loss(self, tokens: Tensor, targets: Tensor, **options: Any) -> Tensor:
        """`GPT.loss`, through what reduces its gradients."""
        loss: Tensor = (self._replicated or self.model.loss)(tokens, targets, **options)
        return loss

    @contextmanager
    def micro_batch(self, *, is_last: bool) -> Iterator[None]:
        """Around the forward and backward pass of a micro-batch: gradients are averaged after the last one alone."""
        if self.is_sharded:
            model: Any = self.model
            model.set_requires_gradient_sync(is_last)
            model.set_is_last_backward(is_last)
        holds = self._replicated is not None and not is_last
        with self._replicated.no_sync() if holds and self._replicated is not None else nullcontext():
            yield
        if is_last and self._reduces_main_grads:
            average_main_grads(self.model, self.mesh[DATA].get_group())

    def rest(self) -> None:
        """After passes without a backward one: give back what they gathered."""
        if self.is_sharded:
            model: Any = self.model
            model.reshard()


def spread_gpt(
    config: GPTConfig,
    mesh: DeviceMesh,
    parallel: Parallel,
    *,
    device: torch.device,
    dtype: torch.dtype,
    compute: torch.dtype | None = None,
    checkpoint_blocks: bool = False,
    reduces_main_grads: bool = False,
) -> Spread:
    """Build a GPT over a mesh, with initial values from the default generator of the CPU, which all ranks seeded alike.

    Args:
        mesh, parallel: see `fusestep.distributed.mesh`.
        dtype: of the parameters. compute: that of autocast, in which sharded fp32 weights travel; None: in their own.
        checkpoint_blocks: see GPT.
        reduces_main_grads: gradients are summed in `main_grad` (fusestep.optim.accumulate_in_fp32), which torch's
            engines do not look at, and are averaged from there.
    """
    if parallel.data == "fsdp":
        model = GPT(config, device="meta", dtype=dtype)
        model.checkpoint_blocks = checkpoint_blocks
        _split_products(model, mesh, parallel)
        shard(model, mesh[DATA], compute)
        model.to_empty(device=device)
        draw_weights(model)
    elif parallel.tensor > 1:
        model = GPT(config, device="meta", dtype=dtype)
        model.checkpoint_blocks = checkpoint_blocks
        _split_products(model, mesh, parallel)
        model.to_empty(device=device)
        draw_weights(model)
    else:
        model = GPT(config, device=device, dtype=dtype)
        model.checkpoint_blocks = checkpoint_blocks
    return Spread(model, mesh, parallel, reduces_main_grads=reduces_main_grads and parallel.data == "ddp")


def _split_products(model: GPT, mesh: DeviceMesh, parallel: Parallel) -> None:
    if parallel.tensor > 1:
        raise NotImplementedError((model, mesh[TENSOR]))


def shard(model: GPT, mesh: DeviceMesh, compute: torch.dtype | None) -> None:
    """Shard each block, and then what is left, over a one-dimensional mesh, in place (FSDP2).

    Args:
        compute: fp32 weights are gathered in this dtype and their gradients reduced in fp32; None: in their own.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    is_narrowed = compute not in (None, torch.float32)
    policy = MixedPrecisionPolicy(
        param_dtype=compute if is_narrowed else None,
        reduce_dtype=torch.float32,
        # Token ids and the residual stream stay what they are.
        cast_forward_inputs=False,
    )
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    register_fsdp_forward_method(model, "loss")


@torch.no_grad()
def draw_weights(model: GPT) -> None:
    """`GPT.reset_parameters` where parameters are DTensors: each rank draws all of a parameter and keeps its part."""
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            whole = torch.empty(parameter.shape, device="cpu", dtype=torch.float32).normal_(0.0, INITIAL_STD)
        else:
            whole = torch.full(parameter.shape, 0.0 if name.endswith("bias") else 1.0, dtype=torch.float32)
        local(parameter).copy_(part_of(whole, parameter))


def local(parameter: Tensor) -> Tensor:
    """This rank's part of a parameter: all of it, unless it is a DTensor."""
    held: Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return held


def part_of(whole: Tensor, like: Tensor) -> Tensor:
    """This rank's part of a whole tensor that is laid out as `like`.

    FSDP cuts what tensor parallelism has cut already, so the last dimension of a mesh cuts first.
    """
    if not hasattr(like, "to_local"):
        return whole
    layout: Any = like
    coordinates = layout.device_mesh.get_coordinate()
    part = whole
    for number, placement in reversed(list(enumerate(layout.placements))):
        if placement.is_replicate():
            continue
        chunks = part.chunk(layout.device_mesh.size(number), placement.dim)
        place = coordinates[number]
        part = chunks[place] if place < len(chunks) else part.narrow(placement.dim, 0, 0)
    return part


class _Loss(nn.Module):
    """A GPT's loss as a forward pass, which is what DistributedDataParallel wraps."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, targets: Tensor, **options: Any) -> Tensor:
        return self.model.loss(tokens, targets, **options)


@torch.no_grad()
def average_main_grads(model: nn.Module, group: distributed.ProcessGroup) -> None:
    """Replace each `main_grad` by its mean over a group's ranks, many in one collective."""
    if group.size() == 1:
        return
    batch: list[Tensor] = []
    for parameter in [*model.parameters(), None]:
        gradient = getattr(parameter, "main_grad", None)
        if isinstance(gradient, Tensor):
            batch.append(gradient)
        if batch and (parameter is None or sum(one.numel() for one in batch) >= _REDUCED_AT_ONCE):
            flat = torch.cat([one.reshape(-1) for one in batch])
            distributed.all_reduce(flat, group=group)
            flat /= group.size()
            for one, mean in zip(batch, flat.split([one.numel() for one in batch]), strict=True):
                one.copy_(mean.view_as(one))
            batch = []
