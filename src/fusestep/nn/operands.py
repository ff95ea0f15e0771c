"""Weights and biases as products read them: put together of several parameters, and in the copies that FusedAdam wrote.

In FP8 the copies take the place of a cast (quantized_weights.py). Elsewhere, under torch.autocast, they take the
place of autocast's own: `plain_operands` gives a product the parameters as they are, or their copies in autocast's
dtype. Either way the gradient goes to each parameter as through a cast and torch.cat.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fusestep.fp8.context import Region
from fusestep.fp8.held import part_of
from fusestep.fp8.plain_copies import PlainCopies, attach_plain
from fusestep.nn.fp8_module import plain_apply

_HALVES = (torch.bfloat16, torch.float16)


class _Wholes(torch.autograd.Function):
    """Tensors that stand for parameters put together; each parameter gets its rows of the gradient, in its dtype.

    `wholes` are as many as `counts`, each of which says for how many of the parameters.
    """

    @staticmethod
    def forward(ctx: Any, wholes: Sequence[Tensor], counts: Sequence[int], *parameters: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        is_split = len(parameters) > len(wholes)
        ctx.of = parameters[0].dtype, counts, [parameter.shape[0] for parameter in parameters] if is_split else None
        # Detached tensors share the version of the copies: a backward that comes after the next step says so.
        return tuple([whole.detach() for whole in wholes])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        dtype, counts, heights = ctx.of
        if heights is None:
            return None, None, *[None if gradient is None else gradient.to(dtype) for gradient in gradients]
        results: list[Tensor | None] = []
        for gradient, count in zip(gradients, counts, strict=True):
            first = len(results)
            results += [None] * count if gradient is None else gradient.to(dtype).split(heights[first : first + count])
        return None, None, *results


_apply = plain_apply(_Wholes)


def stand_in(parameters: Sequence[Tensor]) -> Tensor:
    """A matrix of the shape and dtype of parameters put together by rows, without values, that takes their gradient.

    What a product in FP8 is given that multiplies by a cast.
    """
    rows = sum(parameter.shape[0] for parameter in parameters)
    empty = parameters[0].detach().new_empty(1).expand(rows, parameters[0].shape[1])
    whole: Tensor = _apply((empty,), (len(parameters),), *parameters)[0]
    return whole


def plain_operands(
    module: nn.Module, x: Tensor, region: Region | None, *operands: tuple[Tensor, ...] | None
) -> list[Tensor | None]:
    """What torch's product multiplies by and adds for each operand, the parameters of a weight or bias.

    Where torch.autocast would cast them and the module is training, that is the copies in autocast's dtype that the
    optimizer wrote, once it has, and until then it is asked for them.

    Args:
        module: whose parameters they are.
        x: the product's other operand.
        region: the FP8 region of the call; one that calibrates looks at the parameters themselves.
    """
    there = [operand for operand in operands if operand is not None]
    copies = _current_copies(module, x, region, there)
    if copies is None:
        return [None if one is None else one[0] if len(one) == 1 else torch.cat(one) for one in operands]
    wholes = iter(_apply(copies, [len(one) for one in there], *[parameter for one in there for parameter in one]))
    return [None if one is None else next(wholes) for one in operands]


def _current_copies(
    module: nn.Module, x: Tensor, region: Region | None, operands: list[tuple[Tensor, ...]]
) -> list[Tensor] | None:
    """The copies of all operands, if this call may multiply by them and all are current.

    Else the optimizer is asked for what is missing.
    """
    kind = x.device.type
    if (
        not torch.is_autocast_enabled(kind)
        or not module.training
        or region is not None
        or not torch.is_grad_enabled()
        or torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or x.dtype is torch.float64  # which autocast leaves alone
    ):
        return None
    dtype = torch.get_autocast_dtype(kind)
    found: list[Tensor] = []
    for parameters in operands:
        copies = _asked_for(parameters, dtype)
        if copies is None:
            if not _may_have_copies(parameters, x, dtype):
                return None
            attach_plain(parameters, dtype)
        elif copies.values is not None and copies.is_current(*parameters):
            found.append(copies.values)
    return found if len(found) == len(operands) else None


def _asked_for(parameters: tuple[Tensor, ...], dtype: torch.dtype) -> PlainCopies | None:
    """The copies that the optimizer was asked for before."""
    part = part_of(parameters[0])
    copies = None if part is None else part.copies
    if not isinstance(copies, PlainCopies) or copies.dtype is not dtype:
        return None
    return copies if len(parameters) == 1 or copies.are_of(parameters) else None


def _may_have_copies(parameters: tuple[Tensor, ...], x: Tensor, dtype: torch.dtype) -> bool:
    """Whether autocast would cast these, and an optimizer may step them.

    What is computed from parameters has no optimizer, and what is frozen is never stepped.
    """
    return dtype in _HALVES and all(
        type(one) is nn.Parameter and one.dtype is torch.float32 and one.requires_grad and one.device == x.device
        for one in parameters
    )
