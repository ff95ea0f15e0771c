"""Adagrad with decay, clipping and master weights in one launch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from fusestep.ops.adagrad import ADAGRAD, AdagradHyper
from fusestep.ops.update import Rule
from fusestep.optim.base import FusedOptimizer
from fusestep.optim.options import check_numbers
from fusestep.optim.step_plan import StepPlan
from fusestep.optim.update_plan import UpdatePlan


class AdagradPlan(UpdatePlan):
    """Steps of Adagrad."""

    rule: ClassVar[Rule] = ADAGRAD

    @classmethod
    def dense_states(cls, group: dict[str, Any]) -> tuple[str, ...]:  # noqa: ARG003
        """The sum of squared gradients."""
        return ("sum",)

    @classmethod
    def hyper_of(cls, group: dict[str, Any], lr: float) -> AdagradHyper:
        """A group's options as the rule takes them."""
        return AdagradHyper(lr, group["lr_decay"], group["eps"], group["weight_decay"], group["adagrad_w_mode"])


class FusedAdagrad(FusedOptimizer):
    """Adagrad, a drop-in for torch.optim.Adagrad.

        h ← h + g²        p ← p − lr / (1 + (t − 1) · lr_decay) · g / (√h + eps)

    Args:
        params, lr, lr_decay, weight_decay, initial_accumulator_value, eps: as torch.optim.Adagrad.
        adagrad_w_mode: decoupled decay: weight_decay · p joins what the learning rate multiplies, not the gradient.
        max_grad_norm, master_weights, capturable: as FusedAdam.

    All are options of groups but master_weights and capturable. Sums are fp32 whatever the parameter (float64 and
    complex parameters: their own). What FusedAdam's page says of clipping, GradScaler, graphs and copies holds here.

    State dicts load into torch.optim.Adagrad and come from it; `master_param` stands beside `sum` where there is one.

    Raises: UserError for options out of range and parameters of other dtypes.
    Source: Duchi et al. 2011, JMLR 12, in the form of torch.optim.Adagrad.
    """

    _plan_class: ClassVar[type[StepPlan]] = AdagradPlan
    _dense: ClassVar[tuple[str, ...]] = ("sum",)
    _kin: ClassVar[str] = "FusedAdagrad or torch.optim.Adagrad"
    _sparse: ClassVar[str] = "torch.optim.Adagrad"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        *,
        adagrad_w_mode: bool = False,
        max_grad_norm: float | None = None,
        master_weights: bool = False,
        capturable: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "lr_decay": lr_decay,
            "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
            "eps": eps,
            "adagrad_w_mode": adagrad_w_mode,
            "max_grad_norm": max_grad_norm,
        }
        super().__init__(params, defaults, master_weights=master_weights, capturable=capturable)

    def _check_options(self, options: dict[str, Any]) -> None:
        super()._check_options(options)
        check_numbers(self._who, options, "lr_decay", "initial_accumulator_value", "eps")

    def _first_state(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        start = group["initial_accumulator_value"]
        value = complex(start, start) if parameter.is_complex() else start
        return torch.full_like(
            parameter, value, dtype=self._state_dtype(parameter), memory_format=torch.preserve_format
        )

    def state_dict(self) -> dict[str, Any]:
        """As torch.optim.Adagrad's, with `master_param` where there is one, and a count of applied and skipped steps.

        Torch wants a state of each parameter, so those that were never stepped have what they would start from.
        Reading the steps waits for the device.
        """
        saved = super().state_dict()
        members = [(p, group) for group in self.param_groups for p in group["params"]]
        numbers = [number for group in saved["param_groups"] for number in group["params"]]
        for number, (parameter, group) in zip(numbers, members, strict=True):
            state = saved["state"].setdefault(number, {})
            if "sum" not in state:
                state.update(step=torch.zeros((), dtype=torch.float32), sum=self._made_state(parameter, group))
        return saved
