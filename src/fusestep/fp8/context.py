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
from contextlib import ContextDecorator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fusestep.errors import UserError
from fusestep.fp8.pending import Pending
from fusestep.fp8.ranks import region_group
from fusestep.fp8.recipes import DelayedScaling, Recipe

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Region(NamedTuple):
    """What an fp8_autocast region asks of the modules inside.

    Attributes:
        enabled: multiply in FP8.
        recipe: how scales are chosen.
        calibrating: multiply in high precision, but record the amaxes of what would have been cast.
        group: over whose ranks amaxes are reduced; None: each rank is by itself.
        pending: what was recorded in this thread and has not entered a history yet.
    """

    enabled: bool
    recipe: Recipe
    calibrating: bool
    group: Any
    pending: Pending


class _Regions:
    """The innermost region of a thread, how many active ones enclose it, and what its modules recorded."""

    def __init__(self) -> None:
        self.region: Region | None = None
        self.depth = 0
        self.pending = Pending()


class _Thread(threading.local):
    """The regions of a thread: one object, so that a call looks them up once."""

    def __init__(self) -> None:
        self.regions = _Regions()


_thread = _Thread()

#: One object, so that modules see at a glance that they follow it already.
_DEFAULT_RECIPE = DelayedScaling()


def current() -> Region | None:
    """The region that a module's forward is in, or None where nothing of FP8 is asked of it."""
    region = _thread.regions.region
    return region if region is not None and (region.enabled or region.calibrating) else None


def is_enabled() -> bool:
    """Whether modules that are called here multiply in FP8."""
    region = _thread.regions.region
    return region is not None and region.enabled


def is_inside() -> bool:
    """Whether any region encloses this call, one that switches FP8 off too."""
    return _thread.regions.region is not None


class fp8_autocast(ContextDecorator):  # noqa: N801 (named as torch.autocast)
    """Run the modules of `fusestep.nn` in FP8 within this region.

    It composes with torch.autocast, whose dtype is then that of the modules' outputs. Without a GPU that multiplies
    FP8 the same quantised numbers are computed by emulation, which is announced. Usable again and again, and as a
    decorator.

    Args:
        enabled: False switches FP8 off within, also inside an enabled region.
        recipe: how scales are chosen; DelayedScaling() if None.
        group: the ranks over which delayed scaling reduces amaxes, so that all have the same scales; None: all ranks of
            torch.distributed, where it is initialised. Outermost regions then begin equally often on all of them. A
            recipe with reduce_amax=False leaves each rank by itself.
        calibrating: with enabled=False, compute in high precision and record amaxes, so that a later FP8 forward
            starts from known scales.
    Raises: UserError for a recipe that is none, and for switches that are neither True nor False.
    """

    def __init__(
        self,
        enabled: bool = True,
        recipe: Recipe | None = None,
        group: ProcessGroup | None = None,
        calibrating: bool = False,
    ) -> None:
        if recipe is None:
            recipe = _DEFAULT_RECIPE
        if not (
            type(enabled) is type(calibrating) is bool and isinstance(recipe, Recipe) and type(recipe) is not Recipe
        ):
            raise _misuse(enabled, recipe, calibrating)
        self._asked = enabled, recipe, calibrating, group
        self._outer: list[Region | None] = []

    def _recreate_cm(self) -> fp8_autocast:
        # Each call of a decorated function is a region of its own: calls may meet, in threads or by recursion.
        enabled, recipe, calibrating, group = self._asked
        return fp8_autocast(enabled, recipe, group, calibrating)

    def __enter__(self) -> None:
        regions = _thread.regions
        pending = regions.pending
        enabled, recipe, calibrating, group = self._asked
        if enabled or calibrating:
            group = region_group(recipe, group)
            is_outermost = not regions.depth
            # A region within backward belongs to a forward that is computed again, and begins no step.
            if torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
                if is_outermost:
                    pending.roll()
                if group is not None:
                    pending.begin(group, recipe)
            regions.depth += 1
        self._outer.append(regions.region)
        regions.region = Region(enabled, recipe, calibrating, group, pending)

    def __exit__(self, *exception: object) -> None:
        regions = _thread.regions
        enabled, _, calibrating, _ = self._asked
        regions.depth -= enabled or calibrating
        regions.region = self._outer.pop()


def _misuse(enabled: object, recipe: object, calibrating: object) -> UserError:
    for name, switch in (("enabled", enabled), ("calibrating", calibrating)):
        if not isinstance(switch, bool):
            return UserError(f"fp8_autocast: {name} is {switch!r}; pass True or False, and a recipe as recipe=….")
    return UserError(f"fp8_autocast: recipe is {recipe!r}; pass an object such as fusestep.fp8.DelayedScaling().")
