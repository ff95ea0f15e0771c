"""A checkpoint is complete or absent, and whatever is wrong with one is said in a sentence that names it."""

from __future__ import annotations

import errno
import io
import itertools
import json
import logging
import os
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from torch import Tensor

from fusestep import durable
from fusestep.errors import UserError
from fusestep.models import GPT, GPTConfig
from fusestep.train import checkpoint, load_model

CONFIG = GPTConfig(vocab_size=11, width=8, heads=2, layers=1, ffn_width=12, context=5)


def weights() -> dict[str, Tensor]:
    return GPT(CONFIG).state_dict()


def save(run: Path, step: int, weights: dict[str, Tensor] | None = None, state: Any = None) -> Path:
    state = {"position": 3 * step, "rng": torch.get_rng_state(), "lr": 0.1} if state is None else state
    weights = GPT(CONFIG).state_dict() if weights is None else weights
    parts = {"config": {"seed": 7}, "model": CONFIG.to_dict(), "data": {"kind": "synthetic"}}
    return checkpoint.save(run, step, weights, state, **parts)


def everything(run: Path) -> dict[str, bytes]:
    return {str(path.relative_to(run)): path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file()}


def test_everything_comes_back_bit_for_bit(tmp_path: Path) -> None:
    saved = {
        "a.weight": torch.randn(3, 5).t(),
        "b": torch.randn(7).bfloat16(),
        "c": torch.tensor(2.5, dtype=torch.float16),
        "empty": torch.empty(0, 4),
        "count": torch.tensor([1, -2]),
    }
    state = {
        "step": torch.tensor(3.0),
        "dtype": torch.bfloat16,
        "betas": (0.9, 0.99),
        "none": None,
        "x": torch.randn(4),
    }
    found = checkpoint.read(save(tmp_path, 12, saved, state))
    assert (found.step, found.config, found.data) == (12, {"seed": 7}, {"kind": "synthetic"})
    loaded = found.weights()
    assert loaded.keys() == saved.keys()
    for name, value in saved.items():
        assert loaded[name].dtype == value.dtype
        assert torch.equal(loaded[name], value)
    again = found.state()
    assert torch.equal(again.pop("x"), state.pop("x"))
    assert again == state


