"""How parameters hold copies that the optimizer writes: which copies, which part of them, and whether it is current.

A product may use several parameters put together by rows, separate queries, keys and values for one. Their copies are
one object, of which each parameter holds a `Part`. The kinds of copies are in copies.py (FP8) and plain_copies.py (16
bits).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from torch import Tensor

#: The attribute of a parameter that holds its part.
ATTRIBUTE = "fusestep_copies"

_revision = 0


class Copies:
    """The copies of one weight, and of which state of its parameters they are.

    Args:
        heights: the rows of each parameter, in order, where there are several; () for one.
    """

    def __init__(self, heights: Sequence[int] = ()) -> None:
        self.heights = tuple(heights)
        self._states: list[tuple[int, int] | None] = [None] * max(1, len(self.heights))

    @property
    def parts(self) -> int:
        """How many parameters the weight is made of."""
        return len(self._states)

    def is_current(self, *parameters: Tensor) -> bool:
        """Whether the copies are of these parameters, which are all of the weight's in order, as they are now."""
        return self._states == [(parameter._version, parameter.data_ptr()) for parameter in parameters]

    def mark(self, parameter: Tensor, place: int = 0) -> None:
        """Say that the copies of a parameter were just written, of the parameter as it is now."""
        self._states[place] = (parameter._version, parameter.data_ptr())

    def drop(self) -> None:
        """Take the copies for stale until they are written again."""
        self._states = [None] * len(self._states)

    def are_of(self, parameters: Sequence[Tensor]) -> bool:
        """Whether these parameters hold the parts of these copies, in order."""
        for place, parameter in enumerate(parameters):
            part = part_of(parameter)
            if part is None or part.copies is not self or part.place != place:
                return False
        return len(parameters) == self.parts

    def memory(self) -> object:
        """What holds the copies, another object whenever they were given other memory; None before the first."""
        raise NotImplementedError

    def __reduce__(self) -> tuple[Any, ...]:
        return _NOTHING


C_co = TypeVar("C_co", bound=Copies, covariant=True)


class Part(NamedTuple, Generic[C_co]):
    """What a parameter holds of copies, and its place among the parameters that they are of."""

    copies: C_co
    place: int

    def is_current(self, parameter: Tensor) -> bool:
        """Whether what the copies hold of the parameter is of the parameter as it is now."""
        return self.copies._states[self.place] == (parameter._version, parameter.data_ptr())

    def __reduce__(self) -> tuple[Any, ...]:
        # A deep copy or a pickle of a parameter takes its attributes along. Something that even a restricted
        # unpickler takes, and that `part_of` knows for nothing, stands for the copies, which belong to a run.
        return _NOTHING


_NOTHING: tuple[Any, ...] = (OrderedDict, ())


def give(parameters: Sequence[Tensor], copies: Copies) -> None:
    """Make these the copies of the parameters, in order."""
    global _revision
    _revision += 1
    for place, parameter in enumerate(parameters):
        setattr(parameter, ATTRIBUTE, Part(copies, place))


def part_of(parameter: Tensor) -> Part[Copies] | None:
    """The part of copies that a module asked for, if one did."""
    part = getattr(parameter, ATTRIBUTE, None)
    return part if isinstance(part, Part) else None


def drop_copies(parameters: Iterable[Tensor]) -> None:
    """Take the copies of these parameters for stale, whatever version and address say."""
    for parameter in parameters:
        part = part_of(parameter)
        if part is not None:
            part.copies.drop()


def revision() -> int:
    """A number that changes whenever some parameter is given copies: optimizers look at it once a step."""
    return _revision
