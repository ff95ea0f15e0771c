"""The fused GPT within fp8_autocast, emulated on a CPU."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fusestep import fp8
from fusestep.data import arithmetic_sequences
from fusestep.models import GPT, GPTConfig

RECIPES: list[Any] = [fp8.DelayedScaling(), fp8.Float8CurrentScaling(), fp8.Float8BlockScaling()]
CONFIG = GPTConfig(vocab_size=96, width=64, heads=2, layers=2, ffn_width=128, context=32)


def build(**changes: Any) -> GPT:
    torch.manual_seed(1)
    return GPT(CONFIG, **changes)


def loss_of(model: GPT, step: int, recipe: Any, device: torch.device, *, autocast: bool = True) -> torch.Tensor:
    inputs, targets = (part.to(device) for part in arithmetic_sequences(96).batch(16 * step, 16, 32))
    with (
        fp8.fp8_autocast(enabled=recipe is not None, recipe=recipe),
        torch.autocast(device.type, torch.bfloat16, enabled=autocast),
    ):
        logits = model(inputs)
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


@functools.cache
def loss_after(recipe: Any, steps: int, device: torch.device) -> float:
    model = build().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        loss = loss_of(model, step, recipe, device)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: type(recipe).__name__)
def test_it_learns_as_it_does_in_bf16(recipe: Any, device: torch.device) -> None:
    loss = loss_after(recipe, 60, device)
    assert loss < 0.4 * math.log(96)
    assert loss == pytest.approx(loss_after(None, 60, device), rel=0.1)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: type(recipe).__name__)
def test_checkpointed_blocks_give_the_same_gradients_and_scales(recipe: Any, device: torch.device) -> None:
    """The forward that is computed again lies outside the region, and meets the scales of the first."""
    gradients, states = [], []
    for checkpoint_blocks in (False, True):
        model = build(device=device)
        model.checkpoint_blocks = checkpoint_blocks
        for step in range(3):
            model.zero_grad()
            loss_of(model, step, recipe, device).backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
        states.append({name: value for name, value in model.state_dict().items() if "fp8" in name})
    for kept, recomputed in zip(*gradients, strict=True):
        assert torch.equal(kept, recomputed)
    assert states[0].keys() == states[1].keys()
    assert bool(states[0]) == isinstance(recipe, fp8.DelayedScaling)
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]), name


def test_embeddings_final_norm_and_head_stay_in_high_precision() -> None:
    model = build()
    loss_of(model, 0, fp8.DelayedScaling(), torch.device("cpu")).backward()
    with_state = {name.rsplit(".", 1)[0] for name in model.state_dict() if "fp8" in name}
    parts = ("self_attention.layernorm_qkv", "self_attention.proj", "layernorm_mlp")
    assert with_state == {f"blocks.{i}.{part}" for i in range(2) for part in parts}


def test_a_state_dict_with_scales_goes_into_every_form() -> None:
    """Scales are beside the weights under their own names; a model that ran in bf16 has none."""
    model = build()
    plain = model.state_dict()
    loss_of(model, 0, fp8.DelayedScaling(), torch.device("cpu")).backward()
    again = build()
    again.load_state_dict(model.state_dict(), strict=True)
    assert again.state_dict().keys() == model.state_dict().keys()
    again.load_state_dict(plain, strict=True)


def test_the_product_of_the_region_differs_from_bf16_by_a_cast() -> None:
    model = build().eval()
    inputs, _ = arithmetic_sequences(96).batch(0, 4, 32)
    exact = model(inputs)
    with torch.no_grad(), fp8.fp8_autocast(recipe=fp8.Float8CurrentScaling()):
        cast = model(inputs)
    assert cast.dtype == torch.float32
    error = (cast - exact).norm() / exact.norm()
    assert 0.001 < error < 0.1
