"""What FP8 training keeps does not grow with the number of steps."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusestep import TrainStep, fp8
from fusestep.fp8.recipes import Recipe
from fusestep.fp8.state import Slots
from fusestep.nn import LayerNormMLP, Linear
from fusestep.optim import FusedAdam

RECIPES = [fp8.DelayedScaling(amax_history_len=5), fp8.Float8CurrentScaling(), fp8.Float8BlockScaling()]


def kept(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Shapes of all that a checkpoint holds, its bytes, and sizes of what modules and their slots hold."""
    state = {"model": module.state_dict(), "optimizer": optimizer.state_dict()}
    file = io.BytesIO()
    torch.save(state, file)
    found: dict[str, Any] = {"bytes": file.tell(), "entries": sorted(state["model"])}
    for name, each in module.named_modules():
        owners = [each, *(value for value in vars(each).values() if isinstance(value, Slots))]
        for place, owner in enumerate(owners):
            for key, value in vars(owner).items():
                if isinstance(value, Tensor):
                    found[f"{name}.{place}.{key}"] = tuple(value.shape)
                elif isinstance(value, (list, dict, set)):
                    found[f"{name}.{place}.{key}"] = len(value)
    return found


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: type(recipe).__name__)
@pytest.mark.parametrize("is_step", [False, True], ids=["eager", "TrainStep"])
def test_fifty_steps_keep_no_more_than_three(recipe: Recipe, is_step: bool) -> None:
    model = nn.Sequential(LayerNormMLP(16, 32), Linear(16, 16))
    optimizer = FusedAdam(model.parameters(), lr=1e-3)

    def loss_of(module: nn.Module, x: Tensor) -> Tensor:
        loss: Tensor = module(x).square().mean()
        return loss

    step = TrainStep(model, loss_of, optimizer, fp8_recipe=recipe) if is_step else None
    seen = []
    for number in range(1, 51):
        x = torch.randn(16, 16)
        if step is not None:
            step(x)
        else:
            with fp8.fp8_autocast(recipe=recipe):
                loss = loss_of(model, x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if number in (3, 50):
            seen.append(kept(model, optimizer))
    assert seen[0] == seen[1]
    histories = [value for key, value in model.state_dict().items() if key.endswith("fp8_history")]
    if isinstance(recipe, fp8.DelayedScaling):
        assert len(histories) == len(list(model))
    assert all(5 in history.shape for history in histories)
