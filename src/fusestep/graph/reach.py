"""What a function reads from outside of its arguments: a walk from it over what its code names.

A graph holds all of that as it was. The walk goes over the cells of closures, the globals that code names, default
arguments, what functools.partial binds and the object of a bound method; from there to functions that are called by
name, to attributes whose names some of this code reads, and into lists and dicts, up to LEVELS steps from the first
function. Code of installed packages is not looked at.
"""

from __future__ import annotations

import dis
import functools
import inspect
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter
from types import CodeType, FunctionType, GetSetDescriptorType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, NamedTuple

from torch import Tensor, nn

from fusestep.graph.attributes import PLAIN
from fusestep.installed import is_installed, is_installed_file

#: Steps from the first function to what is looked at last.
LEVELS = 4

#: Members that a list, tuple or dict may have to be looked into, and places that are looked at in all.
MEMBERS, PLACES = 64, 1024

#: In the place of what is no more.
GONE = object()

#: What reading that raises: ValueError for an empty cell, ReferenceError for a dead proxy, RuntimeError of some kinds.
UNREADABLE = (AttributeError, LookupError, ValueError, ReferenceError, RuntimeError)

_contents = attrgetter("cell_contents")


class Place(NamedTuple):
    """Where a value was found.

    Attributes: who: the function that the walk began with, in words; path: the expression, as its code has it; read:
        gives the value, of the owner; is_size: the value is the number of members of what `path` names.
    """

    who: str
    path: str
    read: Callable[[Any], Any]
    owner: Any
    value: Any
    is_size: bool

    def now(self) -> Any:
        """The value of now, GONE for none."""
        try:
            return self.read(self.owner)
        except UNREADABLE:
            return GONE


@dataclass
class Reach:
    """What was found: places of values, the tensors and modules among these."""

    places: list[Place] = field(default_factory=list)
    tensors: list[tuple[str, str, Tensor]] = field(default_factory=list)
    modules: list[nn.Module] = field(default_factory=list)
    names: set[str] = field(default_factory=set)


def reach(roots: Iterable[tuple[str, Any]], passed: Iterable[Any], skipped: Set[tuple[str, str]]) -> Reach:
    """What functions read from outside.

    Args:
        roots: the functions, or other objects that are called, after what they are in words.
        passed: objects that are not looked into.
        skipped: places that are left out, as (who, path).
    """
    roots, passed = list(roots), list(passed)
    names: set[str] = set()
    while True:  # code that is found late names attributes of objects that were found early
        known = set(names)
        walk = _Walk(names, passed, skipped)
        for who, root in roots:
            walk.take(who, root)
        if names == known:
            return walk.found


def is_plain(value: Any) -> bool:
    """Whether equality tells all of a value: numbers, strings and the like, and tuples of them."""
    return type(value) in PLAIN or (type(value) is tuple and all(map(is_plain, value)))


