"""The formats and what they serve."""

from __future__ import annotations

import torch

from fusestep.fp8 import Format
from fusestep.fp8.formats import largest


def test_hybrid_keeps_gradients_in_the_wider_format() -> None:
    assert (Format.HYBRID.forward, Format.HYBRID.backward) == (torch.float8_e4m3fn, torch.float8_e5m2)
    assert (Format.HYBRID.max_fwd, Format.HYBRID.max_bwd) == (448.0, 57344.0)
    assert (Format.E4M3.max_fwd, Format.E4M3.max_bwd) == (448.0, 448.0)


def test_the_largest_values_survive_the_cast_and_the_next_do_not() -> None:
    for dtype, value in ((torch.float8_e4m3fn, 448.0), (torch.float8_e5m2, 57344.0)):
        assert largest(dtype) == value
        assert torch.tensor(value).to(dtype).float().item() == value


def test_a_format_prints_as_it_is_written() -> None:
    assert repr(Format.HYBRID) == "Format.HYBRID"
    assert [each.name for each in Format] == ["E4M3", "E5M2", "HYBRID"]
