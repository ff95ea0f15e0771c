"""State dicts without FP8: for torch's own modules, or to start scaling anew."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fusestep.fp8.state import KEYS

_DROPPED = (*KEYS, "_extra_state")


def export_state_dict(state: Mapping[str, Any]) -> dict[str, Any]:
    """A model's state dict without the scaling state, which nn.Linear and its like load strictly.

    Args: state: of `model.state_dict()`; it is left as it is, and tensors are not copied.
    """
    return {key: value for key, value in state.items() if key.rsplit(".", 1)[-1] not in _DROPPED}
