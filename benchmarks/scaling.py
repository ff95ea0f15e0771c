"""Does cost grow as the work does? A whole step of ours against tokens, width and depth, at four sizes each.

The middle of each axis is the same model. The floor is the step's products and bytes (see steps.py); its share of the
step should not fall as the work grows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from benchmarks import timing
from benchmarks.steps import SETUPS as STEPS
from benchmarks.steps import Model, floor_ms, rates
from benchmarks.training import Prepared, Setup, Work
from fusestep.ladder import work
from fusestep.models import GPTConfig

BASE = Model(GPTConfig(96, 1024, 8, 8, 4096, 512), 16, steps=12, together=1)
#: Sequences of a batch, width (in heads of 128), layers.
AXES: dict[str, tuple[int, ...]] = {
    "tokens": (4, 8, 16, 32),
    "width": (512, 1024, 2048, 4096),
    "depth": (4, 8, 16, 32),
}
SETUPS = tuple(setup for setup in STEPS if setup.name in ("fusestep bf16", "fusestep fp8 delayed"))
TINY = {
    "BASE": Model(GPTConfig(96, 128, 1, 1, 256, 16), 2, steps=12, together=1),
    "AXES": {"tokens": (1, 2), "width": (128,), "depth": (1,)},
    "SETUPS": SETUPS[:1],
}

COLUMNS = ("configuration", "axis", "size", "parameters", "device ms", "floor ms", "of floor", "TFLOP/s")
IDENTITY = ("configuration", "axis", "size")
RATIOS = {"of_floor": "more"}


def cells(row: dict[str, Any]) -> list[str]:
    """A row as the terminal shows it."""
    return [
        row["configuration"],
        row["axis"],
        f"{row['size']:,}",
        f"{row['parameters'] / 1e6:.0f} M",
        f"{row['device_ms']:.2f}",
        f"{row['floor_ms']:.2f}",
        f"{row['of_floor']:.3f}",
        f"{row['tflops']:.0f}",
    ]


def models() -> Iterator[tuple[str, int, Model]]:
    """(axis, size, model): tokens a step, the width, the layers."""
    for batch in AXES["tokens"]:
        yield "tokens", batch * BASE.config.context, dataclasses.replace(BASE, batch=batch)
    for width in AXES["width"]:
        shape = dataclasses.replace(BASE.config, width=width, heads=width // 128, ffn_width=4 * width)
        yield "width", width, dataclasses.replace(BASE, config=shape)
    for layers in AXES["depth"]:
        yield "depth", layers, dataclasses.replace(BASE, config=dataclasses.replace(BASE.config, layers=layers))


def run(copy: float) -> Iterator[dict[str, Any]]:
    """Every size in every precision; sizes that two axes share are timed once."""
    best = rates(copy)
    for setup in SETUPS:
        known: dict[Model, dict[str, Any]] = {}
        for axis, size, model in models():
            if model not in known:
                known[model] = measure(setup, model)
                timing.free()
            times = known[model]
            floor = floor_ms(model, setup.recipe.precision, best)
            yield {
                "configuration": setup.name,
                "axis": axis,
                "size": size,
                "parameters": model.parameters,
                "tokens": model.batch * model.config.context,
                **times,
                "floor_ms": floor,
                "of_floor": floor / times["device_ms"],
                "tflops": work.flops_per_step(model.config, model.batch) / times["device_ms"] / 1e9,
            }


def measure(setup: Setup, model: Model) -> dict[str, Any]:
    """Times of one size, in this process: memory is not what is measured here."""
    prepared = Prepared(Work(setup, model.config, model.batch, model.steps, str(timing.DEVICE)))
    found = prepared.timed()
    return {name: found[name] for name in ("device_ms", "wall_ms", "wall_ms_quartiles", "host_ms")}
