"""Linear layers in FP8: which of them, what they compute with and without a region, and what stays as it was."""

from __future__ import annotations

import copy
import inspect
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusestep import convert, explain
from fusestep.convert.linears import FP8Linear
from fusestep.errors import UserError
from fusestep.fp8 import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    fp8_autocast,
)
from fusestep.nn import Linear
from fusestep.optim import FusedAdam

RECIPES = [DelayedScaling(), Float8CurrentScaling(), Float8BlockScaling(), MXFP8BlockScaling()]


def distance(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def outcome(layer: Any, recipe: Any, x: Tensor, dy: Tensor) -> list[Tensor]:
    """y of a linear layer, and the gradients of x, of the weight and of the bias."""
    given = x.clone().requires_grad_()
    with fp8_autocast(recipe=recipe):
        y = layer(given)
    y.backward(dy)
    assert given.grad is not None
    return [y.detach(), given.grad, layer.weight.grad, layer.bias.grad]


def became(report: Any) -> dict[str, str | None]:
    return {row.path: row.became for row in report.rows}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: type(recipe).__name__)
def test_the_products_are_those_of_our_linear_layer(recipe: Any, device: Any) -> None:
    """The same numbers as fusestep.nn.Linear with the same weights: forward, and all gradients."""
    old, ours = nn.Linear(40, 24).to(device), Linear(40, 24, device=device)
    ours.load_state_dict(old.state_dict())
    assert became(convert(nn.ModuleDict({"a": old}), fp8=recipe))["a"] == "FP8Linear"
    x, dy = torch.randn(3, 5, 40, device=device), torch.randn(3, 5, 24, device=device)
    results = [outcome(layer, recipe, x, dy) for layer in (old, ours)]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert 1e-3 < distance(results[0][0], nn.functional.linear(x, old.weight, old.bias).detach()) < 0.1
    plain = nn.functional.linear(x, old.weight, old.bias)
    assert torch.equal(old(x), plain)  # no region: the old product, bit for bit


def test_the_models_forward_is_the_region_unless_there_is_one(models: SimpleNamespace) -> None:
    model = models.Decoder()
    x = torch.randint(0, 51, (2, 7))
    plain = model(x)
    recipe = Float8CurrentScaling()
    report = convert(model, fp8=recipe)
    assert became(report)[""] == "FP8Forward"
    in_fp8 = model(x)
    assert 1e-3 < distance(in_fp8.detach(), plain.detach()) < 0.2
    with fp8_autocast(recipe=recipe):
        assert torch.equal(model(x), in_fp8)
    with fp8_autocast(enabled=False):
        assert distance(model(x).detach(), plain.detach()) < 1e-5
    # Those who look a model's class or signature up find the old ones.
    assert type(model).__name__ == "Decoder"
    assert type(model).__module__ == models.Decoder.__module__
    assert inspect.signature(model.forward) == inspect.signature(models.Decoder().forward)
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), in_fp8)
    assert torch.equal(copy.deepcopy(model)(x), in_fp8)
    report.undo()
    assert type(model) is models.Decoder
    assert torch.equal(model(x), plain)


def test_names_in_the_state_dict_stay_also_with_scales_and_copies(models: SimpleNamespace) -> None:
    model = models.Decoder(layers=1)
    names = list(model.state_dict())
    held = {name: set(vars(parameter)) for name, parameter in model.named_parameters()}
    report = convert(model, fp8=DelayedScaling(amax_history_len=3))
    optimizer = FusedAdam(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(4):
        tokens = torch.arange(14).reshape(2, 7)
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), (tokens + 1).flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    layer = model.layers[0].mlp.up_proj
    assert layer.fp8_state is not None  # scales are there, and not in the state dict
    assert list(model.state_dict()) == names
    plain = models.Decoder(layers=1)
    plain.load_state_dict(model.state_dict())
    model.load_state_dict(plain.state_dict())
    report.undo()
    assert {name: set(vars(parameter)) for name, parameter in model.named_parameters()} == held
    assert type(layer) is nn.Linear
    assert not hasattr(layer, "fp8_state")
    assert torch.equal(model(tokens), plain(tokens))


