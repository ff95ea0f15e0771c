"""Which slots hold a scale, and which writes in their tables are seen."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch

from fusestep.fp8 import DelayedScaling, Format
from fusestep.fp8.pending import Pending
from fusestep.fp8.settled import holding, unwritten, versions
from fusestep.fp8.state import Slots

RECIPE = DelayedScaling(amax_history_len=4)


def state_of(device: torch.device, *scales: float) -> Slots:
    names = ("input", "weight", "grad_output")
    state = Slots(names, RECIPE, device)
    state.scale.copy_(torch.tensor(scales))
    return state


def test_slots_that_hold_a_scale_are_told_by_their_addresses(device: torch.device) -> None:
    first, second = state_of(device, 0.0, 2.0**-126, 3.0), state_of(device, 2.0**126, 0.0, 0.0)
    found = holding(state.slots for state in (first, second))
    assert found == {first.slots[1].data_ptr(), first.slots[2].data_ptr(), second.slots[0].data_ptr()}
    assert holding([]) == frozenset()


WRITES: dict[str, Callable[[Slots], object]] = {
    "a scale": lambda state: state.scale[1:].zero_(),
    "all": lambda state: state.slots.fill_(1.0),
    "a state that is loaded": lambda state: state.load(copy.deepcopy(state.as_dict())),
    "another format": lambda state: state.follow(DelayedScaling(amax_history_len=4, fp8_format=Format.E4M3)),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_write_in_a_table_is_seen(device: torch.device, write: str) -> None:
    written, other = state_of(device, 1.0, 2.0, 3.0), state_of(device, 1.0, 2.0, 3.0)
    known = versions([written, other])
    assert unwritten(known) == known
    WRITES[write](written)
    assert list(unwritten(known)) == [other.slots]


def _roll(state: Slots) -> None:
    pending = Pending()
    pending.add(state)
    pending.roll()


@pytest.mark.gpu
def test_a_roll_by_the_kernel_is_none() -> None:
    state = state_of(torch.device("cuda", 0), 1.0, 2.0, 3.0)
    state.amax.fill_(7.0)
    known = versions([state])
    _roll(state)
    assert state.scale.tolist() == [64.0, 64.0, 8192.0]
    assert unwritten(known) == known


@pytest.mark.interpreter
def test_a_roll_through_the_interpreter_is_none() -> None:
    state = state_of(torch.device("cpu"), 1.0, 2.0, 3.0)
    state.amax.fill_(7.0)
    known = versions([state])
    _roll(state)
    assert state.scale.tolist() == [64.0, 64.0, 8192.0]
    assert unwritten(known) == known


def test_a_roll_keeps_scales_whatever_the_amax(device: torch.device) -> None:
    state = state_of(device, 5.0, 6.0, 7.0)
    for amax in (0.0, float("inf"), float("nan"), 3e38, 1e-44):
        state.amax.fill_(amax)
        _roll(state)
        assert len(holding([state.slots])) == 3, amax


def test_a_table_of_inference_mode_is_left_out() -> None:
    state = state_of(torch.device("cpu"), 1.0, 2.0, 3.0)
    with torch.inference_mode():
        state.slots = state.slots.clone()
    assert versions([state]) == {}
