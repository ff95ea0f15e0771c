"""The learning rate follows its formula on the device, from applied steps alone."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusestep.train.schedule import FINAL_FRACTION, Schedule


def formula(step: int, peak: float, warmup: int, length: int) -> float:
    if step < warmup:
        return peak * (step + 1) / warmup
    done = min((step - warmup) / (length - warmup), 1.0) if length > warmup else (1.0 if step > warmup else 0.0)
    return peak * (FINAL_FRACTION + (1 - FINAL_FRACTION) * 0.5 * (1 + math.cos(math.pi * done)))


@settings(deadline=None, max_examples=60)
@given(
    step=st.integers(0, 400),
    peak=st.floats(1e-6, 10.0),
    warmup=st.integers(0, 60),
    rest=st.integers(0, 200),
)
def test_schedule_equals_its_formula(step: int, peak: float, warmup: int, rest: int) -> None:
    length = max(warmup + rest, 1)
    lr = torch.zeros(())
    Schedule(peak, warmup, length).write(lr, torch.tensor(step))
    assert lr.item() == pytest.approx(formula(step, peak, warmup, length), rel=1e-6)


def test_warm_up_ends_at_the_peak_and_the_cosine_at_a_tenth() -> None:
    schedule, lr = Schedule(2.0, 4, 20), torch.zeros(())
    values = []
    for step in range(25):
        schedule.write(lr, torch.tensor(step))
        values.append(lr.item())
    assert values[:5] == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0])
    assert values[4:20] == sorted(values[4:20], reverse=True)
    assert values[20:] == pytest.approx([0.2] * 5)


def test_schedule_changes_the_same_tensor_in_place(device: torch.device) -> None:
    lr, applied = torch.zeros((), device=device), torch.zeros((), dtype=torch.int64, device=device)
    address = lr.data_ptr()
    Schedule(1.0, 2, 8).write(lr, applied)
    assert lr.data_ptr() == address
    assert lr.item() == 0.5
