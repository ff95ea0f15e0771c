"""Clipping by global norm, for optimizers that do not clip themselves."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from fusestep.distributed.groups import local_of
from fusestep.errors import UserError
from fusestep.ops.gradient_norm import combine_norms, gradient_norm
from fusestep.optim.sharding import local_gradient, sharding_of


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale the gradients in place so that their norm, all together, is at most `max_norm`.

    As torch.nn.utils.clip_grad_norm_, but the norm is accumulated in fp32 or wider whatever the gradients' dtypes
    (torch's is infinite for fp16 gradients of 6e4), and where it is not finite no gradient is changed, instead of all
    becoming NaN or 0. FusedAdam(max_grad_norm=…) clips within its step and saves this pass over memory.

    Where parameters lie over several processes, all of these call this, and get the norm of the whole: one collective.

    Args:
        parameters: one or many; those without a gradient are passed over. A tensor in `main_grad` stands for `.grad`.
        max_norm: above 0.
        norm_type: p of the p-norm; math.inf for the largest magnitude.
        error_if_nonfinite: look at the norm, which waits for the device.

    Returns: 0-d fp32, the norm before clipping, on the first gradient's device.
    Raises: UserError if max_norm or norm_type is not above 0; RuntimeError if error_if_nonfinite and it is not, and
        for sparse gradients, with no gradient changed.
    """
    if not max_norm > 0.0:
        raise UserError(f"clip_grad_norm_: max_norm is {max_norm}; pass a number above 0.")
    if not norm_type > 0.0:
        raise UserError(f"clip_grad_norm_: norm_type is {norm_type}; pass a number above 0, or math.inf.")
    present = [
        (parameter, gradient)
        for parameter in ([parameters] if isinstance(parameters, Tensor) else parameters)
        if (gradient := gradient_of(parameter)) is not None
    ]
    if not present:
        return torch.zeros(())
    if any(gradient.layout != torch.strided for _, gradient in present):
        raise RuntimeError("clip_grad_norm_: a gradient is sparse; build its embedding with sparse=False.")
    gradients = [_unmarked(local_of(gradient)) for _, gradient in present]
    sharding = sharding_of([parameter for parameter, _ in present])
    if sharding is None:
        norm = _norm(gradients, norm_type)
    else:
        parts = [_unmarked(local_gradient("clip_grad_norm_", *both, number)) for number, both in enumerate(present)]
        by_count: dict[int, list[Tensor]] = {}
        for part, count in zip(parts, sharding.replicas, strict=True):
            by_count.setdefault(count, []).append(part)
        norms = [_norm(own, norm_type) for own in by_count.values()]
        norm = sharding.norm(norms, list(by_count), gradients[0].device, order=norm_type)[0]
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(
            f"clip_grad_norm_: the norm of order {norm_type} of the gradients is {norm.item()}, so they cannot be "
            "clipped; pass error_if_nonfinite=False to leave such gradients as they are."
        )
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0).where(torch.isfinite(norm), 1.0)
    for device, own in _by_device(gradients).items():
        here = factor.to(device, non_blocking=device.type == "cuda")
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for gradient in own:
            by_dtype.setdefault(gradient.dtype, []).append(gradient)
        for dtype, same in by_dtype.items():
            # In fp32 also for 16-bit gradients: a factor of 1e-6 is no number of fp16.
            wide = [gradient.float() for gradient in same] if dtype in (torch.float16, torch.bfloat16) else same
            torch._foreach_mul_(wide, here)
            if wide is not same:
                torch._foreach_copy_(same, wide)
    return norm


def _unmarked(gradient: Tensor) -> Tensor:
    """The same memory without the mark of a conjugate or a change of sign: neither changes a norm, nor what a factor
    does to it, and torch's lists of tensors take no such marks.
    """
    if gradient.is_conj():
        gradient = gradient.conj()
    return torch._neg_view(gradient) if gradient.is_neg() else gradient


def gradient_of(parameter: Tensor) -> Tensor | None:
    """What an optimizer of ours steps from: `main_grad` where it is a tensor, else `.grad`."""
    main = getattr(parameter, "main_grad", None)
    return main if isinstance(main, Tensor) else parameter.grad


def _by_device(gradients: list[Tensor]) -> dict[torch.device, list[Tensor]]:
    by_device: dict[torch.device, list[Tensor]] = {}
    for gradient in gradients:
        by_device.setdefault(gradient.device, []).append(gradient)
    return by_device


def _norm(gradients: list[Tensor], norm_type: float) -> Tensor:
    """Of gradients on any devices, on that of the first."""
    norms = [_norm_here(own, norm_type) for own in _by_device(gradients).values()]
    return norms[0] if len(norms) == 1 else _combine(norms, norm_type, gradients[0].device)


def _norm_here(gradients: list[Tensor], norm_type: float) -> Tensor:
    if norm_type == 2.0:
        return gradient_norm(gradients)
    full = [gradient for gradient in gradients if gradient.numel()]
    if not full:
        return torch.zeros((), device=gradients[0].device)
    norms = torch._foreach_norm(full, norm_type, dtype=torch.float64)
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    return total.float()


def _combine(norms: list[Tensor], norm_type: float, device: torch.device) -> Tensor:
    if norm_type == 2.0:
        return combine_norms(norms, device)
    there = [norm.to(device, non_blocking=device.type == "cuda").double() for norm in norms]
    total: Tensor = torch.linalg.vector_norm(torch.stack(there), norm_type)
    return total.float()
