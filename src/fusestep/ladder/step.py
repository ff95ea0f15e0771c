"""One training step made from a rung's recipe: model, optimizer, precision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fusestep import dispatch
from fusestep.fp8 import fp8_autocast
from fusestep.fp8.recipes import recipe_named
from fusestep.fp8.statistics import TensorStatistics, collect
from fusestep.graph import TrainStep
from fusestep.ladder.rungs import Precision, Recipe
from fusestep.ladder.subject import Subject
from fusestep.optim import FusedAdam

#: What torch.autocast computes in, None for no autocast.
AUTOCAST: Mapping[Precision, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16, "fp8": torch.bfloat16}


@dataclass(frozen=True)
class Part:
    """A part of ours that a step called, and what it ran as: in the words of `fusestep.dispatch`, or "graph"."""

    name: str
    implementation: str
    reason: str


def prepare(seed: int) -> None:
    """What holds for every step that is compared: full FP32 products, and one seed.

    TF32 would make the first rung something that nobody asked for.
    """
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    torch.manual_seed(seed)


class Step:
    """A training step by a rung's recipe: forward, loss, backward, optimizer.

    Args:
        recipe: how the step is made.
        subject: what is trained.
        device: where it trains.
        seed: of the initial weights.
    """

    def __init__(self, recipe: Recipe, subject: Subject, device: torch.device, seed: int) -> None:
        prepare(seed)
        self._device_type = device.type
        self._autocast = AUTOCAST[recipe.precision]
        self._fp8 = (
            recipe_named(recipe.scaling, recipe.fp8_format, recipe.amax_history) if recipe.precision == "fp8" else None
        )
        self.model = subject.model(recipe, device)
        self.optimizer: torch.optim.Optimizer = {"torch": torch.optim.AdamW, "fused": FusedAdam}[recipe.optimizer](
            self.model.parameters(), lr=recipe.lr, weight_decay=0.01
        )
        self._loss = subject.loss(recipe)
        self.graphed = (
            TrainStep(self.model, self._loss, self.optimizer, autocast=self._autocast, fp8_recipe=self._fp8)
            if recipe.graph
            else None
        )

    def __call__(self, *batch: Any) -> torch.Tensor:
        """Train on a batch; the loss as a 0-d tensor on the device, with no sync."""
        if self.graphed is not None:
            return self.graphed(*batch)
        # Gradients that lived on beside the forward's activations would only raise the peak.
        self.optimizer.zero_grad()
        with (
            torch.autocast(self._device_type, self._autocast, enabled=self._autocast is not None),
            fp8_autocast(enabled=self._fp8 is not None, recipe=self._fp8),
        ):
            loss = self._loss(self.model, *batch)
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

    def parts(self) -> list[Part]:
        """Every part of ours that ran in this process, once for each way it ran: what happened, not what should."""
        parts = [
            Part(op, choice.implementation, choice.reason)
            for op, choices in sorted(dispatch.decided().items())
            for choice in sorted(choices, key=lambda choice: choice.reason)
        ]
        graphed = self.graphed
        if graphed is not None and graphed.fallback is not None:
            parts.append(Part("train_step", "torch", graphed.fallback))
        elif graphed is not None and graphed.captures:
            parts.append(Part("train_step", "graph", f"captured in {graphed.captures[-1].seconds:.2f} s"))
        return parts


def _saturated(row: TensorStatistics) -> float:
    return row.saturated or 0.0
