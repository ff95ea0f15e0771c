"""apex.contrib.layer_norm.layer_norm over fusestep.nn.functional.layer_norm; any width, not 26 of them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from apex.normalization.fused_layer_norm import normed
from fusestep.compat.implementation import Applied, ServedModule, ran

__all__ = ["FastLayerNorm", "FastLayerNormFN"]


def _fast_layer_norm(
    x: Tensor, gamma: Tensor, beta: Tensor, epsilon: float = 1e-5, memory_efficient: bool = False
) -> Tensor:
    """LayerNorm over the last dimension; y in gamma's dtype."""
    ran("apex.contrib.layer_norm.FastLayerNormFN", "fusestep.nn.functional.layer_norm", "layer_norm", x)
    return normed(x, gamma.shape, gamma, beta, epsilon, centred=True, memory_efficient=memory_efficient, mixed=True)


class FastLayerNormFN(Applied):
    """`apply` is the module's function."""

    apply = staticmethod(_fast_layer_norm)


class FastLayerNorm(ServedModule):
    """LayerNorm over the last dimension; y in the weight's dtype, under CUDA autocast in autocast's."""

    serves = "apex.contrib.layer_norm.FastLayerNorm"
    op, served_by = "layer_norm", "fusestep.nn.functional.layer_norm"

    def __init__(self, hidden_size: int, eps: float = 1e-5, memory_efficient: bool = False) -> None:
        super().__init__()
        self.epsilon = eps
        self.memory_efficient = memory_efficient
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.bias = nn.Parameter(torch.empty(hidden_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weight 1, bias 0."""
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(…, hidden_size) to the same shape. Raises: UserError for shapes, dtypes or devices that do not fit."""
        self._ran(x)
        return normed(
            x,
            self.weight.shape,
            self.weight,
            self.bias,
            self.epsilon,
            centred=True,
            memory_efficient=self.memory_efficient,
            mixed=True,
        )
