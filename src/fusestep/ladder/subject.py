"""What a ladder trains: the built-in GPT, or (in `own.py`) a model of the user's."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusestep.data import open_source
from fusestep.data.source import random_below
from fusestep.ladder.rungs import Recipe
from fusestep.models import GPT, GPTConfig
from fusestep.models.gpt import INITIAL_STD

#: Data of uniformly random token ids: what a table of embeddings meets that is larger than the data's vocabulary.
RANDOM = "random"

#: Called as loss(model, *batch); a 0-d tensor.
Loss = Callable[..., Tensor]


class Subject(Protocol):
    """What is trained: its model by each recipe, its loss, its batches."""

    def model(self, recipe: Recipe, device: torch.device) -> nn.Module:
        """The model of a recipe on the device, in training mode, from weights that every recipe shares.

        The caller has seeded torch.
        """

    def loss(self, recipe: Recipe) -> Loss:
        """The loss of a recipe."""

    def batches(self, device: torch.device, *, reverse: bool = False) -> Iterator[tuple[Any, ...]]:
        """Endless batches on the device, the same for every recipe; `reverse` turns the samples of each around."""


class BuiltIn:
    """The GPT of `fusestep.models`, on tokens.

    Args:
        config: its sizes; its form and norm are the recipe's.
        data: as `fusestep.data.open_source` reads it, or "random".
        batch, seed: sequences a step, and the seed of the data.
    """

    def __init__(self, config: GPTConfig, data: str, batch: int, seed: int) -> None:
        self.config, self._data, self._batch, self._seed = config, data, batch, seed

    def model(self, recipe: Recipe, device: torch.device) -> nn.Module:
        config = replace(self.config, form=recipe.form, norm=recipe.norm)
        if device.type == "cpu":
            return GPT(config, device=device)
        model = GPT(config, device="meta").to_empty(device=device)
        _draw(model)
        return model

    def loss(self, recipe: Recipe) -> Loss:
        return GPT.loss if recipe.loss == "fused" else loss_of_logits

    def batches(self, device: torch.device, *, reverse: bool = False) -> Iterator[tuple[Tensor, Tensor]]:
        """(B, T) tokens and their targets."""
        for step in itertools.count():
            tokens, targets = self._sample(step)
            if reverse:
                tokens, targets = tokens.flip(0), targets.flip(0)
            yield tokens.to(device), targets.to(device)

    def _sample(self, step: int) -> tuple[Tensor, Tensor]:
        count, context = self._batch, self.config.context
        if self._data != RANDOM:
            if step == 0:
                self._source = open_source(self._data, seed=self._seed)
            return self._source.batch(step * count, count, context)
        size = count * (context + 1)
        sequence = random_below(self.config.symbols, self._seed, 0, step * size, size).view(count, context + 1)
        return sequence[:, :-1].contiguous(), sequence[:, 1:].contiguous()


@torch.no_grad()
def _draw(model: nn.Module) -> None:
    """The initial values of `GPT.reset_parameters`, drawn on the device in the same order.

    The host would take seconds for each hundred million, in every process of a ladder.
    """
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.normal_(0.0, INITIAL_STD)
        else:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)


def loss_of_logits(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy of the next token through all logits: (B, T) tokens and targets."""
    return F.cross_entropy(model(tokens).float().flatten(0, 1), targets.flatten())
