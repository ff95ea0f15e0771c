"""One step of LAMB for many parameters in two launches.

    g ← g / divisor                                         (a loss scale, clipping, or both; 1 without them)
    g ← g + weight_decay · w                                 (unless adam_w_mode: L2)
    m ← β₁ m + β₃ g             v ← β₂ v + (1 − β₂) g²        (β₃ = 1 − β₁, or 1 without grad_averaging)
    u = m / (1 − β₁ᵗ) / (√v / √(1 − β₂ᵗ) + eps)
    u ← u + weight_decay · w                                 (adam_w_mode: decoupled)
    r = ‖w‖ / ‖u‖ of each tensor, where weight_decay ≠ 0 or use_nvlamb, and both norms are not 0; else 1
    w ← w − lr · r · u

w is the fp32 master where there is one, else the parameter itself; t counts the steps of each parameter. All arithmetic
is fp32, whatever the dtypes in memory. Where `skip` is not 0 nothing changes, the step count included.

The first launch writes the moments and sums the squares of w and u; the second works u out again from the moments,
which costs no memory and leaves the gradients as they are. A program writes the norms of its chunk, and the last of a
tensor's programs combines them in a fixed order. The ticket that tells the last one is an integer: no float is added
atomically, so the same inputs give the same bits. Norms are summed in three ranges, see gradient_norm.py.
Source: You et al. 2019, Large batch optimization for deep learning: training BERT in 76 minutes, arXiv:1904.00962.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusestep.ops.batches import arithmetic_dtype, in_dtype
from fusestep.ops.gradient_norm import tensor_norm
from fusestep.ops.lamb_kernel import compilations, launch_moments, launch_weights
from fusestep.ops.registry import Op, Proof, catalogue, define
from fusestep.ops.tensor_table import TensorTable
from fusestep.ops.update import (
    GROUP_ROW,
    Members,
    NormedRule,
    Shared,
    UpdateSignature,
    log_beta,
    no_output,
    row_of,
    update_once,
)
from fusestep.ops.update_proof import prove_update

#: The place of `is_adaptive` in a row of options.
ADAPTIVE = 10


@dataclass(frozen=True)
class LambHyper:
    """What one parameter group asks of LAMB."""

    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-6
    weight_decay: float = 0.01
    adam_w_mode: bool = True
    bias_correction: bool = True
    grad_averaging: bool = True
    use_nvlamb: bool = False

    @property
    def beta3(self) -> float:
        """What the gradient enters its moment with."""
        return 1 - self.beta1 if self.grad_averaging else 1.0

    @property
    def is_adaptive(self) -> bool:
        """Whether tensors have trust ratios."""
        return self.use_nvlamb or self.weight_decay != 0

    def row(self) -> list[float]:
        """The numbers as the kernels read them; differences and logarithms are formed here, in double precision."""
        l2, decoupled = (0.0, self.weight_decay) if self.adam_w_mode else (self.weight_decay, 0.0)
        logs = (log_beta(beta, self.bias_correction) for beta in (self.beta1, self.beta2))
        betas = (self.beta1, self.beta3, self.beta2, 1 - self.beta2)
        return row_of(self.lr, *betas, *logs, self.eps, l2, decoupled, float(self.is_adaptive))


def lamb_reference(members: Members, steps: Sequence[float], hyper: LambHyper, divisor: float = 1.0) -> None:
    """One step in place, a tensor at a time, since each has norms of its own; `steps` count this step."""
    m, v = members.dense
    for i, step in enumerate(steps):
        if members.parameters[i].numel():
            _reference_step(
                members.parameters[i], members.gradients[i], m[i], v[i], members.weights[i], step, hyper, divisor
            )


def _reference_step(
    parameter: Tensor, g: Tensor, m: Tensor, v: Tensor, weight: Tensor, step: float, hyper: LambHyper, divisor: float
) -> None:
    w = _reference_moments(parameter, g, m, v, weight, hyper, divisor)
    u = _reference_direction(w, m, v, step, hyper)
    if hyper.is_adaptive:
        u.mul_(_ratio(tensor_norm(w), tensor_norm(u)).to(u.dtype))
    _reference_weights(parameter, w, u, hyper)


def _reference_moments(
    parameter: Tensor, g: Tensor, m: Tensor, v: Tensor, weight: Tensor, hyper: LambHyper, divisor: float
) -> Tensor:
    """Write the moments; returns the weights to compute with."""
    (w,) = in_dtype([weight], arithmetic_dtype([parameter]))
    g = g.to(w.dtype) / divisor
    if hyper.weight_decay and not hyper.adam_w_mode:
        g = g.add(w, alpha=hyper.weight_decay)
    m.mul_(hyper.beta1).add_(g, alpha=hyper.beta3)
    v.mul_(hyper.beta2).addcmul_(g, g, value=1 - hyper.beta2)
    return w


def _reference_direction(w: Tensor, m: Tensor, v: Tensor, step: float, hyper: LambHyper) -> Tensor:
    """u of the formula."""
    c1, c2 = (1 - hyper.beta1**step, 1 - hyper.beta2**step) if hyper.bias_correction else (1.0, 1.0)
    u = (m / c1).div_(v.sqrt().div_(math.sqrt(c2)).add_(hyper.eps))
    if hyper.weight_decay and hyper.adam_w_mode:
        u.add_(w, alpha=hyper.weight_decay)
    return u


def _ratio(w_norm: Tensor, u_norm: Tensor) -> Tensor:
    """‖w‖ / ‖u‖, or 1 where one of them is 0."""
    return (w_norm / u_norm).where((w_norm != 0) & (u_norm != 0), 1.0)


def _reference_weights(parameter: Tensor, w: Tensor, u: Tensor, hyper: LambHyper) -> None:
    w.add_(u, alpha=-hyper.lr)
    if parameter is not w:
        parameter.copy_(w)


class LambRule(NormedRule):
    """LAMB for whoever keeps tables."""

    name = "lamb"

    def scratch(self, table: TensorTable) -> tuple[Tensor, ...]:
        """Norms of chunks of the weights and of their updates, tickets, those norms of tensors, and trust ratios."""
        partials = torch.empty(2, max(table.chunks, 1), device=table.device)
        tickets = torch.zeros(table.count, dtype=torch.int32, device=table.device)
        norms = torch.zeros(2, table.count, device=table.device)  # of an empty tensor no program writes any
        return partials, tickets, norms, torch.ones(table.count, device=table.device)

    def launch(
        self, signature: UpdateSignature, table: TensorTable, scratch: tuple[Tensor, ...], shared: Shared
    ) -> None:
        """Two launches."""
        launch_moments(signature, table, scratch, shared)
        launch_weights(signature, table, scratch, shared)

    def launch_norms(
        self, signature: UpdateSignature, table: TensorTable, scratch: tuple[Tensor, ...], shared: Shared
    ) -> Tensor:
        """(2, n): ‖w‖ and ‖u‖; the moments are written."""
        launch_moments(signature, table, scratch, shared)
        return scratch[2]

    def launch_rest(
        self,
        signature: UpdateSignature,
        table: TensorTable,
        scratch: tuple[Tensor, ...],
        shared: Shared,
        scalars: Sequence[Tensor],  # noqa: ARG002
        norms: Tensor,
    ) -> None:
        """The trust ratios, and the weights."""
        is_adaptive = shared.hyper[table.rows[GROUP_ROW], ADAPTIVE] != 0
        scratch[3].copy_(_ratio(norms[0], norms[1]).where(is_adaptive, 1.0))
        launch_weights(signature, table, scratch, shared)

    def reference(self, members: Members, steps: Sequence[float], hyper: Any, divisor: float) -> None:
        """See `lamb_reference`."""
        lamb_reference(members, steps, hyper, divisor)

    def reference_norms(self, members: Members, steps: Sequence[float], hyper: Any, divisor: float) -> Tensor:
        """(2, n): ‖w‖ and ‖u‖; the moments are written."""
        norms = torch.zeros(2, len(steps), dtype=torch.float64, device=members.parameters[0].device)
        m, v = members.dense
        for i, (parameter, step) in enumerate(zip(members.parameters, steps, strict=True)):
            if parameter.numel():
                w = _reference_moments(parameter, members.gradients[i], m[i], v[i], members.weights[i], hyper, divisor)
                norms[0, i] = tensor_norm(w)
                norms[1, i] = tensor_norm(_reference_direction(w, m[i], v[i], step, hyper))
        return norms

    def reference_rest(
        self,
        members: Members,
        steps: Sequence[float],
        hyper: Any,
        divisor: float,  # noqa: ARG002
        norms: Tensor,
    ) -> None:
        """The weights."""
        m, v = members.dense
        ratios = _ratio(norms[0], norms[1])
        for i, (parameter, step) in enumerate(zip(members.parameters, steps, strict=True)):
            if parameter.numel():
                (w,) = in_dtype([members.weights[i]], arithmetic_dtype([parameter]))
                u = _reference_direction(w, m[i], v[i], step, hyper)
                if hyper.is_adaptive:
                    u.mul_(ratios[i].to(u.dtype))
                _reference_weights(parameter, w, u, hyper)


LAMB = LambRule()


def _lamb(
    parameters: list[Tensor],
    gradients: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    masters: list[Tensor],
    steps: list[Tensor],
    lr: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    adam_w_mode: bool,
    bias_correction: bool,
    grad_averaging: bool,
    use_nvlamb: bool,
    divisor: Tensor | None,
    skip: Tensor | None,
) -> None:
    members = Members(parameters, gradients, [exp_avgs, exp_avg_sqs], [], masters)
    options = (adam_w_mode, bias_correction, grad_averaging, use_nvlamb)
    hyper = LambHyper(0.0, beta1, beta2, eps, weight_decay, *options)
    update_once(LAMB, members, steps, lr, hyper, divisor, skip)


_lamb_op = define(
    "lamb_(Tensor(a!)[] parameters, Tensor[] gradients, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs,"
    " Tensor(d!)[] masters, Tensor(e!)[] steps, Tensor lr, float beta1, float beta2, float eps, float weight_decay,"
    " bool adam_w_mode, bool bias_correction, bool grad_averaging, bool use_nvlamb, Tensor? divisor, Tensor? skip)"
    " -> ()",
    _lamb,
    no_output,
)


def lamb_(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    lr: Tensor | float,
    masters: Sequence[Tensor] = (),
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-6,
    weight_decay: float = 0.01,
    adam_w_mode: bool = True,
    bias_correction: bool = True,
    grad_averaging: bool = True,
    use_nvlamb: bool = False,
    divisor: Tensor | None = None,
    skip: Tensor | None = None,
) -> None:
    """One step in place for tensors of one device: two launches for each combination of dtypes.

    Args:
        parameters, gradients: n tensors each, of equal shapes; any strides and real dtypes. No two parameters, and no
            two elements of one, may share memory.
        exp_avgs, exp_avg_sqs: n dense fp32 tensors each (float64 for float64), all in one order of memory.
        steps: n tensors of one fp32 element, the steps taken so far; counted up.
        lr: 0-d, or a number.
        masters: n fp32 tensors like exp_avgs, updated in the parameters' stead; or none.
        divisor: 0-d, of the gradients. Clipping by their global norm is in it, see gradient_norm.py.
        skip: 0-d; where it is not 0, nothing changes.

    Raises: UserError for a tensor on another device, before anything is changed.

    No wait for the device, except in the reference on a GPU. FusedLAMB keeps its table of addresses between steps.
    Source: You et al. 2019, arXiv:1904.00962.
    """
    lr = lr if isinstance(lr, Tensor) else torch.tensor(lr)
    _lamb_op(
        list(parameters), list(gradients), list(exp_avgs), list(exp_avg_sqs), list(masters), list(steps), lr,
        beta1, beta2, eps, weight_decay, adam_w_mode, bias_correction, grad_averaging, use_nvlamb, divisor, skip,
    )  # fmt: skip


def _prove(device: torch.device) -> list[Proof]:
    hyper = LambHyper(0.01)

    def run(ours: Members, steps: list[Tensor]) -> None:
        exp_avgs, exp_avg_sqs = ours.dense
        lamb_(ours.parameters, ours.gradients, exp_avgs, exp_avg_sqs, steps, lr=hyper.lr, masters=ours.masters)

    return prove_update("lamb", device, run, lambda ours, steps: lamb_reference(ours, steps, hyper), dense=2)


catalogue(Op("lamb", "LAMB, all parameters in two launches", _prove, compilations))
