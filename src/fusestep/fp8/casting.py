"""From a recipe to casts (casts.py): the one place that knows which a recipe calls for; and whether they count."""

from __future__ import annotations

import torch

from fusestep.errors import UserError
from fusestep.fp8.casts import Casts
from fusestep.fp8.casts_blocks import BlockCasts
from fusestep.fp8.casts_tensorwise import CurrentCasts, DelayedCasts
from fusestep.fp8.recipes import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    Recipe,
)
from fusestep.fp8.state import Slots
from fusestep.ops.roll_scales import SLOT


def stateless_casts(recipe: Recipe) -> Casts:
    """The casts of a recipe that keeps no state from step to step.

    Raises: UserError for a recipe of no known kind.
    """
    if isinstance(recipe, Float8CurrentScaling):
        return CurrentCasts(recipe)
    if isinstance(recipe, Float8BlockScaling | MXFP8BlockScaling):
        return BlockCasts(recipe)
    raise UserError(
        f"fp8_autocast: recipe is {recipe!r}; pass DelayedScaling, Float8CurrentScaling, Float8BlockScaling or "
        "MXFP8BlockScaling."
    )


def recording_casts(recipe: DelayedScaling, state: Slots) -> Casts:
    """The casts of a training step under delayed scaling: amaxes enter the module's state."""
    return DelayedCasts(recipe, state.slots, state.counts if _counting else None, record=True)


def passing_casts(recipe: DelayedScaling, state: Slots | None, slots: int, device: torch.device) -> Casts:
    """The casts of evaluation under delayed scaling, by the scales of training: nothing of the state changes.

    Args: state: None for a module that has not trained; then scales come from the tensors. slots: how many.
    """
    copy = torch.zeros(slots, SLOT, dtype=torch.float32, device=device) if state is None else state.slots.clone()
    return DelayedCasts(recipe, copy, None, record=False)


_counting = False


def count_saturation(enabled: bool = True) -> None:
    """Count, in training under delayed scaling, how many elements each cast saturates and how many it flushes to zero.

    The counts stay on the device, in the modules' `fp8_state.counts`: (slots, 3) int64 of elements, saturated, flushed.
    """
    global _counting
    _counting = enabled


def is_counting() -> bool:
    """Whether casts are counted now."""
    return _counting