def test_undo_takes_back_what_was_asked_for_copies_of_biases() -> None:
    model = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32), nn.Linear(32, 5))
    report = convert(model, fp8=DelayedScaling())
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.randn(3, 32))
    assert any(vars(model[0].bias))
    report.undo()
    assert not any(vars(parameter) for parameter in model.parameters())


def test_heads_tied_layers_routers_and_adapters_stay(models: SimpleNamespace) -> None:
    model = models.Decoder()
    model.score = nn.Linear(32, 2)
    model.router = nn.Linear(32, 8)
    model.lora_A = nn.Linear(32, 4)
    model.plain = nn.Linear(32, 32)
    report = convert(model, fp8=Float8CurrentScaling(), fp8_skip=["layers.*.v_proj", "*.o_proj"])
    reasons = {row.path: row.reason for row in report.left}
    assert reasons["lm_head"] == "it shares its weight with an embedding"
    assert reasons["score"] == "heads stay in the model's dtype"
    assert reasons["router"] == "routers stay in the model's dtype"
    assert reasons["lora_A"] == "low-rank adapters stay in the model's dtype"
    assert reasons["layers.2.self_attn.v_proj"] == reasons["layers.0.self_attn.o_proj"] == "fp8_skip names it"
    assert isinstance(model.plain, FP8Linear)
    assert sum(isinstance(module, FP8Linear) for module in model.modules()) == 3 * 5 + 1


