"""apex.normalization.fused_layer_norm: modules, functions and autograd classes over fusestep.nn.functional.

    y = (x − mean) / √(var + eps) · weight + bias,        RMS: y = x / √(mean(x²) + eps) · weight

Right where Apex is not: y is rounded once, a weight of 0 has an exact gradient, and memory_efficient keeps the input
where the output does not determine it. Any dtypes of input and weight go together, and CPU tensors are served.
"""

from __future__ import annotations

import numbers
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fusestep.compat.implementation import Applied, ServedModule, ran
from fusestep.nn import functional

__all__ = [
    "FusedLayerNorm",
    "FusedLayerNormAffineFunction",
    "FusedLayerNormAffineMixedDtypesFunction",
    "FusedLayerNormFunction",
    "FusedRMSNorm",
    "FusedRMSNormAffineFunction",
    "FusedRMSNormAffineMixedDtypesFunction",
    "FusedRMSNormFunction",
    "MixedFusedLayerNorm",
    "MixedFusedRMSNorm",
    "fused_layer_norm",
    "fused_layer_norm_affine",
    "fused_rms_norm",
    "fused_rms_norm_affine",
    "manual_rms_norm",
    "mixed_dtype_fused_layer_norm_affine",
    "mixed_dtype_fused_rms_norm_affine",
]

Shape = int | Sequence[int]


def _shape(normalized_shape: Shape) -> torch.Size:
    if isinstance(normalized_shape, numbers.Integral):
        return torch.Size((int(normalized_shape),))
    return torch.Size(normalized_shape)  # type: ignore[arg-type]


def normed(
    x: Tensor,
    shape: Shape,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    centred: bool,
    memory_efficient: bool = False,
    mixed: bool = False,
) -> Tensor:
    """The norm with Apex's rules for the dtype of y: x's; if `mixed` the weight's; the autocast dtype under autocast.

    Under CUDA autocast x is cast to its dtype first, as Apex does (torch's own norms compute and return fp32 there).
    The weight keeps its own dtype, which Apex rounds too.
    """
    dtype = weight.dtype if mixed and weight is not None else x.dtype
    is_autocast = x.is_cuda and x.dtype is not torch.float64 and torch.is_autocast_enabled("cuda")
    if is_autocast:
        dtype = torch.get_autocast_dtype("cuda")
        x = x.to(dtype)
    elif x.dtype is not dtype:
        # Wide enough for both, so that y is rounded once, below.
        x = x.to(torch.promote_types(x.dtype, dtype))
    if not is_autocast:
        return _plain(x, shape, weight, bias, eps, centred, memory_efficient).to(dtype)
    with torch.autocast("cuda", enabled=False):
        return _plain(x, shape, weight, bias, eps, centred, memory_efficient)


def _plain(
    x: Tensor,
    shape: Shape,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centred: bool,
    memory_efficient: bool,
) -> Tensor:
    if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        # torch.jit.trace, and the ONNX export over it, keep operations of torch's own alone.
        compute = x.dtype if weight is None else torch.promote_types(x.dtype, weight.dtype)
        w = None if weight is None else weight.to(compute)
        b = None if bias is None else bias.to(compute)
        if centred:
            return nn.functional.layer_norm(x.to(compute), _shape(shape), w, b, eps).to(x.dtype)
        return nn.functional.rms_norm(x.to(compute), _shape(shape), w, eps).to(x.dtype)
    if centred:
        return functional.layer_norm(x, _shape(shape), weight, bias, eps, memory_efficient=memory_efficient)
    return functional.rms_norm(x, _shape(shape), weight, eps, memory_efficient=memory_efficient)


def _told(name: str, x: Tensor, *, centred: bool) -> None:
    op = "layer_norm" if centred else "rms_norm"
    ran(f"apex.normalization.fused_layer_norm.{name}", f"fusestep.nn.functional.{op}", op, x)


# The functions. The order of arguments, and eps=1e-6, are Apex's.


def fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """LayerNorm with weight and bias; y in the input's dtype."""
    _told("fused_layer_norm_affine", input, centred=True)
    return normed(input, normalized_shape, weight, bias, eps, centred=True, memory_efficient=memory_efficient)


def mixed_dtype_fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """LayerNorm with weight and bias; y in the weight's dtype."""
    _told("mixed_dtype_fused_layer_norm_affine", input, centred=True)
    return normed(
        input, normalized_shape, weight, bias, eps, centred=True, memory_efficient=memory_efficient, mixed=True
    )


