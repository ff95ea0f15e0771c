"""LAMB with moments, decay, clipping, trust ratios and master weights in three launches."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from torch import Tensor

from fusestep.ops.lamb import LAMB, LambHyper
from fusestep.ops.update import Rule
from fusestep.optim.base import FusedOptimizer
from fusestep.optim.options import check_betas, check_numbers
from fusestep.optim.step_plan import StepPlan
from fusestep.optim.update_plan import UpdatePlan


class LambPlan(UpdatePlan):
    """Steps of LAMB."""

    rule: ClassVar[Rule] = LAMB

    @classmethod
    def dense_states(cls, group: dict[str, Any]) -> tuple[str, ...]:  # noqa: ARG003
        """Both moments."""
        return ("exp_avg", "exp_avg_sq")

    @classmethod
    def hyper_of(cls, group: dict[str, Any], lr: float) -> LambHyper:
        """A group's options as the rule takes them."""
        beta1, beta2 = group["betas"]
        names = ("eps", "weight_decay", "adam_w_mode", "bias_correction", "grad_averaging", "use_nvlamb")
        return LambHyper(lr, beta1, beta2, **{name: group[name] for name in names})


class FusedLAMB(FusedOptimizer):
    """LAMB: Adam's update of each tensor, scaled to the tensor's own norm.

    On a GPU three launches for all parameters of a device and combination of dtypes: the gradients' norm, the moments
    with the norms of each tensor and its update, and the weights.

        m ← β₁ m + (1 − β₁) g,  v ← β₂ v + (1 − β₂) g²
        u = m / (1 − β₁ᵗ) / (√(v / (1 − β₂ᵗ)) + eps) + weight_decay · p
        p ← p − lr · (‖p‖ / ‖u‖) · u

    The ratio is 1 where one of the norms is 0, and where weight_decay is 0 unless use_nvlamb.

    Args:
        params, lr, betas, eps, weight_decay: as FusedAdam, with LAMB's usual defaults.
        bias_correction: divide m by 1 − β₁ᵗ and v by 1 − β₂ᵗ.
        adam_w_mode: decoupled decay, as above; False adds weight_decay · p to the gradient instead, after clipping.
        grad_averaging: False adds g itself to β₁ m, not (1 − β₁) g.
        max_grad_norm: as FusedAdam; LAMB clips to 1 unless told otherwise. None neither clips nor skips.
        use_nvlamb: trust ratios without weight decay too.
        master_weights, capturable: as FusedAdam. Norms are those of the masters.

    All are options of groups but master_weights and capturable; max_grad_norm is the same for all, since the norm goes
    over all groups. Steps are counted for each parameter. What FusedAdam's page says of clipping, GradScaler, graphs
    and copies holds here. `.grad` is left as it is.

    Raises: UserError for options out of range and parameters of other dtypes.
    Source: You et al. 2019, Large batch optimization for deep learning, arXiv:1904.00962, with φ the identity.
    """

    _plan_class: ClassVar[type[StepPlan]] = LambPlan
    _dense: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    _kin: ClassVar[str] = "FusedLAMB"
    _sparse: ClassVar[str] = "torch.optim.SparseAdam"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        max_grad_norm: float | None = 1.0,
        use_nvlamb: bool = False,
        master_weights: bool = False,
        capturable: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "adam_w_mode": adam_w_mode,
            "grad_averaging": grad_averaging,
            "max_grad_norm": max_grad_norm,
            "use_nvlamb": use_nvlamb,
        }
        super().__init__(params, defaults, master_weights=master_weights, capturable=capturable)

    def _check_options(self, options: dict[str, Any]) -> None:
        super()._check_options(options)
        check_betas(self._who, options)
        check_numbers(self._who, options, "eps")
