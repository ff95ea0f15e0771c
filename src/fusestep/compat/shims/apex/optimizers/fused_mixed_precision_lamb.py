"""apex.optimizers.FusedMixedPrecisionLamb over fusestep.optim.FusedLAMB with master weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from apex.optimizers._layout import ApexOptimizer, clipping, refuse_amsgrad
from fusestep import optim

__all__ = ["FusedMixedPrecisionLamb"]


class FusedMixedPrecisionLamb(ApexOptimizer, optim.FusedLAMB):
    """LAMB that steps fp32 masters of 16-bit parameters and skips steps with overflow without waiting.

    Right where Apex is not: any mixture of dtypes, learning rates that are numbers, masters made at the first step and
    saved, a closure with gradients enabled.

    Args:
        params, lr, bias_correction, betas, eps, weight_decay, adam_w_mode, grad_averaging, max_grad_norm, use_nvlamb:
            as of FusedLAMB. amsgrad=True raises.
        step: the steps taken so far.
        reduced_precision_dtype: without effect; every 16-bit parameter has a master.
    """

    SERVED_BY = "fusestep.optim.FusedLAMB"
    group_options = ("lr", "bias_correction", "betas", "eps", "weight_decay", "grad_averaging", "max_grad_norm")
    saves_tensors = True
    op = "lamb"
    own_attributes = (*ApexOptimizer.own_attributes, "_first_step", "reduced_precision_dtype")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        step: int = 0,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
        reduced_precision_dtype: torch.dtype | None = None,
    ) -> None:
        refuse_amsgrad("FusedMixedPrecisionLamb", amsgrad)
        self._first_step = float(step)
        self.reduced_precision_dtype = reduced_precision_dtype
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
            master_weights=True,
        )
        self._served("apex.optimizers")

    def _complete_state(self, parameter: Tensor, group: dict[str, Any]) -> None:
        self.state[parameter].setdefault("step", torch.tensor(self._first_step))
        super()._complete_state(parameter, group)

    def _load_group(self, saved: dict[str, Any], states: dict[Any, dict[str, Any]], group: dict[str, Any]) -> None:
        super()._load_group(saved, states, group)
        saved["max_grad_norm"] = clipping(saved.get("max_grad_norm", group["max_grad_norm"]))