def fused_layer_norm(
    input: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """LayerNorm without parameters."""
    _told("fused_layer_norm", input, centred=True)
    return normed(input, normalized_shape, None, None, eps, centred=True, memory_efficient=memory_efficient)


def fused_rms_norm_affine(
    input: Tensor, weight: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """RMSNorm with a weight; y in the input's dtype."""
    _told("fused_rms_norm_affine", input, centred=False)
    return normed(input, normalized_shape, weight, None, eps, centred=False, memory_efficient=memory_efficient)


def mixed_dtype_fused_rms_norm_affine(
    input: Tensor, weight: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """RMSNorm with a weight; y in the weight's dtype."""
    _told("mixed_dtype_fused_rms_norm_affine", input, centred=False)
    return normed(
        input, normalized_shape, weight, None, eps, centred=False, memory_efficient=memory_efficient, mixed=True
    )


def fused_rms_norm(input: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False) -> Tensor:
    """RMSNorm without a weight."""
    _told("fused_rms_norm", input, centred=False)
    return normed(input, normalized_shape, None, None, eps, centred=False, memory_efficient=memory_efficient)


def manual_rms_norm(input: Tensor, normalized_shape: Shape, weight: Tensor | None, eps: float) -> Tensor:
    """RMSNorm as Apex computes it on a CPU: y in the weight's dtype, without a weight in the input's."""
    _told("manual_rms_norm", input, centred=False)
    return normed(input, normalized_shape, weight, None, eps, centred=False, mixed=True)


# What Megatron-style code calls as an autograd.Function.


class FusedLayerNormAffineFunction(Applied):
    """`apply` is fused_layer_norm_affine."""

    apply = staticmethod(fused_layer_norm_affine)


class FusedLayerNormAffineMixedDtypesFunction(Applied):
    """`apply` is mixed_dtype_fused_layer_norm_affine."""

    apply = staticmethod(mixed_dtype_fused_layer_norm_affine)


class FusedLayerNormFunction(Applied):
    """`apply` is fused_layer_norm."""

    apply = staticmethod(fused_layer_norm)


class FusedRMSNormAffineFunction(Applied):
    """`apply` is fused_rms_norm_affine."""

    apply = staticmethod(fused_rms_norm_affine)


class FusedRMSNormAffineMixedDtypesFunction(Applied):
    """`apply` is mixed_dtype_fused_rms_norm_affine."""

    apply = staticmethod(mixed_dtype_fused_rms_norm_affine)


class FusedRMSNormFunction(Applied):
    """`apply` is fused_rms_norm."""

    apply = staticmethod(fused_rms_norm)


# The modules. Like Apex's, and unlike fusestep.nn's, they are no nn.LayerNorm.


class _Norm(ServedModule):
    """What the four have in common."""

    centred: bool
    mixed = False
    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        super().__init__()
        self.normalized_shape = _shape(normalized_shape)
        self.eps = eps
        self.elementwise_affine = elementwise_affine
        self.memory_efficient = memory_efficient
        for name in ("weight", "bias") if self.centred else ("weight",):
            value = nn.Parameter(torch.empty(self.normalized_shape)) if elementwise_affine else None
            self.register_parameter(name, value)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weight 1, bias 0."""
        if self.weight is not None:
            nn.init.ones_(self.weight)
            if self.centred and self.bias is not None:
                nn.init.zeros_(self.bias)

    def forward(self, input: Tensor) -> Tensor:
        """(…, *normalized_shape) to the same shape. Raises: UserError for shapes, dtypes or devices that do not fit."""
        self._ran(input)
        return normed(
            input,
            self.normalized_shape,
            self.weight,
            self.bias if self.centred else None,
            self.eps,
            centred=self.centred,
            memory_efficient=self.memory_efficient,
            mixed=self.mixed,
        )

    def extra_repr(self) -> str:
        return f"{tuple(self.normalized_shape)}, eps={self.eps}, elementwise_affine={self.elementwise_affine}"


class FusedLayerNorm(_Norm):
    """LayerNorm; y in the input's dtype, under CUDA autocast in autocast's."""

    centred = True
    op, served_by = "layer_norm", "fusestep.nn.functional.layer_norm"
    serves = "apex.normalization.FusedLayerNorm"


class FusedRMSNorm(_Norm):
    """RMSNorm; y in the input's dtype, under CUDA autocast in autocast's."""

    centred = False
    op, served_by = "rms_norm", "fusestep.nn.functional.rms_norm"
    serves = "apex.normalization.FusedRMSNorm"


class MixedFusedLayerNorm(FusedLayerNorm):
    """LayerNorm; y in the weight's dtype, under CUDA autocast in autocast's."""

    mixed = True
    serves = "apex.normalization.MixedFusedLayerNorm"

    def __init__(
        self, normalized_shape: Shape, eps: float = 1e-5, *, memory_efficient: bool = False, **kwargs: Any
    ) -> None:
        _check_mixed("MixedFusedLayerNorm", kwargs)
        super().__init__(normalized_shape, eps, memory_efficient=memory_efficient)


class MixedFusedRMSNorm(FusedRMSNorm):
    """RMSNorm; y in the weight's dtype, under CUDA autocast in autocast's."""

    mixed = True
    serves = "apex.normalization.MixedFusedRMSNorm"

    def __init__(
        self, normalized_shape: Shape, eps: float = 1e-5, *, memory_efficient: bool = False, **kwargs: Any
    ) -> None:
        _check_mixed("MixedFusedRMSNorm", kwargs)
        super().__init__(normalized_shape, eps, memory_efficient=memory_efficient)


def _check_mixed(who: str, options: dict[str, Any]) -> None:
    """Apex swallows every keyword here; of those only elementwise_affine=True means nothing."""
    unknown = sorted(set(options) - {"elementwise_affine"})
    if unknown:
        raise TypeError(f"{who} has no argument {unknown[0]!r} (Apex passes over it in silence); leave it out.")
    if "elementwise_affine" in options:
        if not options["elementwise_affine"]:
            raise RuntimeError(f"{who} always has a weight; use FusedLayerNorm or FusedRMSNorm for one without.")
        warnings.warn(f"{who} always has a weight, so elementwise_affine=True is not needed.", stacklevel=3)
