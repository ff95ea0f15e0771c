"""amp_C: functions of lists of tensors, as scripts call them through apex.multi_tensor_apply.

The order of arguments is Apex's; the first, the size of a chunk, means nothing here. The second, the flag, is an int32
tensor of one element that becomes 1 where something is not finite; nothing waits for it. All arithmetic is fp32, the
lists may mix dtypes and layouts, and CPU tensors are served.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from fusestep.compat.implementation import ran
from fusestep.compat.names import module_getattr
from fusestep.compat.report import served
from fusestep.ops.adagrad import adagrad_
from fusestep.ops.adam import adam_
from fusestep.ops.gradient_norm import gradient_norm
from fusestep.ops.lamb import lamb_
from fusestep.ops.novograd import novograd_
from fusestep.ops.sgd import sgd_

__all__ = [
    "multi_tensor_adagrad",
    "multi_tensor_adam",
    "multi_tensor_adam_capturable",
    "multi_tensor_adam_capturable_master",
    "multi_tensor_axpby",
    "multi_tensor_l2norm",
    "multi_tensor_l2norm_mp",
    "multi_tensor_l2norm_scale",
    "multi_tensor_lamb",
    "multi_tensor_novograd",
    "multi_tensor_scale",
    "multi_tensor_sgd",
    "multi_tensor_unscale_l2norm",
    "update_scale_hysteresis",
]

NOT_SERVED = {
    "multi_tensor_lamb_mp": ("use apex.optimizers.FusedMixedPrecisionLamb", False),
    "multi_tensor_lamb_stage1_cuda": ("use apex.optimizers.FusedLAMB", False),
    "multi_tensor_lamb_stage2_cuda": ("use apex.optimizers.FusedLAMB", False),
}

__getattr__ = module_getattr(__name__, NOT_SERVED)

Lists = Sequence[Sequence[Tensor]]


def _raise_flag(flag: Tensor, is_fine: Tensor) -> None:
    """Make the flag 1 where `is_fine`, 0-d, is False; a flag that is up stays up."""
    is_bad = (~is_fine).to(flag.device, flag.dtype, non_blocking=True)
    torch.maximum(flag, is_bad.expand_as(flag), out=flag)


def _all_finite(tensors: Sequence[Tensor]) -> Tensor:
    """0-d bool: whether every element of all tensors of one device is finite."""
    full = [tensor for tensor in tensors if tensor.numel()]
    if not full:
        return torch.ones((), dtype=torch.bool)
    largest = torch.stack([one.float() for one in torch._foreach_norm(full, math.inf)])
    return largest.isfinite().all()


def _wide(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor if tensor.dtype is torch.float64 else tensor.float() for tensor in tensors]


@torch.no_grad()
def multi_tensor_scale(chunk_size: int, flag: Tensor, lists: Lists, scale: float, /) -> None:  # noqa: ARG001
    """lists = [in, out]: out ← in · scale. A non-finite input raises the flag and is written all the same."""
    served("amp_C.multi_tensor_scale", "torch._foreach_mul")
    inputs, outputs = lists
    _raise_flag(flag, _all_finite(inputs))
    if inputs:
        torch._foreach_copy_(list(outputs), torch._foreach_mul(_wide(inputs), scale))


@torch.no_grad()
def multi_tensor_axpby(
    chunk_size: int,  # noqa: ARG001
    flag: Tensor,
    lists: Lists,
    a: float,
    b: float,
    arg_to_check: int,
    /,
) -> None:
    """lists = [x, y, out]: out ← a·x + b·y. Of the inputs x (0), y (1) or both (-1) may raise the flag."""
    served("amp_C.multi_tensor_axpby", "torch._foreach_add")
    xs, ys, outputs = lists
    _raise_flag(flag, _all_finite([*(xs if arg_to_check in (-1, 0) else ()), *(ys if arg_to_check in (-1, 1) else ())]))
    if xs:
        scaled = torch._foreach_mul(_wide(xs), a)
        torch._foreach_copy_(list(outputs), torch._foreach_add(scaled, torch._foreach_mul(_wide(ys), b)))


def _norms(name: str, flag: Tensor, tensors: Sequence[Tensor], per_tensor: bool | None) -> tuple[Tensor, Tensor]:
    """(norm of all, (1,) fp32; of each, (n,) or (0,) fp32). A norm that is not finite raises the flag."""
    if not tensors:
        nothing = torch.zeros(1, device=flag.device)
        return nothing, nothing[:0]
    ran(f"amp_C.{name}", "fusestep.ops.gradient_norm", "gradient_norm", tensors[0])
    norm = gradient_norm(tensors)
    _raise_flag(flag, norm.isfinite())
    if not per_tensor:
        return norm.reshape(1), norm.new_empty(0)
    # In float64, where no square of fp32 overflows.
    each = torch.stack(torch._foreach_norm(list(tensors), 2, dtype=torch.float64))
    return norm.reshape(1), each.float()


@torch.no_grad()
def multi_tensor_l2norm(
    chunk_size: int,  # noqa: ARG001
    flag: Tensor,
    lists: Lists,
    per_tensor: bool | None = None,
    /,
) -> tuple[Tensor, Tensor]:
    """lists = [x]: (the L2 norm of all together, (1,); of each, (n,), or (0,) unless asked for), fp32."""
    return _norms("multi_tensor_l2norm", flag, lists[0], per_tensor)


@torch.no_grad()
def multi_tensor_l2norm_mp(
    chunk_size: int,  # noqa: ARG001
    flag: Tensor,
    lists: Lists,
    per_tensor: bool | None = None,
    /,
) -> tuple[Tensor, Tensor]:
    """As multi_tensor_l2norm; where something is not finite the norm is not either."""
    return _norms("multi_tensor_l2norm_mp", flag, lists[0], per_tensor)


@torch.no_grad()
def multi_tensor_l2norm_scale(
    chunk_size: int, flag: Tensor, lists: Lists, scale: float, per_tensor: bool | None = None, /
) -> tuple[Tensor, Tensor]:
    """lists = [in, out]: out ← in · scale, and the norms of `in` as it was before."""
    norms = _norms("multi_tensor_l2norm_scale", flag, lists[0], per_tensor)
    multi_tensor_scale(chunk_size, flag, lists, scale)
    return norms


@torch.no_grad()
def multi_tensor_unscale_l2norm(
    chunk_size: int,  # noqa: ARG001
    flag: Tensor,
    lists: Lists,
    inv_scale: Tensor,
    per_tensor: bool | None = None,
    /,
) -> tuple[Tensor, Tensor]:
    """lists = [x]: the norms of x · inv_scale, without writing that."""
    norm, each = _norms("multi_tensor_unscale_l2norm", flag, lists[0], per_tensor)
    scale = inv_scale.to(norm.device, torch.float32).abs().reshape(())
    return norm * scale, each * scale


def multi_tensor_adam(
    chunk_size: int,  # noqa: ARG001
    flag: Tensor,  # noqa: ARG001
    lists: Lists,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    /,
) -> None:
    """lists = [g, p, m, v]: one step of Adam (mode 0, L2) or AdamW (mode 1), which is the step-th."""
    options = (lr, beta1, beta2, eps, torch.tensor(float(step)), mode, bias_correction, weight_decay)
    _adam("multi_tensor_adam", lists, options, None, None)


def multi_tensor_adam_capturable(
    chunk_size: int,  # noqa: ARG001
    flag: Tensor,
    lists: Lists,
    lr: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    step: Tensor,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    inv_scale: Tensor,
    /,
) -> None:
    """As multi_tensor_adam, of g · inv_scale, which is not written back; nothing happens where the flag is up."""
    options = (lr, beta1, beta2, eps, step, mode, bias_correction, weight_decay)
    _adam("multi_tensor_adam_capturable", lists, options, flag, inv_scale)


def multi_tensor_adam_capturable_master(
    chunk_size: int,  # noqa: ARG001
    flag: Tensor,
    lists: Lists,
    lr: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    step: Tensor,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    inv_scale: Tensor,
    /,
) -> None:
    """lists = [g, p, m, v, master]: as multi_tensor_adam_capturable, stepping the fp32 masters, which p follows."""
    options = (lr, beta1, beta2, eps, step, mode, bias_correction, weight_decay)
    _adam("multi_tensor_adam_capturable_master", lists, options, flag, inv_scale)


@torch.no_grad()
def _adam(
    name: str,
    lists: Lists,
    options: tuple[float | Tensor, float, float, float, Tensor, int, int, float],
    skip: Tensor | None,
    inv_scale: Tensor | None,
) -> None:
    gradients, parameters, first, second, *masters = lists
    if not parameters:
        return
    ran(f"amp_C.{name}", "fusestep.ops.adam", "adam", parameters[0])
    lr, beta1, beta2, eps, step, mode, bias_correction, weight_decay = options
    before = step.to(torch.float32).reshape(()) - 1.0
    adam_(
        parameters,
        gradients,
        first,
        second,
        [before.clone() for _ in parameters],
        lr=lr.reshape(()) if isinstance(lr, Tensor) else lr,
        masters=masters[0] if masters else (),
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        weight_decay=weight_decay,
        adam_w_mode=mode == 1,
        bias_correction=bool(bias_correction),
        divisor=None if inv_scale is None else inv_scale.reshape(()).double().reciprocal().float(),
        skip=None if skip is None else skip.reshape(()),
    )


@torch.no_grad()
def multi_tensor_lamb(
    chunk_size: int,  # noqa: ARG001
    flag: Tensor,  # noqa: ARG001
    lists: Lists,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    bias_correction: int,
    weight_decay: float,
    grad_averaging: int,
    mode: int,
    global_grad_norm: Tensor,
    max_grad_norm: float,
    use_nvlamb: bool | None = None,
    /,
) -> None:
    """lists = [g, p, m, v]: one step of LAMB, which is the step-th, of gradients clipped from their global norm.

    g is left as it is. max_grad_norm 0 clips nothing.
    """
    gradients, parameters, first, second = lists
    if not parameters:
        return
    ran("amp_C.multi_tensor_lamb", "fusestep.ops.lamb", "lamb", parameters[0])
    norm = global_grad_norm.reshape(()).to(parameters[0].device, torch.float32)
    divisor = (norm / max_grad_norm).clamp(min=1.0).nan_to_num(nan=1.0) if max_grad_norm else None
    with _fp32(first) as wide_first, _fp32(second) as wide_second:
        lamb_(
            parameters,
            gradients,
            wide_first,
            wide_second,
            _steps(step, parameters),
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            eps=eps,
            weight_decay=weight_decay,
            adam_w_mode=mode == 1,
            bias_correction=bool(bias_correction),
            grad_averaging=bool(grad_averaging),
            use_nvlamb=bool(use_nvlamb),
            divisor=divisor,
        )


@torch.no_grad()
def multi_tensor_sgd(
    chunk_size: int,  # noqa: ARG001
    flag: Tensor,
    lists: Lists,
    weight_decay: float,
    momentum: float,
    dampening: float,
    lr: float,
    nesterov: bool,
    first_run: bool,
    wd_after_momentum: bool,
    scale: float,
    /,
) -> None:
    """lists = [g, p, m] or [g, p, m, copy]: one step of SGD of g · scale; nothing happens where the flag is up.

    A copy takes p in its own dtype. With first_run the buffers m become the gradients.
    """
    gradients, parameters, buffers, *copies = lists
    if not parameters:
        return
    ran("amp_C.multi_tensor_sgd", "fusestep.ops.sgd", "sgd", parameters[0])
    device = parameters[0].device
    with _fp32(buffers) as wide:
        sgd_(
            parameters,
            gradients,
            wide if momentum else (),
            _steps(1 if first_run else 2, parameters),
            lr=lr,
            momentum=momentum,
            dampening=dampening,
            weight_decay=weight_decay,
            nesterov=nesterov,
            wd_after_momentum=wd_after_momentum,
            divisor=torch.tensor(1.0 / scale, device=device),
            skip=flag.reshape(()).to(device, torch.float32),
        )
    if copies:
        torch._foreach_copy_(list(copies[0]), list(parameters))


@torch.no_grad()
def multi_tensor_novograd(
    chunk_size: int,  # noqa: ARG001
    flag: Tensor,  # noqa: ARG001
    lists: Lists,
    grad_norms: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    bias_correction: int,
    weight_decay: float,
    grad_averaging: int,
    moment_mode: int,
    norm_type: int,
    /,
) -> None:
    """lists = [g, p, m]: one step of NovoGrad, which is the step-th.

    Args:
        grad_norms: (n,) fp32, the running norm of each gradient; updated. At step 1 too it is what it starts from.
        moment_mode: 0 with the decay inside the moment, 1 without. norm_type: 2, or 0 for the largest magnitude.
    """
    gradients, parameters, first = lists
    if not parameters:
        return
    ran("amp_C.multi_tensor_novograd", "fusestep.ops.novograd", "novograd", parameters[0])
    with _fp32(first) as wide:
        novograd_(
            parameters,
            gradients,
            wide,
            list(grad_norms.unbind()),
            _steps(step, parameters),
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            eps=eps,
            weight_decay=weight_decay,
            bias_correction=bool(bias_correction),
            reg_inside_moment=moment_mode == 0,
            grad_averaging=bool(grad_averaging),
            init_zero=True,
            is_max=norm_type == 0,
        )


@torch.no_grad()
def multi_tensor_adagrad(
    chunk_size: int,  # noqa: ARG001
    flag: Tensor,  # noqa: ARG001
    lists: Lists,
    lr: float,
    eps: float,
    mode: int,
    weight_decay: float,
    /,
) -> None:
    """lists = [g, p, h]: one step of Adagrad; mode 0 adds the decay to g, mode 1 to what lr multiplies."""
    gradients, parameters, sums = lists
    if not parameters:
        return
    ran("amp_C.multi_tensor_adagrad", "fusestep.ops.adagrad", "adagrad", parameters[0])
    with _fp32(sums) as wide:
        adagrad_(
            parameters,
            gradients,
            wide,
            _steps(1, parameters),
            lr=lr,
            eps=eps,
            weight_decay=weight_decay,
            adagrad_w_mode=mode == 1,
        )


def _steps(step: int, parameters: Sequence[Tensor]) -> list[Tensor]:
    """The counts before the step-th step."""
    return [torch.tensor(step - 1.0) for _ in parameters]


@contextmanager
def _fp32(states: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """States as the ops take them; those in 16 bits are written back at the end."""
    wide = _wide(states)
    yield wide
    for state, value in zip(states, wide, strict=True):
        if state is not value:
            state.copy_(value)


@torch.no_grad()
def update_scale_hysteresis(
    current_scale: Tensor,
    growth_tracker: Tensor,
    hysteresis_tracker: Tensor,
    found_inf: Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    hysteresis: int,
    /,
) -> Tensor:
    """Update a loss scale in place that shrinks only after `hysteresis` steps with overflow; no wait.

    Args:
        current_scale, found_inf: fp32 of one element. growth_tracker, hysteresis_tracker: int32 of one element.
    Returns: current_scale.
    """
    served("amp_C.update_scale_hysteresis", "torch")
    is_bad = found_inf > 0
    left = torch.where(is_bad, hysteresis_tracker - 1, hysteresis)
    grown = growth_tracker + 1
    is_due = ~is_bad & (grown == growth_interval)
    larger = current_scale * growth_factor
    larger = torch.where(larger.isfinite(), larger, current_scale)
    shrunk = torch.where(left > 0, current_scale, current_scale * backoff_factor)
    current_scale.copy_(torch.where(is_bad, shrunk, torch.where(is_due, larger, current_scale)))
    growth_tracker.copy_(torch.where(is_bad | is_due, 0, grown))
    hysteresis_tracker.copy_(left)
    return current_scale
