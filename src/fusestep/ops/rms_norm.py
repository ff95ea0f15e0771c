"""RMSNorm: each row of x divided by its root mean square and scaled by weight.

    y = x / √(mean(x²) + eps) · weight

over the last dimensions of x, `normalized_shape`. Computed in fp32 and rounded once.
Source: Zhang and Sennrich 2019, arXiv:1910.07467.

The reference, the raw ops and the gradient are shared with LayerNorm and stand in norm_reference.py, norm_ops.py and
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
def rms_norm(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    residual: None = None,
    memory_efficient: bool = False,
) -> Tensor: ...


@overload
def rms_norm(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    residual: Tensor,
    memory_efficient: bool = False,
) -> tuple[Tensor, Tensor]: ...


def rms_norm(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    residual: Tensor | None = None,
    memory_efficient: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """torch.nn.functional.rms_norm, with the residual add folded in and less memory on request.

    Args:
        x: (…, *normalized_shape), fp32, bf16 or fp16 in the kernel, fp64 in the reference; any strides.
        normalized_shape: the last dimensions of x, over which the mean square is taken.
        weight: normalized_shape, or None; its dtype may differ from x's.
        eps: added to the mean square, in units of x². None is the machine epsilon of the dtype that is computed in,
            as torch has it: 1.2e-7, for fp64 2.2e-16.
        residual: of x's shape. x + residual is formed first, rounded as torch rounds it, and normalised.
        memory_efficient: keep the output for backward instead of the input; see layer_norm.layer_norm.

    Returns: y of x's shape; with a residual (y, x + residual). y has the dtype of what is normalised, or as torch's
        own after 2.11, fp32 under CUDA autocast; CPU autocast does not touch it.
    Raises: UserError, before anything is launched, for shapes, dtypes or devices that do not fit.
    """
    result: Tensor | tuple[Tensor, Tensor] = normalise(
        False, "rms_norm", x, normalized_shape, weight, None, eps, residual, memory_efficient
    )
    return result


catalogue(
    Op(
        "rms_norm",
        "RMSNorm with the residual add folded in",
        lambda device: prove(False, device),
        lambda: compilations(False),
    )
)
