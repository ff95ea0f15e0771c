"""One step of NovoGrad for many parameters in two launches.

    g ← g / divisor                                         (a loss scale, clipping, or both; 1 without them)
    n = ‖g‖ of each tensor, its L2 norm or its largest magnitude
    N ← √(β₂ N² + (1 − β₂) n²),  of largest magnitudes  β₂ N + (1 − β₂) n;  at the first step n, unless init_zero
    d = N / √(1 − β₂ᵗ) + eps
    m ← β₁ m + β₃ g                    w ← w − lr · (m / (1 − β₁ᵗ) / d + weight_decay · w)
    reg_inside_moment:
    m ← β₁ m + β₃ (g / d + weight_decay · w)                    w ← w − lr · m / (1 − β₁ᵗ)

β₃ = 1 − β₁, or 1 without grad_averaging. w is the fp32 master where there is one, else the parameter itself; t counts
the steps of each parameter. All arithmetic is fp32, whatever the dtypes in memory. Where `skip` is not 0 nothing
changes, the step count included.

The kernels stand in novograd_kernel.py; their sums are made in two stages, without float atomics.
Source: Ginsburg et al. 2019, Stochastic gradient methods with layer-wise adaptive moments for training of deep
networks, arXiv:1905.11286 (N² is its second moment; reg_inside_moment without averaging is its algorithm 1). The
default form and the bias corrections are those of NVIDIA's implementations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusestep.ops.batches import arithmetic_dtype, batches, in_dtype
from fusestep.ops.gradient_norm import tensor_norm
from fusestep.ops.novograd_kernel import compilations, launch_norms, launch_weights, norm_slots
from fusestep.ops.registry import Op, Proof, catalogue, define
from fusestep.ops.tensor_table import TensorTable
from fusestep.ops.update import (
    GRADIENT_ROW,
    GROUP_ROW,
    STEP_ROW,
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


@dataclass(frozen=True)
class NovoGradHyper:
    """What one parameter group asks of NovoGrad; `is_max` takes largest magnitudes for norms."""

    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    bias_correction: bool = True
    reg_inside_moment: bool = False
    grad_averaging: bool = True
    init_zero: bool = False
    is_max: bool = False

    @property
    def beta3(self) -> float:
        """What the gradient enters its moment with."""
        return 1 - self.beta1 if self.grad_averaging else 1.0

    def row(self) -> list[float]:
        """The numbers as the kernels read them; differences and logarithms are formed here, in double precision."""
        logs = (log_beta(beta, self.bias_correction) for beta in (self.beta1, self.beta2))
        flags = (float(flag) for flag in (self.reg_inside_moment, self.init_zero, self.is_max))
        betas = (self.beta1, self.beta3, self.beta2, 1 - self.beta2)
        return row_of(self.lr, *betas, *logs, self.eps, self.weight_decay, *flags)


def novograd_reference(members: Members, steps: Sequence[float], hyper: NovoGradHyper, divisor: float = 1.0) -> None:
    """One step in place, the norms a tensor at a time, the rest vectorised; `steps` count this step."""
    norms = _reference_norms(members.gradients, hyper, divisor)
    _reference_rest(members, steps, hyper, divisor, norms, [bool(p.numel()) for p in members.parameters])


def _reference_norms(gradients: Sequence[Tensor], hyper: NovoGradHyper, divisor: float) -> list[float]:
    """n of the formula; 0 of a tensor without elements."""
    return [float(g.abs().max() if hyper.is_max else tensor_norm(g)) / divisor if g.numel() else 0.0 for g in gradients]


def _reference_rest(
    members: Members,
    steps: Sequence[float],
    hyper: NovoGradHyper,
    divisor: float,
    norms: Sequence[float],
    has_elements: Sequence[bool],
) -> None:
    """Running norms where the whole tensor has elements, and the weights that are here."""
    for running, norm, step, is_stepped in zip(members.scalars, norms, steps, has_elements, strict=True):
        if is_stepped:
            running.fill_(_running_norm(float(running), norm, step, hyper))
    full = [i for i, parameter in enumerate(members.parameters) if parameter.numel()]
    own = members.chosen(full)
    factors = []
    for running, step in zip(own.scalars, (steps[i] for i in full), strict=True):
        c1, c2 = (1 - hyper.beta1**step, 1 - hyper.beta2**step) if hyper.bias_correction else (1.0, 1.0)
        factors.append((c1, float(running) / math.sqrt(c2) + hyper.eps))
    lists = [own.parameters, own.gradients, *own.dense, *([own.masters] if own.masters else [])]
    for batch, its_factors in batches(lists, factors):
        _reference_batch(batch, its_factors, hyper, divisor)


def _running_norm(running: float, norm: float, step: float, hyper: NovoGradHyper) -> float:
    """N of the formula after this step."""
    if step == 1.0 and not hyper.init_zero:
        return norm
    if hyper.is_max:
        return hyper.beta2 * running + (1 - hyper.beta2) * norm
    return math.sqrt(hyper.beta2 * running**2 + (1 - hyper.beta2) * norm**2)


def _reference_batch(
    batch: Sequence[list[Tensor]], factors: Sequence[tuple[float, float]], hyper: NovoGradHyper, divisor: float
) -> None:
    stored_w, stored_g, m, *masters = batch
    dtype = arithmetic_dtype(stored_w)
    w = masters[0] if masters else in_dtype(stored_w, dtype)
    g = in_dtype(stored_g, dtype)
    if divisor != 1.0:
        g = list(torch._foreach_div(g, divisor))
    if hyper.reg_inside_moment:
        g = list(torch._foreach_div(g, [d for _, d in factors]))
        torch._foreach_add_(g, w, alpha=hyper.weight_decay)
    torch._foreach_mul_(m, hyper.beta1)
    torch._foreach_add_(m, g, alpha=hyper.beta3)
    scales = [c1 if hyper.reg_inside_moment else c1 * d for c1, d in factors]
    update = torch._foreach_div(m, scales)
    if not hyper.reg_inside_moment:
        torch._foreach_add_(update, w, alpha=hyper.weight_decay)
    torch._foreach_add_(w, update, alpha=-hyper.lr)
    if stored_w is not w:
        torch._foreach_copy_(stored_w, w)


class NovoGradRule(NormedRule):
    """NovoGrad for whoever keeps tables."""

    name = "novograd"

    def scratch(self, table: TensorTable) -> tuple[Tensor, ...]:
        """Norms of stretches of gradients, tickets, and norms of tensors."""
        partials = torch.empty(norm_slots(table), device=table.device)
        tickets = torch.zeros(table.count, dtype=torch.int32, device=table.device)
        return partials, tickets, torch.zeros(table.count, device=table.device)

    def launch(
        self, signature: UpdateSignature, table: TensorTable, scratch: tuple[Tensor, ...], shared: Shared
    ) -> None:
        """Two launches."""
        launch_norms(signature, table, scratch, shared, is_whole=True)
        launch_weights(signature, table, shared)

    def launch_norms(
        self, signature: UpdateSignature, table: TensorTable, scratch: tuple[Tensor, ...], shared: Shared
    ) -> Tensor:
        """(1, n): the norms of gradients."""
        launch_norms(signature, table, scratch, shared, is_whole=False)
        return scratch[2].unsqueeze(0)

    def launch_rest(
        self,
        signature: UpdateSignature,
        table: TensorTable,
        scratch: tuple[Tensor, ...],  # noqa: ARG002
        shared: Shared,
        scalars: Sequence[Tensor],
        norms: Tensor,
    ) -> None:
        """Running norms, and the weights."""
        hyper = shared.hyper[table.rows[GROUP_ROW]].double()
        beta2, rest, init_zero, is_max = hyper[:, 3], hyper[:, 4], hyper[:, 10] != 0, hyper[:, 11] != 0
        running, norm = torch.stack(list(scalars)).double(), norms[0]
        root = (beta2 * running.square() + rest * norm.square()).sqrt()
        blended = torch.where(is_max, beta2 * running + rest * norm, root)
        is_first = (shared.steps_before[table.rows[STEP_ROW]] == 0) & ~init_zero
        now = torch.where(is_first, norm, blended)
        is_stepped = (table.rows[GRADIENT_ROW] != 0) & (shared.skip == 0)
        torch._foreach_copy_(list(scalars), list(torch.where(is_stepped, now, running).float().unbind()))
        launch_weights(signature, table, shared)

    def takes_maxima(self, hyper: Any) -> bool:
        """As the group's option says."""
        return bool(hyper.is_max)

    def reference(self, members: Members, steps: Sequence[float], hyper: Any, divisor: float) -> None:
        """See `novograd_reference`."""
        novograd_reference(members, steps, hyper, divisor)

    def reference_norms(self, members: Members, steps: Sequence[float], hyper: Any, divisor: float) -> Tensor:  # noqa: ARG002
        """(1, n): the norms of gradients."""
        norms = [_reference_norms(members.gradients, hyper, divisor)]
        return torch.tensor(norms, dtype=torch.float64).to(members.parameters[0].device)

    def reference_rest(
        self, members: Members, steps: Sequence[float], hyper: Any, divisor: float, norms: Tensor
    ) -> None:
        """Running norms, also of tensors of which nothing is here, and the weights."""
        _reference_rest(members, steps, hyper, divisor, norms[0].tolist(), [True] * len(steps))


