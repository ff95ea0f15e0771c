"""apex.optimizers.FusedNovoGrad over fusestep.optim.FusedNovoGrad."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from apex.optimizers._layout import ApexOptimizer, refuse_amsgrad
from fusestep import optim
from fusestep.errors import UserError

__all__ = ["FusedNovoGrad"]

#: The order of the lists of norms in a group's `exp_avg_sq`; Apex knows the first two.
_LISTS = (torch.float16, torch.float32, torch.bfloat16)


class FusedNovoGrad(ApexOptimizer, optim.FusedNovoGrad):
    """NovoGrad with Apex's arguments in Apex's order.

    Right where Apex is not: a tensor's norm is its own, whichever others have gradients; bf16 is served; the moment is
    fp32; a state that was saved before the first step loads. State dicts have the norms in a group's `exp_avg_sq`, one
    tensor for fp16 and one for fp32 parameters (and one for bf16), by position among those that were stepped.

    Args: as of Apex; norm_type 2, or 0 for the largest magnitude. amsgrad=True raises. master_weights, fusestep's: fp32
        copies of 16-bit parameters.
    """

    SERVED_BY = "fusestep.optim.FusedNovoGrad"
    group_options = (
        "lr",
        "bias_correction",
        "betas",
        "eps",
        "weight_decay",
        "grad_averaging",
        "norm_type",
        "init_zero",
    )
    op = "novograd"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        reg_inside_moment: bool = False,
        grad_averaging: bool = True,
        norm_type: float = 2,
        init_zero: bool = False,
        set_grad_none: bool = True,
        *,
        master_weights: bool = False,
    ) -> None:
        refuse_amsgrad("FusedNovoGrad", amsgrad)
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            bias_correction=bias_correction,
            reg_inside_moment=reg_inside_moment,
            grad_averaging=grad_averaging,
            norm_type=norm_type or math.inf,
            init_zero=init_zero,
            master_weights=master_weights,
        )
        self.set_grad_none = set_grad_none
        self._served("apex.optimizers")

    def _save_group(self, saved: dict[str, Any], states: dict[Any, dict[str, Any]], group: dict[str, Any]) -> None:
        super()._save_group(saved, states, group)
        saved["norm_type"] = 0 if saved["norm_type"] == math.inf else saved["norm_type"]
        by_dtype = _by_dtype(saved["params"], group["params"], states)
        if states:
            saved["exp_avg_sq"] = [
                torch.stack([state.pop("exp_avg_norm").reshape(()) for state in own])
                if own
                else torch.zeros(0, device=group["params"][0].device)
                for own in by_dtype.values()
            ]

    def _load_group(self, saved: dict[str, Any], states: dict[Any, dict[str, Any]], group: dict[str, Any]) -> None:
        super()._load_group(saved, states, group)
        if "norm_type" in saved:
            saved["norm_type"] = saved["norm_type"] or math.inf
        lists = saved.pop("exp_avg_sq", None)
        if lists is None or len(saved["params"]) != len(group["params"]):
            return
        stepped = {key: state for key, state in states.items() if "exp_avg" in state}
        for norms, own in zip(lists, _by_dtype(saved["params"], group["params"], stepped).values(), strict=False):
            if len(norms) != len(own):
                raise UserError(
                    f"FusedNovoGrad.load_state_dict: a group has {len(norms)} norms in exp_avg_sq and {len(own)} "
                    "parameters of that dtype with a moment; load it into a model with the dtypes that it was saved "
                    "from. Nothing was changed."
                )
            for norm, state in zip(norms, own, strict=True):
                state["exp_avg_norm"] = norm


def _by_dtype(
    keys: list[Any], parameters: list[Tensor], states: dict[Any, dict[str, Any]]
) -> dict[torch.dtype, list[dict[str, Any]]]:
    """The states by their parameters' dtypes, in order; fp32 takes those of other dtypes too."""
    lists: dict[torch.dtype, list[dict[str, Any]]] = {dtype: [] for dtype in _LISTS}
    for key, parameter in zip(keys, parameters, strict=True):
        if key in states:
            lists[parameter.dtype if parameter.dtype in lists else torch.float32].append(states[key])
    return lists
