"""Whole runs: their folder, going on bit for bit, and everything that may end one."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import logging
import math
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fusestep import durable
from fusestep.errors import UserError
from fusestep.models import GPT
from fusestep.train import TrainConfig, TrainResult, checkpoint, load_model, train
from fusestep.train.config import settings_of
from fusestep.train.progress import Progress
from fusestep.train.trainer import Trainer

Build = Callable[..., TrainConfig]


def rows(folder: str | Path) -> list[dict[str, Any]]:
    """metrics.jsonl without the durations, which differ from run to run."""
    lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "ms"} for line in lines]


def differences(a: Any, b: Any, where: str = "") -> list[str]:
    """The places at which two nested states do not hold the same bits."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return [] if a.dtype == b.dtype and torch.equal(a, b) else [where]
    if isinstance(a, dict) and isinstance(b, dict):
        return [place for k in a.keys() | b.keys() for place in differences(a.get(k), b.get(k), f"{where}.{k}")]
    if isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b):
        return [place for i, pair in enumerate(zip(a, b, strict=True)) for place in differences(*pair, f"{where}.{i}")]
    return [] if type(a) is type(b) and a == b else [where]


class Listener(Progress):
    """Keeps what was said, and may do something at a step."""

    def __init__(self, at_step: int = -1, do: Callable[[], None] = lambda: None) -> None:
        self.lines: list[str] = []
        self._at_step, self._do = at_step, do

    def update(self, row: dict[str, Any], _memory: int) -> None:
        if row["step"] == self._at_step:
            self._do()

    def say(self, line: str) -> None:
        self.lines.append(line)


def final(config: TrainConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    found = checkpoint.newest(Path(config.out))
    assert found is not None
    assert found.step == config.steps
    return found.weights(), found.state()


def test_a_run_leaves_its_configuration_metrics_and_checkpoint(tiny: Build) -> None:
    config, listener = tiny(eval_every=4, save_every=4, seed=3), Listener()
    result = train(config, listener)
    folder = Path(config.out)
    contents = json.loads((folder / "config.json").read_text())
    assert contents["schema"] == 1
    assert contents["train"]["seed"] == 3
    assert contents["model"]["width"] == 16
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == [
        "step-00000004",
        "step-00000008",
        "step-00000010",
    ]
    steps = [row for row in rows(folder) if "loss" in row]
    assert [row["step"] for row in steps] == list(range(1, 11))
    assert all(row["tokens"] == 24 and row["grad_norm"] > 0 and row["lr"] > 0 for row in steps)
    assert [row["step"] for row in rows(folder) if "eval_loss" in row] == [4, 8]
    assert result == TrainResult(
        10, steps[-1]["loss"], rows(folder)[-3]["eval_loss"], 0, folder / "checkpoints" / "step-00000010"
    )
    assert "parameters" in listener.lines[0]
    assert "layers" in listener.lines[0]
    assert "device: CPU" in listener.lines[1]
    assert "the PyTorch reference" in listener.lines[1]
    assert listener.lines[-1] == f"final loss {result.loss:.4f} | a random guess has ln 96 = {math.log(96):.4f}"
    model, found = load_model(folder)
    assert isinstance(model, GPT)
    assert found.data == contents["data"]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"precision": "bf16", "accumulate": 2},
        {"precision": "fp16"},
        {"precision": "bf16", "weights": "bf16", "accumulate": 2},
        {"precision": "fp16", "weights": "fp16", "accumulate": 2},
        {"form": "seed", "activation_checkpointing": True},
        {"deterministic": True, "clip": 0.0},
        {"precision": "fp8", "fp8_stats": True},
        {"precision": "fp8", "amax_history": 2, "accumulate": 2, "activation_checkpointing": True},
        {"precision": "fp8", "weights": "bf16", "accumulate": 2, "fp8_format": "e4m3"},
        {"precision": "fp8", "recipe": "current", "weights": "bf16"},
        {"precision": "fp8", "recipe": "block"},
        {"precision": "fp8", "recipe": "mxfp8"},
    ],
    ids=lambda changes: "-".join(map(str, changes.values())) or "fp32",
)
@pytest.mark.parametrize("stops", [(5,), (3, 6)], ids=["5+5", "3+3+4"])
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(
    tiny: Build, tmp_path: Path, changes: dict[str, Any], stops: tuple[int, ...]
) -> None:
    common = {"schedule_steps": 10, "warmup": 2, "eval_every": 2, **changes}
    straight = tiny(out=str(tmp_path / "straight"), **common)
    train(straight)
    broken = str(tmp_path / "broken")
    for index, steps in enumerate((*stops, 10)):
        # Whatever the process did with the generator meanwhile must not matter.
        torch.manual_seed(index)
        train(tiny(out=broken, steps=steps, resume=index > 0, **common))
    assert rows(broken) == rows(straight.out)
    resumed = dataclasses.replace(straight, out=broken)
    assert differences(final(resumed), final(straight)) == []


