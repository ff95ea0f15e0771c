"""Whole training steps of four models: forward, backward and AdamW in one CUDA graph, ours and native PyTorch's.

    python -m benchmarks steps-a steps-b steps-c steps-d

Each configuration runs in a process of its own (see training.py). Rows name the dtypes of weights, moments and masters.
`device_ms` is a replay that is queued before it starts, `wall_ms` what a loop of steps takes, `peak_reserved_bytes` the
most that the process ever took from the GPU, capture included. The floor is the model's products at the rate of large
ones of their precision, and its bytes at the rate of a copy, both measured in the same run; `fusestep.ladder.work` says
what is counted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from benchmarks import timing
from benchmarks.training import Setup, Work, measured
from fusestep.ladder import ceilings, contenders, work
from fusestep.ladder.contenders import Contender
from fusestep.ladder.peers import place_of
from fusestep.ladder.rungs import Precision, Recipe
from fusestep.models import GPT, GPTConfig


@dataclasses.dataclass(frozen=True)
class Model:
    """A model and its batch; how many steps are timed, and how many processes fit on one GPU beside each other."""

    config: GPTConfig
    batch: int
    steps: int
    together: int

    @property
    def parameters(self) -> int:
        """Of the model."""
        return GPT(self.config, device="meta").parameter_count()


MODELS = {
    "a": Model(GPTConfig(96, 768, 12, 4, 3072, 256), 32, steps=60, together=12),
    "b": Model(GPTConfig(96, 2048, 16, 12, 8192, 256), 32, steps=24, together=7),
    "c": Model(GPTConfig(50304, 768, 12, 12, 3072, 1024), 16, steps=24, together=12),
    "d": Model(GPTConfig(50304, 2048, 16, 24, 8192, 2048), 4, steps=12, together=4),
}
NATIVE = "native, amp"
_NATIVE = Recipe(form="plain", optimizer="torch-fused", precision="bf16", compiled=True, graph=True)
_OURS = Recipe(form="fused", norm="fused", optimizer="fused", precision="bf16", loss="fused", graph=True)
_FP8 = dataclasses.replace(_OURS, precision="fp8")
_TORCH_LOSS = ", torch's loss"
SETUPS = (
    Setup(NATIVE, _NATIVE),
    Setup("native, all bf16", dataclasses.replace(_NATIVE, weights="bf16")),
    Setup("fusestep bf16", _OURS),
    Setup("fusestep bf16" + _TORCH_LOSS, dataclasses.replace(_OURS, loss="torch")),
    Setup("fusestep bf16, masters", _OURS, masters="remainders"),
    Setup("fusestep fp8 delayed", _FP8),
    Setup("fusestep fp8 delayed" + _TORCH_LOSS, dataclasses.replace(_FP8, loss="torch")),
    Setup("fusestep fp8 delayed, masters", _FP8, masters="whole"),
    Setup("fusestep fp8 delayed, remainders", _FP8, masters="remainders"),
    Setup("fusestep fp8 current", dataclasses.replace(_FP8, scaling="current")),
)
#: Other libraries that compile their kernels for a minute or more; nothing is timed until all of a group are ready.
SLOW_TO_COMPILE = ("torchao", "quack")
#: Losses after a few steps may differ by this much from the native ones: FP8 learns a little otherwise.
LOSS_WITHIN = 0.02

COLUMNS = (
    "configuration",
    "weights / moments / masters",
    "device ms",
    "wall ms",
    "host ms",
    "of floor",
    "over native",
    "TFLOP/s",
    "GB reserved",
    "loss",
)
IDENTITY = ("model", "configuration")
RATIOS = {"over_native": "more", "memory_over_native": "less"}


def ours(row: dict[str, Any]) -> bool:
    """Whether a row is of our code."""
    return str(row["configuration"]).startswith("fusestep")


def cells(row: dict[str, Any]) -> list[str]:
    """A row as the terminal shows it."""
    return [
        f"{row['model'].upper()}: {row['configuration']}",
        f"{row['weights']} / {row['moments']} / {row['masters']}",
        f"{row['device_ms']:.2f}",
        f"{row['wall_ms']:.2f}",
        _number(row["host_ms"], 2),
        _number(row["of_floor"], 3),
        _number(row["over_native"], 2),
        f"{row['tflops']:.0f}",
        _number(row["peak_reserved_bytes"], 2, 1e9),
        f"{row['loss']:.4f}",
    ]


def _number(value: float | None, digits: int, unit: float = 1.0) -> str:
    return "" if value is None else f"{value / unit:.{digits}f}"


def chosen(model: Model) -> list[Setup]:
    """What is measured of a model: ours and native PyTorch's; where there are few classes also torch's loss."""
    few_classes = model.config.vocab_size < 1024
    return [setup for setup in SETUPS if few_classes or not setup.name.endswith(_TORCH_LOSS)]


def others() -> list[Contender]:
    """Other libraries that are installed, as the ladder runs them."""
    return [
        contender
        for peer in contenders.PEERS
        if place_of(peer) is not None
        for contender in contenders.contenders_of_peer(peer, timing.DEVICE)
    ]


def _when(setup: Setup) -> int:
    """Which of the setups get ready first: native PyTorch's, which all are set against, then what compiles longest."""
    if not setup.is_ours and not setup.recipe.peer:
        return 0
    return 1 if setup.recipe.peer in SLOW_TO_COMPILE else 2


