"""Casts by their plans, which every call of a module after its first takes, against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fusestep.fp8 import DelayedScaling
from fusestep.fp8.casting import recording_casts
from fusestep.fp8.state import Slots
from fusestep.ops.activation import activation_backward_reference, activation_reference
from fusestep.ops.cast_options import CastOptions
from fusestep.ops.quantize_reference import quantize_reference

CPU = torch.device("cpu")
NAMES = ("input", "weight", "grad_output")
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def state() -> Slots:
    return Slots(NAMES, DelayedScaling(amax_history_len=4), CPU)


def wanted(values: Tensor, index: int, dtype: torch.dtype, slots: Tensor, column_sums: bool = False) -> Any:
    return quantize_reference(values, slots, CastOptions(index, dtype, True, True, True), None, column_sums)


@pytest.mark.interpreter
@pytest.mark.parametrize("rows", [5, 33])
def test_planned_casts_are_the_references_bit_for_bit(rows: int) -> None:
    ours, theirs = state(), state()
    casts = recording_casts(ours.recipe, ours)
    for step in range(2):  # the first makes plans, and takes scales from the tensors
        torch.manual_seed(step)
        x, da = (torch.randn(rows, 37, dtype=torch.bfloat16) * 3**step for _ in range(2))
        h = torch.randn(rows, 37, dtype=torch.bfloat16)
        made = [
            (casts.input(x, 0, True), None),
            (casts.activation(h, "gelu", 1, True), None),
            casts.gradient(da, 2, True, True, torch.bfloat16),
            casts.activation_gradient(da, h, "gelu", 2, True, True, torch.float32),
        ]
        values = (x, activation_reference(h, "gelu"), da, activation_backward_reference(da, h, "gelu"))
        sums_dtypes = (None, None, torch.bfloat16, torch.float32)
        for place, ((quantized, sums), value) in enumerate(zip(made, values, strict=True)):
            index, dtype = min(place, 2), E4M3 if place < 2 else E5M2
            data, transposed, scale_inv, exact = wanted(value, index, dtype, theirs.slots, place > 1)
            assert quantized.shape == (rows, 37)
            assert torch.equal(quantized.scale_inv, scale_inv)
            for of, to in ((quantized.data, data), (quantized.transposed, transposed)):
                assert of is not None
                assert (of.view(torch.uint8).int() - to.view(torch.uint8).int()).abs().max() <= (place % 2)
            if exact is not None:
                assert sums is not None
                assert sums.dtype is sums_dtypes[place]
                torch.testing.assert_close(sums.float(), exact, rtol=2**-7, atol=1e-3)
        assert torch.equal(ours.slots, theirs.slots)
    assert len(casts._plans) == 4  # type: ignore[attr-defined]


@pytest.mark.interpreter
def test_another_layout_has_another_plan() -> None:
    ours, theirs = state(), state()
    casts = recording_casts(ours.recipe, ours)
    x = torch.randn(40, 12)
    for each in (x, x[::2], x.bfloat16(), x.t(), x[:, 3:7], x.expand(40, 12)[:0], x[:1].expand(9, 12)):
        data = casts.input(each, 0, False).data
        assert data is not None
        again = casts.input(each, 0, False).data
        expected = wanted(each, 0, E4M3, theirs.slots)[0]
        assert torch.equal(data.view(torch.uint8), expected.view(torch.uint8))
        assert torch.equal(data.view(torch.uint8), again.view(torch.uint8))  # type: ignore[union-attr]
