"""A training step of FP8 modules in a CUDA graph does what the step does eagerly."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fusestep import fp8
from fusestep.nn import LayerNormLinear, LayerNormMLP, Linear

pytestmark = pytest.mark.gpu

RECIPES = {"delayed": fp8.DelayedScaling(amax_history_len=4), "current": fp8.Float8CurrentScaling()}
WARM_UP, REPLAYS = 3, 5


def stepping(model: nn.Module, x: Tensor, recipe: fp8.Recipe) -> Callable[[], Tensor]:
    """A step of gradient descent that allocates nothing anew but its activations; returns the output."""

    def step() -> Tensor:
        with fp8.fp8_autocast(recipe=recipe):
            y = model(x)
        gradients = torch.autograd.grad(y.float().square().mean(), list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.sub_(gradient, alpha=0.05)
        return y.detach()

    return step


@pytest.mark.parametrize("recipe", list(RECIPES))
def test_replays_equal_eager_steps(recipe: str) -> None:
    torch.manual_seed(5)
    model = nn.Sequential(Linear(48, 80), LayerNormLinear(80, 64), LayerNormMLP(64, 96)).to("cuda", torch.bfloat16)
    twin = copy.deepcopy(model)
    batches = [torch.randn(40, 48, device="cuda").bfloat16() * (1 + n) for n in range(WARM_UP + REPLAYS)]
    x, twin_x = batches[0].clone(), batches[0].clone()
    step, eager = stepping(model, x, RECIPES[recipe]), stepping(twin, twin_x, RECIPES[recipe])
    expected = []
    for batch in batches:
        twin_x.copy_(batch)
        expected.append(eager())
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for batch in batches[:WARM_UP]:
            x.copy_(batch)
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step()
    for batch, wanted in zip(batches[WARM_UP:], expected[WARM_UP:], strict=True):
        x.copy_(batch)
        graph.replay()
        assert torch.equal(y, wanted)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    if recipe == "delayed":
        with fp8.fp8_autocast(recipe=RECIPES[recipe]):  # rolls what the last step recorded
            pass
        assert torch.equal(model[0].fp8_state.slots, twin[0].fp8_state.slots)
        assert model[0].fp8_state.rolls.tolist() == [WARM_UP + REPLAYS] * 3
