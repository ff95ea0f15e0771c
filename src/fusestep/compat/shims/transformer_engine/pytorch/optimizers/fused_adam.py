"""te.optimizers.FusedAdam over fusestep.optim.FusedAdam."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from fusestep import optim
from fusestep.compat.report import not_served
from fusestep.compat.stepping import DropInOptimizer
from fusestep.errors import UserError

__all__ = ["FusedAdam"]

_NAME = "transformer_engine.pytorch.optimizers.FusedAdam"


class FusedAdam(DropInOptimizer, optim.FusedAdam):
    """Adam and AdamW in one launch; see fusestep.optim.FusedAdam.

    State dicts have Transformer Engine's layout, with the step counted in the group. Parameters whose own count differs
    from their group's, which gradients that come and go bring about, keep it in their state too.
    """

    SERVED_BY = "fusestep.optim.FusedAdam"
    op = "adam"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
        set_grad_none: bool | None = None,
    ) -> None:
        if not isinstance(betas, (tuple, list)):
            raise TypeError(
                "FusedAdam: the third argument is betas; 1.x had bias_correction there, so pass options by keyword"
            )
        moments = (torch.float32, torch.bfloat16)
        if amsgrad:
            raise not_served(f"{_NAME}(amsgrad=True)", "use torch.optim.Adam(amsgrad=True)")
        if use_decoupled_grad:
            raise not_served(
                f"{_NAME}(use_decoupled_grad=True)", "put such gradients into param.main_grad, which is read"
            )
        if master_weight_dtype != torch.float32:
            raise not_served(f"{_NAME}(master_weight_dtype={master_weight_dtype})", "keep masters in float32")
        if exp_avg_dtype != exp_avg_sq_dtype or exp_avg_dtype not in moments:
            raise not_served(
                f"{_NAME}(exp_avg_dtype={exp_avg_dtype}, exp_avg_sq_dtype={exp_avg_sq_dtype})",
                "give both float32 or both bfloat16",
            )
        self.set_grad_none = set_grad_none
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            adam_w_mode=adam_w_mode,
            bias_correction=bias_correction,
            capturable=capturable,
            master_weights=master_weights,
            moment_dtype=exp_avg_dtype,
            store_param_remainders=store_param_remainders and master_weights,
        )
        self._served("transformer_engine.pytorch.optimizers")

    def _check_parameter(self, parameter: object, number: int) -> None:
        # As there, fp16 parameters beside remainders of bf16 ones have whole masters.
        super(optim.FusedAdam, self)._check_parameter(parameter, number)

    def initialize_state(self, param: Tensor, store_param_remainders: bool = False) -> None:  # noqa: ARG002
        """Give a parameter its state before its first step; the master starts from the value before a cast to FP8.

        Whether its remainder is stored is the optimizer's option.
        """
        group = next(group for group in self.param_groups if any(p is param for p in group["params"]))
        self._complete_state(param, group)

    def get_unscaled_state(self, param: Tensor, state_name: str) -> Tensor:
        """exp_avg, exp_avg_sq or master_param of a parameter, in fp32; of a master whose remainder is stored, that."""
        found = self._named_state(param, state_name)
        return found if found.dtype == torch.int16 else found.float()

    def set_scaled_state(self, param: Tensor, state_name: str, unscaled_state: Tensor) -> None:
        """Write exp_avg, exp_avg_sq or master_param of a parameter; where a remainder is stored, that or the master."""
        with torch.no_grad():
            found = self._named_state(param, state_name)
            if found.dtype == torch.int16 and unscaled_state.dtype != torch.int16:
                self._set_master(param, unscaled_state)
            else:
                found.copy_(unscaled_state)

    def _named_state(self, param: Tensor, name: str) -> Tensor:
        if name == "master_param" and self._keeps_remainder(param):
            name = "master_remainder"
        if name not in self.state.get(param, {}):
            self.initialize_state(param)
        found: Tensor | None = self.state[param].get(name)
        if found is None:
            raise UserError(
                f"FusedAdam: a parameter of {param.dtype} has no state {name!r}; it has {', '.join(self.state[param])}."
            )
        return found

    def state_dict(self) -> dict[str, Any]:
        """exp_avg, exp_avg_sq and master_param of each parameter; `step` in its group."""
        saved: dict[str, Any] = super().state_dict()
        for group in saved["param_groups"]:
            members = [saved["state"][key] for key in group["params"] if "step" in saved["state"].get(key, ())]
            counts = [int(member["step"]) for member in members]
            group["step"] = max(counts, default=int(group.get("step", 0)))
            for member, count in zip(members, counts, strict=True):
                if count == group["step"]:
                    del member["step"]
        return saved
