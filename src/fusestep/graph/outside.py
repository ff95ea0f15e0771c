"""What loss_fn and `before` read from outside of the model and the batch, as it was when graphs were captured."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter, call, is_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fusestep.distributed.groups import local_of
from fusestep.graph.reach import UNREADABLE, Place, Reach, is_plain, reach

if TYPE_CHECKING:
    from fusestep.graph.train_step import TrainStep

_version = attrgetter("_version")


class Outside:
    """The values that functions read from outside.

    What they put elsewhere themselves as they run, such as a loss that is kept to be shown or a list that it is
    appended to, is left out from then on: replays, which run no Python, leave it as it is. Numbers that they write are
    not: a graph would go on with what they were (watch.py).

    Args:
        step: whose functions they are.
    """

    def __init__(self, step: TrainStep) -> None:
        self._owner = weakref.ref(step)  # a cycle would keep the values until Python looks for cycles
        self._device = step.device
        self._written: set[tuple[str, str]] = set()
        self.forget()

    def forget(self) -> None:
        """Hold nothing."""
        self._hold(Reach())
        self._is_held = False

    def remember(self) -> None:
        """From now on all of it is to stay as it is."""
        self._hold(self._reach())
        self._is_held = True

    @property
    def names(self) -> set[str]:
        """Names of the attributes that the functions read."""
        return self._found.names

    def modules(self) -> list[nn.Module]:
        """The modules that are reached now."""
        return self._reach().modules

    def numbers(self) -> dict[tuple[str, str], Any]:
        """The plain values of now, and of tensors elsewhere how often they were written, by (who, expression)."""
        found = self._reach()
        plain = [one for one in found.places if is_plain(one.value) and not one.is_size]
        elsewhere = [one for one in found.tensors if one[2].device != self._device and not one[2].is_inference()]
        numbers: dict[tuple[str, str], Any] = {(one.who, one.path): one.value for one in plain}
        return numbers | {(who, path): tensor._version for who, path, tensor in elsewhere}

    @contextmanager
    def running(self) -> Iterator[None]:
        """Around a run of the step's Python: what it puts elsewhere meanwhile is its own."""
        places = self._reach().places
        try:
            yield
        finally:
            for place in places:
                now = place.now()
                if place.is_size:
                    is_own = now != place.value
                else:  # what is made once, in a first step, is not
                    is_made = place.value is None or (is_plain(place.value) and is_plain(now))
                    is_own = now is not place.value and not is_made
                if is_own:
                    self._written.add((place.who, place.path))
            if self._is_held:
                self.remember()

    def changed(self) -> str | None:
        """What changed, in words."""
        try:
            if all(map(is_, map(call, self._reads, self._owners), self._values)):
                return self._moved()
        except UNREADABLE:  # one is gone, which is looked for now
            pass
        for place in self._found.places:
            if (what := _change(place)) is not None:
                return what
        self._hold_places(self._found.places)  # equal, though not the same objects
        return self._moved()

    def _reach(self) -> Reach:
        """What is read now; what the step was built from is looked at by itself."""
        step = self._owner()
        assert step is not None
        roots = [(who, root) for who, root in (("loss_fn", step.loss_fn), ("before", step.before)) if root is not None]
        built = step, step.optimizer, step.optimizer.param_groups, step.scaler, step.fp8_recipe
        return reach(roots, built, self._written)

    def _hold(self, found: Reach) -> None:
        self._found = found
        self._hold_places(found.places)
        dense = [one for one in found.tensors if one[2].layout is torch.strided and not one[2].is_nested]
        self._tensors = [_name(who, path) for who, path, _ in dense]
        self._locals: list[Any] = [local_of(tensor) for _, _, tensor in dense]
        self._at = list(map(Tensor.data_ptr, self._locals))
        # What lies on the host goes into launches by its value.
        hosts = [one for one in dense if one[2].device != self._device and not one[2].is_inference()]
        self._on_host = [_name(who, path) for who, path, _ in hosts]
        self._hosts = [tensor for _, _, tensor in hosts]
        self._versions = list(map(_version, self._hosts))

    def _hold_places(self, places: list[Place]) -> None:
        self._found.places = [one._replace(value=one.now()) for one in places]
        self._reads = [one.read for one in places]
        self._owners = [one.owner for one in places]
        self._values = [one.value for one in self._found.places]

    def _moved(self) -> str | None:
        """A tensor that lies elsewhere now, or was written where it is no part of the graph."""
        at, versions = list(map(Tensor.data_ptr, self._locals)), list(map(_version, self._hosts))
        if at != self._at:
            return f"where {next(n for n, a, b in zip(self._tensors, at, self._at, strict=True) if a != b)} lies"
        if versions != self._versions:
            told = zip(self._on_host, versions, self._versions, strict=True)
            return f"the value of {next(n for n, a, b in told if a != b)} on another device"
        return None


def _change(place: Place) -> str | None:
    now, before = place.now(), place.value
    if now is before:
        return None
    if not (is_plain(now) and is_plain(before)):
        return _name(place.who, place.path)
    if repr(now) == repr(before):  # 1, 1.0 and True are equal, and a NaN is not
        return None
    what = f"the length of {_name(place.who, place.path)}" if place.is_size else _name(place.who, place.path)
    return f"{what} (it went from {before!r} to {now!r})"


def _name(who: str, path: str) -> str:
    return f"{who}'s `{path}`"
