"""Which slots hold a scale, and which writes in their tables are seen."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch

from fusestep.fp8 import DelayedScaling, Format, fp8_autocast
from fusestep.fp8.pending import Pending
from fusestep.fp8.settled import LONGEST_REST, Watch, holding, unwritten, versions
from fusestep.fp8.state import Slots
from fusestep.nn import Linear
from fusestep.ops.launch import PreparedLaunch
from fusestep.ops.settled_slots import may_rely

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


def relied_on(state: Slots) -> list[int]:
    return [index for index in range(3) if may_rely(state.slots, state.slots.data_ptr(), (index,))]


def looks(watch: Watch, states: list[Slots], rolls: int) -> list[int]:
    """At which of so many rolls, counted from 0, the watch looks."""
    looked = []
    for roll in range(rolls):
        if watch.is_due():
            looked.append(roll)
            watch.look(states)
            if states[0].slots.is_cuda:
                torch.cuda.synchronize()
    return looked


def test_a_watch_tells_casts_of_scales_that_it_has_read(device: torch.device) -> None:
    first, second = state_of(device, 0.0, 5.0, 0.25), state_of(device, 0.0, 0.0, 0.0)
    watch = Watch()
    assert looks(watch, [first, second], 1) == [0]
    assert relied_on(first) == []  # on its way
    looks(watch, [first, second], 1)
    assert relied_on(first) == [1, 2]
    assert relied_on(second) == []
    assert may_rely(first.slots, first.slots.data_ptr(), (2, 1))
    assert not may_rely(first.slots, first.slots.data_ptr(), (1, 0))
    second.scale[0] = 4.0  # by an operation of torch's, so that the next reading has another version
    looks(watch, [first, second], 4)
    assert relied_on(second) == [0]


def test_a_watch_looks_ever_more_seldom_but_never_for_the_last_time(device: torch.device) -> None:
    states = [state_of(device, 1.0, 2.0, 3.0)]
    watch = Watch()
    assert looks(watch, states, 20) == [0, 1, 3, 4, 8, 9, 17, 18]
    looks(watch, states, 4 * LONGEST_REST)
    found = looks(watch, states, 3 * LONGEST_REST)
    assert len(found) in (5, 6)


class Event:
    """A mark in a device's queue that is reached when the test says so."""

    is_reached = False

    def query(self) -> bool:
        return self.is_reached


def test_a_reading_is_not_taken_before_the_device_has_written_it() -> None:
    state, watch, event = state_of(torch.device("cpu"), 1.0, 2.0, 3.0), Watch(), Event()
    place = state.slots.data_ptr(), (0, 1, 2)
    watch.look([state])
    reading = watch._reading
    assert reading is not None
    vars(reading)["_event"] = event
    for _ in range(3):
        watch.look([state])
        assert not may_rely(state.slots, *place)
        assert watch._reading is reading  # no second one begins meanwhile
    event.is_reached = True
    watch.look([state])
    assert may_rely(state.slots, *place)


@pytest.mark.parametrize("write", WRITES)
def test_what_a_watch_told_ends_with_a_write(device: torch.device, write: str) -> None:
    state = state_of(device, 1.0, 2.0, 3.0)
    looks(Watch(), [state], 2)
    assert relied_on(state) == [0, 1, 2]
    WRITES[write](state)
    assert relied_on(state) == []


def test_a_write_while_a_reading_is_on_its_way_makes_it_void(device: torch.device) -> None:
    state, watch = state_of(device, 1.0, 2.0, 3.0), Watch()
    looks(watch, [state], 1)
    state.scale[1:].zero_()
    looks(watch, [state], 1)
    assert relied_on(state) == []


def test_a_table_in_the_place_of_another_is_not_taken_for_it(device: torch.device) -> None:
    state = state_of(device, 1.0, 2.0, 3.0)
    looks(Watch(), [state], 2)
    other = state.slots.detach()  # at the same address, and of the same version
    assert other._version == state.slots._version
    assert may_rely(state.slots, state.slots.data_ptr(), (0,))
    assert not may_rely(other, other.data_ptr(), (0,))


@pytest.mark.gpu
def test_nothing_is_relied_on_nor_read_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    state, other = (state_of(torch.device("cuda", 0), 1.0, 2.0, 3.0) for _ in range(2))
    looks(Watch(), [state], 2)
    assert relied_on(state) == [0, 1, 2]
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert relied_on(state) == []
        watch = Watch()
        looks(watch, [other], 3)
    looks(watch, [other], 1)
    assert relied_on(other) == []  # only begun now
    looks(watch, [other], 1)
    assert relied_on(other) == [0, 1, 2]


@pytest.mark.gpu
def test_steps_outside_of_graphs_leave_out_the_passes_for_scales_that_are_known(
    monkeypatch: pytest.MonkeyPatch, no_waiting: Callable[[], AbstractContextManager[None]]
) -> None:
    """Inputs, weight and gradient are all so large that a pass of its own looks for their amaxes."""
    layer = Linear(2048, 1536, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(1536, 2048, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.randn(1536, 1536, device="cuda", dtype=torch.bfloat16)
    names: list[str] = []
    real = PreparedLaunch.at

    def at(self: PreparedLaunch, addresses: tuple[int, ...]) -> bool:
        done = real(self, addresses)
        if done:
            names.append(self._kernel.fn.__name__)
        return done

    monkeypatch.setattr(PreparedLaunch, "at", at)

    def step() -> tuple[list[str], list[torch.Tensor]]:
        names.clear()
        with fp8_autocast(recipe=RECIPE):
            y = layer(x)
        found = [y.detach(), *torch.autograd.grad(y, [x, layer.weight], gradient)]
        return [name for name in names if "amax" in name], found

    for _ in range(2):
        _, wanted = step()
        torch.cuda.synchronize()
    with no_waiting():
        step()
        passes, _ = step()
    torch.cuda.synchronize()
    passes, found = step()
    assert passes == []
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert layer.fp8_state is not None
    layer.fp8_state.scale.zero_()
    passes, _ = step()
    assert len(passes) == 2
