"""A stand-in for CUDA's graphs, with which a TrainStep on a CPU goes its course of warm-up, capture and replay.

It takes a step while it captures and takes all that was written back, and a replay takes the step again on the graph's
own tensors, as a graph does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fusestep import TrainStep
from fusestep.fp8.statistics import states_of
from fusestep.graph import train_step
from fusestep.optim import FusedAdam


class Stand:
    """Stands for CUDA while a step captures."""

    def __init__(self) -> None:
        self.is_capturing = False
        self.captured_elsewhere: list[Stream] = []  # by others than a TrainStep
        self.ends_badly = False
        self.replays = 0
        self.generator_states: list[str] = []
        self.log: list[str] = []
        self.streams = [Stream(self, "user's")]

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """Stands for torch.cuda.stream."""
        self.streams.append(stream)
        try:
            yield
        finally:
            self.streams.pop()


class Stream:
    """Stands for torch.cuda.Stream."""

    def __init__(self, stand: Stand, name: str) -> None:
        self.stand, self.name = stand, name

    def wait_stream(self, other: Stream) -> None:
        self.stand.log.append(f"{self.name} waits for {other.name}")


class Graph:
    """Stands for torch.cuda.CUDAGraph."""

    def __init__(self, stand: Stand) -> None:
        self.stand = stand
        self.again: Callable[[], Tensor] | None = None
        self.loss: Tensor | None = None

    def replay(self) -> None:
        assert self.again is not None
        assert self.loss is not None
        self.stand.replays += 1
        self.loss.copy_(self.again())


@pytest.fixture
def stand(monkeypatch: pytest.MonkeyPatch) -> Stand:
    """Steps on a CPU believe that they have graphs."""
    stand = Stand()
    current: list[Graph] = []

    @contextlib.contextmanager
    def capturing(made: Graph, **_: Any) -> Iterator[None]:
        current.append(made)
        stand.is_capturing = True
        try:
            yield
        finally:
            stand.is_capturing = False
            current.pop()
        if stand.ends_badly:
            raise RuntimeError("operation failed due to a previous error during capture")

    vars(capturing)["default_capture_stream"] = None  # of torch.cuda.graph
    real = TrainStep._eager

    def eager(self: Any, batch: Any) -> Tensor:
        if not current:
            return real(self, batch)
        model, optimizer = self.model, self.optimizer
        written: list[Tensor] = [*model.parameters(), *model.buffers()]
        written += [t for s in optimizer.state.values() for t in s.values() if isinstance(t, Tensor)]
        written += [optimizer._counters] if isinstance(optimizer, FusedAdam) else []
        scaling = [t for _, state in states_of(model) for t in (state.slots, state.history, state.rolls, state.counts)]
        written += scaling
        before = [tensor.detach().clone() for tensor in written]
        loss = real(self, batch)
        # A capture does not write in scaling state, so it does not count as written in either.
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tuple(scaling)):
            for tensor, value in zip(written, before, strict=True):
                tensor.copy_(value)
        current[-1].again, current[-1].loss = lambda: real(self, batch), loss
        return loss

    def prepare(step: Any) -> None:
        step._stream, step._optimizer_stream = Stream(stand, "step's"), Stream(stand, "optimizer's")

    generator = SimpleNamespace(clone_state=lambda: "before", graphsafe_set_state=stand.generator_states.append)
    cuda = SimpleNamespace(
        CUDAGraph=lambda: Graph(stand),
        graph=capturing,
        graph_pool_handle=object,
        current_stream=lambda device: stand.streams[-1],
        is_current_stream_capturing=lambda: stand.streams[-1] in stand.captured_elsewhere,
        set_stream=lambda given: None,
        stream=stand.on,
        empty_cache=lambda: stand.log.append("release"),
        get_sync_debug_mode=lambda: 0,
        set_sync_debug_mode=lambda mode: None,
        memory_reserved=lambda device: 0,
        synchronize=lambda: None,
        default_generators=[generator],
    )
    monkeypatch.setattr(train_step.torch, "cuda", SimpleNamespace(**vars(torch.cuda) | vars(cuda)))
    monkeypatch.setattr(TrainStep, "_prepare", prepare)
    monkeypatch.setattr(TrainStep, "_prepare_optimizer", lambda step: None)
    monkeypatch.setattr(TrainStep, "_eager", eager)
    monkeypatch.setattr(Tensor, "record_stream", lambda self, stream: None)
    return stand
