"""The harness tells what became of each rank, and waits for none for ever."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch

import harness
from harness import RanksFailedError, run_ranks


def add(rank: int, amount: torch.Tensor) -> dict[str, Any]:
    total = amount * (rank + 1)
    torch.distributed.all_reduce(total)
    return {"total": total, "rank": rank, "setting": os.environ["SETTING"], "threads": torch.get_num_threads()}


def misbehave(rank: int, how: str) -> int:
    torch.distributed.barrier()  # one that dies sooner may leave the other still connecting, which fails then too
    if rank == 1:
        if how == "raises":
            raise ValueError("one is the odd one out")
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "sleeps":
            time.sleep(60)
    return rank


def test_ranks_share_a_group_and_return_by_rank() -> None:
    amount = torch.tensor([1.5, -2.0])
    results = run_ranks(add, 3, amount, environment={"SETTING": "on"})
    assert [one["rank"] for one in results] == [0, 1, 2]
    assert all(torch.equal(one["total"], amount * 6) for one in results)
    assert all(one["setting"] == "on" and one["threads"] == 1 for one in results)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("raises", "ValueError: one is the odd one out"),
        ("dies", "rank 1 died with exit code -9"),
        ("sleeps", "rank 1 was stopped"),
    ],
)
def test_a_rank_that_gives_no_result_is_named(how: str, words: str) -> None:
    started = time.monotonic()
    with pytest.raises(RanksFailedError, match=words) as caught:
        run_ranks(misbehave, 2, how, timeout=4.0)
    assert time.monotonic() - started < 15
    assert caught.value.outcomes[0].result == 0


def introduce(rank: int, amount: torch.Tensor) -> dict[str, Any]:
    made, drawn = torch.ones(2), torch.randn(3, generator=torch.Generator().manual_seed(3))
    torch.distributed.all_reduce(made)
    return {
        "backend": torch.distributed.get_backend(),
        "places": [str(one.device) for one in (amount, made, drawn)],
        "sum": made,
        "drawn": drawn,
        "multicast": os.environ.get("NCCL_NVLS_ENABLE"),
    }


def test_ranks_compute_where_they_are_told_with_the_same_random_numbers(ranks_device: str) -> None:
    on_gpu = ranks_device == "cuda"
    results = run_ranks(introduce, 2, torch.ones(1))
    for rank, one in enumerate(results):
        assert one["backend"] == ("nccl" if on_gpu else "gloo")
        assert one["places"] == [f"cuda:{rank}" if on_gpu else "cpu"] * 3
        assert torch.equal(one["sum"], torch.full((2,), 2.0))
        assert torch.equal(one["drawn"], torch.randn(3, generator=torch.Generator().manual_seed(3)))
        assert one["multicast"] == ("0" if on_gpu else None)


@pytest.mark.parametrize(("gpus", "words"), [(1, "there is 1"), (0, "there are 0")])
def test_with_fewer_gpus_than_ranks_a_test_is_skipped(gpus: int, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "device_type", "cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with pytest.raises(pytest.skip.Exception, match=f"2 ranks need a GPU each, and {words}"):
        run_ranks(introduce, 2, torch.ones(1))
