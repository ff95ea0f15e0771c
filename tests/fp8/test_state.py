"""Scaling state: rings of amaxes, checkpoints, copies, and another recipe."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fusestep.errors import UserError
from fusestep.fp8 import DelayedScaling, Format
from fusestep.fp8.pending import Pending
from fusestep.fp8.state import KEYS, Slots, resized
from fusestep.ops.roll_scales import LARGEST, SLOT

CPU = torch.device("cpu")
NAMES = ("input", "weight", "grad_output")


def recipe(length: int = 4, **settings: object) -> DelayedScaling:
    return DelayedScaling(amax_history_len=length, **settings)  # type: ignore[arg-type]


def stepped(state: Slots, *amaxes: float) -> Slots:
    """The state after steps with these amaxes of the input, and their tenfold of the gradient."""
    pending = Pending()
    for amax in amaxes:
        state.amax.copy_(torch.tensor([amax, 0.0, 10 * amax]))
        pending.add(state)
        pending.roll()
    return state


def test_a_new_state_has_no_scale_and_the_formats_of_its_recipe(device: torch.device) -> None:
    state = Slots(NAMES, recipe(), device)
    assert state.slots.tolist() == [[0, 0, 448, 0], [0, 0, 448, 0], [0, 0, 57344, 0]]
    assert state.history.shape == (3, 4)
    assert Slots(NAMES, recipe(fp8_format=Format.E4M3), device).slots[:, LARGEST].tolist() == [448.0] * 3


def test_history_is_told_from_the_oldest_to_the_newest() -> None:
    state = stepped(Slots(NAMES, recipe(4), CPU), 1.0, 2.0, 3.0)
    assert state.ordered_history().tolist() == [[0, 0, 0], [1, 0, 10], [2, 0, 20], [3, 0, 30]]
    stepped(state, 4.0, 5.0)
    assert state.ordered_history()[:, 0].tolist() == [2, 3, 4, 5]


@given(
    amaxes=st.lists(st.floats(0.125, 512.0, width=32), max_size=12),
    lengths=st.lists(st.integers(1, 7), min_size=2, max_size=4),
    more=st.lists(st.floats(0.125, 512.0, width=32), max_size=9),
)
def test_another_length_keeps_the_newest_amaxes(amaxes: list[float], lengths: list[int], more: list[float]) -> None:
    state = stepped(Slots(NAMES, recipe(lengths[0]), CPU), *amaxes)
    kept = amaxes[-lengths[0] :]
    for length in lengths[1:]:
        state.follow(recipe(length))
        kept = kept[-length:]
        assert state.ordered_history()[:, 0].tolist() == [0.0] * (length - len(kept)) + kept
    stepped(state, *more)
    seen = (kept + more)[-lengths[-1] :]
    assert state.ordered_history()[:, 0].tolist() == [0.0] * (lengths[-1] - len(seen)) + seen
    if more:
        assert state.scale[0] == torch.tensor(448.0) / max(seen)


def test_following_the_same_recipe_changes_nothing() -> None:
    state = stepped(Slots(NAMES, recipe(), CPU), 2.0)
    number, history = state.number, state.history
    state.follow(recipe())
    assert state.history is history
    assert state.number == number


def test_another_format_renews_the_scales_of_the_slots_that_it_changes() -> None:
    state = stepped(Slots(NAMES, recipe(), CPU), 2.0)
    state.follow(recipe(fp8_format=Format.E4M3))
    assert state.scale.tolist() == [224.0, 0.0, 0.0]
    assert state.slots[:, LARGEST].tolist() == [448.0] * 3
    assert state.ordered_history()[-1].tolist() == [2.0, 0.0, 20.0]
    stepped(state, 1.0)
    assert state.scale.tolist() == [224.0, 0.0, torch.tensor(448.0).div(20).item()]


# Checkpoints


def test_a_state_goes_through_a_safe_checkpoint_bit_for_bit() -> None:
    state = stepped(Slots(NAMES, recipe(), CPU), 0.3, 0.7, 0.11)
    state.amax.fill_(0.25)
    file = io.BytesIO()
    torch.save(state.as_dict(), file)
    file.seek(0)
    again = Slots(NAMES, recipe(), CPU)
    again.load(torch.load(file, weights_only=True))
    for key, value in state.as_dict().items():
        assert torch.equal(again.as_dict()[key], value)
    for each in (state, again):
        stepped(each, 0.5)
    assert torch.equal(state.slots, again.slots)
    assert torch.equal(state.history, again.history)


def test_a_state_keeps_its_size() -> None:
    state = Slots(NAMES, recipe(4), CPU)
    sizes = set()
    for _ in range(3):
        stepped(state, *[1.0] * 20)
        file = io.BytesIO()
        torch.save(state.as_dict(), file)
        sizes.add(file.tell())
    assert len(sizes) == 1


@pytest.mark.parametrize("length", [1, 3, 9])
def test_a_checkpoint_of_another_history_length_loads(length: int) -> None:
    saved = stepped(Slots(NAMES, recipe(4), CPU), 1.0, 2.0, 3.0, 4.0, 5.0).as_dict()
    state = Slots(NAMES, recipe(length), CPU)
    state.load(saved)
    expected = [2.0, 3.0, 4.0, 5.0][-length:]
    assert state.ordered_history()[:, 0].tolist() == [0.0] * (length - len(expected)) + expected
    assert state.scale[0] == saved["fp8_slots"][0, 0]


def test_a_checkpoint_of_another_format_takes_new_scales() -> None:
    saved = stepped(Slots(NAMES, recipe(), CPU), 2.0).as_dict()
    state = Slots(NAMES, recipe(fp8_format=Format.E4M3), CPU)
    state.load(saved)
    assert state.scale.tolist() == [224.0, 0.0, 0.0]
    assert state.slots[:, LARGEST].tolist() == [448.0] * 3


@pytest.mark.parametrize("formats", [Format.HYBRID, Format.E4M3])
def test_a_model_that_has_not_run_takes_a_checkpoint(formats: Format) -> None:
    saved = stepped(Slots(NAMES, recipe(6, fp8_format=formats), CPU), 2.0, 3.0)
    state = Slots.restored(NAMES, saved.as_dict(), CPU)
    assert state.recipe == recipe(6, fp8_format=formats)
    assert torch.equal(state.slots, saved.slots)
    state.follow(recipe(2, fp8_format=formats, margin=1))
    stepped(state, 1.0)
    assert state.scale[0] == torch.tensor(448.0) / 3 / 2


def test_loading_does_not_share_memory_with_the_checkpoint() -> None:
    saved = stepped(Slots(NAMES, recipe(), CPU), 2.0).as_dict()
    state = Slots.restored(NAMES, saved, CPU)
    stepped(state, 9.0)
    assert saved["fp8_history"][0].tolist() == [2.0, 0.0, 0.0, 0.0]


def test_what_does_not_fit_is_refused_and_changes_nothing() -> None:
    good = stepped(Slots(NAMES, recipe(), CPU), 2.0).as_dict()
    state = stepped(Slots(NAMES, recipe(), CPU), 7.0)
    before = {key: value.clone() for key, value in state.as_dict().items()}
    for change, words in (
        ({"fp8_slots": torch.zeros(5, SLOT)}, "of 5 tensors does not fit a module that casts 3 .input, weight, grad"),
        ({"fp8_slots": torch.zeros(3, 5)}, r"shapes \(3, 5\)"),
        ({"fp8_history": torch.zeros(2, 4)}, r"shapes .*\(2, 4\)"),
        ({"fp8_history": torch.zeros(3, 0)}, r"shapes .*\(3, 0\)"),
        ({"fp8_history": torch.zeros(3)}, r"wanted are slots of \(3, 4\)"),
        ({"fp8_rolls": torch.zeros((), dtype=torch.int64)}, "shapes"),
    ):
        with pytest.raises(UserError, match=words):
            state.load(good | change)
    with pytest.raises(UserError, match="lacks fp8_history and fp8_rolls; load all of"):
        state.load({KEYS[0]: good[KEYS[0]]})
    assert all(torch.equal(value, before[key]) for key, value in state.as_dict().items())


# Copies and devices


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda state: pickle.loads(pickle.dumps(state))])
def test_a_copy_is_independent_and_updates_by_itself(duplicate: object) -> None:
    state = stepped(Slots(NAMES, recipe(), CPU), 2.0)
    copied: Slots = duplicate(state)  # type: ignore[operator]
    assert copied.number != state.number
    assert copied.reference() is copied
    pending = Pending()
    for each, amax in ((state, 4.0), (copied, 8.0)):
        each.amax.fill_(amax)
        pending.add(each)
    pending.roll()
    assert state.scale[:2].tolist() == [112.0, 112.0]
    assert copied.scale[:2].tolist() == [56.0, 56.0]


def test_replacing_a_tensor_or_the_recipe_gives_another_number() -> None:
    state = Slots(NAMES, recipe(), CPU)
    seen = {state.number}
    for change in (
        lambda: state.follow(recipe(9)),
        lambda: state.follow(recipe(9, margin=2)),
        lambda: setattr(state, "slots", state.slots.clone()),
        lambda: state.to(torch.device("meta")),
    ):
        change()
        seen.add(state.number)
    assert len(seen) == 5


def test_a_state_comes_back_from_meta_anew() -> None:
    state = stepped(Slots(NAMES, recipe(), CPU), 2.0)
    state.to(torch.device("meta"))
    assert state.slots.is_meta
    state.to(CPU)
    assert torch.equal(state.slots, Slots(NAMES, recipe(), CPU).slots)
    assert not state.history.any()


@pytest.mark.gpu
def test_a_state_moves_with_its_values() -> None:
    state = stepped(Slots(NAMES, recipe(), CPU), 2.0, 3.0)
    before = {key: value.clone() for key, value in state.as_dict().items()}
    state.to(torch.device("cuda", 0))
    assert all(torch.equal(value.cpu(), before[key]) for key, value in state.as_dict().items())
    stepped(state, 1.0)
    assert state.ordered_history()[:, 0].tolist() == [0.0, 2.0, 3.0, 1.0]


def test_a_state_that_was_made_in_inference_mode_can_train() -> None:
    with torch.inference_mode():
        state = Slots(NAMES, recipe(), CPU)
    stepped(state, 2.0)
    assert state.scale[0] == 224.0


def test_a_dead_state_is_not_kept_alive() -> None:
    pending = Pending()
    state = Slots(NAMES, recipe(), CPU)
    pending.add(state)
    pending.roll()
    pending.add(state)
    gone, tensor = state.reference, weakref.ref(state.slots)
    del state
    gc.collect()
    assert gone() is None
    assert tensor() is None
    pending.roll()


def test_resizing_to_the_same_length_copies_nothing() -> None:
    history = torch.rand(2, 3)
    assert resized(history, torch.tensor([5, 0]), 3) is history
