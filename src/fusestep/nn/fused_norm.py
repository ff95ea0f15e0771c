"""The norm that stands before a product in LayerNormLinear and LayerNormMLP: its parameters, and its plain form."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from fusestep.dispatch import Choice
from fusestep.errors import UserError
from fusestep.nn.fp8_module import FP8Module
from fusestep.ops.norm import explain, normalise

Normalization = Literal["LayerNorm", "RMSNorm"]


class NormedModule(FP8Module):
    """A module with `layer_norm_weight` and, for LayerNorm, `layer_norm_bias`.

    With `zero_centered_gamma` the weight is kept as its difference from 1.
    """

    eps: float
    normalization: Normalization
    zero_centered_gamma: bool
    layer_norm_bias: nn.Parameter | None

    def _register_norm(
        self,
        width: int,
        eps: float,
        normalization: Normalization,
        zero_centered_gamma: bool,
        device: Any,
        dtype: torch.dtype | None,
    ) -> None:
        if normalization not in ("LayerNorm", "RMSNorm"):
            raise UserError(
                f'{type(self).__name__}: normalization is {normalization!r}; pass "LayerNorm" or "RMSNorm".'
            )
        self.eps, self.normalization, self.zero_centered_gamma = eps, normalization, zero_centered_gamma
        self.centred = normalization == "LayerNorm"
        self.layer_norm_weight = nn.Parameter(torch.empty(width, device=device, dtype=dtype))
        bias = nn.Parameter(torch.empty(width, device=device, dtype=dtype)) if self.centred else None
        self.register_parameter("layer_norm_bias", bias)

    def _reset_norm(self) -> None:
        nn.init.constant_(self.layer_norm_weight, 0.0 if self.zero_centered_gamma else 1.0)
        if self.layer_norm_bias is not None:
            nn.init.zeros_(self.layer_norm_bias)

    def _norm_parameters(self) -> tuple[Tensor, Tensor | None]:
        """The weight that rows are multiplied by, and the bias."""
        weight = self._parameter("layer_norm_weight")
        # In fp32: bf16 holds a small difference from 1, but not 1 and that difference.
        return weight.float() + 1.0 if self.zero_centered_gamma else weight, self._parameter("layer_norm_bias")

    def _normalised(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """(norm, x + residual or None) in high precision."""
        weight, bias = self._norm_parameters()
        shape = (x.shape[-1],)
        result = normalise(
            self.centred, type(self).__name__, x, shape, weight, bias, self.eps, residual, memory_efficient=False
        )
        return result if residual is not None else (result, None)

    def _normed_choice(self) -> Choice:
        """What the norm and the products run as: together in FP8, apart in high precision."""
        product = self._product_choice()
        if product.implementation != "torch":
            return product
        norm = explain(self.centred, self.layer_norm_weight, self.layer_norm_bias)
        return Choice(norm.implementation, f"the norm: {norm.reason}; the product: {product.reason}", norm.is_fallback)

    def _check_residual(self, x: Tensor, residual: Tensor | None) -> None:
        if residual is not None and (residual.shape != x.shape or residual.device != x.device):
            raise UserError(
                f"{self._described()}: residual has shape {tuple(residual.shape)} on {residual.device} and x "
                f"{tuple(x.shape)} on {x.device}; pass a residual of x's shape and device."
            )
