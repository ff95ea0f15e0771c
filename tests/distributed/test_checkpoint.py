"""A checkpoint of some number of processes is one for any other number, and complete or absent whatever dies."""

from __future__ import annotations

import errno
import json
import os
import pickle
import signal
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fusestep import durable
from fusestep.distributed.groups import own_part
from fusestep.errors import UserError
from fusestep.models import GPT, GPTConfig
from fusestep.optim import FusedAdam
from fusestep.train import checkpoint
from harness import RanksFailedError, run_ranks

CONFIG = GPTConfig(vocab_size=13, width=8, heads=2, layers=1, ffn_width=12, context=5)
PARTS: dict[str, Any] = {"config": {"seed": 7}, "model": CONFIG.to_dict(), "data": {"kind": "synthetic"}}


class Run:
    """A small model in training, its batches the same on all processes.

    Args:
        kind: "alone", "ddp" or "fsdp".
        seed: of the weights.
    """

    def __init__(self, kind: str, seed: int = 1) -> None:
        torch.manual_seed(seed)
        self.model: nn.Module = GPT(CONFIG)
        self.kind = kind
        if kind == "fsdp":
            mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
            for block in self.model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
            register_fsdp_forward_method(self.model, "loss")
        elif kind == "ddp":
            self.model = nn.parallel.DistributedDataParallel(self.model)
        self.optimizer = FusedAdam(self.model.parameters(), lr=0.02, max_grad_norm=0.9)

    def train(self, steps: int, first: int = 0) -> list[float]:
        losses = []
        for step in range(first, first + steps):
            tokens = torch.arange(15).reshape(3, 5) * (step + 2) % 13
            model = self.model.module if self.kind == "ddp" else self.model
            loss = model.loss(tokens, (tokens + 1) % 13)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def save(self, folder: Path, step: int) -> Path:
        rank = torch.distributed.get_rank() if self.kind != "alone" else 0
        state = {"position": 3 * step, "optimizer": self.optimizer.state_dict(), "rng": torch.arange(5)}
        alone: dict[str, Any] = {} if self.kind == "alone" else {"together": True, "own": {"rng": torch.tensor([rank])}}
        return checkpoint.save(folder, step, self.model.state_dict(), state, **PARTS, **alone)

    def content(self) -> dict[str, Tensor]:
        """Weights and moments, as they lie."""
        found = dict(checkpoint.plain_names(self.model.state_dict()))
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state[parameter].items():
                found[f"{key} {checkpoint.plain_name(name)}"] = value
        return found

    def whole(self) -> dict[str, Tensor]:
        """The same, put together."""
        content = self.content().items()
        return {name: (v.full_tensor() if isinstance(v, DTensor) else v).detach().clone() for name, v in content}


def saved(rank: int, kinds: Sequence[str], folder: Path) -> list[tuple[dict[str, Tensor], list[float]]]:
    """Save after two steps, under the kind's name; returns what was saved, put together, and the next loss."""
    results = []
    for kind in kinds:
        run = Run(kind)
        run.train(2)
        run.save(folder / kind, 2)
        results.append((run.whole(), run.train(1, first=2)))
    return results


def loaded(
    rank: int, kind: str, folders: Sequence[Path], expected: Sequence[tuple[dict[str, Tensor], list[float]]]
) -> list[tuple[Any, Any]]:
    results = []
    for folder, (content, losses) in zip(folders, expected, strict=True):
        run = Run(kind, seed=2)
        found = checkpoint.newest(folder, together=kind != "alone")
        assert found is not None
        state = checkpoint.restore(found, run.model, run.optimizer)
        now = run.content()
        assert now.keys() == content.keys()
        for name, value in content.items():
            own = now[name]
            here, wanted = (own.to_local(), value[own_part(own)]) if isinstance(own, DTensor) else (own, value)
            assert torch.equal(here, wanted), (folder, name)
        assert (found.step, found.config, state["position"]) == (2, {"seed": 7}, 6)
        assert torch.equal(state["rng"], torch.arange(5))
        assert int(run.optimizer.applied_steps) == 2
        results.append((found.processes, checkpoint.own_state(state)))
        if kind == "alone" or folder == folders[-1]:
            assert run.train(1, first=2) == pytest.approx(losses, rel=1e-6), folder
    return results


