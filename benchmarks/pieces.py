"""Rotary embedding, cross entropy of logits and embedding, against the byte floor, torch, torch.compile and others.

Forward and backward together, device time by graph. The floor of rotary embedding reads and writes each tensor once in
either direction; that of cross entropy reads the logits in the forward, reads them again in the backward and writes
their gradient; that of an embedding with positions reads the rows that occur and writes the output, then reads its
gradient and writes that of the table. Tables are fp32, as under autocast, all else bf16.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import peers, timing
from fusestep.nn import RotaryPositionEmbedding
from fusestep.ops.cross_entropy import cross_entropy
from fusestep.ops.embedding import embedding
from fusestep.ops.rotary import apply_rotary_pos_emb

#: Batch, sequence, heads, elements of a head.
ROTARY = ((16, 1024, 12, 64), (4, 2048, 16, 128), (4, 8192, 32, 128))
#: Tokens, classes.
CROSS_ENTROPY = ((16384, 50304), (8192, 128256))
#: Sequences, tokens of each, rows of the table, width.
EMBEDDING = ((32, 256, 96, 768), (32, 256, 96, 2048), (16, 1024, 50304, 768), (4, 2048, 50304, 2048))
CALLS, ROUNDS, COMPILES = 4, 15, True
TINY = {
    "ROTARY": ((2, 10, 3, 8),),
    "CROSS_ENTROPY": ((20, 96),),
    "EMBEDDING": ((2, 5, 7, 8),),
    "CALLS": 1,
    "COMPILES": False,
}
NATIVE = ("torch", "torch.compile")

COLUMNS = ("operation", "shape", "implementation", "device µs", "floor µs", "of floor", "host µs")
IDENTITY = ("operation", "shape", "implementation")
RATIOS = {"of_floor": "more"}


def ours(row: dict[str, Any]) -> bool:
    """Whether a row is of our code."""
    return bool(row["implementation"] == "fusestep")


def cells(row: dict[str, Any]) -> list[str]:
    """A row as the terminal shows it."""
    return [
        row["operation"],
        row["shape"],
        row["implementation"],
        f"{row['device_us']:.1f}",
        f"{row['floor_us']:.1f}",
        f"{row['of_floor']:.3f}",
        "" if row["host_us"] is None else f"{row['host_us']:.1f}",
    ]


def run(copy: float) -> Iterator[dict[str, Any]]:
    """Every operation at every shape; refuse to time what is wrong."""
    for rotary_shape in ROTARY:
        yield from measure("rotary", rotary_shape, rotary, 4 * 2 * math.prod(rotary_shape), copy)
    for logits_shape in CROSS_ENTROPY:
        yield from measure("cross entropy", logits_shape, entropies, 3 * 2 * math.prod(logits_shape), copy)
    for table_shape in EMBEDDING:
        batch, length, rows, width = table_shape
        moved = 4 * width * (min(rows, batch * length) + 2 * batch * length + rows)
        yield from measure("embedding", table_shape, embeddings, moved, copy)


def measure(
    operation: str,
    shape: tuple[int, ...],
    make: Callable[..., dict[str, Callable[..., Tensor]]],
    moved: int,
    copy: float,
) -> list[dict[str, Any]]:
    """One operation at one shape, which moves so many bytes at least: all implementations interleaved."""
    x = leaf(operation, shape)
    inputs = [x, *(leaf(operation, shape) for _ in range(timing.sets_needed(2 * x.nbytes) - 1))]
    made = make(*shape)
    failed = wrong(made, x)
    mine = {name: why for name, why in failed.items() if name not in peers.LIBRARIES}
    if mine:
        raise SystemExit(f"{operation} at {shape}: {mine}; nothing was timed.")
    calls = {name: step(function, inputs) for name, function in made.items() if name not in failed}
    graphs, why = timing.captured(calls, timing.new_stream(), set(peers.LIBRARIES), CALLS)
    failed |= why
    device = timing.device_times(graphs, ROUNDS)
    del graphs
    few = make(*small_shape(operation, shape))
    small = [leaf(operation, small_shape(operation, shape))]
    # Compiling once more for another shape is not what a step of one shape costs.
    host_calls = {name: step(few[name], small) for name in device if name != "torch.compile"}
    host = timing.host_times({name: bound(call) for name, call in host_calls.items()}, calls=30, rounds=9)
    torch.compiler.reset()
    timing.free()
    floor = moved / copy * 1e6
    rows: list[dict[str, Any]] = []
    for name in made:
        row: dict[str, Any] = {
            "operation": operation,
            "shape": " x ".join(map(str, shape)),
            "implementation": name,
        }
        if name in failed:
            rows.append(row | {"failed": failed[name]})
            continue
        rows.append(
            row
            | {
                "device_us": device[name].median * 1e3,
                "device_us_quartiles": [device[name].low * 1e3, device[name].high * 1e3],
                "floor_us": floor,
                "of_floor": floor / (device[name].median * 1e3),
                "host_us": host[name].median * 1e3 if name in host else None,
            }
        )
    return rows


def small_shape(operation: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape that costs the device nothing."""
    return {"rotary": (1, 8, *shape[2:]), "cross entropy": (8, 512), "embedding": (1, 8, 96, 64)}[operation]


