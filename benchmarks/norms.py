"""LayerNorm and RMSNorm in bf16 against the byte floor, torch's own, torch.compile's and those of other libraries.

Forward and backward apart, and the host's time for both. QuACK's weights are fp32, all others bf16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import peers, timing
from fusestep.nn import FusedLayerNorm, FusedRMSNorm

SHAPES = ((16384, 768), (16384, 2048), (16384, 4096), (16384, 8192), (8192, 16384))
EPS = 1e-5
COLUMNS = ("norm", "shape", "implementation", "forward µs", "of floor", "backward µs", "of floor", "host µs")
IDENTITY = ("kind", "rows", "width", "implementation")
RATIOS = {"forward_of_floor": "more", "backward_of_floor": "more"}
TINY = {"SHAPES": ((40, 24),), "CHECKED": 30, "COMPILES": False}
#: Rows that are compared with float64; whether torch.compile is among the implementations.
CHECKED, COMPILES = 2048, True
OURS, NATIVE = "fusestep", ("torch", "torch.compile")


def ours(row: dict[str, Any]) -> bool:
    """Whether a row is of our code."""
    return bool(row["implementation"] == OURS)


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
    """The norms to time; every one has parameters of its own."""
    mine, native = (FusedLayerNorm, nn.LayerNorm) if kind == "layer_norm" else (FusedRMSNorm, nn.RMSNorm)
    options: dict[str, Any] = {"eps": EPS, "device": timing.DEVICE, "dtype": torch.bfloat16}
    made: dict[str, Callable[[], Callable[[Tensor], Tensor]]] = {
        OURS: lambda: mine(width, **options),
        "torch": lambda: native(width, **options),
    }
    if COMPILES:
        made["torch.compile"] = lambda: torch.compile(native(width, **options), dynamic=False)
    return made | peers.norms(kind, width, EPS, timing.DEVICE)


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
    x = (torch.randn(rows, width, device=timing.DEVICE) + 0.5).bfloat16().requires_grad_()
    gradient = torch.randn(rows, width, device=timing.DEVICE, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in parameters(norm):
            parameter.uniform_(0.5, 1.5)
    y = norm(x)
    found = [y, *torch.autograd.grad(y, [x, *parameters(norm)], gradient)]
    bias = norm.bias.detach() if kind == "layer_norm" else None
    wanted = oracle(kind, x.detach(), gradient, norm.weight.detach(), bias)
    return max(float((a.detach().double() - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True))


def run(copy: float) -> Iterator[dict[str, Any]]:
    """Time every shape; refuse to time a wrong norm."""
    for rows, width in SHAPES:
        for kind in ("layer_norm", "rms_norm"):
            yield from measure(kind, rows, width, copy)
            torch.compiler.reset()
            timing.free()


def measure(kind: str, rows: int, width: int, copy: float) -> list[dict[str, Any]]:
    """One shape: all implementations interleaved, forward and backward apart."""
    made, failed = checked(kind, width)
    size = rows * width * 2
    sets = timing.sets_needed(2 * size)
    inputs = [torch.randn(rows, width, device=timing.DEVICE, dtype=torch.bfloat16) for _ in range(sets)]
    inputs = [x.requires_grad_() for x in inputs]
    gradients = [torch.randn_like(x) for x in inputs]
    stream = timing.new_stream()

    def forward(norm: Any) -> Callable[[int], Any]:
        return lambda k: norm(inputs[k % sets])

    def backward(norm: Any) -> Callable[[int], Any]:
        # The forward runs on the capturing stream, since a gradient runs on the stream of its forward.
        with timing.on(stream):
            outputs = [norm(x) for x in inputs]
        leaves = parameters(norm)

        def call(k: int) -> Any:
            n = k % sets
            return torch.autograd.grad(outputs[n], [inputs[n], *leaves], gradients[n], retain_graph=True)

        return call

    others = set(made) - {OURS, *NATIVE}
    timings = {}
    for direction, call in (("forward", forward), ("backward", backward)):
        graphs, why = timing.captured({n: call(m) for n, m in made.items() if n not in failed}, stream, others)
        failed |= why
        timings[direction] = timing.device_times(graphs)
    host = timing.host_times({n: host_call(m, width) for n, m in made.items() if n not in failed}, calls=50)
    lines = []
    for name in made:
        line: dict[str, Any] = {"kind": kind, "rows": rows, "width": width, "implementation": name}
        if name in failed:
            lines.append(line | {"failed": failed[name]})
            continue
        for direction, passes in (("forward", 2), ("backward", 3)):
            floor = passes * size / copy * 1e3
            measured = timings[direction][name]
            line[f"{direction}_us"] = measured.median * 1e3
            line[f"{direction}_us_quartiles"] = [measured.low * 1e3, measured.high * 1e3]
            line[f"{direction}_of_floor"] = floor / measured.median
        line["host_us"] = host[name].median * 1e3
        lines.append(line)
    return lines


def checked(kind: str, width: int) -> tuple[dict[str, Any], dict[str, str]]:
    """The norms of a width, and why those of other libraries that cannot be timed cannot."""
    made: dict[str, Any] = {}
    failed: dict[str, str] = {}
    for name, build in builders(kind, width).items():
        made[name] = None
        try:
            made[name] = build()
            error = check(kind, made[name], CHECKED, width)
        except Exception as problem:
            if name in (OURS, *NATIVE):
                raise
            failed[name] = timing.in_words(problem)
            continue
        if error < 1e-2:
            continue
        failed[name] = f"wrong: relative error {error:.2e}"
        if name in (OURS, *NATIVE):
            raise SystemExit(f"{name} {kind} is {failed[name]} at width {width}; nothing was timed.")
    return made, failed


def host_call(norm: Any, width: int) -> Callable[[], Any]:
    """Forward and backward of a module on a tensor of eight rows."""
    x = torch.randn(8, width, device=timing.DEVICE, dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.randn_like(x)
    leaves = [x, *parameters(norm)]
    return lambda: torch.autograd.grad(norm(x), leaves, gradient)