def test_checkpoints_move_between_any_numbers_of_processes(tmp_path: Path) -> None:
    expected: list[tuple[dict[str, Tensor], list[float]]] = saved(0, ["alone"], tmp_path / "1")
    folders = [tmp_path / "1" / "alone"]
    for ranks, kinds in ((2, ["ddp", "fsdp"]), (4, ["fsdp"])):
        expected += run_ranks(saved, ranks, kinds, tmp_path / str(ranks))[0]
        folders += [tmp_path / str(ranks) / kind for kind in kinds]
    files = [sorted(path.name for path in next((folder / "checkpoints").iterdir()).iterdir()) for folder in folders]
    whole_files = ["checkpoint.json", "model.safetensors", "state.pt"]
    assert files[:2] == [whole_files, whole_files]
    assert files[2] == [
        "checkpoint.json",
        *(f"shard-0000{rank}-of-00002.safetensors" for rank in range(2)),
        "state.pt",
        "tensors.json",
    ]
    assert [owner for _, owner in loaded(0, "alone", folders, expected)] == [None] * 4
    of_two, of_four = (run_ranks(loaded, ranks, "fsdp", folders, expected) for ranks in (2, 4))
    assert [processes for processes, _ in of_two[0]] == [1, 2, 2, 4]
    assert [[None if own is None else own["rng"].item() for _, own in one] for one in of_two] == [
        [None, 0, 0, None],
        [None, 1, 1, None],
    ]
    assert of_four[3][3][1]["rng"].item() == 3
    found = checkpoint.find(folders[3])
    model, _ = checkpoint.load_model(folders[3])
    assert all(torch.equal(value, expected[3][0][name]) for name, value in model.state_dict().items())
    assert found.fp8_state() == {}


def test_one_process_writes_what_it_always_did(tmp_path: Path) -> None:
    run = Run("alone")
    run.train(1)
    manifest = json.loads((run.save(tmp_path, 1) / "checkpoint.json").read_text())
    assert list(manifest) == ["schema", "step", "files", "config", "model", "data"]
    assert manifest["schema"] == 1
    assert list(manifest["files"]) == ["model.safetensors", "state.pt"]


# What dies, and what is full


def die_at(place: str) -> Callable[..., Any]:
    """Kill this process with no clean-up, where a file of that name would be written or a folder renamed."""

    def killed(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    original = durable.DurableFile.write

    def write(self: Any, data: Any) -> int:
        if place in str(self._file.name):
            killed()
        return original(self, data)

    if place == "rename":
        Path.rename = killed  # type: ignore[assignment,method-assign]
    return write


def fill_at(place: str) -> Callable[..., Any]:
    original = durable.DurableFile.write

    def write(self: Any, data: Any) -> int:
        if place in str(self._file.name):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(self, data)

    return write


def save_and_fail(rank: int, folder: Path, culprit: int, write: Callable[[str], Any], place: str) -> str:
    """Save step 1, then fail at step 2 on one rank; returns the sentence of a UserError."""
    run = Run("fsdp")
    run.train(1)
    run.save(folder, 1)
    if rank == culprit:
        durable.DurableFile.write = write(place)  # type: ignore[method-assign]
    try:
        run.save(folder, 2)
    except UserError as error:
        return str(error)
    return "saved"


@pytest.mark.parametrize(
    ("culprit", "place"),
    [
        (1, "shard-00001"),
        pytest.param(0, "shard-00000", marks=pytest.mark.endurance),
        pytest.param(0, "tensors.json", marks=pytest.mark.endurance),
        pytest.param(0, "state.pt", marks=pytest.mark.endurance),
        (0, "rename"),
    ],
)
def test_a_process_that_is_killed_leaves_the_last_good_checkpoint(tmp_path: Path, culprit: int, place: str) -> None:
    with pytest.raises(RanksFailedError) as raised:
        run_ranks(save_and_fail, 2, tmp_path, culprit, die_at, place, group_timeout=5.0, timeout=30.0)
    outcomes = raised.value.outcomes
    assert outcomes[culprit].exit_code == -signal.SIGKILL
    assert not outcomes[1 - culprit].stopped, "it waited for the dead one"
    assert outcomes[1 - culprit].result is None
    found = checkpoint.newest(tmp_path)
    assert found is not None
    assert (found.path.name, found.step) == ("step-00000001", 1)
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} <= {"step-00000001", ".writing-00000002"}
    run = Run("alone")
    checkpoint.restore(found, run.model, run.optimizer)
    run.save(tmp_path, 2)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-00000001", "step-00000002"]


