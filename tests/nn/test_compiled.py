"""The FP8 modules under torch.compile: whole graphs without state, a break that is told with it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusestep import explain
from fusestep.fp8 import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, fp8_autocast
from fusestep.nn import LayerNormLinear, LayerNormMLP, Linear

# Of torch's own making, as it traces an autograd.Function.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")

MODULES = {"linear": Linear, "norm and linear": LayerNormLinear, "mlp": LayerNormMLP}


@pytest.fixture(params=list(MODULES))
def module(request: pytest.FixtureRequest, device: torch.device) -> nn.Module:
    torch._dynamo.reset()
    return MODULES[request.param](24, 24, device=device)


def results(module: nn.Module, call: Any, x: Tensor, recipe: Any) -> list[Tensor]:
    module.zero_grad()
    x = x.clone().requires_grad_()
    with fp8_autocast(enabled=recipe is not None, recipe=recipe):
        y = call(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(parameter.grad for parameter in module.parameters())]


def assert_equal(a: list[Tensor], b: list[Tensor]) -> None:
    for ours, theirs in zip(a, b, strict=True):
        assert torch.equal(ours, theirs)


def test_recipes_without_state_are_one_graph_also_when_regions_change(device: torch.device) -> None:
    torch._dynamo.reset()
    module = LayerNormMLP(24, 24, device=device)
    eager, compiled = copy.deepcopy(module), torch.compile(module, backend="aot_eager", fullgraph=True)
    for recipe in (None, Float8CurrentScaling(), Float8BlockScaling(), None, Float8CurrentScaling()):
        x = torch.randn(6, 24, device=device)
        assert_equal(results(module, compiled, x, recipe), results(eager, eager, x, recipe))


def test_delayed_scaling_breaks_the_graph_and_says_so(module: nn.Module) -> None:
    recipe = DelayedScaling(amax_history_len=3)
    eager, compiled = copy.deepcopy(module), torch.compile(module, backend="aot_eager")
    for number in range(3):
        x = torch.randn(6, 24, device=next(module.parameters()).device) * (number + 1)
        assert_equal(results(module, compiled, x, recipe), results(eager, eager, x, recipe))
    with fp8_autocast(recipe=recipe):
        pass  # what is recorded enters the histories of both
    assert_equal(list(module.fp8_state.as_dict().values()), list(eager.fp8_state.as_dict().values()))
    assert "torch.compile breaks its graph here: backward records amaxes" in explain(module).modules[0].reason


def test_many_regions_do_not_compile_anew(device: torch.device) -> None:
    torch._dynamo.reset()
    module = Linear(24, 24, device=device)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    x, recipe = torch.randn(6, 24, device=device), Float8CurrentScaling()
    for _ in range(2):
        results(module, compiled, x, recipe)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(20):
            results(module, compiled, x, recipe)
