"""Scaling state of delayed scaling: what modules remember of their tensors from step to step.

A module has one *slot* for each tensor that it casts (its input, its weight, its output's gradient, …). All state lies
in fixed device tensors, and everything that happens to it happens on the device: no value depends on a branch in
Python, so a CUDA graph can hold a step, the first one included. (What the host knows of scales saves launches alone:
settled.py.)

    slots    (n, 4) fp32: scale (0: none yet), amax since the last roll, largest value of the format, rolls refused
    history  (n, length) fp32: a ring of amaxes; the newest stands at (rolls − 1) mod length
    rolls    (n,) int64: amaxes that entered the history
    counts   (n, 3) int64: elements cast, saturated, flushed to zero; counted while asked for

A cast reads the slot's scale, or where there is none yet takes it from the slot's amax and the tensor's own; and it
raises the slot's amax to the tensor's. Rolling (pending.py) moves amaxes into histories and renews scales. Recording is
idempotent between two rolls (a maximum), so a module that runs twice, or again for backward, does no harm.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fusestep.errors import UserError
from fusestep.fp8.formats import Format, largest
from fusestep.fp8.recipes import DelayedScaling
from fusestep.ops.roll_scales import AMAX, LARGEST, REFUSED, SCALE, SLOT

if TYPE_CHECKING:
    from typing import Self

#: Keys of the state in a module's state dict, after the module's prefix.
KEYS = ("fp8_slots", "fp8_history", "fp8_rolls")

#: What a table of addresses, or the plan of a roll, was made from.
_PLANNED = frozenset(("slots", "history", "rolls", "recipe"))
_numbers = itertools.count()


class Reference:
    """A weak reference to a state; an object of ours, since torch.compile takes weakref.ref for what it refers to.

    Attributes:
        state: gives the state, or None once it is no more, as a call does; without a step in Python.
    """

    __slots__ = ("state",)

    def __init__(self, state: Slots) -> None:
        self.state = weakref.ref(state)

    def __call__(self) -> Slots | None:
        return self.state()


class Slots:
    """The scaling state of one module: a slot for each of `names`.

    Args:
        names: what the slots are of; names that begin with "grad" hold gradients, in the recipe's backward format.
        recipe: gives the formats and the length of the history.
        device: where the state lies.

    Attributes:
        number: unlike that of any other state, and another one whenever a tensor or the recipe was replaced, so that
            what was worked out for a number holds while the number is met.
        reference: leads to this state without keeping it alive.
        is_pending: whether amaxes of a forward or backward wait for their roll. One that the optimizer's own cast of a
            weight left is not waiting: the next forward records it, by its cast or by that copy.
        seat: of the module that it is of (seats.py), by which ranks know it; None where it has been told none yet.
    """

    slots: Tensor
    history: Tensor
    rolls: Tensor
    counts: Tensor
    number: int
    is_pending: bool
    seat: int | None

    def __init__(self, names: Sequence[str], recipe: DelayedScaling, device: torch.device) -> None:
        self.reference = Reference(self)
        self.names = tuple(names)
        self.recipe = recipe
        self.is_pending = False
        self.seat = None
        self._start(device)

    def _start(self, device: torch.device) -> None:
        n = len(self.names)
        # Made in inference mode, tensors could never be changed outside it.
        with torch.inference_mode(False):
            self.slots = torch.zeros(n, SLOT, dtype=torch.float32, device=device)
            self.history = torch.zeros(n, self.recipe.amax_history_len, dtype=torch.float32, device=device)
            self.rolls = torch.zeros(n, dtype=torch.int64, device=device)
            self.counts = torch.zeros(n, 3, dtype=torch.int64, device=device)
            self.slots[:, LARGEST] = self._largest(device)

    def _largest(self, device: torch.device) -> Tensor:
        """(n,) the largest value of each slot's format."""
        formats = self.recipe.fp8_format
        dtypes = [formats.backward if name.startswith("grad") else formats.forward for name in self.names]
        return torch.tensor([largest(dtype) for dtype in dtypes], dtype=torch.float32, device=device)

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        if name in _PLANNED:
            object.__setattr__(self, "number", next(_numbers))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("number", "reference", "seat")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Of a copy or a pickle: a state of its own, with a number of its own."""
        self.reference = Reference(self)
        self.seat = None
        for name, value in state.items():
            setattr(self, name, value)

    def follow(self, recipe: DelayedScaling) -> None:
        """Serve this recipe from now on.

        Another history length keeps the newest amaxes; a slot whose format changes keeps its amaxes and takes its next
        scale from its tensor, since a scale belongs to a format.
        """
        if recipe is self.recipe or recipe == self.recipe:
            return
        old, self.recipe = self.recipe, recipe
        if recipe.amax_history_len != old.amax_history_len:
            self.history = resized(self.history, self.rolls, recipe.amax_history_len)
        if recipe.fp8_format is not old.fp8_format:
            self._take_formats()

    def _take_formats(self) -> None:
        """Set what is largest in each slot's format, and forget the scales of another format."""
        wanted = self._largest(self.slots.device)
        self.scale.masked_fill_(self.slots[:, LARGEST] != wanted, 0.0)
        self.slots[:, LARGEST] = wanted

    def shared_state(self, recipe: DelayedScaling) -> Self:
        """Itself: a state that belongs to no module takes part among ranks as one does (seats.py)."""
        self.follow(recipe)
        return self

    def to(self, device: torch.device) -> Self:
        """Move the state to a device, in place. Coming back from "meta" it starts anew."""
        if device == self.slots.device:
            return self
        if self.slots.is_meta:
            self._start(device)
            return self
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
        """Plain tensors, for a checkpoint. An amax in it waits for its roll."""
        slots = self.slots
        if not self.is_pending:
            slots = slots.clone()
            slots[:, AMAX] = 0.0
        return dict(zip(KEYS, (slots, self.history, self.rolls), strict=True))

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take over what `as_dict` gave, in place, whatever its history's length.

        A slot that was saved under another format keeps its amaxes and takes its next scale from its tensor.
        Raises: UserError, before anything is changed, for what is not the state of such a module.
        """
        slots, history, rolls = checked(state, self.names)
        device = self.slots.device
        slots, history, rolls = slots.to(device), history.to(device), rolls.to(device)
        self.history.copy_(resized(history, rolls, self.history.shape[1]))
        self.slots.copy_(slots)
        self.rolls.copy_(rolls)
        self.is_pending = True
        self._take_formats()

    @classmethod
    def restored(cls, names: Sequence[str], state: Mapping[str, Tensor], device: torch.device) -> Self:
        """The state of a module that has not run yet, from what `as_dict` gave; the first forward's recipe follows.

        Raises: UserError, as `load`.
        """
        slots, history, _ = checked(state, tuple(names))
        is_hybrid = bool((slots[:, LARGEST] == largest(torch.float8_e5m2)).any())
        formats = Format.HYBRID if is_hybrid else Format.E4M3
        found = cls(names, DelayedScaling(fp8_format=formats, amax_history_len=history.shape[1]), device)
        found.load(state)
        return found


def checked(state: Mapping[str, Tensor], names: tuple[str, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """(slots, history, rolls) of a saved state, fit for a module that casts `names`.

    Raises: UserError.
    """
    missing = [key for key in KEYS if key not in state]
    if missing:
        raise UserError(
            f"FP8 state lacks {' and '.join(missing)}; load all of {', '.join(KEYS)}, or none for a fresh start."
        )
    slots, history, rolls = (state[key] for key in KEYS)
    n = len(names)
    if slots.dim() == 2 and slots.shape[1] == SLOT and slots.shape[0] != n:
        raise UserError(
            f"FP8 state of {slots.shape[0]} tensors does not fit a module that casts {n} ({', '.join(names)}); load it "
            "into the kind of module that it was saved from."
        )
    shapes = [tuple(tensor.shape) for tensor in (slots, history, rolls)]
    if history.dim() != 2 or not history.shape[1] or shapes != [(n, SLOT), (n, history.shape[1]), (n,)]:
        raise UserError(
            f"FP8 state has the shapes {', '.join(map(str, shapes))}; wanted are slots of ({n}, {SLOT}), a history of "
            f"({n}, length) and rolls of ({n},), as a module's state dict holds them."
        )
    return slots.float(), history.float(), rolls.to(torch.int64)


def ordered(history: Tensor, rolls: Tensor) -> Tensor:
    """(n, length) amaxes from the oldest to the newest, from rings whose newest stands at (rolls − 1) mod length."""
    length = history.shape[1]
    places = (torch.arange(length, device=history.device) + rolls[:, None]) % length
    return history.gather(1, places)


def resized(history: Tensor, rolls: Tensor, length: int) -> Tensor:
    """Rings of another length with the newest amaxes, whose newest stands at (rolls − 1) mod the new length."""
    if history.shape[1] == length:
        return history
    newest_last = ordered(history, rolls)
    grown = torch.zeros(history.shape[0], length, dtype=history.dtype, device=history.device)
    kept = min(length, history.shape[1])
    grown[:, length - kept :] = newest_last[:, history.shape[1] - kept :]
    places = (torch.arange(length, device=history.device) - rolls[:, None]) % length
    return grown.gather(1, places)
