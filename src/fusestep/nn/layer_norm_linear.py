"""LayerNormLinear: a norm and the linear layer after it, which in FP8 are one: the norm's output exists in FP8 only.

    y = norm(x + residual) · Wᵀ + b

Backward keeps the normalised input, the statistics of its rows, and the operands of products in FP8; the transpose of
the norm's output, which the weight's gradient needs, is made when it is needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fusestep.dispatch import Choice
from fusestep.distributed.tensor_parallel import Mode, checked_mode
from fusestep.fp8.casts import Casts, Norm
from fusestep.nn.fp8_module import Initialiser, activation_dtype, plain_apply
from fusestep.nn.fused_norm import (
    Normalization,
    NormedModule,
    kept_for_weight,
    norm_gradients,
    present,
    sorted_out,
)
from fusestep.nn.head_split import HeadSplit, cast_gradient, rows_of, split_gradients
from fusestep.nn.linear import Linear
from fusestep.nn.linear_function import GRADIENT, INPUT, WEIGHT
from fusestep.nn.products import differentiated, forward_product, input_gradient, shaped, weight_gradient
from fusestep.ops.quantize import transpose_bytes
from fusestep.ops.quantize_joined import Joined


class LayerNormLinear(Linear, NormedModule):
    """LayerNorm or RMSNorm, then Linear.

    Args:
        in_features, out_features, bias, device, dtype, init_method, return_bias, parameters_split, name: as of Linear.
        eps: added to the variance, in units of x².
        normalization: "LayerNorm" or "RMSNorm".
        zero_centered_gamma: keep the norm's weight as its difference from 1.
        return_layernorm_output: return the norm's output too.
        parallel_mode, tp_group, sequence_parallel, sequence_dim, column_blocks: as of Linear, but for "row": a norm
            needs all features. With sequence parallelism the norm works on this rank's slice of the sequence. Where
            ranks share the layer the norm's output exists in high precision, between the norm and its cast.

    Parameters: `layer_norm_weight`, `layer_norm_bias` (LayerNorm only), `weight`, `bias`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        eps: float = 1e-5,
        normalization: Normalization = "LayerNorm",
        zero_centered_gamma: bool = False,
        return_layernorm_output: bool = False,
        init_method: Initialiser | None = None,
        return_bias: bool = False,
        parameters_split: Mapping[str, int] | Sequence[str] | None = None,
        name: str | None = None,
        parallel_mode: Mode | None = None,
        tp_group: Any = None,
        sequence_parallel: bool = False,
        sequence_dim: int = 1,
        column_blocks: Sequence[int] | None = None,
    ) -> None:
        super().__init__(
            in_features,
            out_features,
            bias,
            device,
            dtype,
            init_method=init_method,
            return_bias=return_bias,
            parameters_split=parameters_split,
            name=name,
            parallel_mode=checked_mode(type(self).__name__, parallel_mode, ("column",)),
            tp_group=tp_group,
            sequence_parallel=sequence_parallel,
            sequence_dim=sequence_dim,
            column_blocks=column_blocks,
        )
        self.return_layernorm_output = return_layernorm_output
        products = list(self._parameters)
        self._register_norm(in_features, eps, normalization, zero_centered_gamma, device, dtype)
        # The norm's parameters come first, as in a state dict of Transformer Engine; optimizers go by this order.
        for parameter in products:
            self._parameters[parameter] = self._parameters.pop(parameter)
        self._reset_norm()

    def reset_parameters(self) -> None:
        """Initialise the parameters, and forget all scales."""
        self._reset_norm()
        self._reset_linear()

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        is_first_microbatch: bool | None = None,
        residual: Tensor | None = None,
        split: HeadSplit | None = None,
        *,
        returns_input: bool = False,
    ) -> Any:
        """Normalise and multiply.

        Args:
            x: (…, in_features); any strides, zero rows too.
            is_first_microbatch: as of Linear.
            residual: of x's shape, added to x before the norm.
            split: return the queries, keys and values that y consists of, (q, k, v), in the place of y.
            returns_input: without a residual, return x where x + residual would be: its gradient is then added in the
                norm's own backward. Not under torch.compile.
        Returns: y (…, out_features), or a tuple of it and, in this order, what was asked for: the bias (return_bias),
            the norm's output (return_layernorm_output), x + residual (where a residual is given).
        Raises: UserError for features, dtypes or devices that do not fit.
        """
        region = self._region_of_call()
        if torch.compiler.is_compiling() and self._leaves_graph(region):
            return self._outside_of_a_graph(x, is_first_microbatch, residual, *(() if split is None else (split,)))
        self._check_input(x, self.in_features, region)
        self._check_residual(x, residual)
        total = normed = heads = None
        has_total = residual is not None or returns_input
        if self._parallel is not None:
            normed, total = self._normalised(x, residual, returns_input=returns_input)
            product = Linear.forward(self, normed, is_first_microbatch, split)
            y, bias = product if self.return_bias else (product, None)
            heads = None if split is None else y
        elif region is None or not region.enabled or not x.numel():
            is_inner = region is None and not self.return_layernorm_output
            normed, total = self._normalised(x, residual, for_product=is_inner, returns_input=returns_input)
            y = self._in_high_precision(normed, region, not self.return_bias)
            bias = self._bias() if self.return_bias else None
        else:
            grad = torch.is_grad_enabled()
            casts = self._casts_of(region, records=grad and self.training)
            if self._is_split_in_fp8():
                normed, total = self._normalised(x, residual, returns_input=returns_input)
                y, bias = self._by_parts(normed, casts, grad, is_first_microbatch, not self.return_bias)
            else:
                weight, sources, added, biases = self._weight_and_bias(not self.return_bias)
                other = self._in_place_of(biases, x)
                settings = (self.eps, self.centred, self.return_layernorm_output, returns_input)
                call = (self, casts, sources, other, grad, is_first_microbatch, settings, split)
                result = _apply(x, residual, *self._norm_parameters(), weight, added, call)
                bias = self._bias() if self.return_bias else None
                if split is not None:
                    heads, result = result[:3], result[2:]  # v stands where y would
                y, total, normed = sorted_out(result, has_total, self.return_layernorm_output)
        if split is not None:
            y = split.views(y) if heads is None else heads
        if not (self.return_bias or self.return_layernorm_output or has_total):
            return y
        results: list[Any] = [y]
        if self.return_bias:
            results.append(bias)
        if self.return_layernorm_output:
            results.append(normed)
        if has_total:
            results.append(total)
        return tuple(results)

    def implementation(self) -> Choice:
        """What the norm and the product run as on the device of the parameters, and why."""
        return self._normed_choice()


