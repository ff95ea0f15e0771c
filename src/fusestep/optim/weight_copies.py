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
from fusestep.fp8.plain_copies import PlainCopies, write_plain
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


def part_to_write(parameter: Tensor) -> Part[Copies] | None:
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
    """One weight with copies in FP8: the places in the plan of the parameters that it is made of.

    Attributes:
        members: None for a parameter that the plan has not.
        by_kernel: whether an update's launch writes the copies, of all of its parameters.
    """

    copies: WeightCopies
    members: list[int | None]
    by_kernel: bool = False


@dataclass(frozen=True)
class _After:
    """What there is to do after a step of these parameters, worked out once: most steps are alike.

    Attributes:
        stepped: their places in the plan.
        written: what kernels have written.
        halves, halves_to_cast: copies in 16 bits, and those of them that no kernel has written.
        wholes: weights with copies in FP8, and how many of its parameters were stepped.
    """

    stepped: list[int]
    written: list[Tensor]
    halves: list[tuple[Part[PlainCopies], Tensor]]
    halves_to_cast: list[int]
    wholes: list[tuple[_Weight, int]]


class PlannedCopies:
    """The copies of a plan's parameters; see the head of this file.

    Args:
        parameters: all of the plan's.
        weights: what the update steps, see `stepped_weight`.
    """

    def __init__(self, parameters: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._weights = weights
        # By the parameter's place in the plan: its part of copies in 16 bits, and the weight of those in FP8.
        self._halves: dict[int, Part[PlainCopies]] = {}
        self._in_fp8: dict[int, _Weight] = {}
        by_copies: dict[int, _Weight] = {}
        widths: dict[int, torch.Size] = {}
        for i, parameter in enumerate(parameters):
            part = part_to_write(parameter)
            if part is None:
                continue
            copies, place = part
            heights, width = copies.heights, parameter.shape[1:]
            is_as_asked = not heights or parameter.shape[0] == heights[place]
            if not is_as_asked or widths.setdefault(id(copies), width) != width:
                continue  # of another size than the memory of the copies that it shares with others: its module casts
            if isinstance(copies, PlainCopies):
                self._halves[i] = Part(copies, place)
            elif isinstance(copies, WeightCopies):
                weight = by_copies.setdefault(id(copies), _Weight(copies, [None] * copies.parts))
                weight.members[place] = i
                self._in_fp8[i] = weight
        self._weights_in_fp8 = list(by_copies.values())
        # What launches write: memory of copies in 16 bits, and parameters with copies in FP8.
        self._launched_halves: dict[int, Tensor] = {}
        self._launched_fp8: set[int] = set()
        self._memory: list[tuple[Float8Tensor | Copies, object]] = []
        self._after: _After | None = None

    # While a plan is built

    def in_16_bits(self, i: int, state: State) -> Tensor | None:
        """Memory of a 16-bit copy that the update's kernel can write in a parameter's stead, if there is such a copy.

        Args:
            state: of the parameter; the kernel walks the weight in its order of memory.
        """
        if i not in self._halves:
            return None
        weight = self._weights[i].detach()
        if not is_dense(weight) or weight.stride() != state["exp_avg"].stride():
            return None
        copies, place = self._halves[i]
        return copies.rows_of(place, weight)

    def launch_writes(self, i: int, memory: Tensor) -> None:
        """Say that a launch writes what `in_16_bits` gave."""
        self._launched_halves[i] = memory

    def launched_memory(self, i: int) -> Tensor | None:
        """The memory of the 16-bit copy that a launch writes for a parameter, if one does."""
        return self._launched_halves.get(i)

    def in_fp8(self, i: int, tensors_of: Sequence[Sequence[Tensor] | None]) -> CopySignature | None:
        """How the update's kernel writes a parameter's FP8 copies, None where it does not.

        Args:
            tensors_of: for each parameter that is stepped by one kind of launch with this one the weight, the gradient,
                both moments, and the master where there is one; None for others.
        """
        whole = self._in_fp8.get(i)
        if whole is None or whole.copies.form.kind == "microblocks":
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
        whole = self._in_fp8[i]
        copies, place = whole.copies, whole.members.index(i)
        heights = [self._weights[m].shape[0] for m in whole.members if m is not None]
        quantized = copies.allocate((sum(heights), self._weights[i].shape[1]), self._weights[i].device)
        slot = own_slot and (copies.slot_address() or own_slot)
        self._launched_fp8.add(i)
        return copy_rows(first_tile, quantized, slot, sum(heights[:place]), heights[place])

    def whole(self, i: int) -> int:
        """A number for the weight with FP8 copies that a parameter is part of: the same for all its parts."""
        return id(self._in_fp8[i])

    def complete(self) -> None:
        """Call once the launches are planned."""
        owners: list[Float8Tensor | Copies] = [self._halves[i].copies for i in self._launched_halves]
        for i in self._launched_fp8:
            weight, parameter = self._in_fp8[i], self._parameters[i]
            weight.by_kernel = all(m in self._launched_fp8 for m in weight.members)
            owners.append(parameter if isinstance(parameter, Float8Tensor) else weight.copies)
        # A weight that lives in FP8 has its transpose made when it is first asked for.
        self._memory = [(owner, _memory_of(owner)) for owner in owners]

    def have_moved(self) -> bool:
        """Whether copies that launches write have other memory than the tables say."""
        return any(_memory_of(owner) is not memory for owner, memory in self._memory)

    # In each step

    def before_a_step_that_may_be_skipped(self) -> None:
        """Bring 16-bit copies up to date, since the kernel writes none in a step that is skipped."""
        stale = [i for i in self._launched_halves if not self._halves[i].is_current(self._weights[i])]
        self._cast_halves(stale)

    def after_the_step(self, stepped: list[int]) -> None:
        """Have copies written that no kernel has written, and mark all as current; let torch know what was written.

        Args:
            stepped: the parameters that were; a skipped step counts as well, since the device alone knows of it.
        """
        after = self._after
        if after is None or after.stepped != stepped:
            after = self._after = self._sorted(stepped)
        # Kernels wrote these, which autograd cannot know, nor copies that are not of this step.
        torch.autograd.graph.increment_version(after.written)
        self._cast_halves(after.halves_to_cast)
        for part, parameter in after.halves:
            part.copies.mark(parameter, part.place)
        for weight, count in after.wholes:
            self._finish_fp8(weight, count)

    def _sorted(self, stepped: list[int]) -> _After:
        halves = [i for i in stepped if i in self._halves]
        counts: dict[int, int] = {}
        for i in stepped:
            if i in self._in_fp8:
                counts[self.whole(i)] = counts.get(self.whole(i), 0) + 1
        wholes = [(weight, counts[id(weight)]) for weight in self._weights_in_fp8 if id(weight) in counts]
        written = [self._parameters[i] for i in stepped]
        written += [self._launched_halves[i] for i in halves if i in self._launched_halves]
        for weight, _ in wholes:
            if weight.by_kernel:
                written += _tensors_of(weight.copies.quantized)
        return _After(
            stepped,
            written,
            [(self._halves[i], self._parameters[i]) for i in halves],
            [i for i in halves if i not in self._launched_halves],
            wholes,
        )

    def _cast_halves(self, members: Sequence[int]) -> None:
        write_plain([(*self._halves[i], self._weights[i]) for i in members])

    def _finish_fp8(self, weight: _Weight, stepped: int) -> None:
        """After a step of so many of a weight's parameters."""
        copies = weight.copies
        members = [m for m in weight.members if m is not None]
        if len(members) < len(weight.members):
            return  # scales are of all parameters, and some are not stepped here
        if not weight.by_kernel or stepped < len(members):
            first = self._parameters[members[0]]
            if isinstance(first, Float8Tensor):
                # It may hold more than it did when the step was planned.
                copies = first.copies()
            copies.write(*(self._weights[m].detach() for m in members))
        for place, m in enumerate(members):
            copies.mark(self._parameters[m], place)


def _memory_of(owner: Float8Tensor | Copies) -> object:
    return owner.quantized if isinstance(owner, Float8Tensor) else owner.memory()


def _tensors_of(quantized: Quantized | None) -> list[Tensor]:
    if quantized is None:
        return []
    return [tensor for tensor in (quantized.data, quantized.transposed) if tensor is not None]
