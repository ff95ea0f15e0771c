"""A module that becomes another without ceasing to be itself: its class is exchanged, and given back.

The new class is made of one of ours (a kind) and the old class, in this order: `super().forward` is the old forward,
`isinstance` holds for both, and whatever else the old class has stays. Copies and pickles of such modules name the kind
and the old class, and are made whole again when this package is there.
"""

from __future__ import annotations

import functools
import inspect
import types
from typing import Any

from torch import nn

from fusestep.errors import UserError

#: In a converted module's __dict__: the names of the attributes that each conversion added, innermost first.
ADDED = "_added_by_conversion"


class Kind(nn.Module):
    """What ours have in common. Names with an underscore: an old class's own names must not be hidden by chance.

    Attributes:
        _prefix: stands before the old class's name in the new one; empty where others look the class up by its name.
    """

    _prefix = "Fused"

    def _released(self) -> None:
        """Take back what a module of this kind has left outside of itself, as it becomes the old one again."""


class _Converted(nn.Module):
    """First of the bases of what we make: an old class that registers its subclasses does not hear of ours."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        if "_original" not in cls.__dict__:  # what others make of our classes
            super().__init_subclass__(**kwargs)


def converted_class(kind: type[nn.Module], original: type[nn.Module]) -> type[nn.Module]:
    """The class of a module of class `original` that has become one of `kind`; the same one each time."""
    known = _made.get((kind, original))
    if known is not None:
        return known
    prefix = getattr(kind, "_prefix", "Fused")
    name = original.__name__ if original.__name__.startswith(prefix) else prefix + original.__name__
    # Not inherited ones: what others make of our classes is theirs.
    kinds, base = original.__dict__.get("_kinds", ()), original.__dict__.get("_base", original)
    attributes = {
        # Where others look a class up by module and name (sharding policies, a configuration's "architectures"), they
        # find the old one.
        "__module__": kind.__module__ if prefix else original.__module__,
        "__qualname__": name if prefix else original.__qualname__,
        "__doc__": original.__doc__,
        "__init__": _plain(original.__init__),
        "__reduce_ex__": _reduce,
        "forward": _with_signature(kind.forward, original.forward),
        "_kinds": (kind, *kinds),
        "_base": base,
        "_original": original,
    }
    bases = (kind, original) if issubclass(original, _Converted) else (_Converted, kind, original)
    made: type[nn.Module] = type(name, bases, attributes)
    _made[kind, original] = made
    return made


_made: dict[tuple[type[nn.Module], type[nn.Module]], type[nn.Module]] = {}


def _plain(original: Any) -> Any:
    """The constructor of a class that we made: it makes a module of the old class, since nothing was tried of this one.

    Libraries that copy or grow a model by `type(module)(…)` come here.
    """

    @functools.wraps(original)
    def init(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        kind: Any = type(self)
        if is_converted(self):
            object.__setattr__(self, "__class__", kind._base)
        kind._base.__init__(self, *args, **kwargs)

    return init


def _with_signature(forward: Any, original: Any) -> Any:
    """`forward`, a copy of it if it takes anything, that shows the signature of `original` to those who look."""
    takes = [parameter.kind for parameter in inspect.signature(forward).parameters.values()]
    if inspect.Parameter.VAR_KEYWORD not in takes or not isinstance(forward, types.FunctionType):
        return forward
    copy = types.FunctionType(
        forward.__code__, forward.__globals__, forward.__name__, forward.__defaults__, forward.__closure__
    )
    copy.__kwdefaults__, copy.__qualname__ = forward.__kwdefaults__, forward.__qualname__
    copy.__doc__ = getattr(original, "__doc__", None)
    copy.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    return copy


def pickles_by_itself(module: nn.Module) -> bool:
    """Whether a module's class says how it is copied and pickled, which one that we make would not heed."""
    kind = type(module)
    return kind.__reduce__ is not object.__reduce__ or kind.__reduce_ex__ not in (object.__reduce_ex__, _reduce)


def _reduce(self: nn.Module, protocol: int) -> tuple[Any, ...]:
    made = type(self).__dict__
    if "_kinds" not in made:  # what others made of our class, and pickle in their own way, if they do
        return object.__reduce_ex__(self, protocol)  # type: ignore[return-value]
    return _made_again, (made["_kinds"], made["_base"]), self.__getstate__()


def _made_again(kinds: tuple[type[nn.Module], ...], base: type[nn.Module]) -> nn.Module:
    """An empty module of the class that these kinds make of `base`; pickle and deepcopy fill it."""
    made = base
    for kind in reversed(kinds):
        made = converted_class(kind, made)
    module: nn.Module = object.__new__(made)
    return module


def become(module: nn.Module, kind: type[nn.Module], attributes: dict[str, Any]) -> None:
    """Make a module one of `kind`, with these attributes.

    Raises: ValueError if it has one of the attributes already.
    """
    taken = attributes.keys() & module.__dict__.keys()
    if taken:
        raise ValueError(f"{type(module).__name__} has attributes of its own named {', '.join(sorted(taken))}")
    before = module.__dict__.get(ADDED, ())
    made = converted_class(kind, type(module))
    module.__dict__.update(attributes)
    module.__dict__[ADDED] = (*before, tuple(attributes))
    module.__class__ = made
    take_seat = getattr(module, "_take_seat", None)
    if take_seat is not None:  # the one among the attributes is of the module that they are from
        take_seat()


def is_converted(module: nn.Module) -> bool:
    """Whether a module has become one of ours, and nothing has changed its class since."""
    return "_original" in type(module).__dict__


def check_release(path: str, module: nn.Module) -> None:
    """Raise UserError where `release` could not make a module what it was."""
    if not is_converted(module):
        raise UserError(
            f"undo: {path or 'the model'} has become a {type(module).__name__} since it was converted; undo what "
            "changed it (parametrizations, fully_shard) first."
        )
    if "forward" in module.__dict__ and not _is_own_forward(module):
        raise UserError(
            f"undo: the forward of {path or 'the model'} was replaced since it was converted, and the new one calls "
            "ours; put the old one back first (accelerate: unwrap_model(model, keep_fp32_wrapper=False))."
        )


def _is_own_forward(module: nn.Module) -> bool:
    """Whether the forward that was set on a module is what its class has: what unwrapping leaves behind."""
    forward: Any = module.__dict__.get("forward")
    return getattr(forward, "__func__", None) is type(module).forward and forward.__self__ is module


def release(module: nn.Module) -> None:
    """Make a module what it was before it last became another."""
    *before, last = module.__dict__[ADDED]
    if isinstance(module, Kind):
        module._released()
    if _is_own_forward(module):
        del module.__dict__["forward"]
    for name in last:
        module.__dict__.pop(name, None)
    module.__class__ = type(module).__dict__["_original"]
    if before:
        module.__dict__[ADDED] = tuple(before)
    else:
        del module.__dict__[ADDED]
