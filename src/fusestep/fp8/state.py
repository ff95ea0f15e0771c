"""Scaling state of delayed scaling: what modules remember of their tensors from step to step.

A module has one *slot* for each tensor that it casts (its input, its weight, its output's gradient, …). All state lies
in fixed device tensors, and everything that happens to it happens on the device: no branch in Python depends on it, so
a CUDA graph can hold a step, the first one included.

    slots    (n, 4) fp32: scale (0: none yet), amax since the last roll, largest value of the format, rolls refused
    history  (n, length) fp32: a ring of amaxes; the newest stands at (rolls − 1) mod length
    rolls    (n,) int64: amaxes that entered the history
    counts   (n, 3) int64: elements cast, saturated, flushed to zero; counted while asked for

A cast reads the slot's scale, or where there is none yet takes it from the slot's amax, which a pass before has then
set to the tensor's own; and it raises the slot's amax to the tensor's. `roll` moves amaxes into histories:

    amax = 0                nothing was cast: nothing changes
    amax not finite         the old scale is kept, the refusal counted
    else                    history ← amax;  scale ← format's largest / algorithm(history) / 2^margin

Recording is idempotent between two rolls (a maximum), so a module that runs twice, or again for backward, does no harm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fusestep.errors import UserError
from fusestep.fp8.formats import largest
from fusestep.ops.roll_scales import AMAX, LARGEST, REFUSED, SCALE, SLOT, roll_scales, scale_reference

if TYPE_CHECKING:
    from fusestep.fp8.recipes import AmaxAlgorithm, DelayedScaling

#: Keys of the state in a module's state dict, after the module's prefix.
KEYS = ("fp8_slots", "fp8_history", "fp8_rolls")


class Slots:
    """The scaling state of one module: a slot for each of `names`.

    Args:
        names: what the slots are of; names that begin with "grad" hold gradients, in the recipe's backward format.
        recipe: gives the formats and the length of the history.
        device: where the state lies.
    """

    def __init__(self, names: Sequence[str], recipe: DelayedScaling, device: torch.device) -> None:
        self.names = tuple(names)
        self.recipe = recipe
        n = len(self.names)
        self.slots = torch.zeros(n, SLOT, dtype=torch.float32, device=device)
        self.history = torch.zeros(n, recipe.amax_history_len, dtype=torch.float32, device=device)
        self.rolls = torch.zeros(n, dtype=torch.int64, device=device)
        self.counts = torch.zeros(n, 3, dtype=torch.int64, device=device)
        self._set_formats()

    def _set_formats(self) -> None:
        formats = self.recipe.fp8_format
        dtypes = [formats.backward if name.startswith("grad") else formats.forward for name in self.names]
        largest_values = torch.tensor([largest(dtype) for dtype in dtypes], dtype=torch.float32)
        self.slots[:, LARGEST].copy_(largest_values)

    def follow(self, recipe: DelayedScaling) -> None:
        """Serve this recipe from now on: another history length keeps the newest amaxes, other formats their amaxes."""
        if recipe is self.recipe or recipe == self.recipe:
            return
        old, self.recipe = self.recipe, recipe
        if recipe.amax_history_len != old.amax_history_len:
            self.history, self.rolls = resized(self.history, self.rolls, recipe.amax_history_len)
        if recipe.fp8_format is not old.fp8_format:
            self._set_formats()
            # A scale belongs to its format; the next forward takes it from the tensor again.
            self.slots[:, SCALE].zero_()

    def to(self, device: torch.device) -> Slots:
        """The same state on another device; on "meta" it starts anew when it comes back."""
        if device != self.slots.device:
            for name in ("slots", "history", "rolls", "counts"):
                setattr(self, name, getattr(self, name).to(device))
        return self

    @property
    def scale(self) -> Tensor:
        """(n,) fp32, what values are multiplied by before the cast; 0 where a slot has seen nothing."""
        return self.slots[:, SCALE]

    @property
    def amax(self) -> Tensor:
        """(n,) fp32, the largest magnitude seen since the last roll."""
        return self.slots[:, AMAX]

    @property
    def refused(self) -> Tensor:
        """(n,) fp32, how many rolls kept the old scale because an amax was not finite."""
        return self.slots[:, REFUSED]

    def ordered_history(self) -> Tensor:
        """(length, n) fp32 amaxes, the newest last, zero where there is none yet."""
        return ordered(self.history, self.rolls).t()

    def as_dict(self) -> dict[str, Tensor]:
        """Plain tensors, for a checkpoint."""
        return dict(zip(KEYS, (self.slots, self.history, self.rolls), strict=True))

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take over what `as_dict` gave, in place, whatever its history's length.

        Raises: UserError for another number of slots.
        """
        slots, history, rolls = (state[key].to(self.slots.device) for key in KEYS)
        if slots.shape != self.slots.shape:
            raise UserError(
                f"FP8 state of {slots.shape[0]} tensors does not fit a module that casts {len(self.names)} "
                f"({', '.join(self.names)}); load it into the kind of module that it was saved from."
            )
        history, rolls = resized(history, rolls, self.history.shape[1])
        self.slots.copy_(slots)
        self.history.copy_(history)
        self.rolls.copy_(rolls)
        self._set_formats()