def test_the_weights_are_a_file_that_the_safetensors_library_reads(tmp_path: Path) -> None:
    model = weights()
    with safetensors.safe_open(save(tmp_path, 1, model) / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert set(file.keys()) == set(model)
        assert all(torch.equal(file.get_tensor(name), value) for name, value in model.items())


def test_a_tied_head_is_saved_once(tmp_path: Path) -> None:
    tied = GPT(GPTConfig(**{**CONFIG.to_dict(), "tied_head": True}))
    found = checkpoint.read(save(tmp_path, 1, tied.state_dict()))
    assert "head.weight" not in found.weights()


@pytest.mark.parametrize("wrapped_at_save", [False, True])
@pytest.mark.parametrize("wrapped_at_load", [False, True])
def test_saved_names_are_plain_whether_or_not_a_model_is_compiled(
    tmp_path: Path, wrapped_at_save: bool, wrapped_at_load: bool
) -> None:
    def build(is_wrapped: bool) -> Any:
        model = GPT(CONFIG)
        return torch.compile(model, backend="eager") if is_wrapped else model

    first = build(wrapped_at_save)
    found = checkpoint.read(save(tmp_path, 1, first.state_dict()))
    assert found.weights().keys() == weights().keys()
    second = build(wrapped_at_load)
    checkpoint.load_weights(second, found.weights(), found.path)
    third = checkpoint.read(save(tmp_path, 2, second.state_dict()))
    original = checkpoint.plain_names(first.state_dict())
    assert all(torch.equal(value, original[name]) for name, value in third.weights().items())


def test_the_prefixes_of_ddp_and_of_nested_compilation_are_dropped() -> None:
    assert checkpoint.plain_name("module.blocks.0.weight") == "blocks.0.weight"
    assert checkpoint.plain_name("module._orig_mod.blocks.0._orig_mod.weight") == "blocks.0.weight"
    assert checkpoint.plain_name("_orig_mod.module.head.weight") == "head.weight"
    assert checkpoint.plain_name("blocks.module.weight") == "blocks.module.weight"


def test_the_last_three_are_kept_in_the_order_of_their_steps(tmp_path: Path) -> None:
    for step in (9, 10, 99_999_999, 100_000_000):
        save(tmp_path, step)
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept == ["step-00000010", "step-100000000", "step-99999999"]
    newest = checkpoint.newest(tmp_path)
    assert newest is not None
    assert newest.step == 100_000_000


def damage(path: Path, how: str) -> None:
    content = bytearray(path.read_bytes())
    if how == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif how == "altered":
        content[len(content) * 3 // 4] ^= 0x10
        path.write_bytes(content)
    elif how == "missing":
        path.unlink()
    elif how == "empty":
        path.write_bytes(b"")
    else:
        path.write_bytes(b'{"model": 3}')


@pytest.mark.parametrize(
    ("name", "how"),
    [
        *itertools.product(
            ["model.safetensors", "state.pt", "checkpoint.json"], ["truncated", "missing", "empty", "foreign"]
        ),
        ("model.safetensors", "altered"),
        ("state.pt", "altered"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, how: str
) -> None:
    save(tmp_path, 1)
    bad = save(tmp_path, 2)
    damage(bad / name, how)
    with pytest.raises(UserError) as raised:
        checkpoint.read(bad)
    assert str(bad) in str(raised.value)
    assert "\n" not in str(raised.value)
    with caplog.at_level(logging.WARNING, logger="fusestep"):
        found = checkpoint.newest(tmp_path)
    assert found is not None
    assert found.step == 1
    assert str(bad) in caplog.text
    damage(tmp_path / "checkpoints" / "step-00000001" / name, how)
    with pytest.raises(UserError, match="step-00000002"):
        checkpoint.newest(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"step": "two"},
        {"step": 1e400},
        {"config": "none"},
        {"model": 3},
        {"schema": "one"},
        {"files": {"model.safetensors": {"bytes": "many", "crc32": 0}}},
    ],
)
def test_a_manifest_of_odd_values_is_damaged(tmp_path: Path, changes: dict[str, Any]) -> None:
    manifest = save(tmp_path, 2) / "checkpoint.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), **changes}))
    with pytest.raises(checkpoint.DamagedCheckpointError, match=r"step-00000002 .*checkpoint\.json cannot be read"):
        checkpoint.read(manifest.parent)


@pytest.mark.parametrize("name", ["checkpoint.json", "state.pt"])
def test_a_file_that_may_not_be_read_is_not_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The error of the system goes on, so that nobody falls back to an earlier checkpoint or throws this one away."""
    path = save(tmp_path, 2)
    opened = io.open

    def refusing(file: Any, *args: Any, **options: Any) -> Any:
        if Path(file).name == name:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(file))
        return opened(file, *args, **options)

    monkeypatch.setattr(io, "open", refusing)
    with pytest.raises(PermissionError, match=f"Permission denied: '.*{name}'"):
        checkpoint.find(path)


def test_a_run_without_a_good_checkpoint_does_not_send_one_to_an_earlier_one(tmp_path: Path) -> None:
    for step in (2, 4):
        (save(tmp_path, step) / "state.pt").write_bytes(b"cut")
    with pytest.raises(checkpoint.DamagedCheckpointError, match=r"step-00000004 .*, and .* has no good one; put"):
        checkpoint.find(tmp_path)


def test_a_manifest_nested_without_end_is_damaged(tmp_path: Path) -> None:
    manifest = save(tmp_path, 2) / "checkpoint.json"
    manifest.write_text("[" * 100_000)
    with pytest.raises(checkpoint.DamagedCheckpointError, match=r"checkpoint\.json cannot be read"):
        checkpoint.read(manifest.parent)


@pytest.mark.parametrize("name", ["model.safetensors", "state.pt"])
@pytest.mark.parametrize("content", [b"", b"garbage of somebody else"])
def test_a_foreign_file_whose_fingerprint_is_right_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    path = save(tmp_path, 2)
    (path / name).write_bytes(content)
    manifest = json.loads((path / "checkpoint.json").read_text())
    manifest["files"][name] = {"bytes": len(content), "crc32": zlib.crc32(content)}
    (path / "checkpoint.json").write_text(json.dumps(manifest))
    found = checkpoint.read(path)
    with pytest.raises(checkpoint.DamagedCheckpointError, match=f"step-00000002 .*{name} cannot be read"):
        found.weights() if name == "model.safetensors" else found.state()


def test_a_damaged_checkpoint_is_replaced_when_its_step_is_reached_again(tmp_path: Path) -> None:
    save(tmp_path, 1)
    damage(save(tmp_path, 2) / "state.pt", "truncated")
    save(tmp_path, 2)
    found = checkpoint.newest(tmp_path)
    assert found is not None
    assert found.step == 2


def test_a_newer_schema_says_so_and_no_older_checkpoint_is_taken_for_it(tmp_path: Path) -> None:
    save(tmp_path, 1)
    manifest = save(tmp_path, 2) / "checkpoint.json"
    contents = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**contents, "schema": checkpoint.SHARDED_SCHEMA + 1}))
    with pytest.raises(UserError, match=r"step-00000002 has schema 3 and this version reads up to 2; upgrade fusestep"):
        checkpoint.newest(tmp_path)


@pytest.mark.parametrize("at_byte", [0, 40, 900, 4000])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_leaves_the_last_good_checkpoint_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_byte: int, number: int
) -> None:
    save(tmp_path, 1)
    before = everything(tmp_path)
    original, left = durable.DurableFile.write, [at_byte]

    class FullFile:
        """A file on a disk with so many bytes left."""

        def __init__(self, file: Any) -> None:
            self._file = file

        def write(self, data: Any) -> int:
            left[0] -= len(data)
            if left[0] < 0:
                raise OSError(number, os.strerror(number))
            return int(self._file.write(data))

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

    def write(self: Any, data: Any) -> int:
        if not isinstance(self._file, FullFile):
            self._file = FullFile(self._file)
        return original(self, data)

    monkeypatch.setattr(durable.DurableFile, "write", write)
    with pytest.raises(UserError) as raised:
        save(tmp_path, 2)
    assert "step 2 could not be written" in str(raised.value)
    assert "step-00000001, is untouched" in str(raised.value)
    assert everything(tmp_path) == before


def test_a_limit_of_the_system_on_file_size_is_one_sentence(tmp_path: Path) -> None:
    """The same with the system's own error, deep in torch.save's C++."""
    program = """
import resource, sys, torch
from pathlib import Path
from fusestep import durable
from fusestep.errors import UserError
from fusestep.train import checkpoint
run = Path(sys.argv[1])
parts = dict(config={}, model={}, data={})
checkpoint.save(run, 1, {"w": torch.zeros(8)}, {"m": torch.zeros(8)}, **parts)
resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))
for weights, state in ((200_000, 8), (8, 200_000)):
    try:
        checkpoint.save(run, 2, {"w": torch.zeros(weights)}, {"m": torch.randn(state)}, **parts)
    except UserError as error:
        print(error)
