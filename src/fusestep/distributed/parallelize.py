"""A GPT over the ranks of a mesh: replicated with its gradients averaged, sharded block by block, its products shared.

    spread = spread_gpt(config, mesh, Parallel.of("fsdp,tp=2"), device=device, dtype=torch.float32)
    with spread.micro_batch(is_last=True):
        spread.loss(tokens, targets, reduction="mean").backward()
    optimizer.step()             # over spread.model.parameters()

The same seed gives the same weights on any number of ranks, sharded or not: initial values are those of the whole
model, of which each rank keeps its part.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed, nn

from fusestep.distributed.groups import is_dtensor, local_of, own_part
from fusestep.distributed.mesh import DATA, TENSOR, Parallel
from fusestep.fp8 import MXFP8BlockScaling, gather_in_fp8
from fusestep.fp8.recipes import Recipe
from fusestep.models import GPT, GPTConfig
from fusestep.models.gpt import INITIAL_STD

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

#: Elements of gradients that are reduced at a time where no engine of torch's does it.
_REDUCED_AT_ONCE = 1 << 24


class Spread:
    """A model and how its ranks work together.

    Replicated parameters are torch's DistributedDataParallel's to average, except DTensors and gradients that are
    summed in `main_grad`, of which it knows nothing: those are averaged after the last micro-batch.

    Attributes:
        model: what the optimizer steps and a checkpoint holds; its parameters are DTensors where they are sharded.
        parallel, mesh: as given.
    """

    def __init__(self, model: GPT, mesh: DeviceMesh, parallel: Parallel, *, has_main_grads: bool) -> None:
        self.model = model
        self.mesh = mesh
        self.parallel = parallel
        #: Whether each rank holds a part of every parameter only (FSDP2).
        self.is_sharded = hasattr(model, "set_requires_gradient_sync")
        self._replicated: nn.parallel.DistributedDataParallel | None = None
        # One replica has nothing to average, and need not copy its gradients into buckets.
        has_replicas = parallel.data == "ddp" and mesh[DATA].size() > 1
        self._averages = has_replicas and (has_main_grads or parallel.tensor > 1)
        if has_replicas and not self._averages:
            self._replicated = replicate(model, mesh[DATA])

    @property
    def module(self) -> nn.Module:
        """What `loss` calls: the model, or what wraps it."""
        return self._replicated or self.model

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
        waits = self._replicated is not None and not is_last
        with self._replicated.no_sync() if waits and self._replicated is not None else nullcontext():
            yield
        if is_last and self._averages:
            average_gradients(self.model, self.mesh[DATA].get_group())

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
    fp8_recipe: Recipe | None = None,
    checkpoint_blocks: bool = False,
    has_main_grads: bool = False,
) -> Spread:
    """Build a GPT over a mesh, with initial values from the default generator of the CPU, which all ranks seeded alike.

    Args:
        mesh, parallel: see `fusestep.distributed.mesh`.
        dtype: of the parameters. compute: that of autocast, in which sharded fp32 blocks travel; None: in their own.
        fp8_recipe: of the regions around the loss; sharded weights travel in FP8 then, where the recipe lets them.
        checkpoint_blocks: see GPT.
        has_main_grads: gradients are summed in `main_grad` (fusestep.optim.accumulate_in_fp32).
    Raises: UserError for a model that the ranks cannot share.
    """
    # One rank has nothing to share out.
    is_sharded = parallel.data == "fsdp" and mesh[DATA].size() > 1
    is_whole = not is_sharded and parallel.tensor == 1
    model = GPT(config, device=device if is_whole else "meta", dtype=dtype)
    model.checkpoint_blocks = checkpoint_blocks
    share_products(model, mesh[TENSOR], parallel)
    if is_sharded:
        shard(model, mesh[DATA], compute, fp8_recipe)
    if not is_whole:
        model.to_empty(device=device)
        draw_weights(model)
    return Spread(model, mesh, parallel, has_main_grads=has_main_grads)


def share_products(model: GPT, mesh: DeviceMesh, parallel: Parallel) -> None:
    """Share the products of a model over a one-dimensional mesh, in place (tensor parallelism)."""
    if parallel.tensor > 1:
        from torch.distributed.tensor.parallel import parallelize_module

        from fusestep.distributed.plans import GPTParallel

        parallelize_module(model, mesh, GPTParallel(sequence_parallel=parallel.by_sequence))


def replicate(model: GPT, mesh: DeviceMesh) -> nn.parallel.DistributedDataParallel:
    """What calls `model.loss`, and averages the gradients over a one-dimensional mesh in backward."""
    devices = {parameter.device for parameter in model.parameters()}
    return nn.parallel.DistributedDataParallel(
        _Loss(model),
        device_ids=[devices.pop()] if mesh.device_type == "cuda" else None,
        process_group=mesh.get_group(),
        gradient_as_bucket_view=True,
    )


def shard(model: GPT, mesh: DeviceMesh, compute: torch.dtype | None, fp8_recipe: Recipe | None) -> None:
    """Shard each block, and then what is left, over a one-dimensional mesh, in place (FSDP2).

    Gradients are reduced in fp32. What is not in a block travels in its own dtype, so that the residual stream has the
    dtype that it has without sharding.

    Args: compute, fp8_recipe: see `spread_gpt`.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    is_shared = any(is_dtensor(parameter) for parameter in model.parameters())
    travels_in_fp8 = not is_shared and fp8_recipe is not None and not isinstance(fp8_recipe, MXFP8BlockScaling)
    if travels_in_fp8:
        gather_in_fp8(model, fp8_recipe)
    # Nothing here adds to a block's output in place, which is what the warning is about.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    narrow = None if travels_in_fp8 or compute == torch.float32 else compute
    in_block = MixedPrecisionPolicy(narrow, torch.float32, cast_forward_inputs=False)
    outside = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=in_block)
    fully_shard(model, mesh=mesh, mp_policy=outside)
    register_fsdp_forward_method(model, "loss")


