"""`fusestep convert`: the table of a model that is named, and one sentence for a name that leads to none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fusestep import installed
from fusestep.cli import main

MODEL = """
import torch
from torch import nn

made = []

def factory():
    model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 5))
    made.append(model)
    return model

class Family:
    @staticmethod
    def small():
        return nn.Sequential(nn.RMSNorm(8), nn.RMSNorm(8))

number = 3
instance = nn.LayerNorm(8)
def broken():
    raise RuntimeError("no weights\\nhere")
def none():
    return 7
def hungry(size):
    return nn.Linear(size, size)
def deep():
    return nn.Linear(-1, 3)
def empty():
    assert made is None
def leaves():
    raise SystemExit(0)
def chats():
    print("made")
    return nn.LayerNorm(8)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a user's modules; what is imported from it is forgotten."""
    (tmp_path / "my_models.py").write_text(MODEL)
    (tmp_path / "my_broken.py").write_text("import torch\nimport no_such_package_at_all\n")
    (tmp_path / "my_script.py").write_text("import sys\nsys.exit()\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("my_models", "my_broken", "my_script"):
        monkeypatch.delitem(__import__("sys").modules, name, raising=False)
    return tmp_path


def convert(*arguments: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(["convert", *arguments])
    return int(left.value.code or 0)


def test_prints_the_table_and_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert convert("--model", "my_models:factory") == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "FusedLayerNorm" in out
    assert "would be swapped: 1; left as they are: 0." in out
    import my_models

    assert [type(module).__name__ for module in my_models.made[0]] == ["Linear", "LayerNorm", "Linear"]


def test_json_and_options(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--fp8", "current", "--skip", "1", "--fp8-skip", "2", "--json")
    assert convert("--model", "my_models:factory", *options) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["schema"] == 1
    assert told["dry_run"] is True
    became = {module["path"]: module["became"] for module in told["modules"]}
    assert became == {"": "FP8Forward", "0": "FP8Linear", "2": None}
    reasons = {module["path"]: module["reason"] for module in told["modules"]}
    assert reasons["2"] == "fp8_skip names it"


@pytest.mark.parametrize("name", ["my_models:Family.small", "my_models:instance"])
def test_a_factory_may_be_a_method_or_the_model_itself(capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert convert("--model", name) == 0
    assert "one kernel each way" in capsys.readouterr().out


def test_what_a_factory_prints_is_not_in_the_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert convert("--model", "my_models:chats", "--json") == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["schema"] == 1
    assert err.startswith("made\n")
    assert convert("--model", "my_models:chats") == 0
    assert capsys.readouterr().out.startswith("made\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("my_models",), "'my_models' names no factory; pass module:function"),
        (("my_models:",), "names no factory"),
        (("no_such_module_of_mine:f",), "no_such_module_of_mine cannot be imported (ModuleNotFoundError"),
        (("my_broken:f",), "my_broken.py:2); correct it, or name another."),
        (("my_models.py:factory",), "is the path of a file; pass the module's name, my_models:factory,"),
        (("./my_models:factory",), "is the path of a file; pass the module's name, my_models:factory,"),
        (("my_models:deep",), f"my_models.py:{MODEL[: MODEL.index('nn.Linear(-1')].count(chr(10)) + 1}); correct it"),
        (("my_models:absent",), "my_models has no absent; pass the name of a function"),
        (("my_models:number",), "is of type int; pass the name of a function"),
        (("my_models:broken",), "fails (RuntimeError: no weights, at "),
        (("my_models:empty",), "my_models:empty() fails (AssertionError, at "),
        (("my_models:leaves",), "my_models:leaves() fails (SystemExit: 0, at "),
        (("my_script:factory",), "my_script cannot be imported (SystemExit, at "),
        (("my_models:none",), "gives int; let it return a torch.nn.Module."),
        (("my_models:hungry",), "missing 1 required positional argument: 'size'"),
        (("my_models:factory", "--fp8", "int8"), "--fp8 is 'int8'; choose one of delayed, current, block, mxfp8."),
        (
            ("my_models:factory", "--fp8-keep-blocks", "-1", "0"),
            "convert: --fp8-keep-blocks is -1 0; pass two numbers of at least 0",
        ),
        (
            ("my_models:factory", "--fp8-skip", "2"),
            "convert: --fp8-skip names linear layers that FP8 leaves, and --fp8 is not given; pass it",
        ),
    ],
)
def test_what_leads_to_no_model_is_one_sentence(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str
) -> None:
    assert convert("--model", *arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("fusestep convert: ")
    assert err.count("\n") == 1
    assert words in err
    assert "<frozen" not in err


def test_a_users_folder_whose_name_begins_as_a_librarys_does_is_told(
    capsys: pytest.CaptureFixture[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installed, "_BEGINNINGS", installed._BEGINNINGS + installed._beginnings([str(folder)[:-1]]))
    assert convert("--model", "my_models:deep") == 2
    assert f"at {folder / 'my_models.py'}:" in capsys.readouterr().err
