"""Collectives that autograd differentiates: what moves activations between the ranks that share a layer.

| forward | backward |
|---|---|
| `copied`: nothing | the gradients of all ranks are added |
| `added`: the tensors of all ranks are added | nothing |
| `gathered`: the slices of all ranks are put together | the gradients are added, and each rank takes its slice |
| `scattered`: the tensors are added, and each rank takes its slice | the slices of all ranks are put together |
| `joined`: the slices of all ranks are put together | each rank takes its slice |
| `sliced`: each rank takes its slice | the slices of all ranks are put together |
| `traded`: rows go where they are needed | gradients of rows go back |

A backward is made of these functions too, so that gradients of gradients are right. All ranks of a group have to call
the same function with the same shapes. Sums are in the dtype of the tensors; their order is the backend's, the same
result reaches every rank.

Source: Shoeybi et al. 2019, arXiv:1909.08053 (copied, added); Korthikanti et al. 2022, arXiv:2205.05198 (gathered,
scattered).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fusestep.errors import UserError
from fusestep.transforms import is_mapped

# New names since torch 2.13, which warns of the old ones.
_all_gather: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or getattr(dist, "reduce_scatter_tensor", None)


def copied(x: Tensor, group: Any) -> Tensor:
    """x; its gradient is the sum of those of all ranks."""
    y: Tensor = _apply(_Copied, x, group)
    return y


def added(x: Tensor, group: Any) -> Tensor:
    """The sum of the tensors of all ranks, on each of them."""
    y: Tensor = _apply(_Added, x, group)
    return y


def gathered(x: Tensor, dim: int, group: Any) -> Tensor:
    """The slices of all ranks along `dim`; the gradients of all ranks add up."""
    y: Tensor = _apply(_Gathered, x, dim % x.dim(), group)
    return y


def scattered(x: Tensor, dim: int, group: Any) -> Tensor:
    """This rank's slice, along `dim`, of the sum of the tensors of all ranks; the group's size divides `dim`."""
    y: Tensor = _apply(_Scattered, x, dim % x.dim(), group)
    return y


def joined(x: Tensor, dim: int, group: Any) -> Tensor:
    """The slices of all ranks along `dim`, of which each rank computes the same afterwards."""
    y: Tensor = _apply(_Joined, x, dim % x.dim(), group)
    return y


def sliced(x: Tensor, dim: int, group: Any) -> Tensor:
    """This rank's slice, along `dim`, of what all ranks have; the group's size divides `dim`."""
    y: Tensor = _apply(_Sliced, x, dim % x.dim(), group)
    return y


class Trade(NamedTuple):
    """Which rows a rank gives to which, in the order of ranks, and gets from them.

    Attributes:
        order: this rank's rows, those for the first rank before those for the second, …; and back.
        given, taken: how many rows go to each rank, and come from it.
    """

    order: Tensor
    given: tuple[int, ...]
    taken: tuple[int, ...]

    @classmethod
    def of_blocks(cls, blocks: Sequence[int], rank: int, size: int) -> Trade:
        """From equal parts of all rows, one a rank, to equal parts of each block; the group's size divides each."""
        owners = torch.cat([torch.arange(size).repeat_interleave(rows // size) for rows in blocks])
        parts = owners.view(size, -1)  # by the rank that has the row
        order = torch.argsort(parts[rank], stable=True)
        given = torch.bincount(parts[rank], minlength=size).tolist()
        taken = [int((part == rank).sum()) for part in parts]
        return cls(order, tuple(given), tuple(taken))


def traded(x: Tensor, trade: Trade, group: Any) -> Tensor:
    """The rows (dim 0) that a rank needs of those that all ranks have, in the order of the whole."""
    y: Tensor = _apply(_Traded, x, trade, group, False)
    return y


def with_added_gradients(group: Any, *tensors: Tensor | None) -> tuple[Any, ...]:
    """The tensors; the gradient of each is the sum of those of all ranks, in one collective for all of them.

    For parameters that every rank has, and of whose use each rank sees a part. Summed in fp32 (fp64 for fp64).
    """
    there = [tensor for tensor in tensors if tensor is not None]
    if not there or not any(tensor.requires_grad for tensor in there):
        return tensors
    results = iter(_apply(_AddedGradients, group, *there))
    return tuple([None if tensor is None else next(results) for tensor in tensors])


def _apply(function: Any, *arguments: Any) -> Any:
    compiling = torch.compiler.is_compiling()
    if not compiling and any(isinstance(argument, Tensor) and is_mapped(argument) for argument in arguments):
        raise UserError(
            "transforms of torch.func, batched gradients and forward-mode gradients do not cross ranks; differentiate "
            "a model there whose layers are not shared by ranks."
        )
    return function.apply(*arguments)


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return added(dy, ctx.group), None


class _Added(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        y = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(y, group=group)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return copied(dy, ctx.group), None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Any) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _gather(x, dim, group)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return scattered(dy, ctx.dim, ctx.group), None, None


class _Scattered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Any) -> Tensor:
        ctx.dim, ctx.group = dim, group
        size = dist.get_world_size(group)
        # What the ranks get lies one after the other, whichever dimension is scattered.
        parts = x.unflatten(dim, (size, x.shape[dim] // size)).movedim(dim, 0).contiguous()
        y: Tensor = parts.new_empty(parts.shape[1:])
        _reduce_scatter(y.view(-1), parts.view(-1), group=group)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return gathered(dy, ctx.dim, ctx.group), None, None


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Any) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _gather(x, dim, group)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return sliced(dy, ctx.dim, ctx.group), None, None


class _Sliced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Any) -> Tensor:
        ctx.dim, ctx.group = dim, group
        length = x.shape[dim] // dist.get_world_size(group)
        # A copy, so that what is kept for backward is the slice alone.
        part: Tensor = x.narrow(dim, dist.get_rank(group) * length, length).clone()
        return part

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return joined(dy, ctx.dim, ctx.group), None, None


class _Traded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, trade: Trade, group: Any, is_return: bool) -> Tensor:
        ctx.of = trade, group, is_return
        order = trade.order.to(x.device, non_blocking=True)
        given, taken = (trade.taken, trade.given) if is_return else (trade.given, trade.taken)
        sent = x.contiguous() if is_return else x.index_select(0, order)
        received = x.new_empty(sum(taken), *x.shape[1:])
        dist.all_to_all_single(received, sent, list(taken), list(given), group=group)
        return torch.empty_like(received).index_copy_(0, order, received) if is_return else received

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        trade, group, is_return = ctx.of
        return _apply(_Traded, dy, trade, group, not is_return), None, None, None


class _AddedGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Any, *tensors: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.group = group
        return tuple([tensor.view_as(tensor) for tensor in tensors])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        there = [gradient for gradient in gradients if gradient is not None]
        if not there:
            return None, *gradients
        dtype = torch.float64 if any(one.dtype is torch.float64 for one in there) else torch.float32
        sums = added(torch.cat([gradient.reshape(-1).to(dtype) for gradient in there]), ctx.group)
        parts = iter(sums.split([gradient.numel() for gradient in there]))
        return None, *[None if one is None else next(parts).view(one.shape).to(one.dtype) for one in gradients]


def _gather(x: Tensor, dim: int, group: Any) -> Tensor:
    """The slices of all ranks along `dim`, contiguous."""
    x = x.contiguous()
    parts = x.new_empty(dist.get_world_size(group), *x.shape)
    _all_gather(parts.view(-1), x.view(-1), group=group)
    return parts.flatten(0, 1) if dim == 0 else parts.movedim(0, dim).flatten(dim, dim + 1)
