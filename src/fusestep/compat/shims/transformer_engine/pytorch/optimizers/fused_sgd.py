"""te.optimizers.FusedSGD over fusestep.optim.FusedSGD."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fusestep import optim
from fusestep.compat.stepping import DropInOptimizer

__all__ = ["FusedSGD"]


class FusedSGD(DropInOptimizer, optim.FusedSGD):
    """SGD with momentum in one launch; see fusestep.optim.FusedSGD. Each parameter knows whether it was stepped."""

    SERVED_BY = "fusestep.optim.FusedSGD"
    op = "sgd"
    counts_steps = False

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,  # noqa: ARG002 (of Apex's old amp)
        set_grad_none: bool | None = None,
    ) -> None:
        self.set_grad_none = set_grad_none
        super().__init__(params, lr, momentum, dampening, weight_decay, nesterov, wd_after_momentum=wd_after_momentum)
        self._served("transformer_engine.pytorch.optimizers")
