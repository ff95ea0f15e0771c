"""Bytes that a plan names are bytes that models and optimizers take."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from fusestep.distributed.groups import local_of
from fusestep.distributed.mesh import Parallel
from fusestep.distributed.parallelize import spread_gpt
from fusestep.models import GPT, GPTConfig
from fusestep.optim import FusedAdam
from fusestep.plan import Shape, Work, estimate
from fusestep.plan.memory import held

CONFIG = GPTConfig(vocab_size=112, width=64, heads=4, layers=3, ffn_width=168, context=24)


def named(work: Work) -> dict[str, float]:
    return {line.name: line.amount for line in estimate(work).memory}


@pytest.mark.parametrize(("dtype", "store"), [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)])
def test_weights_masters_moments_and_gradients(dtype: torch.dtype, store: bool) -> None:
    model = GPT(CONFIG, dtype=dtype)
    is_narrow = dtype is torch.bfloat16
    optimizer = FusedAdam(model.parameters(), master_weights=is_narrow, store_param_remainders=store)
    tokens = torch.randint(112, (2, 24))
    model.loss(tokens, tokens).backward()
    gradients = sum(one.grad.nbytes for one in model.parameters() if one.grad is not None)
    optimizer.step()
    state = sum(
        value.nbytes for one in optimizer.state.values() for value in one.values() if getattr(value, "ndim", 0) > 0
    )
    kind = "bf16" if is_narrow else "fp32"
    work = Work(Shape.of(CONFIG), batch=2, precision=kind, weights=kind, remainders=store, keeps_gradients=True)
    lines = named(work)
    assert lines["weights"] == sum(one.nbytes for one in model.parameters())
    kept = "remainders of masters" if store else "master weights, fp32"
    assert lines["moments, fp32"] + lines.get(kept, 0) == state
    assert lines["gradients"] == gradients


@pytest.fixture
def _world() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_world")
@pytest.mark.parametrize("parallel", ["fsdp", "fsdp,tp=2", "ddp,tp=4", "fsdp,tp=4,sp"])
def test_ranks_hold_their_part(parallel: str) -> None:
    asked = Parallel.of(parallel)
    spread = spread_gpt(CONFIG, asked.mesh("cpu", 8), asked, device=torch.device("cpu"), dtype=torch.float32)
    own = sum(local_of(one).numel() for one in spread.model.parameters())
    work = Work(Shape.of(CONFIG), batch=8, parallel=parallel, gpus=8)
    assert named(work)["weights"] / 4 == pytest.approx(own, rel=0.005)


def test_the_fullest_moment_is_where_backward_begins_or_where_it_ends() -> None:
    shape = Shape.of(CONFIG)
    few, many = (Work(shape, batch=batch) for batch in (1, 4096))
    # A few tokens: all gradients stand beside what one block keeps. Many: activations outweigh all gradients.
    assert 0 < named(few)["gradients"] < 4 * held(shape, 1)
    assert named(many)["gradients"] == 0
    both = named(Work(shape, batch=1, accumulate=2))
    assert both["gradients"] == 4 * held(shape, 1)


def test_sharded_micro_batches_sum_whole_gradients() -> None:
    shape = Shape.of(CONFIG)
    name = "whole gradients of micro-batches, fp32"
    assert name not in named(Work(shape, batch=8, parallel="fsdp", gpus=8))
    found = named(Work(shape, batch=8, parallel="fsdp", gpus=8, accumulate=3))
    assert found[name] == 4 * shape.parameters


def test_recomputation_and_eight_bits_keep_less() -> None:
    shape = Shape.of(CONFIG)
    bf16, fp8, again = (
        named(Work(shape, batch=512, precision=precision, activation_checkpointing=recomputes))["activations"]
        for precision, recomputes in (("bf16", False), ("fp8", False), ("bf16", True))
    )
    assert again < fp8 < bf16
