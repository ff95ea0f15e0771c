"""Whose code a file, a module or a class is."""

from __future__ import annotations

import builtins
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import fusestep
from fusestep.installed import is_installed, is_installed_file


def test_python_torch_and_fusestep_are_installed() -> None:
    for module in (builtins, sys, json, torch, torch.nn, fusestep, pytest):
        assert is_installed(module), module
    for kind in (int, torch.Tensor, torch.nn.Linear, json.JSONEncoder, fusestep.TrainStep):
        assert is_installed(kind), kind
    assert is_installed_file("<frozen importlib._bootstrap>")


def test_a_users_code_is_not() -> None:
    beside = str(Path(fusestep.__file__).parents[1].parent / "fusestep_models" / "model.py")
    assert not is_installed_file(beside)
    assert not is_installed_file("<stdin>")
    assert not is_installed(ModuleType("made_by_a_program"))
    assert not is_installed(sys.modules[__name__])
    assert not is_installed(type("Own", (), {"__module__": __name__}))


def test_a_package_without_a_file_is_where_its_folder_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "spread_out" / "inner").mkdir(parents=True)
    (tmp_path / "spread_out" / "inner" / "train.py").write_text("beta = 0.5\n")
    monkeypatch.syspath_prepend(tmp_path)
    import spread_out.inner.train  # type: ignore[import-not-found]

    assert spread_out.__file__ is None
    assert not is_installed(spread_out)
    assert not is_installed(spread_out.inner)
    folder = str(Path(torch.__file__).parent)
    monkeypatch.setattr(spread_out, "__path__", [folder])
    assert is_installed(spread_out)
