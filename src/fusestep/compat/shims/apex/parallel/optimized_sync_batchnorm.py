"""apex.parallel.optimized_sync_batchnorm over torch.nn.SyncBatchNorm."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed, nn

from fusestep.compat.report import served
from fusestep.errors import UserError

__all__ = ["SyncBatchNorm", "convert_syncbn_model", "create_syncbn_process_group"]


class SyncBatchNorm(nn.SyncBatchNorm):
    """torch's own, for channels first or last, with an addition and a ReLU behind it; several ranks on CPUs too.

    Args:
        num_features, eps, momentum, affine, track_running_stats, process_group: as of torch.nn.SyncBatchNorm.
        channel_last: channels are the last dimension of the input.
        fuse_relu: a ReLU follows.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Any = None,
        channel_last: bool = False,
        fuse_relu: bool = False,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, process_group)
        self.channel_last = channel_last
        self.fuse_relu = fuse_relu
        served("apex.parallel.SyncBatchNorm", "torch.nn.SyncBatchNorm")

    def forward(self, input: Tensor, z: Tensor | None = None) -> Tensor:
        """The input normalised, + z if given, of the input's shape."""
        is_moved = self.channel_last and input.dim() > 2
        x = input.movedim(-1, 1) if is_moved else input
        # There torch's own refuses CPU tensors.
        is_shared = self.training and distributed.is_initialized()
        y = self._normed_over_ranks(x) if is_shared and x.device.type == "cpu" else super().forward(x)
        y = y.movedim(1, -1) if is_moved else y
        y = y if z is None else y + z
        return torch.relu(y) if self.fuse_relu else y

    def _normed_over_ranks(self, x: Tensor) -> Tensor:
        """A training forward of (batch, channels, …) in plain PyTorch, with a two-pass variance over all ranks."""
        group = self.process_group or distributed.group.WORLD
        others = [0, *range(2, x.dim())]
        wide = x if x.dtype is torch.float64 else x.float()
        count = _sum_of_ranks(wide.new_full((), x.numel() // x.shape[1]), group)
        mean = _sum_of_ranks(wide.sum(others, keepdim=True), group) / count
        centred = wide - mean
        variance = _sum_of_ranks(centred.square().sum(others, keepdim=True), group) / count
        if self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            share = 1.0 / int(self.num_batches_tracked) if self.momentum is None else self.momentum
            with torch.no_grad():
                self.running_mean.lerp_(mean.flatten().to(self.running_mean.dtype), share)
                self.running_var.lerp_((variance * count / (count - 1)).flatten().to(self.running_var.dtype), share)
        y = centred * torch.rsqrt(variance + self.eps)
        y = y if self.weight is None else y * self.weight.reshape_as(mean)
        y = y if self.bias is None else y + self.bias.reshape_as(mean)
        result: Tensor = y.to(x.dtype)
        return result


class _SumOfRanks(torch.autograd.Function):
    """Each rank's result is the sum of all ranks' values, so a value's gradient is the sum of all ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Any) -> Tensor:
        ctx.group = group
        total = value.clone()
        distributed.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        total = gradient.clone(memory_format=torch.contiguous_format)
        distributed.all_reduce(total, group=ctx.group)
        return total, None


def _sum_of_ranks(value: Tensor, group: Any) -> Tensor:
    total: Tensor = _SumOfRanks.apply(value, group)  # type: ignore[no-untyped-call]
    return total


def convert_syncbn_model(module: nn.Module, process_group: Any = None, channel_last: bool = False) -> nn.Module:
    """The module with each batch norm in it replaced by a SyncBatchNorm with the same parameters and statistics."""
    result = module
    if isinstance(module, nn.modules.batchnorm._BatchNorm) and not isinstance(module, SyncBatchNorm):
        momentum: Any = module.momentum
        result = SyncBatchNorm(
            module.num_features,
            module.eps,
            momentum,
            module.affine,
            module.track_running_stats,
            process_group,
            channel_last,
        )
        # The tensors themselves, so that an optimizer that holds them goes on.
        for name, parameter in module.named_parameters(recurse=False):
            setattr(result, name, parameter)
        for name, buffer in module.named_buffers(recurse=False):
            setattr(result, name, buffer)
        result.training = module.training
    for name, child in module.named_children():
        result.add_module(name, convert_syncbn_model(child, process_group, channel_last))
    return result


def create_syncbn_process_group(group_size: int) -> Any:
    """This rank's group of `group_size` neighbouring ranks; 0 for all of them, which is None."""
    if group_size == 0:
        return None
    world = distributed.get_world_size()
    if group_size > world or world % group_size:
        raise UserError(
            f"create_syncbn_process_group: group_size is {group_size} and there are {world} ranks; pass a divisor."
        )
    mine = None
    for first in range(0, world, group_size):
        ranks = list(range(first, first + group_size))
        group = distributed.new_group(ranks)
        if distributed.get_rank() in ranks:
            mine = group
    return mine
