"""What Transformer Engine's optimizers share beside their constructors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from apex.optimizers._scaler import scaled_by, without_hooks
from torch.optim import Optimizer


class ScaledStep(Optimizer):
    """A step that takes a GradScaler, and a zero_grad whose habit was chosen in the constructor."""

    set_grad_none: bool | None = None

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear gradients: to None, unless set_grad_none=False was given."""
        if set_to_none is None:
            set_to_none = self.set_grad_none is not False
        super().zero_grad(set_to_none)

    # No parameter is called grad_scaler: by that name torch.amp.GradScaler would know it, and leave unscaling out.
    def step(self, closure: Callable[[], float] | None = None, *scaler: Any, **by_name: Any) -> Any:
        """Step; grad_scaler, second, is a torch.amp.GradScaler that the gradients are scaled by.

        Gradients that it has unscaled already are not unscaled again.
        """
        if len(scaler) > 1:
            raise TypeError("step() takes a closure and a grad_scaler.")
        if scaler:
            by_name["grad_scaler"] = scaler[0]
        with scaled_by(self, by_name):
            return without_hooks(super().step)(closure)
