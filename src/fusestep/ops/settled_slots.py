"""Slots that are known to hold a scale, for whose casts no pass has to look for an amax before.

Such a pass serves the first tensor of a slot alone, and in a small step its launch, which finds nothing to do, takes
a time that shows. The host cannot see whether a slot has a scale without waiting for the device, so every cast launches
it, but for those that are captured within `settled`: who captures has read the slots before, and does not replay what
was captured once a scale is gone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

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
