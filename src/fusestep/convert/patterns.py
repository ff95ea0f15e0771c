"""Patterns: what is recognised in a model, and what it becomes. A registry holds the user's own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from fusestep.convert.agreement import Call, Probe, Trial
from fusestep.errors import UserError


class Stage(IntEnum):
    """When a pattern is looked for: modules whose children stay uncalled before these, users of swapped parts last."""

    WHOLE = 0
    LEAF = 1
    BLOCK = 2


def _no_attributes(module: nn.Module) -> dict[str, Any]:  # noqa: ARG001
    return {}


@dataclass(frozen=True, eq=False)
class Pattern:
    """A kind of module that has a faster form.

    Attributes:
        what: the pattern in a few words, for the report.
        becomes: a subclass of nn.Module with the new `forward`; `super().forward` in it is the old one. The new class
            is made of it and the old class. It needs no constructor: the module keeps all that it has.
        matches: of a module: True; False; or, if it is of this kind and yet cannot be swapped, why, in words.
        inputs: arguments of forward for the trial, as (args, kwargs) for each of some calls; tensors from the probe.
        attributes: what the module gets besides, by names that it does not have yet.
        stage: Stage.LEAF unless children are not called any more (WHOLE), or swapped children are needed (BLOCK).
        uses: children whose work the new forward does itself; they stay as they are, and their parameters' gradients
            are compared.
        quiet: names of attributes, dropout probabilities for instance, that are 0 in trials.
        trials: None: in training and evaluation, with inputs of another width, and under torch.autocast.
        stripped: takes out of a twin of the module, which is tried in its place, what the swap has nothing to do with.
        outcome: what of forward's output is compared; None: all of it.
    """

    what: str
    becomes: type[nn.Module]
    matches: Callable[[nn.Module], bool | str]
    inputs: Callable[[nn.Module, Probe], Sequence[Call]]
    attributes: Callable[[nn.Module], dict[str, Any]] = _no_attributes
    stage: Stage = Stage.LEAF
    uses: Callable[[nn.Module], Sequence[nn.Module]] | None = None
    quiet: tuple[str, ...] = ()
    trials: Callable[[torch.dtype, torch.device], Sequence[Trial]] | None = None
    stripped: Callable[[nn.Module], None] | None = None
    outcome: Callable[[Any], Any] | None = None


_registered: list[Pattern] = []


def register(pattern: Pattern) -> Pattern:
    """Let `fusestep.convert` look for a pattern, before all others; returns it, for `unregister`.

    Raises: UserError if it is no Pattern, or `becomes` no subclass of nn.Module.
    """
    if not isinstance(pattern, Pattern):
        raise UserError(f"register: {pattern!r} is no Pattern; pass a fusestep.convert.Pattern.")
    if not (isinstance(pattern.becomes, type) and issubclass(pattern.becomes, nn.Module)):
        raise UserError(
            f"register: becomes is {pattern.becomes!r}; pass a subclass of torch.nn.Module with the new forward."
        )
    _registered.insert(0, pattern)
    return pattern


def unregister(pattern: Pattern) -> None:
    """Forget a pattern that was registered.

    Raises: UserError if it was not.
    """
    if not any(one is pattern for one in _registered):
        raise UserError(f"unregister: the pattern {pattern.what!r} is not registered; pass what register returned.")
    _registered.remove(pattern)


def known_patterns(asked: Sequence[Pattern]) -> list[Pattern]:
    """The user's, the newest first, what is asked for, and ours."""
    from fusestep.convert import activations, attention, blocks, gated_mlp, masks, norms, rotary

    ours = (gated_mlp, norms, activations, rotary, attention, blocks, masks)
    return [*_registered, *asked, *(pattern for file in ours for pattern in file.PATTERNS)]


def is_named(path: str, patterns: Sequence[str]) -> bool:
    """Whether a pattern matches the path of a module, or of one that it is inside of."""
    parts = path.split(".")
    paths = [".".join(parts[: count + 1]) for count in range(len(parts))]
    return any(fnmatchcase(one, pattern) for one in paths for pattern in patterns)


def is_a(module: object, kind: type) -> bool:
    """isinstance, for classes that meet only in those that conversion makes, which type checkers cannot know of."""
    return isinstance(module, kind)


def has_no_shape(parameter: object) -> bool:
    """Whether a parameter of a lazy module still waits for its first input."""
    return isinstance(parameter, UninitializedParameter)


def takes(module: nn.Module) -> int | None:
    """How many arguments a module's forward can be given, optional ones too; None: any number."""
    parameters = inspect.signature(module.forward).parameters.values()
    if any(one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD) for one in parameters):
        return None
    return len(parameters)


def positional_names(module: nn.Module) -> tuple[str, ...]:
    """The names of the arguments that a module's forward can be given by their places, in order."""
    parameters = inspect.signature(module.forward).parameters.values()
    return tuple(one.name for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD))


def has_hooks(module: nn.Module) -> bool:
    """Whether anything is called when the module is: then its call cannot be left out."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def rows(probe: Probe, width: int) -> tuple[Call, ...]:
    """One call on a (3, 21, width) tensor."""
    return (((probe.randn(3, 21, width),), {}),)
