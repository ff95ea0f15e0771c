"""The Adam step in fp32 against its byte floor and torch's fused AdamW, with and without global-norm clipping."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import timing
from fusestep.optim import FusedAdam

OPTIONS: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.01}
MAX_NORM = 1.0
COLUMNS = ("parameters", "implementation", "device ms", "floor ms", "of floor", "host ms")
IDENTITY = ("set", "implementation")
RATIOS = {"of_floor": "more", "over_torch": "more"}


def cells(row: dict[str, Any]) -> list[str]:
    """A row as the terminal shows it."""
    return [
        row["set"],
        row["implementation"],
        f"{row['device_ms']:.3f}",
        f"{row['floor_ms']:.3f}",
        f"{row['of_floor']:.3f}",
        f"{row['host_ms']:.3f}",
    ]


def gpt_shapes(width: int, layers: int, vocabulary: int, context: int) -> list[tuple[int, ...]]:
    """The parameters of a GPT with fused QKV and an FFN four times its width, head tied."""
    shapes: list[tuple[int, ...]] = [(vocabulary, width), (context, width), (width,), (width,)]
    for _ in range(layers):
        shapes += [(width,), (width,), (3 * width, width), (3 * width,), (width, width), (width,)]
        shapes += [(width,), (width,), (4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    return shapes


SETS: dict[str, list[tuple[int, ...]]] = {
    "29M": gpt_shapes(768, 4, 96, 256),
    "124M": gpt_shapes(768, 12, 50304, 1024),
    "1.3B": gpt_shapes(2048, 24, 50304, 2048),
}
TINY = {"SETS": {"tiny": gpt_shapes(24, 2, 32, 16)}}


def ours(row: dict[str, Any]) -> bool:
    """Whether a row is of our code."""
    return str(row["implementation"]).startswith("fusestep")


def parameters(shapes: list[tuple[int, ...]]) -> list[nn.Parameter]:
    """Random fp32 parameters with random gradients."""
    made = [nn.Parameter(torch.randn(shape, device=timing.DEVICE) * 0.02) for shape in shapes]
    for parameter in made:
        parameter.grad = torch.randn_like(parameter) * 1e-3
    return made


def check(shapes: list[tuple[int, ...]], max_norm: float | None) -> float:
    """Three steps of ours against three of torch's unfused AdamW in float64; the largest relative error of a tensor."""
    ours = parameters(shapes)
    exact = [nn.Parameter(p.detach().double()) for p in ours]
    mine = FusedAdam(ours, adam_w_mode=True, max_grad_norm=max_norm, **OPTIONS)
    oracle = torch.optim.AdamW(exact, foreach=False, fused=False, **OPTIONS)
    before = [p.detach().clone() for p in exact]
    for _ in range(3):
        for p, q in zip(ours, exact, strict=True):
            p.grad = torch.randn_like(p) * 1e-3
            q.grad = p.grad.double()
        if max_norm is not None:
            total = math.sqrt(sum(float(q.grad.square().sum()) for q in exact if q.grad is not None))
            for q in exact:
                assert q.grad is not None
                q.grad.mul_(min(1.0, max_norm / (total + 1e-6)))
        mine.step()
        oracle.step()
    errors = [
        float((p.detach().double() - q.detach()).norm() / (q.detach() - start).norm())
        for p, q, start in zip(ours, exact, before, strict=True)
    ]
    return max(errors)


def candidates(shapes: list[tuple[int, ...]]) -> dict[str, Callable[[], Tensor | None]]:
    """The steps to time. Each optimizer has its own parameters' state; parameters and gradients are shared."""
    shared = parameters(shapes)

    def step(optimizer: torch.optim.Optimizer, clip: bool = False) -> Callable[[], None]:
        def call() -> None:
            if clip:
                torch.nn.utils.clip_grad_norm_(shared, MAX_NORM, foreach=True)
            optimizer.step()

        return call

    common = OPTIONS | {"capturable": timing.DEVICE.type == "cuda"}
    return {
        "fusestep": step(FusedAdam(shared, adam_w_mode=True, **common)),
        "fusestep+clip": step(FusedAdam(shared, adam_w_mode=True, max_grad_norm=MAX_NORM, **common)),
        "torch fused": step(torch.optim.AdamW(shared, fused=True, **common)),
        "torch fused+clip": step(torch.optim.AdamW(shared, fused=True, **common), clip=True),
    }


def run(copy: float) -> Iterator[dict[str, Any]]:
    """Time every set; refuse to time a wrong step."""
    for name, shapes in SETS.items():
        worst = max(check(shapes[:16], None), check(shapes[:16], 0.05))
        if not worst < 1e-3:
            raise SystemExit(f"Adam is wrong at {name}: relative error of the update {worst:.2e}; nothing was timed.")
        yield from measure(name, shapes, copy)
        timing.free()


def measure(name: str, shapes: list[tuple[int, ...]], copy: float) -> list[dict[str, Any]]:
    """One set: all implementations interleaved."""
    elements = sum(math.prod(shape) for shape in shapes)
    stream = timing.new_stream()
    calls: dict[str, Callable[[int], Any]] = {label: ignoring(call) for label, call in candidates(shapes).items()}
    graphs, _ = timing.captured(calls, stream, number=3)
    device = timing.device_times(graphs)
    del graphs
    host = host_step_times(shapes)
    rows = []
    for label, measured in device.items():
        suffix = "+clip" if label.endswith("+clip") else ""
        floor = elements * (32 if suffix else 28) / copy * 1e3
        rows.append(
            {
                "set": name,
                "parameters": elements,
                "tensors": len(shapes),
                "implementation": label,
                "device_ms": measured.median,
                "device_ms_quartiles": [measured.low, measured.high],
                "floor_ms": floor,
                "of_floor": floor / measured.median,
                "over_torch": device[f"torch fused{suffix}"].median / measured.median,
                "host_ms": host[label].median,
            }
        )
    return rows


def ignoring(call: Callable[[], Any]) -> Callable[[int], Any]:
    return lambda _: call()


def host_step_times(shapes: list[tuple[int, ...]]) -> dict[str, timing.Timing]:
    """Host time of a step over as many tensors, each of 8 elements, so that the device is never what is waited for."""
    small: list[tuple[int, ...]] = [(8,)] * len(shapes)
    return timing.host_times(candidates(small), calls=20)
