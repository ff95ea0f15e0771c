"""An FP8 linear layer, forward and backward, against torch's bf16 one and the floor of its products and casts.

The floor is what the three FP8 products take by themselves in the same run, plus the bytes of the casts at the copy
rate: input, weight and output gradient are each read once in bf16 and written twice in FP8. Device time, by graph; and
event time, which has the host's in it and whose chip is cooler, to set beside figures that were taken so elsewhere.
Host time is of a region of its own around one forward, its entry and the update of the scales included, and of the
backward; its ratio to torch's is the median of the ratios round by round.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import peers, timing
from fusestep import fp8
from fusestep.fp8 import DelayedScaling, Float8BlockScaling, Float8CurrentScaling
from fusestep.fp8.recipes import Recipe
from fusestep.nn import Linear

#: Tokens, input features, output features.
SHAPES = (
    (8192, 768, 2304),
    (8192, 2048, 8192),
    (16384, 4096, 4096),
    (8192, 4096, 14336),
    (8192, 8192, 8192),
)
RECIPES = {
    "delayed": DelayedScaling(amax_history_len=16),
    "current": Float8CurrentScaling(),
    "block": Float8BlockScaling(),
}
CALLS = 6
#: Of the host's time: many short rounds, since hosts are shared and what else they do comes and goes.
HOST_CALLS, HOST_ROUNDS = 25, 41
NATIVE, TORCHAO = "torch bf16", "torchao tensorwise, compiled"
TINY = {"SHAPES": ((40, 32, 48),), "CALLS": 1}
COLUMNS = ("shape", "implementation", "device ms", "floor ms", "of floor", "torch bf16", "events ms", "host µs")
IDENTITY = ("tokens", "inputs", "outputs", "implementation")
RATIOS = {"of_floor": "less", "over_torch": "more", "host_over_torch": "less"}


def ours(row: dict[str, Any]) -> bool:
    """Whether a row is of our code."""
    return row["implementation"] in RECIPES


def cells(row: dict[str, Any]) -> list[str]:
    """A row as the terminal shows it."""
    return [
        f"{row['tokens']} x {row['inputs']} x {row['outputs']}",
        row["implementation"],
        f"{row['device_ms']:.3f}",
        f"{row['floor_ms']:.3f}",
        f"{row['of_floor']:.3f}",
        f"{row['over_torch']:.2f}x",
        f"{row['events_ms']:.3f}",
        "" if row["host_us"] is None else f"{row['host_us']:.0f}",
    ]


def run(copy: float) -> Iterator[dict[str, Any]]:
    """Time every shape; refuse to time a wrong layer."""
    for shape in SHAPES:
        yield from measure(*shape, copy)
        torch.compiler.reset()
        timing.free()


def measure(tokens: int, inputs: int, outputs: int, copy: float) -> list[dict[str, Any]]:
    """One shape: all implementations and the three products interleaved."""
    options: dict[str, Any] = {"device": timing.DEVICE, "dtype": torch.bfloat16}
    layers: dict[str, nn.Module] = {name: Linear(inputs, outputs, **options) for name in RECIPES}
    layers[NATIVE] = nn.Linear(inputs, outputs, **options)
    for name in RECIPES:
        error = check(layers[name], RECIPES[name], inputs)
        if not error < 0.08:
            raise SystemExit(f"{name} is wrong at {inputs} x {outputs}: relative error {error:.2e}; nothing was timed.")
    failed: dict[str, str] = {}
    if peers.has("torchao"):
        layers[TORCHAO] = nn.Sequential(nn.Linear(inputs, outputs, **options))
        try:
            layers[TORCHAO] = peers.float8(layers[TORCHAO])
        except Exception as problem:
            failed[TORCHAO] = timing.in_words(problem)
    sets = timing.sets_needed(2 * tokens * (inputs + outputs))
    data = [torch.randn(tokens, inputs, **options, requires_grad=True) for _ in range(sets)]
    gradients = [torch.randn(tokens, outputs, **options) for _ in range(sets)]
    able = {name: layer for name, layer in layers.items() if name not in failed}
    calls = {name: step(layer, RECIPES.get(name), data, gradients) for name, layer in able.items()}
    named = calls | {"products": products(tokens, inputs, outputs)}
    graphs, why = timing.captured(named, timing.new_stream(), {TORCHAO}, number=CALLS)
    failed |= why
    device = timing.device_times(graphs)
    del graphs
    events = timing.event_times({name: bound(call) for name, call in calls.items() if name not in failed})
    few = [torch.randn(16, inputs, **options, requires_grad=True)], [torch.randn(16, outputs, **options)]
    # Compiled again for another shape: that is not what a step of one shape costs.
    small = {name: bound(step(layer, RECIPES.get(name), *few)) for name, layer in layers.items() if name != TORCHAO}
    host = timing.host_samples(small, HOST_CALLS, HOST_ROUNDS)
    casts = 4 * (tokens * inputs + inputs * outputs + tokens * outputs) / copy * 1e3
    floor = device["products"].median + casts
    rows: list[dict[str, Any]] = []
    for name in layers:
        row = {"tokens": tokens, "inputs": inputs, "outputs": outputs, "implementation": name}
        if name in failed:
            rows.append(row | {"failed": failed[name]})
            continue
        rows.append(
            row
            | {
                "device_ms": device[name].median,
                "device_ms_quartiles": [device[name].low, device[name].high],
                "products_ms": device["products"].median,
                "casts_ms": casts,
                "floor_ms": floor,
                "of_floor": device[name].median / floor,
                "over_torch": device[NATIVE].median / device[name].median,
                "events_ms": events[name].median,
                "host_us": statistics.median(host[name]) * 1e3 if name in host else None,
                "host_over_torch": timing.ratio_by_rounds(host[name], host[NATIVE]) if name in host else None,
            }
        )
    return rows


def bound(call: Callable[[int], Any]) -> Callable[[], Any]:
    return lambda: call(0)


def step(layer: nn.Module, recipe: Recipe | None, data: list[Tensor], gradients: list[Tensor]) -> Callable[[int], Any]:
    """Forward and backward of a layer, every gradient wanted; a region of its own where there is a recipe."""
    leaves = list(layer.parameters())

    def call(k: int) -> Any:
        x, gradient = data[k % len(data)], gradients[k % len(data)]
        if recipe is None:
            y = layer(x)
        else:
            with fp8.fp8_autocast(recipe=recipe):
                y = layer(x)
        return torch.autograd.grad(y, [x, *leaves], gradient)

    return call


def products(tokens: int, inputs: int, outputs: int) -> Callable[[int], Any]:
    """The three products of a layer in E4M3 with fast accumulation, on operands that are cast already."""

    def operand(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, device=timing.DEVICE).clamp(-4, 4).to(torch.float8_e4m3fn)

    pairs = [
        (operand(tokens, inputs), operand(outputs, inputs)),
        (operand(tokens, outputs), operand(inputs, outputs)),
        (operand(outputs, tokens), operand(inputs, tokens)),
    ]
    one = torch.ones((), device=timing.DEVICE)
    if not fp8.support()[0]:
        wide = [(a.bfloat16(), b.bfloat16()) for a, b in pairs]
        return lambda _: [a @ b.t() for a, b in wide]

    def call(_: int) -> None:
        for a, b in pairs:
            torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)

    return call


def check(layer: Any, recipe: Recipe, inputs: int) -> float:
    """The largest relative distance of output and gradients from float64: FP8's own, about 4 % for random numbers."""
    x = torch.randn(999, inputs, device=timing.DEVICE, dtype=torch.bfloat16, requires_grad=True)
    with fp8.fp8_autocast(recipe=recipe):
        y = layer(x)
    gradient = torch.randn_like(y)
    found = [y, *torch.autograd.grad(y, [x, *layer.parameters()], gradient)]
    g, xd, weight, bias = (t.detach().double() for t in (gradient, x, layer.weight, layer.bias))
    wanted: Iterable[Tensor] = (xd @ weight.t() + bias, g @ weight, g.t() @ xd, g.sum(0))
    return max(float((a.detach().double() - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True))
