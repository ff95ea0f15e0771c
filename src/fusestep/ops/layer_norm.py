"""LayerNorm: each row of x, centred, divided by its standard deviation, scaled by weight and shifted by bias.

    y = (x − mean(x)) / √(var(x) + eps) · weight + bias

over the last dimensions of x, `normalized_shape`; var is the biased variance. Computed in fp32 and rounded once.
Source: Ba, Kiros and Hinton 2016, arXiv:1607.06450.

The reference, the raw ops and the gradient are shared with RMSNorm and stand in norm_reference.py, norm_ops.py and
norm.py; the kernels in norm_forward.py and norm_backward.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

from torch import Tensor

from fusestep.ops.norm import normalise
from fusestep.ops.norm_compilations import compilations
from fusestep.ops.norm_proof import prove
from fusestep.ops.registry import Op, catalogue


@overload
def layer_norm(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual: None = None,
    memory_efficient: bool = False,
) -> Tensor: ...


@overload
def layer_norm(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual: Tensor,
    memory_efficient: bool = False,
) -> tuple[Tensor, Tensor]: ...


def layer_norm(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual: Tensor | None = None,
    memory_efficient: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """torch.nn.functional.layer_norm, with the residual add folded in and less memory on request.

    Args:
        x: (…, *normalized_shape), fp32, bf16 or fp16 in the kernel, fp64 in the reference; any strides.
        normalized_shape: the last dimensions of x, over which mean and variance are taken.
        weight, bias: normalized_shape, or None; their dtypes may differ from x's.
        eps: added to the variance, in units of x².
        residual: of x's shape. x + residual is formed first, rounded as torch rounds it, and normalised.
        memory_efficient: keep the output for backward instead of the input, so that the input can be freed. It costs
            the host a wait for the device in every forward: the input is kept after all, and said so once, where a
            weight is below 1/64 or below a quarter of its bias, since no output tells what was multiplied by zero.
            Do not change the output in place before backward (torch refuses then). Not differentiable twice.

    Returns: y of x's shape; with a residual (y, x + residual). y has the dtype of what is normalised, or as torch's
        own, fp32 under CUDA autocast; CPU autocast does not touch it.
    Raises: UserError, before anything is launched, for shapes, dtypes or devices that do not fit.
    """
    result: Tensor | tuple[Tensor, Tensor] = normalise(
        True, "layer_norm", x, normalized_shape, weight, bias, eps, residual, memory_efficient
    )
    return result


catalogue(
    Op(
        "layer_norm",
        "LayerNorm with the residual add folded in",
        lambda device: prove(True, device),
        lambda: compilations(True),
    )
)
