"""Mistakes in what a TrainStep is built from are told in a sentence, with the mend."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusestep import TrainStep
from fusestep.errors import UserError
from fusestep.optim import FusedAdam, accumulate_in_fp32


def square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


MISTAKES: dict[str, tuple[str, Callable[[Any, Any], object]]] = {
    "autocast by name": (
        r"autocast is 'bf16', not a floating-point dtype; pass torch\.bfloat16",
        lambda m, o: TrainStep(m, square, o, autocast="bf16"),  # type: ignore[arg-type]
    ),
    "autocast to integers": (
        r"autocast is torch\.int8",
        lambda m, o: TrainStep(m, square, o, autocast=torch.int8),
    ),
    "autocast asked for": (r"autocast is True", lambda m, o: TrainStep(m, square, o, autocast=True)),  # type: ignore[arg-type]
    "a scaler asked for": (
        r"scaler is True, not a GradScaler; pass torch\.amp\.GradScaler\(\)",
        lambda m, o: TrainStep(m, square, o, scaler=True),  # type: ignore[arg-type]
    ),
    "a scaler's class": (
        r"scaler is the class GradScaler",
        lambda m, o: TrainStep(m, square, o, scaler=torch.amp.GradScaler),  # type: ignore[arg-type]
    ),
    "a recipe by name": (
        r"fp8_recipe is 'delayed', not a recipe",
        lambda m, o: TrainStep(m, square, o, fp8_recipe="delayed"),  # type: ignore[arg-type]
    ),
    "a rate for before": (r"before is 0\.1, not a function", lambda m, o: TrainStep(m, square, o, before=0.1)),  # type: ignore[arg-type]
    "an optimizer's class": (
        r"the optimizer is the class FusedAdam; .* FusedAdam\(model\.parameters\(\)\)",
        lambda m, _: TrainStep(m, square, FusedAdam),  # type: ignore[arg-type]
    ),
    "optimizer before loss": (
        r"the optimizer is a function, which has no step to take; pass TrainStep\(model, loss_fn, optimizer\)",
        lambda m, o: TrainStep(m, o, square),
    ),
    "a schedule for the optimizer": (
        r"the optimizer is a StepLR, which has no param_groups; pass TrainStep\(model, loss_fn, optimizer\)",
        lambda m, o: TrainStep(m, square, torch.optim.lr_scheduler.StepLR(o, 1)),  # type: ignore[arg-type]
    ),
    "loss before model": (
        r"the model is a function, not a torch\.nn\.Module; pass TrainStep\(model, loss_fn, optimizer\)",
        lambda m, o: TrainStep(square, m, o),  # type: ignore[arg-type]
    ),
    "optimizer before model": (r"the model is a FusedAdam", lambda m, o: TrainStep(o, square, m)),
    "a loss's class": (
        r"loss_fn is the class MSELoss, not a function of the model and a batch",
        lambda m, o: TrainStep(m, nn.MSELoss, o),
    ),
    "a loss": (r"loss_fn is a Tensor, not a function", lambda m, o: TrainStep(m, torch.ones(()), o)),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told_when_the_step_is_made(mistake: str) -> None:
    said, make = MISTAKES[mistake]
    model = nn.Linear(5, 3)
    with pytest.raises(UserError, match=f"^TrainStep: .*{said}") as raised:
        make(model, FusedAdam(model.parameters()))
    assert str(raised.value).count(". ") == 0


def test_an_optimizer_of_another_model_is_told_in_the_first_step() -> None:
    trained, other = nn.Linear(5, 3), nn.Linear(5, 3)
    step = TrainStep(trained, square, FusedAdam(other.parameters()))
    before = copy.deepcopy(trained.state_dict())
    with pytest.raises(UserError, match=r"no parameter of FusedAdam got a gradient.* build the optimizer from the"):
        step(torch.randn(4, 5))
    assert all(torch.equal(value, before[name]) for name, value in trained.state_dict().items())
    assert all(p.grad is None for p in (*trained.parameters(), *other.parameters()))


def test_an_optimizer_of_part_of_a_model_and_of_main_gradients_is_none_of_these() -> None:
    model, other = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2)), nn.Linear(5, 3)
    optimizer = FusedAdam([*other.parameters(), *model[1].parameters()], 1e-2)
    accumulate_in_fp32(model.parameters())
    before = model[1].weight.detach().clone()
    TrainStep(model, square, optimizer)(torch.randn(4, 5))
    assert not torch.equal(model[1].weight, before)


def test_later_steps_may_be_without_a_gradient() -> None:
    """As of a branch that is not taken."""
    model = nn.Sequential(nn.Linear(5, 3), nn.Linear(5, 3))
    step = TrainStep(model, lambda model, x, which: square(model[which], x), FusedAdam(model[0].parameters(), 1e-2))
    step(torch.randn(4, 5), 0)
    before = model[0].weight.detach().clone()  # type: ignore[union-attr, operator]
    step(torch.randn(4, 5), 1)
    assert torch.equal(model[0].weight, before)  # type: ignore[arg-type]
