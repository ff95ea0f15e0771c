"""What CUDA graphs of FP8 modules need: states put back after a capture, and told of after a replay."""

from __future__ import annotations

import torch

from fusestep import fp8
from fusestep.fp8.replay import kept_state, note_replay
from fusestep.nn import LayerNormMLP, Linear
from fusestep.ops.roll_scales import AMAX

RECIPE = fp8.DelayedScaling(amax_history_len=3)


def run(model: torch.nn.Module, amax: float) -> None:
    with fp8.fp8_autocast(recipe=RECIPE):
        y = model(torch.full((2, 4), amax))
    y.sum().backward()


def test_states_are_put_back_in_place() -> None:
    old, new = Linear(4, 4), LayerNormMLP(4, 4)
    for amax in (1.0, 2.0, 3.0):
        run(old, amax)
    model = torch.nn.Sequential(old, new)
    before = [tensor.clone() for tensor in old.fp8_state.as_dict().values()]
    addresses = [tensor.data_ptr() for tensor in old.fp8_state.as_dict().values()]
    with kept_state(model):
        for amax in (50.0, 60.0):
            run(model, amax)
    after = list(old.fp8_state.as_dict().values())
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert [tensor.data_ptr() for tensor in after] == addresses
    assert float(old.fp8_state.amax[0]) == 3.0  # seen, and not rolled yet
    assert not new.fp8_state.scale.any()
    assert not new.fp8_state.amax.any()
    assert not new.fp8_state.history.any()
    assert not new.fp8_state.rolls.any()
    # Training goes on as if nothing had been.
    run(old, 4.0)
    assert old.fp8_state.ordered_history()[:, 0].tolist() == [1.0, 2.0, 3.0]


def test_only_states_that_the_region_was_told_of_roll() -> None:
    told, untold = Linear(4, 4), Linear(4, 4)
    for model in (told, untold):
        run(model, 1.0)
    with fp8.fp8_autocast(recipe=RECIPE):
        for model in (told, untold):
            model.fp8_state.slots[0, AMAX] = 8.0  # as a replay's kernels do
        note_replay([told.fp8_state])
    with fp8.fp8_autocast(recipe=RECIPE):
        pass
    assert float(told.fp8_state.scale[0]) == 448 / 8
    assert float(untold.fp8_state.scale[0]) == 448


def test_evaluation_and_calls_outside_of_a_region_tell_nothing() -> None:
    model = Linear(4, 4)
    run(model, 1.0)
    with fp8.fp8_autocast(recipe=RECIPE):
        pass
    model.fp8_state.slots[0, AMAX] = 8.0
    note_replay([model.fp8_state])
    with torch.no_grad(), fp8.fp8_autocast(recipe=RECIPE):
        note_replay([model.fp8_state])
    with fp8.fp8_autocast(recipe=RECIPE):
        pass
    assert float(model.fp8_state.scale[0]) == 448