@pytest.mark.parametrize(("culprit", "place"), [(1, "shard-00001"), (0, "tensors.json")])
def test_a_full_disk_of_one_process_is_told_by_all(tmp_path: Path, culprit: int, place: str) -> None:
    sentences = run_ranks(save_and_fail, 2, tmp_path, culprit, fill_at, place)
    for rank, sentence in enumerate(sentences):
        assert "step 2 could not be written" in sentence
        assert "No space left on device" in sentence
        assert "step-00000001, is untouched" in sentence
        assert f"process {culprit}" in sentence or rank == culprit
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]


def events_of_a_save(rank: int, folder: Path) -> list[str]:
    run = Run("fsdp")
    run.train(1)
    events: list[str] = []
    sync, rename = os.fsync, Path.rename
    os.fsync = lambda descriptor: (events.append("sync"), sync(descriptor))[1]
    Path.rename = lambda self, to: (events.append("rename"), rename(self, to))[1]  # type: ignore[method-assign]
    run.save(folder, 1)
    return events


def test_every_file_is_on_the_disk_before_the_checkpoint_has_its_name(tmp_path: Path) -> None:
    first, second = run_ranks(events_of_a_save, 2, tmp_path)
    # A shard, the index, the state, the manifest, their folder; then the folder that the new name is in.
    assert first == ["sync"] * 5 + ["rename", "sync"]
    assert second == ["sync"]


# What is wrong with one


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    run_ranks(saved, 2, ["fsdp"], folder)
    return folder / "fsdp" / "checkpoints" / "step-00000002"


@pytest.fixture
def copied(sharded: Path, tmp_path: Path) -> Path:
    path = tmp_path / "checkpoints" / "step-00000002"
    path.mkdir(parents=True)
    for file in sharded.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    return path


def rewrite(path: Path, name: str, content: bytes) -> None:
    """Change a file, and the manifest with it."""
    (path / name).write_bytes(content)
    manifest = json.loads((path / "checkpoint.json").read_text())
    manifest["files"][name] = {"bytes": len(content), "crc32": zlib.crc32(content)}
    (path / "checkpoint.json").write_text(json.dumps(manifest))


SHARD = "shard-00001-of-00002.safetensors"


@pytest.mark.parametrize(
    ("name", "how", "words"),
    [
        (SHARD, "missing", f"{SHARD} is missing"),
        (SHARD, "truncated", f"{SHARD} has 100 bytes instead of"),
        (SHARD, "altered", f"{SHARD} has other bytes than were written"),
        ("tensors.json", "missing", "tensors.json is missing"),
        ("tensors.json", "altered", "tensors.json has other bytes than were written"),
        ("state.pt", "missing", "state.pt is missing"),
    ],
)
def test_a_damaged_sharded_checkpoint_is_named(copied: Path, name: str, how: str, words: str) -> None:
    content = bytearray((copied / name).read_bytes())
    content[len(content) * 3 // 4] ^= 0x10
    if how == "missing":
        (copied / name).unlink()
    else:
        (copied / name).write_bytes(content[:100] if how == "truncated" else content)
    with pytest.raises(checkpoint.DamagedCheckpointError, match=f"step-00000002 is damaged \\({words}.*earlier one"):
        checkpoint.read(copied)


def test_a_manifest_that_names_files_elsewhere_is_damaged(copied: Path) -> None:
    manifest = json.loads((copied / "checkpoint.json").read_text())
    for elsewhere in ("../secret", "/etc/passwd"):
        files = {**manifest["files"], elsewhere: {"bytes": 1, "crc32": 1}}
        (copied / "checkpoint.json").write_text(json.dumps({**manifest, "files": files}))
        with pytest.raises(checkpoint.DamagedCheckpointError, match=r"checkpoint\.json cannot be read"):
            checkpoint.read(copied)


def index_with(change: Callable[[dict[str, Any]], object]) -> Callable[[bytes], bytes]:
    def changed(content: bytes) -> bytes:
        index = json.loads(content)
        change(index["model.head.weight"])
        return json.dumps(index).encode()

    return changed


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param(lambda _: b"[1, 2]", id="foreign"),
        pytest.param(lambda content: content[:50], id="cut"),
        pytest.param(index_with(lambda entry: entry["chunks"].pop()), id="lacks a part"),
        pytest.param(index_with(lambda entry: entry.update(dtype="F99")), id="odd dtype"),
        pytest.param(index_with(lambda entry: entry["chunks"][0].__setitem__(2, "/etc/passwd")), id="another file"),
        pytest.param(index_with(lambda entry: entry["chunks"][1][0].__setitem__(0, 99)), id="outside"),
    ],
)
def test_an_index_that_this_program_did_not_write_is_refused(copied: Path, changed: Callable[[bytes], bytes]) -> None:
    rewrite(copied, "tensors.json", changed((copied / "tensors.json").read_bytes()))
    with pytest.raises(
        checkpoint.DamagedCheckpointError, match=r"step-00000002 is no .*\(tensors\.json cannot be read"
    ):
        checkpoint.read(copied)


