"""Rolling: amaxes that were recorded enter their histories, and scales are renewed.

    amax = 0                nothing was cast: nothing changes
    amax not finite         the old scale is kept, the refusal counted
    else                    history ← amax;  scale ← format's largest / algorithm(history) / 2^margin

The modules of a model take one launch together; what that launch reads is worked out at the first roll of a set of
modules and looked up at the others, which spares the host most of it and lets a CUDA graph hold the roll.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fusestep import dispatch
from fusestep.errors import UserError
from fusestep.fp8.ranks import RanksTable
from fusestep.fp8.recipes import DelayedScaling, Recipe
from fusestep.fp8.settled import Watch
from fusestep.fp8.state import Reference, Slots, ordered
from fusestep.ops.layouts import keep
from fusestep.ops.roll_scales import LARGEST, SCALE, RollTable, roll_scales, roll_scales_reference, scale_reference

if TYPE_CHECKING:
    from fusestep.distributed.amax import Reduction

#: What torch.compile has frames of this thread go to, None outside of it.
_compiler_of_frames = torch._C._dynamo.eval_frame.get_eval_frame_callback

#: Plans that are kept; sets of modules that never repeat would else fill the memory.
MOST_PLANS = 64


class Pending:
    """The states of a thread in which something was recorded since their last roll. Holds none of them alive."""

    def __init__(self) -> None:
        self._recorded: dict[Reference, Any] = {}
        self._begun: dict[Any, Recipe] = {}
        self._tables: dict[Any, RanksTable] = {}
        self._plans: dict[tuple[Any, ...], list[_Batch]] = {}

    def __reduce__(self) -> tuple[type[Pending], tuple[()]]:
        """A copy, or a pickle, has nothing pending: what is belongs to the states of a thread."""
        return Pending, ()

    def add(self, state: Slots, group: Any = None) -> None:
        """Have a state rolled when the next region begins, its amaxes reduced over `group` before."""
        self._recorded[state.reference] = group
        state.__dict__["is_pending"] = True

    def begin(self, group: Any, recipe: Recipe) -> None:
        """Have amaxes reduced over a group when the next region begins, whether or not something is recorded here."""
        self._begun[group] = recipe

    def roll(self) -> None:
        """Move what was recorded into the histories, and renew the scales.

        Where that raises, what was recorded is kept, so that the next region raises too until the cause is mended. What
        has rolled by then has an amax of 0, which does not roll again.
        """
        recorded = self._recorded
        if not recorded and not self._begun:
            return
        if torch.compiler.is_compiling() or _compiler_of_frames() is not None:
            _without_compiling()(self, recorded)
        else:
            self._roll_all(recorded)
        self._recorded, self._begun = {}, {}

    def _roll_all(self, recorded: dict[Reference, Any]) -> None:
        if not self._begun and not any(recorded.values()):
            self._roll([state for reference in recorded if (state := reference.state()) is not None])
            return
        by_group: dict[Any, list[Slots]] = {group: [] for group in self._begun}
        for reference, group in recorded.items():
            state = reference()
            if state is not None:
                by_group.setdefault(group, []).append(state)
        self._roll(by_group.pop(None, []))
        for group, states in by_group.items():
            # What is in the table of no rank yet stays as it was recorded.
            table = self._tables.get(group)
            if table is None:
                table = self._tables[group] = RanksTable(group)
            begun = self._begun.get(group)
            recipe = begun if isinstance(begun, DelayedScaling) else states[0].recipe
            reduction, members, amaxes = table.reduce(states, recipe)
            self._roll(members, reduction, amaxes)

    def _roll(
        self, states: list[Slots], reduction: Reduction | None = None, amaxes: Sequence[Tensor] | None = None
    ) -> None:
        """Roll states by their own amaxes, or by those that a reduction left."""
        if reduction is None and len(states) > 1:
            states.sort(key=attrgetter("number"))
        numbers = (reduction, *[state.number for state in states])
        plan: list[_Batch] | None = self._plans.get(numbers)
        if plan is None:
            plan = keep(self._plans, numbers, _plan(states, amaxes), MOST_PLANS)
        for batch in plan:
            batch.roll(states)
        for state in states:
            state.__dict__["is_pending"] = False


@functools.cache
def _without_compiling() -> Callable[[Pending, dict[Reference, Any]], None]:
    """Rolls as they are where a region begins in a function that torch.compile traces, or between its graphs."""
    unseen: Callable[[Pending, dict[Reference, Any]], None] = torch.compiler.disable(Pending._roll_all)
    return unseen


@dataclass(frozen=True)
class _Batch:
    """States that one launch rolls, by their places; without a table, in plain PyTorch.

    Attributes:
        amaxes: of each, where they are not the states' own; a table has their addresses.
        watch: of the states of a table.
    """

    places: tuple[int, ...]
    margin: int
    most_recent: bool
    table: RollTable | None
    has_callable: bool
    amaxes: tuple[Tensor, ...] | None
    watch: Watch

    def roll(self, states: Sequence[Slots]) -> None:
        if self.table is not None:
            self.table.roll()
            if self.watch.is_due():
                self.watch.look([states[place] for place in self.places])
            return
        members = [states[place] for place in self.places]
        if self.amaxes is not None:
            torch._foreach_copy_([state.amax for state in members], list(self.amaxes))
        if self.has_callable:
            for state in members:
                roll_by_callable(state)
        else:
            roll_scales(
                [(state.slots, state.history, state.rolls) for state in members],
                margin=self.margin,
                most_recent=self.most_recent,
            )


def _plan(states: Sequence[Slots], amaxes: Sequence[Tensor] | None = None) -> list[_Batch]:
    batches: dict[tuple[torch.device, int, bool, bool], list[int]] = {}
    for place, state in enumerate(states):
        algorithm = state.recipe.amax_compute_algo
        key = (state.slots.device, state.recipe.margin, algorithm == "most_recent", callable(algorithm))
        batches.setdefault(key, []).append(place)
    plan = []
    for (device, margin, most_recent, has_callable), places in batches.items():
        table = None
        given = None if amaxes is None else tuple([amaxes[place] for place in places])
        if device.type == "cuda" and not has_callable and dispatch.uses_triton("roll_scales", device):
            members = [states[place] for place in places]
            is_near = given is None or all(amax.device == device for amax in given)
            if is_near:
                tensors = [(state.slots, state.history, state.rolls) for state in members]
                table = RollTable(tensors, given, margin=margin, most_recent=most_recent)
        plan.append(_Batch(tuple(places), margin, most_recent, table, has_callable, given, Watch()))
    return plan


def roll_by_callable(state: Slots) -> None:
    """Roll one state whose amaxes a function of the user's chooses from the history, on the device.

    Where it chooses zero, or what is not finite, the old scale is kept.
    Raises: UserError, before anything is changed, if it does not return one amax for each slot.
    """
    algorithm = state.recipe.amax_compute_algo
    if not callable(algorithm):
        raise TypeError(f"roll_by_callable: {algorithm!r} is no function")
    slots, history, rolls = state.slots.clone(), state.history.clone(), state.rolls.clone()
    roll_scales_reference(slots, history, rolls, margin=0, most_recent=True)
    shown = ordered(history, rolls).t()
    chosen = algorithm(shown)
    if not isinstance(chosen, Tensor) or chosen.shape != state.scale.shape or chosen.device != shown.device:
        got = f"{tuple(chosen.shape)} on {chosen.device}" if isinstance(chosen, Tensor) else repr(chosen)
        raise UserError(
            f"DelayedScaling: amax_compute_algo returned {got} for a history of {tuple(shown.shape)} on "
            f"{shown.device}; return a tensor of one amax for each slot, {tuple(state.scale.shape)}, on its device."
        )
    chosen = chosen.detach().float()
    usable = (rolls > state.rolls) & chosen.isfinite() & (chosen > 0)
    scale = scale_reference(chosen, slots[:, LARGEST], state.recipe.margin)
    slots[:, SCALE] = torch.where(usable, scale, state.scale)
    for ours, rolled in ((state.slots, slots), (state.history, history), (state.rolls, rolls)):
        ours.copy_(rolled)
