"""Gradients of 16-bit weights, summed over micro-batches in fp32."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class AccumulationHandle:
    """Stops the accumulation; what `main_grad` holds by then stays until the optimizer's `zero_grad`."""

    def __init__(self, hooks: list[Any]) -> None:
        self._hooks = hooks

    def remove(self) -> None:
        """Take the hooks off the parameters; gradients stay in `.grad` again."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


def accumulate_in_fp32(parameters: Iterable[Tensor]) -> AccumulationHandle:
    """Sum each parameter's gradients in fp32, in its attribute `main_grad`, over as many backward passes as come.

    After each backward pass `.grad` is added into `main_grad` and freed. FusedAdam and clip_grad_norm_ read
    `main_grad`, and FusedAdam.zero_grad clears it. A bf16 sum of many micro-batches stalls; this one does not.

    Args:
        parameters: those without requires_grad are passed over. Complex and float64 gradients keep their dtype.
    Returns: a handle whose `remove()` ends it.
    """
    hooks = [p.register_post_accumulate_grad_hook(_add) for p in parameters if p.requires_grad]
    return AccumulationHandle(hooks)


@torch.no_grad()
def _add(parameter: Tensor) -> None:
    gradient = parameter.grad
    if gradient is None:
        return
    main = getattr(parameter, "main_grad", None)
    if isinstance(main, Tensor):
        main.add_(gradient)
    else:
        is_narrow = gradient.dtype in (torch.bfloat16, torch.float16)
        parameter.main_grad = gradient.float() if is_narrow else gradient  # type: ignore[attr-defined]
    parameter.grad = None