class Malicious:
    """What unpickling it would do."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_nothing_of_a_checkpoint_is_unpickled(copied: Path, tmp_path: Path) -> None:
    """The one file that torch.load reads is read without; shards and index are no pickles."""
    rewrite(copied, "state.pt", pickle.dumps(Malicious(tmp_path / "made"), protocol=2))
    found = checkpoint.read(copied)
    with pytest.raises(checkpoint.DamagedCheckpointError, match=r"state\.pt cannot be read"):
        found.state()
    for name in (SHARD, "tensors.json"):
        rewrite(copied, name, pickle.dumps(Malicious(tmp_path / "made"), protocol=2))
    with pytest.raises(checkpoint.DamagedCheckpointError, match=r"tensors\.json cannot be read"):
        checkpoint.read(copied)
    assert not (tmp_path / "made").exists()


def test_a_foreign_shard_is_named(copied: Path) -> None:
    rewrite(copied, SHARD, b"garbage of somebody else")
    found = checkpoint.read(copied)
    with pytest.raises(checkpoint.DamagedCheckpointError, match=rf"step-00000002 .*{SHARD} cannot be read"):
        found.weights()
    run = Run("alone")
    with pytest.raises(checkpoint.DamagedCheckpointError, match=rf"step-00000002 .*{SHARD} cannot be read"):
        checkpoint.restore(found, run.model, run.optimizer)


def look(rank: int, folder: Path) -> tuple[Any, Any]:
    """What all processes together make of a run's folder, and of another model's checkpoint."""
    found = checkpoint.newest(folder, together=True)
    other = GPT(GPTConfig(**{**CONFIG.to_dict(), "width": 16}))
    fully_shard(other, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    before = other.head.weight.full_tensor().clone()
    assert found is not None
    with pytest.raises(UserError) as raised:
        checkpoint.restore(found, other, FusedAdam(other.parameters()))
    assert torch.equal(other.head.weight.full_tensor(), before)
    return found.step, str(raised.value)


def test_all_processes_pass_over_a_damaged_checkpoint_and_refuse_another_models(copied: Path) -> None:
    newer = copied.with_name("step-00000003")
    newer.mkdir()
    for file in copied.iterdir():
        (newer / file.name).write_bytes(file.read_bytes())
    (newer / SHARD).unlink()
    run = copied.parent.parent
    results = run_ranks(look, 2, run)
    assert [step for step, _ in results] == [2, 2]
    assert all("of another model: embedding.weight is (13, 8) there and (13, 16) here" in words for _, words in results)
    manifest = json.loads((newer / "checkpoint.json").read_text())
    (newer / "checkpoint.json").write_text(json.dumps({**manifest, "schema": checkpoint.SHARDED_SCHEMA + 1}))
    with pytest.raises(UserError, match="step-00000003 has schema 3 and this version reads up to 2; upgrade fusestep"):
        checkpoint.newest(run)


def refuse(rank: int, folder: Path) -> str:
    mesh = init_device_mesh("cpu", (2,))
    with pytest.raises(UserError) as raised:
        checkpoint.save(folder, 1, {"w": distribute_tensor(torch.ones(4), mesh, [Shard(0)])}, {}, **PARTS)
    return str(raised.value)


def test_sharded_tensors_are_saved_together_or_not_at_all(tmp_path: Path) -> None:
    assert all("pass together=True" in sentence for sentence in run_ranks(refuse, 2, tmp_path))
    assert list(tmp_path.iterdir()) == []
