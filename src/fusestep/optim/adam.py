"""Adam and AdamW with moments, decay, clipping and master weights in one launch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from fusestep.distributed.groups import local_of
from fusestep.errors import UserError
from fusestep.fp8.tensor import Float8Tensor
from fusestep.ops.adam_kernel import MOMENT_DTYPES
from fusestep.optim.adam_masters import is_rounded, lying_as, part_master, put_together
from fusestep.optim.adam_plan import AdamPlan
from fusestep.optim.base import FusedOptimizer
from fusestep.optim.loading import MASTER, NOTHING, REMAINDER
from fusestep.optim.options import check_betas, check_numbers
from fusestep.optim.step_plan import State, StepPlan


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
        store_param_remainders: of the masters of bf16 parameters keep the 16 bits that the parameter does not hold, in
            2 bytes a parameter instead of 4, as `master_remainder` (ops/adam_remainders.py). The masters are the same,
            bit for bit; a parameter is its master rounded with ties away from zero, not to even. A parameter that a
            script writes between steps is stepped from what was written, which whole masters pass over.
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
    keep them. Masters are whole in a state dict however they are kept, and take 4 bytes a parameter while it is held.

    Raises: UserError for options out of range and parameters of other dtypes.
    Source: Kingma and Ba 2015, arXiv:1412.6980; Loshchilov and Hutter 2019, arXiv:1711.05101.
    """

    _plan_class: ClassVar[type[StepPlan]] = AdamPlan
    _dense: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    _kin: ClassVar[str] = "FusedAdam or torch.optim.AdamW without amsgrad"
    _settings: ClassVar[tuple[str, ...]] = (*FusedOptimizer._settings, "moment_dtype", "store_param_remainders")

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
        store_param_remainders: bool = False,
    ) -> None:
        if moment_dtype not in MOMENT_DTYPES:
            raise UserError(f"FusedAdam: moment_dtype is {moment_dtype}; pass torch.float32 or torch.bfloat16.")
        if store_param_remainders and not master_weights:
            raise UserError(
                "FusedAdam: store_param_remainders is how masters are kept, and master_weights is False; pass "
                "master_weights=True too."
            )
        self.moment_dtype = moment_dtype
        self.store_param_remainders = store_param_remainders
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

    def _check_parameter(self, parameter: object, number: int) -> None:
        super()._check_parameter(parameter, number)
        if self.store_param_remainders and isinstance(parameter, Tensor) and parameter.dtype == torch.float16:
            raise UserError(
                f"{self._who}: parameter {number} is float16, of whose master no 16 bits remain to store; pass "
                "store_param_remainders=False, or use bfloat16."
            )

    def _keeps_remainder(self, parameter: Tensor) -> bool:
        """Whether a parameter's master is kept as the 16 bits that the parameter does not hold."""
        return self.store_param_remainders and _is_bf16(parameter)

    def _master_form(self, parameter: Tensor) -> tuple[str, torch.dtype]:
        return (REMAINDER, torch.int16) if self._keeps_remainder(parameter) else super()._master_form(parameter)

    def _first_master(self, local: Tensor) -> Tensor:
        if self._keeps_remainder(local):
            return torch.zeros_like(local, dtype=torch.int16, memory_format=torch.preserve_format)
        return super()._first_master(local)

    def _complete_state(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if self._keeps_remainder(parameter):
            if MASTER in state:
                part_master(parameter, state)
            elif REMAINDER in state:
                state[REMAINDER] = lying_as(parameter, state[REMAINDER])
        elif REMAINDER in state:
            state[MASTER] = put_together(parameter, state.pop(REMAINDER))
        super()._complete_state(parameter, group)

    def _set_master(self, parameter: Tensor, master: Tensor) -> None:
        """Write a whole master into a parameter and its remainder."""
        self.state[parameter][MASTER] = master
        part_master(parameter, self.state[parameter])

    def state_dict(self) -> dict[str, Any]:
        """As torch's, with `master_param` in fp32 where there is a master, and a count of applied and skipped steps.

        `step` is a 0-d fp32 tensor on the host, as torch saves it; reading it waits for the device.
        """
        saved = super().state_dict()
        for group, packed in zip(self.param_groups, saved["param_groups"], strict=True):
            for parameter, key in zip(group["params"], packed["params"], strict=True):
                state = saved["state"].get(key, {})
                if REMAINDER in state:
                    state[MASTER] = put_together(parameter, state.pop(REMAINDER))
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class, or of what its documentation names.

        States take the dtypes that this class gives them, masters fp32; torch's own method would round both to the
        parameter's dtype (pytorch#43706). A state without masters gets them from the parameters at the next step.

        Where remainders are stored, a master is kept whole until the next step, so that the model may be loaded
        afterwards; where a parameter is its master rounded already it is parted at once.

        Raises: UserError, with nothing changed, if groups, sizes or kind of the state do not fit.
        """
        super().load_state_dict(state_dict)
        for parameter, state in self.state.items():
            if self._keeps_remainder(parameter) and MASTER in state and is_rounded(parameter, state[MASTER]):
                part_master(parameter, state)

    def _loaded_state(
        self, saved: dict[str, Any], group_step: Any, parameter: Tensor, number: int, group: dict[str, Any]
    ) -> State:
        master = saved.get(MASTER)
        if isinstance(master, Tensor) and master.dtype == torch.int16:
            # Transformer Engine saves remainders by the name of masters.
            if self._has_master(parameter) and not _is_bf16(parameter):
                raise UserError(
                    f"{self._who}.load_state_dict: {MASTER} of parameter {number} is int16, which is what a bf16 "
                    f"parameter leaves of its master, and this one is not in bf16; load "
                    f"it into the model it was saved from. {NOTHING}"
                )
            saved = {**{key: value for key, value in saved.items() if key != MASTER}, REMAINDER: master}
        return super()._loaded_state(saved, group_step, parameter, number, group)


def _is_bf16(parameter: Tensor) -> bool:
    """Whether a parameter's values are bf16 in memory, which those of one that lives in FP8 are not."""
    return parameter.dtype == torch.bfloat16 and not isinstance(local_of(parameter), Float8Tensor)
