"""Shapes have the parameters that models of theirs have."""

from __future__ import annotations

from typing import Any

import pytest

from fusestep.errors import UserError
from fusestep.models import GPT, PRESETS
from fusestep.plan import SHAPES, Shape


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_has_the_parameters_of_its_model(preset: str) -> None:
    assert SHAPES[preset].parameters == GPT(PRESETS[preset], device="meta").parameter_count()


@pytest.mark.parametrize(("name", "published"), [("llama-8b", 8_030_261_248), ("llama-70b", 70_553_706_496)])
def test_a_llama_has_the_parameters_of_its_published_weights(name: str, published: int) -> None:
    assert SHAPES[name].parameters == published


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"width": 100, "heads": 12}, "width 100 is not a multiple of its 12 heads"),
        ({"kv_heads": 5}, "12 heads are no multiple of 5 kv_heads"),
        ({"layers": 0}, "layers is 0; give 1 to"),
        ({"layers": 1.5}, "layers is 1.5; give a whole number"),
        ({"layers": True}, "layers is True; give a whole number"),
        ({"gated": 1}, "gated is 1; give true or false"),
        ({"depth": 3}, "'depth'; it may set biases, context"),
    ],
)
def test_sizes_that_cannot_be_are_one_sentence(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        Shape().changed(changes)
