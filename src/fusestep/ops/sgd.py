"""One step of SGD with momentum for many parameters in one launch.

    g ← g / divisor                                 (a loss scale, clipping, or both; 1 without them)
    g ← g + weight_decay · w                        (unless wd_after_momentum)
    v ← g at a buffer's first step, then  momentum · v + (1 − dampening) · g
    q ← g + momentum · v (Nesterov)  or  v          (g without momentum)
    q ← q + weight_decay · w                        (wd_after_momentum)
    w ← w − lr · q

w is the fp32 master where there is one, else the parameter itself; `steps` counts the steps of each buffer. All
arithmetic is fp32, whatever the dtypes in memory. Where `skip` is not 0 nothing changes, the step count included.
Source: Sutskever, Martens, Dahl and Hinton 2013, On the importance of initialization and momentum in deep learning, in
the form of torch.optim.SGD, whose velocity is not scaled by the learning rate.
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
class SGDHyper:
    """What one parameter group asks of SGD."""

    lr: float
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    wd_after_momentum: bool = False

    def row(self) -> list[float]:
        """The numbers as the kernel reads them."""
        l2, after = (0.0, self.weight_decay) if self.wd_after_momentum else (self.weight_decay, 0.0)
        return row_of(self.lr, self.momentum, 1 - self.dampening, l2, after, float(self.nesterov))


def sgd_reference(members: Members, steps: Sequence[float], hyper: SGDHyper, divisor: float = 1.0) -> None:
    """One step in place, vectorised over the lists; steps that are 1 are a momentum buffer's first."""
    lists = [members.parameters, members.gradients, *members.dense, *([members.masters] if members.masters else [])]
    for batch, its_steps in batches(lists, steps):
        _reference_batch(batch, its_steps, hyper, divisor, has_momentum=bool(members.dense))


def _reference_batch(
    batch: Sequence[list[Tensor]], steps: Sequence[float], hyper: SGDHyper, divisor: float, *, has_momentum: bool
) -> None:
    stored_w, stored_g = batch[0], batch[1]
    dtype = arithmetic_dtype(stored_w)
    w = batch[-1] if len(batch) > 2 + has_momentum else in_dtype(stored_w, dtype)
    g = in_dtype(stored_g, dtype)
    if divisor != 1.0:
        g = list(torch._foreach_div(g, divisor))
    if hyper.weight_decay and not hyper.wd_after_momentum:
        g = list(torch._foreach_add(g, w, alpha=hyper.weight_decay))
    q = g
    if has_momentum:
        v = batch[2]
        torch._foreach_mul_(v, hyper.momentum)
        torch._foreach_add_(v, g, alpha=1 - hyper.dampening)
        first = [i for i, step in enumerate(steps) if step == 1.0]
        if first:
            torch._foreach_copy_([v[i] for i in first], [g[i] for i in first])
        q = list(torch._foreach_add(g, v, alpha=hyper.momentum)) if hyper.nesterov else v
    if hyper.weight_decay and hyper.wd_after_momentum:
        q = list(torch._foreach_add(q, w, alpha=hyper.weight_decay))
    torch._foreach_add_(w, q, alpha=-hyper.lr)
    if stored_w is not w:
        torch._foreach_copy_(stored_w, w)


@triton.jit
def _update(
    parameter, gradient, buffer, master, at, at_parameter, at_gradient, mask,
    inverse, lr, momentum, undamped, l2, after, is_nesterov, is_first,
    HAS_MOMENTUM: tl.constexpr, HAS_MASTER: tl.constexpr,
):  # fmt: skip
    g = tl.load(gradient + at_gradient, mask=mask).to(tl.float32) * inverse
    weight, at_weight = (master, at) if HAS_MASTER else (parameter, at_parameter)
    w = tl.load(weight + at_weight, mask=mask).to(tl.float32)
    g += l2 * w
    q = g
    if HAS_MOMENTUM:
        v = tl.load(buffer + at, mask=mask)
        v = tl.where(is_first, g, momentum * v + undamped * g)
        tl.store(buffer + at, v, mask=mask)
        q = tl.where(is_nesterov, g + momentum * v, v)
    q += after * w
    w -= lr * q
    tl.store(parameter + at_parameter, w.to(parameter.dtype.element_ty), mask=mask)
    if HAS_MASTER:
        tl.store(master + at, w, mask=mask)


