"""Plain attributes of modules, such as a dropout's p: constants in a graph, which holds what they were.

Those that modules write themselves as they run, such as counts, are left out: replays, which run no Python, leave them
as they are.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Set
from contextlib import contextmanager
from itertools import chain
from operator import call, is_, itemgetter
from typing import Any

import torch
from torch import nn

#: Types of the attributes that are compared.
PLAIN = frozenset({bool, int, float, complex, str, type(None), torch.dtype})

#: Attributes of every module, to read where fewer than two are compared.
_FILLING = ("_forward_hooks", "_backward_hooks")

#: In the place of an attribute that is no more; of no plain type.
_GONE = object()


class Attributes:
    """The public plain attributes of some modules, `training` among them, as they were."""

    def __init__(self) -> None:
        self._written: weakref.WeakKeyDictionary[nn.Module, set[str]] = weakref.WeakKeyDictionary()
        self.remember(())

    def remember(self, modules: Iterable[nn.Module], named: Set[str] = frozenset()) -> None:
        """From now on these modules' attributes are to stay as they are, and private ones of the names `named`."""
        self._modules, self._named = list(modules), named
        self._known = [self._compared(module) for module in self._modules]
        #: How many attributes of any kind there are: a new one may hide that of the class.
        self._sizes = [len(vars(module)) for module in self._modules]
        # Of fewer than two names itemgetter makes no tuple.
        self._reads = [itemgetter(*known, *_FILLING[len(known) :]) for known in self._known]
        self._objects = list(self._found(map(vars, self._modules)))

    @contextmanager
    def running(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """Around a run of the step's Python: what modules write in their plain attributes meanwhile is their own."""
        before = [(module, self._plain(module)) for module in modules]
        try:
            yield
        finally:
            for module, values in before:
                found = self._plain(module)
                written = {name for name in found if name in values and found[name] != values[name]}
                if written:
                    self._written.setdefault(module, set()).update(written)
            self.remember(self._modules, self._named)

    def changed(self) -> str | None:
        """What changed, in words."""
        dictionaries = list(map(vars, self._modules))
        try:
            if list(map(len, dictionaries)) == self._sizes and all(map(is_, self._found(dictionaries), self._objects)):
                return None
        except KeyError:  # one is gone, which is looked for now
            pass
        for module, known, size in zip(self._modules, self._known, self._sizes, strict=True):
            if (name := self._changed_in(module, known, size)) is not None:
                return f"the attribute {name!r} of {type(module).__name__}"
        self.remember(self._modules, self._named)  # equal, though not the same objects
        return None

    def _found(self, dictionaries: Iterable[dict[str, Any]]) -> Iterator[Any]:
        return chain.from_iterable(map(call, self._reads, dictionaries))

    def _changed_in(self, module: nn.Module, known: dict[str, Any], size: int) -> str | None:
        """The name of an attribute that is new, gone or another."""
        if len(vars(module)) != size:
            new = sorted(self._compared(module).keys() - known.keys())
            if new:
                return new[0]
        for name, before in known.items():
            now = vars(module).get(name, _GONE)
            # What was a plain value may be a tensor now, of which "equal" would wait, or raise.
            if now is not before and (type(now) not in PLAIN or now != before):
                return name
        return None

    def _compared(self, module: nn.Module) -> dict[str, Any]:
        written = self._written.get(module, ())
        return {name: value for name, value in self._plain(module).items() if name not in written}

    def _plain(self, module: nn.Module) -> dict[str, Any]:
        return {
            name: value
            for name, value in vars(module).items()
            if type(value) in PLAIN and (not name.startswith("_") or name in self._named)
        }
