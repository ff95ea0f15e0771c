"""apex.amp.handle: `scale_loss`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from apex.amp._amp_state import _amp_state
from apex.amp._optimizer import Backward
from fusestep.compat.report import served
from fusestep.errors import UserError

__all__ = ["disable_casts", "scale_loss"]


@contextmanager
def scale_loss(
    loss: Tensor,
    optimizers: Any,
    loss_id: int = 0,
    model: Any = None,  # noqa: ARG001
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> Iterator[Tensor]:
    """Within it, the scaled loss, to call backward on; at its end gradients are unscaled, which waits for the device.

    Where one is not finite, the next step of these optimizers does nothing and a dynamic scale is halved.

    Args:
        loss: of any dtype; what is given is fp32.
        optimizers: one, or a list of them.
        loss_id: which of initialize's num_losses scalers.
        model: without effect, as in Apex with initialize.
        delay_unscale: leave gradients scaled, for a later pass to unscale them together.
        delay_overflow_check: do not look, nor wait; a later pass looks at the sum.
    Raises: RuntimeError before `initialize`; UserError for a loss_id that has no scaler.
    """
    properties = _amp_state.opt_properties
    if properties is None:
        raise RuntimeError("amp.scale_loss: call amp.initialize first.")
    if not properties.enabled:
        yield loss
        return
    served("apex.amp.scale_loss", "torch._amp_foreach_non_finite_check_and_unscale_")
    steppers: list[Any] = list(optimizers) if isinstance(optimizers, (list, tuple)) else [optimizers]
    if not all(hasattr(optimizer, "_amp_backward") for optimizer in steppers):
        raise RuntimeError("amp.scale_loss: an optimizer did not go through amp.initialize; pass it there too.")
    backwards: list[Backward] = [optimizer._amp_backward for optimizer in steppers]
    scalers = _amp_state.loss_scalers
    if loss_id not in range(len(scalers)):
        raise UserError(
            f"amp.scale_loss: loss_id is {loss_id!r} and initialize's num_losses was {len(scalers)}; pass one from 0 "
            f"to {len(scalers) - 1}, or a larger num_losses."
        )
    scaler = scalers[loss_id]
    scale = scaler.loss_scale()
    if scale == 1.0 and not scaler.dynamic and not any(backward.has_masters() for backward in backwards):
        yield loss.float()
        return
    for backward in backwards:
        backward.prepare()
    yield loss.float() * scale
    if delay_unscale:
        for backward in backwards:
            backward.is_scaled = True
        return
    for backward in backwards:
        backward.unscale(scale)
    if delay_overflow_check or not scaler.dynamic:
        return
    overflows = [backward.take_overflow() for backward in backwards]  # each is asked, since asking clears it
    has_overflow = any(overflows)
    scaler.update(has_overflow)
    if has_overflow:
        for backward in backwards:
            backward.skips = True


@contextmanager
def disable_casts() -> Iterator[None]:
    """Within it O1 casts nothing."""
    with torch.autocast("cuda", enabled=False), torch.autocast("cpu", enabled=False):
        yield
