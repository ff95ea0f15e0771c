"""`optimizer.step(grad_scaler=…)`, as Apex has it, in terms of what torch.amp.GradScaler leaves on an optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.amp.grad_scaler import OptState


@contextmanager
def scaled_by(optimizer: Any, options: dict[str, Any]) -> Iterator[None]:
    """Within it `optimizer.grad_scale` and `found_inf` are what `GradScaler.step` would have set.

    Args:
        options: the keywords of `step`: nothing, or grad_scaler.
    Raises: TypeError for other keywords.
    """
    scaler: torch.amp.GradScaler | None = options.pop("grad_scaler", None)
    if options:
        raise TypeError(f"{type(optimizer).__name__}.step has no argument {next(iter(options))!r}.")
    if scaler is None or not scaler.is_enabled():
        yield
        return
    state = scaler._per_optimizer_states[id(optimizer)]
    is_unscaled = state["stage"] is OptState.UNSCALED
    if not state["found_inf_per_device"]:
        scaler._check_inf_per_device(optimizer)
    found = list(state["found_inf_per_device"].values())
    optimizer.grad_scale = None if is_unscaled else scaler._get_scale_async()
    optimizer.found_inf = sum(one.to(found[0].device, non_blocking=True) for one in found)
    try:
        yield
    finally:
        del optimizer.grad_scale, optimizer.found_inf


def without_hooks(step: Callable[..., Any]) -> Callable[..., Any]:
    """A base class's bound `step` less the hooks that torch wraps around it, which the derived one's runs already."""
    function: Any = getattr(step, "__func__", step)
    if not getattr(function, "hooked", False):
        return step
    inner: Callable[..., Any] = function.__wrapped__.__get__(getattr(step, "__self__", None))
    return inner
