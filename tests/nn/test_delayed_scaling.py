"""Delayed scaling over many steps: every number of every step equals a simulation of the slots in float64."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from fusestep.fp8 import DelayedScaling, Format, fp8_autocast
from fusestep.nn import Linear
from fusestep.optim import FusedAdam


class Simulated:
    """A slot as the documentation tells it."""

    def __init__(self, dtype: torch.dtype, recipe: DelayedScaling) -> None:
        self.dtype, self.recipe = dtype, recipe
        self.scale: Tensor | None = None
        self.amax = 0.0
        self.history: list[float] = []

    def scale_of(self, amax: float) -> Tensor:
        return torch.tensor(torch.finfo(self.dtype).max) / torch.tensor(amax) / 2.0**self.recipe.margin

    def roll(self) -> None:
        if self.amax:
            self.history = [*self.history, self.amax][-self.recipe.amax_history_len :]
            is_newest = self.recipe.amax_compute_algo == "most_recent"
            self.scale = self.scale_of(self.history[-1] if is_newest else max(self.history))
        self.amax = 0.0

    def cast(self, x: Tensor) -> Tensor:
        x, largest = x.detach(), torch.finfo(self.dtype).max
        self.amax = max(self.amax, float(x.abs().max()))
        scale = self.scale_of(self.amax) if self.scale is None else self.scale
        return (x * scale).clamp(-largest, largest).to(self.dtype).double() * (1 / scale).double()


@pytest.mark.parametrize("seed", range(24))
def test_every_step_equals_a_simulation(seed: int) -> None:
    """Data grow and shrink; micro-batches share a region or not; the optimizer writes copies or not."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    recipe = DelayedScaling(
        fp8_format=draw.choice([Format.HYBRID, Format.E4M3]),
        amax_history_len=draw.choice([1, 2, 3, 7]),
        margin=draw.choice([0, 1, 2]),
        amax_compute_algo=draw.choice(["max", "most_recent"]),
    )
    has_copies, keeps, micro_batches = draw.random() < 0.5, draw.random() < 0.5, draw.choice([1, 2, 3])
    layer = Linear(19, 13)
    optimizer = (FusedAdam if has_copies else torch.optim.SGD)(layer.parameters(), lr=0.05)
    forward, backward = recipe.fp8_format.forward, recipe.fp8_format.backward
    slots = of_x, of_weight, of_gradient = [Simulated(dtype, recipe) for dtype in (forward, forward, backward)]
    copy: Tensor | None = None
    for _ in range(8):
        kept: Tensor | None = None
        for number in range(micro_batches):
            x = (torch.randn(7, 19) * 10 ** draw.uniform(-1, 1)).requires_grad_()
            dy = torch.randn(7, 13) * 10 ** draw.uniform(-6, -2)
            for slot in slots:
                slot.roll()
            optimizer.zero_grad()
            with fp8_autocast(recipe=recipe):
                y = layer(x, is_first_microbatch=number == 0 if keeps else None)
            y.backward(dy)
            q_x = of_x.cast(x)
            if copy is not None:
                q_weight = copy
            elif kept is not None:
                q_weight = kept
            else:
                q_weight = of_weight.cast(layer.weight)
            kept = q_weight if keeps else None
            q_dy = of_gradient.cast(dy)
            for found, wanted in (
                (y, q_x @ q_weight.t() + layer.bias.double()),
                (x.grad, q_dy @ q_weight),
                (layer.weight.grad, q_dy.t() @ q_x),
            ):
                assert (found.double() - wanted).norm() <= 1e-5 * wanted.norm()
            if draw.random() < 0.3:  # what must change nothing
                with torch.no_grad(), fp8_autocast(recipe=recipe):
                    layer(x * 50)
                    layer.eval()(x * 70)
                layer.train()
        optimizer.step()
        copy = of_weight.cast(layer.weight) if has_copies else None
