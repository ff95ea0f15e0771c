"""Runs on several ranks: the losses of one process, data that no two ranks share, and every kind of ending.

Two processes go through all the runs of a start, one after another, each run a world of its own.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

import harness
from fusestep.errors import UserError
from fusestep.train import TrainConfig, checkpoint, train
from fusestep.train.trainer import Trainer
from harness import run_ranks

MODEL = {"width": 16, "heads": 2, "layers": 2, "ffn_width": 24, "context": 8}


def config(out: Path, **changes: Any) -> TrainConfig:
    settings: dict[str, Any] = {
        "preset": "tiny",
        "model": MODEL,
        "steps": 20,
        "batch": 4,
        "lr": 1e-2,
        "eval_every": 10,
        "save_every": 0,
        "device": harness.device_type,
        "timeout": 20.0,
        "out": str(out),
    }
    return TrainConfig(**{**settings, **changes})


def rows(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def final_weights(out: Path) -> dict[str, torch.Tensor]:
    found = checkpoint.newest(out)
    assert found is not None
    return found.weights()


def launch(function: Callable[..., Any], *arguments: Any, timeout: float, ranks: int = 2) -> list[Any]:
    """Some ranks of a function, which is told the port of a store that this process keeps."""
    store = distributed.TCPStore("127.0.0.1", 0, ranks, is_master=True, wait_for_workers=False)
    return run_ranks(function, ranks, store.port, *arguments, timeout=timeout, places=False)


# In the processes


def launched(port: int) -> Iterator[None]:
    """As torchrun does it: a store that outlives the ranks, and a number for each time that they are started."""
    distributed.destroy_process_group()  # the harness's own
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    for number in itertools.count():
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)
        yield


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[Callable[..., Any]]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield original
    finally:
        setattr(owner, name, original)


@contextmanager
def at_step(step: int, do: Callable[[Trainer], None], when: str = "before") -> Iterator[None]:
    """Something happens in this process when the trainer's gradients of a step begin, or are there."""

    def gradients(trainer: Trainer, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if when == "before" and trainer.step + 1 == step:
            do(trainer)
        loss: torch.Tensor = original(trainer, inputs, targets)
        if when == "after" and trainer.step + 1 == step:
            do(trainer)
        return loss

    with replaced(Trainer, "add_gradients", gradients) as original:
        yield


def outcome(job: TrainConfig) -> Any:
    """How a run ends on this rank: its result in plain values, or what it raised."""
    try:
        result = train(job)
    except Exception as error:
        ending = type(error).__name__, str(error)
    else:
        return result.step, result.loss, result.skipped_steps, result.stopped_by
    # The connections of a broken group close with its last user, as they do where the process ends.
    gc.collect()
    return ending


def poison(trainer: Trainer) -> None:
    """A loss that is not finite in the backward pass alone, on this rank."""
    original = trainer.ranks.loss

    def loss(*arguments: Any, **options: Any) -> torch.Tensor:
        trainer.ranks.loss = original  # type: ignore[method-assign]
        found = original(*arguments, **options)
        found.register_hook(lambda gradient: gradient * float("nan"))
        return found

    trainer.ranks.loss = loss  # type: ignore[method-assign]


def run_all(rank: int, port: int, folder: Path, kind: str) -> dict[str, Any]:
    results: dict[str, Any] = {}
    worlds = launched(port)

    def run(name: str, **changes: Any) -> None:
        next(worlds)
        changes = {"parallel": kind, **changes}
        results[name] = outcome(config(folder / changes.pop("out", name), **changes))

    # Every sequence that this rank trains on.
    seen: list[torch.Tensor] = []
    with replaced(
        Trainer, "add_gradients", lambda trainer, x, y: (seen.append(x.clone()), original(trainer, x, y))[1]
    ) as original:
        run("plain", accumulate=2)
    results["seen"] = torch.stack(seen)
    run("bf16-weights", accumulate=2, precision="bf16", weights="bf16", form="plain")

    run("broken", steps=10, schedule_steps=20)
    run("resumed", out="broken", resume=True, schedule_steps=20)
    run("from-one", out="one", resume=True, schedule_steps=20)

    run("dropped", dropout=0.2, steps=8)
    run("dropped-half", out="dropped-in-two", dropout=0.2, steps=4, schedule_steps=8)
    run("dropped-whole", out="dropped-in-two", dropout=0.2, steps=8, resume=True)

    if rank == 1:
        with at_step(3, poison):
            run("nan", steps=6)
    else:
        run("nan", steps=6)

    def fail(trainer: Trainer) -> None:
        raise UserError("the sequences of this rank are gone; put them back.")

    if rank == 1:
        with at_step(5, fail):
            run("failed", save_every=4)
    else:
        run("failed", save_every=4)
    run("after-the-failure", out="failed", save_every=4, resume=True)

    if rank == 1:
        with at_step(6, lambda _: os.kill(os.getpid(), signal.SIGTERM)):
            run("stopped")
    else:
        run("stopped")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with replaced(checkpoint, "sync_folder", full) if rank == 0 else at_step(0, fail):
        run("full-disk", out="failed", steps=24, resume=True)
    run("uneven", batch=3)
    return results


ONE: dict[str, Any] = {"schedule_steps": 20, "eval_every": 0}

#: Other ways to share the work, and how near their losses come to one process's.
KINDS: dict[str, tuple[dict[str, Any], float]] = {
    "fsdp": ({"accumulate": 2}, 1e-6),
    "tp": ({"parallel": "tp=2"}, 1e-6),
    "sp": ({"parallel": "tp=2,sp", "form": "plain"}, 1e-6),
    "ddp-fp8": ({"parallel": "ddp", "precision": "fp8", "lr": 1e-3}, 1e-3),
    "fsdp-fp8": ({"precision": "fp8", "lr": 1e-3}, 1e-3),
    "fsdp-fp16": ({"precision": "fp16"}, 1e-3),
    "fsdp-bf16": ({"precision": "bf16", "weights": "bf16", "accumulate": 2, "lr": 1e-3}, 1e-3),
}

#: The same over four ranks.
KINDS_OF_FOUR: dict[str, tuple[dict[str, Any], float]] = {
    **{f"{name}-4": (changes, near) for name, (changes, near) in KINDS.items() if "tp" not in name and name != "sp"},
    "ddp-tp": ({"parallel": "ddp,tp=2", "accumulate": 2}, 1e-6),
    "ddp-tp-plain": ({"parallel": "ddp,tp=2", "form": "plain"}, 1e-6),
    "fsdp-tp": ({"parallel": "fsdp,tp=2", "accumulate": 2}, 1e-6),
    "fsdp-sp": ({"parallel": "fsdp,tp=2,sp"}, 1e-6),
    "fsdp-plain": ({"form": "plain"}, 1e-6),
    "fsdp-seed": ({"form": "seed"}, 1e-6),
    "ddp-plain": ({"parallel": "ddp", "form": "plain"}, 1e-6),
    "fsdp-tp-fp8": ({"parallel": "fsdp,tp=2", "precision": "fp8", "lr": 1e-3}, 1e-3),
}


def run_kinds(rank: int, port: int, folder: Path, kinds: dict[str, tuple[dict[str, Any], float]]) -> dict[str, Any]:
    worlds, results = launched(port), {}
    for name, (changes, _) in kinds.items():
        next(worlds)
        results[name] = outcome(config(folder / name, **{"parallel": "fsdp", **changes}))
    next(worlds)
    with at_step(3, poison) if rank == 1 else at_step(0, poison):
        results["nan"] = outcome(config(folder / "nan", parallel="fsdp", steps=6))
    for kind in ("fsdp", "ddp"):
        next(worlds)
        results[f"one-{kind}"] = outcome(
            config(folder / "one", parallel=kind, resume=True, steps=10 if kind == "fsdp" else 15, **ONE)
        )
    return results


def check_kinds(folder: Path, ranks: int, kinds: dict[str, tuple[dict[str, Any], float]]) -> None:
    """Each kind against one process; and one run that goes on from process to FSDP to DDP to one process."""
    train(config(folder / "one", steps=5, **ONE))
    first, *others = launch(run_kinds, folder, kinds, ranks=ranks, timeout=400)
    # Kernels of a GPU sum otherwise for other shapes of a batch, and a run of many steps makes more of it.
    least = 1e-4 if harness.device_type == "cuda" else 0.0
    for other in others:
        assert other == first
    for name, (changes, near) in kinds.items():
        train(config(folder / "alone" / name, **{**changes, "parallel": "none"}))
        assert first[name][0] == 20, first[name]
        assert_same_run(folder / name, folder / "alone" / name, max(near, least))
    assert first["nan"][2] == 1
    assert all(value.isfinite().all() for value in final_weights(folder / "nan").values())
    train(config(folder / "one", resume=True, **ONE))
    train(config(folder / "straight", **ONE))
    assert_same_run(folder / "one", folder / "straight", max(1e-6, least))


@pytest.mark.usefixtures("ranks_device")
def test_sharded_and_shared_models_have_the_losses_of_one_process(tmp_path: Path) -> None:
    check_kinds(tmp_path, 2, KINDS)


@pytest.mark.endurance
@pytest.mark.timeout(1200)
def test_four_ranks_have_the_losses_of_one_process(tmp_path: Path) -> None:
    check_kinds(tmp_path, 4, KINDS_OF_FOUR)


@pytest.fixture(scope="module", params=["ddp"])
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp(request.param)
    train(config(folder / "one", steps=10, schedule_steps=20))
    return folder, launch(run_all, folder, request.param, timeout=150)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same runs in one process."""
    folder = tmp_path_factory.mktemp("alone")
    train(config(folder / "plain", accumulate=2))
    train(config(folder / "bf16-weights", accumulate=2, precision="bf16", weights="bf16", form="plain"))
    train(config(folder / "straight"))
    return folder


Runs = tuple[Path, list[dict[str, Any]]]


def assert_same_run(found: Path, expected: Path, tolerance: float) -> None:
    b = rows(expected)
    a = [row for row in rows(found) if row["step"] <= b[-1]["step"]]
    assert [row["step"] for row in a] == [row["step"] for row in b]
    for one, other in zip(a, b, strict=True):
        for name in ("loss", "eval_loss", "lr"):
            if name in other:
                assert one[name] == pytest.approx(other[name], rel=tolerance), (name, other["step"])
        if "grad_norm" in other:
            assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=20 * tolerance), other["step"]
        assert one.get("tokens") == other.get("tokens")


def test_two_ranks_have_the_losses_of_one_process_and_one_log(runs: Runs, alone: Path) -> None:
    folder, (first, second) = runs
    assert_same_run(folder / "plain", alone / "plain", 1e-6)
    assert first["plain"] == second["plain"]
    for name, value in final_weights(alone / "plain").items():
        if value.dim() > 1:  # the gradient of a key's bias is zero but for rounding, which Adam enlarges
            torch.testing.assert_close(final_weights(folder / "plain")[name], value, rtol=1e-3, atol=1e-4)


def test_ranks_share_the_data_without_overlap(runs: Runs) -> None:
    from fusestep.data import open_source

    _, (first, second) = runs
    # (steps, sequences of this rank, context); micro-batches of 4 sequences, 2 of them on each rank.
    parts = [ranks["seen"].view(20, 2, 2, 8) for ranks in (first, second)]
    together = torch.cat(parts, dim=2).view(160, 8)
    assert torch.equal(together, open_source("synthetic", seed=0).batch(0, 160, 8)[0])


def test_gradients_of_16_bit_weights_are_summed_over_micro_batches_and_ranks(runs: Runs, alone: Path) -> None:
    found, expected = rows(runs[0] / "bf16-weights"), rows(alone / "bf16-weights")
    # Both round to bf16, each its own micro-batches.
    assert found[0]["grad_norm"] == pytest.approx(expected[0]["grad_norm"], rel=5e-3)
    for one, other in zip(found, expected, strict=True):
        if "loss" in one:
            assert one["loss"] == pytest.approx(other["loss"], rel=3e-3)


def test_a_run_goes_on_with_another_number_of_ranks(runs: Runs, alone: Path, tmp_path: Path) -> None:
    folder, _ = runs
    assert_same_run(folder / "broken", alone / "straight", 1e-6)
    assert_same_run(folder / "one", alone / "straight", 1e-6)
    # And from two ranks to one: the stopped run was written by two.
    train(config(folder / "stopped", resume=True))
    assert_same_run(folder / "stopped", alone / "straight", 1e-6)


def test_dropout_differs_between_ranks_and_a_resumed_run_draws_the_same(runs: Runs) -> None:
    folder, _ = runs
    assert [row.get("loss") for row in rows(folder / "dropped")] == [
        row.get("loss") for row in rows(folder / "dropped-in-two")
    ]


def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all(runs: Runs) -> None:
    folder, (first, second) = runs
    assert first["nan"] == second["nan"]
    assert first["nan"][2] == 1
    assert [row["skipped"] for row in rows(folder / "nan")] == [0, 0, 1, 1, 1, 1]
    assert all(value.isfinite().all() for value in final_weights(folder / "nan").values())


def test_all_ranks_are_told_of_a_failure_on_one_and_the_run_goes_on_from_its_last_checkpoint(
    runs: Runs, alone: Path
) -> None:
    folder, (first, second) = runs
    assert second["failed"] == ("UserError", "the sequences of this rank are gone; put them back.")
    kind, sentence = first["failed"]
    assert kind == "PeerError"
    assert sentence.startswith("rank 1 (process ")
    assert "failed: the sequences of this rank are gone; put them back; the last good checkpoint is" in sentence
    assert "step-00000004" in sentence
    assert "--resume" in sentence
    assert first["after-the-failure"][0] == second["after-the-failure"][0] == 20
    assert_same_run(folder / "failed", alone / "straight", 1e-6)


def test_a_signal_to_one_rank_stops_all_after_the_same_step_with_a_checkpoint(runs: Runs) -> None:
    folder, (first, second) = runs
    assert first["stopped"] == second["stopped"]
    assert first["stopped"][0] in (6, 7)
    assert first["stopped"][3] == signal.SIGTERM
    found = checkpoint.newest(folder / "stopped")
    assert found is not None


def test_a_full_disk_on_rank_0_is_told_to_all_and_leaves_the_last_good_checkpoint(runs: Runs) -> None:
    folder, (first, second) = runs
    assert first["full-disk"][0] == "UserError"
    assert "No space left on device" in first["full-disk"][1]
    assert second["full-disk"][0] == "PeerError"
    assert second["full-disk"][1].startswith("rank 0 (process ")
    assert "No space left on device" in second["full-disk"][1]
    found = checkpoint.newest(folder / "failed")
    assert found is not None
    assert found.step == 20


def test_a_batch_that_the_ranks_cannot_share_is_refused(runs: Runs) -> None:
    folder, outcomes = runs
    for one in outcomes:
        assert "--batch is 3 sequences over all ranks, which 2 ranks cannot share evenly; pass 2 or" in one["uneven"][1]
    assert not (folder / "uneven").exists()
