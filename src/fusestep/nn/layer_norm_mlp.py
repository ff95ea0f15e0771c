"""LayerNormMLP: a norm, a linear layer, an activation and another linear layer.

    y = act(norm(x + residual) · W₁ᵀ + b₁) · W₂ᵀ + b₂

In FP8 the norm and the activation, and backward the activation's gradient, are cast in the pass that computes them:
neither the norm's output nor the activation exists in high precision. Backward keeps the normalised input, the
statistics of its rows, h = the first product, and the operands of products in FP8.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fusestep.dispatch import Choice
from fusestep.distributed.tensor_parallel import TensorParallel, fill_part, mark_split, tensor_parallel
from fusestep.errors import UserError
from fusestep.fp8.casts import Casts, Norm
from fusestep.fp8.context import Region
from fusestep.fp8.model_init import prepare_weights
from fusestep.nn.biased_linear import linear_by_copies, sums_bias, sums_copied_bias
from fusestep.nn.fp8_module import Initialiser, activation_dtype, initialise, plain_apply
from fusestep.nn.fused_norm import (
    Normalization,
    NormedModule,
    kept_for_weight,
    norm_gradients,
    present,
    sorted_out,
)
from fusestep.nn.operands import autocast_operands, in_place_of_bias
from fusestep.nn.products import (
    differentiated,
    forward_product,
    input_gradient,
    plain_linear,
    shaped,
    weight_gradient,
)
from fusestep.ops.activation import activation as activate
from fusestep.ops.activation import is_gated
from fusestep.ops.quantize import transpose_bytes

FC1_INPUT, FC1_WEIGHT, FC2_INPUT, FC2_WEIGHT, FC1_GRADIENT, FC2_GRADIENT = range(6)


class LayerNormMLP(NormedModule):
    """LayerNorm or RMSNorm, then an MLP of two linear layers.

    Args:
        hidden_size: features of input and output.
        ffn_hidden_size: features between the layers.
        bias: whether both layers have one.
        device, dtype, name: as of Linear.
        eps: added to the variance, in units of x².
        normalization: "LayerNorm" or "RMSNorm".
        activation: one of fusestep.ops.activation.ACTIVATIONS; a gated one makes the first layer twice as wide.
        zero_centered_gamma: keep the norm's weight as its difference from 1.
        return_layernorm_output: return the norm's output too.
        init_method, output_layer_init_method: fill the first and second weight in place; None: N(0, 0.023).
        return_bias: do not add the second layer's bias but return it too.
        tp_group: the ranks that share the layers, the first by its rows and the second by its columns; see
            docs/parallelism. `ffn_hidden_size`, the attribute, is then this rank's part.
        sequence_parallel, sequence_dim: input, norm and output are of this rank's slice of the sequence, along that
            dimension.

    Parameters: `layer_norm_weight`, `layer_norm_bias` (LayerNorm only), `fc1_weight`, `fc1_bias`, `fc2_weight`,
    `fc2_bias`.
    """

    SLOTS = ("fc1_input", "fc1_weight", "fc2_input", "fc2_weight", "grad_fc1_output", "grad_fc2_output")

    fc1_bias: nn.Parameter | None
    fc2_bias: nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        eps: float = 1e-5,
        normalization: Normalization = "LayerNorm",
        activation: str = "gelu",
        zero_centered_gamma: bool = False,
        return_layernorm_output: bool = False,
        init_method: Initialiser | None = None,
        output_layer_init_method: Initialiser | None = None,
        return_bias: bool = False,
        name: str | None = None,
        tp_group: Any = None,
        sequence_parallel: bool = False,
        sequence_dim: int = 1,
    ) -> None:
        super().__init__(name)
        for what, size in (("hidden_size", hidden_size), ("ffn_hidden_size", ffn_hidden_size)):
            if not isinstance(size, int) or size < 1:
                raise UserError(f"LayerNormMLP: {what} is {size!r}; pass an integer of at least 1.")
        self._parallel = tensor_parallel(type(self).__name__, tp_group, sequence_parallel, sequence_dim)
        if self._parallel is not None:
            ffn_hidden_size = self._parallel.share("ffn_hidden_size", ffn_hidden_size)
        self.hidden_size, self.ffn_hidden_size, self.activation, self.has_bias = (
            hidden_size,
            ffn_hidden_size,
            activation,
            bias,
        )
        self.init_method, self.output_layer_init_method = init_method, output_layer_init_method
        self.return_bias, self.return_layernorm_output = return_bias, return_layernorm_output
        fc1_features = ffn_hidden_size * (2 if is_gated(activation) else 1)
        self._register_norm(hidden_size, eps, normalization, zero_centered_gamma, device, dtype)
        self.fc1_weight = nn.Parameter(torch.empty(fc1_features, hidden_size, device=device, dtype=dtype))
        self._register_bias("fc1_bias", fc1_features, device, dtype)
        self.fc2_weight = nn.Parameter(torch.empty(hidden_size, ffn_hidden_size, device=device, dtype=dtype))
        self._register_bias("fc2_bias", hidden_size, device, dtype)
        self.reset_parameters()

    def _register_bias(self, name: str, features: int, device: Any, dtype: torch.dtype | None) -> None:
        bias = nn.Parameter(torch.empty(features, device=device, dtype=dtype)) if self.has_bias else None
        self.register_parameter(name, bias)

    def reset_parameters(self) -> None:
        """Initialise the parameters, and forget all scales."""
        self._reset_norm()
        parallel, second = self._parallel, self.output_layer_init_method
        fill_part(self.fc1_weight, lambda full: initialise(full, self.init_method), parallel, self._fc1_blocks())
        fill_part(self.fc2_weight, lambda full: initialise(full, second), parallel, dim=1)
        for bias in (self.fc1_bias, self.fc2_bias):
            if bias is not None:
                nn.init.zeros_(bias)
        self._reset_fp8()
        prepare_weights(self, ["fc1_weight", "fc2_weight"])
        self._mark_parts()

    def _mark_parts(self) -> None:
        """Say on the parameters of which this rank has a part that it is one."""
        if self._parallel is None:
            return
        mark_split(self.fc1_weight, 0, self._parallel)
        mark_split(self.fc2_weight, 1, self._parallel)
        if self.fc1_bias is not None:
            mark_split(self.fc1_bias, 0, self._parallel)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._mark_parts()  # parameters of a copy have no marks

    def _fc1_blocks(self) -> tuple[int, ...] | None:
        """The rows of the whole first weight of which each rank gets its part: both halves of a gated activation."""
        if self._parallel is None or not is_gated(self.activation):
            return None
        return (self._parallel.size * self.ffn_hidden_size,) * 2

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None, residual: Tensor | None = None) -> Any:
        """Normalise and run the MLP.

        Args:
            x: (…, hidden_size); any strides, zero rows too.
            is_first_microbatch: as of Linear.
            residual: of x's shape, added to x before the norm.
        Returns: y (…, hidden_size), or a tuple of it and, in this order, what was asked for: the second bias
            (return_bias), the norm's output (return_layernorm_output), x + residual (where a residual is given).
        Raises: UserError for features, dtypes or devices that do not fit.
        """
        region = self._region_of_call()
        if torch.compiler.is_compiling() and self._leaves_graph(region):
            return self._outside_of_a_graph(x, is_first_microbatch, residual)
        self._check_input(x, self.hidden_size, region)
        self._check_residual(x, residual)
        if self._parallel is not None:
            y, total, normed = self._shared(self._parallel, x, residual, region, is_first_microbatch)
        elif region is None or not region.enabled or not x.numel():
            y, total, normed = self._in_high_precision(x, residual, region)
        else:
            grad = torch.is_grad_enabled()
            casts = self._casts_of(region, records=grad and self.training)
            settings = (self.eps, self.centred, self.activation, self.return_layernorm_output)
            result = _apply(
                x,
                residual,
                *self._norm_parameters(),
                self._parameter("fc1_weight"),
                self._parameter("fc1_bias"),
                self._parameter("fc2_weight"),
                None if self.return_bias else self._parameter("fc2_bias"),
                (self, casts, grad, is_first_microbatch, settings),
            )
            y, total, normed = sorted_out(result, residual is not None, self.return_layernorm_output)
        if not (self.return_bias or self.return_layernorm_output or residual is not None):
            return y
        results: list[Any] = [y]
        if self.return_bias:
            bias = self._parameter("fc2_bias")
            results.append(bias if self._parallel is None else self._parallel.shared(bias)[0])
        if self.return_layernorm_output:
            results.append(normed)
        if residual is not None:
            results.append(total)
        return tuple(results)

    def _in_high_precision(
        self, x: Tensor, residual: Tensor | None, region: Region | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        is_inner = region is None and not self.return_layernorm_output
        normed, total = self._normalised(x, residual, for_product=is_inner)
        return self._products(normed, region, self.has_bias and not self.return_bias), total, normed

    def _shared(
        self, parallel: TensorParallel, x: Tensor, residual: Tensor | None, region: Region | None, first: bool | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The same of ranks that share the layers, in FP8 too: the norm stands apart from the cast of its output."""
        normed, total = self._normalised(x, residual)
        entered = parallel.enter(normed)
        if region is None or not region.enabled or not x.numel():
            y = self._products(entered, region, has_bias=False)
        else:
            grad = torch.is_grad_enabled()
            casts = self._casts_of(region, records=grad and self.training)
            weights = (self._parameter("fc1_weight"), self._parameter("fc1_bias"), self._parameter("fc2_weight"), None)
            settings = (self.eps, self.centred, self.activation, False)
            y = _apply(entered, None, None, None, *weights, (self, casts, grad, first, settings))
        (bias,) = (None,) if self.return_bias else parallel.shared(self._parameter("fc2_bias"))
        return parallel.leave(y, bias), total, normed

    def _products(self, normed: Tensor, region: Region | None, has_bias: bool) -> Tensor:
        """Both layers in high precision; `has_bias`: the second's is added."""
        h, fc1_weight, summed = self._layer("fc1", normed, region, self._parameter("fc1_bias"), leaves_sums=True)
        a = activate(h, self.activation, summed)
        y, fc2_weight, _ = self._layer("fc2", a, region, self._parameter("fc2_bias") if has_bias else None)
        cast = (normed, fc1_weight, a, fc2_weight)
        for index, operand in zip((FC1_INPUT, FC1_WEIGHT, FC2_INPUT, FC2_WEIGHT), cast, strict=True):
            self._calibrate(region, index, operand)
        self._calibrate_gradient(region, FC1_GRADIENT, h)
        self._calibrate_gradient(region, FC2_GRADIENT, y)
        return y

    def _layer(
        self, name: str, x: Tensor, region: Region | None, bias: Tensor | None, *, leaves_sums: bool = False
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The product of one layer in high precision, its weight, and the bias that still wants its gradient.

        With `leaves_sums` that of the bias may be left to who computes the gradient of the product.
        """
        weight = self._parameter(f"{name}_weight")
        biases = None if bias is None else (bias,)
        copies = autocast_operands(self, x, region, (weight,), biases)
        left = None
        if copies is not None:
            if leaves_sums and sums_copied_bias(x, *copies):
                left, biases = bias, None
            return linear_by_copies(x, *copies, (weight,), biases), weight, left
        if leaves_sums and sums_bias(x, weight, bias):
            left = bias
        return plain_linear(self, x, weight, bias if left is None else left.detach(), region), weight, left

    def _first_weight(self) -> Tensor:
        weight: Tensor = self._parameter("fc1_weight")
        return weight

    def implementation(self) -> Choice:
        """What the norm and the products run as on the device of the parameters, and why."""
        return self._normed_choice()

    def extra_repr(self) -> str:
        named = "" if self.name is None else f", name={self.name!r}"
        shared = "" if self._parallel is None else f", shared by {self._parallel.size} ranks"
        return (
            f"hidden_size={self.hidden_size}, ffn_hidden_size={self.ffn_hidden_size}, bias={self.has_bias}, "
            f"normalization={self.normalization!r}, activation={self.activation!r}{shared}{named}"
        )


class _LayerNormMLP(torch.autograd.Function):
    """y, or a tuple with x + residual and the norm where they are asked for. Without a norm's weight, x is its output.

    `call` is (module, casts, whether gradients are enabled, whether this is the first micro-batch, (eps, centred,
    activation, whether to give the norm)).
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        norm_weight: Tensor | None,
        norm_bias: Tensor | None,
        fc1_weight: Tensor,
        fc1_bias: Tensor | None,
        fc2_weight: Tensor,
        fc2_bias: Tensor | None,
        call: tuple[Any, ...],
    ) -> Any:
        module, casts, grad, first, (eps, centred, activation, keep_output) = call
        *norm_needed, fc1_needed, fc1_bias_needed, fc2_needed, fc2_bias_needed, _ = ctx.needs_input_grad
        through_fc1 = grad and any(norm_needed)
        through_fc2 = through_fc1 or (grad and (fc1_needed or fc1_bias_needed))
        dtype = activation_dtype(x)
        total = statistics = output = None
        if norm_weight is None:
            n = casts.input(x.reshape(-1, x.shape[-1]), FC1_INPUT, grad and fc1_needed)
        else:
            norm = Norm(norm_weight, norm_bias, eps, centred)
            n, total, statistics, output = casts.norm(
                x, residual, norm, FC1_INPUT, grad and fc1_needed, dtype, keep_output
            )
        added = [in_place_of_bias(module, (bias,), dtype, grad) for bias in (fc1_bias, fc2_bias)]
        w1 = module._quantized_weight(fc1_weight, (fc1_weight,), FC1_WEIGHT, casts, grad, through_fc1, first)
        h = forward_product(casts, n, w1, fc1_bias if added[0] is None else added[0], dtype)
        a = casts.activation(h, activation, FC2_INPUT, grad and fc2_needed)
        w2 = module._quantized_weight(fc2_weight, (fc2_weight,), FC2_WEIGHT, casts, grad, through_fc2, first)
        y = forward_product(casts, a, w2, fc2_bias if added[1] is None else added[1], dtype)
        if grad:
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(
                (None if norm_weight is None else x) if residual is None else total,
                statistics,
                norm_weight,
                norm_bias,
                *kept_for_weight(n, fc1_needed),
                w1.transposed if through_fc1 else None,
                w1.transposed_scale_inv if through_fc1 else None,
                h if through_fc2 else None,
                a.transposed,
                a.transposed_scale_inv,
                w2.transposed if through_fc2 else None,
                w2.transposed_scale_inv if through_fc2 else None,
            )
            ctx.casts, ctx.centred, ctx.activation = casts, centred, activation
            ctx.is_transposed, ctx.shape, ctx.ffn = n.transposed is not None, x.shape, fc2_weight.shape[1]
            ctx.dtypes = dtype, x.dtype, None if residual is None else residual.dtype
            ctx.weight_dtypes = fc1_weight.dtype, fc2_weight.dtype
            ctx.sums_dtypes = (
                fc1_bias.dtype if fc1_bias is not None and fc1_bias_needed else None,
                fc2_bias.dtype if fc2_bias is not None and fc2_bias_needed else None,
            )
        ctx.has_total, ctx.has_output = total is not None, output is not None
        return present(shaped(y, x), total, output)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, *others: Tensor | None) -> Any:
        dtotal = others[0] if ctx.has_total else None
        dnormed = others[-1] if ctx.has_output else None
        return differentiated("LayerNormMLP", _LayerNormMLP._gradients, ctx, dy, dtotal, dnormed)

    @staticmethod
    def _gradients(
        ctx: Any, dy: Tensor | None, dtotal: Tensor | None, dnormed: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        x, statistics, norm_weight, norm_bias, n, n_scale_inv, *operands = ctx.saved_tensors
        w1, w1_scale_inv, h, a, a_scale_inv, w2, w2_scale_inv = operands
        *norm_needed, fc1_needed, _, fc2_needed, _, _ = ctx.needs_input_grad
        fc1_sums_dtype, fc2_sums_dtype = ctx.sums_dtypes
        through_fc1 = any(norm_needed)
        through_fc2 = through_fc1 or fc1_needed or fc1_sums_dtype is not None
        dtype, x_dtype, residual_dtype = ctx.dtypes
        fc1_dtype, fc2_dtype = ctx.weight_dtypes
        casts: Casts = ctx.casts
        dn = dfc1 = dfc1_bias = dfc2 = dfc2_bias = None
        if dy is not None:
            rows = dy if dy.dim() == 2 else dy.reshape(-1, dy.shape[-1])
            if through_fc2 or fc2_needed:
                q, dfc2_bias = casts.gradient(rows, FC2_GRADIENT, through_fc2, fc2_needed, fc2_sums_dtype)
                if fc2_needed:
                    dfc2 = weight_gradient(casts, q, a, a_scale_inv, ctx.ffn, fc2_dtype)
            elif fc2_sums_dtype is not None:
                dfc2_bias = rows.sum(0, dtype=torch.float32).to(fc2_sums_dtype)
            if through_fc2:
                da = input_gradient(casts, q, w2, w2_scale_inv, ctx.ffn, dtype)
                rowwise = through_fc1 or not fc1_needed  # for the bias alone there is no product, but one cast
                dh, dfc1_bias = casts.activation_gradient(
                    da, h, ctx.activation, FC1_GRADIENT, rowwise, fc1_needed, fc1_sums_dtype
                )
                del da
                if through_fc1:
                    dn = input_gradient(casts, dh, w1, w1_scale_inv, ctx.shape[-1], dtype).view(ctx.shape)
                if fc1_needed:
                    transposed = n if ctx.is_transposed else transpose_bytes(n)
                    dfc1 = weight_gradient(casts, dh, transposed, n_scale_inv, ctx.shape[-1], fc1_dtype)
        if norm_weight is None:
            dx = None if dn is None else dn.to(x_dtype)
            return dx, None, None, None, dfc1, dfc1_bias, dfc2, dfc2_bias, None
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
        return *gradients, dfc1, dfc1_bias, dfc2, dfc2_bias, None


_apply = plain_apply(_LayerNormMLP)
