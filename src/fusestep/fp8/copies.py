"""FP8 copies of weights that the optimizer writes, so that a training forward casts none.

Three parts take turns, each in one place:

1. A module that casts a weight in training attaches a `WeightCopies` to it (`attach`), which says how it casts.
2. FusedAdam.step, which has the new weight at hand, writes the copies and marks them as current.
3. In the next training forward the module asks whether they are (`is_current`), and casts by itself where not.

Copies are current while the weight's version and address are those of when it was marked: loading a state, copying in
place, averaging and any other optimizer make them stale; a module that is moved or converted drops them, since its new
memory may lie where the old did. What a script does to `param.data` need change neither; whoever does that between
training steps calls `fusestep.refresh(model)`. In evaluation modules cast afresh and ask for no copy.
plain_copies.py does the same in 16 bits, for torch.autocast.

Copies hold exactly what `ops.quantize` or `ops.block_scaling` would make of the new weight. Under delayed scaling the
scale is that of the weight's slot at the time of the optimizer's step, and the slot's amax is raised to the new
weight's, as the forward's own cast would do. A weight that is several parameters (held.py) has the copies of the
parameters put together, with the scales of the whole. Copies belong to a run, not to a model: state dicts, copies of a
model and pickles are without them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from fusestep.errors import UserError
from fusestep.fp8.held import Copies, drop_copies, give, part_of, revision
from fusestep.fp8.recipes import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling, Recipe
from fusestep.ops.block_scaling import quantize_blocks
from fusestep.ops.block_scaling_launch import MX, TILE, unwritten_scales
from fusestep.ops.planned_product import RightOperands
from fusestep.ops.quantize import quantize
from fusestep.ops.quantized import Quantized, padded

__all__ = [
    "CopyFormat", "WeightCopies", "attach", "copies_of", "current_copy", "give", "overwrite", "refresh", "revision",
]  # fmt: skip


@dataclass(frozen=True)
class CopyFormat:
    """How a weight is cast.

    Attributes:
        kind: "delayed" takes the scale of a slot, "current" that of the weight itself, "tiles" one for each 128 × 128
            elements, "microblocks" one for each 32 (MXFP8).
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        transposed: whether the transpose is wanted too, which the product for the input's gradient reads, or that
            forward of a weight (in, out).
        margin, power_of_two: as of ops.quantize.
    """

    kind: Literal["delayed", "current", "tiles", "microblocks"]
    dtype: torch.dtype
    transposed: bool = True
    margin: int = 0
    power_of_two: bool = False

    @classmethod
    def of(cls, recipe: Recipe, *, transposed: bool = True) -> CopyFormat:
        """The format of weights under a recipe.

        Raises: UserError for a recipe of no known kind.
        """
        dtype = recipe.fp8_format.forward
        if isinstance(recipe, DelayedScaling):
            return cls("delayed", dtype, transposed, margin=recipe.margin)
        if isinstance(recipe, Float8CurrentScaling):
            return cls("current", dtype, transposed, power_of_two=recipe.use_power_2_scales)
        if isinstance(recipe, Float8BlockScaling):
            return cls("tiles", dtype, transposed, power_of_two=not recipe.use_f32_scales)
        if isinstance(recipe, MXFP8BlockScaling):
            return cls("microblocks", dtype, transposed, power_of_two=True)
        raise UserError(f"FP8 copies: recipe is {recipe!r}; pass one of fusestep.fp8's recipes.")


class WeightCopies(Copies):
    """The FP8 copies of one weight; see the head of this file.

    Args:
        form: how the weight is cast.
        slots, index: under delayed scaling, the (n, 4) fp32 slots of the module (see state.py) and the weight's place.
        heights: the rows of each parameter, where the weight is several.

    Attributes:
        quantized: the copies, or None until they are first written. Written in place ever after, so that tables of
            addresses and CUDA graphs may hold them.
        slots: those of the module; under current scaling None.
    """

    def __init__(
        self, form: CopyFormat, slots: Tensor | None = None, index: int = 0, heights: Sequence[int] = ()
    ) -> None:
        super().__init__(heights)
        self.form = form
        self.slots = slots
        self.index = index
        self.quantized: Quantized | None = None
        self._right: tuple[Quantized, bool, RightOperands] | None = None

    def memory(self) -> object:
        return self.quantized

    def right_operands(self, in_by_out: bool = False) -> RightOperands:
        """The copies, once there are some, as planned products read them: views with the summed dimension first.

        Args: in_by_out: whether they are of a weight (in, out); then they hold its transpose too.
        """
        held, known = self.quantized, self._right
        if known is None or known[0] is not held or known[1] is not in_by_out:
            assert held is not None
            weight = held.t() if in_by_out else held
            assert weight.data is not None
            with torch.no_grad():
                kept = None if weight.transposed is None else weight.transposed.t()
                kept_scale_inv = None if kept is None else weight.transposed_scale_inv.t()
                operands = weight.data.t(), weight.scale_inv.t(), kept, kept_scale_inv
            known = self._right = held, in_by_out, operands
        return known[2]

    def cast(self, weight: Tensor) -> Quantized:
        """Cast a weight (rows, columns) as the module would, recording its amax in the slot."""
        form = self.form
        if form.kind in ("tiles", "microblocks"):
            block = TILE if form.kind == "tiles" else MX
            return quantize_blocks(
                weight, form.dtype, block, columnwise=form.transposed, power_of_two=form.power_of_two
            )[0]
        slots = None if form.kind == "current" else self.slots
        return quantize(
            weight,
            slots,
            self.index,
            form.dtype,
            columnwise=form.transposed,
            record=slots is not None,
            margin=form.margin,
            power_of_two=form.power_of_two,
        )[0]

    def slot_address(self) -> int:
        """Where the weight's slot lies; 0 where the scale is the weight's own."""
        if self.form.kind != "delayed" or self.slots is None:
            return 0
        return self.slots[self.index].data_ptr()

    def allocate(self, shape: tuple[int, int], device: torch.device) -> Quantized:
        """Memory for the copies of a weight, zero, where there is none yet: for a kernel that writes them.

        Raises: ValueError for microblocks, which no kernel of the optimizer writes.
        """
        form = self.form
        if form.kind == "microblocks":
            raise ValueError("copies in microblocks are cast, not allocated")
        held = self.quantized
        is_enough = held is not None and (held.transposed is not None or not form.transposed)
        if held is not None and is_enough and held.shape == shape and held.device == device:
            return held
        rows, columns = shape

        def zeros(rows: int, columns: int) -> Tensor:
            memory = torch.zeros(padded(rows), padded(columns), dtype=torch.uint8, device=device)
            return memory.view(form.dtype)

        block = TILE if form.kind == "tiles" else None
        scales = torch.zeros((), dtype=torch.float32, device=device)
        transposed_scales = scales
        if block is not None:
            scales = unwritten_scales(rows, columns, block, device).fill_(1)
            transposed_scales = unwritten_scales(columns, rows, block, device).fill_(1)
        transposed = zeros(columns, rows) if form.transposed else None
        self.drop()
        self.quantized = Quantized(shape, zeros(rows, columns), transposed, scales, transposed_scales, block)
        return self.quantized

    @torch.no_grad()
    def write(self, *weights: Tensor) -> None:
        """Make the copies those of a weight (rows, columns), or of several put together.

        What the optimizer does where no kernel has done it.
        """
        made = self.cast(weights[0] if len(weights) == 1 else torch.cat(weights))
        if self.quantized is None or self.quantized.shape != made.shape or self.quantized.device != made.device:
            self.quantized = made
        else:
            overwrite(self.quantized, made)


def overwrite(quantized: Quantized, made: Quantized) -> None:
    """Write one quantised matrix over another of its shape and forms, in place."""
    for to, of, to_scale_inv, of_scale_inv in (
        (quantized.data, made.data, quantized.scale_inv, made.scale_inv),
        (quantized.transposed, made.transposed, quantized.transposed_scale_inv, made.transposed_scale_inv),
    ):
        if to is not None and of is not None:
            to.copy_(of)
            to_scale_inv.copy_(of_scale_inv)


def attach(
    parameters: Tensor | Sequence[Tensor],
    recipe: Recipe,
    slots: Tensor | None = None,
    index: int = 0,
    *,
    transposed: bool = True,
) -> WeightCopies:
    """Ask the optimizer for copies of a weight; asking again for the same, or for less, keeps what is there.

    Args:
        parameters: (rows, columns), or several of as many columns that are used put together.
        recipe: how the module casts the weight.
        slots, index: under delayed scaling the module's slots, (n, 4) fp32, and the weight's place in them.
        transposed: whether the transpose is wanted too.
    """
    parameters = (parameters,) if isinstance(parameters, Tensor) else parameters
    form = CopyFormat.of(recipe, transposed=transposed)
    if form.kind != "delayed":
        slots, index = None, 0
    heights = [parameter.shape[0] for parameter in parameters] if len(parameters) > 1 else []
    known = copies_of(parameters[0])
    if (
        known is None
        or known.form not in (form, replace(form, transposed=True))  # layers that share a weight may want less of it
        or (known.index, known.heights) != (index, tuple(heights))
        or known.slots is not slots
        or not known.are_of(parameters)
    ):
        known = WeightCopies(form, slots, index, heights)
        give(parameters, known)
    return known


def copies_of(parameter: Tensor) -> WeightCopies | None:
    """The FP8 copies that a module asked for, if one did."""
    part = part_of(parameter)
    return part.copies if part is not None and isinstance(part.copies, WeightCopies) else None


def current_copy(*parameters: Tensor) -> Quantized | None:
    """The copies of a weight, of all its parameters in order, where they are of the weight as it is now, else None.

    For a module in training, with gradients enabled; in evaluation it casts afresh.
    """
    copies = copies_of(parameters[0])
    return copies.quantized if copies is not None and copies.is_current(*parameters) else None


def refresh(model: nn.Module) -> None:
    """Forget every copy of the model's weights that is kept across calls, after a write through `param.data`.

    Torch does not count such a write as a change, so neither the copies that FusedAdam wrote, in FP8 or in autocast's
    dtype, nor those that `is_first_microbatch` keeps can tell. Averaged weights swapped in for an evaluation need no
    call: evaluation casts afresh.

    Args:
        model: any module; those that keep copies of their own have a method `drop_caches()`, which is called.
    """
    drop_copies(model.parameters())
    for module in model.modules():
        drop = getattr(module, "drop_caches", None)
        if callable(drop):
            drop()
