"""Whether PyTorch differentiates, or maps over a batch, in a way that sees its own operations alone.

It cannot look into a kernel of ours, into a cast to FP8 or across ranks, nor has an autograd.Function of ours a rule
for it. An op then runs as its reference, and what has none is refused.
"""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

# Every backward asks: by these names it costs the host half.
_are_active = torch._C._are_functorch_transforms_active
_is_batched = torch._C._functorch.is_legacy_batchedtensor


def is_transformed() -> bool:
    """Whether a transform of torch.func, or forward-mode differentiation, is under way. Not to be asked by a trace."""
    return _are_active() or forward_ad._current_level >= 0


def is_mapped(tensor: torch.Tensor) -> bool:
    """Whether a tensor, such as the gradient that reaches a backward, belongs to a transform.

    So does every tensor within one; and a gradient of is_grads_batched=True, which torch wraps in an older way. Not to
    be asked by a trace.
    """
    return _are_active() or forward_ad._current_level >= 0 or _is_batched(tensor)
