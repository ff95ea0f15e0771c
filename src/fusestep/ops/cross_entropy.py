"""Cross entropy of logits, with label smoothing, z-loss, softcap and a weight for each token.

The formulas stand in cross_entropy_rows.py, the kernel in cross_entropy_kernel.py. Backward reads the logits once more
and keeps nothing but a number for each row. Where the logits are a product with a weight, linear_cross_entropy spares
holding them.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from fusestep import dispatch
from fusestep.distributed.tensor_parallel import tensor_parallel
from fusestep.errors import UserError
from fusestep.ops.cross_entropy_kernel import compilations
from fusestep.ops.cross_entropy_parts import Share, write_shared_rows
from fusestep.ops.cross_entropy_rows import OPTIONS_SCHEMA, Options, statistics_dtype, uses_triton, write_rows
from fusestep.ops.dtypes import dtype_name
from fusestep.ops.registry import (
    Op,
    Proof,
    announce_transformed,
    catalogue,
    define,
    is_plain,
    relative_error,
    runs_mapped,
)
from fusestep.transforms import is_mapped, is_transformed

Reduction = Literal["mean", "sum", "none"]
REDUCTIONS = ("mean", "sum", "none")
FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def cross_entropy_reference(logits: Tensor, target: Tensor, token_weights: Tensor | None, options: Options) -> Tensor:
    """The loss of each row in plain PyTorch, differentiable to any order; logits (rows, V)."""
    y = logits.to(statistics_dtype(logits.dtype))
    if options.softcap:
        y = torch.tanh(y / options.softcap) * options.softcap
    is_counted = target != options.ignore_index
    is_known = (target >= 0) & (target < logits.shape[1])
    lse = torch.logsumexp(y, 1)
    picked = y.gather(1, torch.where(is_known, target, 0).long()[:, None])[:, 0]
    loss = lse - (1.0 - options.label_smoothing) * picked + options.z_loss * lse * lse
    if options.label_smoothing:
        loss = loss - options.label_smoothing * y.mean(1)
    if token_weights is not None:
        loss = loss * token_weights
    return torch.where(is_counted, torch.where(is_known, loss, torch.nan), 0.0)


def run_forward(logits: Tensor, target: Tensor, token_weights: Tensor | None, *options: Any) -> tuple[Tensor, Tensor]:
    """(losses, lse), (rows,) each."""
    losses = torch.empty(logits.shape[0], dtype=statistics_dtype(logits.dtype), device=logits.device)
    lse = torch.empty_like(losses)
    write_rows("cross_entropy", logits, target, token_weights, Options(*options), lse, losses=losses)
    return losses, lse


def run_backward(
    dlosses: Tensor, lse: Tensor, logits: Tensor, target: Tensor, token_weights: Tensor | None, *options: Any
) -> Tensor:
    """The gradient of the logits, contiguous."""
    gradient = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    write_rows(
        "cross_entropy", logits, target, token_weights, Options(*options), lse, upstream=dlosses, gradient=gradient
    )
    return gradient


def _forward_fake(logits: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    losses = logits.new_empty(logits.shape[0], dtype=statistics_dtype(logits.dtype))
    return losses, torch.empty_like(losses)


cross_entropy_forward = define(
    f"cross_entropy_forward(Tensor logits, Tensor target, Tensor? token_weights, {OPTIONS_SCHEMA}) -> (Tensor, Tensor)",
    run_forward,
    _forward_fake,
)
cross_entropy_backward = define(
    "cross_entropy_backward(Tensor dlosses, Tensor lse, Tensor logits, Tensor target, Tensor? token_weights, "
    f"{OPTIONS_SCHEMA}) -> Tensor",
    run_backward,
    lambda dlosses, lse, logits, *_: logits.new_empty(logits.shape),  # noqa: ARG005
)


class _CrossEntropy(torch.autograd.Function):
    """The loss of each row, or of all: reduced here, since what autograd sees costs the host more."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        token_weights: Tensor | None,
        options: Options,
        reduction: Reduction,
        plain: bool,
    ) -> Tensor:
        run = run_forward if plain else cross_entropy_forward
        losses, lse = run(logits, target, token_weights, *options)
        loss, count = reduced(losses, target, token_weights, options.ignore_index, reduction)
        ctx.save_for_backward(logits, target, token_weights, lse, count)
        ctx.options, ctx.plain = options, plain
        return loss

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> Any:
        refuse_second("cross_entropy")
        logits, target, token_weights, lse, count = ctx.saved_tensors
        upstream = dloss if count is None else dloss / count
        if runs_mapped("cross_entropy", dloss):
            found = visible_gradient(upstream, logits, target, token_weights, ctx.options)
            return found.to(logits.dtype), None, None, None, None, None
        run = run_backward if ctx.plain and is_plain(dloss) else cross_entropy_backward
        return run(upstream, lse, logits, target, token_weights, *ctx.options), None, None, None, None, None


