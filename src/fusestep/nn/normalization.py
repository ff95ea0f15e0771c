"""FusedLayerNorm and FusedRMSNorm: nn.LayerNorm and nn.RMSNorm with the same arguments and state, in fused kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fusestep.dispatch import Choice
from fusestep.ops.norm import explain, normalise


class FusedLayerNorm(nn.LayerNorm):
    """nn.LayerNorm whose forward and backward are one kernel each (backward: and a small one for the weights).

    y = (x − mean(x)) / √(var(x) + eps) · weight + bias, in fp32, rounded once. See fusestep.nn.functional.layer_norm
    for shapes, dtypes, autocast and errors; the functional form also folds a residual add in.

    Args:
        normalized_shape, eps, elementwise_affine, bias, device, dtype: as of nn.LayerNorm; so is the state dict.
        memory_efficient: keep the output for backward instead of the input. Worth it where the output is kept anyway,
            by the linear layer that follows, and the input is not; see the functional form for what it costs.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        memory_efficient: bool = False,
    ) -> None:
        shape = normalized_shape if isinstance(normalized_shape, int) else list(normalized_shape)
        super().__init__(shape, eps, elementwise_affine, bias, device, dtype)
        self.memory_efficient = memory_efficient

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (nn.LayerNorm's name)
        """(…, *normalized_shape) to the same shape. Raises: UserError for shapes, dtypes or devices that do not fit."""
        y: Tensor = normalise(
            True,
            "FusedLayerNorm",
            input,
            self.normalized_shape,
            self.weight,
            self.bias,
            self.eps,
            None,
            self.memory_efficient,
        )
        return y

    def implementation(self) -> Choice:
        """What a call gets on the device of the parameters, and why."""
        return explain(True, self.weight, self.bias)

    def extra_repr(self) -> str:
        return super().extra_repr() + (", memory_efficient=True" if self.memory_efficient else "")


class FusedRMSNorm(nn.RMSNorm):
    """nn.RMSNorm whose forward and backward are one kernel each (backward: and a small one for the weight).

    y = x / √(mean(x²) + eps) · weight, in fp32, rounded once. See fusestep.nn.functional.rms_norm for shapes, dtypes,
    autocast and errors; the functional form also folds a residual add in.

    Args:
        normalized_shape, eps, elementwise_affine, device, dtype: as of nn.RMSNorm; so is the state dict.
        memory_efficient: keep the output for backward instead of the input; see FusedLayerNorm.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        memory_efficient: bool = False,
    ) -> None:
        shape = normalized_shape if isinstance(normalized_shape, int) else list(normalized_shape)
        super().__init__(shape, eps, elementwise_affine, device, dtype)
        self.memory_efficient = memory_efficient

    def forward(self, x: Tensor) -> Tensor:
        """(…, *normalized_shape) to the same shape. Raises: UserError for shapes, dtypes or devices that do not fit."""
        y: Tensor = normalise(
            False, "FusedRMSNorm", x, self.normalized_shape, self.weight, None, self.eps, None, self.memory_efficient
        )
        return y

    def implementation(self) -> Choice:
        """What a call gets on the device of the parameters, and why."""
        return explain(False, self.weight, None)

    def extra_repr(self) -> str:
        return super().extra_repr() + (", memory_efficient=True" if self.memory_efficient else "")
