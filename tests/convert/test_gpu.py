"""Conversion on a GPU in bf16: everything is swapped for Triton, no farther from fp32, trains alike, and comes back."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusestep import convert, explain
from fusestep.fp8 import DelayedScaling
from fusestep.optim import FusedAdam

pytestmark = pytest.mark.gpu

MODELS = ["llama", "t5's norm", "gemma's norm", "encoder, pre-norm", "encoder, post-norm"]


def build(models: SimpleNamespace, name: str) -> nn.Module:
    torch.manual_seed(2)
    made = {
        "llama": lambda: models.Decoder(width=256, vocabulary=211),
        "t5's norm": lambda: models.Decoder(models.T5StyleLayerNorm, width=256, vocabulary=211),
        "gemma's norm": lambda: models.Decoder(models.OffsetRMSNorm, width=256, vocabulary=211),
        "encoder, pre-norm": lambda: models.EncoderClassifier(width=256, vocabulary=211),
        "encoder, post-norm": lambda: models.EncoderClassifier(False, width=256, vocabulary=211),
    }[name]()
    if hasattr(made, "frequencies"):
        made.frequencies = 1e4 ** -(torch.arange(64) / 64.0)
    model: nn.Module = made
    return model.cuda().bfloat16()


def batch() -> Tensor:
    return torch.randint(0, 211, (48, 40), device="cuda")


def results(model: nn.Module, tokens: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    logits = model(tokens[:, :-1] if hasattr(model, "layers") else tokens[:-1])
    targets = tokens[:, 1:] if hasattr(model, "layers") else tokens[1:]
    nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten()).backward()
    found = {"logits": logits} | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: tensor.detach().double().clone() for name, tensor in found.items()}


def distance(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("name", MODELS)
def test_bf16_is_no_farther_from_fp32_and_undo_gives_back_the_same_bits(models: SimpleNamespace, name: str) -> None:
    model = build(models, name)
    tokens = batch()
    truth, before = results(copy.deepcopy(model).float(), tokens), results(model, tokens)
    state = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    classes = [type(module) for module in model.modules()]
    report = convert(model)
    assert report.left == (), str(report)
    swapped = {row.path for row in report.swapped if "Attention" not in str(row.became)}
    assert len(swapped) >= 6
    assert {one.implementation for one in explain(model).modules if one.path in swapped} == {"triton"}
    after = results(model, tokens)
    gradients = [key for key in truth if key != "logits"]
    for names in (["logits"], gradients):
        ours, theirs, true = (torch.cat([found[key].flatten() for key in names]) for found in (after, before, truth))
        assert distance(ours, true) <= 1.05 * distance(theirs, true), names[:1]
    report.undo()
    assert [type(module) for module in model.modules()] == classes
    assert all(torch.equal(tensor, state[key]) for key, tensor in model.state_dict().items())
    assert torch.equal(results(model, tokens)["logits"], before["logits"])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("autocast", [False, True])
def test_ten_steps_train_alike(models: SimpleNamespace, name: str, autocast: bool) -> None:
    """All in bf16, and with fp32 weights under autocast."""
    losses = []
    for converts in (False, True):
        model = build(models, name)
        if autocast:
            model = model.float()
        if converts:
            assert convert(model).left == ()
        optimizer = FusedAdam(model.parameters(), 1e-3, master_weights=not autocast)
        torch.manual_seed(1)
        tokens = batch()
        rows = []
        for _ in range(10):
            with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
                logits = model(tokens[:, :-1] if hasattr(model, "layers") else tokens[:-1])
            targets = tokens[:, 1:] if hasattr(model, "layers") else tokens[1:]
            loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            rows.append(loss.item())
        losses.append(rows)
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)
    assert losses[0][-1] < losses[0][0]


def test_in_fp8_the_products_are_the_chips_own(models: SimpleNamespace) -> None:
    model = build(models, "llama")
    report = convert(model, fp8=DelayedScaling())
    assert [row.path for row in report.left] == ["lm_head"]
    optimizer = FusedAdam(model.parameters(), 1e-3, master_weights=True)
    tokens = batch()
    losses = []
    for _ in range(10):
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    if torch.cuda.get_device_capability() >= (8, 9):
        told = {one.path: one.implementation for one in explain(model).modules}
        assert told["layers.0.mlp.up_proj"] == "native"
    report.undo()
    assert type(model.layers[0].mlp.up_proj) is nn.Linear


def test_a_conversion_leaves_the_gpus_generator_and_waits_for_nothing_afterwards(
    models: SimpleNamespace, no_waiting: Any
) -> None:
    model = build(models, "llama")
    state = torch.cuda.get_rng_state()
    convert(model)
    assert torch.equal(torch.cuda.get_rng_state(), state)
    x = torch.randn(4, 40, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    angles = torch.randn(4, 40, 64, device="cuda").bfloat16()
    rotation = (angles.cos(), angles.sin())
    model.norm(model.layers[0](x, position_embeddings=rotation)).sum().backward()  # kernels are compiled
    with no_waiting():
        model.norm(model.layers[0](x, position_embeddings=rotation)).sum().backward()


def test_a_default_device_is_no_obstacle(models: SimpleNamespace) -> None:
    torch.set_default_device("cuda")
    try:
        model = nn.ModuleList([models.Decoder(layers=1), models.EncoderClassifier(), models.NewGELUActivation()])
        report = convert(model)
        assert len(report.swapped) == 5 + 9 + 1
        assert report.left == ()
    finally:
        torch.set_default_device(None)
