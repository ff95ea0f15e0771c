"""Seats: the number of each module that scales, by which ranks know that they speak of the same one.

Seats are given in the order in which modules are built, copies too, which is the same on all ranks of one program. A
module that never runs has one as well, so that a rank can take part for a module that ran elsewhere alone.
"""

from __future__ import annotations

import sys
import weakref
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from fusestep.fp8.recipes import DelayedScaling
    from fusestep.fp8.state import Slots


class Seated(Protocol):
    """What has a seat."""

    def shared_state(self, recipe: DelayedScaling) -> Slots:
        """The scaling state, made where there is none yet, in which a roll over ranks leaves what others saw."""


_seats: list[weakref.ref[Any]] = []
_kinds: list[str] = []


def take_seat(owner: Seated, kind: str) -> int:
    """Give a module its seat. `kind` is one word that tells it from modules of other kinds."""
    _seats.append(weakref.ref(owner))
    _kinds.append(sys.intern(kind))
    return len(_seats) - 1


def owner_of(seat: int) -> Seated | None:
    """The module that has a seat, None where it is no more."""
    owner: Seated | None = _seats[seat]()
    return owner


def kinds() -> list[str]:
    """What has each seat."""
    return _kinds
