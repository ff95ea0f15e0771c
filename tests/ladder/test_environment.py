"""What a report says of where it was measured."""

import pytest
import torch

from fusestep.ladder import environment


def test_a_compiler_is_named_without_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "/home/someone/tools/bin/gcc-13")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.delenv("FUSESTEP_IMPL", raising=False)
    variables = environment.describe(torch.device("cpu"))["variables"]
    assert isinstance(variables, dict)
    assert (variables["CC"], variables["OMP_NUM_THREADS"]) == ("gcc-13", "3")
    assert "FUSESTEP_IMPL" not in variables