class _SharedCrossEntropy(torch.autograd.Function):
    """The same where this rank has the logits of its part of the vocabulary."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        token_weights: Tensor | None,
        options: Options,
        reduction: Reduction,
        share: Share,
    ) -> Tensor:
        losses = logits.new_empty(logits.shape[0], dtype=statistics_dtype(logits.dtype))
        lse = torch.empty_like(losses)
        write_shared_rows("cross_entropy", logits, target, token_weights, options, lse, share, losses=losses)
        loss, count = reduced(losses, target, token_weights, options.ignore_index, reduction)
        ctx.save_for_backward(logits, target, token_weights, lse, count)
        ctx.options, ctx.share = options, share
        return loss

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> Any:
        refuse_second("cross_entropy")
        refuse_across_ranks("cross_entropy", is_mapped(dloss))
        logits, target, token_weights, lse, count = ctx.saved_tensors
        gradient = logits.new_empty(logits.shape)
        write_rows(
            *("cross_entropy", logits, target, token_weights, ctx.options, lse),
            upstream=dloss if count is None else dloss / count,
            gradient=gradient,
            first=ctx.share.first,
            vocabulary=ctx.share.vocabulary,
        )
        return gradient, None, None, None, None, None


def visible_gradient(
    upstream: Tensor, logits: Tensor, target: Tensor, token_weights: Tensor | None, options: Options
) -> Tensor:
    """The gradient of the logits, (rows, V) in the dtype of statistics, in PyTorch's own operations.

    Args: upstream: the gradient of each row's loss, or one for all.
    """

    def total(y: Tensor) -> Tensor:
        return cross_entropy_reference(y, target, token_weights, options).sum()

    found: Tensor = torch.func.grad(total)(logits.detach().to(statistics_dtype(logits.dtype)))
    # Nothing reaches an ignored row, be it infinite, as where a mean is of no row.
    is_counted = (target != options.ignore_index)[:, None]
    return torch.where(is_counted, found * upstream.reshape(-1, 1), 0.0)


def refuse_across_ranks(who: str, crosses: bool) -> None:
    """Raise UserError where a transform would have to cross the ranks that share a loss."""
    if crosses:
        raise UserError(
            f"{who}: transforms of torch.func and batched gradients do not cross ranks; leave tp_group out, or those."
        )


def refuse_second(who: str) -> None:
    """Raise UserError where the gradient of a gradient is asked for: in a backward with create_graph=True."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise UserError(
            f"{who}: its gradient has no gradient, so that backward cannot take create_graph=True; compute the loss "
            "by torch.nn.functional.cross_entropy there."
        )


