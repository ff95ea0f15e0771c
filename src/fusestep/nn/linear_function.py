"""What a linear layer computes in FP8, with its gradient, where each call casts its operands.

Each operand of each of the three products is cast: x and W forward, the gradient of y backward. Backward keeps what it
needs of x and W in FP8 alone:

    y = q(x) · q(W)ᵀ + b        dx = q(dy) · q(W)        dW = q(dy)ᵀ · q(x)        db = Σ dy, before the cast

Of a weight that is (in, out), as GPT-2's are, the transpose is W here, and its gradient is q(x)ᵀ · q(dy).

A gradient that nobody needs is not computed, nor is the operand cast for it. Calls whose casts are planned go through
planned_linear.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusestep.nn.fp8_module import activation_dtype, plain_apply
from fusestep.nn.head_split import cast_gradient, rows_of, split_gradients
from fusestep.nn.products import differentiated, forward_product, input_gradient, shaped, weight_gradient
from fusestep.nn.quantized_weights import whole
from fusestep.ops.quantize_joined import Joined

#: Slots of a linear layer.
INPUT, WEIGHT, GRADIENT = range(3)
OPERANDS = INPUT, WEIGHT


class _Linear(torch.autograd.Function):
    """y = x · weightᵀ + bias in FP8, or q, k and v that it consists of; `call` is (module, casts, sources of the
    weight, what is added in the place of the bias or None, whether gradients are enabled, whether this is the first
    micro-batch, the split into heads or None)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, call: tuple[Any, ...]) -> Any:
        module, casts, sources, added, grad, first, split = call
        x_needed, weight_needed, bias_needed, _ = ctx.needs_input_grad
        rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        x_columnwise, transposed = columnwise = grad and weight_needed, grad and x_needed
        dtype = activation_dtype(x)
        known = module._known_weight(weight, sources, WEIGHT, casts, grad, transposed, first)
        if known is not None:
            q_x = casts.input(rows, INPUT, x_columnwise)
        else:
            of = (whole(weight, sources), sources, OPERANDS, casts, grad, columnwise, first)
            q_x, known = module._quantized_operands(rows, *of)
        y = forward_product(casts, q_x, known, bias if added is None else added, dtype)
        if grad:
            through = (known.transposed, known.transposed_scale_inv) if x_needed else (None, None)
            ctx.save_for_backward(q_x.transposed, q_x.transposed_scale_inv, *through)
            sums_dtype = bias.dtype if bias is not None and bias_needed else None
            ctx.of = casts, x.shape, x.dtype, weight.dtype, sums_dtype, module._in_by_out
            ctx.split = split
        y = y if rows is x else shaped(y, x)
        return y if split is None else split.of(y)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        dy, _ = split_gradients(ctx.split, gradients)
        assert dy is not None  # what nothing depends on comes as zeros
        return differentiated("Linear", _Linear._gradients, ctx, dy)

    @staticmethod
    def _gradients(ctx: Any, dy: Tensor | Joined) -> tuple[Tensor | None, ...]:
        x_transposed, x_scale_inv, weight_transposed, weight_scale_inv = ctx.saved_tensors
        x_needed, weight_needed, _, _ = ctx.needs_input_grad
        casts, x_shape, x_dtype, weight_dtype, sums_dtype, in_by_out = ctx.of
        dx = dweight = dbias = None
        if x_needed or weight_needed:
            q, dbias = cast_gradient(casts, dy, GRADIENT, x_needed, weight_needed, sums_dtype)
            features = x_shape[-1]
            if x_needed:
                dx = input_gradient(casts, q, weight_transposed, weight_scale_inv, features, x_dtype)
            if weight_needed:
                of_weight = features, weight_dtype, in_by_out
                dweight = weight_gradient(casts, q, x_transposed, x_scale_inv, *of_weight)
            if dx is not None and len(x_shape) != 2:
                dx = dx.view(x_shape)
        elif sums_dtype is not None:
            dbias = rows_of(dy).sum(0, dtype=torch.float32).to(sums_dtype)
        return dx, dweight, dbias, None


apply_linear = plain_apply(_Linear)
