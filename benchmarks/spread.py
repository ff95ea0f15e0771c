"""A GPT's step over the ranks of a world: the same weights and the same sequences however it is spread.

What world.py (one rank) and ranks.py (several) are made of, with plain PyTorch's step beside ours. This module must not
touch a device when it is imported.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.training import drawn
from fusestep import TrainStep
from fusestep.distributed.launch import World
from fusestep.distributed.mesh import DATA, TENSOR, Parallel
from fusestep.distributed.parallelize import Spread, replicate, shard, share_products
from fusestep.fp8 import DelayedScaling
from fusestep.fp8.recipes import Recipe
from fusestep.ladder.torch_step import TorchStep
from fusestep.models import GPT, GPTConfig
from fusestep.optim import FusedAdam

PRECISIONS: dict[str, Recipe | None] = {"bf16": None, "fp8": DelayedScaling(amax_history_len=16)}
LR, WEIGHT_DECAY, MAX_NORM = 1e-4, 0.01, 1.0


def built(
    config: GPTConfig,
    mesh: DeviceMesh,
    parallel: Parallel,
    recipe: Recipe | None,
    device: torch.device,
    *,
    always: bool = False,
) -> Spread:
    """A model over a mesh, made as the trainer makes it, with values drawn on the device.

    Args:
        always: replicate or shard over one rank too, which the trainer does not do.
    """
    made = GPT(config, device="meta", dtype=torch.float32)
    share_products(made, mesh[TENSOR], parallel)
    if parallel.data == "fsdp" and (always or mesh[DATA].size() > 1):
        shard(made, mesh[DATA], torch.bfloat16, recipe)
    drawn(made.to_empty(device=device), device)
    return Spread(made, mesh, parallel, has_main_grads=False)


def train_step(
    config: GPTConfig,
    mesh: DeviceMesh,
    parallel: Parallel,
    recipe: Recipe | None,
    device: torch.device,
    *,
    graph: bool,
    always: bool = False,
) -> TrainStep:
    """TrainStep of such a model under FusedAdam, the norm clipped; it takes tokens and targets of this rank."""
    # DistributedDataParallel's work on gradients stays on the stream that it was made on, which has to be one that a
    # graph can hold.
    aside = torch.cuda.Stream(device) if device.type == "cuda" else None
    if aside is not None:
        aside.wait_stream(torch.cuda.current_stream(device))
    with contextlib.nullcontext() if aside is None else torch.cuda.stream(aside):
        spread = built(config, mesh, parallel, recipe, device, always=always)
        module, loss = spread.module, spread.loss
        if always and parallel.data == "ddp":
            module = loss = replicate(spread.model, mesh[DATA])
    if aside is not None:
        torch.cuda.current_stream(device).wait_stream(aside)
    return TrainStep(
        module,
        lambda _, tokens, targets: loss(tokens, targets),
        FusedAdam(spread.model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY, max_grad_norm=MAX_NORM),
        autocast=torch.bfloat16,
        fp8_recipe=recipe,
        capture=graph,
    )


def native_step(
    config: GPTConfig, mesh: DeviceMesh, device: torch.device, *, shards: bool, compiles: bool
) -> tuple[TorchStep, Callable[[], Tensor]]:
    """Plain PyTorch's step as its documentation has it, in bf16, and what tells the last gradient's norm.

    Under DDP the module is compiled whole, within autocast; under FSDP2 (`shards`) each block is compiled, then
    sharded, and computes in bf16.

    Args:
        mesh: of one dimension.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch._dynamo.reset()
    made = GPT(dataclasses.replace(config, form="plain", norm="torch"), device="meta", dtype=torch.float32)
    if shards:
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        for block in made.blocks:
            if compiles:
                block.compile()
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(made, mesh=mesh, mp_policy=policy)
    model: nn.Module = drawn(made.to_empty(device=device), device)
    if not shards:
        devices = [device] if device.type == "cuda" else None
        model = nn.parallel.DistributedDataParallel(
            model, device_ids=devices, process_group=mesh.get_group(), gradient_as_bucket_view=True
        )
        model = torch.compile(model) if compiles else model  # type: ignore[assignment]
    loss_of = torch.compile(_loss) if compiles else _loss
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY, fused=True)
    norms: list[Tensor] = []

    def clip(*_: Any) -> None:
        norms[:] = [nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)]

    optimizer.register_step_pre_hook(clip)

    def norm() -> Tensor:
        whole: Tensor = getattr(norms[0], "full_tensor", lambda: norms[0])()
        return whole

    step = TorchStep(
        lambda tokens, targets: loss_of(model(tokens), targets),
        optimizer,
        device,
        autocast=None if shards else torch.bfloat16,
        words="torch.optim.AdamW (fused)",
    )
    return step, norm


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def sequences(config: GPTConfig, total: int, rank: int, ranks: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens and targets of one of `ranks` ranks that share `total` random sequences evenly."""
    whole = torch.randint(config.symbols, (total, config.context + 1), generator=torch.Generator().manual_seed(1))
    share = total // ranks
    own = whole[rank * share : (rank + 1) * share].to(device)
    return own[:, :-1].contiguous(), own[:, 1:].contiguous()


def mesh_of(world: World, parallel: Parallel, known: dict[int, Any]) -> DeviceMesh:
    """The mesh of all ranks, made once for each size of tensor groups and kept in `known`; collective."""
    # A rank by itself uses nothing of its mesh.
    asked = Parallel.of("ddp") if parallel.is_alone else parallel
    if asked.tensor not in known:
        known[asked.tensor] = asked.mesh(world.device.type, world.size)
    mesh: DeviceMesh = known[asked.tensor]
    return mesh
