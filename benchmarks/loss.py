"""Linear + cross entropy, forward and backward in bf16, against its three products, torch and other libraries.

The three products (logits, gradients of input and weight) are cuBLAS's on whole tensors in the same run.
Device time is from graph replays. Other libraries, which wait for the device in between, are timed by events, and so
is everything of ours, in turns with them, so that like stands beside like: `event_ms`. Memory is
the peak of an eager forward and backward beyond the operands and the two final gradients. Host time is that of eight
tokens of a small head. Every implementation is compared with float32 at the very shape that is timed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import peers, timing
from fusestep import linear_cross_entropy

#: Tokens, width, vocabulary.
SHAPES = ((8192, 768, 50304), (8192, 2048, 128256))
#: Tokens at a time, by vocabulary, where sums in bf16 leave room for more of them in the memory of sums in fp32.
LARGER_CHUNKS = {50304: 2816, 128256: 4096}
#: The same, where host time is measured.
HOST = (8, 64, 96)
CALLS, ROUNDS = 2, 9
#: Whether torch.compile is among the implementations.
COMPILES = True
TINY = {"SHAPES": ((40, 24, 96),), "LARGER_CHUNKS": {96: 16}, "COMPILES": False}
#: The loss of x, weight and target.
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
Operands = tuple[Tensor, Tensor, Tensor]
COLUMNS = ("shape", "implementation", "timed by", "ms", "by events", "three products", "of them", "extra GB", "host µs")
IDENTITY = ("tokens", "width", "vocabulary", "implementation")
RATIOS = {"of_products": "less", "extra_bytes": "less"}


def ours(row: dict[str, Any]) -> bool:
    """Whether a row is of our code."""
    return str(row["implementation"]).startswith("fusestep")


def cells(row: dict[str, Any]) -> list[str]:
    """A row as the terminal shows it."""
    host = row["host_us"]
    return [
        f"{row['tokens']} x {row['width']} x {row['vocabulary']}",
        row["implementation"],
        row["timed"],
        f"{row['device_ms']:.2f}",
        f"{row['event_ms']:.2f}",
        f"{row['products_ms']:.2f}",
        f"{row['of_products']:.3f}",
        f"{row['extra_bytes'] / 1e9:.3f}",
        "" if host is None else f"{host:.0f}",
    ]


def whole(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """All logits in bf16, then the loss in fp32: plain PyTorch."""
    return F.cross_entropy(F.linear(x, weight).float(), target)


def losses(vocabulary: int) -> dict[str, Loss]:
    """What is timed by graphs."""
    narrow = functools.partial(linear_cross_entropy, accumulate_dtype=torch.bfloat16)
    made: dict[str, Loss] = {
        "fusestep": linear_cross_entropy,
        "fusestep, sums in bf16": narrow,
        "fusestep, sums in bf16, larger chunks": functools.partial(narrow, chunk_tokens=LARGER_CHUNKS.get(vocabulary)),
        "fusestep, recomputing": functools.partial(linear_cross_entropy, gradients="recompute"),
        "torch": whole,
    }
    if COMPILES:
        made["torch.compile"] = torch.compile(whole, dynamic=False)
    return made


def operands(tokens: int, width: int, vocabulary: int) -> Operands:
    """x and weight in bf16, logits of about unit variance, and targets."""
    x = torch.randn(tokens, width, device=timing.DEVICE).bfloat16().requires_grad_()
    weight = (torch.randn(vocabulary, width, device=timing.DEVICE) / width**0.5).bfloat16().requires_grad_()
    return x, weight, torch.randint(vocabulary, (tokens,), device=timing.DEVICE)


def backward(loss: Loss, given: Operands) -> tuple[Tensor, ...]:
    """(loss, dx, dweight)."""
    value = loss(*given)
    return (value.detach(), *torch.autograd.grad(value, given[:2]))


def exact(given: Operands) -> tuple[Tensor, ...]:
    """(loss, dx, dweight) in float32 from the same operands."""
    x, weight = (leaf.detach().float().requires_grad_() for leaf in given[:2])
    return backward(lambda x, weight, target: F.cross_entropy(F.linear(x, weight), target), (x, weight, given[2]))


def error_of(loss: Loss, given: Operands, wanted: tuple[Tensor, ...]) -> float:
    """The largest relative error of the loss and of both gradients."""
    found = backward(loss, given)
    return max(float((a.float() - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True))


def run(copy: float) -> Iterator[dict[str, Any]]:  # noqa: ARG001 (the floor is products, not bytes)
    """Time every shape; refuse to time a wrong loss."""
    quick = {name: loss for name, loss in losses(HOST[2]).items() if name != "torch.compile"}
    host = timing.host_times({name: host_call(loss) for name, loss in quick.items()}, calls=50)
    for shape in SHAPES:
        yield from measure(*shape, host)
        torch.compiler.reset()
        timing.free()


def measure(tokens: int, width: int, vocabulary: int, host: Mapping[str, timing.Timing]) -> list[dict[str, Any]]:
    """One shape: all implementations and the three products interleaved."""
    mine, others = losses(vocabulary), peers.losses()
    given = operands(tokens, width, vocabulary)
    failed = wrong(mine, given)
    if failed:
        raise SystemExit(f"vocabulary {vocabulary}: {failed}; nothing was timed.")
    failed = wrong(others, given)
    timing.free()
    runs = {name: loss for name, loss in (mine | others).items() if name not in failed}
    extra = {name: extra_bytes(loss, given) for name, loss in runs.items()}
    timing.free()

    def call(loss: Loss) -> Callable[[], Any]:
        return lambda: backward(loss, given)

    def indexed(loss: Loss) -> Callable[[int], Any]:
        return lambda _: backward(loss, given)

    stream = timing.new_stream()
    calls = {"products": products(*given[:2])} | {name: indexed(loss) for name, loss in mine.items()}
    graphs, _ = timing.captured(calls, stream, number=CALLS)
    device = timing.device_times(graphs, ROUNDS)
    del graphs
    timing.free()
    events = timing.event_times({name: call(loss) for name, loss in runs.items()}, ROUNDS)
    device |= {name: events[name] for name in runs if name not in mine}
    floor = device["products"].median
    rows: list[dict[str, Any]] = []
    for name in mine | others:
        row = {"tokens": tokens, "width": width, "vocabulary": vocabulary, "implementation": name}
        if name in failed:
            rows.append(row | {"failed": failed[name]})
            continue
        rows.append(
            row
            | {
                "timed": "graph" if name in mine else "events",
                "device_ms": device[name].median,
                "device_ms_quartiles": [device[name].low, device[name].high],
                "event_ms": events[name].median,
                "products_ms": floor,
                "of_products": device[name].median / floor,
                "extra_bytes": extra[name],
                "host_us": host[name].median * 1e3 if name in host else None,
            }
        )
    return rows


def wrong(made: Mapping[str, Loss], given: Operands) -> dict[str, str]:
    """The losses that are wrong or do not run, and how."""
    wanted = exact(given)
    found: dict[str, str] = {}
    for name, loss in made.items():
        try:
            error = error_of(loss, given, wanted)
        except Exception as problem:
            if ours({"implementation": name}):
                raise
            found[name] = timing.in_words(problem)
            continue
        if not error < 2e-2:
            found[name] = f"wrong: relative error {error:.2e}"
    return found


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


def extra_bytes(loss: Loss, given: Operands) -> int:
    """The peak of a forward and backward, beyond the operands and the final gradients; 0 on a CPU."""
    if timing.DEVICE.type != "cuda":
        return 0
    backward(loss, given)  # cuBLAS keeps a workspace from the first call on
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    backward(loss, given)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before - sum(leaf.nbytes for leaf in given[:2])


def host_call(loss: Loss) -> Callable[[], Any]:
    """Forward and backward of eight tokens."""
    given = operands(*HOST)
    return lambda: backward(loss, given)
