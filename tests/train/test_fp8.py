"""Training in FP8: scaling state that comes back, statistics, and what may change from run to run."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fusestep.data import arithmetic_sequences
from fusestep.errors import UserError
from fusestep.fp8.casting import is_counting
from fusestep.fp8.recipes import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    recipe_named,
)
from fusestep.fp8.state import KEYS
from fusestep.models import GPT
from fusestep.train import TrainConfig, checkpoint, train
from fusestep.train.config import settings_of
from fusestep.train.inspection import inspect, statistics_of_run
from fusestep.train.trainer import Trainer

Build = Callable[..., TrainConfig]


def newest(folder: str) -> checkpoint.Checkpoint:
    found = checkpoint.newest(Path(folder))
    assert found is not None
    return found


def fp8_keys(folder: str) -> list[str]:
    return [name for name in newest(folder).weights() if name.rpartition(".")[2] in KEYS]


def statistics(folder: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(folder) / "fp8.jsonl").read_text().splitlines()]


def trainer_of(config: TrainConfig) -> Trainer:
    source = arithmetic_sequences(seed=config.seed)
    return Trainer(config, config.gpt_config(source.vocab_size), source, config.torch_device())


@pytest.mark.parametrize(
    ("settings", "recipe"),
    [
        ({}, DelayedScaling(amax_history_len=16)),
        ({"amax_history": 1024, "fp8_format": "e4m3"}, DelayedScaling(amax_history_len=1024, fp8_format=Format.E4M3)),
        ({"recipe": "current"}, Float8CurrentScaling()),
        ({"recipe": "block"}, Float8BlockScaling()),
        ({"recipe": "block", "fp8_format": "hybrid"}, Float8BlockScaling(fp8_format=Format.HYBRID)),
        ({"recipe": "mxfp8"}, MXFP8BlockScaling()),
    ],
)
def test_settings_name_a_recipe(tiny: Build, settings: dict[str, Any], recipe: object) -> None:
    assert tiny(precision="fp8", **settings).fp8_recipe == recipe


def test_a_run_that_is_not_in_fp8_has_no_recipe(tiny: Build) -> None:
    assert tiny(precision="bf16").fp8_recipe is None


@pytest.mark.parametrize("arguments", [("delay",), ("delayed", "e5m2"), ("current", "auto", 3), ("delayed", "auto", 0)])
def test_a_recipe_of_no_name_is_one_sentence(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(UserError, match="; "):
        recipe_named(*arguments)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"recipe": "delayed"}, "--recipe is delayed and --precision is fp32; pass --precision fp8 with it"),
        ({"amax_history": 8, "precision": "bf16"}, "--amax-history is 8 and --precision is bf16"),
        ({"fp8_format": "e4m3"}, "--fp8-format is e4m3 and --precision is fp32"),
        ({"fp8_stats": True}, "--fp8-stats is given and --precision is fp32"),
        ({"precision": "fp8", "recipe": "delay"}, "--recipe is 'delay'; choose one of delayed, current, block, mxfp8"),
        ({"precision": "fp8", "fp8_format": "e5m2"}, "--fp8-format is 'e5m2'; choose one of auto, hybrid, e4m3"),
        ({"precision": "fp8", "amax_history": 0}, "--amax-history is 0; pass 1 to 1048576 steps"),
        ({"precision": "fp8", "amax_history": 2.5}, "--amax-history is 2.5; pass a whole number"),
        ({"precision": "fp8", "recipe": "block", "amax_history": 8}, "--recipe is block, which keeps no state"),
        ({"precision": "fp8", "recipe": "current", "fp8_stats": True}, "--fp8-stats is given and --recipe is current"),
        ({"precision": "fp8", "form": "plain"}, "--precision is fp8 and --form is plain; pass --form fused"),
        ({"precision": "fp8", "weights": "fp16"}, "--weights is fp16 and --precision is fp8"),
    ],
)
def test_settings_that_make_no_sense_together_are_one_sentence(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError) as raised:
        TrainConfig(**settings)
    assert sentence in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_micro_batch_moves_no_scale(tiny: Build) -> None:
    trainer = trainer_of(tiny(precision="fp8", accumulate=3))
    for _ in range(4):
        trainer.train_step()
    state = trainer.model.blocks[0].self_attention.layernorm_qkv.fp8_state
    assert state.rolls.tolist() == [4, 4, 4]


def test_an_evaluation_changes_nothing(tiny: Build) -> None:
    trainer = trainer_of(tiny(precision="fp8"))
    trainer.train_step()
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    first = trainer.evaluate()
    assert trainer.evaluate() == first
    assert all(torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items())


def test_fp8_is_near_bf16_and_not_the_same(tiny: Build) -> None:
    losses = {}
    for precision in ("bf16", "fp8"):
        trainer = trainer_of(tiny(precision=precision, dropout=0.0))
        losses[precision] = torch.stack([trainer.train_step()[0] for _ in range(8)])
    assert not torch.equal(losses["fp8"], losses["bf16"])
    torch.testing.assert_close(losses["fp8"], losses["bf16"], rtol=0.01, atol=0.0)


def test_precision_and_recipe_may_change_on_resume(tiny: Build) -> None:
    """State of delayed scaling goes where nothing would keep it up to date, and comes back afresh."""
    run = tiny(precision="bf16", steps=2)
    train(run)
    assert fp8_keys(run.out) == []
    for steps, settings, has_state in (
        (4, {"precision": "fp8"}, True),
        (6, {"precision": "fp8", "amax_history": 3}, True),
        (8, {"precision": "fp8", "recipe": "current"}, False),
        (10, {"precision": "fp8", "recipe": "delayed"}, True),
        (12, {"precision": "fp32"}, False),
    ):
        train(tiny(steps=steps, resume=True, **settings))
        assert bool(fp8_keys(run.out)) is has_state
    assert newest(run.out).step == 12


def test_another_length_of_history_keeps_the_newest_amaxes(tiny: Build) -> None:
    run = tiny(precision="fp8", steps=5)
    train(run)
    before = inspect(run.out)
    train(tiny(precision="fp8", amax_history=3, steps=6, resume=True))
    after = inspect(run.out)
    assert (before.history_length, after.history_length) == (16, 3)
    for old, new in zip(before.tensors, after.tensors, strict=True):
        assert new.history[:2] == old.history[-2:]


def test_what_the_run_said_of_fp8_goes_with_what_it_was_said_of(tiny: Build) -> None:
    run = tiny(precision="fp8", amax_history=8, fp8_stats=True, steps=1)
    train(run)
    resumed = settings_of({"out": run.out}, file=None, resume=True)
    assert (resumed["recipe"], resumed["amax_history"], resumed["fp8_stats"]) == ("delayed", 8, True)
    in_bf16 = TrainConfig(**settings_of({"out": run.out, "precision": "bf16"}, file=None, resume=True))
    assert in_bf16.fp8_recipe is None
    current = TrainConfig(**settings_of({"out": run.out, "recipe": "current"}, file=None, resume=True))
    assert current.fp8_recipe == Float8CurrentScaling()
    assert not current.fp8_stats


def test_another_form_loads_a_checkpoint_with_fp8_state(tiny: Build) -> None:
    run = tiny(precision="fp8", steps=1)
    train(run)
    assert fp8_keys(run.out)
    train(tiny(form="seed", steps=2, resume=True))
    assert fp8_keys(run.out) == []


def test_weights_of_another_model_are_refused_with_and_without_fp8_state(tiny: Build) -> None:
    config = tiny(precision="fp8")
    trainer = trainer_of(config)
    trainer.train_step()
    saved = trainer.model.state_dict()
    other = GPT(dataclasses.replace(trainer.model.config, layers=1))
    with pytest.raises(UserError, match=r"is of another model: blocks\.1\..* is in one of them alone"):
        checkpoint.load_weights(other, saved, Path("x"))
    wrapped = torch.nn.Module()
    wrapped._orig_mod = GPT(trainer.model.config)  # type: ignore[assignment]
    checkpoint.load_weights(wrapped, saved, Path("x"))
    loaded = checkpoint.plain_names(wrapped.state_dict())
    assert loaded.keys() == saved.keys()
    assert all(torch.equal(value, saved[name]) for name, value in loaded.items())


def test_statistics_are_kept_at_evaluations_and_checkpoints_and_resume_like_the_metrics(
    tiny: Build, tmp_path: Path
) -> None:
    common = {"precision": "fp8", "fp8_stats": True, "eval_every": 3, "save_every": 4}
    straight = tiny(out=str(tmp_path / "straight"), **common)
    train(straight)
    rows = statistics(straight.out)
    assert sorted({row["step"] for row in rows}) == [3, 4, 6, 8, 9, 10]
    assert len(rows) == 6 * 2 * (3 + 3 + 6)
    for row in rows:
        assert row["scale"] > 0
        assert row["amax"] >= 0
        assert 0 <= row["saturated"] <= 1
        assert 0 <= row["flushed"] <= 1
        assert row["refused"] == 0
    assert any(row["saturated"] > 0 for row in rows)
    assert not is_counting()
    broken = tiny(out=str(tmp_path / "broken"), steps=9, schedule_steps=10, **common)
    train(broken)
    # As if it had been killed after the checkpoint of step 8, in the middle of a line.
    for path in (Path(broken.out) / "checkpoints").glob("step-00000009"):
        for file in path.iterdir():
            file.unlink()
        path.rmdir()
    with (Path(broken.out) / "fp8.jsonl").open("a") as file:
        file.write('{"step": 9, "mod')
    train(dataclasses.replace(broken, steps=10, resume=True))
    assert statistics(broken.out) == rows


def test_an_inspection_has_the_state_of_the_checkpoint_and_the_shares_of_its_step(tiny: Build) -> None:
    run = tiny(precision="fp8", amax_history=4, fp8_stats=True, steps=6, save_every=3)
    train(run)
    early, late = inspect(Path(run.out) / "checkpoints" / "step-00000003"), inspect(run.out)
    assert (early.checkpoint.step, late.checkpoint.step) == (3, 6)
    assert [len(row.history) for row in early.tensors] == [3] * 24
    assert [len(row.history) for row in late.tensors] == [4] * 24
    by_name = {(row["step"], row["module"], row["tensor"]): row for row in statistics(run.out)}
    for found in (early, late):
        for row in found.tensors:
            written = by_name[found.checkpoint.step, row.module, row.tensor]
            for name in ("format", "scale", "amax", "saturated", "flushed", "refused"):
                assert getattr(row, name) == written[name]
    assert {row["step"] for row in statistics_of_run(early.checkpoint)} == {3}


def test_a_run_resumes_bit_for_bit_after_a_step_that_was_skipped(
    tiny: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Trainer.train_step

    def poisoning(self: Trainer) -> torch.Tensor:
        if self.step != 4:
            return original(self)
        hook = self.model.position.weight.register_hook(lambda gradient: gradient * float("nan"))
        values = original(self)
        hook.remove()
        return values

    monkeypatch.setattr(Trainer, "train_step", poisoning)
    straight = tiny(precision="fp8", out=str(tmp_path / "straight"))
    assert train(straight).skipped_steps == 1
    broken = tiny(precision="fp8", out=str(tmp_path / "broken"), steps=5, schedule_steps=10)
    train(broken)
    train(dataclasses.replace(broken, steps=10, resume=True))
    expected = newest(straight.out).weights()
    assert all(torch.equal(value, expected[name]) for name, value in newest(broken.out).weights().items())


def test_gradients_that_are_not_finite_are_counted_and_keep_the_scales(
    tiny: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_of(tiny(precision="fp8"))
    trainer.train_step()
    before = trainer.fp8_statistics()
    original = Trainer._loss
    monkeypatch.setattr(Trainer, "_loss", lambda *arguments: original(*arguments) * float("inf"))
    trainer.train_step()
    assert int(trainer.optimizer.skipped_steps) == 1
    for old, new in zip(before, trainer.fp8_statistics(), strict=True):
        is_gradient = new.tensor.startswith("grad")
        assert new.refused == is_gradient
        if is_gradient:
            assert (new.scale, new.history) == (old.scale, old.history)