class _Walk:
    """One walk, the near before the far, so that nothing near is missed for having been met far away."""

    def __init__(self, names: set[str], passed: Iterable[Any], skipped: Set[tuple[str, str]]) -> None:
        self.found = Reach(names=names)
        self._skipped = skipped
        self._seen: dict[int, Any] = {id(one): one for one in passed}  # held, so that no other gets its id
        self._queue: deque[tuple[str, str, Any, int]] = deque()

    def take(self, who: str, root: Any) -> None:
        self._root: Any = root.forward if isinstance(root, nn.Module) else root
        while isinstance(self._root, (MethodType, functools.partial)):
            self._root = self._root.__func__ if isinstance(self._root, MethodType) else self._root.func
        if not isinstance(self._root, FunctionType):
            self._root = inspect.getattr_static(type(self._root), "__call__", None)
        self._push(who, "", root, LEVELS)
        if isinstance(root, nn.Module):
            self._push(who, "", self._root, LEVELS)
        while self._queue and len(self.found.places) < PLACES:
            self._visit(*self._queue.popleft())

    def _push(self, who: str, path: str, value: Any, left: int) -> None:
        if not is_plain(value) and id(value) not in self._seen:
            self._seen[id(value)] = value
            self._queue.append((who, path, value, left))

    def _add(self, who: str, path: str, read: Callable[[Any], Any], owner: Any, left: int) -> None:
        """A place, and what is there."""
        if (who, path) in self._skipped:
            return
        place = Place(who, path, read, owner, None, False)
        value = place.now()
        if value is GONE:
            return
        self.found.places.append(place._replace(value=value))
        self._push(who, path, value, left - 1)

    def _visit(self, who: str, path: str, value: Any, left: int) -> None:
        if isinstance(value, Tensor):
            self.found.tensors.append((who, path, value))
        elif isinstance(value, nn.Module):
            self.found.modules.append(value)
            if left > 0:
                self._visit_object(who, path or "self", value, left)
        elif left <= 0:
            return
        elif isinstance(value, FunctionType):
            self._visit_function(who, path, value, left)
        elif isinstance(value, MethodType):
            self._push(who, path, value.__func__, left)
            self._push(who, path.rpartition(".")[0] or "self", value.__self__, left)
        elif isinstance(value, functools.partial):
            self._push(who, path, value.func, left)
            for number, argument in enumerate(value.args):
                self._push(who, f"{path}.args[{number}]".lstrip("."), argument, left)
            for name in value.keywords:
                self._add(who, name, itemgetter(name), value.keywords, left)
        elif isinstance(value, (list, tuple, dict)):
            self._visit_members(who, path, value, left)
        elif not (isinstance(value, (ModuleType, type)) and is_installed(value)):
            self._visit_object(who, path or "self", value, left)

    def _visit_function(self, who: str, path: str, function: FunctionType, left: int) -> None:
        is_root = function is self._root
        if (inner := getattr(function, "__wrapped__", None)) is not None:
            self._push(who, path, inner, left)
        prefix = "" if is_root or not path else f"{function.__name__}: "
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self._add(who, prefix + name, _contents, cell, left)
        if is_installed_file(function.__code__.co_filename) and (inner is not None or not is_root):
            return
        for code in ("__code__", "__defaults__", "__kwdefaults__"):
            self._add(who, prefix + code, attrgetter(code), function, left)
        for name in function.__kwdefaults__ or {}:
            self._add(who, prefix + name, itemgetter(name), function.__kwdefaults__, left)
        loaded, attributes = _names_in(function.__code__)
        self.found.names |= attributes
        for name in loaded:
            if name in function.__globals__:
                self._add(who, prefix + name, itemgetter(name), function.__globals__, left)

    def _visit_members(self, who: str, path: str, members: Any, left: int) -> None:
        if len(members) > MEMBERS:
            return
        if isinstance(members, dict):
            keys: Iterable[Any] = list(members)
            if not all(isinstance(key, (str, int)) for key in keys):
                return
        else:
            keys = range(len(members))
        self.found.places.append(Place(who, path, len, members, len(members), True))
        for key in keys:
            self._add(who, f"{path}[{key!r}]", itemgetter(key), members, left)

    def _visit_object(self, who: str, path: str, owner: Any, left: int) -> None:
        """Those attributes whose names code reads; plain ones of a module are compared with all of its own."""
        own = {} if isinstance(owner, type) else getattr(owner, "__dict__", {})
        for name in sorted(self.found.names):
            found = inspect.getattr_static(owner, name, GONE)
            if found is GONE or (isinstance(owner, nn.Module) and name in own and type(found) in PLAIN):
                continue
            if isinstance(found, property):
                found = found.fget
            if isinstance(found, (staticmethod, classmethod)):
                found = found.__func__
            if own.get(name, GONE) is found or not (isinstance(found, FunctionType) or _is_computed(found)):
                self._add(who, f"{path}.{name}", attrgetter(name), owner, left)
            elif isinstance(found, FunctionType):
                self._push(who, f"{path}.{name}", found, left - 1)
        called = inspect.getattr_static(type(owner), "__call__", None)
        if isinstance(called, FunctionType):
            self._push(who, "" if called is self._root else f"{path}.__call__", called, left)


def _is_computed(found: Any) -> bool:
    """Whether reading such an attribute runs code."""
    if isinstance(found, MemberDescriptorType):  # of a slot
        return False
    return isinstance(found, GetSetDescriptorType) or hasattr(type(found), "__get__")


@functools.lru_cache(maxsize=256)
def _names_in(code: CodeType) -> tuple[tuple[str, ...], frozenset[str]]:
    """The globals and the attributes that code reads, that of functions within it too."""
    loaded: dict[str, None] = {}
    attributes = set()
    for one in _codes(code):
        for instruction in dis.get_instructions(one):
            if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                loaded[instruction.argval] = None
            elif instruction.opname.startswith("LOAD_") and instruction.opname.endswith(("ATTR", "METHOD")):
                attributes.add(instruction.argval)
    return tuple(loaded), frozenset(attributes)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
