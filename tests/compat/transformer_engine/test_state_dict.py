"""State dicts: their keys, FP8 state of Transformer Engine's, and exact resumption of our own."""

from __future__ import annotations

import copy
import io
import os
import pickle
from collections import OrderedDict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from fusestep import fp8

PLAIN = {
    *(f"self_attention.layernorm_qkv.{part}_weight" for part in ("query", "key", "value")),
    *(f"self_attention.layernorm_qkv.{part}_bias" for part in ("query", "key", "value")),
    "self_attention.layernorm_qkv.layer_norm_weight", "self_attention.layernorm_qkv.layer_norm_bias",
    "self_attention.layernorm_qkv._extra_state", "self_attention.core_attention._extra_state",
    "self_attention.proj.weight", "self_attention.proj.bias", "self_attention.proj._extra_state",
    "layernorm_mlp.layer_norm_weight", "layernorm_mlp.layer_norm_bias", "layernorm_mlp.fc1_weight",
    "layernorm_mlp.fc1_bias", "layernorm_mlp.fc2_weight", "layernorm_mlp.fc2_bias", "layernorm_mlp._extra_state",
}  # fmt: skip
SELF = "self_attention.layernorm_qkv."
SPLIT = {key for key in PLAIN if key.startswith(SELF) and key.split(".")[-1].split("_")[0] in ("query", "key", "value")}


def layer(te: ModuleType, **options: Any) -> Any:
    return te.TransformerLayer(16, 24, 2, hidden_dropout=0.0, attention_dropout=0.0, device="cpu", **options)


def train(te: ModuleType, model: Any, recipe: Any, steps: int, seed: int) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(steps):
        with te.autocast(recipe=recipe):
            loss = model(torch.randn(5, 3, 16, generator=generator)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def in_memory(state: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer)  # with weights_only, as it is by default


@pytest.mark.parametrize(
    ("options", "gone", "come"),
    [
        ({}, set(), set()),
        ({"fuse_qkv_params": True}, SPLIT, {SELF + "weight", SELF + "bias"}),
        ({"normalization": "RMSNorm"}, {SELF + "layer_norm_bias", "layernorm_mlp.layer_norm_bias"}, set()),
        ({"qk_norm_type": "RMSNorm"}, set(),
         {f"self_attention.{n}_norm.{k}" for n in "qk" for k in ("weight", "_extra_state")}),
        ({"output_layernorm": True},
         {key for key in PLAIN if key.startswith(SELF)},
         {key.replace("layernorm_qkv", "qkv") for key in PLAIN if key.startswith(SELF) and "layer_norm" not in key}
         | {"layernorm.weight", "layernorm.bias", "layernorm._extra_state"}),
        ({"bias": False}, {k for k in PLAIN if k.endswith("bias") and "layer_norm" not in k.split(".")[-1]}, set()),
        ({"layer_type": "decoder"}, set(), {
            *(f"inter_attention.layernorm_query.{k}" for k in
              ("layer_norm_weight", "layer_norm_bias", "query_weight", "query_bias", "_extra_state")),
            *(f"inter_attention.key_value.{k}" for k in
              ("key_weight", "key_bias", "value_weight", "value_bias", "_extra_state")),
            *(f"inter_attention.proj.{k}" for k in ("weight", "bias", "_extra_state")),
            "inter_attention.core_attention._extra_state"}),
    ],
    ids=["default", "fused", "rms", "qk", "output", "bias", "decoder"],
)  # fmt: skip
def test_keys(te: ModuleType, recipe: ModuleType, options: Any, gone: set[str], come: set[str]) -> None:
    """Before and after training in FP8."""
    model = layer(te, **options)
    assert set(model.state_dict()) == PLAIN - gone | come
    extra = [value for key, value in model.state_dict().items() if key.endswith("_extra_state")]
    assert all(value.dtype == torch.uint8 and value.numel() == 0 for value in extra)
    if not options:
        train(te, model, recipe.DelayedScaling(amax_history_len=4), 2, 1)
        assert set(model.state_dict()) == PLAIN
        assert all(value.numel() == 0 for key, value in model.state_dict().items() if key.endswith("_extra_state"))


def test_keys_of_single_modules(te: ModuleType) -> None:
    assert set(te.Linear(4, 6, device="cpu").state_dict()) == {"weight", "bias", "_extra_state"}
    assert set(te.LayerNorm(4, device="cpu").state_dict()) == {"weight", "bias", "_extra_state"}
    assert set(te.RMSNorm(4, device="cpu").state_dict()) == {"weight", "_extra_state"}
    grouped = set(te.GroupedLinear(2, 4, 6, device="cpu").state_dict())
    assert grouped == {"weight0", "weight1", "bias0", "bias1", "_extra_state"}
    rope = te.RotaryPositionEmbedding(8)
    assert set(rope.state_dict()) == set()
    assert rope.load_state_dict({"inv_freq": torch.ones(4)}).unexpected_keys == []


def test_training_in_fp8_resumes_bit_for_bit(te: ModuleType, recipe: ModuleType) -> None:
    chosen = recipe.DelayedScaling(amax_history_len=4)
    model = layer(te)
    train(te, model, chosen, 5, 1)
    saved = in_memory(model.state_dict())
    other = layer(te)
    other.load_state_dict(saved)
    assert train(te, model, chosen, 3, 2) == train(te, other, chosen, 3, 2)
    for one, same in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, same)
    # In the metadata, which copies by hand lose: then scales start from the tensors.
    third = layer(te)
    third.load_state_dict(dict(saved))
    assert third.layernorm_mlp.fp8_state is None
    # A copy of the state dict keeps it.
    fourth = layer(te)
    fourth.load_state_dict(copy.deepcopy(saved))
    assert fourth.layernorm_mlp.fp8_state is not None


