"""What a step plan consists of: for each device the launches that step its parameters, and what they share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusestep.ops.adam_copies import CopySignature
from fusestep.ops.adam_kernel import AdamSignature
from fusestep.ops.gradient_norm import NormScratch, to_device
from fusestep.ops.tensor_table import DeviceArray, TensorTable

State = dict[str, Any]


@dataclass(frozen=True)
class Scaling:
    """What a loss scaler left for this step: its scale, and whether it saw a non-finite gradient; None for neither."""

    scale: Tensor | None
    found_inf: Tensor | None

    @property
    def is_active(self) -> bool:
        return self.scale is not None or self.found_inf is not None

    def on(self, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
        """Both as 0-d fp32 on a device, or neither."""
        if not self.is_active:
            return None, None
        scale = torch.ones((), device=device) if self.scale is None else to_device(self.scale, device)
        found_inf = torch.zeros((), device=device) if self.found_inf is None else to_device(self.found_inf, device)
        return scale, found_inf


@dataclass(eq=False)
class KernelPart:
    """Parameters of one signature: one launch. `members` are places in the plan's list of parameters."""

    signature: AdamSignature
    members: list[int]
    table: TensorTable
    copies: CopyPart | None = None


@dataclass(eq=False)
class CopyPart:
    """What a launch needs that writes FP8 copies too.

    `tile_tensor`: see adam_copies.py; `slots`: (n, 4) fp32, of matrices whose scales are their own, or None.
    """

    signature: CopySignature
    tile_tensor: Tensor
    slots: Tensor | None


@dataclass(eq=False)
class ReferencePart:
    """Parameters of one signature and one group, stepped by the reference."""

    signature: AdamSignature
    group: int
    members: list[int]


@dataclass(eq=False)
class DevicePlan:
    """The parts of one device, and what they share.

    `members` are all parameters on the device, those without a gradient too, so that a step count keeps its place in
    `steps` whatever receives gradients. `verdict` is (norm, divisor, skip). `scratch` measures the gradients' norm;
    `shard_norms` are there in its stead where parameters lie over several processes.
    """

    device: torch.device
    members: list[int]
    steps: Tensor
    verdict: Tensor
    kernels: list[KernelPart] = field(default_factory=list)
    references: list[ReferencePart] = field(default_factory=list)
    steps_before: Tensor | None = None
    hyper: DeviceArray | None = None
    scratch: NormScratch | None = None
    shard_norms: list[ShardNorm] = field(default_factory=list)

    def __post_init__(self) -> None:
        # Views are made once; each would cost the host a microsecond a step.
        self.norm, self.divisor, self.skip = self.verdict.unbind()


class ShardNorm(NamedTuple):
    """The norm of those gradients whose parts lie on so many processes each; `scratch` writes it into `norm`."""

    replicas: int
    scratch: NormScratch
    norm: Tensor


def real(tensor: Tensor) -> Tensor:
    """A complex tensor as its real and imaginary parts, which Adam treats as two numbers; others as they are."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
