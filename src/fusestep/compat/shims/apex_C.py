"""apex_C: tensors in one piece, and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fusestep.compat.report import served

__all__ = ["flatten", "unflatten"]


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """All elements of all tensors, one after the other, in a new 1-D tensor."""
    served("apex_C.flatten", "torch._utils._flatten_dense_tensors")
    flat: Tensor = torch._utils._flatten_dense_tensors(list(tensors))
    return flat


def unflatten(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Views of `flat` with the shapes of the tensors that it was made from."""
    served("apex_C.unflatten", "torch._utils._unflatten_dense_tensors")
    return list(torch._utils._unflatten_dense_tensors(flat, list(tensors)))
