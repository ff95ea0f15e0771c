"""A training step of plain PyTorch, for contenders: no part of fusestep's is in it, whatever the parts are."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from fusestep.ladder.rungs import Recipe
from fusestep.ladder.step import AUTOCAST, Part, prepare
from fusestep.ladder.subject import Subject

#: Steps before a capture, on the stream that captures, as torch asks.
WARM_UP = 3


class TorchStep:
    """Forward, backward and optimizer as torch's documentation writes them; on request as one CUDA graph.

    Args:
        loss: of a batch.
        optimizer: with `graphed` one whose step is capturable.
        device: where it trains.
        autocast: as of torch.autocast around the loss; None for none.
        region: makes a context that is entered around the loss as well.
        graphed: capture the whole step after `WARM_UP` steps, and replay it from then on.
        words: the optimizer, for a reader.
        parts: what the step is made of, for a reader.
    """

    def __init__(
        self,
        loss: Callable[..., Tensor],
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        *,
        autocast: torch.dtype | None = None,
        region: Callable[[], AbstractContextManager[Any]] = nullcontext,
        graphed: bool = False,
        words: str,
        parts: tuple[Part, ...] = (),
    ) -> None:
        self._loss, self._optimizer, self._device = loss, optimizer, device
        self._autocast, self._region, self._is_graphed = autocast, region, graphed
        self._words, self._parts = words, list(parts)
        self._taken = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: list[Tensor] = []
        self._result: Tensor | None = None
        self._stream = torch.cuda.Stream(device) if graphed else None

    def __call__(self, *batch: Any) -> Tensor:
        """Train on a batch that lies on the device; the loss as a 0-d tensor, with no sync."""
        if self._stream is None:
            return self._eager(batch)
        if self._taken < WARM_UP:
            self._taken += 1
            return self._aside(batch)
        if self._graph is None:
            self._capture(batch)
        given = [one for one in tree_flatten(batch)[0] if isinstance(one, Tensor)]
        for static, one in zip(self._inputs, given, strict=True):
            static.copy_(one, non_blocking=True)
        assert self._graph is not None
        assert self._result is not None
        self._graph.replay()
        return self._result.clone()

    def parts(self) -> list[Part]:
        return self._parts

    def optimizer_in_words(self) -> str:
        return self._words

    def _eager(self, batch: tuple[Any, ...]) -> Tensor:
        self._drop_gradients()
        # A graph cannot hold the casts of weights that autocast keeps beyond it.
        keeps = self._stream is None
        with (
            torch.autocast(self._device.type, self._autocast, enabled=self._autocast is not None, cache_enabled=keeps),
            self._region(),
        ):
            loss = self._loss(*batch)
        loss.backward()
        self._optimizer.step()
        return loss.detach()

    def _drop_gradients(self) -> None:
        """As zero_grad(set_to_none=True), which not all optimizers of other libraries take."""
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def _aside(self, batch: tuple[Any, ...]) -> Tensor:
        assert self._stream is not None
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            loss = self._eager(batch)
        current.wait_stream(self._stream)
        return loss

    def _capture(self, batch: tuple[Any, ...]) -> None:
        """Raises: what the capture raises; a contender is then measured without, in another process."""
        start = time.perf_counter()
        leaves, shape = tree_flatten(batch)
        inputs = [one.clone() if isinstance(one, Tensor) else one for one in leaves]
        self._inputs = [one for one in inputs if isinstance(one, Tensor)]
        # The gradients of before lie outside of the graph's memory, and would stay there beside it for nothing.
        self._drop_gradients()
        graph = torch.cuda.CUDAGraph()
        # thread_local: what torch.compile's own threads do meanwhile is no part of this.
        with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
            self._result = self._eager(tree_unflatten(inputs, shape))
        self._graph = graph
        seconds = time.perf_counter() - start
        self._parts.append(Part("whole-step graph", "graph", f"torch.cuda.graph, captured in {seconds:.2f} s"))


def native_step(recipe: Recipe, subject: Subject, device: torch.device, seed: int) -> TorchStep:
    """The step of a recipe from PyTorch's own parts: autocast, torch.compile, fused AdamW, torch.cuda.graph."""
    prepare(seed)
    model = subject.model(recipe, device)
    if recipe.weights == "bf16":
        model = model.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.lr, weight_decay=0.01, fused=True, capturable=recipe.graph
    )
    loss = subject.loss(recipe)

    def of_batch(*batch: Any) -> Tensor:
        return loss(model, *batch)

    return TorchStep(
        torch.compile(of_batch) if recipe.compiled else of_batch,
        optimizer,
        device,
        autocast=None if recipe.weights == "bf16" else AUTOCAST[recipe.precision],
        graphed=recipe.graph,
        words="torch.optim.AdamW (fused)",
        parts=(Part("torch.compile", "torch", "forward, backward and loss"),) if recipe.compiled else (),
    )