def test_attention_of_torchs_multiplies_in_fp8_where_it_is_ours(device: Any) -> None:
    recipe, (B, S, W, H) = Float8CurrentScaling(), (3, 5, 32, 4)
    attention = nn.MultiheadAttention(W, H, batch_first=True, device=device)
    nn.init.normal_(attention.in_proj_bias)
    nn.init.normal_(attention.out_proj.bias)
    first, last = Linear(W, 3 * W, device=device), Linear(W, W, device=device)
    first.load_state_dict({"weight": attention.in_proj_weight, "bias": attention.in_proj_bias})
    last.load_state_dict(attention.out_proj.state_dict())
    names, x = list(attention.state_dict()), torch.randn(B, S, W, device=device)
    plain = attention(x, x, x, need_weights=False)[0]
    model = nn.ModuleDict({"a": attention})
    report = convert(model, fp8=recipe)
    told = became(report)
    assert told["a"] == "FP8MultiheadAttention"
    assert told["a.out_proj"] == "FP8NonDynamicallyQuantizableLinear"
    results = []
    for ours in (True, False):
        given = x.clone().requires_grad_()
        with fp8_autocast(recipe=recipe):
            if ours:
                y = attention(given, given, given, need_weights=False)[0]
            else:
                q, k, v = first(given).unflatten(-1, (3, H, W // H)).permute(2, 0, 3, 1, 4)
                out = nn.functional.scaled_dot_product_attention(q, k, v)
                y = last(out.transpose(1, 2).flatten(2))
        y.square().sum().backward()
        results.append([y.detach(), given.grad])
    results[0] += [attention.in_proj_weight.grad, attention.in_proj_bias.grad, attention.out_proj.weight.grad]
    results[1] += [first.weight.grad, first.bias.grad, last.weight.grad]
    # A last bit of attention's output may move a value to the next one of FP8, where kernels differ.
    close = 1e-5 if device.type == "cpu" else 1e-2
    for a, b in zip(*results, strict=True):
        assert distance(a, b) < close
    assert 1e-3 < distance(results[0][0], plain.detach()) < 0.2
    with torch.no_grad(), fp8_autocast(recipe=recipe):  # not torch's fast path, which knows no FP8
        in_evaluation = attention.eval()(x, x, x, need_weights=False)[0]
        assert distance(in_evaluation, results[0][0]) < close
    assert distance(attention.train()(x, x, x, need_weights=False)[0].detach(), plain.detach()) < 1e-5
    assert list(attention.state_dict()) == names
    report.undo()
    assert type(attention) is nn.MultiheadAttention
    assert not hasattr(attention, "fp8_state")


def test_attention_that_stays_keeps_its_second_product_too() -> None:
    model = nn.ModuleDict({"a": nn.MultiheadAttention(16, 2, add_zero_attn=True), "b": nn.MultiheadAttention(16, 2)})
    report = convert(model, fp8=Float8CurrentScaling(), fp8_skip=["b"])
    reasons = {row.path: row.reason for row in report.left}
    assert reasons["a"] == "it adds keys of its own (add_bias_kv, add_zero_attn)"
    assert "without calling it" in reasons["a.out_proj"]
    assert "without calling it" in reasons["b.out_proj"]
    assert {row.path: row.became for row in report.swapped} == {"b": "FusedMultiheadAttention"}


def test_a_plain_encoder_trains_in_fp8_with_delayed_scaling(models: SimpleNamespace) -> None:
    model = models.EncoderClassifier()
    names = list(model.state_dict())
    report = convert(model, fp8=DelayedScaling(amax_history_len=4))
    assert [row.path for row in report.left] == ["head"]
    optimizer = FusedAdam(model.parameters(), lr=2e-3)
    tokens = (torch.arange(8)[:, None] + torch.arange(5)) % 51
    losses = []
    for _ in range(6):
        loss = nn.functional.cross_entropy(model(tokens[:-1]).flatten(0, 1), tokens[1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    layer = model.encoder.layers[0]
    assert layer.self_attn.fp8_state is not None
    assert layer.self_attn.out_proj.fp8_state is not None
    assert list(model.state_dict()) == names
    report.undo()
    assert not any("fusestep" in type(module).__module__ for module in model.modules())


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # dynamo's, where its graph breaks
@pytest.mark.parametrize("recipe", RECIPES[:2], ids=lambda recipe: type(recipe).__name__)
def test_compiled_in_a_region_it_gives_the_same(recipe: Any) -> None:
    torch._dynamo.reset()
    layer = nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, batch_first=True)
    convert(layer, fp8=recipe)
    compiled = torch.compile(layer, backend="eager")
    x = torch.randn(2, 6, 32)
    with fp8_autocast(recipe=recipe):
        wanted = layer(x)
        found = compiled(x)
    assert distance(found.detach(), wanted.detach()) < 1e-5


def test_a_last_layer_as_wide_as_the_vocabulary_is_a_head_and_no_other_is() -> None:
    model = nn.Sequential(nn.Embedding(24, 24), nn.Linear(24, 24), nn.Linear(24, 24))
    became = {row.path: row.became for row in convert(model, fp8=Float8CurrentScaling()).rows}
    assert became == {"": "FP8Forward", "1": "FP8Linear", "2": None}


def test_a_forward_that_was_wrapped_since_has_to_be_unwrapped_before_undo(models: SimpleNamespace) -> None:
    model = models.Decoder(layers=1)
    report = convert(model, fp8=Float8CurrentScaling())
    inner = model.forward
    model.forward = lambda *args: inner(*args)
    with pytest.raises(UserError, match="the forward of the model was replaced since"):
        report.undo()
    assert type(model).forward is inner.__func__
    model.forward = inner  # as accelerate leaves it
    report.undo()
    assert type(model) is models.Decoder
    assert "forward" not in model.__dict__
    model(torch.randint(0, 51, (2, 7)))


def test_first_and_last_blocks_by_choice(models: SimpleNamespace) -> None:
    model = models.Decoder(layers=4)
    report = convert(model, fp8=Float8CurrentScaling(), fp8_keep_blocks=(1, 2))
    in_fp8 = {path.split(".")[1] for path, module in model.named_modules() if isinstance(module, FP8Linear)}
    assert in_fp8 == {"1"}
    reasons = {row.path: row.reason for row in report.left}
    assert reasons["layers.0.mlp.up_proj"] == "fp8_keep_blocks keeps the first block"
    assert (
        reasons["layers.2.mlp.up_proj"] == reasons["layers.3.mlp.up_proj"] == "fp8_keep_blocks keeps the last 2 blocks"
    )


def test_without_being_asked_no_linear_layer_changes(models: SimpleNamespace) -> None:
    model = models.Decoder()
    report = convert(model)
    assert all(type(module) is nn.Linear for module in model.modules() if isinstance(module, nn.Linear))
    assert not any("FP8" in str(row.became) for row in report.rows)


def test_a_forward_that_was_replaced_keeps_the_region_to_its_owner() -> None:
    model = nn.Sequential(nn.Linear(16, 16))
    model.forward = model.forward  # type: ignore[method-assign]
    report = convert(model, fp8=Float8CurrentScaling())
    assert {row.path: row.became for row in report.rows} == {"": None, "0": "FP8Linear"}
    assert report.left[0].reason.endswith("call it within fusestep.fp8.fp8_autocast(recipe=…) yourself")


def test_reset_parameters_is_the_old_classs() -> None:
    layer = nn.Linear(16, 64)
    model = nn.Sequential(layer)
    convert(model, fp8=Float8CurrentScaling())
    torch.manual_seed(0)
    layer.reset_parameters()
    torch.manual_seed(0)
    assert torch.equal(layer.weight, nn.Linear(16, 64).weight)


def test_parameters_that_are_drawn_anew_have_no_scales_of_the_old_ones() -> None:
    layer = nn.Linear(16, 64)
    convert(nn.Sequential(layer), fp8=DelayedScaling())
    x = torch.randn(8, 16)
    for _ in range(2):
        with fp8_autocast(recipe=DelayedScaling()):
            layer(x * 1e3).sum().backward()
    layer.reset_parameters()
    fresh = nn.Linear(16, 64)
    fresh.load_state_dict(layer.state_dict(), strict=False)
    convert(nn.Sequential(fresh), fp8=DelayedScaling())
    results = []
    for one in (layer, fresh):
        with fp8_autocast(recipe=DelayedScaling()):
            results.append(one(x))
    assert torch.equal(*results)


def test_subclasses_and_computed_weights_stay() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    model = nn.Sequential(Scaled(8, 8), torch.nn.utils.parametrizations.orthogonal(nn.Linear(8, 8)))
    reasons = [row.reason for row in convert(model, fp8=Float8CurrentScaling()).left]
    assert reasons == ["Scaled overrides the forward of nn.Linear", "its weight is computed from others"]


def test_explain_knows_what_they_run_as(models: SimpleNamespace) -> None:
    model = models.Decoder(layers=1)
    convert(model, fp8=Float8CurrentScaling())
    model(torch.randint(0, 51, (2, 7))).sum().backward()
    told = {one.path: one for one in explain(model).modules}
    assert told["layers.0.mlp.up_proj"].kind == "FP8Linear"
    assert told["layers.0.mlp.up_proj"].implementation == "emulated"
    assert told["norm"].is_ours
    assert told["layers.0"].reason.startswith("residual add in post_attention_layernorm")


@pytest.mark.parametrize(
    "make", [lambda: nn.TransformerEncoderLayer(32, 4, 64), lambda: nn.Linear(32, 32)], ids=["encoder layer", "linear"]
)
def test_a_model_that_is_swapped_itself_has_its_region_all_the_same(make: Any) -> None:
    model, x = make(), torch.randn(5, 2, 32)
    before, plain = type(model), model(x)
    report = convert(model, fp8=Float8CurrentScaling())
    assert [row.became for row in report.rows if row.path == ""][-1] == "FP8Forward"
    assert not torch.equal(model.eval()(x), make().train(False)(x))
    with fp8_autocast(recipe=Float8CurrentScaling()):
        wanted = model(x)
    assert torch.equal(model(x), wanted)
    assert not torch.equal(model(x), plain)
    report.undo()
    assert type(model) is before


def test_a_second_conversion_says_which_region_holds(models: SimpleNamespace) -> None:
    model = models.Decoder(layers=1)
    convert(model, fp8=Float8CurrentScaling(), fp8_skip=["*.mlp"])
    second = convert(model, fp8=DelayedScaling())
    told = [row.reason for row in second.left if row.path == ""]
    assert "its forward runs within fp8_autocast (Float8CurrentScaling) since it was converted before" in told
    layer = nn.TransformerEncoderLayer(32, 4, 64)
    convert(layer)
    told = [row.reason for row in convert(layer, fp8=DelayedScaling()).left if row.path == ""]
    assert "it was converted before: call it within fusestep.fp8.fp8_autocast(recipe=…) yourself" in told
