"""te.optimizers.FusedAdam over fusestep.optim.FusedAdam."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from fusestep import optim
from fusestep.compat.report import not_served, served

__all__ = ["FusedAdam"]

_NAME = "transformer_engine.pytorch.optimizers.FusedAdam"


class FusedAdam(optim.FusedAdam):
    """Adam and AdamW in one launch; see fusestep.optim.FusedAdam.

    State dicts have Transformer Engine's layout, with the step counted in the group. Parameters whose own count differs
    from their group's, which gradients that come and go bring about, keep it in their state too.
    """

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
        store_param_remainders: bool = False,  # noqa: ARG002 (masters are whole)
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
        )
        served(_NAME, "fusestep.optim.FusedAdam")

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
        grad_scaler = by_name.pop("grad_scaler", scaler[0] if scaler else None)
        if by_name or len(scaler) > 1:
            raise TypeError(f"step() got unexpected arguments {[*map(repr, scaler[1:]), *by_name]}")
        if grad_scaler is not None and grad_scaler.is_enabled():
            if closure is not None:
                raise TypeError("step() takes a closure or a grad_scaler, not both")
            return grad_scaler.step(self)
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        """exp_avg, exp_avg_sq and master_param of each parameter; `step` in its group."""
        saved = super().state_dict()
        for group in saved["param_groups"]:
            members = [saved["state"][key] for key in group["params"] if "step" in saved["state"].get(key, ())]
            counts = [int(member["step"]) for member in members]
            group["step"] = max(counts, default=0)
            for member, count in zip(members, counts, strict=True):
                if count == group["step"]:
                    del member["step"]
        return saved
