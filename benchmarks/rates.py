"""What `fusestep plan` divides by and no other part measures: causal attention by length, FP32 products by width.

    FLOP/s = what the formula asks for / device time of forward and backward

Attention is torch's scaled_dot_product_attention in BF16, causal; six products of half a square of scores are counted,
as `fusestep.plan` does, whatever the kernel computes twice. Products are those of a linear layer, FP32 without TF32:
output, and the gradients of input and weight. Before it is timed, attention is compared with FP32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import timing

#: Batch, sequence, heads, elements of a head: 8192 tokens or so, as a GPU has in a pass.
ATTENTION = ((32, 256, 12, 64), (32, 256, 16, 128), (16, 1024, 12, 64), (4, 2048, 16, 128), (1, 8192, 64, 128))
#: Tokens, and the width of a square weight.
PRODUCTS = ((8192, 768), (8192, 2048), (8192, 4096))
CALLS, ROUNDS = 4, 9
#: The largest relative error of attention in BF16.
WITHIN = 0.02
TINY = {"ATTENTION": ((2, 12, 3, 8),), "PRODUCTS": ((24, 16),), "CALLS": 1}

COLUMNS = ("operation", "shape", "device ms", "TFLOP/s")
IDENTITY = ("operation", "shape")


def cells(row: dict[str, Any]) -> list[str]:
    """A row as the terminal shows it."""
    return [row["operation"], row["shape"], f"{row['device_ms']:.3f}", f"{row['flops_per_second'] / 1e12:.1f}"]


def run(copy: float) -> Iterator[dict[str, Any]]:  # noqa: ARG001 (rates of products, not of bytes)
    """Every shape, one after another."""
    for batch, length, heads, size in ATTENTION:
        leaves = [leaf((batch, heads, length, size), torch.bfloat16) for _ in range(3)]
        check(leaves)
        flops = 6.0 * batch * length * heads * size * (length + 1)
        shape = f"{batch} x {length} x {heads} x {size}"
        yield timed("attention", shape, {"length": length}, flops, leaves, attend)
    torch.set_float32_matmul_precision("highest")
    for tokens, width in PRODUCTS:
        leaves = [leaf((tokens, width), torch.float32), leaf((width, width), torch.float32)]
        flops = 6.0 * tokens * width * width
        yield timed("products, fp32", f"{tokens} x {width} x {width}", {"side": width}, flops, leaves, F.linear)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def leaf(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Random numbers that want a gradient."""
    return torch.randn(shape, device=timing.DEVICE, dtype=dtype, requires_grad=True)


def check(leaves: list[Tensor]) -> None:
    """Refuse to time attention that is wrong: one sequence and head is compared with plain FP32."""
    q, k, v = (one.detach()[:1, :1].float() for one in leaves)
    length = q.shape[2]
    scores = (q @ k.mT) / q.shape[3] ** 0.5
    hidden = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    wanted = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v
    found = attend(*(one.detach()[:1, :1] for one in leaves)).float()
    error = float((found - wanted).norm() / wanted.norm())
    if not error <= WITHIN:
        raise SystemExit(f"attention over {length} tokens is off by {error:.3f}; nothing was timed.")


def timed(
    operation: str,
    shape: str,
    sizes: dict[str, int],
    flops: float,
    leaves: list[Tensor],
    function: Callable[..., Tensor],
) -> dict[str, Any]:
    """Forward and backward of one shape."""
    gradient = torch.randn_like(function(*leaves))

    def call(_: int) -> Any:
        return torch.autograd.grad(function(*leaves), leaves, gradient)

    graph = timing.Graph(call, timing.new_stream(), CALLS)
    taken = timing.device_times({"": graph}, ROUNDS)[""]
    del graph
    timing.free()
    return {
        "operation": operation,
        "shape": shape,
        **sizes,
        "device_ms": taken.median,
        "device_ms_quartiles": [taken.low, taken.high],
        "flops_per_second": flops / taken.median * 1e3,
    }
