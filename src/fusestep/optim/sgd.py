"""SGD with momentum, decay, clipping and master weights in one launch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from fusestep.errors import UserError
from fusestep.ops.sgd import SGD, SGDHyper
from fusestep.ops.update import Rule
from fusestep.optim.base import FusedOptimizer
from fusestep.optim.loading import loaded_state
from fusestep.optim.options import check_numbers
from fusestep.optim.step_plan import State, StepPlan
from fusestep.optim.update_plan import UpdatePlan


class SGDPlan(UpdatePlan):
    """Steps of SGD."""

    rule: ClassVar[Rule] = SGD

    @classmethod
    def dense_states(cls, group: dict[str, Any]) -> tuple[str, ...]:
        """A momentum buffer where there is momentum."""
        return ("momentum_buffer",) if group["momentum"] else ()

    @classmethod
    def hyper_of(cls, group: dict[str, Any], lr: float) -> SGDHyper:
        """A group's options as the rule takes them."""
        momentum, dampening, decay = group["momentum"], group["dampening"], group["weight_decay"]
        return SGDHyper(lr, momentum, dampening, decay, group["nesterov"], group["wd_after_momentum"])


class FusedSGD(FusedOptimizer):
    """SGD with momentum and Nesterov's, a drop-in for torch.optim.SGD.

        v ← g at first, then momentum · v + (1 − dampening) · g        p ← p − lr · (g + momentum · v  or  v)

    Args:
        params, lr, momentum, dampening, weight_decay, nesterov: as torch.optim.SGD.
        wd_after_momentum: add weight_decay · p to what lr multiplies, instead of to the gradient.
        max_grad_norm, master_weights, capturable: as FusedAdam.

    All are options of groups but master_weights and capturable. Buffers are fp32 whatever the parameter (float64 and
    complex parameters: their own). What FusedAdam's page says of clipping, GradScaler, graphs and copies holds here.

    State dicts load into torch.optim.SGD and come from it; `master_param` stands beside `momentum_buffer` where there
    is one.

    Raises: UserError for options out of range and parameters of other dtypes.
    Source: Sutskever et al. 2013, in the form of torch.optim.SGD.
    """

    _plan_class: ClassVar[type[StepPlan]] = SGDPlan
    _dense: ClassVar[tuple[str, ...]] = ("momentum_buffer",)
    _kin: ClassVar[str] = "FusedSGD or torch.optim.SGD"
    _sparse: ClassVar[str] = "torch.optim.SGD"
    _counts_steps: ClassVar[bool] = False

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        wd_after_momentum: bool = False,
        max_grad_norm: float | None = None,
        master_weights: bool = False,
        capturable: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "wd_after_momentum": wd_after_momentum,
            "max_grad_norm": max_grad_norm,
        }
        super().__init__(params, defaults, master_weights=master_weights, capturable=capturable)

    def _check_options(self, options: dict[str, Any]) -> None:
        super()._check_options(options)
        check_numbers(self._who, options, "momentum")
        if options["nesterov"] and (not options["momentum"] or options["dampening"]):
            raise UserError(
                f"{self._who}: nesterov takes a momentum above 0 and no dampening; momentum is {options['momentum']}, "
                f"dampening {options['dampening']}."
            )

    def _dense_states(self, group: dict[str, Any]) -> tuple[str, ...]:
        return SGDPlan.dense_states(group)

    def _complete_state(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state: State = self.state[parameter]
        if "momentum_buffer" not in state:
            # `step` counts the steps of the buffer, whose first is another one.
            state["step"] = torch.zeros((), dtype=torch.float32)
        super()._complete_state(parameter, group)

    def state_dict(self) -> dict[str, Any]:
        """As torch.optim.SGD's, with `master_param` where there is one, and a count of applied and skipped steps.

        A buffer that has seen no step is None. Reading that waits for the device.
        """
        saved = super().state_dict()
        for key, state in list(saved["state"].items()):
            steps = state.pop("step", 0)
            if "momentum_buffer" in state and not steps:
                state["momentum_buffer"] = None
            if not state:
                del saved["state"][key]
        return saved

    def _loaded_state(
        self, saved: dict[str, Any], group_step: Any, parameter: Tensor, number: int, group: dict[str, Any]
    ) -> State:
        if "momentum_buffer" not in saved and set(saved) <= {"step", "master_param"}:
            saved = {**saved, "momentum_buffer": None}
        if "momentum_buffer" in saved and saved["momentum_buffer"] is None:
            # As torch saves a buffer without a step. It is made when it is needed.
            kept = {key: value for key, value in saved.items() if key == "master_param"}
            dtype, has_master = self._state_dtype(parameter), self._has_master(parameter)
            return loaded_state(self._who, {**kept, "step": 0.0}, parameter, number, (), dtype, has_master, self._kin)
        return super()._loaded_state({**saved, "step": 1.0}, group_step, parameter, number, group)
