"""apex.amp.scaler."""

from __future__ import annotations

import logging

import torch

__all__ = ["LossScaler"]

logger = logging.getLogger("fusestep")


class LossScaler:
    """A loss scale, fixed or "dynamic": halved on overflow, doubled after 2000 steps without.

    Args:
        loss_scale: a number, or "dynamic".
        init_scale, scale_factor, scale_window, min_loss_scale, max_loss_scale: of the dynamic one.
    """

    def __init__(
        self,
        loss_scale: float | str,
        init_scale: float = 2.0**16,
        scale_factor: float = 2.0,
        scale_window: int = 2000,
        min_loss_scale: float | None = None,
        max_loss_scale: float = 2.0**24,
    ) -> None:
        self.dynamic = loss_scale == "dynamic"
        self._loss_scale = min(max_loss_scale, init_scale) if self.dynamic else float(loss_scale)
        self._scale_factor = scale_factor
        self._scale_window = scale_window
        self._min_loss_scale = min_loss_scale
        self._max_loss_scale = max_loss_scale
        self._unskipped = 0
        # Scripts that unscale by themselves put their own flag here and call update_scale.
        self._overflow_buf = torch.zeros(1, dtype=torch.int32)

    def loss_scale(self) -> float:
        """The scale now."""
        return self._loss_scale

    def clear_overflow_state(self) -> None:
        """Lower the flag."""
        self._overflow_buf.zero_()

    def update_scale(self) -> bool:
        """Update from the flag `_overflow_buf`, which waits for its device; whether the step is to be skipped."""
        skips = self.dynamic and bool(self._overflow_buf.item())
        self.update(skips)
        return skips

    def update(self, has_overflow: bool) -> None:
        """After a backward pass; a fixed scale stays."""
        if not self.dynamic:
            return
        if has_overflow:
            smaller = self._loss_scale / self._scale_factor
            self._loss_scale = smaller if self._min_loss_scale is None else max(self._min_loss_scale, smaller)
            self._unskipped = 0
            logger.warning("apex.amp: gradient overflow; the step is skipped and the scale is now %g", self._loss_scale)
            return
        self._unskipped += 1
        if self._unskipped == self._scale_window:
            self._loss_scale = min(self._max_loss_scale, self._loss_scale * self._scale_factor)
            self._unskipped = 0
