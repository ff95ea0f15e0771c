"""Mistakes in what a TrainStep is built from, told before they train nothing or something else."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from fusestep.errors import UserError
from fusestep.fp8.recipes import Recipe

_ORDER = "pass TrainStep(model, loss_fn, optimizer)"


def check_built(
    model: Any, loss_fn: Any, optimizer: Any, *, autocast: Any, fp8_recipe: Any, scaler: Any, before: Any
) -> None:
    """Raises: UserError for what is not of the kind that TrainStep takes there."""
    if not isinstance(model, nn.Module):
        raise UserError(f"TrainStep: the model is {_told(model)}, not a torch.nn.Module; {_ORDER}.")
    if isinstance(optimizer, type):
        raise UserError(
            f"TrainStep: the optimizer is the class {optimizer.__name__}; pass one that was built from the model, as "
            f"{optimizer.__name__}(model.parameters())."
        )
    if isinstance(optimizer, nn.Module) or not callable(getattr(optimizer, "step", None)):
        raise UserError(f"TrainStep: the optimizer is {_told(optimizer)}, which has no step to take; {_ORDER}.")
    if not hasattr(optimizer, "param_groups"):  # as a schedule, which has a step
        raise UserError(f"TrainStep: the optimizer is {_told(optimizer)}, which has no param_groups; {_ORDER}.")
    if isinstance(loss_fn, (type, torch.optim.Optimizer)) or not callable(loss_fn):
        raise UserError(
            f"TrainStep: loss_fn is {_told(loss_fn)}, not a function of the model and a batch; {_ORDER} with "
            "loss_fn(model, *batch)."
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise UserError(
            f"TrainStep: {type(optimizer).__name__} takes several gradients in a step, by a closure; pass an "
            "optimizer that takes one, as torch.optim.AdamW does."
        )
    if not (autocast is None or (isinstance(autocast, torch.dtype) and autocast.is_floating_point)):
        raise UserError(
            f"TrainStep: autocast is {_told(autocast)}, not a floating-point dtype; pass torch.bfloat16 or "
            "torch.float16, or None for none."
        )
    if not (fp8_recipe is None or isinstance(fp8_recipe, Recipe)):
        raise UserError(
            f"TrainStep: fp8_recipe is {_told(fp8_recipe)}, not a recipe; pass one that was made, as "
            "fusestep.fp8.DelayedScaling(), or None for none."
        )
    scales = all(callable(getattr(scaler, name, None)) for name in ("scale", "step", "update"))
    if scaler is not None and (isinstance(scaler, type) or not scales):
        raise UserError(
            f"TrainStep: scaler is {_told(scaler)}, not a GradScaler; pass torch.amp.GradScaler(), or None for none."
        )
    if not (before is None or callable(before)):
        raise UserError(f"TrainStep: before is {_told(before)}, not a function; pass one without arguments, or None.")


def has_gradient(parameters: Iterable[Tensor]) -> bool:
    """Whether any of them has one, in `grad` or in `main_grad`."""
    return any(p.grad is not None or getattr(p, "main_grad", None) is not None for p in parameters)


def check_trains(optimizer: torch.optim.Optimizer) -> None:
    """Raises: UserError where no parameter of the optimizer has a gradient after a backward pass."""
    if not any(has_gradient(group["params"]) for group in optimizer.param_groups):
        raise UserError(
            f"TrainStep: no parameter of {type(optimizer).__name__} got a gradient, so it would train nothing; build "
            "the optimizer from the parameters of the model that is trained, after the model was wrapped, copied, "
            "sharded or moved."
        )


def _told(value: Any) -> str:
    """A value in a few words."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, (str, bool, int, float, torch.dtype, type(None))):
        return repr(value)
    return f"a {type(value).__name__}"