def leaf(operation: str, shape: tuple[int, ...]) -> Tensor:
    """Random numbers that want a gradient: a table of rows in fp32, or what is rotated or classified in bf16."""
    is_table = operation == "embedding"
    dtype = torch.float32 if is_table else torch.bfloat16
    return torch.randn(shape[2:] if is_table else shape, device=timing.DEVICE, dtype=dtype, requires_grad=True)


def step(function: Callable[..., Tensor], inputs: list[Tensor]) -> Callable[[int], Any]:
    """Forward and backward: (output, gradient); call k takes input k."""
    gradient = torch.ones_like(function(inputs[0]))

    def call(k: int) -> Any:
        x = inputs[k % len(inputs)]
        y = function(x)
        return y.detach(), torch.autograd.grad(y, x, gradient)[0]

    return call


def bound(call: Callable[[int], Any]) -> Callable[[], Any]:
    return lambda: call(0)


def wrong(made: dict[str, Callable[..., Tensor]], x: Tensor) -> dict[str, str]:
    """The implementations that do not give what plain PyTorch gives in float32, and how."""
    few = x.detach()[:1, :64] if x.dim() == 4 else x.detach()[:64]
    wide = few.float().requires_grad_()
    few.requires_grad_()
    found: dict[str, str] = {}
    if x.dim() == 2:  # targets and ids belong to whole tensors
        few, wide = x, x.detach().float().requires_grad_()
    wanted = step(made["torch"], [wide])(0)
    for name, function in made.items():
        try:
            got = step(function, [few])(0)
        except Exception as problem:
            if name not in peers.LIBRARIES:
                raise
            found[name] = timing.in_words(problem)
            continue
        error = max(float((a.float() - b).norm() / b.norm()) for a, b in zip(got, wanted, strict=True))
        if not error < 2e-2:
            found[name] = f"wrong: relative error {error:.2e}"
    return found


def rotary(batch: int, sequence: int, heads: int, head: int) -> dict[str, Callable[..., Tensor]]:
    """Rotations of (batch, sequence, heads, elements)."""
    del batch, heads
    angles = RotaryPositionEmbedding(head, device=timing.DEVICE)(sequence)
    cosine, sine = angles.float().cos().view(1, -1, 1, head), angles.float().sin().view(1, -1, 1, head)

    def native(t: Tensor) -> Tensor:
        length = t.shape[1]
        c, s = (one[:, :length].to(t.dtype) for one in (cosine, sine))
        first, second = t.chunk(2, -1)
        return t * c + torch.cat((-second, first), -1) * s

    made: dict[str, Callable[..., Tensor]] = {
        "fusestep": lambda t: apply_rotary_pos_emb(t, angles),
        "torch": native,
    }
    return made | ({"torch.compile": torch.compile(native, dynamic=False)} if COMPILES else {})


def entropies(tokens: int, classes: int) -> dict[str, Callable[..., Tensor]]:
    """Mean losses of logits (tokens, classes)."""
    target = torch.randint(classes, (tokens,), device=timing.DEVICE)

    def native(logits: Tensor) -> Tensor:
        return F.cross_entropy(logits.float(), target)

    made: dict[str, Callable[..., Tensor]] = {
        "fusestep": lambda logits: cross_entropy(logits, target),
        "torch": native,
    }
    if COMPILES:
        made["torch.compile"] = torch.compile(native, dynamic=False)
    for name, function in peers.cross_entropies().items():
        made[name] = lambda logits, function=function: function(logits, target)
    return made


def embeddings(batch: int, length: int, rows: int, width: int) -> dict[str, Callable[..., Tensor]]:
    """Rows of a table for each token, with that of its position, as a GPT begins."""
    ids = torch.randint(rows, (batch, length), device=timing.DEVICE)
    positions = torch.randn(length, width, device=timing.DEVICE)
    places = torch.arange(length, device=timing.DEVICE)

    def native(table: Tensor) -> Tensor:
        return F.embedding(ids, table) + F.embedding(places, positions)

    made: dict[str, Callable[..., Tensor]] = {
        "fusestep": lambda table: embedding(ids, table, positions=positions),
        "torch": native,
    }
    return made | ({"torch.compile": torch.compile(native, dynamic=False)} if COMPILES else {})
