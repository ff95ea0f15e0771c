"""One step of Adagrad for many parameters in one launch.

    g ← g / divisor                                             (a loss scale, clipping, or both; 1 without them)
    g ← g + weight_decay · w                                    (the L2 penalty)
    h ← h + g²
    η = lr / (1 + (t − 1) · lr_decay)
    w ← w − η · g / (√h + eps)
    w ← w − η · (g / (√h + eps) + weight_decay · w)             (adagrad_w_mode: decoupled decay)

w is the fp32 master where there is one, else the parameter itself; t counts the steps of each parameter. All arithmetic
is fp32, whatever the dtypes in memory. Where `skip` is not 0 nothing changes, the step count included.
Source: Duchi, Hazan and Singer 2011, Adaptive subgradient methods for online learning and stochastic optimization, JMLR
12; lr_decay and the place of eps as torch.optim.Adagrad.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusestep.language import tl, triton
from fusestep.ops.adam_kernel import _gate, _keep_counts
from fusestep.ops.batches import arithmetic_dtype, batches, in_dtype
from fusestep.ops.launch import launch
from fusestep.ops.registry import Compilation, Op, Proof, catalogue, define
from fusestep.ops.tensor_table import BLOCK, GRADIENT, TensorTable
from fusestep.ops.update import (
    WARPS,
    Members,
    Rule,
    Shared,
    UpdateSignature,
    compilation,
    constants_of,
    no_output,
    programs,
    row_of,
    signatures,
    update_once,
)
from fusestep.ops.update_kernel import chunk_of, options, places, pointers
from fusestep.ops.update_proof import prove_update


@dataclass(frozen=True)
class AdagradHyper:
    """What one parameter group asks of Adagrad."""

    lr: float
    lr_decay: float = 0.0
    eps: float = 1e-10
    weight_decay: float = 0.0
    adagrad_w_mode: bool = False

    def row(self) -> list[float]:
        """The numbers as the kernel reads them."""
        l2, decoupled = (0.0, self.weight_decay) if self.adagrad_w_mode else (self.weight_decay, 0.0)
        return row_of(self.lr, self.lr_decay, self.eps, l2, decoupled)


def adagrad_reference(members: Members, steps: Sequence[float], hyper: AdagradHyper, divisor: float = 1.0) -> None:
    """One step in place, vectorised over the lists; `steps` are the numbers of this step, from 1."""
    lists = [members.parameters, members.gradients, *members.dense, *([members.masters] if members.masters else [])]
    for batch, its_steps in batches(lists, steps):
        _reference_batch(batch, its_steps, hyper, divisor)


def _reference_batch(
    batch: Sequence[list[Tensor]], steps: Sequence[float], hyper: AdagradHyper, divisor: float
) -> None:
    stored_w, stored_g, h, *masters = batch
    dtype = arithmetic_dtype(stored_w)
    w = masters[0] if masters else in_dtype(stored_w, dtype)
    g = in_dtype(stored_g, dtype)
    if divisor != 1.0:
        g = list(torch._foreach_div(g, divisor))
    if hyper.weight_decay and not hyper.adagrad_w_mode:
        g = list(torch._foreach_add(g, w, alpha=hyper.weight_decay))
    rates = [hyper.lr / (1 + (step - 1) * hyper.lr_decay) for step in steps]
    if hyper.weight_decay and hyper.adagrad_w_mode:
        torch._foreach_mul_(w, [1 - rate * hyper.weight_decay for rate in rates])
    torch._foreach_addcmul_(h, g, g)
    denominator = torch._foreach_sqrt(h)
    torch._foreach_add_(denominator, hyper.eps)
    torch._foreach_addcdiv_(w, g, denominator, [-rate for rate in rates])
    if stored_w is not w:
        torch._foreach_copy_(stored_w, w)


@triton.jit
def _update(
    parameter, gradient, sums, master, at, at_parameter, at_gradient, mask,
    inverse, rate, eps, l2, keep,
    HAS_MASTER: tl.constexpr,
):  # fmt: skip
    g = tl.load(gradient + at_gradient, mask=mask).to(tl.float32) * inverse
    h = tl.load(sums + at, mask=mask)
    weight, at_weight = (master, at) if HAS_MASTER else (parameter, at_parameter)
    w = tl.load(weight + at_weight, mask=mask).to(tl.float32)
    g += l2 * w
    h += g * g
    w = w * keep - rate * (g / (tl.sqrt(h) + eps))
    tl.store(sums + at, h, mask=mask)
    tl.store(parameter + at_parameter, w.to(parameter.dtype.element_ty), mask=mask)
    if HAS_MASTER:
        tl.store(master + at, w, mask=mask)


@triton.jit(do_not_specialize=["tensors", "chunks", "is_counting"], do_not_specialize_on_alignment=["divisor", "skip"])
def _adagrad_kernel(
    rows, tensors, chunk_tensor, chunks, dims,  # the table
    hyper, steps_before, steps, divisor, skip, counters, is_counting,  # see Shared
    PARAMETER_DTYPE: tl.constexpr,
    GRADIENT_DTYPE: tl.constexpr,
    HAS_MASTER: tl.constexpr,
    IS_STRIDED: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, CHUNK)
    is_skipped, inverse = _gate(divisor, skip, True)
    _keep_counts(rows, tensors, pid, steps_before, steps, is_skipped, counters, is_counting, CHUNK)
    if pid < chunks:
        tensor = tl.load(chunk_tensor + pid)
        address = tl.load(rows + tensors * GRADIENT + tensor)
        if (address != 0) & (is_skipped == 0.0):
            parameter, gradient, sums, _, master = pointers(
                rows, tensors, tensor, address, PARAMETER_DTYPE, GRADIENT_DTYPE
            )
            lr, group, step = options(rows, tensors, tensor, hyper, steps_before)
            rate = lr / (1.0 + step * tl.load(group + 1))
            eps = tl.load(group + 2)
            l2 = tl.load(group + 3)
            keep = 1.0 - rate * tl.load(group + 4)
            start, numel, first_dim, dim_count, is_plain = chunk_of(rows, tensors, tensor, pid, IS_STRIDED, CHUNK)
            if is_plain:
                at = tl.multiple_of(start, 16) + lanes
                _update(
                    tl.multiple_of(parameter, 16), tl.multiple_of(gradient, 16), tl.multiple_of(sums, 16),
                    tl.multiple_of(master, 16), at, at, at, None, inverse, rate, eps, l2, keep, HAS_MASTER,
                )  # fmt: skip
            else:
                at = start + lanes
                at_parameter, at_gradient = places(at, dims, first_dim, dim_count)
                _update(
                    parameter, gradient, sums, master, at, at_parameter, at_gradient, at < numel,
                    inverse, rate, eps, l2, keep, HAS_MASTER,
                )  # fmt: skip


class AdagradRule(Rule):
    """Adagrad for whoever keeps tables."""

    name = "adagrad"

    def launch(
        self,
        signature: UpdateSignature,
        table: TensorTable,
        scratch: tuple[Tensor, ...],  # noqa: ARG002
        shared: Shared,
    ) -> None:
        """One launch."""
        launch(
            _adagrad_kernel,
            programs(table),
            table.device,
            *table.arguments,
            *shared,
            **constants_of(signature, table),
            CHUNK=BLOCK,
            num_warps=WARPS,
        )

    def reference(self, members: Members, steps: Sequence[float], hyper: Any, divisor: float) -> None:
        """See `adagrad_reference`."""
        adagrad_reference(members, steps, hyper, divisor)


ADAGRAD = AdagradRule()


def _adagrad(
    parameters: list[Tensor],
    gradients: list[Tensor],
    sums: list[Tensor],
    masters: list[Tensor],
    steps: list[Tensor],
    lr: Tensor,
    lr_decay: float,
    eps: float,
    weight_decay: float,
    adagrad_w_mode: bool,
    divisor: Tensor | None,
    skip: Tensor | None,
) -> None:
    members = Members(parameters, gradients, [sums], [], masters)
    hyper = AdagradHyper(0.0, lr_decay, eps, weight_decay, adagrad_w_mode)
    update_once(ADAGRAD, members, steps, lr, hyper, divisor, skip)


_adagrad_op = define(
    "adagrad_(Tensor(a!)[] parameters, Tensor[] gradients, Tensor(b!)[] sums, Tensor(c!)[] masters,"
    " Tensor(d!)[] steps, Tensor lr, float lr_decay, float eps, float weight_decay, bool adagrad_w_mode,"
    " Tensor? divisor, Tensor? skip) -> ()",
    _adagrad,
    no_output,
)


def adagrad_(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    sums: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    lr: Tensor | float,
    masters: Sequence[Tensor] = (),
    lr_decay: float = 0.0,
    eps: float = 1e-10,
    weight_decay: float = 0.0,
    adagrad_w_mode: bool = False,
    divisor: Tensor | None = None,
    skip: Tensor | None = None,
) -> None:
    """One step in place for tensors of one device: one launch for each combination of dtypes.

    Args:
        parameters, gradients: n tensors each, of equal shapes; any strides and real dtypes. No two parameters, and no
            two elements of one, may share memory.
        sums: n dense fp32 tensors (float64 for float64), the sums of squared gradients; all in one order of memory with
            the masters.
        steps: n tensors of one fp32 element, the steps taken so far; counted up.
        lr: 0-d, or a number.
        masters: n fp32 tensors like the sums, updated in the parameters' stead; or none.
        divisor: 0-d, of the gradients.
        skip: 0-d; where it is not 0, nothing changes.

    Raises: UserError for a tensor on another device, before anything is changed.

    No wait for the device, except in the reference on a GPU. FusedAdagrad keeps its table of addresses between steps.
    Source: Duchi et al. 2011, JMLR 12, as torch.optim.Adagrad.
    """
    lr = lr if isinstance(lr, Tensor) else torch.tensor(lr)
    _adagrad_op(
        list(parameters), list(gradients), list(sums), list(masters), list(steps), lr,
        lr_decay, eps, weight_decay, adagrad_w_mode, divisor, skip,
    )  # fmt: skip


def _prove(device: torch.device) -> list[Proof]:
    hyper = AdagradHyper(0.01, 0.1, 1e-8, 0.1)

    def run(members: Members, steps: list[Tensor]) -> None:
        adagrad_(
            members.parameters, members.gradients, members.dense[0], steps, lr=hyper.lr, masters=members.masters,
            lr_decay=hyper.lr_decay, eps=hyper.eps, weight_decay=hyper.weight_decay,
        )  # fmt: skip

    return prove_update("adagrad", device, run, lambda ours, steps: adagrad_reference(ours, steps, hyper), dense=1)


def compilations() -> Iterator[Compilation]:
    """Every combination of dtypes, with and without masters and strides."""
    for label, constants in signatures():
        yield compilation(_adagrad_kernel, label, {**constants, "CHUNK": BLOCK})


catalogue(Op("adagrad", "Adagrad, all parameters in one launch", _prove, compilations))