def replies(model: Model) -> Iterator[tuple[Setup, dict[str, Any]]]:
    """Every configuration of a model, measured. Of another library's ways the first that runs."""
    device = str(timing.DEVICE)

    def works(setups: Iterable[Setup]) -> list[Work]:
        return [Work(setup, model.config, model.batch, model.steps, device) for setup in setups]

    setups = chosen(model)
    left = {contender.name: contender.attempts for contender in others()}
    why: dict[str, str] = {}
    while setups or left:
        setups += [Setup(name, attempts[0]) for name, attempts in left.items()]
        setups.sort(key=_when)
        for one, reply in measured(works(setups), model.together):
            name = one.setup.name
            if name in left:
                left[name] = left[name][1:] if "failed" in reply else ()
            if "failed" in reply and left.get(name):
                why[name] = reply["failed"]
            else:
                yield one.setup, reply | ({"first_choice_failed": why[name]} if name in why else {})
        setups = []
        left = {name: attempts for name, attempts in left.items() if attempts}


def run(copy: float, name: str) -> Iterator[dict[str, Any]]:
    """Every configuration of one model."""
    model = MODELS[name]
    best = rates(copy)
    native: dict[str, Any] | None = None
    for setup, reply in replies(model):
        row = {
            "model": name,
            "configuration": setup.name,
            "precision": setup.recipe.precision,
            **setup.dtypes,
            "remainders": setup.masters == "remainders",
        }
        if "failed" in reply:
            yield row | reply
            continue
        if setup.name == NATIVE:
            native = reply
        elif native is not None and not abs(reply["loss"] / native["loss"] - 1) <= LOSS_WITHIN:
            yield row | {"failed": f"its loss is {reply['loss']:.4f}, native's {native['loss']:.4f}; nothing is said."}
            continue
        yield row | reply | beside(model, reply, native, floor_ms(model, setup.recipe.precision, best))


def beside(model: Model, reply: dict[str, Any], native: dict[str, Any] | None, floor: float) -> dict[str, Any]:
    """What a measurement is set against."""
    peak = reply["peak_reserved_bytes"]
    flops = work.flops_per_step(model.config, model.batch)
    return {
        "tokens": model.batch * model.config.context,
        "parameters": model.parameters,
        "tflops": flops / reply["device_ms"] / 1e9,
        "floor_ms": floor,
        "of_floor": floor / reply["device_ms"],
        "over_native": None if native is None else native["device_ms"] / reply["device_ms"],
        "memory_over_native": None if native is None or not peak else peak / native["peak_reserved_bytes"],
    }


def rates(copy: float) -> ceilings.Ceilings:
    """What the device's products reach; the copy was timed already."""
    sizes = ceilings.SIZES if timing.DEVICE.type == "cuda" else (64,)
    best = ceilings.measure(timing.DEVICE, sizes=sizes, copied=1 << 20)
    timing.free()
    return dataclasses.replace(best, copy=copy)


def floor_ms(model: Model, precision: Precision, best: ceilings.Ceilings) -> float:
    """The least that products and bytes of a step take: the blocks' products in FP8 where it is asked for."""
    config, tokens = model.config, model.batch * model.config.context
    flops = work.flops_per_step(config, model.batch)
    blocks = 6 * config.layers * (4 * config.width**2 + 2 * config.width * config.ffn_width) * tokens
    bf16 = best.products["bf16"]
    rate = best.products.get("fp8", bf16) if precision == "fp8" else bf16
    moved = work.bytes_per_step(config, model.parameters, model.batch, precision)
    return (blocks / rate + (flops - blocks) / bf16 + moved / best.copy) * 1e3


#: A rehearsal has a model of a few thousand parameters, no compiler, and one setup of each kind.
_TINY = Model(GPTConfig(96, 32, 2, 2, 64, 16), 2, steps=12, together=5)
_NAMES = (NATIVE, "native, all bf16", "fusestep bf16", "fusestep bf16, masters", "fusestep fp8 delayed, torch's loss")
TINY = {
    "MODELS": dict.fromkeys(MODELS, _TINY),
    "SETUPS": tuple(
        dataclasses.replace(setup, recipe=dataclasses.replace(setup.recipe, compiled=False))
        for setup in SETUPS
        if setup.name in _NAMES
    ),
}
