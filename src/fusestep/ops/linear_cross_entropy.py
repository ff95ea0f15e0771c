"""Linear + cross entropy: the product with a language model's head and its loss, without holding all logits.

    loss = reduce over tokens of cross_entropy(x · Wᵀ + b, target)

with the options of cross_entropy_rows.py, where the formulas stand. The logits of 8192 tokens over 128 256 symbols are
2.1 GB in bf16 and three times that on the way back in plain PyTorch; here those of one chunk exist at a time.

The gradients are computed in one of two ways, in the passes of linear_cross_entropy_passes.py:

- in the forward, chunk by chunk while the logits are at hand: three products in all. Only one number may be unknown
  then, the gradient of the loss, by which backward multiplies: so for reductions "mean" and "sum".
- recomputed in the backward, slice by slice of the vocabulary, from a number that each token keeps: four products, and
  the least memory.

Source of the first way: Hsu et al. 2024, arXiv:2410.10989.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fusestep import dispatch
from fusestep.distributed.tensor_parallel import TensorParallel, tensor_parallel
from fusestep.errors import UserError
from fusestep.ops.cross_entropy import (
    FLOATING,
    Reduction,
    check_targets,
    checked_options,
    cross_entropy_reference,
    divisor,
    flat_weights,
    reduced,
    refuse_across_ranks,
    refuse_second,
    visible_gradient,
)
from fusestep.ops.cross_entropy_kernel import compilations
from fusestep.ops.cross_entropy_parts import Share
from fusestep.ops.cross_entropy_rows import Options, statistics_dtype, uses_triton
from fusestep.ops.dtypes import dtype_name
from fusestep.ops.linear_cross_entropy_ops import (
    linear_cross_entropy_gradients,
    linear_cross_entropy_losses,
    linear_cross_entropy_recomputed,
    run_gradients,
    run_losses,
    run_recomputed,
)
from fusestep.ops.linear_cross_entropy_passes import FP16_FACTOR, OP
from fusestep.ops.registry import Op, Proof, announce_transformed, catalogue, is_plain, relative_error, runs_mapped
from fusestep.ops.scale import run_scale, scale_in_place, scale_op
from fusestep.transforms import is_mapped, is_transformed

WHO = OP
_GRAPH_BREAK = "ranks that share a vocabulary exchange numbers in the middle of the operation"
Gradients = Literal["auto", "forward", "recompute"]


class _Call(NamedTuple):
    """All of a call but its tensors.

    Attributes:
        options: of the loss.
        dtype: that products are computed in.
        sum_dtype: that the weight's gradient is summed in.
        wanted: the gradients, of x, weight and bias, that somebody needs.
        chunk: tokens a chunk; 0 for the rule.
        plain: whether nothing watches or traces the call.
        share: this rank's part of the vocabulary, None for all of it.
    """

    options: Options
    dtype: torch.dtype
    sum_dtype: torch.dtype
    wanted: tuple[bool, bool, bool]
    chunk: int
    plain: bool
    share: Share | None


def linear_cross_entropy_reference(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, token_weights: Tensor | None, options: Options
) -> Tensor:
    """The loss of each token in plain PyTorch, through all logits; x (tokens, width)."""
    return cross_entropy_reference(torch.nn.functional.linear(x, weight, bias), target, token_weights, options)


class _Recomputing(torch.autograd.Function):
    """The loss of each token; backward computes the logits again."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        token_weights: Tensor | None,
        call: _Call,
    ) -> Tensor:
        operands = (x, weight, bias, target, token_weights, call.dtype, call.chunk, *call.options)
        losses: Tensor
        if call.plain or call.share is not None:
            losses, lse = run_losses(*operands, share=call.share)
        else:
            losses, lse = linear_cross_entropy_losses(*operands)
        ctx.save_for_backward(lse, x, weight, bias, target, token_weights)
        ctx.call = call
        return losses

    @staticmethod
    def backward(ctx: Any, dlosses: Tensor) -> Any:
        refuse_second(WHO)
        call: _Call = ctx.call
        refuse_across_ranks(WHO, call.share is not None and is_mapped(dlosses))
        if runs_mapped(WHO, dlosses):
            return *_visible_gradients(call, dlosses, *ctx.saved_tensors[1:]), None, None, None
        operands = (dlosses, *ctx.saved_tensors, call.dtype, *call.wanted, *call.options)
        if (call.plain and is_plain(dlosses)) or call.share is not None:
            gradients = run_recomputed(*operands, share=call.share)
        else:
            gradients = linear_cross_entropy_recomputed(*operands)
        found = (gradient if wanted else None for gradient, wanted in zip(gradients, call.wanted, strict=True))
        return *found, None, None, None


