"""LayerNorm and RMSNorm in bf16 against the byte floor, torch's own and torch.compile's: forward, backward, host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import timing
from fusestep.nn import FusedLayerNorm, FusedRMSNorm

SHAPES = ((16384, 768), (16384, 2048), (16384, 4096), (16384, 8192), (8192, 16384))
EPS = 1e-5
COLUMNS = ("norm", "shape", "implementation", "forward µs", "of floor", "backward µs", "of floor", "host µs")


def cells(row: dict[str, Any]) -> list[str]:
    """A row as the terminal shows it."""
    return [
        row["kind"],
        f"{row['rows']} x {row['width']}",
        row["implementation"],
        f"{row['forward_us']:.1f}",
        f"{row['forward_of_floor']:.3f}",
        f"{row['backward_us']:.1f}",
        f"{row['backward_of_floor']:.3f}",
        f"{row['host_us']:.1f}",
    ]


def builders(kind: str, width: int) -> dict[str, Callable[[], Callable[[Tensor], Tensor]]]:
    """The norms to time; every one has bf16 parameters of its own."""
    ours, native = (FusedLayerNorm, nn.LayerNorm) if kind == "layer_norm" else (FusedRMSNorm, nn.RMSNorm)
    options = {"eps": EPS, "device": "cuda", "dtype": torch.bfloat16}
    return {
        "fusestep": lambda: ours(width, **options),
        "torch": lambda: native(width, **options),
        "torch.compile": lambda: torch.compile(native(width, **options), dynamic=False),
    }


def parameters(norm: Any) -> list[nn.Parameter]:
    """The norm's own parameters, whether compiled or not."""
    return list(norm.parameters())


def oracle(kind: str, x: Tensor, gradient: Tensor, weight: Tensor, bias: Tensor | None) -> list[Tensor]:
    """y, dx, dweight (and dbias) in float64, two-pass."""
    x, g, w = x.double(), gradient.double(), weight.double()
    centred = x - x.mean(-1, keepdim=True) if kind == "layer_norm" else x
    rstd = (centred.square().mean(-1, keepdim=True) + EPS).rsqrt()
    normal = centred * rstd
    wg = w * g
    dx = wg - normal * (wg * normal).mean(-1, keepdim=True)
    if kind == "layer_norm":
        dx = dx - wg.mean(-1, keepdim=True)
    outputs = [normal * w, rstd * dx, (g * normal).sum(0)]
    if bias is not None:
        outputs[0] = outputs[0] + bias.double()
        outputs.append(g.sum(0))
    return outputs


def check(kind: str, norm: Any, rows: int, width: int) -> float:
    """The largest relative error of y and of the gradients, on fresh inputs with a mean."""
    x = (torch.randn(rows, width, device="cuda") + 0.5).bfloat16().requires_grad_()
    gradient = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in parameters(norm):
            parameter.uniform_(0.5, 1.5)
    y = norm(x)
    found = [y, *torch.autograd.grad(y, [x, *parameters(norm)], gradient)]
    bias = norm.bias.detach() if kind == "layer_norm" else None
    wanted = oracle(kind, x.detach(), gradient, norm.weight.detach(), bias)
    return max(float((a.detach().double() - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True))


def run(copy: float) -> list[dict[str, Any]]:
    """Time every shape; refuse to time a wrong norm."""
    results: list[dict[str, Any]] = []
    for rows, width in SHAPES:
        for kind in ("layer_norm", "rms_norm"):
            results += measure(kind, rows, width, copy)
            torch.compiler.reset()
            torch.cuda.empty_cache()
    return results


def measure(kind: str, rows: int, width: int, copy: float) -> list[dict[str, Any]]:
    """One shape: all implementations interleaved, forward and backward apart."""
    made = {name: build() for name, build in builders(kind, width).items()}
    for name, norm in made.items():
        error = check(kind, norm, 2048, width)
        if not error < 1e-2:
            raise SystemExit(f"{name} {kind} is wrong at width {width}: relative error {error:.2e}; nothing was timed.")
    size = rows * width * 2
    sets = timing.sets_needed(2 * size)
    inputs = [torch.randn(rows, width, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(sets)]
    gradients = [torch.randn_like(x) for x in inputs]
    stream = torch.cuda.Stream()

    def forward(norm: Any) -> Callable[[int], Any]:
        return lambda k: norm(inputs[k % sets])

    def backward(norm: Any) -> Callable[[int], Any]:
        # The forward runs on the capturing stream, since a gradient runs on the stream of its forward.
        with torch.cuda.stream(stream):
            outputs = [norm(x) for x in inputs]
        leaves = parameters(norm)

        def call(k: int) -> Any:
            n = k % sets
            return torch.autograd.grad(outputs[n], [inputs[n], *leaves], gradients[n], retain_graph=True)

        return call

    timings = {
        "forward": timing.device_times({n: timing.Graph(forward(m), stream) for n, m in made.items()}),
        "backward": timing.device_times({n: timing.Graph(backward(m), stream) for n, m in made.items()}),
    }
    host = timing.host_times({n: host_call(m, width) for n, m in made.items()})
    lines = []
    for name in made:
        line: dict[str, Any] = {"kind": kind, "rows": rows, "width": width, "implementation": name}
        for direction, passes in (("forward", 2), ("backward", 3)):
            floor = passes * size / copy * 1e3
            measured = timings[direction][name]
            line[f"{direction}_us"] = measured.median * 1e3
            line[f"{direction}_us_quartiles"] = [measured.low * 1e3, measured.high * 1e3]
            line[f"{direction}_of_floor"] = floor / measured.median
        line["host_us"] = host[name].median * 1e3
        lines.append(line)
    return lines


def host_call(norm: Any, width: int) -> Callable[[], Any]:
    """Forward and backward of a module on a tensor of eight rows."""
    x = torch.randn(8, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.randn_like(x)
    leaves = [x, *parameters(norm)]
    return lambda: torch.autograd.grad(norm(x), leaves, gradient)
