"""What this device reaches at best, measured in the same run: large products and a large copy."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from fusestep.fp8 import support
from fusestep.ladder.rungs import Precision
from fusestep.ladder.timing import Clock, clock_of

#: Rows and columns of the products, the fastest of which is the ceiling.
SIZES = (4096, 8192)

#: Elements of 4 bytes that are copied: far beyond any cache, and small beside any memory that trains a model.
COPIED = 1 << 28

_REPEATS, _WARMUP = 10, 3


@dataclass(frozen=True)
class Ceilings:
    """The best rates of large, simple work.

    Attributes:
        products: FLOP/s of a square product, by precision; fp8 only where the device multiplies in it.
        copy: bytes a second, read plus written, of a copy within the device's memory.
    """

    products: Mapping[Precision, float]
    copy: float


def measure(device: torch.device, *, sizes: tuple[int, ...] = SIZES, copied: int = COPIED) -> Ceilings:
    """Time a copy of `copied` FP32 elements, and square products of each size in each precision; medians of 10.

    FP32 is full FP32, TF32 is off, as in the rungs. Fits a device with 4 GiB free at the default sizes.
    """
    torch.set_float32_matmul_precision("highest")
    clock = clock_of(device)
    copy = 2 * 4 * copied / _median_seconds(_copy(copied, device), clock)
    products: dict[Precision, float] = {}
    precisions: tuple[Precision, ...] = ("fp32", "bf16", "fp8") if support(device)[0] else ("fp32", "bf16")
    for precision in precisions:
        rates = []
        for size in sizes:
            seconds = _median_seconds(_product(precision, size, device), clock)
            rates.append(2 * size**3 / seconds)
        products[precision] = max(rates)
    return Ceilings(products, copy)


def _copy(elements: int, device: torch.device) -> Callable[[], object]:
    source = torch.randn(elements, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _product(precision: Precision, size: int, device: torch.device) -> Callable[[], object]:
    """A square product of random numbers; zeros would run faster than anything that is trained with."""
    # Both as rows; the right one is read transposed, which is the layout that FP8 products ask for.
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    if precision == "fp8":
        a, b = left.to(torch.float8_e4m3fn), right.to(torch.float8_e4m3fn)
        one = torch.ones((), device=device)
        return lambda: torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    a, b = left.to(dtype), right.to(dtype)
    return lambda: torch.matmul(a, b.t())


def _median_seconds(work: Callable[[], object], clock: Clock) -> float:
    """Median time of one call between marks in the device's queue."""
    for _ in range(_WARMUP):
        work()
    marks = [clock.mark()]
    for _ in range(_REPEATS):
        work()
        marks.append(clock.mark())
    clock.synchronize()
    return statistics.median(clock.elapsed_ms(a, b) for a, b in itertools.pairwise(marks)) / 1e3
