"""What LayerNorm and RMSNorm share above their raw ops: the gradient, and the function behind both.

The gradient is an autograd.Function around the raw ops. Backward keeps the normalised input, or with
memory_efficient=True the output in its place: x̂ = (y − bias) / weight. A weight near zero, or small beside its bias,
makes that impossible; then the input is kept instead (`_output_suffices`), so that gradients are right for all weights.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusestep import dispatch
from fusestep.errors import UserError
from fusestep.ops.layouts import keep
from fusestep.ops.norm_ops import (
    KnownBackward,
    KnownForward,
    copy_dtype_of,
    in_dtype,
    known_backward,
    known_forward,
    norm_backward,
    norm_forward,
    norm_forward_residual,
    op_name,
    run_backward,
    run_forward,
    sum_dtype,
    unsupported,
    uses_triton,
)
from fusestep.ops.norm_reference import backward_reference, computing_dtype, forward_reference
from fusestep.ops.registry import announce_transformed, is_plain, runs_mapped, shows_gradient
from fusestep.transforms import is_transformed

FLOATING = frozenset((torch.float32, torch.bfloat16, torch.float16, torch.float64))


class _Call:
    """What is known of a call from its arguments' layouts: worked out once, and looked up by every later call.

    Attributes:
        width, eps, centred, dtype: of a row, of the norm, and of y.
        forward: how the kernel is launched; None until it was, and where the reference runs.
        backwards: likewise, by what the forward does not tell.
    """

    __slots__ = ("backwards", "centred", "dtype", "eps", "forward", "width")

    def __init__(self, width: int, eps: float, centred: bool, dtype: torch.dtype) -> None:
        self.width, self.eps, self.centred, self.dtype = width, eps, centred, dtype
        self.forward: KnownForward | None = None
        self.backwards: dict[tuple[Any, ...], KnownBackward] = {}

    def run_forward(
        self, x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """(y, x + residual or None, statistics), without the op."""
        known = self.forward
        if known is not None and dispatch.uses_triton(known.op, known.device):
            return known(x, residual, weight, bias)
        arguments = (x, residual, weight, bias, self.width, self.eps, self.centred, self.dtype)
        result = run_forward(*arguments)
        self.forward = known_forward(*arguments)
        return result

    def run_backward(
        self,
        dy: Tensor,
        dsum: Tensor | None,
        kept: Tensor,
        statistics: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        from_output: bool,
        dtype: torch.dtype,
        weight_gradient: bool,
        bias_gradient: bool,
        copy_dtype: torch.dtype | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """(dx, dweight, dbias, dx in `copy_dtype`), without the op; None for what is not wanted."""
        of_sum = None if dsum is None else (dsum.stride(), dsum.dtype)
        # Hooks on saved tensors may give back other strides.
        options = (from_output, dtype, weight_gradient, bias_gradient, copy_dtype)
        key = (dy.stride(), dy.dtype, of_sum, kept.stride(), *options)
        known = self.backwards.get(key)
        if known is not None and dispatch.uses_triton(known.op, known.device):
            return known(dy, dsum, kept, statistics, weight, bias)
        arguments = (dy, dsum, kept, statistics, weight, bias, self.width, self.centred, *options)
        result = run_backward(*arguments)
        known = known_backward(*arguments)
        if known is not None:
            self.backwards[key] = known
        return result


class _Norm(torch.autograd.Function):
    """y, or (y, x + residual), with the gradient in one kernel.

    `settings` are the call, whether to keep the output for backward, whether x is plain, and whether to return x in the
    place of x + residual.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        settings: tuple[_Call, bool, bool, bool],
    ) -> Any:
        call, keep_output, plain, returns_input = settings
        if plain:
            y, total, statistics = call.run_forward(x, residual, weight, bias)
        elif residual is None:
            y, statistics = norm_forward(x, weight, bias, call.width, call.eps, call.centred, call.dtype)
            total = None
        else:
            y, total, statistics = norm_forward_residual(
                x, residual, weight, bias, call.width, call.eps, call.centred, call.dtype
            )
        normed = x if total is None else total
        ctx.save_for_backward(y if keep_output else normed, statistics, weight, bias)
        ctx.settings = settings
        ctx.dtypes = (normed.dtype, x.dtype, None if residual is None else residual.dtype)
        if total is None and not returns_input:
            return y
        ctx.set_materialize_grads(False)
        return y, normed

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dsum: Tensor | None = None) -> Any:
        kept, statistics, weight, bias = ctx.saved_tensors
        call, from_output, plain, _ = ctx.settings
        dtype, x_dtype, residual_dtype = ctx.dtypes
        x_needed, residual_needed, weight_needed, bias_needed, _ = ctx.needs_input_grad
        dx_copy = None
        if dy is None:  # only the sum was used
            dx, dweight, dbias = dsum, None, None
        elif shows_gradient(op_name(call.centred), dy) or (
            dsum is not None and runs_mapped(op_name(call.centred), dsum)
        ):
            dx, dweight, dbias = _visible_backward(
                dy, dsum, kept, statistics, weight, bias, call.width, call.eps, call.centred, from_output, dtype
            )
        else:
            copy_dtype = copy_dtype_of(
                dtype, x_dtype if x_needed else None, residual_dtype if residual_needed else None
            )
            options = (from_output, dtype, weight_needed, bias_needed, copy_dtype)
            operands = (dy, dsum, kept, statistics, weight, bias)
            if plain and is_plain(dy):
                dx, dweight, dbias, dx_copy = call.run_backward(*operands, *options)
            else:
                dx, dweight, dbias, dx_copy = norm_backward(*operands, call.width, call.centred, *options)
        return (
            None if dx is None or not x_needed else in_dtype(x_dtype, dx, dx_copy),
            None if dx is None or not residual_needed else in_dtype(residual_dtype, dx, dx_copy),
            dweight if weight_needed else None,
            dbias if bias_needed else None,
            None,
        )


