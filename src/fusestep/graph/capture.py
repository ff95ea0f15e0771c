"""One capture: the launches of a step taken into a graph; or why not, with everything where it was before."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fusestep import hardware
from fusestep.errors import UserError
from fusestep.graph import segments
from fusestep.graph.batch import Batch
from fusestep.graph.recovery import recovered_capture
from fusestep.graph.watch import Places


@dataclass(frozen=True)
class Capture:
    """What one capture cost.

    Attributes: batch: the shapes of the batch's tensors; seconds: of the host, the warm-up left out; memory: bytes
        that the graphs' pool grew by.
    """

    batch: tuple[tuple[int, ...], ...]
    seconds: float
    memory: int


def attempt(
    take: Callable[[Batch], Tensor],
    batch: Batch,
    model: nn.Module,
    modules: Iterable[nn.Module],
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    pool: Any,
    stream: torch.cuda.Stream | None,
) -> tuple[list[Tensor], torch.cuda.CUDAGraph, Tensor] | str:
    """Capture a step.

    Args:
        take: takes a step with a batch, and returns its loss.
        modules: whose buffers stay where they are, the model's among them.
        batch: on the `device`; the graph reads copies of its tensors.
        pool: of the graph's memory.
        stream: to capture on.
    Returns: the tensors in which the graph reads a batch, the graph, and its loss; or why there can be none.
    Raises: what `take` raised where it is not the capture's fault: an interrupt, or an error of loss_fn's.
    """
    inputs = [part.detach().clone().requires_grad_(part.requires_grad) for part in batch.tensors]
    model.zero_grad()  # a graph that adds to gradients of before would write where they were for ever
    graph, places = torch.cuda.CUDAGraph(), Places(modules, optimizer)
    failure: BaseException | None = None
    # thread_local: a loader's thread that pins memory meanwhile is no part of this.
    capture = torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local")
    try:
        with recovered_capture(device), segments.capturing(), capture:
            try:
                loss = take(batch.with_tensors(inputs))
            except BaseException as error:  # kept until the capture is ended, which nothing may be raised through
                failure = error
    except RuntimeError as error:  # what is broken within a capture breaks its end too, which says less
        failure = error if failure is None else failure
    reason = None if failure is not None else places.replaced()
    if failure is not None or reason is not None:
        places.put_back()  # what a capture made holds nothing
    if failure is not None:
        if not isinstance(failure, (RuntimeError, UserError)):
            raise failure
        reason = f"the step cannot be captured ({hardware.first_line(failure)})"
        failure = None
    if reason is not None:
        gc.collect()  # the frames of the failure hold a backward graph that was made on the other stream
        return reason
    return inputs, graph, loss
