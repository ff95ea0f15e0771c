"""What a step is given: gradients, the limit of their norm, a loss scaler's word, a graph that is being captured.

All of it is looked at before anything is changed, and what is wrong raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from fusestep.distributed.groups import local_of
from fusestep.errors import UserError
from fusestep.optim.loading import MASTERS
from fusestep.optim.sharding import Sharding, local_gradient
from fusestep.optim.step_plan import Scaling, State

_layout = attrgetter("layout")


def gathered(
    who: str, members: Sequence[Tensor], sharding: Sharding | None, for_sparse: str, *, is_complex: bool
) -> tuple[list[Tensor | None], bool]:
    """This step's gradients, None where missing, of the parts that lie here; and whether any comes from main_grad.

    Args:
        who, for_sparse: for errors: the optimizer, and what to use for sparse gradients.
        is_complex: whether a parameter is.
    """
    gradients: list[Tensor | None] = [parameter.grad for parameter in members]
    has_main = False
    for number, main in enumerate(map(getattr, members, repeat("main_grad"), repeat(None))):
        if main is not None and isinstance(main, Tensor):
            _check_main_grad(who, members[number], main, number)
            gradients[number] = main
            has_main = True
    present = [gradient for gradient in gradients if gradient is not None]
    if set(map(_layout, present)) - {torch.strided}:
        number = next(n for n, one in enumerate(gradients) if one is not None and one.layout != torch.strided)
        raise RuntimeError(
            f"{who}.step: the gradient of parameter {number} is sparse; use {for_sparse} for it, or build its "
            "embedding with sparse=False. Nothing was changed."
        )
    if sharding is not None:
        gradients = [
            None if gradient is None else local_gradient(who, parameter, gradient, number)
            for number, (parameter, gradient) in enumerate(zip(members, gradients, strict=True))
        ]
        present = [gradient for gradient in gradients if gradient is not None]
    # Autograd leaves a conjugate or a change of sign as a mark on the tensor, and launches read its memory.
    if any(map(Tensor.is_neg, present)) or (is_complex and any(map(Tensor.is_conj, present))):
        gradients = [None if one is None else one.resolve_conj().resolve_neg() for one in gradients]
    return gradients, has_main


def _check_main_grad(who: str, parameter: Tensor, main: Tensor, number: int) -> None:
    if main.shape != parameter.shape or main.device != parameter.device:
        raise UserError(
            f"{who}.step: main_grad of parameter {number} is {tuple(main.shape)} on {main.device}, the parameter is "
            f"{tuple(parameter.shape)} on {parameter.device}; give it the parameter's shape and device. Nothing was "
            "changed."
        )


def check_sizes(
    who: str,
    named: str,
    parameter: Tensor,
    gradient: Tensor,
    state: State,
    dense: Sequence[str],
    scalars: Sequence[str],
) -> None:
    """Refuse what a launch would read and write beyond the end of: it walks all tensors by the parameter's sizes.

    Called where a plan is made, which is whenever one of these tensors became another or got other sizes.

    Args:
        who, named: for errors: the optimizer and the parameter.
        gradient: of the part of the parameter that lies here.
        dense, scalars: the keys of states of the parameter's shape, and of 0-d ones.
    """
    here = local_of(parameter)
    if gradient.shape != here.shape or gradient.device != here.device:
        raise UserError(
            f"{who}.step: the gradient of {named} is {tuple(gradient.shape)} on {gradient.device}, the parameter is "
            f"{tuple(here.shape)} on {here.device}; call zero_grad() when a parameter is given other data, and run "
            "backward again. Nothing was changed."
        )
    for key in (*dense, *MASTERS, *scalars):
        value, shape = state.get(key), () if key in scalars else parameter.shape
        if isinstance(value, Tensor) and value.shape != shape:
            raise UserError(
                f"{who}.step: {key} of {named} is {tuple(value.shape)}, which wants {tuple(shape)} for a parameter of "
                f"{tuple(parameter.shape)}; call optimizer.state.pop(parameter) to start its state anew, or give it "
                "one that fits. Nothing was changed."
            )


def common_max_norm(who: str, groups: Sequence[dict[str, Any]]) -> float | None:
    """max_grad_norm, which all groups have in common."""
    first: float | None = groups[0]["max_grad_norm"]
    for number, group in enumerate(groups):
        if group["max_grad_norm"] != first:
            raise UserError(
                f"{who}.step: max_grad_norm is {group['max_grad_norm']} in group {number} and {first} in group 0; the "
                "norm is taken over all groups, so set one value in all. Nothing was changed."
            )
    return first


def scaling_left_on(optimizer: torch.optim.Optimizer, who: str, has_main: bool) -> Scaling:
    """What torch.amp.GradScaler.step left on an optimizer, if that is who called."""
    scale, found_inf = (
        value if isinstance(value, Tensor) else None
        for value in (getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None))
    )
    if has_main and hasattr(optimizer, "grad_scale") and scale is None:
        raise UserError(
            f"{who}.step: GradScaler.unscale_ was called, which does not reach the gradients in main_grad; leave "
            "unscaling to scaler.step and clip with max_grad_norm. Nothing was changed."
        )
    return Scaling(scale, found_inf)


def check_capture(who: str, members: Sequence[Tensor], gradients: Sequence[Tensor | None], is_capturable: bool) -> None:
    """Refuse a step that a CUDA graph, which is being captured, could not repeat."""
    if not is_capturable:
        raise UserError(
            f"{who}.step: a CUDA graph is being captured, and with capturable=False the graph would keep today's "
            "learning rate for ever; build the optimizer with capturable=True."
        )
    for number, (parameter, gradient) in enumerate(zip(members, gradients, strict=True)):
        if gradient is None and parameter.requires_grad:
            raise UserError(
                f"{who}.step: a CUDA graph is being captured and parameter {number} has no gradient, so no replay "
                "would ever step it; run backward before or within the capture, or call requires_grad_(False) on what "
                "is not trained."
            )
