"""Recipes: what they hold, and that misuse is one sentence with the mend."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import pytest
import torch

from fusestep.errors import UserError
from fusestep.fp8 import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Format, MXFP8BlockScaling

RECIPES = [DelayedScaling, Float8CurrentScaling, Float8BlockScaling, MXFP8BlockScaling]


def test_defaults() -> None:
    recipe = DelayedScaling()
    assert (recipe.margin, recipe.amax_history_len, recipe.amax_compute_algo) == (0, 1024, "max")
    assert recipe.fp8_format is Format.HYBRID
    assert Float8CurrentScaling().fp8_format is Format.HYBRID
    assert Float8BlockScaling().fp8_format is MXFP8BlockScaling().fp8_format is Format.E4M3


@pytest.mark.parametrize("kind", RECIPES)
def test_a_recipe_is_a_frozen_value(kind: type[Any]) -> None:
    recipe = kind()
    assert recipe == kind() == copy.deepcopy(recipe) == pickle.loads(pickle.dumps(recipe))
    assert hash(recipe) == hash(kind())
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.fp8_format = Format.E4M3


def test_a_recipe_prints_as_it_is_made() -> None:
    recipe = DelayedScaling(amax_history_len=16, amax_compute_algo="most_recent", fp8_format=Format.E4M3)
    assert eval(repr(recipe), {"DelayedScaling": DelayedScaling, "Format": Format}) == recipe


def test_only_delayed_scaling_has_a_history() -> None:
    assert [kind().has_history for kind in RECIPES] == [True, False, False, False]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"amax_history_len": 0}, "amax_history_len is 0; pass a number of steps from 1 to 1048576."),
        ({"amax_history_len": -3}, "amax_history_len is -3"),
        ({"amax_history_len": 16.0}, "amax_history_len is 16.0"),
        ({"amax_history_len": True}, "amax_history_len is True"),
        ({"amax_history_len": "16"}, "amax_history_len is '16'"),
        ({"amax_history_len": 10**12}, "amax_history_len is 1000000000000"),
        ({"margin": -1}, "margin is -1; pass an integer from 0 to 16."),
        ({"margin": 500}, "margin is 500"),
        ({"margin": 0.5}, "margin is 0.5"),
        ({"margin": False}, "margin is False"),
        ({"amax_compute_algo": "mean"}, "amax_compute_algo is 'mean'"),
        ({"amax_compute_algo": None}, "amax_compute_algo is None"),
        ({"amax_compute_algo": torch.Tensor}, "amax_compute_algo is <class"),
        ({"reduce_amax": 1}, "reduce_amax is 1; pass True or False."),
    ],
)
def test_misuse_of_delayed_scaling_is_one_sentence(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as caught:
        DelayedScaling(**arguments)
    said = str(caught.value)
    assert words in said
    assert said.startswith("DelayedScaling: ")
    assert said.endswith(".")
    assert ". " not in said


@pytest.mark.parametrize("kind", RECIPES)
def test_e5m2_for_everything_is_refused(kind: type[Any]) -> None:
    with pytest.raises(UserError, match=r"two bits of mantissa and do not train; pass Format.HYBRID"):
        kind(fp8_format=Format.E5M2)


@pytest.mark.parametrize("kind", RECIPES)
def test_a_format_is_no_string(kind: type[Any]) -> None:
    with pytest.raises(UserError, match=f"{kind.__name__}: fp8_format is 'hybrid'; pass Format.HYBRID"):
        kind(fp8_format="hybrid")


def test_switches_are_true_or_false() -> None:
    with pytest.raises(UserError, match="use_power_2_scales is 1"):
        Float8CurrentScaling(use_power_2_scales=1)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="use_f32_scales is None"):
        Float8BlockScaling(use_f32_scales=None)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", RECIPES)
def test_a_misspelt_setting_does_not_pass(kind: type[Any]) -> None:
    with pytest.raises(TypeError, match="amax_histroy_len"):
        kind(amax_histroy_len=16)