def ordered(history: Tensor, rolls: Tensor) -> Tensor:
    """(n, length) amaxes from the oldest to the newest, from rings whose newest stands at (rolls − 1) mod length."""
    length = history.shape[1]
    places = (torch.arange(length, device=history.device) + rolls[:, None]) % length
    return history.gather(1, places)


def resized(history: Tensor, rolls: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Rings of another length with the newest amaxes, and the rolls that tell where their newest stands."""
    if history.shape[1] == length:
        return history, rolls
    newest_last = ordered(history, rolls)
    grown = torch.zeros(history.shape[0], length, dtype=history.dtype, device=history.device)
    kept = min(length, history.shape[1])
    grown[:, length - kept :] = newest_last[:, history.shape[1] - kept :]
    # Rolls stay what they were; the ring is turned to match them.
    places = (torch.arange(length, device=history.device) - rolls[:, None]) % length
    return grown.gather(1, places), rolls


class Pending:
    """The states of a thread in which something was recorded since their last roll."""

    def __init__(self) -> None:
        self._states: dict[Slots, Any] = {}

    def add(self, state: Slots, group: Any = None) -> None:
        """Have a state rolled when the next region begins, its amaxes reduced over `group` before."""
        self._states[state] = group

    def roll(self) -> None:
        """Move what was recorded into the histories, and renew the scales: one launch for each recipe and device."""
        states, self._states = self._states, {}
        batches: dict[tuple[Any, ...], list[Slots]] = {}
        for state, group in states.items():
            batches.setdefault((state.recipe, state.slots.device, group), []).append(state)
        for (recipe, _, group), members in batches.items():
            roll(members, recipe, group)


def roll(states: Sequence[Slots], recipe: DelayedScaling, group: Any = None) -> None:
    """Roll states of one recipe on one device; see the head of this file."""
    if group is not None and recipe.reduce_amax:
        reduce_amaxes(states, group)
    algorithm = recipe.amax_compute_algo
    if callable(algorithm):
        for state in states:
            roll_by(algorithm, state)
        return
    triples = [(state.slots, state.history, state.rolls) for state in states]
    roll_scales(triples, margin=recipe.margin, most_recent=algorithm == "most_recent")


def roll_by(algorithm: AmaxAlgorithm, state: Slots) -> None:
    """Roll one state whose amaxes a function of the user's chooses from the history, on the device."""
    rolls = state.rolls.clone()
    roll_scales([(state.slots, state.history, state.rolls)], margin=0, most_recent=False)
    chosen = algorithm(state.ordered_history())
    if not isinstance(chosen, Tensor) or chosen.shape != state.scale.shape:
        shape = tuple(chosen.shape) if isinstance(chosen, Tensor) else type(chosen).__name__
        raise UserError(
            f"DelayedScaling: amax_compute_algo returned {shape} for a history of "
            f"{tuple(state.ordered_history().shape)}; return one amax for each slot, {tuple(state.scale.shape)}."
        )
    usable = (state.rolls > rolls) & chosen.isfinite() & (chosen > 0)
    scale = scale_reference(chosen.float(), state.slots[:, LARGEST], state.recipe.margin)
    state.scale.copy_(torch.where(usable, scale, state.scale))


def reduce_amaxes(states: Sequence[Slots], group: Any) -> None:
    """Make each amax the largest of its ranks', in one reduction for all states."""
    if torch.distributed.get_world_size(group) == 1:
        return
    amaxes = torch.cat([state.amax for state in states])
    torch.distributed.all_reduce(amaxes, torch.distributed.ReduceOp.MAX, group)
    parts = amaxes.split([len(state.names) for state in states])
    torch._foreach_copy_([state.amax for state in states], list(parts))