class _LayerNormLinear(torch.autograd.Function):
    """y, or a tuple with x + residual and the norm where they are asked for; q, k and v instead of y with a split.

    `call` is that of _Linear, (eps, centred, whether to give the norm, whether to give x for x + residual), and the
    split or None.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        norm_weight: Tensor,
        norm_bias: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        call: tuple[Any, ...],
    ) -> Any:
        module, casts, sources, added, grad, first, (eps, centred, keep_output, returns_input), split = call
        *norm_needed, weight_needed, bias_needed, _ = ctx.needs_input_grad
        through = grad and any(norm_needed)
        dtype = activation_dtype(x)
        norm = Norm(norm_weight, norm_bias, eps, centred)
        normed = casts.norm(x, residual, norm, INPUT, grad and weight_needed, dtype, keep_output)
        quantized = normed.quantized
        quantized_weight = module._quantized_weight(weight, sources, WEIGHT, casts, grad, through, first)
        y = forward_product(casts, quantized, quantized_weight, bias if added is None else added, dtype)
        if grad:
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(
                x if residual is None else normed.total,
                normed.statistics,
                norm_weight,
                norm_bias,
                *kept_for_weight(quantized, weight_needed),
                quantized_weight.transposed if through else None,
                quantized_weight.transposed_scale_inv if through else None,
            )
            ctx.casts, ctx.centred, ctx.is_transposed = casts, centred, quantized.transposed is not None
            ctx.dtypes = dtype, x.dtype, None if residual is None else residual.dtype, weight.dtype
            ctx.sums_dtype = bias.dtype if bias is not None and bias_needed else None
        total = x if returns_input and residual is None else normed.total
        ctx.has_total, ctx.has_output, ctx.split = total is not None, normed.output is not None, split
        y = shaped(y, x)
        return present(*((y,) if split is None else split.of(y)), total, normed.output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        dy, others = split_gradients(ctx.split, gradients)
        dtotal = others[0] if ctx.has_total else None
        dnormed = others[-1] if ctx.has_output else None
        return differentiated("LayerNormLinear", _LayerNormLinear._gradients, ctx, dy, dtotal, dnormed)

    @staticmethod
    def _gradients(
        ctx: Any, dy: Tensor | Joined | None, dtotal: Tensor | None, dnormed: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        x, statistics, norm_weight, norm_bias, kept, scale_inv, weight_transposed, weight_scale_inv = ctx.saved_tensors
        *norm_needed, weight_needed, _, _ = ctx.needs_input_grad
        dtype, x_dtype, residual_dtype, weight_dtype = ctx.dtypes
        casts: Casts = ctx.casts
        dn = dweight = dbias = None
        through = any(norm_needed)
        if dy is not None:
            width = x.shape[-1]
            if through or weight_needed:
                q, dbias = cast_gradient(casts, dy, GRADIENT, through, weight_needed, ctx.sums_dtype)
                if through:
                    dn = input_gradient(casts, q, weight_transposed, weight_scale_inv, width, dtype).view(x.shape)
                if weight_needed:
                    transposed = kept if ctx.is_transposed else transpose_bytes(kept)
                    dweight = weight_gradient(casts, q, transposed, scale_inv, width, weight_dtype)
            elif ctx.sums_dtype is not None:
                dbias = rows_of(dy).sum(0, dtype=torch.float32).to(ctx.sums_dtype)
        gradients = norm_gradients(
            dn,
            dtotal,
            dnormed,
            x,
            statistics,
            norm_weight,
            norm_bias,
            ctx.centred,
            norm_needed,
            x_dtype,
            residual_dtype,
        )
        return *gradients, dweight, dbias, None


_apply = plain_apply(_LayerNormLinear)
