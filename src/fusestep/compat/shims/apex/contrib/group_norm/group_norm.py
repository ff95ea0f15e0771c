"""apex.contrib.group_norm.group_norm over torch.nn.functional.group_norm."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fusestep.compat.implementation import by_torch
from fusestep.errors import UserError

__all__ = ["GroupNorm"]


class GroupNorm(nn.Module):
    """GroupNorm with an optional SiLU; any memory format, number of groups and of channels, any mix of dtypes.

    Computed in the wider of input's and weight's dtype, and returned in the input's.

    Args:
        num_groups, num_channels, eps, affine, device, dtype: as of nn.GroupNorm. act: "", "silu" or "swish".
    """

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        act: str = "",
    ) -> None:
        super().__init__()
        if num_channels % num_groups:
            raise ValueError(f"GroupNorm: {num_channels} channels do not divide into {num_groups} groups.")
        self.act = act.lower()
        if self.act not in ("", "silu", "swish"):
            raise UserError(f'GroupNorm: act is {act!r}; pass "", "silu" or "swish".')
        by_torch("apex.contrib.group_norm.GroupNorm", "torch.nn.functional.group_norm")
        self.num_groups, self.num_channels, self.eps, self.affine = num_groups, num_channels, eps, affine
        for name in ("weight", "bias"):
            value = nn.Parameter(torch.empty(num_channels, device=device, dtype=dtype)) if affine else None
            self.register_parameter(name, value)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weight 1, bias 0."""
        if self.affine:
            nn.init.ones_(self.weight)  # type: ignore[arg-type]
            nn.init.zeros_(self.bias)  # type: ignore[arg-type]

    def forward(self, input: Tensor) -> Tensor:
        """(batch, num_channels, …) to the same shape and dtype."""
        weight, bias = self._parameters["weight"], self._parameters["bias"]
        compute = input.dtype if weight is None else torch.promote_types(input.dtype, weight.dtype)
        if weight is not None and bias is not None:
            weight, bias = weight.to(compute), bias.to(compute)  # type: ignore[assignment]
        y = functional.group_norm(input.to(compute), self.num_groups, weight, bias, self.eps)
        return (functional.silu(y) if self.act else y).to(input.dtype)

    def extra_repr(self) -> str:
        act = f", act={self.act}" if self.act else ""
        return f"{self.num_groups}, {self.num_channels}, eps={self.eps}, affine={self.affine}{act}"
