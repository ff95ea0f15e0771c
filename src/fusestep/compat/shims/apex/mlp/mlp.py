"""apex.mlp.mlp over torch.nn.functional.linear."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from fusestep.compat.implementation import Applied
from fusestep.compat.report import served

__all__ = ["MLP", "MlpFunction", "mlp_function"]

#: By the numbers that Apex gives them.
_ACTIVATIONS: tuple[tuple[str, Callable[[Tensor], Tensor]], ...] = (
    ("none", lambda x: x),
    ("relu", functional.relu),
    ("sigmoid", torch.sigmoid),
)


def mlp_function(bias: int, activation: int, *args: Tensor) -> Tensor:
    """Linear layers, each followed by the activation, the last too.

    Args:
        bias: whether there are biases. activation: 0 none, 1 relu, 2 sigmoid.
        args: the input, (…, sizes[0]); the weights, (out, in) each; and then the biases.
    """
    if not torch.compiler.is_compiling():
        served("apex.mlp.mlp_function", "torch.nn.functional.linear")
    x, *parameters = args
    count = len(parameters) // 2 if bias else len(parameters)
    function = _ACTIVATIONS[activation][1]
    for number in range(count):
        x = function(functional.linear(x, parameters[number], parameters[count + number] if bias else None))
    return x


class MlpFunction(Applied):
    """`apply` is mlp_function."""

    apply = staticmethod(mlp_function)


class MLP(nn.Module):
    """Linear layers, each followed by the activation, the last too; any floating dtype, bf16 included.

    Args:
        mlp_sizes: widths, that of the input first: [1024, 1024, 512] are two layers.
        bias: whether layers have one.
        activation: "relu", "sigmoid" or "none".
    Raises: TypeError for another activation.

    Parameters are weight_0, bias_0, weight_1, …; `weights` and `biases` list them.
    """

    def __init__(self, mlp_sizes: Sequence[int], bias: bool = True, activation: str = "relu") -> None:
        super().__init__()
        names = [name for name, _ in _ACTIVATIONS]
        if activation not in names:
            raise TypeError(f"MLP: activation is {activation!r}; pass one of {', '.join(names)}.")
        self.mlp_sizes = list(mlp_sizes)
        self.num_layers = len(mlp_sizes) - 1
        self.bias = int(bias)
        self.activation = names.index(activation)
        for number, (width_in, width_out) in enumerate(pairwise(mlp_sizes)):
            self.register_parameter(f"weight_{number}", nn.Parameter(torch.empty(width_out, width_in)))
            if bias:
                self.register_parameter(f"bias_{number}", nn.Parameter(torch.empty(width_out)))
        self.reset_parameters()
        served("apex.mlp.MLP", "torch.nn.functional.linear")

    @property
    def weights(self) -> list[nn.Parameter]:
        """As they are now, whoever replaced them."""
        return [getattr(self, f"weight_{number}") for number in range(self.num_layers)]

    @property
    def biases(self) -> list[nn.Parameter]:
        """As they are now, whoever replaced them."""
        return [getattr(self, f"bias_{number}") for number in range(self.num_layers if self.bias else 0)]

    def reset_parameters(self) -> None:
        """Normal: weights of variance 2 / (in + out), biases of 1 / out."""
        for weight in self.weights:
            nn.init.normal_(weight, 0.0, (2.0 / sum(weight.shape)) ** 0.5)
        for bias in self.biases:
            nn.init.normal_(bias, 0.0, (1.0 / bias.shape[0]) ** 0.5)

    def forward(self, input: Tensor) -> Tensor:
        """(…, mlp_sizes[0]) to (…, mlp_sizes[-1])."""
        return mlp_function(self.bias, self.activation, input, *self.weights, *self.biases)

    def extra_repr(self) -> str:
        return f"MLP sizes: {self.mlp_sizes}, Bias={self.bias}, activation={_ACTIVATIONS[self.activation][0]}"
