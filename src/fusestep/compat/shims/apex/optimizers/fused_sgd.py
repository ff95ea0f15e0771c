"""apex.optimizers.FusedSGD over fusestep.optim.FusedSGD."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from apex.optimizers._layout import ApexOptimizer
from fusestep import optim

__all__ = ["FusedSGD"]


class FusedSGD(ApexOptimizer, optim.FusedSGD):
    """SGD with momentum and Nesterov's, with Apex's arguments in Apex's order.

    Right where Apex is not: bf16 parameters are stepped, each buffer knows whether it is new, and buffers are fp32.

    Args: as of Apex. materialize_master_grads belonged to the old amp and is without effect. master_weights,
        fusestep's: fp32 copies of 16-bit parameters.
    """

    SERVED_BY = "fusestep.optim.FusedSGD"
    group_options = ("lr", "momentum", "dampening", "weight_decay", "nesterov")
    counts_steps = False
    op = "sgd"
    own_attributes = (*ApexOptimizer.own_attributes, "materialize_master_grads")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool = False,
        *,
        master_weights: bool = False,
    ) -> None:
        super().__init__(
            params,
            lr,
            momentum,
            dampening,
            weight_decay,
            nesterov,
            wd_after_momentum=wd_after_momentum,
            master_weights=master_weights,
        )
        self.materialize_master_grads = materialize_master_grads
        self.set_grad_none = set_grad_none
        self._served("apex.optimizers")

    def _save_group(self, saved: dict[str, Any], states: dict[Any, dict[str, Any]], group: dict[str, Any]) -> None:
        super()._save_group(saved, states, group)
        for state in states.values():
            # Apex takes a buffer for one with a past wherever there is an entry.
            if state.get("momentum_buffer", ...) is None:
                del state["momentum_buffer"]