@pytest.mark.parametrize("who", ["te", "apex"])
def test_a_run_whose_optimizer_casts_the_weights_resumes_bit_for_bit(
    te: ModuleType, recipe: ModuleType, who: str
) -> None:
    """From a state dict, by a copy and by a pickle; what fp8_meta shows is as new as the last step's amaxes."""
    from apex.optimizers import FusedAdam

    def run(model: Any, optimizer: Any, first: int, steps: int) -> list[float]:
        losses = []
        for number in range(first, first + steps):
            x = torch.randn(5, 3, 16, generator=torch.Generator().manual_seed(number))
            with te.autocast(recipe=recipe.DelayedScaling(amax_history_len=4)):
                loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    kind = te.optimizers.FusedAdam if who == "te" else FusedAdam
    model = layer(te)
    optimizer = kind(model.parameters(), lr=0.02)
    run(model, optimizer, 0, 4)
    last = model.layernorm_mlp.fc1_weight.detach().abs().max()
    run(model, optimizer, 4, 1)
    history = model.layernorm_mlp.fp8_meta["scaling_fwd"].amax_history
    assert not history[0].any()
    assert history[-1, 1] == last != model.layernorm_mlp.fc1_weight.detach().abs().max()
    others = [layer(te), copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    others[0].load_state_dict(in_memory(model.state_dict()))
    state = in_memory(optimizer.state_dict())
    wanted = run(model, optimizer, 5, 3)
    for other in others:
        again = kind(other.parameters(), lr=0.02)
        again.load_state_dict(state)
        assert run(other, again, 5, 3) == wanted
        for one, same in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(one, same)


def test_state_that_was_there_does_not_outlive_other_weights(te: ModuleType, recipe: ModuleType) -> None:
    model = layer(te)
    train(te, model, recipe.DelayedScaling(amax_history_len=4), 2, 1)
    model.load_state_dict(layer(te).state_dict())
    assert model.layernorm_mlp.fp8_state is None


def test_state_dicts_of_torch_and_of_fusestep(te: ModuleType, recipe: ModuleType) -> None:
    """Strictly, without extra states, both ways."""
    linear, theirs = te.Linear(4, 6, device="cpu"), torch.nn.Linear(4, 6)
    linear.load_state_dict(theirs.state_dict())
    assert torch.equal(linear.weight, theirs.weight)
    theirs.load_state_dict(fp8.export_state_dict(linear.state_dict()))
    norm = te.LayerNorm(4, device="cpu")
    norm.load_state_dict(torch.nn.LayerNorm(4).state_dict())
    from fusestep import nn

    ours = nn.TransformerLayer(16, 24, 2, hidden_dropout=0.0, attention_dropout=0.0, attn_input_format="sbhd")
    train(te, ours, recipe.DelayedScaling(amax_history_len=4), 3, 1)
    model = layer(te)
    model.load_state_dict(ours.state_dict())
    chosen = recipe.DelayedScaling(amax_history_len=4)
    assert train(te, ours, chosen, 2, 2) == train(te, model, chosen, 2, 2)


def test_missing_and_unexpected_keys_are_still_told(te: ModuleType) -> None:
    state = layer(te).state_dict()
    del state["layernorm_mlp.fc1_weight"]
    state["layernorm_mlp.fc3_weight"] = torch.zeros(1)
    with pytest.raises(RuntimeError, match=r"(?s)Missing key.*fc1_weight.*Unexpected key.*fc3_weight"):
        layer(te).load_state_dict(state)


# What Transformer Engine pickled


def theirs(recipe: ModuleType, gemms: int, length: int = 4, seed: int = 0) -> dict[str, Any]:
    """FP8 state as Transformer Engine has it: three columns a product forward, two backward."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "recipe": recipe.DelayedScaling(amax_history_len=length),
        "scale_fwd": torch.rand(3 * gemms, generator=generator) + 1,
        "amax_history_fwd": torch.rand(length, 3 * gemms, generator=generator),
        "scale_bwd": torch.rand(2 * gemms, generator=generator) + 100,
        "amax_history_bwd": torch.rand(length, 2 * gemms, generator=generator),
        "extra_fp8_variables": {"num_gemms": gemms, "fp8_checkpoint": True, "fp8_max_fwd": 448.0},
    }


def as_bytes(state: Any) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(state)), dtype=torch.uint8)


def as_buffer(state: Any) -> io.BytesIO:
    """1.x: what torch.save writes, with inverse scales too."""
    buffer = io.BytesIO()
    torch.save({**state, "scale_inv_fwd": 1 / state["scale_fwd"], "scale_inv_bwd": 1 / state["scale_bwd"]}, buffer)
    return buffer


@pytest.mark.parametrize("pickled", [as_bytes, as_buffer], ids=["2.x", "1.x"])
@pytest.mark.parametrize("kind", ["Linear", "LayerNormMLP"])
def test_scales_and_histories_of_transformer_engine(
    te: ModuleType, recipe: ModuleType, pickled: Any, kind: str
) -> None:
    gemms = 2 if kind == "LayerNormMLP" else 1
    state = theirs(recipe, gemms)
    state["amax_history_fwd"][0] = 0  # between steps nothing is pending
    state["amax_history_bwd"][0] = 0
    state["amax_history_fwd"][1:3, 1] = 0  # a weight that was seen once
    model = getattr(te, kind)(6, 10, device="cpu")
    weights = {k: v for k, v in model.state_dict().items() if k != "_extra_state"}
    model.load_state_dict({**weights, "_extra_state": pickled(state)})
    meta = model.fp8_meta
    forward = [i for i in range(3 * gemms) if i % 3 != 2]
    assert torch.equal(meta["scaling_fwd"].scale[forward], state["scale_fwd"][forward])
    assert torch.equal(meta["scaling_fwd"].amax_history[:, forward], state["amax_history_fwd"][:, forward])
    assert torch.equal(meta["scaling_bwd"].scale[::2], state["scale_bwd"][::2])
    assert torch.equal(meta["scaling_bwd"].amax_history[:, ::2], state["amax_history_bwd"][:, ::2])
    assert meta["recipe"].amax_history_len == 4
    # The next step goes on from there: the newest of four amaxes is the new one.
    x = torch.full((2, 6), 0.5)
    x[0, 0] = 3.0
    with te.autocast(recipe=recipe.DelayedScaling(amax_history_len=4)):
        model(x).sum().backward()
    if kind == "Linear":
        history = model.fp8_meta["scaling_fwd"].amax_history[:, 0].tolist()
        assert history == pytest.approx([0.0, *state["amax_history_fwd"][2:, 0].tolist(), 3.0])
        assert float(model.fp8_meta["scaling_fwd"].scale[0]) == pytest.approx(448 / 3)


def test_amaxes_that_were_pending_enter_the_history(te: ModuleType, recipe: ModuleType) -> None:
    state = theirs(recipe, 1)
    state["amax_history_fwd"][0, 0] = 7.0
    model = te.Linear(6, 10, device="cpu")
    model.load_state_dict({**model.state_dict(), "_extra_state": as_bytes(state)})
    scaling = model.fp8_meta["scaling_fwd"]
    assert float(scaling.amax_history[-1, 0]) == 7.0
    assert float(scaling.scale[0]) == pytest.approx(64.0)


def test_a_state_that_saw_nothing_starts_from_the_tensors(te: ModuleType, recipe: ModuleType) -> None:
    state = theirs(recipe, 1)
    for name, value in state.items():
        if isinstance(value, Tensor):
            value.fill_(1.0 if name.startswith("scale") else 0.0)
    model = te.Linear(6, 10, device="cpu")
    model.load_state_dict({**model.state_dict(), "_extra_state": as_bytes(state)})
    assert not model.fp8_state.scale.any()


@pytest.mark.parametrize(
    "value", [None, io.BytesIO(), torch.empty(0, dtype=torch.uint8)], ids=["None", "buffer", "empty"]
)
def test_extra_states_that_say_nothing(te: ModuleType, value: Any) -> None:
    model = layer(te)
    state = {key: value if key.endswith("_extra_state") else v for key, v in model.state_dict().items()}
    assert model.load_state_dict(state).missing_keys == []
    assert model.layernorm_mlp.fp8_state is None


def test_state_of_attention_and_of_stateless_recipes_is_passed_over(te: ModuleType, recipe: ModuleType) -> None:
    model = layer(te)
    state = model.state_dict()
    state["self_attention.core_attention._extra_state"] = as_bytes(theirs(recipe, 3))
    state["layernorm_mlp._extra_state"] = as_bytes({"recipe": recipe.Float8CurrentScaling(), "extra_fp8_variables": {}})
    model.load_state_dict(state)
    assert model.layernorm_mlp.fp8_state is None


class Evil:
    """A pickle that touches a file as it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("pickled", [as_bytes, as_buffer], ids=["2.x", "1.x"])
@pytest.mark.parametrize("place", ["recipe", "scale_fwd", "extra_fp8_variables"])
def test_no_code_of_a_pickle_runs(te: ModuleType, recipe: ModuleType, tmp_path: Path, pickled: Any, place: str) -> None:
    state = theirs(recipe, 1)
    folder = tmp_path / "made"
    if pickled is as_buffer:
        buffer = io.BytesIO()
        torch.save({**state, place: Evil(folder)}, buffer)
        extra: Any = buffer
    else:
        extra = as_bytes({**state, place: Evil(folder)})
    model = te.Linear(6, 10, device="cpu")
    with pytest.raises(RuntimeError, match=r"_extra_state: .*names (posix|nt)\.mkdir.*delete the key"):
        model.load_state_dict({**model.state_dict(), "_extra_state": extra})
    assert not folder.exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda state: state.update(scale_fwd=torch.ones(2)), "there are 2 scales fwd"),
        (lambda state: state.pop("amax_history_bwd"), "amax_history_bwd is missing"),
        (lambda state: state.update(amax_history_fwd=torch.ones(4)), "history of"),
    ],
)
def test_state_that_does_not_fit_is_told(te: ModuleType, recipe: ModuleType, change: Any, words: str) -> None:
    state = theirs(recipe, 1)
    change(state)
    model = te.Linear(6, 10, device="cpu")
    with pytest.raises(RuntimeError, match=words):
        model.load_state_dict({**model.state_dict(), "_extra_state": as_bytes(state)})
    with pytest.raises(RuntimeError, match="holds no FP8 state"):
        model.load_state_dict({**model.state_dict(), "_extra_state": torch.ones(3)})
    with pytest.raises(RuntimeError, match="cannot be read"):
        model.load_state_dict({**model.state_dict(), "_extra_state": torch.ones(3, dtype=torch.uint8)})


def test_ordinary_containers_hold_the_modules(te: ModuleType, recipe: ModuleType) -> None:
    """Prefixes, shared modules and metadata of a whole model."""
    model = torch.nn.Sequential(OrderedDict(one=layer(te), two=te.Linear(16, 16, device="cpu")))
    chosen = recipe.DelayedScaling(amax_history_len=4)
    train(te, model, chosen, 3, 1)
    other = torch.nn.Sequential(OrderedDict(one=layer(te), two=te.Linear(16, 16, device="cpu")))
    other.load_state_dict(in_memory(model.state_dict()))
    assert train(te, model, chosen, 2, 2) == train(te, other, chosen, 2, 2)
    whole = copy.deepcopy(model)
    assert train(te, model, chosen, 2, 3) == train(te, whole, chosen, 2, 3)
