"""apex.optimizers.FusedAdam over fusestep.optim.FusedAdam."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from amp_C import multi_tensor_adam

from apex.optimizers._layout import ApexOptimizer, refuse_amsgrad
from fusestep import optim
from fusestep.compat.stepping import without_hooks

__all__ = ["FusedAdam"]


class FusedAdam(ApexOptimizer, optim.FusedAdam):
    """AdamW, or Adam with adam_w_mode=False, with Apex's arguments in Apex's order.

    Right where Apex is not: moments stay fp32, masters are made at the first step and saved, also for bf16, and need no
    `capturable`; a step that is skipped is not counted; `p.grad` is left as it was; GradScaler costs no wait.

    Args: as of Apex. amsgrad=True raises, as there.
    """

    SERVED_BY = "fusestep.optim.FusedAdam"
    group_options = ("lr", "bias_correction", "betas", "eps", "weight_decay")
    op = "adam"
    own_attributes = (*ApexOptimizer.own_attributes, "adam_w_mode", "multi_tensor_adam", "_dummy_overflow_buf")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
    ) -> None:
        refuse_amsgrad("FusedAdam", amsgrad)
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            adam_w_mode=adam_w_mode,
            bias_correction=bias_correction,
            master_weights=master_weights,
            capturable=capturable,
        )
        # What classes derived from Apex's look for, to step by themselves.
        self.adam_w_mode = int(adam_w_mode)
        self.multi_tensor_adam = multi_tensor_adam
        self._dummy_overflow_buf = torch.zeros(1, dtype=torch.int32)
        self.set_grad_none = set_grad_none
        self._served("apex.optimizers")

    def step(  # type: ignore[override]
        self,
        closure: Callable[[], float] | None = None,
        grads: None = None,
        output_params: None = None,
        scale: None = None,
        grad_norms: None = None,
        **scaler: Any,
    ) -> float | None:
        """One step; see fusestep.optim.FusedAdam.step.

        Args:
            closure: computes the loss and gradients.
            grads, output_params, scale, grad_norms: of the old interface; RuntimeError for any, as in Apex.
            scaler: `grad_scaler=`, a torch.amp.GradScaler. A named argument would make torch warn that it is outdated;
                `scaler.step(optimizer)` needs none.
        """
        if any(old is not None for old in (grads, output_params, scale, grad_norms)):
            raise RuntimeError(
                "FusedAdam.step takes no grads, output_params, scale or grad_norms, as in newer Apex; let "
                "torch.amp.GradScaler unscale, and torch.nn.utils.clip_grad_norm_ clip."
            )
        loss: float | None = without_hooks(super().step)(closure, **scaler)
        return loss
