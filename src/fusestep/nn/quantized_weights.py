"""Where a product in FP8 gets its weight: from the optimizer, from the first micro-batch, or from a cast of its own."""

from __future__ import annotations

from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn

from fusestep.fp8.casting import is_counting
from fusestep.fp8.casts import Casts
from fusestep.fp8.copies import WeightCopies, attach
from fusestep.fp8.held import ATTRIBUTE, Part, part_of
from fusestep.fp8.recipes import Recipe
from fusestep.fp8.state import Slots
from fusestep.fp8.tensor import Float8Tensor
from fusestep.ops.quantized import Quantized

_is_leaf = attrgetter("is_leaf")


class QuantizedWeights(nn.Module):
    """The part of FP8Module that finds the weights of products, and keeps casts of them across calls."""

    fp8_state: Slots | None

    # Whether weights are (in, out), as GPT-2's are. Products take their transposes, which casts hold as well.
    _in_by_out: bool = False

    # The recipe of the last call with casts that stay; FP8 weights of the first micro-batch, and copies that the
    # optimizer was asked for, by slot. FP8Module sets them up.
    _recipe: Recipe | None
    _cached: dict[int, tuple[Quantized, tuple[tuple[int, int], ...]]] | None
    _asked: dict[int, tuple[Casts, WeightCopies, tuple[Part[Any] | None, ...]]] | None

    def _quantized_operands(
        self,
        x: Tensor,
        weight: Tensor,
        sources: tuple[Tensor, ...],
        indices: tuple[int, int],
        casts: Casts,
        grad: bool,
        columnwise: tuple[bool, bool],
        first: bool | None,
    ) -> tuple[Quantized, Quantized]:
        """Both operands of a product forward where `_known_weight` knows none: x (rows, in), and a weight as it lies.

        Args: indices, columnwise: of x and of the weight; the others as of `_quantized_weight`.
        """
        keeps = first is not None and self._keeps(grad)
        ways = columnwise[0], columnwise[1] or keeps or self._in_by_out
        if self._in_by_out:  # no cast of both takes a weight whose columns are not those of x
            both = casts.input(x, indices[0], ways[0]), casts.weight(weight, indices[1], ways[1]).t()
        else:
            both = casts.operands(x, weight, indices, ways)
        if keeps:
            self._keep_weight(both[1], sources, indices[1])
        return both

    def _quantized_weight(
        self,
        weight: Tensor,
        sources: tuple[Tensor, ...],
        index: int,
        casts: Casts,
        grad: bool,
        transposed: bool,
        first: bool | None,
    ) -> Quantized:
        """The FP8 weight for a product forward, with its transpose where the input's gradient will be wanted.

        A weight that lives in FP8 is used as it is. Else, in this order: what was kept of the first micro-batch, if
        this is a later one; what the optimizer wrote; or a cast, which is kept if this is the first micro-batch.
        Evaluation casts afresh, and changes nothing.

        Args:
            weight: as it lies; of several sources one without values, except under torch.compile.
            sources: the parameters that it is made of.
            grad: whether gradients are enabled.
            first: whether this is the first of several micro-batches between two steps of the optimizer; None: no
                copies are kept.
        """
        quantized = self._known_weight(weight, sources, index, casts, grad, transposed, first)
        if quantized is None:
            kept = first is not None and self._keeps(grad)
            columnwise = transposed or kept or self._in_by_out
            quantized = self._as_operand(casts.weight(whole(weight, sources), index, columnwise))
            if kept:
                self._keep_weight(quantized, sources, index)
        return quantized

    def _known_weight(
        self,
        weight: Tensor,
        sources: tuple[Tensor, ...],
        index: int,
        casts: Casts,
        grad: bool,
        transposed: bool,
        first: bool | None,
    ) -> Quantized | None:
        """`_quantized_weight` where it takes no cast of parameters, else None."""
        if isinstance(weight, Float8Tensor):
            both_ways = transposed or self._in_by_out
            if weight.quantized.block == casts.weight_block:
                return self._as_operand(weight.quantized_both_ways() if both_ways else weight.quantized)
            # Scales of another kind than the region's products take.
            return self._as_operand(casts.weight(weight.dequantize(), index, columnwise=both_ways))
        if not self.training or torch.compiler.is_compiling():  # whether a copy is current is no constant of a graph
            return None
        if first is False:
            kept = (self._cached or {}).get(index)
            if kept is not None and kept[1] == _states_of(sources):
                quantized: Quantized = kept[0]
                return quantized
        copies = self._current_copies(sources, index, casts, transposed) if grad else None
        return None if copies is None or copies.quantized is None else self._as_operand(copies.quantized)

    def _current_copies(
        self, sources: tuple[Tensor, ...], index: int, casts: Casts, transposed: bool
    ) -> WeightCopies | None:
        """The copies that the optimizer wrote of the weight as it is now; where there are none, it is asked for them.

        For training with gradients enabled. They are of the weight as it lies.
        """
        transposed = transposed or self._in_by_out
        if is_counting():  # what the optimizer casts is not counted
            return None
        known = None if self._asked is None else self._asked.get(index)
        if (
            known is not None
            and known[0] is casts
            and _hold(sources, known[2])
            and (known[1].form.transposed or not transposed)
        ):
            copies = known[1]
        elif all(map(_is_leaf, sources)):  # what is computed from parameters has no optimizer
            copies = self._ask_for_copies(sources, index, casts, transposed)
        else:
            return None
        return copies if copies.quantized is not None and copies.is_current(*sources) else None

    def _as_operand(self, quantized: Quantized) -> Quantized:
        """A weight that was cast as it lies, as products take it: (out, in)."""
        return quantized.t() if self._in_by_out else quantized

    def _keeps(self, grad: bool) -> bool:
        """Whether a cast of the weight may serve the micro-batches that follow."""
        return grad and self.training and not torch.compiler.is_compiling()

    def _keep_weight(self, quantized: Quantized, sources: tuple[Tensor, ...], index: int) -> None:
        cached = self._cached
        if cached is None:
            cached = self.__dict__["_cached"] = {}
        cached[index] = (quantized, _states_of(sources))

    def drop_caches(self) -> None:
        """Forget the casts that micro-batches share; `fusestep.refresh` calls this after a write through `.data`."""
        self.__dict__["_cached"] = None

    def _ask_for_copies(self, sources: tuple[Tensor, ...], index: int, casts: Casts, transposed: bool) -> WeightCopies:
        """The copies that the optimizer is asked to write, at least with what this call needs."""
        if self._asked is None:
            self.__dict__["_asked"] = {}
        assert self._asked is not None
        slots = None if self.fp8_state is None else self.fp8_state.slots
        assert self._recipe is not None
        copies = attach(sources, self._recipe, slots, index, transposed=transposed)
        self._asked[index] = casts, copies, tuple([part_of(source) for source in sources])
        return copies


def _hold(sources: tuple[Tensor, ...], parts: tuple[Part[Any] | None, ...]) -> bool:
    """Whether parameters hold these parts of copies: one object each, as long as nobody gives them other copies."""
    if len(sources) == 1:
        return getattr(sources[0], ATTRIBUTE, None) is parts[0]
    return all(map(is_, map(part_of, sources), parts))


def whole(weight: Tensor, sources: tuple[Tensor, ...]) -> Tensor:
    """A weight, put together where it is several parameters; within a Function, so no gradient passes here."""
    return weight if len(sources) == 1 or torch.compiler.is_compiling() else torch.cat(sources)


def _states_of(parameters: tuple[Tensor, ...]) -> tuple[tuple[int, int], ...]:
    """What tells whether parameters were written or exchanged since."""
    return tuple((parameter._version, parameter.data_ptr()) for parameter in parameters)
