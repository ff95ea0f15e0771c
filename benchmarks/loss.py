"""Linear + cross entropy, forward and backward in bf16, against its three products, torch and torch.compile.

The three products (logits, gradients of input and weight) are cuBLAS's on whole tensors in the same run.
Device time is from graph replays. Memory is the peak of an eager forward and backward beyond the operands and the two
final gradients. Host time is that of eight tokens of a small head.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import timing
from fusestep import linear_cross_entropy

#: Tokens, width, vocabulary.
SHAPES = ((8192, 768, 50304), (8192, 2048, 128256))
CALLS, ROUNDS = 2, 9
#: A call takes operands; `Loss` gives the loss of x, weight and target.
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
COLUMNS = ("shape", "implementation", "device ms", "three products", "of them", "extra GB", "host µs")


def cells(row: dict[str, Any]) -> list[str]:
    """A row as the terminal shows it."""
    return [
        f"{row['tokens']} x {row['width']} x {row['vocabulary']}",
        row["implementation"],
        f"{row['device_ms']:.2f}",
        f"{row['products_ms']:.2f}",
        f"{row['of_products']:.3f}",
        f"{row['extra_bytes'] / 1e9:.2f}",
        f"{row['host_us']:.0f}",
    ]


def losses() -> dict[str, Loss]:
    """What is timed."""

    def whole(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, weight).float(), target)

    return {
        "fusestep": linear_cross_entropy,
        "fusestep, sums in bf16": functools.partial(linear_cross_entropy, accumulate_dtype=torch.bfloat16),
        "fusestep, recomputing": functools.partial(linear_cross_entropy, gradients="recompute"),
        "torch": whole,
        "torch.compile": torch.compile(whole, dynamic=False),
    }


def operands(tokens: int, width: int, vocabulary: int) -> tuple[Tensor, Tensor, Tensor]:
    """x and weight in bf16, logits of about unit variance, and targets."""
    x = torch.randn(tokens, width, device="cuda").bfloat16().requires_grad_()
    weight = (torch.randn(vocabulary, width, device="cuda") / width**0.5).bfloat16().requires_grad_()
    return x, weight, torch.randint(vocabulary, (tokens,), device="cuda")


def backward(loss: Loss, given: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
    """(loss, dx, dweight)."""
    value = loss(*given)
    return (value.detach(), *torch.autograd.grad(value, given[:2]))


def check(loss: Loss, width: int, vocabulary: int) -> float:
    """The largest relative error of the loss and of both gradients, against float32 from the same operands."""
    given = operands(1000, width, vocabulary)
    wide = (*(leaf.detach().float().requires_grad_() for leaf in given[:2]), given[2])
    wanted = backward(lambda x, weight, target: F.cross_entropy(F.linear(x, weight), target), wide)  # type: ignore[arg-type]
    return max(float((a.float() - b).norm() / b.norm()) for a, b in zip(backward(loss, given), wanted, strict=True))


def run(copy: float) -> list[dict[str, Any]]:  # noqa: ARG001 (the floor is products, not bytes)
    """Time every shape; refuse to time a wrong loss."""
    host = timing.host_times({name: host_call(loss) for name, loss in losses().items()})
    rows: list[dict[str, Any]] = []
    for shape in SHAPES:
        rows += measure(*shape, host)
        torch.compiler.reset()
        torch.cuda.empty_cache()
    return rows


def measure(tokens: int, width: int, vocabulary: int, host: Mapping[str, timing.Timing]) -> list[dict[str, Any]]:
    """One shape: all implementations and the three products interleaved."""
    made = losses()
    for name, loss in made.items():
        error = check(loss, width, vocabulary)
        if not error < 2e-2:
            raise SystemExit(
                f"{name} is wrong at vocabulary {vocabulary}: relative error {error:.2e}; nothing was timed."
            )
    given = operands(tokens, width, vocabulary)
    extra = {name: extra_bytes(loss, given) for name, loss in made.items()}
    stream = torch.cuda.Stream()

    def call(loss: Loss) -> Callable[[int], Any]:
        return lambda _: backward(loss, given)

    graphs = {"products": timing.Graph(products(*given[:2]), stream, CALLS)}
    graphs |= {name: timing.Graph(call(loss), stream, CALLS) for name, loss in made.items()}
    times = timing.device_times(graphs, ROUNDS)
    floor = times["products"].median
    return [
        {
            "tokens": tokens,
            "width": width,
            "vocabulary": vocabulary,
            "implementation": name,
            "device_ms": times[name].median,
            "device_ms_quartiles": [times[name].low, times[name].high],
            "products_ms": floor,
            "of_products": times[name].median / floor,
            "extra_bytes": extra[name],
            "host_us": host[name].median * 1e3,
        }
        for name in made
    ]


def products(x: Tensor, weight: Tensor) -> Callable[[int], Any]:
    """Logits, dx and dweight as products of whole tensors, and nothing else."""
    x, weight = x.detach(), weight.detach()
    logits = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
    dx, dweight = torch.empty_like(x), torch.empty_like(weight)

    def call(_: int) -> None:
        torch.mm(x, weight.t(), out=logits)
        torch.mm(logits, weight, out=dx)
        torch.mm(logits.t(), x, out=dweight)

    return call


def extra_bytes(loss: Loss, given: tuple[Tensor, Tensor, Tensor]) -> int:
    """The peak of a forward and backward, beyond the operands and the final gradients."""
    backward(loss, given)  # cuBLAS keeps a workspace from the first call on
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    backward(loss, given)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before - sum(leaf.nbytes for leaf in given[:2])


def host_call(loss: Loss) -> Callable[[], Any]:
    """Forward and backward of eight tokens."""
    given = operands(8, 64, 96)
    return lambda: backward(loss, given)