def _visible_gradients(
    call: _Call,
    dlosses: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    token_weights: Tensor | None,
) -> list[Tensor | None]:
    """The gradients of x, weight and bias, None where not wanted, in PyTorch's own operations."""
    x_wanted, weight_wanted, bias_wanted = call.wanted
    rows, matrix = x.detach().to(call.dtype), weight.detach().to(call.dtype)
    logits = torch.nn.functional.linear(rows, matrix, None if bias is None else bias.detach().to(call.dtype))
    dlogits = visible_gradient(dlosses, logits, target, token_weights, call.options)
    narrow = dlogits.to(call.dtype)
    return [
        (narrow @ matrix).to(x.dtype) if x_wanted else None,
        (narrow.mT @ rows).to(weight.dtype) if weight_wanted else None,
        dlogits.sum(0).to(bias.dtype) if bias is not None and bias_wanted else None,
    ]


#: Whether the backward that runs may come again; a torch that does not tell leaves it open.
_keeps_graph: Callable[[], bool] = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)


class _InForward(torch.autograd.Function):
    """`upstream` times the sum of all losses, with its gradients computed in the forward; backward only scales them.

    Until then they are multiplied by `held` instead of `upstream`, where it is given. Backward writes into what is kept
    only where the graph goes with it, so that otherwise it may come again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        token_weights: Tensor | None,
        upstream: Tensor,
        held: Tensor | None,
        call: _Call,
    ) -> Tensor:
        within = upstream if held is None else held
        operands: tuple[Any, ...] = (x, weight, bias, target, token_weights, within, call.dtype, call.sum_dtype)
        operands += (*call.wanted, call.chunk, *call.options)
        if call.plain or call.share is not None:
            losses, dx, dweight, dbias = run_gradients(*operands, share=call.share)
        else:
            losses, dx, dweight, dbias = linear_cross_entropy_gradients(*operands)
        rest = None
        if held is not None:  # the mean over no token is NaN, and its gradients 0
            rest = torch.where((target != call.options.ignore_index).any(), upstream / held, 0.0)
        ctx.save_for_backward(dx, dweight, dbias, rest)
        ctx.call = call
        ctx.dtypes = (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        total: Tensor = losses.sum() * upstream
        return total

    @staticmethod
    def backward(ctx: Any, dtotal: Tensor) -> Any:
        refuse_second(WHO)
        *gradients, rest = ctx.saved_tensors
        scale = dtotal if rest is None else dtotal * rest
        refuse_across_ranks(WHO, ctx.call.share is not None and is_mapped(dtotal))
        is_seen = runs_mapped(WHO, dtotal)
        plain = ctx.call.plain and is_plain(dtotal)
        is_last = plain and not _keeps_graph()

        def scaled(gradient: Tensor, dtype: torch.dtype) -> Tensor:
            if is_seen:
                return (gradient.to(scale.dtype) * scale).to(dtype)
            if is_last and gradient.dtype is dtype:
                return scale_in_place(gradient, scale)
            return (run_scale if plain else scale_op)(gradient, scale, dtype)

        found = (
            scaled(gradient, dtype) if wanted else None
            for gradient, wanted, dtype in zip(gradients, ctx.call.wanted, ctx.dtypes, strict=True)
        )
        return *found, None, None, None, None, None


def _held_in_fp16(target: Tensor, token_weights: Tensor | None, ignore_index: int) -> Tensor:
    """0-d fp32: what gradients in fp16 are multiplied by until backward, whatever the loss is divided by.

    A gradient over many tokens would vanish before a loss scale could save it. Of a token of the largest weight it is
    FP16_FACTOR: so nothing overflows either where few of many tokens count.
    """
    factor = torch.full((), FP16_FACTOR, device=target.device)
    if token_weights is None or not target.numel():
        return factor
    largest = torch.where(target != ignore_index, token_weights.abs(), 0.0).amax()
    return factor / torch.where(largest > 0.0, largest, 1.0)


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: Reduction = "mean",
    token_weights: Tensor | None = None,
    gradients: Gradients = "auto",
    accumulate_dtype: torch.dtype = torch.float32,
    chunk_tokens: int | None = None,
    tp_group: Any = None,
    sequence_parallel: bool = False,
    sequence_dim: int = 1,
) -> Tensor:
    """cross_entropy(x · weightᵀ + bias, target), without holding all logits.

    Args:
        x: (…, width), fp32, bf16 or fp16, fp64 in the reference; any strides.
        weight: (V, width), perhaps an embedding's that the head is tied to. bias: (V,) or None. Of x's dtype, unless
            torch.autocast is enabled, which casts all three as for torch.nn.functional.linear.
        target: (…) int64 or int32, class numbers.
        ignore_index: targets of this value have loss 0 and no gradient, and do not count in the mean.
        label_smoothing: the share of the target that is spread evenly over all V classes, 0 to 1.
        z_loss: adds z_loss · lse² to each token's loss, lse being the logarithm of the softmax's denominator.
        softcap: logits become softcap · tanh(logits / softcap) first; None for no cap.
        reduction: "mean" over the tokens that count, "sum", or "none" for the loss of each token.
        token_weights: (…), what each token's loss is multiplied by; "mean" divides by the sum of the weights of tokens
            that count. They get no gradient.
        gradients: "forward" computes gradients in the forward, three products in all, and holds them until backward;
            "recompute" computes logits again in the backward, four products and less memory; "auto" is the first,
            except for reduction="none", which needs the second.
        accumulate_dtype: what the weight's gradient is summed in over chunks of tokens, with gradients in the forward:
            torch.float32, or torch.bfloat16 to save 2 bytes for each of its elements where products are in bf16: it is
            rounded once more for each chunk, by at most 2⁻⁹ of an element's sum so far, and on a GPU the chunk's share
            as well, while torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction is True, as it is unless
            you say otherwise.
        chunk_tokens: tokens whose logits exist at a time; None for a rule: 2²⁸ bytes of logits, or a quarter of all up
            to 2²⁹, or as many as the weight has, whichever is most.
        tp_group: ranks that share the vocabulary: weight (V / ranks, width) and bias are this rank's rows, in order.
            target and the loss are the same on all ranks, and so is x, whose gradient is added over them, unless
        sequence_parallel: x is this rank's slice of the sequence, along `sequence_dim`, and so is its gradient. No rank
            ever has logits of all classes: the ranks exchange four numbers for each token (cross_entropy_parts.py).

    Returns: the loss in fp32 (fp64 for fp64), 0-d, or of target's shape for "none". NaN, with NaN gradients, where a
        target on a GPU is neither a class nor ignore_index; NaN for the mean over no token, with gradients of 0.
    Raises: UserError, before anything is launched, for arguments that do not fit, and on the CPU for such a target;
        and in a backward with create_graph=True, since the gradient has none.
    """
    parallel = tensor_parallel(WHO, tp_group, sequence_parallel, sequence_dim)
    compiling = torch.compiler.is_compiling()
    if parallel is not None and compiling:
        disabled: Any = torch.compiler.disable(linear_cross_entropy, reason=_GRAPH_BREAK)
        outside: Tensor = disabled(
            x,
            weight,
            target,
            bias,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            softcap=softcap,
            reduction=reduction,
            token_weights=token_weights,
            gradients=gradients,
            accumulate_dtype=accumulate_dtype,
            chunk_tokens=chunk_tokens,
            tp_group=parallel,
        )
        return outside
    options = checked_options(WHO, ignore_index, label_smoothing, z_loss, softcap, reduction)
    dtype = _check_operands(x, weight, bias, target, token_weights)
    ranks = 1 if parallel is None else parallel.size
    check_targets(WHO, target, token_weights, _seen_by(parallel, x.shape[:-1]), ranks * weight.shape[0], ignore_index)
    sum_dtype = _check_modes(dtype, reduction, gradients, accumulate_dtype, chunk_tokens)
    share = None
    if parallel is not None:
        refuse_across_ranks(WHO, not compiling and is_transformed())
        x = parallel.enter(x)
        share = Share(parallel.group, (parallel.rank or 0) * weight.shape[0], ranks * weight.shape[0])
    shape = target.shape
    rows, target = x.reshape(-1, x.shape[-1]), target.reshape(-1).contiguous()
    weights = flat_weights(token_weights, dtype)
    is_differentiated = torch.is_grad_enabled()
    wanted = (
        is_differentiated and rows.requires_grad,
        is_differentiated and weight.requires_grad,
        is_differentiated and bias is not None and bias.requires_grad,
    )
    if not compiling and is_transformed():
        if uses_triton(WHO, x.device, dtype):
            announce_transformed(WHO)
        losses = linear_cross_entropy_reference(rows, weight, target, bias, weights, options)
    else:
        plain = not compiling and is_plain(rows)
        call = _Call(options, dtype, sum_dtype, wanted, chunk_tokens or 0, plain, share)
        if reduction != "none" and gradients != "recompute" and any(wanted):
            if reduction == "mean":
                upstream = divisor(target, weights, ignore_index, statistics_dtype(dtype)).reciprocal()
            else:
                upstream = torch.ones((), dtype=statistics_dtype(dtype), device=x.device)
            held = _held_in_fp16(target, weights, ignore_index) if dtype is torch.float16 else None
            total: Tensor = _InForward.apply(rows, weight, bias, target, weights, upstream, held, call)
            return total
        losses = _Recomputing.apply(rows, weight, bias, target, weights, call)
    loss, _ = reduced(losses, target, weights, ignore_index, reduction)
    return loss.view(shape) if reduction == "none" else loss


def _seen_by(parallel: TensorParallel | None, shape: torch.Size) -> torch.Size:
    """The leading dimensions of x on all ranks together."""
    if parallel is None or parallel.sequence_dim is None or len(shape) <= parallel.sequence_dim:
        return shape
    sizes = list(shape)
    sizes[parallel.sequence_dim] *= parallel.size
    return torch.Size(sizes)


def _check_operands(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, token_weights: Tensor | None
) -> torch.dtype:
    """The dtype that products are computed in.

    Raises: UserError for shapes, dtypes or devices that do not fit.
    """
    if x.dim() < 1 or weight.dim() != 2 or 0 in weight.shape or x.shape[-1] != weight.shape[1]:
        raise UserError(
            f"{WHO}: x has shape {tuple(x.shape)} and weight {tuple(weight.shape)}; pass x (…, width) and weight "
            "(V, width)."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise UserError(f"{WHO}: bias has shape {tuple(bias.shape)}; pass ({weight.shape[0]},), as weight has rows.")
    dispatch.one_device(WHO, x=x, weight=weight, bias=bias, target=target, token_weights=token_weights)
    dtypes = {tensor.dtype for tensor in (x, weight, bias) if tensor is not None}
    unknown = [dtype for dtype in dtypes if dtype not in FLOATING]
    if unknown:
        raise UserError(f"{WHO}: {dtype_name(unknown[0])} is no dtype that it computes in; pass float32 or bfloat16.")
    kind = x.device.type
    # torch.autocast leaves fp64 alone.
    if torch.is_autocast_enabled(kind) and torch.float64 not in dtypes:
        return torch.get_autocast_dtype(kind)
    if len(dtypes) > 1:
        names = ", ".join(sorted(dtype_name(dtype) for dtype in dtypes))
        raise UserError(f"{WHO}: x, weight and bias mix {names}; convert them to one dtype, or use torch.autocast.")
    return x.dtype


def _check_modes(
    dtype: torch.dtype, reduction: str, gradients: str, accumulate_dtype: torch.dtype, chunk_tokens: int | None
) -> torch.dtype:
    """The dtype that the weight's gradient is summed in.

    Raises: UserError for what does not fit.
    """
    if gradients not in ("auto", "forward", "recompute"):
        raise UserError(f'{WHO}: gradients is {gradients!r}; pass "auto", "forward" or "recompute".')
    if gradients == "forward" and reduction == "none":
        raise UserError(
            f'{WHO}: gradients="forward" needs a reduction to one number, and reduction is "none"; pass "recompute".'
        )
    if chunk_tokens is not None and (not isinstance(chunk_tokens, int) or chunk_tokens < 1):
        raise UserError(f"{WHO}: chunk_tokens is {chunk_tokens!r}; pass a whole number of at least 1, or None.")
    if accumulate_dtype is torch.float32:
        return statistics_dtype(dtype)
    if accumulate_dtype is not torch.bfloat16 or dtype is not torch.bfloat16:
        raise UserError(
            f"{WHO}: accumulate_dtype is {dtype_name(accumulate_dtype)} and products are in {dtype_name(dtype)}; pass "
            "torch.float32, or for products in bfloat16 torch.bfloat16."
        )
    return accumulate_dtype


def prove(device: torch.device) -> list[Proof]:
    """Loss and gradients in both ways on fresh random inputs, against the reference in float64."""
    proofs = []
    tokens, width, vocabulary = 11, 40, 203
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        x = torch.randn(tokens, width, device=device).to(dtype).requires_grad_()
        weight = torch.randn(vocabulary, width, device=device).mul_(0.3).to(dtype).requires_grad_()
        bias = torch.randn(vocabulary, device=device).to(dtype).requires_grad_()
        target = torch.randint(vocabulary, (tokens,), device=device)
        target[2] = -100
        options = Options(-100, 0.1, 1e-3, 15.0)
        leaves = [x, weight, bias]
        exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
        true = linear_cross_entropy_reference(exact[0], exact[1], target, exact[2], None, options).sum() / (tokens - 1)
        true_gradients = torch.autograd.grad(true, exact)
        for gradients in ("forward", "recompute"):
            loss = linear_cross_entropy(
                *(x, weight, target, bias),
                **{**options._asdict(), "gradients": gradients, "chunk_tokens": 4},
            )
            found = torch.autograd.grad(loss, leaves)
            errors = [relative_error(a, b) for a, b in zip(found, true_gradients, strict=True)]
            name = f"{gradients}, {dtype_name(dtype)}"
            proofs += [
                Proof(f"loss, {name}", relative_error(loss.detach(), true.detach()), tolerance),
                Proof(f"gradients, {name}", max(errors), tolerance),
            ]
    return proofs


catalogue(Op(WHO, "a head's product and its cross entropy, in chunks", prove, lambda: compilations(in_place=True)))