def test_each_step_sees_the_sequences_that_it_would_have_seen(
    tiny: Build, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[list[int]] = []
    original = Trainer.add_gradients

    def watching(self: Trainer, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        seen.append(inputs.flatten().tolist())
        return original(self, inputs, targets)

    monkeypatch.setattr(Trainer, "add_gradients", watching)
    train(tiny(out=str(tmp_path / "a")))
    straight, seen[:] = list(seen), []
    for index, steps in enumerate((3, 6, 10)):
        train(tiny(out=str(tmp_path / "b"), steps=steps, resume=index > 0))
    assert seen == straight
    assert len({tuple(batch) for batch in seen}) == 10


def test_rows_of_steps_that_are_done_again_are_not_doubled(tiny: Build, tmp_path: Path) -> None:
    train(tiny(out=str(tmp_path / "straight"), save_every=4))
    config = tiny(save_every=4)
    with pytest.raises(ZeroDivisionError):
        train(config, Listener(7, lambda: 1 // 0))
    metrics = Path(config.out) / "metrics.jsonl"
    assert rows(config.out)[-1]["step"] == 7
    # The line that a killed process was writing.
    with metrics.open("a") as file:
        file.write('{"step": 8, "lo')
    train(dataclasses.replace(config, resume=True))
    assert rows(config.out) == rows(tmp_path / "straight")


@pytest.mark.parametrize("line", ["[1]", "{}", '{"step": null}', '{"step": "x"}', "[" * 100_000])
def test_a_damaged_line_of_the_metrics_ends_what_is_kept_of_them(tiny: Build, line: str) -> None:
    config = tiny(steps=4, save_every=4)
    train(config)
    metrics = Path(config.out) / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join([*lines[:2], line + "\n", *lines[2:]]))
    train(dataclasses.replace(config, steps=6, resume=True))
    assert [row["step"] for row in rows(config.out)] == [1, 2, 5, 6]


def test_a_damaged_configuration_is_named(tiny: Build) -> None:
    config = tiny(steps=1)
    train(config)
    for text in ("", "[]", '{"schema": 1}', '{"schema": 1, "train": []}', "[" * 100_000):
        (Path(config.out) / "config.json").write_text(text)
        with pytest.raises(UserError, match=r"config\.json is damaged"):
            settings_of({"out": config.out}, file=None, resume=True)


def test_a_run_that_never_saved_starts_over_in_its_folder(tiny: Build, tmp_path: Path) -> None:
    train(tiny(out=str(tmp_path / "straight")))
    config = tiny()
    with pytest.raises(ZeroDivisionError):
        train(config, Listener(7, lambda: 1 // 0))
    listener = Listener()
    train(dataclasses.replace(config, resume=True), listener)
    assert any("no checkpoint yet: starting at step 0" in line for line in listener.lines)
    assert rows(config.out) == rows(tmp_path / "straight")


def test_resuming_a_finished_run_changes_nothing(tiny: Build) -> None:
    config, listener = tiny(), Listener()
    train(config)
    before = {path: path.stat().st_mtime_ns for path in Path(config.out).rglob("*")}
    result = train(dataclasses.replace(config, resume=True), listener)
    assert result.step == 10
    assert result.loss is None
    assert "the run is at step 10 already; raise --steps to go on" in listener.lines[-1]
    assert {path: path.stat().st_mtime_ns for path in Path(config.out).rglob("*")} == before


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"seed": 1}, "--seed was 0 in the run that is to go on, and is 1 now"),
        ({"data": "text:stdlib"}, "--data was synthetic in the run that is to go on, and is text:stdlib now"),
        ({"weights": "bf16", "precision": "bf16"}, "--weights was fp32 in the run that is to go on, and is bf16 now"),
        ({"model": {"width": 32}}, "the model's width was 16 in the run that is to go on, and is 32 now"),
        ({"model": {"tied_head": True}}, "the model's tied_head was False"),
        ({"steps": 3}, "is at step 5, past --steps 3"),
    ],
)
def test_what_may_not_change_on_resume_is_named_with_both_values(
    tiny: Build, changes: dict[str, Any], sentence: str
) -> None:
    train(tiny(steps=5))
    before = {path: path.read_bytes() for path in Path(tiny().out).rglob("*") if path.is_file()}
    with pytest.raises(UserError) as raised:
        train(tiny(resume=True, **{**changes, "model": {**tiny().model, **changes.get("model", {})}}))
    assert sentence in str(raised.value)
    assert {path: path.read_bytes() for path in Path(tiny().out).rglob("*") if path.is_file()} == before


def test_text_that_changed_under_a_run_is_noticed(tiny: Build, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox " * 60)
    train(tiny(data=f"text:{text}", steps=2))
    text.write_text("the quick brown fox " * 61)
    with pytest.raises(UserError, match=r"the data's \w+ was .* in the run that is to go on"):
        train(tiny(data=f"text:{text}", steps=4, resume=True))


def test_what_may_change_on_resume_comes_from_the_new_configuration(tiny: Build) -> None:
    train(tiny(steps=5, lr=1e-2, weight_decay=0.3, warmup=0, schedule_steps=10))
    changed = tiny(resume=True, lr=2e-2, weight_decay=0.1, clip=0.25, form="plain", batch=5, schedule_steps=10)
    train(changed)
    ratio = [
        row["lr"] / (1e-2 * (0.1 + 0.45 * (1 + math.cos(math.pi * t / 10)))) for t, row in enumerate(rows(changed.out))
    ]
    assert ratio == pytest.approx([1.0] * 5 + [2.0] * 5, rel=1e-5)
    _, state = final(changed)
    group = state["optimizer"]["param_groups"][0]
    assert group["weight_decay"] == 0.1
    assert state["position"] == 5 * 3 + 5 * 5
    assert json.loads((Path(changed.out) / "config.json").read_text())["train"]["batch"] == 5


def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_it_goes_on(
    tiny: Build, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tiny(out=str(tmp_path / "straight"), schedule_steps=10))
    config = tiny(steps=8, save_every=4, schedule_steps=10)
    train(config)
    bad = Path(config.out) / "checkpoints" / "step-00000008" / "model.safetensors"
    os.truncate(bad, 100)
    with caplog.at_level(logging.WARNING, logger="fusestep"):
        train(dataclasses.replace(config, steps=10, resume=True))
    assert "step-00000008 is damaged (model.safetensors has 100 bytes" in caplog.text
    assert rows(config.out) == rows(tmp_path / "straight")


def test_a_folder_that_is_in_use_is_left_alone(tiny: Build, tmp_path: Path) -> None:
    config = tiny()
    train(config)
    before = {path: path.read_bytes() for path in Path(config.out).rglob("*") if path.is_file()}
    with pytest.raises(UserError, match="holds a run already; go on with it by --resume"):
        train(config)
    assert {path: path.read_bytes() for path in Path(config.out).rglob("*") if path.is_file()} == before
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "diary.txt").write_text("mine")
    with pytest.raises(UserError, match="exists and is not empty"):
        train(tiny(out=str(tmp_path / "notes")))
    with pytest.raises(UserError, match="is a file"):
        train(tiny(out=str(tmp_path / "notes" / "diary.txt")))
    with pytest.raises(UserError, match="holds no run to go on with"):
        train(tiny(out=str(tmp_path / "nowhere"), resume=True))
    assert not (tmp_path / "nowhere").exists()
    assert [path.name for path in (tmp_path / "notes").iterdir()] == ["diary.txt"]


def test_two_processes_cannot_train_in_one_folder(tiny: Build) -> None:
    train(tiny(steps=4))

    def second() -> None:
        with pytest.raises(UserError, match="another process trains in"):
            train(tiny(steps=8, resume=True))

    train(tiny(steps=6, resume=True), Listener(5, second))
    assert [row["step"] for row in rows(tiny().out)] == list(range(1, 7))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_ends_the_run_and_keeps_the_last_good_checkpoint(
    tiny: Build, monkeypatch: pytest.MonkeyPatch, bad: float
) -> None:
    original = Trainer._loss

    def broken(self: Trainer, *args: Any) -> torch.Tensor:
        return original(self, *args) * (bad if self.step == 6 else 1.0)

    monkeypatch.setattr(Trainer, "_loss", broken)
    config = tiny(save_every=2)
    with pytest.raises(UserError) as raised:
        train(config)
    sentence = str(raised.value)
    assert f"the loss became {bad} at step 7, with learning rate 0.00" in sentence
    assert "lower --lr" in sentence
    assert "step-00000006, go on from it with: fusestep train --resume" in sentence
    found = checkpoint.newest(Path(config.out))
    assert found is not None
    assert found.step == 6
    assert all(bool(value.isfinite().all()) for value in found.weights().values())
    last = json.loads((Path(config.out) / "metrics.jsonl").read_text().splitlines()[-1])
    assert (last["step"], last["loss"]) == (7, None)


def test_skipped_steps_are_counted_in_the_metrics_and_the_result(tiny: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Trainer.train_step

    def poisoning(self: Trainer) -> torch.Tensor:
        if self.step != 3:
            return original(self)
        hook = self.model.position.weight.register_hook(lambda gradient: gradient * float("nan"))
        values = original(self)
        hook.remove()
        return values

    monkeypatch.setattr(Trainer, "train_step", poisoning)
    listener = Listener()
    assert train(tiny(), listener).skipped_steps == 1
    assert [row["skipped"] for row in rows(tiny().out)] == [0] * 3 + [1] * 7
    assert "1 step skipped, where gradients were not finite" in listener.lines
    assert rows(tiny().out)[3]["grad_norm"] is None


@pytest.mark.parametrize(
    ("number", "mend"),
    [
        (errno.EACCES, "change the permissions of {out}"),
        (errno.EROFS, "make the file system of {out} writable"),
        (errno.ENOSPC, "free some space for {out}"),
        (errno.EIO, "put {out} in order"),
    ],
)
def test_a_folder_that_cannot_be_written_is_told_with_its_mend(
    tiny: Build, monkeypatch: pytest.MonkeyPatch, number: int, mend: str
) -> None:
    def refused(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    config = tiny(save_every=3, steps=3)
    words = re.escape(f"({os.strerror(number)}); {mend.format(out=config.out)}, ")
    with monkeypatch.context() as patch:
        patch.setattr(durable, "write_together", refused)
        with pytest.raises(UserError, match=words + "or choose another --out"):
            train(config)
    train(config)
    with monkeypatch.context() as patch:
        patch.setattr(durable, "write_together", refused)
        with pytest.raises(UserError, match=words + "or choose another --out"):
            train(dataclasses.replace(config, resume=True, steps=6))
    monkeypatch.setattr(checkpoint, "DurableFile", refused)
    words = re.escape(f"is untouched; {mend.format(out=config.out)}, then go on with --resume")
    with pytest.raises(UserError, match=words):
        train(dataclasses.replace(config, resume=True, steps=6))


def test_settings_that_may_not_be_read_are_not_damaged(tiny: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: Path) -> bytes:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    train(tiny(steps=1))
    monkeypatch.setattr(Path, "read_bytes", refused)
    with pytest.raises(
        UserError, match=r"config\.json cannot be read \(Permission denied\); change the permissions of"
    ):
        settings_of({"out": tiny().out}, file=None, resume=True)


@pytest.mark.parametrize(
    ("mistake", "sentence"),
    [
        ({"data": "text:nowhere"}, "nowhere"),
        ({"model": {"vocab_size": 7}}, "the model table sets vocab_size 7"),
    ],
)
def test_a_mistake_in_the_settings_is_told_before_one_in_the_folder(
    tiny: Build, mistake: dict[str, Any], sentence: str
) -> None:
    train(tiny(steps=1))
    with pytest.raises(UserError, match=sentence):
        train(tiny(**mistake))
    with pytest.raises(UserError, match="holds a run already"):
        train(tiny())


def test_one_of_a_thing_is_told_in_the_singular(tiny: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    listener = Listener()
    config = tiny(steps=1, accumulate=1)
    train(config, listener)
    said = "\n".join(listener.lines)
    assert "CPU, 1 thread |" in said
    assert "| 1 step of " in said
    assert f"({config.batch} × 1 sequence of " in said


def test_a_closed_terminal_tells_twice_and_ends_the_run_once(tiny: Build) -> None:
    """The shell sends SIGHUP, and so does the system."""

    def twice() -> None:
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGHUP)

    result = train(tiny(), Listener(4, twice))
    assert result.stopped_by == signal.SIGHUP
    assert 4 <= result.step < 10


def test_a_hang_up_that_is_ignored_is_left_alone(tiny: Build) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        result = train(tiny(), Listener(4, lambda: os.kill(os.getpid(), signal.SIGHUP)))
    finally:
        signal.signal(signal.SIGHUP, before)
    assert (result.stopped_by, result.step) == (None, 10)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_run_with_a_checkpoint_and_it_goes_on_bit_for_bit(
    tiny: Build, tmp_path: Path, number: signal.Signals
) -> None:
    train(tiny(out=str(tmp_path / "straight")))
    config, listener = tiny(out=str(tmp_path / "my run")), None
    listener = Listener(4, lambda: os.kill(os.getpid(), number))
    handler = signal.getsignal(number)
    result = train(config, listener)
    assert signal.getsignal(number) is handler
    assert result.stopped_by == number
    assert 4 <= result.step < 10
    assert f"go on with: fusestep train --resume --out '{config.out}'" in listener.lines[-1]
    train(dataclasses.replace(config, resume=True))
    assert rows(config.out) == rows(tmp_path / "straight")


def test_a_second_signal_ends_the_run_at_once(tiny: Build) -> None:
    def twice() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(tiny(save_every=3), Listener(4, twice))
    found = checkpoint.newest(Path(tiny().out))
    assert found is not None
    assert found.step == 3


@pytest.mark.parametrize("where", ["gpu", "host", "python"])
def test_out_of_memory_names_the_peak_its_parts_and_what_to_lower(
    tiny: Build, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def exhausted(self: GPT, tokens: torch.Tensor) -> torch.Tensor:
        if where == "gpu":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        if where == "python":
            raise MemoryError
        return torch.empty(2**60)

    monkeypatch.setattr(GPT, "_hidden", exhausted)
    config = tiny(batch=6, accumulate=2)
    with pytest.raises(UserError) as raised:
        train(config)
    sentence = str(raised.value)
    assert "out of memory on this machine after a peak of " in sentence
    for part in ("weights", "gradients", "optimizer state", "activations"):
        assert part in sentence
    assert "lower --batch, such as --batch 3 --accumulate 4, or pass --activation-checkpointing" in sentence
    assert not Path(config.out).exists()


def test_out_of_memory_in_the_middle_of_a_run_names_the_checkpoint_to_go_on_from(
    tiny: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Trainer.train_step

    def exhausted(self: Trainer) -> torch.Tensor:
        if self.step == 5:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return original(self)

    monkeypatch.setattr(Trainer, "train_step", exhausted)
    with pytest.raises(UserError, match="step-00000004, go on from it with: fusestep train --resume"):
        train(tiny(save_every=2))
    found = checkpoint.newest(Path(tiny().out))
    assert found is not None
    assert found.step == 4


def test_other_errors_keep_their_traceback(tiny: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: GPT, tokens: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("a defect")

    monkeypatch.setattr(GPT, "_hidden", broken)
    with pytest.raises(RuntimeError, match="a defect"):
        train(tiny())


def test_text_without_room_for_held_out_sequences_is_refused_before_training(tiny: Build, tmp_path: Path) -> None:
    text = tmp_path / "short.txt"
    text.write_text("far too short")
    with pytest.raises(UserError, match=r"short\.txt"):
        train(tiny(data=f"text:{text}", eval_every=5))
    assert not Path(tiny().out).exists()


@pytest.mark.parametrize("was_on", [False, True])
def test_deterministic_algorithms_are_on_for_the_run_alone(tiny: Build, was_on: bool) -> None:
    seen = []

    @contextlib.contextmanager
    def algorithms() -> Iterator[None]:
        torch.use_deterministic_algorithms(was_on)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)

    with algorithms():
        train(tiny(deterministic=True), Listener(2, lambda: seen.append(torch.are_deterministic_algorithms_enabled())))
        assert torch.are_deterministic_algorithms_enabled() is was_on
    assert seen == [True]


def test_two_runs_of_one_seed_are_equal_and_of_two_are_not(tiny: Build, tmp_path: Path) -> None:
    first, again, other = (tiny(out=str(tmp_path / name), seed=seed) for name, seed in (("a", 1), ("b", 1), ("c", 2)))
    for config in (first, again, other):
        train(config)
    assert differences(final(first), final(again)) == []
    assert rows(first.out) == rows(again.out) != rows(other.out)
