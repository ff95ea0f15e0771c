"""Rolling: which states roll, by which algorithm, over which ranks."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor

from fusestep.errors import UserError
from fusestep.fp8 import DelayedScaling
from fusestep.fp8.pending import MOST_PLANS, Pending
from fusestep.fp8.state import Slots

CPU = torch.device("cpu")


def states(
    count: int, device: torch.device = CPU, names: tuple[str, ...] = ("input", "grad"), **settings: Any
) -> list[Slots]:
    recipe = DelayedScaling(**({"amax_history_len": 4} | settings))
    return [Slots(names, recipe, device) for _ in range(count)]


def record(pending: Pending, *amaxes: tuple[Slots, float]) -> None:
    for state, amax in amaxes:
        state.amax.copy_(torch.maximum(state.amax, torch.full_like(state.amax, amax)))
        pending.add(state)


def test_only_what_recorded_rolls(device: torch.device) -> None:
    ran, idle = states(2, device)
    pending = Pending()
    record(pending, (ran, 2.0), (idle, 4.0))
    pending.roll()
    before = idle.slots.clone(), idle.history.clone()
    for _ in range(6):
        record(pending, (ran, 1.0))
        pending.roll()
    assert ran.scale[0] == 448.0
    assert torch.equal(idle.slots, before[0])
    assert torch.equal(idle.history, before[1])


def test_recording_twice_is_recording_once(device: torch.device) -> None:
    once, twice = states(2, device)
    pending = Pending()
    record(pending, (once, 3.0), (twice, 1.0), (twice, 3.0), (twice, 3.0))
    pending.roll()
    pending.roll()
    assert torch.equal(once.slots, twice.slots)
    assert twice.rolls.tolist() == [1, 1]


def test_recipes_and_lengths_roll_side_by_side(device: torch.device) -> None:
    plain, recent, wide, chosen = (
        states(1, device, **settings)[0]
        for settings in (
            {},
            {"amax_compute_algo": "most_recent"},
            {"margin": 2, "amax_history_len": 1},
            {"amax_compute_algo": lambda history: history.amin(0) + 2},
        )
    )
    pending = Pending()
    for amax in (8.0, 4.0):
        record(pending, *((state, amax) for state in (plain, recent, wide, chosen)))
        pending.roll()
    assert [state.scale[0].item() for state in (plain, recent, wide, chosen)] == [56.0, 112.0, 28.0, 224.0]


def test_the_order_of_modules_does_not_matter_and_plans_are_bounded() -> None:
    made = states(3)
    pending = Pending()
    for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
        record(pending, *((made[place], 2.0) for place in order))
        pending.roll()
    assert len(pending._plans) == 1
    for _ in range(MOST_PLANS + 5):
        record(pending, (states(1)[0], 1.0))
        pending.roll()
    assert len(pending._plans) <= MOST_PLANS
    record(pending, *((state, 4.0) for state in made))
    pending.roll()
    assert all(state.rolls.tolist() == [4, 4] for state in made)


def test_a_copy_of_what_is_pending_is_empty() -> None:
    pending = Pending()
    (state,) = states(1)
    record(pending, (state, 2.0))
    for copied in (copy.deepcopy(pending), pickle.loads(pickle.dumps(pending))):
        copied.roll()
        assert state.scale[0] == 0.0
    pending.roll()
    assert state.scale[0] == 224.0


# A callable


def test_a_callable_sees_the_history_oldest_first(device: torch.device) -> None:
    seen: list[Tensor] = []

    def algorithm(history: Tensor) -> Tensor:
        seen.append(history.clone())
        return history.amax(0)

    (state,) = states(1, device, amax_compute_algo=algorithm)
    pending = Pending()
    for amax in (1.0, 2.0, 3.0):
        record(pending, (state, amax))
        pending.roll()
    assert seen[-1][:, 0].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert seen[-1].shape == (4, 2)
    assert state.scale[0] == torch.tensor(448.0) / 3


@pytest.mark.parametrize("unusable", [0.0, -1.0, math.inf, math.nan])
def test_where_a_callable_chooses_no_amax_the_old_scale_stays(unusable: float, device: torch.device) -> None:
    chosen = torch.tensor([4.0, 8.0], device=device)
    (state,) = states(1, device, amax_compute_algo=lambda history: chosen)
    pending = Pending()
    record(pending, (state, 2.0))
    pending.roll()
    assert state.scale.tolist() == [112.0, 57344 / 8]
    chosen[0] = unusable
    chosen[1] = 16.0
    record(pending, (state, 7.0))
    pending.roll()
    assert state.scale.tolist() == [112.0, 57344 / 16]
    assert state.rolls.tolist() == [2, 2]


def test_a_callable_does_not_renew_what_recorded_nothing_or_too_much(device: torch.device) -> None:
    (state,) = states(
        1, device, names=("input", "weight", "grad"), amax_compute_algo=lambda history: history.amax(0) + 1
    )
    pending = Pending()
    record(pending, (state, 3.0))
    pending.roll()
    state.amax.copy_(torch.tensor([math.nan, 0.0, 7.0]))
    pending.add(state)
    pending.roll()
    assert state.scale.tolist() == [112.0, 112.0, 57344 / 8]
    assert state.refused.tolist() == [1.0, 0.0, 0.0]
    assert state.rolls.tolist() == [1, 1, 2]


@pytest.mark.parametrize(
    ("algorithm", "words"),
    [
        (lambda history: history, r"returned \(4, 2\) on cpu for a history of \(4, 2\)"),
        (lambda history: history.amax(), r"returned \(\) on cpu"),
        (lambda history: history.amax(1), r"returned \(4,\) on cpu"),
        (lambda history: history.amax(0).to("meta"), r"returned \(2,\) on meta"),
        (lambda history: 3.0, "returned 3.0"),
        (lambda history: None, "returned None"),
    ],
)
def test_a_callable_that_returns_the_wrong_thing_is_refused_before_anything_changes(
    algorithm: Callable[[Tensor], Any], words: str
) -> None:
    (state,) = states(1, amax_compute_algo=algorithm)
    pending = Pending()
    record(pending, (state, 3.0))
    before = state.slots.clone()
    with pytest.raises(UserError, match=rf"{words}.*; return a tensor of one amax for each slot, \(2,\)"):
        pending.roll()
    assert torch.equal(state.slots, before)
    assert not state.history.any()


def test_a_callable_that_returns_the_wrong_thing_is_refused_until_it_is_mended() -> None:
    good, bad = states(2)
    bad.follow(DelayedScaling(amax_history_len=4, amax_compute_algo=lambda history: history))
    pending = Pending()
    record(pending, (good, 3.0), (bad, 2.0))
    for _ in range(3):
        with pytest.raises(UserError, match="amax_compute_algo returned"):
            pending.roll()
    bad.follow(DelayedScaling(amax_history_len=4, amax_compute_algo=lambda history: history.amax(0)))
    pending.roll()
    pending.roll()
    for state, amax in ((good, 3.0), (bad, 2.0)):
        assert state.rolls.tolist() == [1] * len(state.names)
        assert float(state.history.max()) == amax
        assert not state.amax.any()


# On the GPU


@pytest.mark.gpu
def test_a_roll_of_known_modules_does_not_wait_and_goes_into_a_graph(
    no_waiting: Callable[[], AbstractContextManager[None]],
) -> None:
    made = states(20, torch.device("cuda", 0), names=("input", "weight", "grad"))
    pending = Pending()
    record(pending, *((state, 2.0) for state in made))
    pending.roll()
    with no_waiting():
        for state in made:
            pending.add(state)
        pending.roll()
    graph = torch.cuda.CUDAGraph()
    for state in made:
        pending.add(state)
    with torch.cuda.graph(graph):
        pending.roll()
    for amax in (4.0, 8.0):
        for state in made:
            state.amax.fill_(amax)
        graph.replay()
    assert all(state.scale.tolist() == [56.0, 56.0, 7168.0] for state in made)
    assert all(state.rolls.tolist() == [3, 3, 3] for state in made)


@pytest.mark.gpu
def test_cpu_and_gpu_keep_the_same_histories() -> None:
    torch.manual_seed(5)
    ours, theirs = (states(1, device, margin=1)[0] for device in (torch.device("cuda", 0), CPU))
    pending = Pending()
    for _ in range(9):
        amaxes = torch.rand(2)
        for state in (ours, theirs):
            state.amax.copy_(amaxes)
            pending.add(state)
        pending.roll()
    assert torch.equal(ours.slots.cpu(), theirs.slots)
    assert torch.equal(ours.history.cpu(), theirs.history)
