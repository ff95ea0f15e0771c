"""apex.amp.scaler."""

from __future__ import annotations

import logging

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

    def loss_scale(self) -> float:
        """The scale now."""
        return self._loss_scale

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
