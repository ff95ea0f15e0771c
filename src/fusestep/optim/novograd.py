"""NovoGrad with its moment, norms of each tensor, decay, clipping and master weights in two launches."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, ClassVar

from torch import Tensor

from fusestep.errors import UserError
from fusestep.ops.novograd import NOVOGRAD, NovoGradHyper
from fusestep.ops.update import Rule
from fusestep.optim.base import FusedOptimizer
from fusestep.optim.options import check_betas, check_numbers
from fusestep.optim.step_plan import StepPlan
from fusestep.optim.update_plan import UpdatePlan

#: Key of the running norm of a parameter's gradients.
NORM = "exp_avg_norm"


class NovoGradPlan(UpdatePlan):
    """Steps of NovoGrad."""

    rule: ClassVar[Rule] = NOVOGRAD
    scalar: ClassVar[str | None] = NORM

    @classmethod
    def dense_states(cls, group: dict[str, Any]) -> tuple[str, ...]:  # noqa: ARG003
        """The moment."""
        return ("exp_avg",)

    @classmethod
    def hyper_of(cls, group: dict[str, Any], lr: float) -> NovoGradHyper:
        """A group's options as the rule takes them."""
        beta1, beta2 = group["betas"]
        names = ("eps", "weight_decay", "bias_correction", "reg_inside_moment", "grad_averaging", "init_zero")
        options = {name: group[name] for name in names}
        return NovoGradHyper(lr, beta1, beta2, is_max=group["norm_type"] == math.inf, **options)


class FusedNovoGrad(FusedOptimizer):
    """NovoGrad: each tensor's gradient is divided by a running norm of that tensor's gradients.

    On a GPU two launches for all parameters of a device and combination of dtypes: the norms of each tensor, and the
    weights; where `max_grad_norm` is given one more.

        N ← √(β₂ N² + (1 − β₂) ‖g‖²),  at first ‖g‖        d = N / √(1 − β₂ᵗ) + eps
        m ← β₁ m + (1 − β₁) g        p ← p − lr · (m / (1 − β₁ᵗ) / d + weight_decay · p)
        reg_inside_moment:  m ← β₁ m + (1 − β₁) (g / d + weight_decay · p)        p ← p − lr · m / (1 − β₁ᵗ)

    Args:
        params, lr, betas, eps, weight_decay: as FusedAdam.
        bias_correction: the divisors 1 − β₁ᵗ and √(1 − β₂ᵗ).
        reg_inside_moment: the moment is of normalised and decayed gradients, as in the paper.
        grad_averaging: False adds g itself to β₁ m, not (1 − β₁) g.
        norm_type: 2, or math.inf for the largest magnitude, whose running value is β₂ N + (1 − β₂) max|g|.
        init_zero: N starts at 0, not at the first norm.
        max_grad_norm, master_weights, capturable: as FusedAdam.

    All are options of groups but master_weights and capturable. The state of a parameter is `exp_avg`, its running norm
    `exp_avg_norm` (0-d, on the parameter's device) and `step`, so that it does not matter which others have gradients.
    What FusedAdam's page says of clipping, GradScaler, graphs and copies holds here.

    Raises: UserError for options out of range and parameters of other dtypes.
    Source: Ginsburg et al. 2019, Stochastic gradient methods with layer-wise adaptive moments for training of deep
    networks, arXiv:1905.11286. The default form and its bias correction are those of NVIDIA's implementations.
    """

    _plan_class: ClassVar[type[StepPlan]] = NovoGradPlan
    _dense: ClassVar[tuple[str, ...]] = ("exp_avg",)
    _scalars: ClassVar[tuple[str, ...]] = (NORM,)
    _kin: ClassVar[str] = "FusedNovoGrad"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        reg_inside_moment: bool = False,
        grad_averaging: bool = True,
        norm_type: float = 2,
        init_zero: bool = False,
        max_grad_norm: float | None = None,
        master_weights: bool = False,
        capturable: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "reg_inside_moment": reg_inside_moment,
            "grad_averaging": grad_averaging,
            "norm_type": norm_type,
            "init_zero": init_zero,
            "max_grad_norm": max_grad_norm,
        }
        super().__init__(params, defaults, master_weights=master_weights, capturable=capturable)

    def _check_options(self, options: dict[str, Any]) -> None:
        super()._check_options(options)
        check_betas(self._who, options)
        check_numbers(self._who, options, "eps")
        if options["norm_type"] not in (2, math.inf):
            raise UserError(f"{self._who}: norm_type is {options['norm_type']}; pass 2, or math.inf for the maximum.")
