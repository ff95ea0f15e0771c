"""Delayed scaling over ranks: whose amaxes a group reduces, and the states that they are rolled into.

    table      the modules that ran in regions of the group on any rank, in an order that all know (distributed/amax.py)
    a roll     one collective over the table; then each rank rolls every module of it, those that did not run here too

So all ranks have the same histories and scales after each roll, bit for bit. A module that runs first after the table
was made takes its scales from its own tensors until the ranks agree anew, a few rolls later; what it saw by then enters
its history at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fusestep.distributed.amax import Flags, Reduction, Roster, agreed_table, device_of, exchanged
from fusestep.errors import UserError
from fusestep.fp8.recipes import DelayedScaling
from fusestep.fp8.seats import kinds, owner_of, take_seat
from fusestep.fp8.state import Reference, Slots

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

#: Whether this build of torch knows of ranks at all.
_HAS_RANKS = torch.distributed.is_available()


def region_group(recipe: object, group: ProcessGroup | None) -> ProcessGroup | None:
    """Over whose ranks a region reduces amaxes, None where each rank is by itself.

    Args: group: as given; None: all ranks.
    """
    if not isinstance(recipe, DelayedScaling) or not recipe.reduce_amax:
        return None
    distributed = torch.distributed
    if not _HAS_RANKS or not distributed.is_initialized():
        return None
    chosen = distributed.group.WORLD if group is None else group
    return chosen if chosen is not None and chosen.size() > 1 else None


class RanksTable:
    """The table of one group in one thread."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._flags = Flags()
        self._is_made = False
        self._seats: list[int] = []
        self._places: dict[int, int] = {}
        self._widths: list[int] = []
        self._known: list[Reference | None] = []
        self._waiting: dict[Reference, None] = {}
        self._reduction: Reduction | None = None
        self._reduced_by: Reduction | None = None
        self._numbers: list[int | None] = []
        self._amaxes: list[Tensor | None] = []
        self._parts: list[Tensor] = []

    def reduce(self, recorded: Sequence[Slots], recipe: DelayedScaling) -> tuple[Reduction, list[Slots], list[Tensor]]:
        """Reduce the amaxes of the table, in one collective that every rank of the group calls.

        Args:
            recorded: states of this rank in which something was recorded.
            recipe: of the group's regions.
        Returns: who reduced; the states of this rank that are to roll; the amaxes of each, (slots,) fp32, of all ranks.
        Raises: UserError where the ranks' modules cannot be told apart, or in a capture that holds new ones.
        """
        self._take(recorded)
        is_capturing = self._is_capturing(recorded)
        if not self._is_made or (not is_capturing and self._flags.is_raised()):
            if is_capturing:
                raise _captured_too_early()
            self._agree()
            self._is_made = True
        elif is_capturing and self._waiting:
            raise _captured_too_early()
        states = self._states(recipe)
        reduction = self._reduction_of(states)
        numbers = [None if state is None else state.number for state in states]
        if numbers != self._numbers or reduction is not self._reduced_by:
            # Made once, since views of a hundred modules' amaxes take the host a while.
            self._numbers, self._reduced_by = numbers, reduction
            self._amaxes = [None if state is None else state.amax for state in states]
            self._parts = [part for part, state in zip(reduction.parts, states, strict=True) if state is not None]
        flag = reduction(self._amaxes, bool(self._waiting))
        if not is_capturing:
            self._flags.send(flag)
        return reduction, [state for state in states if state is not None], self._parts

    def _take(self, recorded: Sequence[Slots]) -> None:
        """Note where states are that were made anew, and which are in no table yet."""
        for state in recorded:
            if state.seat is None:
                state.seat = take_seat(state, "state")
            place = self._places.get(state.seat)
            if place is None:
                self._waiting[state.reference] = None
            else:
                self._known[place] = state.reference

    def _agree(self) -> None:
        """Take in what has run on any rank since the table was made. The hosts wait for each other."""
        joining: dict[int, Slots] = {}
        for state in [reference() for reference in self._waiting]:
            if state is not None and state.seat is not None:
                joining[state.seat] = state
        ran = sorted(joining)
        held = [seat if owner_of(seat) is not None else -1 for seat in self._seats]
        roster = Roster(held, ran, [len(joining[seat].names) for seat in ran], kinds())
        table = agreed_table(exchanged(roster, self._group))
        joined = table.joined[torch.distributed.get_rank(self._group)]
        self._seats = [self._seats[place] for place in table.kept] + joined
        self._widths = [self._widths[place] for place in table.kept] + table.widths
        new = [joining[seat].reference if seat in joining else None for seat in joined]
        self._known = [self._known[place] for place in table.kept] + new
        self._places = {seat: place for place, seat in enumerate(self._seats)}
        self._waiting.clear()
        self._reduction = None
        self._flags.clear()

    def _states(self, recipe: DelayedScaling) -> list[Slots | None]:
        """The state at each place; None where this rank has no such module any more."""
        states: list[Slots | None] = []
        for place, seat in enumerate(self._seats):
            reference = self._known[place]
            state = None if reference is None else reference()
            if state is None:
                owner = owner_of(seat)
                if owner is not None:
                    state = owner.shared_state(recipe)
                    state.seat = seat
                    self._known[place] = state.reference
            states.append(state)
        return states

    def _reduction_of(self, states: Sequence[Slots | None]) -> Reduction:
        device = next((state.slots.device for state in states if state is not None), None)
        if self._reduction is None or (device is not None and self._reduction.device != device):
            self._reduction = Reduction(self._group, self._widths, device_of(self._group) if device is None else device)
        return self._reduction

    def _is_capturing(self, recorded: Sequence[Slots]) -> bool:
        is_on_gpu = any(state.slots.is_cuda for state in recorded[:1]) or (
            self._reduction is not None and self._reduction.device.type == "cuda"
        )
        return is_on_gpu and torch.cuda.is_current_stream_capturing()


def _captured_too_early() -> UserError:
    return UserError(
        "a CUDA graph is being captured of a step whose FP8 modules the ranks do not know of each other yet; run five "
        "whole steps before the capture."
    )