@triton.jit(do_not_specialize=["tensors", "chunks", "is_counting"], do_not_specialize_on_alignment=["divisor", "skip"])
def _sgd_kernel(
    rows, tensors, chunk_tensor, chunks, dims,  # the table
    hyper, steps_before, steps, divisor, skip, counters, is_counting,  # see Shared
    PARAMETER_DTYPE: tl.constexpr,
    GRADIENT_DTYPE: tl.constexpr,
    HAS_MASTER: tl.constexpr,
    IS_STRIDED: tl.constexpr,
    HAS_MOMENTUM: tl.constexpr,
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
            parameter, gradient, buffer, _, master = pointers(
                rows, tensors, tensor, address, PARAMETER_DTYPE, GRADIENT_DTYPE
            )
            lr, group, step = options(rows, tensors, tensor, hyper, steps_before)
            momentum = tl.load(group + 1)
            undamped = tl.load(group + 2)
            l2 = tl.load(group + 3)
            after = tl.load(group + 4)
            is_nesterov = tl.load(group + 5) != 0.0
            is_first = step == 0.0
            start, numel, first_dim, dim_count, is_plain = chunk_of(rows, tensors, tensor, pid, IS_STRIDED, CHUNK)
            if is_plain:
                at = tl.multiple_of(start, 16) + lanes
                _update(
                    tl.multiple_of(parameter, 16), tl.multiple_of(gradient, 16), tl.multiple_of(buffer, 16),
                    tl.multiple_of(master, 16), at, at, at, None,
                    inverse, lr, momentum, undamped, l2, after, is_nesterov, is_first, HAS_MOMENTUM, HAS_MASTER,
                )  # fmt: skip
            else:
                at = start + lanes
                at_parameter, at_gradient = places(at, dims, first_dim, dim_count)
                _update(
                    parameter, gradient, buffer, master, at, at_parameter, at_gradient, at < numel,
                    inverse, lr, momentum, undamped, l2, after, is_nesterov, is_first, HAS_MOMENTUM, HAS_MASTER,
                )  # fmt: skip


class SGDRule(Rule):
    """SGD for whoever keeps tables."""

    name = "sgd"

    def launch(
        self,
        signature: UpdateSignature,
        table: TensorTable,
        scratch: tuple[Tensor, ...],  # noqa: ARG002
        shared: Shared,
    ) -> None:
        """One launch."""
        launch(
            _sgd_kernel,
            programs(table),
            table.device,
            *table.arguments,
            *shared,
            **constants_of(signature, table),
            HAS_MOMENTUM=signature.dense > 0,
            CHUNK=BLOCK,
            num_warps=WARPS,
        )

    def reference(self, members: Members, steps: Sequence[float], hyper: Any, divisor: float) -> None:
        """See `sgd_reference`."""
        sgd_reference(members, steps, hyper, divisor)


SGD = SGDRule()


def _sgd(
    parameters: list[Tensor],
    gradients: list[Tensor],
    momentum_buffers: list[Tensor],
    masters: list[Tensor],
    steps: list[Tensor],
    lr: Tensor,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    wd_after_momentum: bool,
    divisor: Tensor | None,
    skip: Tensor | None,
) -> None:
    members = Members(parameters, gradients, [momentum_buffers] if momentum_buffers else [], [], masters)
    hyper = SGDHyper(0.0, momentum, dampening, weight_decay, nesterov, wd_after_momentum)
    update_once(SGD, members, steps, lr, hyper, divisor, skip)


_sgd_op = define(
    "sgd_(Tensor(a!)[] parameters, Tensor[] gradients, Tensor(b!)[] momentum_buffers, Tensor(c!)[] masters,"
    " Tensor(d!)[] steps, Tensor lr, float momentum, float dampening, float weight_decay, bool nesterov,"
    " bool wd_after_momentum, Tensor? divisor, Tensor? skip) -> ()",
    _sgd,
    no_output,
)


def sgd_(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    lr: Tensor | float,
    masters: Sequence[Tensor] = (),
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    wd_after_momentum: bool = False,
    divisor: Tensor | None = None,
    skip: Tensor | None = None,
) -> None:
    """One step in place for tensors of one device: one launch for each combination of dtypes.

    Args:
        parameters, gradients: n tensors each, of equal shapes; any strides and real dtypes. No two parameters, and no
            two elements of one, may share memory.
        momentum_buffers: n dense fp32 tensors (float64 for float64), all in one order of memory with the masters; or
            none, and then there is no momentum.
        steps: n tensors of one fp32 element, the steps taken so far; counted up. At 0 a buffer takes the gradient.
        lr: 0-d, or a number.
        masters: n fp32 tensors like the buffers, updated in the parameters' stead; or none.
        divisor: 0-d, of the gradients.
        skip: 0-d; where it is not 0, nothing changes.

    Raises: UserError for a tensor on another device, before anything is changed.

    No wait for the device, except in the reference on a GPU. FusedSGD keeps its table of addresses between steps.
    Source: Sutskever et al. 2013, as torch.optim.SGD.
    """
    lr = lr if isinstance(lr, Tensor) else torch.tensor(lr)
    _sgd_op(
        list(parameters), list(gradients), list(momentum_buffers), list(masters), list(steps), lr,
        momentum, dampening, weight_decay, nesterov, wd_after_momentum, divisor, skip,
    )  # fmt: skip


def _prove(device: torch.device) -> list[Proof]:
    hyper = SGDHyper(0.01, 0.9, 0.1, 0.1)

    def run(members: Members, steps: list[Tensor]) -> None:
        sgd_(
            members.parameters, members.gradients, members.dense[0], steps, lr=hyper.lr, masters=members.masters,
            momentum=hyper.momentum, dampening=hyper.dampening, weight_decay=hyper.weight_decay,
        )  # fmt: skip

    return prove_update("sgd", device, run, lambda members, steps: sgd_reference(members, steps, hyper), dense=1)


def compilations() -> Iterator[Compilation]:
    """Every combination of dtypes, with and without masters and strides, with momentum.

    Without it there is only less code, so the least and the most of that are listed.
    """
    for label, constants in signatures():
        constants["CHUNK"] = BLOCK
        yield compilation(_sgd_kernel, label, {**constants, "HAS_MOMENTUM": True})
        if constants["HAS_MASTER"] == constants["IS_STRIDED"] and "fp16" not in label:
            yield compilation(_sgd_kernel, f"{label}, no momentum", {**constants, "HAS_MOMENTUM": False})


catalogue(Op("sgd", "SGD with momentum, all parameters in one launch", _prove, compilations))
