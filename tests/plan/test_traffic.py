"""What a plan says is sent is what FSDP2 and tensor parallelism send: counted here over a group that sends nothing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fusestep.distributed.mesh import Parallel
from fusestep.distributed.parallelize import spread_gpt
from fusestep.models import GPTConfig
from fusestep.plan import Shape, Work, measured_rates
from fusestep.plan.traffic import Message, bandwidth, messages
from fusestep.plan.work import Group

RANKS = 8
#: Messages of so many numbers, such as the table of positions, are not what takes time.
FEW = 4096
CONFIG = GPTConfig(vocab_size=96, width=64, heads=4, layers=3, ffn_width=160, context=64)


class Sent(TorchDispatchMode):
    """Sums the bytes of each collective's whole message, by kind and dtype; messages of a few numbers do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: dict[str, int] = defaultdict(int)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        namespace, name = str(func).split(".")[:2]
        if namespace == "c10d":
            tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
            largest = max(tensors, key=Tensor.numel)
            if largest.numel() > FEW:
                self.bytes[name] += largest.numel() * largest.element_size()
        return result


@pytest.fixture
def _world() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield
    dist.destroy_process_group()


def counted(parallel: str, batch: int, *, recomputes: bool = False) -> dict[str, int]:
    """Bytes of whole messages of a step with one micro-batch."""
    asked = Parallel.of(parallel)
    torch.manual_seed(0)
    spread = spread_gpt(
        CONFIG,
        asked.mesh("cpu", RANKS),
        asked,
        device=torch.device("cpu"),
        dtype=torch.float32,
        compute=torch.bfloat16,
        checkpoint_blocks=recomputes,
    )
    tokens = torch.randint(96, (batch // (RANKS // asked.tensor), CONFIG.context))
    with Sent() as sent, torch.autocast("cpu", torch.bfloat16), spread.micro_batch(is_last=True):
        spread.loss(tokens, tokens).backward()
    return dict(sent.bytes)


def planned(parallel: str, batch: int, **options: Any) -> list[Message]:
    work = Work(
        Shape.of(CONFIG), batch=batch, precision="bf16", parallel=parallel, gpus=RANKS, gpus_per_node=RANKS, **options
    )
    return [one for one in messages(work) if one.size > 2 * FEW]


@pytest.mark.usefixtures("_world")
@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("parallel", ["fsdp", "fsdp,tp=4", "fsdp,tp=2,sp"])
def test_a_step_sends_what_the_plan_says(parallel: str, recomputes: bool) -> None:
    found = counted(parallel, 8, recomputes=recomputes)
    expected: dict[str, float] = defaultdict(float)
    for one in planned(parallel, 8, activation_checkpointing=recomputes):
        if "trade" in one.name:
            expected["alltoall_base_"] += one.size * one.calls
        elif one.passes == 2:
            expected["allreduce_"] += one.size * one.calls
        else:
            expected["gathered and scattered"] += one.size * one.calls
    both = found.pop("_allgather_base_", 0) + found.pop("_reduce_scatter_base_", 0)
    assert both == pytest.approx(expected.pop("gathered and scattered"), rel=0.02)
    assert found == pytest.approx(dict(expected), rel=0.02)


def test_a_ring_sends_its_share_over_the_narrowest_way() -> None:
    rates = measured_rates().with_changes({"link": 300e9, "network": 50e9, "hop": 1e-6})
    assert bandwidth(Group(8, 8), rates) == 300e9
    assert bandwidth(Group(16, 1), rates) == 50e9
    assert bandwidth(Group(16, 4), rates) == 200e9  # four ports
    assert bandwidth(Group(16, 8), rates) == 300e9  # eight ports, which the link does not fill
    gather = Message("", 1, 8e9, 3, Group(16, 1), "", "", "")
    assert gather.sent() == 7.5e9
    assert gather.seconds(rates) == pytest.approx(7.5e9 / 50e9 + 4e-6)
    reduce = Message("", 2, 8e9, 3, Group(2, 2), "", "", "").line(rates)
    assert reduce.sent == 3 * 8e9
    assert reduce.amount == pytest.approx(3 * (8e9 / 300e9 + 1e-6))


def test_ranks_that_hold_the_same_average_what_they_hold() -> None:
    shape = Shape.of(CONFIG)
    (ddp,) = planned("ddp", 8)
    assert ddp.size * ddp.calls == pytest.approx(4 * shape.parameters)
    assert (ddp.passes, ddp.group) == (2, Group(8, 8))
    hybrid = {one.name: one for one in planned("fsdp", 8, shard_over=4)}
    assert hybrid["gather weights, forward"].group == Group(4, 4)
    average = hybrid["average gradients"]
    assert average.group == Group(2, 2)
    assert average.size * average.calls == pytest.approx(4 * shape.parameters / 4)
