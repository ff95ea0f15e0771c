"""apex.parallel.optimized_sync_batchnorm over torch.nn.SyncBatchNorm."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed, nn

from fusestep.compat.report import served
from fusestep.errors import UserError

__all__ = ["SyncBatchNorm", "convert_syncbn_model", "create_syncbn_process_group"]


class SyncBatchNorm(nn.SyncBatchNorm):
    """torch's own, for channels first or last, with an addition and a ReLU behind it.

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
        y = super().forward(input.movedim(-1, 1) if is_moved else input)
        y = y.movedim(1, -1) if is_moved else y
        y = y if z is None else y + z
        return torch.relu(y) if self.fuse_relu else y


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
