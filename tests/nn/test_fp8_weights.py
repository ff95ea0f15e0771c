"""Modules whose weights live in FP8 alone, or are cast by the optimizer."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusestep.fp8 import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, fp8_autocast, fp8_model_init
from fusestep.fp8.casts import Casts
from fusestep.fp8.recipes import Recipe
from fusestep.fp8.tensor import Float8Tensor
from fusestep.nn import LayerNormLinear, LayerNormMLP, Linear
from fusestep.optim import FusedAdam

MODULES: dict[str, Callable[..., Any]] = {
    "linear": lambda **options: Linear(24, 24, **options),
    "split": lambda **options: LayerNormLinear(24, 24, parameters_split=("a", "b", "c"), **options),
    "mlp": lambda **options: LayerNormMLP(24, 40, **options),
}


@pytest.fixture(params=list(MODULES))
def make(request: pytest.FixtureRequest) -> Callable[..., Any]:
    return MODULES[request.param]


def with_values(module: nn.Module) -> nn.Module:
    """A copy whose weights are the FP8 weights' values in fp32."""
    plain = copy.deepcopy(module)
    for name, parameter in module.named_parameters():
        if isinstance(parameter, Float8Tensor):
            setattr(plain, name, nn.Parameter(parameter.dequantize()))
    return plain


def test_weights_in_fp8_give_what_their_values_give(make: Any, recipe: Recipe, device: torch.device) -> None:
    with fp8_model_init(recipe=recipe):
        module = make(device=device)
    weights = [p for p in module.parameters() if p.dim() == 2]
    assert all(isinstance(weight, Float8Tensor) for weight in weights)
    plain = with_values(module)
    x, dy = torch.randn(7, 24, device=device), torch.randn(7, 24, device=device)
    assert torch.allclose(module(x), plain(x), atol=1e-6)
    results = []
    for each in (module, plain):
        its_x = x.clone().requires_grad_()
        with fp8_autocast(recipe=recipe):
            y = each(its_x)
        y.backward(dy)
        results.append((y.detach(), its_x.grad, *(p.grad for p in each.parameters())))
    for ours, theirs in zip(*results, strict=True):
        # Casting the values again may take another scale, and a split weight casts its gradients apart.
        assert (ours - theirs).norm() <= 0.12 * theirs.norm()


def test_weights_under_another_recipe_are_cast_for_it(device: torch.device) -> None:
    with fp8_model_init(recipe=Float8CurrentScaling()):
        module = Linear(24, 24, device=device)
    plain = with_values(module)
    x = torch.randn(7, 24, device=device)
    with fp8_autocast(recipe=Float8BlockScaling()):
        assert torch.equal(module(x), plain(x))


def test_weights_in_fp8_are_saved_copied_and_loaded(make: Any, device: torch.device) -> None:
    with fp8_model_init():
        module, other = make(device=device), make(device=device)
    x = torch.randn(7, 24, device=device)
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file))
    with torch.no_grad(), fp8_autocast():
        assert torch.equal(module(x), other(x))
        assert torch.equal(module(x), copy.deepcopy(module)(x))


@pytest.mark.parametrize("recipe", [DelayedScaling(), Float8CurrentScaling(), Float8BlockScaling()], ids=str)
def test_a_training_forward_casts_no_weight_that_the_optimizer_has_cast(
    recipe: Recipe, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = LayerNormMLP(24, 40, device=device)
    other = copy.deepcopy(module)
    optimizer = FusedAdam(module.parameters(), lr=1e-3)
    reference = torch.optim.AdamW(other.parameters(), lr=1e-3, weight_decay=0.0, foreach=False)
    cast: list[Tensor] = []
    kinds = {kind for base in Casts.__subclasses__() for kind in (base, *base.__subclasses__())} | {Casts}
    for kind in kinds:
        if "weight" in vars(kind):

            def counted(self: Any, weight: Tensor, *args: Any, original: Any = kind.weight, **options: Any) -> Any:
                cast.append(weight)
                return original(self, weight, *args, **options)

            monkeypatch.setattr(kind, "weight", counted)
    for number in range(4):
        x = torch.randn(7, 24, device=device)
        outputs = []
        for each, its_optimizer in ((module, optimizer), (other, reference)):
            cast.clear()
            with fp8_autocast(recipe=recipe):
                y = each(x)
            if each is module:
                assert len(cast) == (2 if number == 0 else 0)
            y.square().mean().backward()
            its_optimizer.step()
            its_optimizer.zero_grad()
            outputs.append(y.detach())
        # The optimizer casts with the scale of its step, which is one step older.
        assert (outputs[0] - outputs[1]).norm() <= 0.1 * outputs[1].norm()
    # What was written since, in whatever way that a version tells, is cast afresh.
    with torch.no_grad():
        module.fc1_weight.mul_(2)
    cast.clear()
    with fp8_autocast(recipe=recipe):
        module(x)
    assert [weight.shape for weight in cast] == [module.fc1_weight.shape]
    cast.clear()
    module.eval()
    with torch.no_grad(), fp8_autocast(recipe=recipe):
        module(x)
    assert len(cast) == 2
