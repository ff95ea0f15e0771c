"""apex.contrib.clip_grad.clip_grad over fusestep.optim.clip_grad_norm_."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from fusestep import optim
from fusestep.compat.implementation import ran

__all__ = ["clip_grad_norm_"]


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale gradients in place so that their norm, all together, is at most max_norm; the norm before that, 0-d fp32.

    Right where Apex is not: summed in fp32 whatever the dtypes, nothing waits for the device, and gradients whose norm
    is not finite stay as they are.
    """
    members = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if members:
        ran("apex.contrib.clip_grad.clip_grad_norm_", "fusestep.optim.clip_grad_norm_", "gradient_norm", members[0])
    return optim.clip_grad_norm_(members, max_norm, norm_type, error_if_nonfinite)
