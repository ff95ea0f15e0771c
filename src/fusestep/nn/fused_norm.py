"""The norm that stands before a product in LayerNormLinear and LayerNormMLP: its parameters, its plain form, and what
their autograd.Functions do with it in FP8.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from fusestep.dispatch import Choice
from fusestep.distributed.tensor_parallel import TensorParallel
from fusestep.errors import UserError
from fusestep.nn.fp8_module import FP8Module, activation_dtype
from fusestep.ops.norm import explain, normalise
from fusestep.ops.norm_ops import copy_dtype_of, in_dtype, norm_backward, run_backward
from fusestep.ops.quantized import Quantized

Normalization = Literal["LayerNorm", "RMSNorm"]


class NormedModule(FP8Module):
    """A module with `layer_norm_weight` and, for LayerNorm, `layer_norm_bias`.

    With `zero_centered_gamma` the weight is kept as its difference from 1.
    """

    eps: float
    normalization: Normalization
    zero_centered_gamma: bool
    layer_norm_bias: nn.Parameter | None

    # The ranks that share the module, if they do.
    _parallel: TensorParallel | None = None

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

    def _normalised(
        self, x: Tensor, residual: Tensor | None, *, for_product: bool = False, returns_input: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """(norm, x + residual or None) in high precision; with `returns_input` x in the place of that None.

        `for_product`: nobody but a product sees the norm, which torch.autocast would cast it for. It is then written in
        that dtype at once, to the same bits, and so comes its gradient.
        """
        weight, bias = self._norm_parameters()
        dtype = product_dtype(x, weight) if for_product else None
        if self._parallel is not None:
            weight, bias = self._parallel.shared(weight, bias)
        shape = (x.shape[-1],)
        options: Any = {"residual": residual, "memory_efficient": False, "dtype": dtype}
        options["returns_input"] = returns_input
        result = normalise(self.centred, type(self).__name__, x, shape, weight, bias, self.eps, **options)
        return result if residual is not None or returns_input else (result, None)

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


def product_dtype(x: Tensor, weight: Tensor) -> torch.dtype | None:
    """The dtype that torch.autocast would cast a norm of x to for a product; None where it would not."""
    if not torch.is_autocast_enabled(x.device.type) or torch.float64 in (x.dtype, weight.dtype):
        return None
    return activation_dtype(x)


# Around the norm in FP8: what an autograd.Function gives, keeps and returns for it


def present(*outputs: Tensor | None) -> Any:
    """Those of a Function's outputs that there are, one by itself: torch.compile knows no output that is None."""
    there = tuple([output for output in outputs if output is not None])
    return there if len(there) > 1 else there[0]


def sorted_out(result: Any, has_total: bool, has_output: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(y, x + residual or None, norm or None) of what `present` left."""
    if not (has_total or has_output):
        return result, None, None
    return result[0], result[1] if has_total else None, result[-1] if has_output else None


def kept_for_weight(quantized: Quantized, is_needed: bool) -> tuple[Tensor | None, Tensor | None]:
    """What of a norm's output backward keeps for the weight's gradient: the transpose, or the data to make it of."""
    if not is_needed:
        return None, None
    if quantized.transposed is not None:
        return quantized.transposed, quantized.transposed_scale_inv
    return quantized.data, quantized.scale_inv


def norm_gradients(
    dn: Tensor | None,
    dtotal: Tensor | None,
    dnormed: Tensor | None,
    x: Tensor,
    statistics: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    centred: bool,
    needed: list[bool],
    x_dtype: torch.dtype,
    residual_dtype: torch.dtype | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of x, the residual, the norm's weight and bias.

    Args:
        dn, dnormed: gradients of the norm's output, by way of the product and as it was returned.
        dtotal: the gradient of x + residual as it was returned.
        x: what was normalised. needed: which of the four are.
    """
    if dnormed is not None:
        dn = dnormed if dn is None else dn + dnormed
    x_needed, residual_needed, weight_needed, bias_needed = needed
    dx, dweight, dbias, dx_copy = dtotal, None, None, None
    if dn is not None and any(needed):
        width = x.shape[-1]
        copy_dtype = copy_dtype_of(x.dtype, x_dtype if x_needed else None, residual_dtype if residual_needed else None)
        options = (width, centred, False, x.dtype, weight_needed, bias_needed, copy_dtype)
        backward = norm_backward if torch.compiler.is_compiling() else run_backward
        dx, dweight, dbias, dx_copy = backward(dn, dtotal, x, statistics, weight, bias, *options)
    return (
        None if dx is None or not x_needed else in_dtype(x_dtype, dx, dx_copy),
        None if dx is None or residual_dtype is None or not residual_needed else in_dtype(residual_dtype, dx, dx_copy),
        dweight if weight_needed else None,
        dbias if bias_needed else None,
    )