#: Function.apply less its part in Python, two fifths of its cost: that serves transforms of torch.func under way, which
#: `normalise` rules out, and tensors that outlived one.
_apply_plainly = super(torch.autograd.Function, _Norm).apply


def _outlived(*tensors: Tensor | None) -> bool:
    """Whether a tensor has outlived the transform of torch.func that made it, and is still wrapped."""
    is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    for tensor in tensors:  # noqa: SIM110 (a generator costs the host more than what it asks)
        if tensor is not None and is_wrapped(tensor):
            return True
    return False


def _visible_backward(
    dy: Tensor,
    dsum: Tensor | None,
    x: Tensor,
    statistics: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    width: int,
    eps: float,
    centred: bool,
    from_output: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The gradients in PyTorch's own operations, which transforms see, and as a graph of them for a gradient of theirs.

    x is what was normalised, or what came of it.
    """
    if torch.is_grad_enabled():
        if from_output:
            raise RuntimeError(
                f"{op_name(centred)} with memory_efficient=True keeps no input and cannot be differentiated twice; "
                "build it with memory_efficient=False."
            )
        _, _, statistics = forward_reference(x, None, weight, bias, width, eps, centred, dtype)
    dx, dweight, dbias = backward_reference(dy, dsum, x, statistics, weight, bias, width, centred, from_output, dtype)
    return (
        dx,
        None if weight is None else dweight.to(weight.dtype).reshape(weight.shape),
        None if bias is None else dbias.to(bias.dtype).reshape(bias.shape),
    )


def _output_suffices(x: Tensor, weight: Tensor | None, bias: Tensor | None, centred: bool) -> bool:
    """Whether x̂ can be had from the output: |weight| ≥ 1/64 and |bias| ≤ 4 |weight| everywhere.

    Then the rounding of y to its dtype, unit roundoff u, costs x̂ at most u · (|x̂| + 4). The answer is on the device:
    asking for it costs the host a wait in every forward. Where waiting is impossible, in a captured graph and under
    torch.compile (whose partitioner decides itself what is kept), the input is kept.
    """
    if weight is None and bias is None:
        return True
    if torch.compiler.is_compiling():
        return False
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    scale = torch.ones((), device=x.device) if weight is None else weight.detach().abs()
    fine = (scale >= 1 / 64).all()
    if bias is not None:
        fine &= (bias.detach().abs() <= 4 * scale).all()
    if fine.item():
        return True
    _tell_that_input_is_kept(op_name(centred))
    return False


@functools.cache
def _tell_that_input_is_kept(who: str) -> None:
    """Say so once a process: no gradient suffers, but no memory is saved."""
    dispatch.logger.warning(
        "%s(memory_efficient=True) keeps its input: a weight is below 1/64 or below a quarter of its bias, so that the "
        "output does not determine the normalised input",
        who,
    )


# The function behind both


def normalise(
    centred: bool,
    who: str,
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float | None,
    residual: Tensor | None,
    memory_efficient: bool,
    dtype: torch.dtype | None = None,
    *,
    returns_input: bool = False,
) -> Any:
    """Check the arguments, choose the output's dtype, and run; see layer_norm.layer_norm and rms_norm.rms_norm.

    Args:
        dtype: that of y where the caller knows better than torch's rule: a norm of another library has its own.
        returns_input: without a residual, return (y, x) all the same. The gradient that reaches this x is added by the
            norm's own backward, where autograd would add it to that of the other in a pass of its own.
    """
    shape = tuple(normalized_shape)
    tensors = (x, residual, weight, bias)
    compiling = torch.compiler.is_compiling()
    if compiling:  # dynamo has no use for what is kept between calls
        call = _checked(centred, who, shape, eps, dtype, *tensors)
    else:
        described = [None if t is None else (t.shape, t.stride(), t.dtype, t.device) for t in tensors]
        key = (centred, who, shape, eps, dtype, torch.is_autocast_enabled("cuda"), *described)
        known = _calls.get(key)
        call = keep(_calls, key, _checked(centred, who, shape, eps, dtype, *tensors)) if known is None else known
        if is_transformed():
            if uses_triton(centred, x.device, computing_dtype(*tensors)):
                announce_transformed(who)
            y, total, _ = forward_reference(*tensors, call.width, call.eps, centred, call.dtype)
            if residual is None:
                return (y, x) if returns_input else y
            return y, total
    keep_output = memory_efficient and torch.is_grad_enabled() and _output_suffices(x, weight, bias, centred)
    plain = not compiling and is_plain(x) and not _outlived(*tensors)
    apply = _apply_plainly if plain else _Norm.apply
    return apply(*tensors, (call, keep_output, plain, returns_input))


#: Whether torch.autocast has torch's own norm give fp32 on CUDA, by whether it centres: RMSNorm after 2.11.
_IS_WIDENED = {
    centred: torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "AutocastCUDA")
    for centred, name in ((True, "layer_norm"), (False, "rms_norm"))
}

#: By options and layouts; see `keep`.
_calls: dict[tuple[Any, ...], _Call] = {}


def explain(centred: bool, weight: Tensor | None, bias: Tensor | None) -> dispatch.Choice:
    """What a norm with these parameters gets; one without any is taken to be on torch's default device."""
    device = torch.get_default_device() if weight is None else weight.device
    reason = unsupported(computing_dtype(weight, bias))
    return dispatch.explain_choice(op_name(centred), device.type, device.index, reason)


def _checked(
    centred: bool,
    who: str,
    shape: tuple[int, ...],
    eps: float | None,
    output_dtype: torch.dtype | None,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
) -> _Call:
    """The call, or one sentence for what cannot be normalised, before anything is written."""
    if not shape or x.shape[-len(shape) :] != shape:
        last = f"last dimension {x.shape[-1]}" if len(shape) == 1 and x.shape else f"shape {tuple(x.shape)}"
        mend = f"(..., {', '.join(map(str, shape))})" if shape else "at least one dimension to normalise over"
        raise UserError(
            f"{who}: x has {last} but normalized_shape is {shape}; pass x of shape {mend}, or normalise over "
            f"{tuple(x.shape[-len(shape) :]) if shape else 'the last dimension'}."
        )
    if x.dtype not in FLOATING:
        raise UserError(f"{who}: x has dtype {x.dtype}; pass float32, bfloat16, float16 or float64.")
    for name, other, wanted in (("weight", weight, shape), ("bias", bias, shape), ("residual", residual, x.shape)):
        if other is None:
            continue
        if other.shape != wanted:
            raise UserError(f"{who}: {name} has shape {tuple(other.shape)}; pass one of shape {tuple(wanted)}.")
        if other.dtype not in FLOATING:
            raise UserError(f"{who}: {name} has dtype {other.dtype}; pass a floating-point tensor.")
        if other.device != x.device:
            raise UserError(f"{who}: {name} is on {other.device} and x on {x.device}; move them to one device.")
    dtype = x.dtype if residual is None else sum_dtype(x, residual)
    if output_dtype is not None:
        dtype = output_dtype
    elif x.is_cuda and dtype is not torch.float64 and _IS_WIDENED[centred] and torch.is_autocast_enabled("cuda"):
        dtype = torch.float32
    if eps is None:
        eps = torch.finfo(computing_dtype(x, residual, weight, None)).eps
    return _Call(math.prod(shape), eps, centred, dtype)
