"""apex.optimizers.FusedLAMB over fusestep.optim.FusedLAMB."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from apex.optimizers._layout import ApexOptimizer, clipping, refuse_amsgrad
from fusestep import optim

__all__ = ["FusedLAMB"]


class FusedLAMB(ApexOptimizer, optim.FusedLAMB):
    """LAMB with Apex's arguments in Apex's order.

    Right where Apex is not: moments stay fp32, bf16 is served, empty groups may be anywhere, `p.grad` is left as it
    was, max_grad_norm=0 clips nothing, and a step whose norm is not finite changes nothing. max_grad_norm is one for
    all groups; one that differs raises.

    Args: as of Apex. amsgrad=True raises, as there. master_weights, fusestep's: fp32 copies of 16-bit parameters.
    """

    SERVED_BY = "fusestep.optim.FusedLAMB"
    group_options = ("lr", "bias_correction", "betas", "eps", "weight_decay", "grad_averaging", "max_grad_norm")
    op = "lamb"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
        *,
        master_weights: bool = False,
    ) -> None:
        refuse_amsgrad("FusedLAMB", amsgrad)
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            bias_correction=bias_correction,
            adam_w_mode=adam_w_mode,
            grad_averaging=grad_averaging,
            max_grad_norm=clipping(max_grad_norm),
            use_nvlamb=use_nvlamb,
            master_weights=master_weights,
        )
        self.set_grad_none = set_grad_none
        self._served("apex.optimizers")

    def _load_group(self, saved: dict[str, Any], states: dict[Any, dict[str, Any]], group: dict[str, Any]) -> None:
        super()._load_group(saved, states, group)
        saved["max_grad_norm"] = clipping(saved.get("max_grad_norm", group["max_grad_norm"]))
