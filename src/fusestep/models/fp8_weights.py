"""Weights of a trained model in FP8 alone, for generation in half of bf16's memory."""

from __future__ import annotations

from torch import nn

from fusestep.fp8 import fp8_model_init
from fusestep.fp8.model_init import prepare_weights
from fusestep.fp8.recipes import Recipe
from fusestep.fp8.tensor import quantized_weight
from fusestep.nn.fp8_module import FP8Module


def keep_weights_in_fp8(model: nn.Module, recipe: Recipe) -> None:
    """Cast the weights of a model's FP8 modules, and keep nothing else of them. Embeddings, norms and biases stay.

    What `fusestep.fp8.fp8_model_init` does to modules that are built, for those that have learnt already; one module at
    a time, so that never more than one weight is there twice. Move the model to its device afterwards.

    Args:
        recipe: how weights are cast.
    """
    with fp8_model_init(recipe=recipe):
        for module in model.modules():
            if isinstance(module, FP8Module):
                # What an FP8 module has of two dimensions is what it multiplies by.
                prepare_weights(module, [name for name, p in module.named_parameters(recurse=False) if p.dim() == 2])


def weight_bytes(model: nn.Module) -> int:
    """Bytes that the parameters of a model take, scales of those in FP8 included."""
    return sum(_bytes_of(parameter) for parameter in model.parameters())


def _bytes_of(parameter: nn.Parameter) -> int:
    quantized = quantized_weight(parameter)
    if quantized is None:
        return parameter.nbytes
    held = (quantized.data, quantized.transposed, quantized.scale_inv)
    return sum(tensor.nbytes for tensor in held if tensor is not None)