print(sorted(str(p.relative_to(run)) for p in run.rglob("*")))
found = checkpoint.newest(run)
print(found.step, found.weights()["w"].sum().item(), found.state()["m"].sum().item())
"""
    answer = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=120, check=True
    )
    first, second, names, newest = answer.stdout.splitlines()
    for sentence in (first, second):
        assert "step 2 could not be written (File too large)" in sentence
        assert "step-00000001, is untouched" in sentence
    assert "writing" not in names
    assert "step-00000002" not in names
    assert newest == "1 0.0 0.0"


def test_a_process_that_dies_before_the_rename_leaves_no_checkpoint_and_the_next_save_cleans_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1)

    class Killed(BaseException):
        pass

    def die(self: Path, target: Path) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", die)
        # A kill runs no clean-up either.
        patched.setattr(checkpoint.shutil, "rmtree", lambda *_args, **_options: None)
        with pytest.raises(Killed):
            save(tmp_path, 2)
    assert (tmp_path / "checkpoints" / ".writing-00000002" / "checkpoint.json").exists()
    found = checkpoint.newest(tmp_path)
    assert found is not None
    assert found.step == 1
    save(tmp_path, 2)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-00000001", "step-00000002"]


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    sync, rename = os.fsync, Path.rename
    monkeypatch.setattr(os, "fsync", lambda descriptor: (events.append("sync"), sync(descriptor))[1])
    monkeypatch.setattr(Path, "rename", lambda self, target: (events.append("rename"), rename(self, target))[1])
    save(tmp_path, 1)
    # Three files and their folder, then the folder that the new name is in.
    assert events == ["sync"] * 4 + ["rename", "sync"]


def test_load_model_takes_a_run_or_one_checkpoint(tmp_path: Path) -> None:
    first, second = weights(), weights()
    save(tmp_path, 1, first)
    save(tmp_path, 2, second)
    model, found = load_model(tmp_path)
    assert found.step == 2
    assert not model.training
    assert torch.equal(model.state_dict()["embedding.weight"], second["embedding.weight"])
    model, found = load_model(tmp_path / "checkpoints" / "step-00000001")
    assert found.step == 1
    assert torch.equal(model.state_dict()["embedding.weight"], first["embedding.weight"])


def test_load_model_names_what_holds_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere does not exist"):
        load_model(tmp_path / "nowhere")
    with pytest.raises(UserError, match="holds no checkpoint"):
        load_model(tmp_path)
    (tmp_path / "model.pt").write_bytes(b"x")
    with pytest.raises(UserError, match=r"model\.pt holds no checkpoint"):
        load_model(tmp_path / "model.pt")
    (tmp_path / "run" / "checkpoints" / "step-00000004").mkdir(parents=True)
    with pytest.raises(
        UserError, match=r"checkpoints holds the checkpoints of a run; name the run's folder, \S+run, or"
    ):
        load_model(tmp_path / "run" / "checkpoints")


def test_weights_of_another_model_are_refused_before_anything_is_copied(tmp_path: Path) -> None:
    found = checkpoint.read(save(tmp_path, 1))
    wider = GPT(GPTConfig(**{**CONFIG.to_dict(), "width": 16}))
    deeper = GPT(GPTConfig(**{**CONFIG.to_dict(), "layers": 2}))
    before = {name: value.clone() for name, value in wider.state_dict().items()}
    with pytest.raises(UserError, match=r"of another model: embedding.weight is \(11, 8\) there and \(11, 16\) here"):
        checkpoint.load_weights(wider, found.weights(), found.path)
    with pytest.raises(UserError, match=r"of another model: blocks\.1\..* is in one of them alone"):
        checkpoint.load_weights(deeper, found.weights(), found.path)
    assert all(torch.equal(value, before[name]) for name, value in wider.state_dict().items())
