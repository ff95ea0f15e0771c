"""The norm before a cast: parameters that do not fit the row are refused under every recipe."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fusestep import fp8
from fusestep.errors import UserError
from fusestep.fp8.recipes import Recipe
from fusestep.nn import LayerNormLinear, LayerNormMLP

RECIPES = [
    fp8.DelayedScaling(),
    fp8.Float8CurrentScaling(),
    fp8.Float8BlockScaling(),
    fp8.MXFP8BlockScaling(),
]


@pytest.mark.parametrize(
    "where", [pytest.param("cpu"), pytest.param("cpu", id="interpreter", marks=pytest.mark.interpreter)]
)
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: type(recipe).__name__)
@pytest.mark.parametrize("module", [LayerNormLinear, LayerNormMLP])
@pytest.mark.parametrize(
    ("normalization", "name"), [("RMSNorm", "weight"), ("LayerNorm", "weight"), ("LayerNorm", "bias")]
)
@pytest.mark.parametrize("length", [16, 1, 48])
def test_parameters_of_another_length_than_the_row_are_refused(
    where: str, recipe: Recipe, module: type[nn.Module], normalization: str, name: str, length: int
) -> None:
    layer = module(32, 64, normalization=normalization, device=where)
    getattr(layer, f"layer_norm_{name}").data = torch.ones(length, device=where)
    with fp8.fp8_autocast(recipe=recipe), pytest.raises(UserError, match=rf"{name} has shape \({length},\).*\(32,\)"):
        layer(torch.randn(4, 32, device=where))
