"""One step: gradients of a window, the update, and what neither may touch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusestep.data import arithmetic_sequences
from fusestep.errors import UserError
from fusestep.train import TrainConfig
from fusestep.train.trainer import IGNORED, Trainer

Build = Callable[..., TrainConfig]


def trainer_for(config: TrainConfig, device: torch.device | None = None) -> Trainer:
    source = arithmetic_sequences(seed=config.seed)
    return Trainer(config, config.gpt_config(source.vocab_size), source, device or torch.device("cpu"))


def gradients(trainer: Trainer) -> dict[str, Tensor]:
    found = {}
    for name, parameter in trainer.model.named_parameters():
        kept = getattr(parameter, "main_grad", None)
        gradient = parameter.grad if kept is None else kept
        assert gradient is not None
        found[name] = gradient.clone()
    return found


def padded_window(count: int, context: int) -> tuple[Tensor, Tensor]:
    """Sequences of very different length, the rest of each being padding."""
    inputs = torch.randint(0, 96, (count, context))
    targets = torch.randint(0, 96, (count, context))
    for row in range(count):
        targets[row, 1 + (row * 5) % context :] = IGNORED
    return inputs, targets


def test_accumulated_gradient_equals_that_of_one_large_batch(tiny: Build, device: torch.device) -> None:
    inputs, targets = padded_window(8, 8)
    whole = trainer_for(tiny(batch=8, accumulate=1, dropout=0.0), device)
    split = trainer_for(tiny(batch=2, accumulate=4, dropout=0.0), device)
    assert float(whole.add_gradients(inputs, targets)) == pytest.approx(float(split.add_gradients(inputs, targets)))
    expected, found = gradients(whole), gradients(split)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-7)


def test_gradient_is_that_of_the_mean_over_the_windows_tokens(tiny: Build) -> None:
    inputs, targets = padded_window(6, 8)
    trainer = trainer_for(tiny(batch=2, accumulate=3, dropout=0.0))
    loss = trainer.add_gradients(inputs, targets)
    found = gradients(trainer)
    trainer.model.zero_grad()
    model = trainer.model.double()
    expected = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    expected.backward()
    assert float(loss) == pytest.approx(float(expected.detach()), rel=1e-5)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(found[name].double(), parameter.grad, rtol=1e-3, atol=1e-6)


def test_whole_runs_of_one_window_size_agree_however_it_is_split(tiny: Build) -> None:
    whole = trainer_for(tiny(batch=8, accumulate=1, dropout=0.0, lr=1e-3))
    split = trainer_for(tiny(batch=2, accumulate=4, dropout=0.0, lr=1e-3))
    for _ in range(5):
        torch.testing.assert_close(whole.train_step(), split.train_step(), rtol=1e-4, atol=1e-5)
    assert whole.position == split.position == 40


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_gradients_of_16_bit_weights_are_accumulated_in_fp32(tiny: Build, precision: Any) -> None:
    inputs, targets = padded_window(32, 8)
    one = trainer_for(tiny(batch=1, accumulate=32, dropout=0.0, precision=precision, weights=precision))
    assert next(one.model.parameters()).dtype in (torch.bfloat16, torch.float16)
    one.add_gradients(inputs, targets)
    scale = one.scaler.get_scale() if one.scaler else 1.0
    assert all(gradient.dtype == torch.float32 for gradient in gradients(one).values())
    # The oracle adds the same rounded micro-batch gradients in float64.
    sums = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in one.model.named_parameters()}
    single = trainer_for(tiny(batch=1, accumulate=1, dropout=0.0, precision=precision, weights=precision))
    tokens = int((targets != IGNORED).sum())
    for x, y in zip(inputs.split(1), targets.split(1), strict=True):
        single.optimizer.zero_grad()
        loss = single._loss(x, y, "sum") / tokens
        (loss * scale).backward()
        for name, parameter in single.model.named_parameters():
            assert parameter.grad is not None
            sums[name] += parameter.grad.double()
    for name, gradient in gradients(one).items():
        torch.testing.assert_close(gradient.double(), sums[name], rtol=1e-5, atol=1e-6 * scale)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_16_bit_weights_learn_as_fp32_ones_do(tiny: Build, precision: Any, accumulate: int) -> None:
    settings = {"batch": 16 // accumulate, "accumulate": accumulate, "steps": 20, "dropout": 0.0}
    narrow, wide = trainer_for(tiny(precision=precision, weights=precision, **settings)), trainer_for(tiny(**settings))
    wide.model.load_state_dict(narrow.model.state_dict())
    before = wide.evaluate()
    for _ in range(20):
        narrow.train_step()
        wide.train_step()
    assert wide.evaluate() < before - 0.05
    assert narrow.evaluate() == pytest.approx(wide.evaluate(), abs=0.03)
    # fp16 starts at a scale that may be too large for a step or two.
    assert int(narrow.optimizer.applied_steps) >= (18 if precision == "fp16" else 20)


def check_that_an_overflow_is_skipped(trainer: Trainer) -> float:
    """One good step, then one whose gradients overflow: it leaves every weight and halves the scale, returned."""
    trainer.train_step()
    assert trainer.scaler is not None
    scale = trainer.scaler.get_scale()
    weights = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    hook = trainer.model.position.weight.register_hook(lambda gradient: gradient * float("inf"))
    skipped = trainer.train_step()[3]
    hook.remove()
    assert int(skipped) == 1
    assert trainer.scaler.get_scale() == scale / 2
    assert all(torch.equal(value, weights[name]) for name, value in trainer.model.state_dict().items())
    return scale / 2


def test_an_overflow_in_fp32_sums_of_fp16_gradients_lowers_the_scale(tiny: Build) -> None:
    trainer = trainer_for(tiny(precision="fp16", weights="fp16", accumulate=3, dropout=0.0))
    halved = check_that_an_overflow_is_skipped(trainer)
    trainer.train_step()
    assert trainer.scaler is not None
    assert trainer.scaler.get_scale() == halved
    assert int(trainer.optimizer.applied_steps) == 2


@pytest.mark.parametrize("form", ["seed", "plain", "fused"])
def test_activation_checkpointing_changes_nothing(tiny: Build, form: Any) -> None:
    plain = trainer_for(tiny(form=form))
    saving = trainer_for(tiny(form=form, activation_checkpointing=True))
    for _ in range(3):
        # The same generator feeds dropout in both.
        torch.manual_seed(5)
        first = plain.train_step()
        torch.manual_seed(5)
        assert torch.equal(saving.train_step(), first)


def test_evaluation_changes_nothing(tiny: Build) -> None:
    trainer = trainer_for(tiny())
    trainer.train_step()
    generator = torch.get_rng_state()
    weights = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    position, applied = trainer.position, int(trainer.optimizer.applied_steps)
    first = trainer.evaluate()
    assert trainer.evaluate() == first
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(value, weights[name]) for name, value in trainer.model.state_dict().items())
    assert (trainer.position, int(trainer.optimizer.applied_steps)) == (position, applied)
    assert trainer.model.training
    assert all(parameter.grad is None for parameter in trainer.model.parameters())


def test_evaluation_is_the_mean_loss_of_held_out_sequences(tiny: Build) -> None:
    trainer = trainer_for(tiny())
    inputs, targets = trainer.source.batch(0, 4 * 3, 8, held_out=True)
    model = trainer.model.eval()
    expected = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    assert trainer.evaluate() == pytest.approx(float(expected.detach()), rel=1e-6)


def test_dropout_is_active_in_training_alone(tiny: Build) -> None:
    with_dropout, without = trainer_for(tiny(dropout=0.5)), trainer_for(tiny(dropout=0.0))
    assert with_dropout.evaluate() == without.evaluate()
    assert not torch.equal(with_dropout.train_step()[0], without.train_step()[0])


def test_a_step_with_gradients_that_are_not_finite_is_skipped_and_counted(tiny: Build) -> None:
    trainer = trainer_for(tiny(precision="bf16", clip=0.0, warmup=4, dropout=0.0))
    trainer.train_step()
    weights = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    hook = trainer.model.position.weight.register_hook(lambda gradient: gradient * float("nan"))
    loss, _, lr, skipped = trainer.train_step().tolist()
    hook.remove()
    assert math.isfinite(loss)
    assert skipped == 1
    assert all(torch.equal(value, weights[name]) for name, value in trainer.model.state_dict().items())
    # The schedule did not advance: the next step has the same learning rate, the one after it the next.
    values = [trainer.train_step().tolist() for _ in range(2)]
    assert [value[2] for value in values] == pytest.approx([lr, lr * 3 / 2])
    assert all(math.isfinite(value[0]) for value in values)
    assert values[-1][3] == 1
    assert (trainer.step, int(trainer.optimizer.applied_steps)) == (4, 3)


def test_an_fp16_overflow_lowers_the_scale_and_leaves_weights_and_schedule(tiny: Build) -> None:
    trainer = trainer_for(tiny(precision="fp16", dropout=0.0, warmup=4))
    check_that_an_overflow_is_skipped(trainer)
    assert int(trainer.optimizer.applied_steps) == 1


def test_loss_scaling_does_not_change_the_step(tiny: Build) -> None:
    scaled, plain = trainer_for(tiny(precision="fp16", dropout=0.0)), trainer_for(tiny(dropout=0.0))
    for _ in range(5):
        torch.testing.assert_close(scaled.train_step()[:2], plain.train_step()[:2], rtol=2e-2, atol=2e-2)


def test_clipping_bounds_the_gradient_and_reports_its_norm_before(tiny: Build) -> None:
    free, clipped = trainer_for(tiny(clip=0.0, dropout=0.0)), trainer_for(tiny(clip=1e-3, dropout=0.0))
    first = clipped.train_step()
    assert float(first[1]) > 0.1
    free_first = free.train_step()
    assert float(free_first[0]) == float(first[0])


@pytest.mark.parametrize("weights", ["fp32", "bf16"])
def test_no_gradient_at_all_is_said_in_words(tiny: Build, weights: Any) -> None:
    trainer = trainer_for(tiny(weights=weights, precision="bf16", accumulate=2))
    for parameter in trainer.model.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(UserError, match="no trainable parameter received a gradient"):
        trainer.train_step()
