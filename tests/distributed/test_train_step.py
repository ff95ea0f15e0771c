"""TrainStep where several ranks train a model together: the steps of one process, reductions once a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from fusestep import TrainStep
from fusestep.graph import ranks
from fusestep.optim import FusedAdam
from harness import placed, run_ranks

STEPS, ROWS = 4, 8


def model_of() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 3))


def batches(steps: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [
        (torch.randn(ROWS, 5, generator=generator), torch.randn(ROWS, 3, generator=generator)) for _ in range(steps)
    ]


def square_error(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(model(x), y)


def losses(
    model: nn.Module, rank: int, count: int, accumulate: int, steps: int = STEPS
) -> tuple[list[float], str | None, float]:
    optimizer = FusedAdam(model.parameters(), lr=1e-2, max_grad_norm=0.5)
    step = TrainStep(model, square_error, optimizer, accumulate=accumulate)
    found = []
    for x, y in batches(steps):
        # By micro-batches, so that ranks together have those of one process.
        parts = [torch.cat([one.chunk(count)[rank] for one in whole.chunk(accumulate)]) for whole in (x, y)]
        found.append(float(step(*parts)))
    return found, step.fallback, float(optimizer.last_grad_norm)


def train_on(rank: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for accumulate in (1, 2):
        replicated = DistributedDataParallel(model_of())
        buckets = [0]

        def counted(state, bucket, buckets=buckets):  # type: ignore[no-untyped-def]  # torch looks at annotations
            buckets[0] += 1
            work = torch.distributed.all_reduce(bucket.buffer().div_(2), async_op=True)
            return work.get_future().then(lambda future: future.value()[0])

        replicated.register_comm_hook(None, counted)
        results[f"ddp-{accumulate}"] = (*losses(replicated, rank, 2, accumulate), buckets[0])
        sharded = model_of()
        mesh = init_device_mesh("cpu", (2,))
        fully_shard(sharded[2], mesh=mesh)
        fully_shard(sharded, mesh=mesh)
        results[f"fsdp-{accumulate}"] = (*losses(sharded, rank, 2, accumulate), 0)
    results["warm-up"] = ranks.warm_up(nn.Sequential(replicated), 3), ranks.warm_up(sharded, 3)
    results["obstacle"] = ranks.obstacle(replicated), ranks.obstacle(sharded), ranks.obstacle(model_of())
    return results


def test_ranks_take_the_steps_of_one_process_and_say_why_they_are_not_captured() -> None:
    first, second = run_ranks(train_on, 2)
    for accumulate in (1, 2):
        expected, _, norm = losses(model_of(), 0, 1, accumulate)
        for kind in ("ddp", "fsdp"):
            name = f"{kind}-{accumulate}"
            both = [(a + b) / 2 for a, b in zip(first[name][0], second[name][0], strict=True)]
            assert both == pytest.approx(expected, rel=1e-5)
            assert first[name][2] == pytest.approx(norm, rel=1e-5)
            assert "CUDA graphs run on CUDA devices" in first[name][1]
        assert first[f"ddp-{accumulate}"][3] == STEPS  # one bucket, reduced once a step
    assert first["warm-up"] == (11, 3)
    over_gloo = "the ranks reduce gradients over gloo, whose collectives are work of the host; make the process group"
    assert all(one.startswith(over_gloo) for one in first["obstacle"][:2])
    assert first["obstacle"][2] is None


def replay_on(rank: int, steps: int) -> dict[str, Any]:
    aside = torch.cuda.Stream()
    with torch.cuda.stream(aside):
        replicated = DistributedDataParallel(model_of(), device_ids=[rank])
    torch.cuda.current_stream().wait_stream(aside)
    sharded = fully_shard(model_of(), mesh=init_device_mesh("cuda", (2,)))
    return {"ddp": losses(replicated, rank, 2, 1, steps), "fsdp": losses(sharded, rank, 2, 1, steps)}


@pytest.mark.gpu
@pytest.mark.parametrize("ranks_device", ["cuda"], indirect=True)
@pytest.mark.usefixtures("ranks_device")
def test_ranks_on_gpus_replay_the_steps_of_one_process() -> None:
    """DistributedDataParallel is captured after eleven steps, fully_shard after three."""
    first, second = run_ranks(replay_on, 2, 16)
    with placed():
        expected, fallback, norm = losses(model_of(), 0, 1, 1, 16)
    assert fallback is None
    for kind in ("ddp", "fsdp"):
        both = [(a + b) / 2 for a, b in zip(first[kind][0], second[kind][0], strict=True)]
        assert both == pytest.approx(expected, rel=1e-5)
        assert first[kind][1] is None
        assert first[kind][2] == pytest.approx(norm, rel=1e-4)
