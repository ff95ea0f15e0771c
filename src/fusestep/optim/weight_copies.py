"""What the optimizer's step does about copies: those that modules asked for, and weights that live in FP8 only.

See fp8/copies.py for who does what when, and fp8/plain_copies.py for copies in 16 bits. Here a plan's parameters are
sorted by how their copies are written:

- FP8 by the update's kernel: ops/adam_copies.py. Parameters that are one weight together take one launch together.
- 16 bits by the update's kernel: to it an fp32 weight with a copy is a 16-bit weight with its fp32 master.
- by a cast after the step: what no kernel writes, in layouts that they do not take, and in the reference.
- not at all: where the optimizer does not step all parameters of a weight with one scale. Its module casts.

A weight that lives in FP8 is stepped as its fp32 master, and its own bytes and scales are the copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusestep.fp8.copies import WeightCopies
from fusestep.fp8.held import Copies, Part, part_of
from fusestep.fp8.plain_copies import PlainCopies
from fusestep.fp8.tensor import Float8Tensor
from fusestep.ops.adam_copies import CopySignature, copy_rows, is_aligned, is_in_line, unsupported
from fusestep.ops.quantized import Quantized
from fusestep.ops.tensor_table import is_dense

State = dict[str, Any]


def stepped_weight(parameter: Tensor, state: State | None) -> Tensor:
    """What the update reads and writes as the weight: the parameter, or the master of one that lives in FP8."""
    if isinstance(parameter, Float8Tensor) and state:
        master: Tensor = state["master_param"]
        return master
    return parameter


def first_master(parameter: Tensor) -> Tensor:
    """What a master starts from: the parameter, or the values that one that lives in FP8 had before its cast."""
    if not isinstance(parameter, Float8Tensor):
        return parameter.detach()
    initial = parameter.get_high_precision_init_val()
    return parameter.dequantize() if initial is None else initial.clone()


def part_to_write(parameter: Tensor) -> Part | None:
    """The part of copies that a step of this parameter writes, if any."""
    if isinstance(parameter, Float8Tensor):
        return Part(parameter.copies(), 0)
    part = part_of(parameter)
    if part is None:
        return None
    copies = part.copies
    if isinstance(copies, WeightCopies):
        # A module that went elsewhere since it asked will ask again.
        is_here = copies.slots is None or copies.slots.device == parameter.device
        return part if parameter.dim() == 2 and is_here else None
    return part if parameter.dtype == torch.float32 and parameter.dim() else None


@dataclass(eq=False)
class _Weight:
    """One weight with copies: the places in the plan of the parameters that it is made of.

    Attributes:
        members: None for a parameter that the plan has not.
        by_kernel: whether an update's launch writes the copies, of all of its parameters.
    """

    copies: Copies
    members: list[int | None]
    by_kernel: bool = False


class PlannedCopies:
    """The copies of a plan's parameters; see the head of this file.

    Args:
        parameters: all of the plan's.
        weights: what the update steps, see `stepped_weight`.
    """

    def __init__(self, parameters: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._weights = weights
        self._parts = [part_to_write(parameter) for parameter in parameters]
        by_copies: dict[int, _Weight] = {}
        for i, part in enumerate(self._parts):
            if part is not None:
                nobody: list[int | None] = [None] * part.copies.parts
                by_copies.setdefault(id(part.copies), _Weight(part.copies, nobody)).members[part.place] = i
        self._all = list(by_copies.values())
        self._weight_of = [None if part is None else by_copies[id(part.copies)] for part in self._parts]
        # What of it a launch writes for each parameter: 16-bit copies in these, and FP8 in those.
        self._plain: dict[int, Tensor] = {}
        self._in_fp8: set[int] = set()
        self._memory: list[tuple[Float8Tensor | Copies, object]] = []

    # While a plan is built

    def plain(self, i: int, state: State) -> Tensor | None:
        """Memory of a 16-bit copy that the update's kernel can write in a parameter's stead, if there is such a copy.

        Args:
            state: of the parameter; the kernel walks the weight in its order of memory.
        """
        part, weight = self._parts[i], self._weights[i].detach()
        if part is None or not isinstance(part.copies, PlainCopies):
            return None
        if not is_dense(weight) or weight.stride() != state["exp_avg"].stride():
            return None
        return part.copies.rows_of(part.place, weight)

    def write_plain_by_kernel(self, i: int, memory: Tensor) -> None:
        """Say that a launch writes what `plain` gave."""
        self._plain[i] = memory

    def plain_memory(self, i: int) -> Tensor | None:
        """The memory of the 16-bit copy that a launch writes for a parameter, if one does."""
        return self._plain.get(i)

    def in_fp8(self, i: int, tensors_of: Sequence[Sequence[Tensor] | None]) -> CopySignature | None:
        """How the update's kernel writes a parameter's FP8 copies, None where it does not.

        Args:
            tensors_of: for each parameter that is stepped by one kind of launch with this one the weight, the gradient,
                both moments, and the master where there is one; None for others.
        """
        whole = self._weight_of[i]
        if whole is None or not isinstance(whole.copies, WeightCopies) or whole.copies.form.kind == "microblocks":
            return None
        form, by_tile = whole.copies.form, whole.copies.form.kind == "tiles"
        parameters = [tensors for m in whole.members if m is not None and (tensors := tensors_of[m]) is not None]
        if len(parameters) < len(whole.members) or unsupported(parameters, by_tile) is not None:
            return None
        return CopySignature(
            by_tile,
            form.dtype,
            form.transposed,
            form.margin,
            form.power_of_two,
            is_aligned(parameters),
            is_in_line(parameters),
        )

    def fp8_rows(self, i: int, first_tile: int, own_slot: int) -> tuple[int, ...]:
        """The rows of a table for a parameter whose FP8 copies a launch writes, of which this takes note.

        Args:
            first_tile: see `copy_rows`.
            own_slot: the address of a slot for a weight whose scale is its own; 0 for scales of tiles.
        """
        part, whole = self._parts[i], self._weight_of[i]
        assert part is not None
        assert whole is not None
        copies = part.copies
        assert isinstance(copies, WeightCopies)
        heights = [self._weights[m].shape[0] for m in whole.members if m is not None]
        quantized = copies.allocate((sum(heights), self._weights[i].shape[1]), self._weights[i].device)
        slot = own_slot and (copies.slot_address() or own_slot)
        self._in_fp8.add(i)
        return copy_rows(first_tile, quantized, slot, sum(heights[: part.place]), heights[part.place])

    def whole(self, i: int) -> int:
        """A number for the weight that a parameter is part of: the same for all its parts."""
        return id(self._weight_of[i])

    def complete(self) -> None:
        """Call once the launches are planned."""
        for weight in self._all:
            weight.by_kernel = all(m in self._in_fp8 for m in weight.members)
        owners: list[Float8Tensor | Copies] = []
        for i in (*self._in_fp8, *self._plain):
            parameter, part = self._parameters[i], self._parts[i]
            assert part is not None
            owners.append(parameter if isinstance(parameter, Float8Tensor) else part.copies)
        # A weight that lives in FP8 has its transpose made when it is first asked for.
        self._memory = [(owner, _memory_of(owner)) for owner in owners]

    def have_moved(self) -> bool:
        """Whether copies that launches write have other memory than the tables say."""
        return any(_memory_of(owner) is not memory for owner, memory in self._memory)

    # In each step

    def before_a_step_that_may_be_skipped(self) -> None:
        """Bring 16-bit copies up to date, since the kernel writes none in a step that is skipped."""
        for i in self._plain:
            part, weight = self._parts[i], self._weights[i]
            assert part is not None
            if isinstance(part.copies, PlainCopies) and not part.is_current(weight):
                part.copies.write(part.place, weight)

    def after_the_step(self, stepped: Sequence[int]) -> None:
        """Have copies written that no kernel has written, and mark all as current; let torch know what was written.

        Args:
            stepped: the parameters that were; a skipped step counts as well, since the device alone knows of it.
        """
        written = [self._parameters[i] for i in stepped]
        in_fp8: dict[int, list[int]] = {}
        for i in stepped:
            part = self._parts[i]
            if part is None:
                continue
            if not isinstance(part.copies, PlainCopies):
                in_fp8.setdefault(id(part.copies), []).append(i)
            elif i in self._plain:
                written.append(self._plain[i])
        # So that autograd notices, and copies that are not of this step.
        for members in in_fp8.values():
            weight = self._weight_of[members[0]]
            if weight is not None and weight.by_kernel and isinstance(weight.copies, WeightCopies):
                written += _tensors_of(weight.copies.quantized)
        torch.autograd.graph.increment_version(written)
        for i in stepped:
            part = self._parts[i]
            if part is not None and isinstance(part.copies, PlainCopies):
                if i not in self._plain:
                    part.copies.write(part.place, self._weights[i])
                part.copies.mark(self._parameters[i], part.place)
        for members in in_fp8.values():
            self._finish_fp8(members)

    def _finish_fp8(self, stepped: list[int]) -> None:
        """After a step of these parameters of one weight."""
        weight = self._weight_of[stepped[0]]
        assert weight is not None
        members = [m for m in weight.members if m is not None]
        copies = weight.copies
        if len(members) < len(weight.members):
            copies.drop()
            return
        if not (weight.by_kernel and len(stepped) == len(members)):
            first = self._parameters[members[0]]
            if isinstance(first, Float8Tensor):
                # It may hold more than it did when the step was planned.
                copies = first.copies()
            assert isinstance(copies, WeightCopies)
            copies.write(*(self._weights[m].detach() for m in members))
        for place, m in enumerate(members):
            copies.mark(self._parameters[m], place)


def _memory_of(owner: Float8Tensor | Copies) -> object:
    return owner.quantized if isinstance(owner, Float8Tensor) else owner.memory()


def _tensors_of(quantized: Quantized | None) -> list[Tensor]:
    if quantized is None:
        return []
    return [tensor for tensor in (quantized.data, quantized.transposed) if tensor is not None]
