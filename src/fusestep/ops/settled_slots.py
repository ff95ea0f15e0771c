"""Slots that are known to hold a scale, for whose casts no pass has to look for an amax before.

Such a pass serves the first tensor of a slot alone, and in a small step its launch, which finds nothing to do, takes
a time that shows. The host cannot see whether a slot has a scale without waiting for the device, so a cast launches it,
but for two cases:

- those that are captured within `settled`: who captures has read the slots before, and does not replay what was
  captured once a scale is gone;
- outside of captures, tables that were read at leisure (`note`; fp8/settled.py does), while nobody writes in them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from fusestep.ops.layouts import keep
from fusestep.ops.roll_scales import SLOT

#: From slot to slot, in bytes.
_WIDTH = 4 * SLOT

#: Addresses of slots, a set for each capture that is going on. Of all threads, since backward has one of its own.
captures: list[frozenset[int]] = []


def address(slots_at: int, index: int) -> int:
    """Where the slot of an index lies, in slots (n, 4) fp32 at an address."""
    return slots_at + _WIDTH * index


@contextmanager
def settled(addresses: frozenset[int]) -> Iterator[None]:
    """Around a capture: casts rely on the slots at these addresses to hold a scale whenever they are replayed."""
    captures.append(addresses)
    try:
        yield
    finally:
        captures.remove(addresses)


def is_settled(slots_at: int, index: int) -> bool:
    """Whether a cast may rely on a slot to hold a scale. Always false where there are no `captures`: ask those first,
    which costs a cast outside of them next to nothing."""
    place = address(slots_at, index)
    return any(place in addresses for addresses in captures)


class _Noted(NamedTuple):
    """A table of slots of which the host knows: in which version, and which of its slots hold a scale."""

    table: weakref.ref[Tensor]
    version: int
    holding: frozenset[int]


#: By the tables' addresses, which others may have once a table is no more.
_noted: dict[int, _Noted] = {}


def note(table: Tensor, version: int, holding: frozenset[int]) -> None:
    """Casts outside of captures may rely on these slots of a table while it has this version."""
    keep(_noted, table.data_ptr(), _Noted(weakref.ref(table), version, holding))


def may_rely(slots: Tensor | None, slots_at: int, indices: tuple[int, ...]) -> bool:
    """Whether a cast that is about to be launched may rely on slots of a table (n, 4) fp32 to hold a scale."""
    if captures and all(is_settled(slots_at, index) for index in indices):
        return True
    noted = _noted.get(slots_at)
    if noted is None or slots is None or noted.table() is not slots or noted.version != slots._version:
        return False
    # A replay would not look again whether anything still holds.
    is_capturing = slots.is_cuda and torch.cuda.is_current_stream_capturing()
    return not is_capturing and noted.holding.issuperset(indices)
