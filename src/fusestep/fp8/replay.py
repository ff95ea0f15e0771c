"""What a CUDA graph that holds FP8 modules needs beside its launches.

A replay runs a module's kernels, which record amaxes in its scaling state, but none of its Python, which would tell the
region that there is something to roll; and the steps that torch takes to warm a graph up leave amaxes of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fusestep.fp8 import context
from fusestep.fp8.state import Slots
from fusestep.fp8.statistics import states_of


def note_replay(states: Iterable[Slots]) -> None:
    """Tell the region that this thread is in that a graph recorded amaxes in these states, as their modules would.

    Does nothing outside of a region, and where the region belongs to evaluation.
    """
    region = context.current()
    if region is None or not torch.is_grad_enabled():
        return
    for state in states:
        region.pending.add(state, region.group)


@contextmanager
def kept_state(model: nn.Module) -> Iterator[None]:
    """Put the scaling state of a model's modules back at the end, in place, so that a graph captured within holds it.

    State that came into being within is as new at the end: its scales come from the first tensors that are cast.
    """
    before = {id(state): (state, _copies(state)) for _, state in states_of(model)}
    try:
        yield
    finally:
        for _, state in states_of(model):
            known = before.get(id(state))
            if known is None:
                _start_anew(state)
            else:
                for tensor, kept in zip(_tensors(state), known[1], strict=True):
                    tensor.copy_(kept)


def _tensors(state: Slots) -> tuple[Tensor, ...]:
    return state.slots, state.history, state.rolls, state.counts


def _copies(state: Slots) -> list[Tensor]:
    return [tensor.clone() for tensor in _tensors(state)]


def _start_anew(state: Slots) -> None:
    state.scale.zero_()
    state.amax.zero_()
    state.refused.zero_()
    for tensor in (state.history, state.rolls, state.counts):
        tensor.zero_()
