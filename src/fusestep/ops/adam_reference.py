"""Adam in plain PyTorch: what the kernel is compared with, and what runs where it cannot. Formulas: see adam.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fusestep.ops.adam_remainders import parted, whole
from fusestep.ops.batches import arithmetic_dtype, batches, in_dtype

#: Floats a group in the kernel's `hyper`; the order is that of `Hyperparameters.row`.
HYPER_ROW = 16


@dataclass(frozen=True)
class Hyperparameters:
    """What one parameter group asks of Adam."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    adam_w_mode: bool = True
    bias_correction: bool = True

    def row(self) -> list[float]:
        """The numbers as the kernel reads them; differences and logarithms are formed here, in double precision."""

        def log_beta(beta: float) -> float:
            # 1 − β^t is −expm1(t · log β); −∞ makes it 1.
            return math.log(beta) if self.bias_correction and beta > 0 else -math.inf

        decoupled, l2 = (self.weight_decay, 0.0) if self.adam_w_mode else (0.0, self.weight_decay)
        row = [
            self.lr,
            1 - self.beta1,
            self.beta2,
            1 - self.beta2,
            log_beta(self.beta1),
            log_beta(self.beta2),
            self.eps,
            l2,
            decoupled,
        ]
        return row + [0.0] * (HYPER_ROW - len(row))


def adam_reference(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    masters: Sequence[Tensor],
    steps: Sequence[float],
    hyper: Hyperparameters,
    divisor: float = 1.0,
) -> None:
    """One step in place, vectorised over the list; all tensors on one device, and one dtype in each list.

    Args:
        masters: fp32 weights to update instead of the parameters, which then receive a copy, or the int16 remainders
            that the parameters leave of such weights (adam_remainders.py); empty without masters.
        steps: the number of this step for each parameter, from 1.
        divisor: of the gradients.
    """
    lists = [parameters, gradients, exp_avgs, exp_avg_sqs, *([masters] if masters else [])]
    for batch, its_steps in batches(lists, steps):
        _reference_batch(batch, its_steps, hyper, divisor)


def _reference_batch(
    batch: Sequence[list[Tensor]], steps: Sequence[float], hyper: Hyperparameters, divisor: float
) -> None:
    stored_w, stored_g, stored_m, stored_v, *masters = batch
    dtype = arithmetic_dtype(stored_w)
    has_remainders = bool(masters) and masters[0][0].dtype == torch.int16
    if has_remainders:
        w = [whole(parameter, remainder) for parameter, remainder in zip(stored_w, masters[0], strict=True)]
    else:
        w = masters[0] if masters else in_dtype(stored_w, dtype)
    g, m, v = (in_dtype(stored, dtype) for stored in (stored_g, stored_m, stored_v))
    if divisor != 1.0:
        g = list(torch._foreach_div(g, divisor))
    if hyper.weight_decay and not hyper.adam_w_mode:
        g = list(torch._foreach_add(g, w, alpha=hyper.weight_decay))
    if hyper.weight_decay and hyper.adam_w_mode:
        torch._foreach_mul_(w, 1 - hyper.lr * hyper.weight_decay)
    torch._foreach_lerp_(m, g, 1 - hyper.beta1)
    torch._foreach_mul_(v, hyper.beta2)
    torch._foreach_addcmul_(v, g, g, 1 - hyper.beta2)
    corrections = [
        (1 - hyper.beta1**step, math.sqrt(1 - hyper.beta2**step)) if hyper.bias_correction else (1.0, 1.0)
        for step in steps
    ]
    # m / (√v / c + eps) is c · m / (√v + eps · c): one pass over memory less.
    eps = [hyper.eps * second for _, second in corrections]
    step_sizes = [-hyper.lr * second / first for first, second in corrections]
    denominator = torch._foreach_sqrt(v)
    if len(set(corrections)) == 1:  # one number for all costs the host less than a list
        torch._foreach_add_(denominator, eps[0])
        torch._foreach_addcdiv_(w, m, denominator, step_sizes[0])
    else:
        torch._foreach_add_(denominator, eps)
        torch._foreach_addcdiv_(w, m, denominator, step_sizes)
    results = [(stored_m, m), (stored_v, v)]
    if has_remainders:
        parts = [parted(master) for master in w]
        results += [(stored_w, [part[0] for part in parts]), (masters[0], [part[1] for part in parts])]
    else:
        results.append((stored_w, w))
    for stored, computed in results:
        if stored is not computed:
            torch._foreach_copy_(stored, computed)
