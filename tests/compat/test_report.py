"""What was served: gathered over processes, told in lines, and names that are refused."""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from fusestep.compat import report, settings
from fusestep.errors import UserError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv(settings.REPORT_FOLDER, str(tmp_path))
    report.reset()
    yield tmp_path
    report.reset()


def test_events_are_on_disk_at_once_and_once(folder: Path) -> None:
    for _ in range(3):
        report.served("apex.optimizers.FusedAdam", "fusestep.optim.FusedAdam, triton")
    report.hint("attention runs over the batch")
    (file,) = folder.iterdir()
    assert len(file.read_text().splitlines()) == 2
    assert report.merged(folder) == report.snapshot()


def test_the_general_gives_way_to_the_specific(folder: Path) -> None:
    report.served("b", "fusestep.B")
    report.served("a", "fusestep.A")
    report.served("a", "fusestep.A, torch")
    report.served("a", "fusestep.A, triton")
    found = report.merged(folder)
    assert found.served == {"a": ["fusestep.A, torch", "fusestep.A, triton"], "b": ["fusestep.B"]}
    assert found.lines() == ["a by fusestep.A, torch and fusestep.A, triton; b by fusestep.B"]


def test_everything_is_told(folder: Path) -> None:
    assert report.merged(folder).lines() == ["no name of Apex or Transformer Engine was used"]
    report.served("apex.mlp.MLP", "torch.nn.functional.linear")
    error = report.not_served("apex.RNN", "use torch.nn.LSTM", planned=True, kind=ImportError)
    assert isinstance(error, ImportError)
    assert str(error) == "fusestep does not serve apex.RNN; use torch.nn.LSTM (it is planned)."
    report.hint("a hint")
    report.package("apex", "fusestep 0.1")
    report.package("transformer_engine", "fusestep 0.1; transformer_engine 2 is installed too, in /x, and not used")
    found = report.merged(folder)
    assert found.lines() == [
        "apex.mlp.MLP by torch.nn.functional.linear; apex.RNN NOT served",
        "transformer_engine: fusestep 0.1; transformer_engine 2 is installed too, in /x, and not used",
        "a hint",
    ]
    assert json.loads(json.dumps(found.as_dict())) == {
        "schema": 1,
        "served": {"apex.mlp.MLP": ["torch.nn.functional.linear"]},
        "refused": {"apex.RNN": "use torch.nn.LSTM"},
        "hints": ["a hint"],
        "packages": {
            "apex": ["fusestep 0.1"],
            "transformer_engine": [
                "fusestep 0.1; transformer_engine 2 is installed too, in /x, and not used",
            ],
        },
    }


def test_what_a_killed_process_left_half_written_is_passed_over(folder: Path) -> None:
    report.served("a", "b")
    (folder / "1.jsonl").write_text('["served", "c", "d"]\n["served", "e')
    assert report.merged(folder).served == {"a": ["b"], "c": ["d"]}


def _child() -> None:
    report.served("parent", "x")
    report.served("child", "y")
    os._exit(0)


def test_a_fork_tells_its_own(folder: Path) -> None:
    report.served("parent", "x")
    child = multiprocessing.get_context("fork").Process(target=_child)
    child.start()
    child.join()
    assert len(list(folder.iterdir())) == 2
    assert report.merged(folder).served == {"child": ["y"], "parent": ["x"]}


def test_a_run_whose_folder_is_gone_still_works(folder: Path) -> None:
    report.served("a", "b")
    (file,) = folder.iterdir()
    file.unlink()
    folder.rmdir()
    report.served("c", "d")
    assert report.snapshot().served == {"a": ["b"], "c": ["d"]}


def test_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(settings.TE_LAYOUT, raising=False)
    assert settings.te_layout() is None
    for value, wanted in (("sbhd", None), ("bshd", "bshd")):
        monkeypatch.setenv(settings.TE_LAYOUT, value)
        assert settings.te_layout() == wanted
    monkeypatch.setenv(settings.TE_LAYOUT, "thd")
    with pytest.raises(UserError, match="FUSESTEP_TE_LAYOUT is 'thd'; choose bshd"):
        settings.te_layout()


# Names that are refused


def test_a_module_that_is_not_served_raises_by_both_forms_of_import() -> None:
    words = r"fusestep does not serve apex\.RNN; use torch\.nn\.LSTM or torch\.nn\.GRU.*\(it is not planned\)\."
    with pytest.raises(ModuleNotFoundError, match=words):
        importlib.import_module("apex.RNN")
    with pytest.raises(ImportError, match=words):
        from apex import RNN  # noqa: F401
    with pytest.raises(ImportError, match=words):
        importlib.import_module("apex.RNN.models")
    with pytest.raises(ImportError, match=r"apex\.transformer\.parallel_state; use Megatron-Core's parallel_state"):
        from apex.transformer import parallel_state  # noqa: F401


def test_a_class_that_is_not_served_raises_when_it_is_imported_and_is_not_there_when_it_is_asked_for() -> None:
    import apex.contrib.optimizers as module

    with pytest.raises(ImportError, match=r"serve apex\.contrib\.optimizers\.DistributedFusedAdam; use torch"):
        from apex.contrib.optimizers import DistributedFusedAdam  # noqa: F401
    assert not hasattr(module, "DistributedFusedAdam")
    with pytest.raises(AttributeError, match=r"DistributedFusedAdam; use torch\.distributed\.fsdp"):
        _ = module.DistributedFusedAdam


def test_a_name_that_nobody_knows_is_an_ordinary_error_but_where_it_is_imported() -> None:
    with pytest.raises(ImportError, match=r"serve apex\.optimizers\.FusedFoo; it is not among the names"):
        from apex.optimizers import FusedFoo  # noqa: F401
    assert "apex.optimizers.FusedFoo" in report.snapshot().refused
    import apex

    with pytest.raises(AttributeError, match="module 'apex' has no attribute 'bar'"):
        _ = apex.bar


def test_probes_for_extensions_get_a_truthful_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    import apex  # noqa: F401
    import torch

    with pytest.raises(ModuleNotFoundError, match=r"xentropy_cuda; use apex\.contrib\.xentropy\."):
        importlib.import_module("xentropy_cuda")
    import amp_C

    assert callable(amp_C.multi_tensor_scale)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ModuleNotFoundError, match=r"no fused kernel runs on this machine .*apex\.normalization works"):
        importlib.import_module("fused_layer_norm_cuda")
    for name in ("there_is_no_such_module", "xentropy_cuda", "apex.RNN"):
        assert importlib.util.find_spec(name) is None
