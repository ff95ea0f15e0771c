"""Adam and AdamW with moments, decay, clipping and master weights in one launch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from fusestep.errors import UserError
from fusestep.ops.adam_kernel import MOMENT_DTYPES
from fusestep.optim.adam_plan import AdamPlan
from fusestep.optim.base import FusedOptimizer
from fusestep.optim.options import check_betas, check_numbers
from fusestep.optim.step_plan import StepPlan


class FusedAdam(FusedOptimizer):
    """Adam (L2 penalty) and AdamW (decoupled decay), a drop-in for torch.optim.AdamW.

    On a GPU one launch updates all parameters of a device and combination of dtypes, where `max_grad_norm` is given one
    more measures their gradients, and the host waits for neither. Elsewhere the same arithmetic runs in PyTorch.

        m ← β₁ m + (1 − β₁) g,  v ← β₂ v + (1 − β₂) g²
        p ← p · (1 − lr · weight_decay) − lr / (1 − β₁ᵗ) · m / (√v / √(1 − β₂ᵗ) + eps)

    Args:
        params: parameters, or groups of them; fp32, bf16, fp16, float64 or complex (stepped as two reals), any strides,
            on any devices. A parameter whose attribute `main_grad` is a tensor is stepped from that instead of `.grad`
            (see `accumulate_in_fp32`).
        lr: a number, or a tensor of one element, which may lie on the device and change in place.
        betas, eps, weight_decay: as torch.optim.AdamW, but for weight_decay's default of 0.
        adam_w_mode: decoupled decay; False adds weight_decay · p to the gradient (torch.optim.Adam).
        bias_correction: divide m by 1 − β₁ᵗ and v by 1 − β₂ᵗ.
        max_grad_norm: scale the gradients so that their global L2 norm, over all groups, is at most this, as
            torch.nn.utils.clip_grad_norm_ would; `.grad` itself is not changed. A step whose norm is not finite changes
            nothing but `skipped_steps`. Infinity only skips. None does neither, as torch.
        master_weights: keep fp32 copies of 16-bit parameters and update those; in the state as `master_param`.
        capturable: keep `lr` on the device, so that a CUDA graph may capture `step` after an eager one. The graph
            follows `lr`, also a scheduler's; capture anew after loading a state, adding a group or changing another
            option.
        moment_dtype: torch.float32 or torch.bfloat16. float64 and complex parameters keep moments of their own dtype.

    lr, betas, eps, weight_decay, adam_w_mode, bias_correction and max_grad_norm (the same for all) are options of
    groups. torch.amp.GradScaler works with and without `unscale_`: unscaling, clipping and skipping happen here, and
    nothing of ours waits. With fp16 gradients leave `unscale_` out, since torch refuses them there.

    Where modules of fusestep.nn asked for copies of their parameters, in FP8 or in torch.autocast's dtype, the step
    writes them in the same pass (fp8/copies.py, fp8/plain_copies.py); they take 1 or 2 bytes an element each.
    Weights of `fp8_model_init` take master_weights=True; they are stepped as their masters.

    State dicts load into torch.optim.AdamW and come from it; `step` is saved as torch saves it. Loading never changes
    a dtype to the parameter's. Options in a loaded state replace the constructor's, as in torch; options that it lacks
    keep them.

    Raises: UserError for options out of range and parameters of other dtypes.
    Source: Kingma and Ba 2015, arXiv:1412.6980; Loshchilov and Hutter 2019, arXiv:1711.05101.
    """

    _plan_class: ClassVar[type[StepPlan]] = AdamPlan
    _dense: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    _kin: ClassVar[str] = "FusedAdam or torch.optim.AdamW without amsgrad"
    _kept: ClassVar[tuple[str, ...]] = (*FusedOptimizer._kept, "moment_dtype")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        adam_w_mode: bool = True,
        bias_correction: bool = True,
        max_grad_norm: float | None = None,
        master_weights: bool = False,
        capturable: bool = False,
        moment_dtype: torch.dtype = torch.float32,
    ) -> None:
        if moment_dtype not in MOMENT_DTYPES:
            raise UserError(f"FusedAdam: moment_dtype is {moment_dtype}; pass torch.float32 or torch.bfloat16.")
        self.moment_dtype = moment_dtype
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "adam_w_mode": adam_w_mode,
            "bias_correction": bias_correction,
            "max_grad_norm": max_grad_norm,
        }
        super().__init__(params, defaults, master_weights=master_weights, capturable=capturable)

    def _check_options(self, options: dict[str, Any]) -> None:
        super()._check_options(options)
        check_betas(self._who, options)
        check_numbers(self._who, options, "eps")

    def _state_dtype(self, parameter: Tensor) -> torch.dtype:
        dtype = super()._state_dtype(parameter)
        return self.moment_dtype if dtype == torch.float32 else dtype
