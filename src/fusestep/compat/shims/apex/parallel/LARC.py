"""apex.parallel.LARC: a learning rate for each layer, from the norms of its weight and gradient.

    local = trust_coefficient · ‖p‖ / (‖g‖ + weight_decay · ‖p‖ + eps),    clip: min(local / lr, 1)
    g ← (g + weight_decay · p) · local          where neither norm is 0

Source: You, Gitman and Ginsburg 2017, arXiv:1708.03888.
"""

from __future__ import annotations

from typing import Any

import torch

from fusestep.compat.report import served

__all__ = ["LARC"]


class LARC:
    """Wraps an optimizer; `step` changes gradients as above, without waiting for the device, and steps it.

    Args:
        optimizer: one whose groups have `lr` and `weight_decay`; the decay happens here, and not in it.
        trust_coefficient: see above. clip: scale learning rates down only. eps: see above.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, trust_coefficient: float = 0.02, clip: bool = True, eps: float = 1e-8
    ) -> None:
        self.optim = optimizer
        self.trust_coefficient = trust_coefficient
        self.eps = eps
        self.clip = clip
        served("apex.parallel.LARC", "torch")

    def __getattr__(self, name: str) -> Any:
        """All else is the optimizer's own: param_groups, state, state_dict, zero_grad, ….

        A name with underscores is not, so that copying and pickling ask this object itself.
        """
        if name.startswith("__") or name == "optim":
            raise AttributeError(name)
        return getattr(self.optim, name)

    def __repr__(self) -> str:
        return repr(self.optim)

    @torch.no_grad()
    def step(self, *args: Any, **options: Any) -> Any:
        """Scale the gradients of each parameter and step."""
        decays = [group["weight_decay"] for group in self.optim.param_groups]
        try:
            for group, decay in zip(self.optim.param_groups, decays, strict=True):
                group["weight_decay"] = 0.0
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._scale(parameter, decay, group["lr"])
            return self.optim.step(*args, **options)
        finally:
            for group, decay in zip(self.optim.param_groups, decays, strict=True):
                group["weight_decay"] = decay

    def _scale(self, parameter: torch.Tensor, decay: float, lr: Any) -> None:
        gradient = parameter.grad
        assert gradient is not None
        weight_norm = torch.linalg.vector_norm(parameter, dtype=torch.float32)
        gradient_norm = torch.linalg.vector_norm(gradient, dtype=torch.float32)
        local = self.trust_coefficient * weight_norm / (gradient_norm + weight_norm * decay + self.eps)
        if self.clip:
            local = (local / lr).clamp(max=1.0)
        applies = (weight_norm != 0) & (gradient_norm != 0)
        scaled = (gradient.float() + decay * parameter.float()) * local
        gradient.copy_(torch.where(applies, scaled, gradient.float()))
