"""LayerNormMLP, forward and backward: ours in bf16 and in FP8, torch and torch.compile, against its products alone.

A LayerNorm, a linear layer, tanh-GELU or SwiGLU, another linear layer, biases throughout. The products are those of
both layers, forward and backward, on whole tensors, in bf16 and in FP8, timed in the same run: what the norm, the
activation, the casts and their backward cost beyond them is what fusing can save. Device time, by graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import timing
from benchmarks.fp8 import products as fp8_products
from fusestep.fp8 import fp8_autocast
from fusestep.fp8.recipes import Recipe, recipe_named
from fusestep.nn import LayerNormMLP

#: Tokens, width, features between the layers, activation.
SHAPES = (
    (8192, 768, 3072, "gelu"),
    (8192, 2048, 8192, "gelu"),
    (8192, 2048, 8192, "swiglu"),
    (16384, 4096, 14336, "swiglu"),
)
RECIPES: dict[str, Recipe | None] = {
    "fusestep bf16": None,
    "fusestep fp8 delayed": recipe_named("delayed"),
    "fusestep fp8 current": recipe_named("current"),
}
CALLS, ROUNDS, COMPILES = 3, 11, True
TINY = {"SHAPES": ((40, 32, 48, "gelu"), (40, 32, 48, "swiglu")), "CALLS": 1, "COMPILES": False}
COLUMNS = ("shape", "implementation", "device ms", "products ms", "of them", "over torch")
IDENTITY = ("tokens", "width", "hidden", "activation", "implementation")
RATIOS = {"of_products": "less", "over_torch": "more"}


def ours(row: dict[str, Any]) -> bool:
    """Whether a row is of our code."""
    return str(row["implementation"]).startswith("fusestep")


def cells(row: dict[str, Any]) -> list[str]:
    """A row as the terminal shows it."""
    return [
        f"{row['tokens']} x {row['width']} x {row['hidden']} {row['activation']}",
        row["implementation"],
        f"{row['device_ms']:.3f}",
        f"{row['products_ms']:.3f}",
        f"{row['of_products']:.2f}",
        f"{row['over_torch']:.2f}x",
    ]


class Native(nn.Module):
    """The same in plain PyTorch."""

    def __init__(self, width: int, hidden: int, activation: str, dtype: torch.dtype) -> None:
        super().__init__()
        options: dict[str, Any] = {"device": timing.DEVICE, "dtype": dtype}
        self.activation = activation
        self.norm = nn.LayerNorm(width, **options)
        self.up = nn.Linear(width, hidden * (2 if activation == "swiglu" else 1), **options)
        self.down = nn.Linear(hidden, width, **options)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(self.norm(x))
        if self.activation == "swiglu":
            gate, value = h.chunk(2, -1)
            h = F.silu(gate) * value
        else:
            h = F.gelu(h, approximate="tanh")
        y: Tensor = self.down(h)
        return y


def run(copy: float) -> Iterator[dict[str, Any]]:  # noqa: ARG001 (the floor is products, not bytes)
    """Time every shape; refuse to time a wrong layer."""
    for shape in SHAPES:
        yield from measure(*shape)
        torch.compiler.reset()
        timing.free()


def measure(tokens: int, width: int, hidden: int, activation: str) -> list[dict[str, Any]]:
    """One shape: all implementations and the products interleaved."""
    made = modules(width, hidden, activation)
    for name, error in errors(made, width, hidden, activation).items():
        if not error < (0.12 if "fp8" in name else 0.02):
            raise SystemExit(f"{name} is wrong at {width} x {hidden}: relative error {error:.2e}; nothing was timed.")
    x = torch.randn(tokens, width, device=timing.DEVICE, dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.randn_like(x)
    wide = hidden * (2 if activation == "swiglu" else 1)
    layers = ((width, wide), (hidden, width))
    calls: dict[str, Callable[[int], Any]] = {
        "bf16": together([bf16_products(tokens, *layer) for layer in layers]),
        "fp8": together([fp8_products(tokens, *layer) for layer in layers]),
    }
    calls |= {name: step(module, RECIPES.get(name), x, gradient) for name, module in made.items()}
    graphs, _ = timing.captured(calls, timing.new_stream(), number=CALLS)
    times = timing.device_times(graphs, ROUNDS)
    rows = []
    for name in made:
        floor = times["fp8" if "fp8" in name else "bf16"].median
        rows.append(
            {
                "tokens": tokens,
                "width": width,
                "hidden": hidden,
                "activation": activation,
                "implementation": name,
                "device_ms": times[name].median,
                "device_ms_quartiles": [times[name].low, times[name].high],
                "products_ms": floor,
                "of_products": times[name].median / floor,
                "over_torch": times["torch"].median / times[name].median,
            }
        )
    return rows


def modules(width: int, hidden: int, activation: str) -> dict[str, Any]:
    """What is timed, all with the same weights. SwiGLU's halves stand in the same order in all."""
    native = Native(width, hidden, activation, torch.bfloat16)
    made: dict[str, Any] = {}
    for name in RECIPES:
        mine = LayerNormMLP(width, hidden, activation=activation, device=timing.DEVICE, dtype=torch.bfloat16)
        sources = native.parameters()
        with torch.no_grad():
            for target, source in zip(mine.parameters(), sources, strict=True):
                target.copy_(source)
        made[name] = mine
    made["torch"] = native
    if COMPILES:
        made["torch.compile"] = torch.compile(native, dynamic=False)
    return made


def step(module: Any, recipe: Recipe | None, x: Tensor, gradient: Tensor) -> Callable[[int], Any]:
    """Forward and backward, every gradient wanted."""
    leaves = [x, *module.parameters()]

    def call(_: int) -> Any:
        with contextlib.nullcontext() if recipe is None else fp8_autocast(recipe=recipe):
            y = module(x)
        return torch.autograd.grad(y, leaves, gradient)

    return call


def errors(made: dict[str, Any], width: int, hidden: int, activation: str) -> dict[str, float]:
    """Of ours: the largest relative distance of dx and the weights' gradients from float64's."""
    x = torch.randn(96, width, device=timing.DEVICE, dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.randn_like(x)
    exact = Native(width, hidden, activation, torch.float64)
    exact.load_state_dict({name: value.double() for name, value in made["torch"].state_dict().items()})
    wide = x.detach().double().requires_grad_()
    wanted = torch.autograd.grad(exact(wide), [wide, *exact.parameters()], gradient.double())
    found: dict[str, float] = {}
    for name in RECIPES:
        got = step(made[name], RECIPES[name], x, gradient)(0)
        pairs = [(a, b) for a, b in zip(got, wanted, strict=True) if b.dim() > 1]
        found[name] = max(float((a.double() - b).norm() / b.norm()) for a, b in pairs)
    return found


def together(calls: list[Callable[[int], Any]]) -> Callable[[int], Any]:
    """One call after another."""
    return lambda k: [call(k) for call in calls]


def bf16_products(tokens: int, inputs: int, outputs: int) -> Callable[[int], Any]:
    """The three products of a layer in bf16, and nothing else."""

    def operand(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, device=timing.DEVICE, dtype=torch.bfloat16)

    x, weight, gradient = operand(tokens, inputs), operand(outputs, inputs), operand(tokens, outputs)

    def call(_: int) -> None:
        torch.mm(x, weight.t())
        torch.mm(gradient, weight)
        torch.mm(gradient.t(), x)

    return call
