"""What fills the memory is known from the model's size."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fusestep.train import memory

GIB = 2**30
CPU = torch.device("cpu")


def test_parts_are_counted_by_dtype_and_the_rest_is_activations() -> None:
    model = nn.Linear(10, 10, bias=False)
    parts = memory.parts(model, has_masters=False, accumulates_in_fp32=False, peak=10_000)
    assert parts == {"activations and the rest": 8400, "optimizer state": 800, "weights": 400, "gradients": 400}
    assert next(iter(parts)) == "activations and the rest"
    parts = memory.parts(model.bfloat16(), has_masters=True, accumulates_in_fp32=True, peak=1000)
    assert parts == {"optimizer state": 1200, "gradients": 400, "weights": 200, "activations and the rest": 0}
    model.weight.requires_grad_(False)
    parts = memory.parts(model, has_masters=True, accumulates_in_fp32=True, peak=1000)
    assert parts["optimizer state"] == parts["gradients"] == 0


@pytest.mark.parametrize(
    ("largest", "batch", "mend"),
    [
        ("activations and the rest", 16, "lower --batch, such as --batch 8 --accumulate 4, or pass --activation-"),
        ("activations and the rest", 3, "lower --batch, such as --batch 1 --accumulate 6, or pass"),
        ("activations and the rest", 1, "pass --activation-checkpointing, or choose a smaller --preset"),
        ("optimizer state", 16, "choose a smaller --preset"),
    ],
)
def test_the_mend_lowers_what_is_largest(largest: str, batch: int, mend: str) -> None:
    text = memory.sentence(CPU, {largest: 3 * GIB, "weights": GIB}, 4 * GIB, 0, batch, 2)
    assert f"peak of 4.00 GiB (in GiB: {largest} 3.00, weights 1.00); {mend}" in text


def test_an_allocation_that_failed_counts_with_what_it_was_for() -> None:
    parts = memory.parts(nn.Linear(10, 10), has_masters=False, accumulates_in_fp32=False, peak=GIB + 5 * GIB)
    assert next(iter(parts)) == "activations and the rest"
    assert "peak of 1.00 GiB and a request for 5.00 more (in GiB: activations" in memory.sentence(
        CPU, parts, GIB, 5 * GIB, 16, 1
    )


def test_memory_in_use_is_at_most_the_peak(device: torch.device) -> None:
    held = torch.ones(1 << 20, device=device)
    assert held.nbytes <= memory.in_use(device) <= memory.peak(device)
