"""What the modules that multiply in FP8 share: which region a call is in, how it casts, and calibration.

Their scaling state is in module_state.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fusestep import dispatch
from fusestep.dispatch import Choice
from fusestep.errors import UserError
from fusestep.fp8 import context
from fusestep.fp8.casting import is_counting, passing_casts, recording_casts, stateless_casts
from fusestep.fp8.casts import Casts
from fusestep.fp8.context import Region
from fusestep.fp8.recipes import DelayedScaling, Float8BlockScaling, MXFP8BlockScaling, Recipe
from fusestep.fp8.state import Slots
from fusestep.nn.module_state import TRANSIENT, StatefulModule
from fusestep.ops.roll_scales import AMAX
from fusestep.transforms import is_transformed

#: What activations may be.
FLOATING = (torch.float32, torch.bfloat16, torch.float16)

#: Standard deviation of initial weights, as Transformer Engine's.
INITIAL_DEVIATION = 0.023

#: Why delayed scaling is left out of torch.compile's graphs.
GRAPH_BREAK = (
    "torch.compile breaks its graph here: backward records amaxes in the module's state, which a compiled backward "
    "cannot write"
)

Initialiser = Callable[[Tensor], Any]


class FP8Module(StatefulModule):
    """A module that casts the tensors named by `SLOTS`, and that is told by the region it is called in how.

    Attributes:
        fp8_state: scaling state of delayed scaling, or None before the first training forward.
    """

    # The region of the last forward in training, and the casts that were last worked out for `_recipe`.
    _region: Region | None
    _casts: Any

    def __init__(self, name: str | None) -> None:
        super().__init__()
        self.name = name
        self.fp8_state = None
        self.__dict__.update(TRANSIENT)
        self._take_seat()

    def _parameter(self, name: str) -> Any:
        """A parameter, or what stands in its place under a parametrization, pruning or in a replica.

        Straight from the dictionary where it is there: nn.Module's own way costs the host several times as much.
        """
        try:
            return self._parameters[name]
        except KeyError:
            return getattr(self, name)

    # The region of a call

    def _region_of_call(self) -> Region | None:
        """The region that this forward belongs to, None where it computes in high precision.

        A forward that is computed again within backward, for activation checkpointing, may find itself outside the
        region of the forward, or on another thread: it takes the region that the module's last forward had.
        """
        region = context.current()
        if torch.compiler.is_compiling():  # traces one forward, and computes none again
            return region
        if torch._C._current_graph_task_id() != -1:
            return self._region if region is None else region
        if self.training:
            # Straight into the dictionary: nn.Module's own way costs the host more than the rest of this method.
            self.__dict__["_region"] = region
        return region

    def _leaves_graph(self, region: Region | None) -> bool:
        """Whether a forward under torch.compile cannot be part of a graph; see `GRAPH_BREAK`."""
        return region is not None and isinstance(region.recipe, DelayedScaling)

    def _outside_of_a_graph(self, *args: Any) -> Any:
        """The forward as it is without torch.compile."""
        return torch.compiler.disable(type(self).forward, reason=GRAPH_BREAK)(self, *args)

    def _casts_of(self, region: Region, records: bool) -> Casts:
        """How this call casts. `records`: a training forward, whose amaxes enter the state."""
        recipe = region.recipe
        casts: Casts | None = self._casts
        # As short as can be for the recipe of the last call: what makes its casts stale forgets them.
        if casts is not None and recipe is self._recipe:
            if casts.slots is None:
                return casts
            state = self.fp8_state
            if (
                records
                and state is not None
                and state.recipe is recipe
                and (casts.counts is None) is not is_counting()
                and "_is_replica" not in self.__dict__
            ):
                region.pending.add(state, region.group)
                return casts
        return self._new_casts_of(region, records)

    def _new_casts_of(self, region: Region, records: bool) -> Casts:
        """`_casts_of` where the casts of the last call may not serve."""
        recipe = region.recipe
        if not isinstance(recipe, DelayedScaling):
            casts: Casts | None = self._casts if recipe == self._recipe else None
            if casts is None:
                casts = stateless_casts(recipe)
                self.__dict__["_recipe"], self.__dict__["_casts"] = recipe, casts
            return casts
        if "_is_replica" in self.__dict__:
            raise self._shared_state()
        if not records:
            return passing_casts(recipe, self.fp8_state, len(self.SLOTS), self._first_weight().device)
        state = self._recorded_state(region, recipe)
        casts = self._casts if recipe == self._recipe else None
        if casts is None or (casts.counts is None) is is_counting():
            casts = recording_casts(recipe, state)
            self.__dict__["_recipe"], self.__dict__["_casts"] = recipe, casts
        return casts

    def _recorded_state(self, region: Region, recipe: DelayedScaling) -> Slots:
        """The state, in which something is about to be recorded: the next region rolls it."""
        state = self.shared_state(recipe)
        region.pending.add(state, region.group)
        return state

    # Calibration

    def _calibrate(self, region: Region | None, index: int, x: Tensor) -> None:
        """Under a calibrating region, record the amax of what the slot `index` would have cast."""
        if region is None or region.enabled or not isinstance(region.recipe, DelayedScaling):
            return
        if "_is_replica" in self.__dict__:
            raise self._shared_state()
        state = self._recorded_state(region, region.recipe)
        if x.numel():
            amax = state.slots[index, AMAX]
            amax.copy_(torch.maximum(amax, x.detach().abs().amax().float()))

    def _calibrate_gradient(self, region: Region | None, index: int, y: Tensor) -> None:
        if region is not None and not region.enabled and y.requires_grad:
            y.register_hook(lambda gradient: self._calibrate(region, index, gradient))

    # Checks

    def _check_input(self, x: Tensor, features: int, region: Region | None) -> None:
        """Refuse, in one sentence, what cannot be multiplied."""
        shape, weight = x.shape, self._first_weight()
        # One expression, since every call passes here; what is wrong is looked for only if something is.
        if (
            shape
            and shape[-1] == features
            and x.device == weight.device
            and (region is None or not is_transformed())
            and ((x.dtype in FLOATING and weight.dtype in FLOATING) or region is None or not region.enabled)
        ):
            return
        if shape[-1:] != (features,):
            last = f"last dimension {x.shape[-1]}" if x.dim() else "no dimension"
            raise UserError(
                f"{self._described()}: x has {last} and the layer takes {features} features; pass x of shape "
                f"(..., {features})."
            )
        if region is not None and region.enabled and x.dtype not in FLOATING:
            raise UserError(
                f"{self._described()}: x has dtype {x.dtype}, which FP8 is not cast from; pass float32, bfloat16 or "
                "float16, or leave the fp8_autocast region."
            )
        if region is not None and region.enabled and weight.dtype not in FLOATING:
            raise UserError(
                f"{self._described()}: the weight has dtype {weight.dtype}, which FP8 is not cast from; convert the "
                "layer to float32, bfloat16 or float16, or leave the fp8_autocast region."
            )
        if region is not None and is_transformed():
            raise UserError(
                f"{self._described()}: transforms of torch.func and forward-mode gradients cannot look into FP8; call "
                "the module outside of fp8_autocast there."
            )
        raise UserError(
            f"{self._described()}: x is on {x.device} and the weight on {weight.device}; move them to one device."
        )

    # torch.nn.DataParallel, whose replicas hold the same objects as their module, on other devices, in other threads

    def _replicate_for_data_parallel(self) -> Any:
        if context.current() is not None:
            raise UserError(
                f"{self._described()}: torch.nn.DataParallel runs its replicas in threads of their own, which this "
                "fp8_autocast region does not reach; use torch.nn.parallel.DistributedDataParallel, or enter the "
                "region in the forward of the module that is replicated."
            )
        return super()._replicate_for_data_parallel()  # type: ignore[no-untyped-call]

    def _shared_state(self) -> UserError:
        return UserError(
            f"{self._described()}: replicas of torch.nn.DataParallel would share one scaling state; use "
            "torch.nn.parallel.DistributedDataParallel, or a recipe without state such as Float8CurrentScaling."
        )

    # What an explanation tells

    def _product_choice(self) -> Choice:
        """What products of this module run as: FP8 in the region it is in, or was last in, else PyTorch's own."""
        region = context.current() or self._region
        if region is None or not region.enabled:
            return Choice("torch", "PyTorch's own product; in FP8 inside an fp8_autocast region")
        choice = product_choice(region.recipe, self._first_weight().device)
        if isinstance(region.recipe, DelayedScaling):
            return replace(choice, reason=f"{choice.reason}; {GRAPH_BREAK}")
        return choice


def product_choice(recipe: Recipe, device: torch.device) -> Choice:
    """What FP8 products of a recipe run as on a device, and why."""
    if isinstance(recipe, MXFP8BlockScaling):
        return dispatch.explain_product(device.type, device.index, "mx")
    if isinstance(recipe, Float8BlockScaling):
        return dispatch.explain_product(device.type, device.index, "block")
    return dispatch.explain_product(device.type, device.index)


def activation_dtype(x: Tensor) -> torch.dtype:
    """The dtype of a product's output: torch.autocast's where it is enabled, else x's."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def plain_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Function.apply less its part in Python, two fifths of its cost; that serves torch.func, which is ruled out.

    The older dynamos trace the whole apply alone.
    """
    plainly: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]

    def apply(*args: Any) -> Any:
        return function.apply(*args) if torch.compiler.is_compiling() else plainly(*args)

    return apply


def initialise(weight: Tensor, method: Initialiser | None) -> None:
    """Fill a weight: by `method`, or from N(0, 0.023)."""
    if method is None:
        nn.init.normal_(weight, std=INITIAL_DEVIATION)
    else:
        with torch.no_grad():
            method(weight)
