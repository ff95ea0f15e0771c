"""FP8 state that Transformer Engine pickled into a checkpoint: scales and histories, read without running its pickle.

Since 2.5 an `_extra_state` is a uint8 tensor, empty without FP8; before, None or a BytesIO that torch.save wrote. It
holds a dict of `recipe`, `scale_fwd`, `amax_history_fwd`, `scale_bwd`, `amax_history_bwd` and what does not matter. The
unpickler makes tensors, plain values and recipes, and refuses every other class.

Columns forward are [input, weight, output] of each product, backward [grad_output, grad_input]; row 0 of a history
holds what was seen since the last update, the rows after it the oldest first.
"""

from __future__ import annotations

import collections
import io
import pickle
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import transformer_engine.common.recipe as recipes
from fusestep.errors import UserError
from fusestep.fp8.state import KEYS

_RECIPES = {*recipes.__all__, "_FormatHelper"}

#: What pickles of tensors name, besides recipes.
_ALLOWED = {
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("torch._utils", "_rebuild_tensor_v2"): torch._utils._rebuild_tensor_v2,
    ("torch.storage", "_load_from_bytes"): lambda data: torch.load(io.BytesIO(data), "cpu", weights_only=True),
}
_PLACES = ("input", "weight", "output"), ("grad_output", "grad_input")


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("transformer_engine.common.recipe") and name in _RECIPES:
            return getattr(recipes, name)
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which scales do not need")


def is_empty(saved: Any) -> bool:
    """Whether an `_extra_state` says nothing."""
    if isinstance(saved, Tensor):
        return saved.numel() == 0
    return saved is None or (isinstance(saved, io.BytesIO) and not saved.getbuffer().nbytes)


def read(saved: Any, slots: Sequence[str]) -> dict[str, Tensor] | None:
    """The scaling state of a module that casts `slots`, as its state dict holds it; None where there is none.

    Args:
        saved: the value of an `_extra_state` that is not empty.
        slots: names such as "input", "fc1_weight", "grad_output3": of each product the input, weight and gradient.
    Raises: UserError for what is not such a state.
    """
    state = _unpickled(saved)
    if not isinstance(state, dict) or not {"scale_fwd", "amax_history_fwd"} <= state.keys():
        return None  # of a recipe without state
    of_recipe = getattr(state.get("recipe"), "fp8_format", recipes.Format.HYBRID)
    products = len(slots) // 3
    columns = _columns(slots)
    parts = []
    for direction, width in (("fwd", 3), ("bwd", 2)):
        scale, history = state.get(f"scale_{direction}"), state.get(f"amax_history_{direction}")
        if not isinstance(scale, Tensor) or not isinstance(history, Tensor):
            raise UserError(f"_extra_state: scale_{direction} or amax_history_{direction} is missing.")
        if scale.numel() < products * width or history.shape != (history.shape[0], scale.numel()):
            raise UserError(
                f"_extra_state: there are {scale.numel()} scales {direction} and a history of {tuple(history.shape)} "
                f"for {products} products; load the state of the same kind of module."
            )
        parts.append((scale.float().flatten(), history.float()))
    length = max(history.shape[0] for _, history in parts)
    rows = torch.zeros(len(slots), 4)
    rings = torch.zeros(len(slots), length)
    rolls = torch.zeros(len(slots), dtype=torch.int64)
    for slot, (is_backward, column) in enumerate(columns):
        scale, history = parts[is_backward]
        seen = history[1:, column]
        seen = seen[int((seen != 0).int().cumsum(0).eq(0).sum()) :]  # zeros in front: nothing yet
        largest = of_recipe.value.max_bwd if is_backward else of_recipe.value.max_fwd
        is_new = not seen.numel() and float(scale[column]) == 1.0
        rows[slot] = torch.tensor([0.0 if is_new else float(scale[column]), float(history[0, column]), largest, 0.0])
        rings[slot, : seen.numel()] = seen
        rolls[slot] = seen.numel()
    return dict(zip(KEYS, (rows, rings, rolls), strict=True))


def _columns(slots: Sequence[str]) -> list[tuple[bool, int]]:
    """For each slot whether it is of a gradient, and its column: the products in the order in which they are named."""
    forward = [name for name in slots if not name.startswith("grad")]
    backward = [name for name in slots if name.startswith("grad")]
    return [
        (True, 2 * backward.index(name))
        if name.startswith("grad")
        else (False, 3 * (forward.index(name) // 2) + forward.index(name) % 2)
        for name in slots
    ]


def _unpickled(saved: Any) -> Any:
    try:
        if isinstance(saved, io.BytesIO):
            saved.seek(0)
            # torch.load derives its own unpickler from the one that it is given.
            module = SimpleNamespace(Unpickler=_Unpickler, load=None, __name__="restricted")
            return torch.load(saved, "cpu", pickle_module=module, weights_only=False)
        if isinstance(saved, Tensor) and saved.dtype == torch.uint8:
            return _Unpickler(io.BytesIO(bytes(saved.tolist()))).load()
    except (pickle.UnpicklingError, EOFError, AttributeError, IndexError, KeyError, TypeError, RuntimeError) as error:
        raise UserError(
            f"_extra_state: the FP8 state of a checkpoint cannot be read ({error}); delete the key, and scales start "
            "from the tensors."
        ) from error
    raise UserError(
        f"_extra_state: it is a {type(saved).__name__}, which holds no FP8 state of Transformer Engine; delete the "
        "key, and scales start from the tensors."
    )


def names_of_columns(slots: Sequence[str]) -> tuple[list[int | None], list[int | None]]:
    """For each column, forward and backward, the place of its tensor in `slots`; None for those that are never cast."""
    found = _columns(slots)
    products = len(slots) // 3
    forward: list[int | None] = [None] * (len(_PLACES[0]) * products)
    backward: list[int | None] = [None] * (len(_PLACES[1]) * products)
    for slot, (is_backward, column) in enumerate(found):
        (backward if is_backward else forward)[column] = slot
    return forward, backward