def cross_entropy(
    input: Tensor,  # noqa: A002 (torch's name)
    target: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: Reduction = "mean",
    token_weights: Tensor | None = None,
    tp_group: Any = None,
) -> Tensor:
    """torch.nn.functional.cross_entropy on class numbers, in one kernel forward and one backward.

    Args:
        input: (…, V) logits, fp32, bf16 or fp16 in the kernel, fp64 in the reference; the classes come last.
        target: (…) int64 or int32.
        ignore_index, label_smoothing, z_loss, softcap, reduction, token_weights: as of linear_cross_entropy.
        tp_group: ranks that share the vocabulary: input has the logits of this rank's part, as many classes as the
            others' and in order; target and the loss are the same on all ranks.

    Returns: the loss, fp32 (fp64 for fp64): 0-d, or (…) for reduction="none". NaN, on a GPU, where a target is neither
        a class nor ignore_index.
    Raises: UserError, before anything is launched, for arguments that do not fit, and on the CPU for such a target.
        Its gradient cannot be differentiated.
    """
    who = "cross_entropy"
    if input.dim() < 1 or input.shape[-1] == 0 or input.dtype not in FLOATING:
        raise UserError(
            f"{who}: input is {dtype_name(input.dtype)} of shape {tuple(input.shape)}; pass logits (…, V) in float32, "
            "bfloat16, float16 or float64."
        )
    options = checked_options(who, ignore_index, label_smoothing, z_loss, softcap, reduction)
    parallel = tensor_parallel(who, tp_group)
    if parallel is not None and torch.compiler.is_compiling():
        raise UserError(
            f"{who}: torch.compile does not cross ranks; call it with tp_group outside of what is compiled."
        )
    vocabulary = input.shape[-1] * (1 if parallel is None else parallel.size)
    check_targets(who, target, token_weights, input.shape[:-1], vocabulary, ignore_index)
    dispatch.one_device(who, input=input, target=target, token_weights=token_weights)
    rows = input.reshape(-1, input.shape[-1])
    target = target.reshape(-1).contiguous()
    weights = flat_weights(token_weights, input.dtype)
    if not torch.compiler.is_compiling() and is_transformed():
        refuse_across_ranks(who, parallel is not None)
        if uses_triton(who, input.device, input.dtype):
            announce_transformed(who)
        losses = cross_entropy_reference(rows, target, weights, options)
        loss, _ = reduced(losses, target, weights, ignore_index, reduction)
    else:
        if rows.stride(-1) != 1:
            rows = rows.contiguous()
        if parallel is None:
            plain = not torch.compiler.is_compiling() and is_plain(rows)
            loss = _CrossEntropy.apply(rows, target, weights, options, reduction, plain)
        else:
            share = Share(parallel.group, (parallel.rank or 0) * rows.shape[1], vocabulary)
            loss = _SharedCrossEntropy.apply(rows, target, weights, options, reduction, share)
    return loss.view(input.shape[:-1]) if reduction == "none" else loss


def reduced(
    losses: Tensor, target: Tensor, token_weights: Tensor | None, ignore_index: int, reduction: Reduction
) -> tuple[Tensor, Tensor | None]:
    """The losses as they are, their sum, or their mean; and for a mean what it divides by."""
    if reduction == "none":
        return losses, None
    total = losses.sum()
    if reduction == "sum":
        return total, None
    count = divisor(target, token_weights, ignore_index, total.dtype)
    return total / count, count


def divisor(target: Tensor, token_weights: Tensor | None, ignore_index: int, dtype: torch.dtype) -> Tensor:
    """What the mean divides by, 0-d on the device: the number of tokens that count, or the sum of their weights.

    In `dtype`, that of statistics: to count in it at once spares launches that would convert the number.
    """
    is_counted = target != ignore_index
    if token_weights is None:
        return is_counted.sum(dtype=dtype)
    return torch.where(is_counted, token_weights, 0.0).sum(dtype=dtype)


