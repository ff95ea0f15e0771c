"""Weights and biases as products read them: put together of several parameters, and in the copies that FusedAdam wrote.

In FP8 the copies take the place of a cast: of weights in quantized_weights.py, of biases in `in_place_of_bias`.
Elsewhere, under torch.autocast, they take the place of autocast's own: `autocast_operands` gives what a product may
multiply by, which biased_linear.py then does.
Where there is none yet, or a script wrote parameters since, the call casts them itself: whether copies are at hand
decides on time, not on a bit of a result, so that a run that is resumed equals one that was not stopped.
Either way the gradient goes to each parameter as through a cast and torch.cat.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from fusestep.fp8.context import Region
from fusestep.fp8.held import part_of
from fusestep.fp8.plain_copies import PlainCopies, attach_plain
from fusestep.nn.fp8_module import plain_apply
from fusestep.transforms import is_transformed

_HALVES = (torch.bfloat16, torch.float16)


class _Wholes(torch.autograd.Function):
    """Tensors that stand for parameters put together; each parameter gets its rows of the gradient, in its dtype.

    `wholes` are as many as `counts`, each of which says for how many of the parameters.
    """

    @staticmethod
    def forward(ctx: Any, wholes: Sequence[Tensor], counts: Sequence[int], *parameters: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        is_split = len(parameters) > len(wholes)
        dtypes = [parameter.dtype for parameter in parameters]
        ctx.of = dtypes, counts, [parameter.shape[0] for parameter in parameters] if is_split else None
        # Detached tensors share the version of the copies: a backward that comes after the next step says so.
        return tuple([whole.detach() for whole in wholes])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        dtypes, counts, heights = ctx.of
        if heights is None:
            pairs = zip(gradients, dtypes, strict=True)
            return None, None, *[None if gradient is None else gradient.to(dtype) for gradient, dtype in pairs]
        results: list[Tensor | None] = []
        for gradient, count in zip(gradients, counts, strict=True):
            first = len(results)
            own = heights[first : first + count]
            results += [None] * count if gradient is None else gradient.to(dtypes[first]).split(own)
        return None, None, *results


_apply = plain_apply(_Wholes)


def stand_ins(*operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Tensors of the shape and dtype of parameters put together by rows, without values, that take their gradients.

    What a product in FP8 is given that multiplies by a cast of a weight, and adds another tensor in a bias's place.
    """
    empty = []
    for parameters in operands:
        rows = sum([parameter.shape[0] for parameter in parameters])
        empty.append(parameters[0].detach().new_empty(1).expand(rows, *parameters[0].shape[1:]))
    return wholes(empty, [len(parameters) for parameters in operands], *chain.from_iterable(operands))


def wholes(values: Sequence[Tensor], counts: Sequence[int], *parameters: Tensor) -> tuple[Tensor, ...]:
    """Tensors of these values that stand for parameters put together, and take their gradients.

    Args: counts: for each of the values, of how many of the parameters it is.
    """
    made: tuple[Tensor, ...] = _apply(values, counts, *parameters)
    return made


def put_together(parameters: tuple[Tensor, ...]) -> Tensor:
    """The parameters of a weight or bias as one tensor."""
    return parameters[0] if len(parameters) == 1 else torch.cat(parameters)


def autocast_operands(
    module: nn.Module, x: Tensor, region: Region | None, weights: tuple[Tensor, ...], biases: tuple[Tensor, ...] | None
) -> tuple[Tensor, Tensor | None] | None:
    """A weight and its bias in torch.autocast's dtype: the copies that the optimizer wrote, or casts.

    None where this call may not multiply by copies, which only training under torch.autocast may. The optimizer is
    asked for those that it was not yet.

    Args:
        module: whose parameters they are.
        x: the product's other operand.
        region: the FP8 region of the call; one that calibrates looks at the parameters themselves.
        weights, biases: the parameters of each; None for no bias.
    """
    kind = x.device.type
    if (
        not torch.is_autocast_enabled(kind)
        or not module.training
        or region is not None
        or not torch.is_grad_enabled()
        or torch.compiler.is_compiling()
        or is_transformed()
        or x.dtype is torch.float64  # which autocast leaves alone
    ):
        return None
    dtype = torch.get_autocast_dtype(kind)
    found: list[Tensor] = []
    operands = (weights,) if biases is None else (weights, biases)
    for parameters in operands:
        copies = _asked_for(parameters, dtype)
        if copies is None:
            if not _may_have_copies(parameters, x, dtype):
                return None
            attach_plain(parameters, dtype)
        if copies is not None and copies.values is not None and copies.is_current(*parameters):
            found.append(copies.values)
        else:
            with torch.no_grad():
                found.append(put_together(parameters).to(dtype))
    return found[0], None if biases is None else found[1]


def in_place_of_bias(module: nn.Module, biases: tuple[Any, ...], dtype: torch.dtype, grad: bool) -> Tensor | None:
    """What a product in FP8 adds in the place of a bias; None: the bias itself, which the product casts.

    In training with gradients enabled a copy that the optimizer wrote, which is asked for one that it was not yet. Else
    the parameters put together where they are several.

    Args:
        module: whose bias it is.
        biases: the parameters of it; () or (None,) for no bias.
        dtype: of the product's output.
        grad: whether gradients are enabled where the module was called.
    """
    if not biases or biases[0] is None or torch.compiler.is_compiling():
        return None
    if biases[0].dtype is not dtype and grad and module.training:
        copies = _asked_for(biases, dtype)
        if copies is not None and copies.values is not None and copies.is_current(*biases):
            return copies.values
        if copies is None and _may_have_copies(biases, biases[0], dtype):
            attach_plain(biases, dtype)
    if len(biases) == 1:
        return None
    with torch.no_grad():
        return torch.cat(biases)


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
