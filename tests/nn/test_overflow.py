"""What is infinite stays seen in FP8: the step that it would spoil is skipped."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from fusestep.fp8 import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling, fp8_autocast
from fusestep.fp8.recipes import Recipe
from fusestep.nn import LayerNormLinear, LayerNormMLP, Linear
from fusestep.optim import FusedAdam

RECIPES = [DelayedScaling(amax_history_len=4), Float8CurrentScaling(), Float8BlockScaling(), MXFP8BlockScaling()]
MODULES = {
    "linear": lambda: Linear(40, 24, bias=False),
    "norm_linear": lambda: LayerNormLinear(40, 24, bias=False),
    "mlp": lambda: LayerNormMLP(40, 72, bias=False),
}


def made(name: str) -> tuple[nn.Module, list[nn.Parameter]]:
    """A module, and its weights that FP8 products alone give gradients to."""
    module = MODULES[name]()
    return module, [parameter for parameter in module.parameters() if parameter.dim() == 2]


def backward(module: nn.Module, recipe: Recipe, spoil: float | None, loss_scale: float = 1.0) -> None:
    """One forward and backward; `spoil` replaces one element of the output's gradient."""
    with fp8_autocast(recipe=recipe):
        y = module(torch.randn(19, 40))
    gradient = torch.randn_like(y) * loss_scale
    if spoil is not None:
        gradient[5, 7] = spoil
    y.backward(gradient)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: type(recipe).__name__)
@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("spoil", [math.inf, -math.inf])
def test_an_infinite_gradient_skips_the_step_of_fused_adam(name: str, recipe: Recipe, spoil: float) -> None:
    module, weights = made(name)
    optimizer = FusedAdam(weights, lr=0.01, max_grad_norm=1.0)
    for number, (value, skipped) in enumerate(((None, 0), (spoil, 1), (None, 1))):
        before = [weight.detach().clone() for weight in weights]
        optimizer.zero_grad()
        backward(module, recipe, value)
        optimizer.step()
        assert int(optimizer.skipped_steps) == skipped
        for weight, old in zip(weights, before, strict=True):
            assert torch.equal(weight, old) == (number == 1)
            assert bool(weight.isfinite().all())


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: type(recipe).__name__)
def test_a_grad_scaler_sees_an_infinite_gradient(recipe: Recipe) -> None:
    module, weights = made("linear")
    optimizer = torch.optim.SGD(weights, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for spoil, scale in ((None, 1024.0), (math.inf, 512.0)):
        before = weights[0].detach().clone()
        optimizer.zero_grad()
        scaler.scale(torch.zeros(()))  # as a loss would be; the gradient below is scaled by hand
        backward(module, recipe, spoil, 1024.0)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == scale
        assert torch.equal(weights[0], before) == (spoil is not None)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: type(recipe).__name__)
def test_an_infinite_activation_makes_its_row_of_the_output_nan(recipe: Recipe) -> None:
    module, _ = made("linear")
    x = torch.randn(19, 40)
    x[3, 4] = math.inf
    for _ in range(2):  # by the tensor's own scale, then under delayed scaling by one that is known
        with fp8_autocast(recipe=recipe):
            y = module(x)
        assert bool(y[3].isnan().all())
        assert bool(y[torch.arange(19) != 3].isfinite().all())


@pytest.mark.parametrize("recipe", RECIPES[:1])
def test_finite_values_beyond_the_range_still_saturate(recipe: Recipe) -> None:
    module, _ = made("linear")
    for size in (1.0, 1e30):  # by the scale that the first step found
        with fp8_autocast(recipe=recipe):
            y = module(torch.randn(19, 40) * size)
        assert bool(y.isfinite().all())
