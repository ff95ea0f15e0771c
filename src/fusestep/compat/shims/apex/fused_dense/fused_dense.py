"""apex.fused_dense.fused_dense over torch.nn.functional.linear, whose products run cuBLASLt with the bias folded in.

Right where Apex is not: weights are initialised, as nn.Linear's; inputs have any number of dimensions and any strides.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from fusestep.compat.implementation import Applied
from fusestep.compat.report import served

__all__ = [
    "DenseNoBiasFunc",
    "FusedDense",
    "FusedDenseFunc",
    "FusedDenseGeluDense",
    "FusedDenseGeluDenseFunc",
    "dense_no_bias_function",
    "fused_dense_function",
    "fused_dense_gelu_dense_function",
]


def fused_dense_function(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """input · weightᵀ + bias; weight is (out, in)."""
    _told("fused_dense_function")
    return functional.linear(input, weight, bias)


def dense_no_bias_function(input: Tensor, weight: Tensor) -> Tensor:
    """input · weightᵀ; weight is (out, in)."""
    _told("dense_no_bias_function")
    return functional.linear(input, weight)


def fused_dense_gelu_dense_function(
    input: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor
) -> Tensor:
    """Two products with a GELU in its tanh form, which cuBLASLt's epilogue computes too, between them."""
    _told("fused_dense_gelu_dense_function")
    hidden = functional.gelu(functional.linear(input, weight1, bias1), approximate="tanh")
    return functional.linear(hidden, weight2, bias2)


class FusedDenseFunc(Applied):
    """`apply` is fused_dense_function."""

    apply = staticmethod(fused_dense_function)


class DenseNoBiasFunc(Applied):
    """`apply` is dense_no_bias_function."""

    apply = staticmethod(dense_no_bias_function)


class FusedDenseGeluDenseFunc(Applied):
    """`apply` is fused_dense_gelu_dense_function."""

    apply = staticmethod(fused_dense_gelu_dense_function)


class FusedDense(nn.Linear):
    """nn.Linear."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__(in_features, out_features, bias)
        served("apex.fused_dense.FusedDense", "torch.nn.Linear")


class FusedDenseGeluDense(nn.Module):
    """Two linear layers with a GELU, in its tanh form, between them; parameters weight1, bias1, weight2, bias2."""

    def __init__(self, in_features: int, intermediate_features: int, out_features: int, bias: bool = True) -> None:
        if not bias:
            raise AssertionError("FusedDenseGeluDense always has biases; use nn.Sequential for one without.")
        super().__init__()
        self.in_features, self.intermediate_features, self.out_features = (
            in_features,
            intermediate_features,
            out_features,
        )
        self.weight1 = nn.Parameter(torch.empty(intermediate_features, in_features))
        self.bias1 = nn.Parameter(torch.empty(intermediate_features))
        self.weight2 = nn.Parameter(torch.empty(out_features, intermediate_features))
        self.bias2 = nn.Parameter(torch.empty(out_features))
        self.reset_parameters()
        served("apex.fused_dense.FusedDenseGeluDense", "torch.nn.functional.linear and gelu")

    def reset_parameters(self) -> None:
        """As nn.Linear's."""
        for weight, bias in ((self.weight1, self.bias1), (self.weight2, self.bias2)):
            nn.init.kaiming_uniform_(weight, a=5**0.5)
            bound = weight.shape[1] ** -0.5 if weight.shape[1] else 0.0
            nn.init.uniform_(bias, -bound, bound)

    def forward(self, input: Tensor) -> Tensor:
        """(…, in_features) to (…, out_features)."""
        return fused_dense_gelu_dense_function(input, self.weight1, self.bias1, self.weight2, self.bias2)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.intermediate_features}, {self.out_features}"


def _told(name: str) -> None:
    if not torch.compiler.is_compiling():
        served(f"apex.fused_dense.{name}", "torch.nn.functional.linear")
