"""What te.LayerNorm and te.RMSNorm share: the names of their arguments, and an extra state that says nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fusestep.compat.report import served
from fusestep.errors import UserError
from transformer_engine.pytorch._arguments import PACKAGE, one_of, placed

#: Either a width or the last dimensions.
Shape = int | Sequence[int]


def arguments(
    who: str,
    normalized_shape: Shape | None,
    hidden_size: Shape | None,
    params_dtype: torch.dtype | None,
    others: dict[str, Any],
) -> tuple[Shape, Any, torch.dtype | None]:
    """(shape, device, dtype) of a norm, from new and old names.

    Raises: UserError where an argument is given by both of its names, TypeError for one that there is not.
    """
    shape = one_of(who, "normalized_shape", normalized_shape, "hidden_size", hidden_size)
    dtype = others.pop("dtype", None)
    if dtype is not None and params_dtype is not None:
        raise UserError(f"{who}: dtype and params_dtype are two names of one argument; pass dtype.")
    device = placed(who, others.pop("device", "cuda"))
    others.pop("sm_margin", None)
    if others:
        raise TypeError(f"{who}() has no argument {', '.join(map(repr, others))}")
    return shape, device, dtype or params_dtype


class EmptyExtraState(nn.Module):
    """A module in whose state dict Transformer Engine writes an entry that ours has nothing to put in."""

    #: The class of fusestep's that does the work, for the report.
    SERVED_BY: str

    def _announce(self) -> None:
        part: Any = self
        served(f"{PACKAGE}.{type(self).__name__}", f"{self.SERVED_BY}, {part.implementation().implementation}")

    def get_extra_state(self) -> Tensor:
        """Empty."""
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        """Nothing: attention and norms have no FP8 state."""

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:
        # Not every state dict has it: torch's norms' have none.
        super()._load_from_state_dict({**state_dict, prefix + "_extra_state": "not read"}, prefix, *others)
