"""What the page and the pictures draw alike: loss curves, and round numbers for an axis."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

#: Losses a step of each rung, by name; None where a loss is not finite.
Curves = Mapping[str, Sequence[float | None]]


def curves_of(rungs: Sequence[Mapping[str, Any]]) -> dict[str, list[float | None]]:
    """The loss curves of the gate, of every rung that has one."""
    return {rung["name"]: rung["losses"] for rung in rungs if any(loss is not None for loss in rung["losses"])}


def relative_to_first(curves: Curves) -> dict[str, list[float | None]]:
    """(loss − first rung's) / first rung's in percent, of every other rung."""
    (_, base), *others = curves.items()
    return {
        name: [None if loss is None or not other else 100 * (loss - other) / other for loss, other in zip(curve, base)]  # noqa: B905
        for name, curve in others
    }


def ticks(low: float, high: float) -> list[float]:
    """Three to eight round numbers, a constant step apart, that hold low and high between them."""
    if high <= low:
        low, high = low - 0.5 * max(abs(low), 1e-9), high + 0.5 * max(abs(high), 1e-9)
    rough = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [round(number * step, 12) for number in range(first, last + 1)]