NOVOGRAD = NovoGradRule()


def _novograd(
    parameters: list[Tensor],
    gradients: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_norms: list[Tensor],
    masters: list[Tensor],
    steps: list[Tensor],
    lr: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    bias_correction: bool,
    reg_inside_moment: bool,
    grad_averaging: bool,
    init_zero: bool,
    is_max: bool,
    divisor: Tensor | None,
    skip: Tensor | None,
) -> None:
    members = Members(parameters, gradients, [exp_avgs], exp_avg_norms, masters)
    options = (bias_correction, reg_inside_moment, grad_averaging, init_zero, is_max)
    hyper = NovoGradHyper(0.0, beta1, beta2, eps, weight_decay, *options)
    update_once(NOVOGRAD, members, steps, lr, hyper, divisor, skip)


_novograd_op = define(
    "novograd_(Tensor(a!)[] parameters, Tensor[] gradients, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_norms,"
    " Tensor(d!)[] masters, Tensor(e!)[] steps, Tensor lr, float beta1, float beta2, float eps, float weight_decay,"
    " bool bias_correction, bool reg_inside_moment, bool grad_averaging, bool init_zero, bool is_max, Tensor? divisor,"
    " Tensor? skip) -> ()",
    _novograd,
    no_output,
)


def novograd_(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_norms: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    lr: Tensor | float,
    masters: Sequence[Tensor] = (),
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    bias_correction: bool = True,
    reg_inside_moment: bool = False,
    grad_averaging: bool = True,
    init_zero: bool = False,
    is_max: bool = False,
    divisor: Tensor | None = None,
    skip: Tensor | None = None,
) -> None:
    """One step in place for tensors of one device: two launches for each combination of dtypes.

    Args:
        parameters, gradients: n tensors each, of equal shapes; any strides and real dtypes. No two parameters, and no
            two elements of one, may share memory.
        exp_avgs: n dense fp32 tensors (float64 for float64), all in one order of memory with the masters.
        exp_avg_norms: n tensors of one fp32 element on the device (float64 for float64): running norms, not squares.
        steps: n tensors of one fp32 element, the steps taken so far; counted up. At 0 a running norm is the norm.
        lr: 0-d, or a number.
        masters: n fp32 tensors like exp_avgs, updated in the parameters' stead; or none.
        is_max: norms are largest magnitudes.
        divisor: 0-d, of the gradients.
        skip: 0-d; where it is not 0, nothing changes.

    Raises: UserError for a tensor on another device, before anything is changed.

    No wait for the device, except in the reference on a GPU. FusedNovoGrad keeps its table of addresses between steps.
    Source: Ginsburg et al. 2019, arXiv:1905.11286.
    """
    lr = lr if isinstance(lr, Tensor) else torch.tensor(lr)
    _novograd_op(
        list(parameters), list(gradients), list(exp_avgs), list(exp_avg_norms), list(masters), list(steps), lr,
        beta1, beta2, eps, weight_decay, bias_correction, reg_inside_moment, grad_averaging, init_zero, is_max,
        divisor, skip,
    )  # fmt: skip


def _prove(device: torch.device) -> list[Proof]:
    proofs = []
    for is_max in (False, True):
        hyper = NovoGradHyper(0.01, weight_decay=0.1, beta2=0.9, is_max=is_max)

        def run(ours: Members, steps: list[Tensor], hyper: NovoGradHyper = hyper) -> None:
            novograd_(
                ours.parameters, ours.gradients, ours.dense[0], ours.scalars, steps, lr=hyper.lr, masters=ours.masters,
                weight_decay=hyper.weight_decay, beta2=hyper.beta2, is_max=hyper.is_max,
            )  # fmt: skip

        def reference(ours: Members, steps: list[float], hyper: NovoGradHyper = hyper) -> None:
            novograd_reference(ours, steps, hyper)

        name = "novograd by largest magnitudes" if is_max else "novograd"
        proofs += prove_update(name, device, run, reference, dense=1, has_scalars=True)
    return proofs


catalogue(Op("novograd", "NovoGrad, all parameters in two launches", _prove, compilations))
