"""fp8_autocast: the region within which modules of ours multiply in FP8.

A region says whether, and with which recipe. It nests, is put back on an exception, and belongs to its thread: what one
thread does is not seen by another. Backward uses what forward saved, so it may run inside or outside.

Delayed scaling rolls its histories when an outermost region with gradients enabled begins (outermost among those that
are enabled, or calibrate): everything that was seen since the last roll, forward and backward, enters the histories of
the modules that ran, and their scales are renewed.
Between two rolls no scale changes, so that backward, and a forward that is computed again for it (activation
checkpointing), meet the very scales of the first forward.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from fusestep.errors import UserError
from fusestep.fp8.pending import Pending
from fusestep.fp8.recipes import DelayedScaling, Recipe

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Region:
    """What an fp8_autocast region asks of the modules inside.

    Attributes:
        enabled: multiply in FP8.
        recipe: how scales are chosen.
        calibrating: multiply in high precision, but record the amaxes of what would have been cast.
        group: over whose ranks amaxes are reduced.
        pending: what was recorded in this thread and has not entered a history yet.
    """

    enabled: bool
    recipe: Recipe
    calibrating: bool = False
    group: Any = None
    pending: Pending = field(default_factory=Pending, compare=False, repr=False)


class _Thread(threading.local):
    """The innermost region of a thread, how many active ones enclose it, and what its modules recorded."""

    def __init__(self) -> None:
        self.region: Region | None = None
        self.depth = 0
        self.pending = Pending()


_thread = _Thread()

#: One object, so that modules see at a glance that they follow it already.
_DEFAULT_RECIPE = DelayedScaling()


def current() -> Region | None:
    """The region that a module's forward is in, or None where nothing of FP8 is asked of it."""
    region = _thread.region
    return region if region is not None and (region.enabled or region.calibrating) else None


def is_enabled() -> bool:
    """Whether modules that are called here multiply in FP8."""
    region = _thread.region
    return region is not None and region.enabled


@contextmanager
def fp8_autocast(
    enabled: bool = True,
    recipe: Recipe | None = None,
    group: ProcessGroup | None = None,
    calibrating: bool = False,
) -> Iterator[None]:
    """Run the modules of `fusestep.nn` in FP8 within this region.

    It composes with torch.autocast, whose dtype is then that of the modules' outputs. Without a GPU that multiplies
    FP8 the same quantised numbers are computed by emulation, which is announced.

    Args:
        enabled: False switches FP8 off within, also inside an enabled region.
        recipe: how scales are chosen; DelayedScaling() if None.
        group: the ranks over which delayed scaling reduces amaxes; None: each rank by itself.
        calibrating: with enabled=False, compute in high precision and record amaxes, so that a later FP8 forward
            starts from known scales.
    Raises: UserError for a recipe that is none, and for switches that are neither True nor False.
    """
    for name, switch in (("enabled", enabled), ("calibrating", calibrating)):
        if not isinstance(switch, bool):
            raise UserError(f"fp8_autocast: {name} is {switch!r}; pass True or False, and a recipe as recipe=….")
    if recipe is None:
        recipe = _DEFAULT_RECIPE
    if not isinstance(recipe, Recipe) or type(recipe) is Recipe:
        raise UserError(f"fp8_autocast: recipe is {recipe!r}; pass an object such as fusestep.fp8.DelayedScaling().")
    outer = _thread.region
    is_active = enabled or calibrating
    # A region within backward belongs to a forward that is computed again, and begins no step.
    is_forward = torch._C._current_graph_task_id() == -1
    if is_active and not _thread.depth and is_forward and torch.is_grad_enabled():
        _thread.pending.roll()
    _thread.region = Region(enabled, recipe, calibrating, group, _thread.pending)
    _thread.depth += is_active
    try:
        yield
    finally:
        _thread.region = outer
        _thread.depth -= is_active
