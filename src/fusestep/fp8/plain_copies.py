"""Copies in torch.autocast's dtype, so that a training forward under autocast casts neither weights nor biases.

They take turns as FP8 copies do (copies.py), and are stale when those would be: a module whose fp32 parameters would
be cast attaches a `PlainCopies` (`attach_plain`), FusedAdam's step writes it in the pass that writes the parameter, and
the next training forward multiplies by it. The gradient reaches the parameter as through the cast (nn/operands.py).

A weight that is several parameters has one copy of them all, which a product can read as it is. It takes 2 bytes for
each element, as much as autocast's own cast takes from forward to backward.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fusestep.fp8.held import Copies, give, part_of


class PlainCopies(Copies):
    """The copy of a weight or bias in 16 bits.

    Args:
        dtype: torch.bfloat16 or torch.float16.
        heights: the rows of each parameter, where there are several.

    Attributes:
        values: the copy, contiguous, of all parameters put together; None until it has memory. Written in place ever
            after, so that tables of addresses and CUDA graphs may hold it.
    """

    def __init__(self, dtype: torch.dtype, heights: Sequence[int] = ()) -> None:
        super().__init__(heights)
        self.dtype = dtype
        self.values: Tensor | None = None

    def memory(self) -> object:
        return self.values

    def rows_of(self, place: int, parameter: Tensor) -> Tensor:
        """The memory of one parameter's copy, of its shape; made, for all parameters, where there is none yet."""
        height = sum(self.heights) if self.heights else parameter.shape[0]
        shape = (height, *parameter.shape[1:])
        if self.values is None or self.values.shape != shape or self.values.device != parameter.device:
            self.drop()
            self.values = torch.empty(shape, dtype=self.dtype, device=parameter.device)
        if not self.heights:
            return self.values
        return self.values.narrow(0, sum(self.heights[:place]), self.heights[place])


@torch.no_grad()
def write_plain(copies: Sequence[tuple[PlainCopies, int, Tensor]]) -> None:
    """Write copies of parameters, each with its place in them: what the optimizer does where no kernel has done it."""
    if copies:
        memory = [one.rows_of(place, parameter) for one, place, parameter in copies]
        torch._foreach_copy_(memory, [parameter.detach() for _, _, parameter in copies])


def attach_plain(parameters: Sequence[Tensor], dtype: torch.dtype) -> PlainCopies:
    """Ask the optimizer for a copy of a weight or bias; asking again for the same keeps what is there.

    Args:
        parameters: (out, …) fp32, of one or more dimensions; several are used put together.
        dtype: of the copy.
    """
    part = part_of(parameters[0])
    known = None if part is None else part.copies
    heights = tuple(parameter.shape[0] for parameter in parameters) if len(parameters) > 1 else ()
    is_kept = isinstance(known, PlainCopies) and known.dtype is dtype and known.heights == heights
    if not (isinstance(known, PlainCopies) and is_kept and known.are_of(parameters)):
        known = PlainCopies(dtype, heights)
        give(parameters, known)
    return known
