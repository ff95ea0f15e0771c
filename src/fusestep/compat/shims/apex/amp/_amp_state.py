"""apex.amp._amp_state: what `initialize` was asked for, and the loss scalers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from apex.amp.scaler import LossScaler

__all__ = ["AmpState", "Properties", "_amp_state", "master_params"]


@dataclass
class Properties:
    """The settings behind an opt_level."""

    enabled: bool
    opt_level: str
    cast_model_type: torch.dtype | None
    patch_torch_functions: bool
    keep_batchnorm_fp32: bool | None
    master_weights: bool
    loss_scale: float | str
    cast_model_outputs: torch.dtype | None


@dataclass
class AmpState:
    """Of the process, as in Apex."""

    opt_properties: Properties | None = None
    loss_scalers: list[LossScaler] = field(default_factory=list)


_amp_state = AmpState()


def master_params(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """The tensors that the optimizer steps: fp32 masters where there are some."""
    for group in optimizer.param_groups:
        yield from group["params"]
