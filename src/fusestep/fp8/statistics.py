"""What delayed scaling has seen: scale, amaxes, saturation and underflow of every tensor that a model casts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fusestep.fp8.state import Slots

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class TensorStatistics:
    """One tensor that a module casts.

    Attributes:
        module: the module's path in the model.
        tensor: which of its tensors, as "input".
        format: "E4M3" or "E5M2".
        scale: what its values are multiplied by before the cast; 0 where there is none yet.
        amax: the newest amax of the history; 0 without one.
        history: amaxes, the oldest first, as far as there are any.
        saturated, flushed: of the elements cast while counting, the fractions beyond the format's range, and those
            that were not zero and became it; None where nothing was counted.
        refused: steps whose amax was not finite, which kept the scale before.
    """

    module: str
    tensor: str
    format: str
    scale: float
    amax: float
    history: tuple[float, ...]
    saturated: float | None
    flushed: float | None
    refused: int


def collect(model: nn.Module) -> list[TensorStatistics]:
    """A row for each tensor that delayed scaling follows in a model, in the order of its modules. Waits for the device.

    Saturated and flushed elements are counted while `fusestep.fp8.count_saturation()` is on.
    """
    return [row for path, state in states_of(model) for row in rows_of(path, state)]


def states_of(model: nn.Module) -> Iterable[tuple[str, Slots]]:
    """(path, state) of every module that keeps scaling state; a module that stands in two places comes once."""
    for path, module in model.named_modules():
        for value in vars(module).values():
            if isinstance(value, Slots):
                yield path, value


def rows_of(module: str, state: Slots) -> list[TensorStatistics]:
    """The rows of one module."""
    slots, rolls, counts = state.slots.tolist(), state.rolls.tolist(), state.counts.tolist()
    histories = state.ordered_history().t().tolist()
    formats = state.recipe.fp8_format
    rows = []
    for place, name in enumerate(state.names):
        dtype = formats.backward if name.startswith("grad") else formats.forward
        scale, _, _, refused = slots[place]
        elements, saturated, flushed = counts[place]
        known = min(rolls[place], len(histories[place]))
        history = tuple(histories[place][len(histories[place]) - known :])
        rows.append(
            TensorStatistics(
                module=module,
                tensor=name,
                format="E5M2" if dtype is torch.float8_e5m2 else "E4M3",
                scale=scale,
                amax=history[-1] if history else 0.0,
                history=history,
                saturated=saturated / elements if elements else None,
                flushed=flushed / elements if elements else None,
                refused=int(refused),
            )
        )
    return rows


def reset_counts(model: nn.Module) -> None:
    """Count from zero again. Does not wait for the device."""
    for _, state in states_of(model):
        state.counts.zero_()
