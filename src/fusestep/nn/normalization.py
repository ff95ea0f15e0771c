"""FusedLayerNorm and FusedRMSNorm: nn.LayerNorm and nn.RMSNorm with the same arguments and state, in fused kernels.

LayerNorm and RMSNorm are the same with Transformer Engine's habits: weights around zero, a residual, and an input that
is cast to the weight's dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fusestep.dispatch import Choice
from fusestep.distributed.tensor_parallel import TensorParallel, tensor_parallel
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


class LayerNorm(FusedLayerNorm):
    """FusedLayerNorm as Transformer Engine has it: the input is cast to the weight's dtype.

    Args:
        normalized_shape, eps, elementwise_affine, bias, device, dtype: as of nn.LayerNorm.
        zero_centered_gamma: the weight starts at 0 and 1 + weight multiplies, so that weight decay pulls towards 1.
        tp_group: ranks that each normalise a part of the rows, slices of sequences or some heads: the gradients of the
            parameters are added over it.
    """

    _parallel: TensorParallel | None = None

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        zero_centered_gamma: bool = False,
        tp_group: Any = None,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)
        self.zero_centered_gamma = zero_centered_gamma
        self._parallel = tensor_parallel(type(self).__name__, tp_group)
        _centre(self.weight, zero_centered_gamma)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        _centre(self.weight, getattr(self, "zero_centered_gamma", False))

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Any:  # noqa: A002 (nn.LayerNorm's name)
        """(…, *normalized_shape) to the same shape in the weight's dtype; with a residual (y, input + residual)."""
        weight: Tensor | None = self.weight
        bias: Tensor | None = self.bias
        if self._parallel is not None:
            weight, bias = self._parallel.partial(weight, bias)
        x, total = _cast(input, weight), _cast(residual, weight)
        weight = _scale(weight, self.zero_centered_gamma)
        return normalise(True, "LayerNorm", x, self.normalized_shape, weight, bias, self.eps, total, False)

    def extra_repr(self) -> str:
        return super().extra_repr() + (", zero_centered_gamma=True" if self.zero_centered_gamma else "")


class RMSNorm(FusedRMSNorm):
    """FusedRMSNorm as Transformer Engine has it: the input is cast to the weight's dtype, and eps is 1e-5.

    Args:
        normalized_shape, eps, elementwise_affine, device, dtype: as of nn.RMSNorm.
        zero_centered_gamma: the weight starts at 0 and 1 + weight multiplies, so that weight decay pulls towards 1.
        tp_group: ranks that each normalise a part of the rows, slices of sequences or some heads: the gradients of the
            parameters are added over it.
    """

    _parallel: TensorParallel | None = None

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = 1e-5,
        elementwise_affine: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        zero_centered_gamma: bool = False,
        tp_group: Any = None,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)
        self.zero_centered_gamma = zero_centered_gamma
        self._parallel = tensor_parallel(type(self).__name__, tp_group)
        _centre(self.weight, zero_centered_gamma)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        _centre(self.weight, getattr(self, "zero_centered_gamma", False))

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        """(…, *normalized_shape) to the same shape in the weight's dtype; with a residual (y, x + residual)."""
        weight: Tensor | None = self.weight
        if self._parallel is not None:
            (weight,) = self._parallel.partial(weight)
        x, total = _cast(x, weight), _cast(residual, weight)
        weight = _scale(weight, self.zero_centered_gamma)
        return normalise(False, "RMSNorm", x, self.normalized_shape, weight, None, self.eps, total, False)

    def extra_repr(self) -> str:
        return super().extra_repr() + (", zero_centered_gamma=True" if self.zero_centered_gamma else "")


def _centre(weight: Tensor | None, zero_centred: bool) -> None:
    if zero_centred and weight is not None:
        nn.init.zeros_(weight)


def _scale(weight: Tensor | None, zero_centred: bool) -> Tensor | None:
    """What multiplies: in fp32 where 1 is added, since a narrow dtype has no digits left for a small weight then."""
    return 1.0 + weight.float() if zero_centred and weight is not None else weight


def _cast(x: Any, weight: Tensor | None) -> Any:
    return x if x is None or weight is None or x.dtype is weight.dtype else x.to(weight.dtype)