def flat_weights(token_weights: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Weights as the kernel reads them: (rows,), in the dtype of the statistics of logits in `dtype`."""
    if token_weights is None:
        return None
    return token_weights.reshape(-1).to(statistics_dtype(dtype)).contiguous()


def checked_options(
    who: str, ignore_index: int, label_smoothing: float, z_loss: float, softcap: float | None, reduction: str
) -> Options:
    """The options of a loss.

    Raises: UserError, in the words of `who`, for one that is out of range.
    """
    if reduction not in REDUCTIONS:
        raise UserError(f'{who}: reduction is {reduction!r}; pass "mean", "sum" or "none".')
    if not 0.0 <= label_smoothing <= 1.0:
        raise UserError(f"{who}: label_smoothing is {label_smoothing!r}; pass a number from 0 to 1.")
    if not 0.0 <= z_loss < math.inf:
        raise UserError(f"{who}: z_loss is {z_loss!r}; pass a number of at least 0, such as 1e-4.")
    if softcap is not None and not 0.0 < softcap < math.inf:
        raise UserError(f"{who}: softcap is {softcap!r}; pass a number above 0, or None for no cap.")
    return Options(int(ignore_index), float(label_smoothing), float(z_loss), float(softcap or 0.0))


def check_targets(
    who: str, target: Tensor, token_weights: Tensor | None, shape: torch.Size, vocabulary: int, ignore_index: int
) -> None:
    """Raise UserError, in the words of `who`, for targets or weights that do not fit logits (*shape, vocabulary)."""
    if target.shape != shape or target.dtype not in (torch.int64, torch.int32):
        raise UserError(
            f"{who}: target is {dtype_name(target.dtype)} of shape {tuple(target.shape)}; pass class numbers in int64 "
            f"or int32 of shape {tuple(shape)}."
        )
    if token_weights is not None:
        if token_weights.shape != shape or not token_weights.is_floating_point():
            raise UserError(
                f"{who}: token_weights are {dtype_name(token_weights.dtype)} of shape {tuple(token_weights.shape)}; "
                f"pass floating point numbers of shape {tuple(shape)}."
            )
        if token_weights.requires_grad and torch.is_grad_enabled():
            raise UserError(
                f"{who}: token_weights require a gradient, which they do not get; pass token_weights.detach(), or "
                'multiply the losses of reduction="none".'
            )
    is_looked_at = target.device.type == "cpu" and not torch.compiler.is_compiling() and is_plain(target)
    if not is_looked_at or is_transformed():
        return
    counted = target[target != ignore_index]
    if counted.numel():
        low, high = (int(bound) for bound in torch.aminmax(counted))
        if low < 0 or high >= vocabulary:
            raise UserError(
                f"{who}: target {low if low < 0 else high} is outside of the {vocabulary} classes; class numbers run "
                f"from 0 to {vocabulary - 1}, and {ignore_index} is ignored."
            )


def prove(device: torch.device) -> list[Proof]:
    """Losses and gradients on fresh random inputs, against the reference in float64."""
    proofs = []
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 6e-3)):
        for what, vocabulary, options in (
            ("", 1000, Options(-100, 0.0, 0.0, 0.0)),
            (", all options", 2051, Options(7, 0.1, 1e-3, 20.0)),
        ):
            logits = torch.randn(9, vocabulary, device=device).mul_(5.0).to(dtype)
            target = torch.randint(8, vocabulary, (9,), device=device)
            target[3] = options.ignore_index
            weights, dlosses = torch.rand(9, device=device), torch.randn(9, device=device)
            losses, lse = cross_entropy_forward(logits, target, weights, *options)
            found = cross_entropy_backward(dlosses, lse, logits, target, weights, *options)
            exact = logits.double().requires_grad_()
            true = cross_entropy_reference(exact, target, weights.double(), options)
            (true_gradient,) = torch.autograd.grad(true, exact, dlosses.double())
            name = f"{dtype_name(dtype)}{what}"
            proofs += [
                Proof(f"forward, {name}", relative_error(losses, true.detach()), 1e-5),
                Proof(f"backward, {name}", relative_error(found, true_gradient), tolerance),
            ]
    return proofs


catalogue(
    Op("cross_entropy", "cross entropy of logits, forward and backward", prove, lambda: compilations(in_place=False))
)
