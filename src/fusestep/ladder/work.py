"""The work of a training step by formula: what its products compute, and what a step has to move at least.

Both count the model and not the code that runs it, so rungs of one precision are measured by one yardstick: a rung that
computes something twice, or moves something that it need not, gets no credit for it.
"""

from __future__ import annotations

from fusestep.ladder.rungs import Precision
from fusestep.models import GPTConfig

FLOPS_FORMULA = (
    "3 · 2 · (layers · (4 · width² + 2 · width · ffn) + width · vocabulary) + 3 · layers · 2 · width · (context + 1) "
    "FLOPs a token: each product forward and its two backward, attention counted where its mask lets it look"
)
BYTES_FORMULA = (
    "28 · parameters (the optimizer, FP32) + 4 · parameters (their gradients, written) + 2 · b · product weights (read "
    "forward and backward) + 5 · b · (layers · (8 · width + 2 · ffn) + width + vocabulary) a token (what stands "
    "between the products: written, read forward and backward, its gradient written and read); b is 4 bytes in FP32, "
    "2 in BF16, and in FP8 2 with the blocks' weights at 1"
)

#: Bytes of an element between two products, and of a weight that a product reads.
_ACTIVATION_BYTES = {"fp32": 4, "bf16": 2, "fp8": 2}
_WEIGHT_BYTES = {"fp32": 4, "bf16": 2, "fp8": 1}


def flops_per_step(config: GPTConfig, batch: int) -> int:
    """Floating point operations of the products of one step, a multiply-add as two; `FLOPS_FORMULA`.

    A weight's product costs 2 operations a token forward and 4 backward, 6 in all; attention's two products cost
    2 · 2 · width · (T + 1) / 2 forward for T tokens of which each looks at those up to itself.

    Source: Chowdhery et al. 2022, arXiv:2204.02311, appendix B, with the causal half of its attention.
    """
    weights = _product_weights(config)
    attention = 3 * config.layers * 2 * config.width * (config.context + 1)
    return batch * config.context * (6 * weights + attention)


def bytes_per_step(config: GPTConfig, parameters: int, batch: int, precision: Precision) -> int:
    """Bytes that one step moves between chip and memory if nothing but the products' operands does; `BYTES_FORMULA`.

    A convention, as model FLOPs are: a fused kernel may keep some of this on the chip, plain code moves more.

    Args:
        parameters: of the model; weights, gradients and moments are FP32.
        batch: sequences of `config.context` tokens.
        precision: of the products.
    """
    element, weight = _ACTIVATION_BYTES[precision], _WEIGHT_BYTES[precision]
    head = (_ACTIVATION_BYTES[precision] - weight) * config.width * config.vocab_size  # the head is never in FP8
    weights = 2 * (weight * _product_weights(config) + head)
    between = config.layers * (8 * config.width + 2 * config.ffn_width) + config.width + config.vocab_size
    return 32 * parameters + weights + 5 * element * between * batch * config.context


def _product_weights(config: GPTConfig) -> int:
    """Elements of the weights that are multiplied by: query, key, value and output, the MLP's two, the head's."""
    per_layer = 4 * config.width**2 + 2 * config.width * config.ffn_width
    return config.layers * per_layer + config.width * config.vocab_size
