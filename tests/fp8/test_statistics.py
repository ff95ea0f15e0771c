"""What is told of every tensor that a model casts."""

from __future__ import annotations

import torch
from torch import nn

from fusestep.fp8 import DelayedScaling, Format
from fusestep.fp8.pending import Pending
from fusestep.fp8.state import Slots
from fusestep.fp8.statistics import collect, reset_counts


class Casting(nn.Module):
    """A module that keeps state as those of ours do."""

    def __init__(self, state: Slots | None) -> None:
        super().__init__()
        self.fp8_state = state


def test_a_row_for_each_tensor_of_each_module() -> None:
    recipe = DelayedScaling(amax_history_len=3)
    first, second = (Slots(("input", "grad_output"), recipe, torch.device("cpu")) for _ in range(2))
    shared = Casting(second)
    model = nn.Sequential(Casting(first), nn.Linear(2, 2), shared, Casting(None), shared)
    pending = Pending()
    for amax in (1.0, 2.0, 3.0, 4.0):
        first.amax.copy_(torch.tensor([amax, float("inf")]))
        pending.add(first)
        pending.roll()
    first.counts.copy_(torch.tensor([[200, 10, 1], [0, 0, 0]]))
    rows = collect(model)
    assert [(row.module, row.tensor, row.format) for row in rows] == [
        ("0", "input", "E4M3"),
        ("0", "grad_output", "E5M2"),
        ("2", "input", "E4M3"),
        ("2", "grad_output", "E5M2"),
    ]
    told = rows[0]
    assert (told.scale, told.amax, told.history) == (112.0, 4.0, (2.0, 3.0, 4.0))
    assert (told.saturated, told.flushed, told.refused) == (0.05, 0.005, 0)
    refused = rows[1]
    assert (refused.scale, refused.amax, refused.history, refused.refused) == (0.0, 0.0, (), 4)
    assert refused.saturated is refused.flushed is None
    reset_counts(model)
    assert collect(model)[0].saturated is None


def test_gradients_may_be_in_e4m3() -> None:
    state = Slots(("grad_output",), DelayedScaling(fp8_format=Format.E4M3), torch.device("cpu"))
    assert [row.format for row in collect(Casting(state))] == ["E4M3"]


def test_a_model_without_state_has_no_rows() -> None:
    assert collect(nn.Linear(2, 3)) == []
