"""One training step made from a recipe: model, optimizer, precision, and the batches that it is fed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fusestep import dispatch
from fusestep.data import open_source
from fusestep.fp8 import fp8_autocast
from fusestep.fp8.recipes import recipe_named
from fusestep.fp8.statistics import TensorStatistics, collect
from fusestep.graph import TrainStep
from fusestep.ladder.rungs import Recipe
from fusestep.models import GPT, GPTConfig
from fusestep.optim import FusedAdam


@dataclass(frozen=True)
class Part:
    """A part of ours that a step called, and what it ran as: in the words of `fusestep.dispatch`, or "graph"."""

    name: str
    implementation: str
    reason: str


class Step:
    """A training step of a GPT: forward, cross entropy, backward, optimizer.

    Args:
        recipe: how the step is made.
        config: the model's shape; its form and norm are the recipe's.
        device: where it trains.
        seed: of the initial weights.
    """

    def __init__(self, recipe: Recipe, config: GPTConfig, device: torch.device, seed: int) -> None:
        # Full FP32 products for every rung: TF32 would make the first rung something that nobody asked for.
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = False
        torch.manual_seed(seed)
        self._device_type = device.type
        self._autocast = {"fp32": None, "bf16": torch.bfloat16, "fp8": torch.bfloat16}[recipe.precision]
        self._fp8 = (
            recipe_named(recipe.scaling, recipe.fp8_format, recipe.amax_history) if recipe.precision == "fp8" else None
        )
        self.model = GPT(replace(config, form=recipe.form, norm=recipe.norm), device=device)
        self.optimizer: torch.optim.Optimizer = {"torch": torch.optim.AdamW, "fused": FusedAdam}[recipe.optimizer](
            self.model.parameters(), lr=recipe.lr, weight_decay=0.01
        )
        self._loss: Callable[..., torch.Tensor] = GPT.loss if recipe.loss == "fused" else _loss_of_logits
        self.graphed = (
            TrainStep(self.model, self._loss, self.optimizer, autocast=self._autocast, fp8_recipe=self._fp8)
            if recipe.graph
            else None
        )

    def __call__(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Train on (B, T) tokens and their targets; the mean loss as a 0-d tensor on the device, with no sync."""
        if self.graphed is not None:
            return self.graphed(tokens, targets)
        with (
            torch.autocast(self._device_type, self._autocast, enabled=self._autocast is not None),
            fp8_autocast(enabled=self._fp8 is not None, recipe=self._fp8),
        ):
            loss = self._loss(self.model, tokens, targets)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def worst_saturation(self) -> dict[str, Any] | None:
        """The tensor that saturated most, and its shares; None where nothing was counted. Waits for the device."""
        rows = [row for row in collect(self.model) if row.saturated is not None]
        worst = max(rows, key=_saturated, default=None)
        if worst is None:
            return None
        return {
            "module": worst.module,
            "tensor": worst.tensor,
            "saturated": worst.saturated,
            "flushed": worst.flushed,
            "tensors": len(rows),
        }

    def optimizer_in_words(self) -> str:
        """The optimizer and, where torch chooses one by itself, its implementation."""
        if type(self.optimizer) is not torch.optim.AdamW:
            return f"fusestep.optim.{type(self.optimizer).__name__}"
        how = "foreach" if self._device_type == "cuda" else "one parameter at a time"
        return f"torch.optim.AdamW ({how}, torch's default on {self._device_type})"


def _saturated(row: TensorStatistics) -> float:
    return row.saturated or 0.0


def _loss_of_logits(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens).float().flatten(0, 1), targets.flatten())


def parts_that_ran(step: Step) -> list[Part]:
    """Every part of ours that ran in this process, once for each way it ran: what happened, not what should have."""
    parts = [
        Part(op, choice.implementation, choice.reason)
        for op, choices in sorted(dispatch.decided().items())
        for choice in sorted(choices, key=lambda choice: choice.reason)
    ]
    graphed = step.graphed
    if graphed is not None and graphed.fallback is not None:
        parts.append(Part("train_step", "torch", graphed.fallback))
    elif graphed is not None and graphed.captures:
        parts.append(Part("train_step", "graph", f"captured in {graphed.captures[-1].seconds:.2f} s"))
    return parts


def batches(
    data: str, *, seed: int, batch: int, context: int, device: torch.device, reverse: bool = False
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless batches of (B, T) tokens and targets on the device; `reverse` turns the samples of each around."""
    source: Any = open_source(data, seed=seed)
    first = 0
    while True:
        tokens, targets = source.batch(first, batch, context)
        first += batch
        if reverse:
            tokens, targets = tokens.flip(0), targets.flip(0)
        yield tokens.to(device), targets.to(device)
