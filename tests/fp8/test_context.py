"""The region: nesting, exceptions, threads, and when histories roll."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fusestep.errors import UserError
from fusestep.fp8 import DelayedScaling, Float8CurrentScaling, MXFP8BlockScaling, context, fp8_autocast
from fusestep.fp8.context import current, is_enabled
from fusestep.fp8.recipes import Recipe
from fusestep.fp8.state import Slots

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def nothing_pending() -> Iterator[None]:
    context._thread.regions = type(context._thread.regions)()
    yield
    assert context._thread.regions.region is None
    assert context._thread.regions.depth == 0


def cast(state: Slots, amax: float) -> None:
    """What a module does in a training forward."""
    region = current()
    assert region is not None
    state.amax.copy_(torch.maximum(state.amax, torch.full_like(state.amax, amax)))
    region.pending.add(state, region.group)


def slots() -> Slots:
    return Slots(("input",), DelayedScaling(amax_history_len=4), CPU)


def test_outside_a_region_nothing_is_asked() -> None:
    assert current() is None
    assert not is_enabled()


def test_regions_nest_and_are_put_back() -> None:
    outer, inner = DelayedScaling(margin=1), Float8CurrentScaling()
    with fp8_autocast(recipe=outer):
        assert current() is not None
        assert current().recipe is outer  # type: ignore[union-attr]
        with fp8_autocast(enabled=False):
            assert current() is None
            assert not is_enabled()
            with fp8_autocast(recipe=inner):
                assert current().recipe is inner  # type: ignore[union-attr]
        assert is_enabled()
    assert not is_enabled()


def test_an_exception_puts_the_outer_region_back() -> None:
    recipe = DelayedScaling()
    with fp8_autocast(recipe=recipe):
        with pytest.raises(RuntimeError, match="inside"), fp8_autocast(enabled=False):
            raise RuntimeError("inside")
        assert current().recipe is recipe  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match="inside"), fp8_autocast():
        raise RuntimeError("inside")
    assert not is_enabled()


def test_a_function_can_be_a_region() -> None:
    @fp8_autocast(recipe=Float8CurrentScaling())
    def inside() -> bool:
        return is_enabled()

    assert inside()
    assert inside()
    assert not is_enabled()


def test_a_region_belongs_to_its_thread() -> None:
    state, other = slots(), slots()
    told: list[Any] = []

    def elsewhere() -> None:
        told.append(current())
        with fp8_autocast():
            cast(other, 8.0)
        with fp8_autocast():  # rolls what this thread recorded, and no more
            told.append(is_enabled())

    with fp8_autocast():
        cast(state, 2.0)
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert is_enabled()
    assert told == [None, True]
    assert other.scale.tolist() == [56.0]
    assert state.scale.tolist() == [0.0]
    with fp8_autocast():
        assert state.scale.tolist() == [224.0]


def test_a_generator_that_is_left_in_a_region_does_not_keep_it() -> None:
    def values() -> Iterator[bool]:
        with fp8_autocast():
            yield is_enabled()

    generator = values()
    assert next(generator)
    generator.close()
    assert not is_enabled()


def test_the_default_recipe_is_one_object() -> None:
    recipes = []
    for _ in range(2):
        with fp8_autocast():
            recipes.append(current().recipe)  # type: ignore[union-attr]
    assert recipes[0] is recipes[1]
    assert recipes[0] == DelayedScaling()


def test_a_compiled_function_sees_the_region_and_records() -> None:
    state = slots()

    def forward(x: torch.Tensor) -> torch.Tensor:
        region = current()
        if region is None:
            return x
        region.pending.add(state, region.group)
        return x + 1

    compiled = torch.compile(forward, backend="eager", fullgraph=True)
    x = torch.zeros(3)
    for step in range(3):
        state.amax.fill_(2.0 + step)
        with fp8_autocast():
            assert compiled(x)[0] == 1.0
        assert compiled(x)[0] == 0.0
    assert state.rolls.tolist() == [2]


def test_a_region_inside_a_compiled_function_rolls_in_every_call() -> None:
    state = slots()

    def step(x: torch.Tensor) -> torch.Tensor:
        with fp8_autocast():
            cast(state, 2.0)
        return x + 1

    compiled = torch.compile(step, backend="eager")
    for _ in range(4):
        assert compiled(torch.zeros(2))[0] == 1.0
    assert state.rolls.tolist() == [3]


# When histories roll


def test_histories_roll_when_the_next_region_begins() -> None:
    state = slots()
    with fp8_autocast():
        cast(state, 2.0)
    assert state.rolls.tolist() == [0]
    state.amax.fill_(4.0)  # backward, outside the region
    with fp8_autocast():
        assert state.scale.tolist() == [112.0]
        cast(state, 1.0)
        with fp8_autocast():  # nested: not again
            cast(state, 1.0)
        assert state.rolls.tolist() == [1]


def test_regions_without_gradients_roll_nothing() -> None:
    state = slots()
    with fp8_autocast():
        cast(state, 2.0)
    for without in (torch.no_grad(), torch.inference_mode()):
        with without, fp8_autocast():
            assert state.rolls.tolist() == [0]
    with fp8_autocast(enabled=False):
        assert state.rolls.tolist() == [0]
    with fp8_autocast():
        assert state.rolls.tolist() == [1]


def test_an_enabled_region_inside_a_disabled_one_rolls() -> None:
    state = slots()
    for amax in (2.0, 4.0, 1.0):
        with fp8_autocast(enabled=False), fp8_autocast():
            cast(state, amax)
    assert state.rolls.tolist() == [2]
    assert state.scale.tolist() == [112.0]


def test_calibration_records_and_rolls() -> None:
    state = slots()
    with fp8_autocast(enabled=False, calibrating=True):
        assert not is_enabled()
        assert current() is not None
        cast(state, 2.0)
    with fp8_autocast():
        assert state.scale.tolist() == [224.0]


def test_an_alternation_of_recipes_loses_nothing() -> None:
    state = slots()
    for amax in (2.0, 4.0):
        with fp8_autocast():
            cast(state, amax)
        with fp8_autocast(recipe=MXFP8BlockScaling()):
            pass
    assert state.rolls.tolist() == [2]


# Misuse


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"recipe": "delayed"}, "recipe is 'delayed'; pass an object such as fusestep.fp8.DelayedScaling()."),
        ({"recipe": DelayedScaling}, "recipe is <class"),
        ({"recipe": Recipe()}, "recipe is Recipe("),
        ({"enabled": DelayedScaling()}, "pass True or False, and a recipe as recipe=…."),
        ({"enabled": 1}, "enabled is 1"),
        ({"calibrating": "yes"}, "calibrating is 'yes'"),
    ],
)
def test_misuse_is_one_sentence_and_leaves_the_region_alone(arguments: dict[str, Any], words: str) -> None:
    with fp8_autocast(recipe=Float8CurrentScaling()):
        with pytest.raises(UserError) as caught, fp8_autocast(**arguments):
            pass
        assert words in str(caught.value)
        assert str(caught.value).startswith("fp8_autocast: ")
        assert current().recipe == Float8CurrentScaling()  # type: ignore[union-attr]


def test_a_roll_that_fails_leaves_no_region_behind() -> None:
    state = Slots(("input",), DelayedScaling(amax_compute_algo=lambda history: history), CPU)
    with fp8_autocast():
        cast(state, 2.0)
    with pytest.raises(UserError, match="amax_compute_algo returned"), fp8_autocast():
        pass
    assert not is_enabled()
