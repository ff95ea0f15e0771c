"""The kinds of batch that a step meets: how far each is from its capture, and its graph; only so many are kept."""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fusestep.graph import ranks
from fusestep.graph.batch import Batch

logger = logging.getLogger("fusestep")


@dataclass
class Shape:
    """What is kept for a kind of batch: steps until its capture, then the graph and the tensors it reads and writes."""

    warm_up: int
    inputs: list[Tensor] = field(default_factory=list)
    graph: torch.cuda.CUDAGraph | None = None
    loss: Tensor | None = None


class Shapes:
    """What is kept for each kind of batch.

    Args: warm_up, warm_up_again: steps before the first capture of each, and before one after something had changed.
    """

    def __init__(self, warm_up: int, warm_up_again: int) -> None:
        self._warm_up, self._warm_up_again = warm_up, warm_up_again
        self._kept: OrderedDict[Any, Shape] = OrderedDict()
        self._has_made_room = False

    def of(self, batch: Batch, model: nn.Module, most: int) -> Shape:
        """What is kept for this kind of batch; where it is new and there are `most`, it takes the place of another."""
        key = batch.kind()
        if key not in self._kept:
            self._kept[key] = Shape(ranks.warm_up(model, self._warm_up))
            while len(self._kept) > most:
                self._kept.popitem(last=False)
                if not self._has_made_room:
                    self._has_made_room = True
                    logger.warning(
                        "TrainStep: more than max_graphs=%d kinds of batch (shapes, and values that are not tensors) "
                        "take turns, and those that make room lose their graphs; pad batches to fewer shapes, or pass "
                        "a larger max_graphs",
                        most,
                    )
        self._kept.move_to_end(key)
        return self._kept[key]

    def have_graphs(self) -> bool:
        return any(shape.graph is not None for shape in self._kept.values())

    def drop_graphs(self) -> None:
        """Have each warm up and be captured anew."""
        for shape in self._kept.values():
            shape.graph = shape.loss = None
            shape.warm_up = self._warm_up_again

    def clear(self) -> None:
        self._kept.clear()
