"""Weights and biases as products read them: put together of several parameters, and in the copies that FusedAdam wrote.

In FP8 the copies take the place of a cast (FP8Module._quantized_weight). Elsewhere, under torch.autocast, they take the
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
    def forward(ctx: Any, wholes: tuple[Tensor, ...], counts: tuple[int, ...], *parameters: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.counts = counts
        ctx.heights = [parameter.shape[0] for parameter in parameters]
        ctx.dtype = parameters[0].dtype
        # Detached tensors share the version of the copies: a backward that comes after the next step says so.
        return tuple([whole.detach() for whole in wholes])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        results: list[Tensor | None] = []
        for gradient, count in zip(gradients, ctx.counts, strict=True):
            first = len(results)
            if gradient is None:
                results += [None] * count
                continue
            gradient = gradient.to(ctx.dtype)
            results += [gradient] if count == 1 else gradient.split(ctx.heights[first : first + count])
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
    dtype = _dtype_of_copies(module, x, region, there)
    copies = None if dtype is None else _current_copies(there, dtype)
    if copies is None:
        return [None if one is None else one[0] if len(one) == 1 else torch.cat(one) for one in operands]
    counts = tuple([len(one) for one in there])
    wholes = iter(_apply(tuple(copies), counts, *(parameter for one in there for parameter in one)))
    return [None if one is None else next(wholes) for one in operands]


def _dtype_of_copies(
    module: nn.Module, x: Tensor, region: Region | None, operands: list[tuple[Tensor, ...]]
) -> torch.dtype | None:
    """autocast's dtype, if this call may multiply by copies in it."""
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
    # What is computed from parameters has no optimizer, and what is frozen is never stepped.
    for parameters in operands:
        for parameter in parameters:
            if type(parameter) is not nn.Parameter or parameter.dtype is not torch.float32:
                return None
            if not parameter.requires_grad or parameter.device != x.device:
                return None
    dtype = torch.get_autocast_dtype(kind)
    return dtype if dtype in _HALVES else None


def _current_copies(operands: list[tuple[Tensor, ...]], dtype: torch.dtype) -> list[Tensor] | None:
    """The copies of all operands, if all are current; else the optimizer is asked for what is missing."""
    found: list[Tensor] = []
    for parameters in operands:
        part = part_of(parameters[0])
        copies = None if part is None else part.copies
        if isinstance(copies, PlainCopies) and copies.dtype is dtype and copies.is_current(*parameters):
            assert copies.values is not None
            found.append(copies.values)
        else:
            attach_plain(parameters, dtype)
    return found if len(found) == len(operands) else None
