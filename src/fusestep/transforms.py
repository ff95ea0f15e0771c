"""Whether PyTorch differentiates, or maps over a batch, in a way that sees its own operations alone.

It cannot look into a kernel of ours, into a cast to FP8 or across ranks, nor has an autograd.Function of ours a rule
for it. An op then runs as its reference, and what has none is refused.
"""

from __future__ import annotations

import torch
from torch.autograd import forward_ad


def is_transformed() -> bool:
    """Whether a transform of torch.func, or forward-mode differentiation, is under way. Not to be asked by a trace."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def is_mapped(tensor: torch.Tensor) -> bool:
    """Whether a tensor, such as the gradient that reaches a backward, belongs to a transform.

    So does every tensor within one; and a gradient of is_grads_batched=True, which torch wraps in an older way.
    """
    if torch.compiler.is_compiling():
        return False
    return is_transformed() or torch._C._functorch.is_legacy_batchedtensor(tensor)