@torch.no_grad()
def draw_weights(model: GPT) -> None:
    """`GPT.reset_parameters` where parameters are DTensors: each rank draws all of a parameter and keeps its part."""
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            whole = torch.empty(parameter.shape, device="cpu", dtype=torch.float32).normal_(0.0, INITIAL_STD)
        else:
            whole = torch.full(parameter.shape, 0.0 if name.endswith("bias") else 1.0, dtype=torch.float32)
        local_of(parameter).copy_(whole[own_part(parameter)] if is_dtensor(parameter) else whole)


class _Loss(nn.Module):
    """A GPT's loss as a forward pass, which is what DistributedDataParallel wraps."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, targets: Tensor, **options: Any) -> Tensor:
        return self.model.loss(tokens, targets, **options)


@torch.no_grad()
def average_gradients(model: nn.Module, group: distributed.ProcessGroup) -> None:
    """Replace each gradient, that in `main_grad` where there is one, by its mean over a group's ranks.

    Many of one dtype go in one collective.
    """
    if group.size() == 1:
        return
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for parameter in model.parameters():
        main = getattr(parameter, "main_grad", None)
        gradient = main if isinstance(main, Tensor) else parameter.grad
        if gradient is not None:
            by_dtype.setdefault(gradient.dtype, []).append(local_of(gradient))
    for gradients in by_dtype.values():
        batch: list[Tensor] = []
        for number, gradient in enumerate(gradients, 1):
            batch.append(gradient)
            if number == len(gradients) or sum(one.numel() for one in batch) >= _REDUCED_AT_ONCE:
                flat = torch.cat([one.reshape(-1) for one in batch])
                distributed.all_reduce(flat, group=group)
                flat /= group.size()
                for one, mean in zip(batch, flat.split([one.numel() for one in batch]), strict=True):
                    one.copy_(mean.view_as(one))
                batch = []
