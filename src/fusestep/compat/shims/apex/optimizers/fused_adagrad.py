"""apex.optimizers.FusedAdagrad over fusestep.optim.FusedAdagrad."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from apex.optimizers._layout import ApexOptimizer
from fusestep import optim

__all__ = ["FusedAdagrad"]


class FusedAdagrad(ApexOptimizer, optim.FusedAdagrad):
    """Adagrad with Apex's arguments in Apex's order; sums are fp32 and bf16 parameters are served.

    Args: as of Apex. master_weights, fusestep's: fp32 copies of 16-bit parameters.
    """

    SERVED_BY = "fusestep.optim.FusedAdagrad"
    group_options = ("lr", "eps", "weight_decay")
    counts_steps = False
    op = "adagrad"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
        adagrad_w_mode: bool = False,
        *,
        master_weights: bool = False,
    ) -> None:
        super().__init__(
            params,
            lr,
            weight_decay=weight_decay,
            eps=eps,
            adagrad_w_mode=adagrad_w_mode,
            master_weights=master_weights,
        )
        self.set_grad_none = set_grad_none
        self._served("apex.optimizers")

    def _load_group(self, saved: dict[str, Any], states: dict[Any, dict[str, Any]], group: dict[str, Any]) -> None:
        super()._load_group(saved, states, group)
        for state in states.values():
            if "sum" in state:
                # Apex counts none; only a learning rate that decays would need it.
                state.setdefault("step", 0.0)
