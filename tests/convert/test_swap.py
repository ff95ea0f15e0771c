"""What a converted model keeps: objects, parameters, names, hooks, flags, copies, pickles; and what undo gives back."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parametrizations, parametrize, weight_norm

from fusestep import convert
from fusestep.convert.classes import is_converted
from fusestep.convert.norms import FusedNorm
from fusestep.errors import UserError
from fusestep.fp8 import Float8CurrentScaling
from fusestep.nn import FusedLayerNorm
from fusestep.optim import FusedAdam


@pytest.fixture
def decoder(models: SimpleNamespace) -> nn.Module:
    model: nn.Module = models.Decoder()
    return model


def tokens() -> Tensor:
    return torch.randint(0, 51, (2, 7))


def everything(model: nn.Module) -> list[tuple[str, int, type, frozenset[str]]]:
    """Every module of a model: path, object, class, and the names of all that it holds."""
    return [(path, id(module), type(module), frozenset(module.__dict__)) for path, module in model.named_modules()]


def bits(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_objects_parameters_names_and_bits_stay(decoder: nn.Module) -> None:
    decoder.layers[1].requires_grad_(False)
    decoder.layers[2].eval()
    modules = dict(decoder.named_modules())
    parameters = dict(decoder.named_parameters(remove_duplicate=False))
    state, flags = bits(decoder), [(p.requires_grad, p.dtype, p.device) for p in decoder.parameters()]
    training = [module.training for module in decoder.modules()]
    generator = torch.get_rng_state()
    report = convert(decoder)
    assert len(report.swapped) == 3 * 4 + 1
    assert torch.equal(torch.get_rng_state(), generator)
    assert dict(decoder.named_modules()) == modules
    after = dict(decoder.named_parameters(remove_duplicate=False))
    assert after.keys() == parameters.keys()
    assert all(after[name] is parameters[name] for name in after)
    assert after["lm_head.weight"] is after["embed_tokens.weight"]
    assert equal(bits(decoder), state)
    assert [(p.requires_grad, p.dtype, p.device) for p in decoder.parameters()] == flags
    assert [module.training for module in decoder.modules()] == training
    assert all(parameter.grad is None for parameter in decoder.parameters())


def test_undo_gives_back_what_was_there_also_after_training(decoder: nn.Module) -> None:
    before, state = everything(decoder), bits(decoder)
    convert(decoder).undo()
    assert everything(decoder) == before
    assert equal(bits(decoder), state)

    report = convert(decoder)
    optimizer = FusedAdam(decoder.parameters(), lr=1e-2)
    for _ in range(3):
        decoder(tokens()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    trained = bits(decoder)
    assert not equal(trained, state)
    report.undo()
    assert everything(decoder) == before
    assert equal(bits(decoder), trained)
    report.undo()  # a second time does nothing
    assert everything(decoder) == before


def test_the_result_is_the_old_one_and_optimizer_state_stays_valid(models: SimpleNamespace) -> None:
    """Two copies train alike; one is converted after its second step and taken back after its fourth."""
    losses: list[list[float]] = []
    for converts in (False, True):
        torch.manual_seed(3)
        model = models.Decoder()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        rows = []
        for step in range(6):
            if converts and step == 2:
                report = convert(model)
            if converts and step == 4:
                report.undo()
            loss = nn.functional.cross_entropy(model(tokens()).flatten(0, 1), torch.randint(0, 51, (14,)))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            rows.append(loss.item())
        losses.append(rows)
    plain, converted = losses
    assert converted[:2] == plain[:2]
    assert converted == pytest.approx(plain, rel=1e-5)
    assert len({round(loss, 4) for loss in plain}) == 6


def test_state_dicts_go_both_ways(models: SimpleNamespace) -> None:
    old, new = models.Decoder(), models.Decoder()
    convert(new)
    new.load_state_dict(old.state_dict())
    x = tokens()
    torch.testing.assert_close(new(x), old(x), rtol=1e-4, atol=1e-5)
    third = models.Decoder()
    third.load_state_dict(new.state_dict())
    assert torch.equal(third(x), old(x))


def test_hooks_are_called_as_before_and_their_handles_remove_them(decoder: nn.Module) -> None:
    seen: list[str] = []
    norm, mlp, layer = decoder.norm, decoder.layers[0].mlp, decoder.layers[1]
    handles = [
        norm.register_forward_hook(lambda module, args, output: seen.append("after the norm")),
        mlp.register_forward_pre_hook(lambda module, args: seen.append("before the mlp")),
        layer.post_attention_layernorm.register_forward_hook(lambda module, args, output: seen.append("second norm")),
        layer.mlp.up_proj.register_full_backward_hook(lambda module, gi, go: seen.append("gradient of up")),
    ]
    convert(decoder)
    assert seen == []  # trials call no hook
    handles.append(decoder.layers[2].post_attention_layernorm.register_forward_hook(lambda *_: seen.append("later")))
    decoder(tokens()).sum().backward()
    assert seen == ["before the mlp", "second norm", "later", "after the norm", "gradient of up"]
    for handle in handles:
        handle.remove()
    decoder(tokens()).sum().backward()
    assert len(seen) == 5


def test_hooks_on_tensors_and_gradients_see_nothing_of_a_trial(decoder: nn.Module) -> None:
    fired: list[int] = []
    decoder.norm.weight.register_hook(lambda gradient: fired.append(1))
    decoder.norm.weight.register_post_accumulate_grad_hook(lambda parameter: fired.append(2))
    decoder.norm.weight.grad = torch.full_like(decoder.norm.weight, 5.0)
    convert(decoder)
    assert fired == []
    assert bool((decoder.norm.weight.grad == 5.0).all())
    decoder(tokens()).sum().backward()
    assert fired == [1, 2]


def test_copies_and_pickles_are_converted_models_of_their_own(decoder: nn.Module) -> None:
    report = convert(decoder)
    x = tokens()
    wanted = decoder(x)
    saved = io.BytesIO()
    torch.save(decoder, saved)
    saved.seek(0)
    copies = [
        copy.deepcopy(decoder),
        pickle.loads(pickle.dumps(decoder)),
        torch.load(saved, weights_only=False),
    ]
    report.undo()
    for other in copies:
        assert torch.equal(other(x), wanted)
        assert type(other.norm).__name__ == "FusedPlainRMSNorm"
        assert other.norm.weight is not decoder.norm.weight
        assert other.lm_head.weight is other.embed_tokens.weight
        assert convert(other).swapped == ()
    assert torch.equal(copy.deepcopy(copies[0])(x), wanted)


def test_a_module_in_two_places_is_swapped_once_and_stays_shared() -> None:
    shared = nn.LayerNorm(8)
    model = nn.Sequential(shared, nn.Linear(8, 8), shared)
    report = convert(model)
    assert [row.path for row in report.rows] == ["0"]
    assert model[0] is model[2] is shared
    assert isinstance(shared, FusedLayerNorm)
    report.undo()
    assert type(shared) is nn.LayerNorm


def test_the_model_itself_may_be_what_is_swapped() -> None:
    norm = nn.LayerNorm(8)
    report = convert(norm)
    assert isinstance(norm, FusedLayerNorm)
    assert str(report).splitlines()[1].startswith("(the model)  LayerNorm")


def test_subclasses_stay_what_they_are(models: SimpleNamespace) -> None:
    class Named(nn.LayerNorm):
        def describe(self) -> str:
            return "mine"

    class Overriding(nn.LayerNorm):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.float()).type_as(x)

    model = nn.Sequential(Named(8), Overriding(8))
    report = convert(model)
    assert isinstance(model[0], Named)
    assert isinstance(model[0], FusedLayerNorm)
    assert model[0].describe() == "mine"
    assert type(model[1]) is Overriding
    assert report.left[0].reason == "Overriding overrides the forward of nn.LayerNorm"


def _parametrized() -> nn.Module:
    return parametrizations.weight_norm(nn.LayerNorm(8), dim=0)


def _replaced() -> nn.Module:
    norm = nn.LayerNorm(8)
    norm.forward = lambda x: x  # type: ignore[method-assign]
    return norm


def _old_weight_norm() -> nn.Module:
    with pytest.warns(FutureWarning):
        return weight_norm(nn.LayerNorm(8))


def _quantised() -> nn.Module:
    norm = nn.LayerNorm(8)
    norm.weight = nn.Parameter(torch.ones(8, dtype=torch.int8), requires_grad=False)
    return norm


class Odd(torch.Tensor):
    """A subclass, as quantisers make them."""


def _subclassed() -> nn.Module:
    norm = nn.LayerNorm(8)
    norm.weight = nn.Parameter(torch.ones(8).as_subclass(Odd))
    return norm


def _inference() -> nn.Module:
    with torch.inference_mode():
        return nn.LayerNorm(8)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (_parametrized, "parametrized"),
        (_old_weight_norm, "its weight is computed from others"),
        (_replaced, "its forward is replaced on the object itself"),
        (_quantised, "its weight is quantised (torch.int8)"),
        (_subclassed, "its weight is a Odd"),
        (lambda: torch.jit.script(nn.LayerNorm(8)), "it is scripted"),
        (_inference, "its weight was made in inference mode"),
    ],
    ids=["parametrized", "weight_norm", "forward replaced", "int8", "subclass of Tensor", "scripted", "inference mode"],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_is_known_but_cannot_be_swapped_says_why(make: Any, words: str) -> None:
    norm = make()
    before = type(norm)
    report = convert(nn.Sequential(norm))
    assert report.swapped == ()
    assert type(norm) is before
    assert words in report.left[0].reason


def test_low_rank_wrappers_stay_untouched(models: SimpleNamespace) -> None:
    class LowRank(nn.Module):
        """As adapters' libraries wrap a layer."""

        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base_layer = base
            self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, 4, bias=False)})
            self.lora_B = nn.ModuleDict({"default": nn.Linear(4, base.out_features, bias=False)})

        def forward(self, x: Tensor) -> Tensor:
            return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))

    decoder = models.Decoder()
    for parameter in decoder.parameters():
        parameter.requires_grad_(False)
    for layer in decoder.layers:
        layer.mlp.gate_proj = LowRank(layer.mlp.gate_proj)
    wrappers = [layer.mlp.gate_proj for layer in decoder.layers]
    x = tokens()
    before = decoder(x)
    report = convert(decoder)
    assert len(report.swapped) == 3 * 4 + 1
    assert [layer.mlp.gate_proj for layer in decoder.layers] == wrappers
    assert all(type(wrapper) is LowRank for wrapper in wrappers)
    y = decoder(x)
    torch.testing.assert_close(y, before, rtol=1e-4, atol=1e-5)
    y.sum().backward()
    trained = {name for name, p in decoder.named_parameters() if p.grad is not None}
    assert trained == {name for name, _ in decoder.named_parameters() if "lora" in name}


def test_skip_dry_run_and_a_second_conversion(decoder: nn.Module) -> None:
    before = everything(decoder)
    planned = convert(decoder, dry_run=True)
    assert everything(decoder) == before
    assert "would be swapped: 13; left as they are: 0." in str(planned)
    first = convert(decoder, skip=["layers"])
    assert [row.path for row in first.rows] == ["norm"]
    second = convert(decoder)
    assert {row.path: row.reason for row in second.left} == {"norm": "it was converted before"}
    assert len(second.swapped) == 12
    second.undo()
    assert type(decoder.norm).__name__ == "FusedPlainRMSNorm"
    first.undo()
    assert everything(decoder) == before
    assert [row.became for row in planned.rows if row.path == "norm"] == ["FusedPlainRMSNorm"]


def test_repeated_layers_are_each_tried(decoder: nn.Module) -> None:
    """The second of two layers that look alike has a value that no trial of the first can know."""
    with torch.no_grad():
        decoder.layers[1].post_attention_layernorm.weight[3] = torch.nan
    report = convert(decoder)
    reasons = {row.path: row.reason for row in report.left}
    assert reasons.keys() == {"layers.1.post_attention_layernorm", "layers.1"}
    assert reasons["layers.1.post_attention_layernorm"].startswith("disagrees")


def test_a_trial_without_memory_leaves_the_module(decoder: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(type(decoder.layers[0].mlp.up_proj), "forward", full)
    reasons = {row.path: row.reason for row in convert(decoder).left}
    assert reasons["layers.0.mlp"] == "there is no memory left to try it"
    assert isinstance(decoder.norm, FusedNorm)


def test_undo_refuses_what_has_become_something_else_since(decoder: nn.Module) -> None:
    report = convert(decoder)
    parametrize.register_parametrization(decoder.norm, "weight", nn.Identity())
    swapped = everything(decoder)
    with pytest.raises(UserError, match="undo: norm has become a Parametrized"):
        report.undo()
    assert everything(decoder) == swapped  # nothing was undone
    parametrize.remove_parametrizations(decoder.norm, "weight")
    report.undo()
    assert type(decoder.norm).__name__ == "PlainRMSNorm"


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[DeviceMesh]:
    """A process group of one."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.FileStore(str(tmp_path / "store"), 1))
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_available(), reason="torch was built without torch.distributed")
def test_sharding_comes_after_conversion_and_undo_before(models: SimpleNamespace, alone: DeviceMesh) -> None:
    model, x = models.Decoder(layers=2), tokens()
    wanted = model(x)
    report = convert(model)
    for layer in model.layers:
        fully_shard(layer, mesh=alone)
    torch.testing.assert_close(model(x), wanted, rtol=1e-4, atol=1e-5)
    model(x).sum().backward()
    with pytest.raises(UserError, match=r"undo: layers\.0 has become a FSDP"):
        report.undo()

    sharded = models.Decoder(layers=2)
    for layer in sharded.layers:
        fully_shard(layer, mesh=alone)
    reasons = {row.path: row.reason for row in convert(sharded).left}
    assert reasons["layers.1.input_layernorm"] == "its weight is sharded: convert before the model is"
    assert reasons["layers.0.mlp"] == "its gate_proj.weight is sharded: convert before the model is"


def test_wrapped_in_data_parallel_the_inside_is_converted(models: SimpleNamespace, alone: DeviceMesh) -> None:
    model, x = models.Decoder(layers=1), tokens()
    wanted = model(x)
    wrapped = nn.parallel.DistributedDataParallel(model)
    report = convert(wrapped)
    assert len(report.swapped) == 5
    torch.testing.assert_close(wrapped(x), wanted, rtol=1e-4, atol=1e-5)
    wrapped(x).sum().backward()
    report.undo()
    assert torch.equal(wrapped(x), wanted)


def test_an_error_on_the_way_leaves_the_model_as_it_was(decoder: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    from fusestep.convert import engine

    before, calls = everything(decoder), []

    def become(module: nn.Module, *arguments: Any) -> None:
        calls.append(module)
        if len(calls) == 6:
            raise KeyboardInterrupt
        original(module, *arguments)

    original = engine.become
    monkeypatch.setattr(engine, "become", become)
    with pytest.raises(KeyboardInterrupt):
        convert(decoder)
    assert len(calls) == 6
    assert everything(decoder) == before


def test_on_the_meta_device_random_weights_stand_in(models: SimpleNamespace) -> None:
    with torch.device("meta"):
        model = models.Decoder()
        odd = models.PlainRMSNorm(8)
    odd.forward = odd.forward  # replaced, if by itself
    model.odd = odd
    report = convert(model)
    assert len(report.swapped) == 13
    assert [row.path for row in report.left] == ["odd"]
    assert all(parameter.is_meta for parameter in model.parameters())
    del model.odd
    model.to_empty(device="cpu")
    source = models.Decoder()
    model.load_state_dict(source.state_dict())
    model.frequencies.copy_(source.frequencies)
    x = tokens()
    torch.testing.assert_close(model(x), source(x), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiled_models_follow_both_ways(models: SimpleNamespace) -> None:
    torch._dynamo.reset()
    model = models.Decoder(layers=1)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    x = tokens()
    before = compiled(x)
    report = convert(compiled)  # the wrapper, as scripts hold it
    assert len(report.swapped) == 5
    after = compiled(x)
    assert not torch.equal(after, before)  # other sums, so other last bits: the new forward was traced
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-5)
    after.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    report.undo()
    assert torch.equal(compiled(x), before)


def test_activation_checkpointing_and_no_grad(decoder: nn.Module) -> None:
    convert(decoder)
    layer = decoder.layers[0]
    x = torch.randn(2, 5, 32, requires_grad=True)
    angles = torch.randn(2, 5, 8)
    rotation = (angles.cos(), angles.sin())
    plain = layer(x, position_embeddings=rotation)
    (wanted,) = torch.autograd.grad(plain.square().sum(), x)
    kept = torch.utils.checkpoint.checkpoint(layer, x, None, rotation, use_reentrant=False)
    (found,) = torch.autograd.grad(kept.square().sum(), x)
    torch.testing.assert_close(found, wanted)
    with torch.inference_mode():
        assert torch.equal(layer(x, position_embeddings=rotation), plain)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"model": 3}, "convert: int is no torch.nn.Module"),
        ({"skip": "layers"}, "skip is 'layers'; pass a list of patterns"),
        ({"fp8_skip": [3]}, r"fp8_skip is \[3\]"),
        ({"fp8": "delayed"}, "fp8 is 'delayed'; pass a recipe such as"),
        ({"fp8_keep_blocks": 2}, "fp8_keep_blocks is 2; pass how many"),
        ({"fp8_keep_blocks": (0, 1)}, "but fp8 is None; pass fp8 too"),
        ({"fp8_skip": ["0"]}, "but fp8 is None; pass fp8 too"),
    ],
)
def test_bad_arguments_are_one_sentence(arguments: dict[str, Any], words: str) -> None:
    model = nn.Sequential(nn.LayerNorm(4))
    with pytest.raises(UserError, match=words):
        convert(arguments.pop("model", model), **arguments)
    assert type(model[0]) is nn.LayerNorm


def test_a_block_that_gives_a_tuple_is_no_block_that_gives_a_tensor(models: SimpleNamespace) -> None:
    class Old(models.DecoderLayer):  # type: ignore[misc, name-defined]
        def forward(self, hidden_states: Tensor, attention_mask: Any = None, position_embeddings: Any = None) -> Any:
            return (super().forward(hidden_states, attention_mask, position_embeddings),)

    layer, x, angles = Old(32, 4, 56), torch.randn(2, 7, 32), torch.randn(2, 7, 8)
    wanted = layer(x, position_embeddings=(angles.cos(), angles.sin()))
    report = convert(nn.Sequential(layer))
    assert [row.reason for row in report.left] == ["disagrees: it gives output where the old one gives output[0]"]
    found = layer(x, position_embeddings=(angles.cos(), angles.sin()))
    assert isinstance(found, tuple)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "around",
    [
        lambda: torch.device("meta"),
        lambda: torch.autocast("cpu", torch.bfloat16),
        torch.no_grad,
        torch.inference_mode,
    ],
    ids=["default device", "autocast", "no_grad", "inference mode"],
)
def test_what_is_set_around_a_conversion_is_no_part_of_its_trials(models: SimpleNamespace, around: Any) -> None:
    decoder, encoder = models.Decoder(layers=1), models.EncoderClassifier()
    with around():
        reports = [convert(decoder), convert(encoder)]
    assert [len(report.swapped) for report in reports] == [5, 9]
    assert [len(report.left) for report in reports] == [0, 0]


def test_classes_with_constructors_and_registers_of_their_own_are_swapped_and_copied() -> None:
    register: dict[str, type] = {}

    class Registering(nn.LayerNorm):
        def __new__(cls, width: int) -> Any:  # noqa: ARG004
            return super().__new__(cls)

        def __init_subclass__(cls, *, kind: int, **kwargs: Any) -> None:
            super().__init_subclass__(**kwargs)
            register[f"{cls.__name__} {kind}"] = cls

    class Registered(Registering, kind=3):
        pass

    norm, x = Registered(8), torch.randn(3, 8)
    before = norm(x)
    report = convert(nn.Sequential(norm))
    assert isinstance(norm, FusedLayerNorm)
    assert register == {"Registered 3": Registered}
    torch.testing.assert_close(copy.deepcopy(norm)(x), before)
    report.undo()
    assert type(norm) is Registered


class FourBits(nn.Parameter):
    """As quantisers make them: what is needed to read it is an attribute."""

    table: Tensor


class FourBitLinear(nn.Module):
    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features = in_features
        self.weight = FourBits(torch.randint(0, 16, (out_features, in_features), dtype=torch.uint8), False)
        self.weight.table = torch.randn(16) / 8
        self.seen: list[torch.Size] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.shape)
        return nn.functional.linear(x, self.weight.table[self.weight.long()])


def test_around_quantised_layers_all_is_swapped_and_trials_leave_nothing_in_them(models: SimpleNamespace) -> None:
    mlp, x = models.GatedMLP(32, 56), torch.randn(3, 32)
    mlp.gate_proj, mlp.up_proj, mlp.down_proj = FourBitLinear(32, 56), FourBitLinear(32, 56), FourBitLinear(56, 32)
    wanted = mlp(x)
    for layer in mlp.children():
        getattr(layer, "seen", []).clear()
    report = convert(nn.Sequential(mlp))
    assert [row.kind for row in report.swapped] == ["GatedMLP"]
    assert mlp.gate_proj.seen == []
    torch.testing.assert_close(mlp(x), wanted)
    assert len(mlp.gate_proj.seen) == 1


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_parts_that_are_compiled_by_themselves_run_uncompiled_in_trials(models: SimpleNamespace) -> None:
    calls: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        calls.append(inputs)
        return graph

    torch._dynamo.reset()
    model, x = models.Decoder(layers=2), tokens()
    wanted = model(x)
    model.layers[0].mlp.compile(backend=backend)
    model.layers[1].mlp = torch.compile(model.layers[1].mlp, backend=backend)
    report = convert(model)
    assert calls == []
    assert len(report.swapped) == 2 * 4 + 1
    torch.testing.assert_close(model(x), wanted, rtol=1e-4, atol=1e-5)
    assert calls  # and compiled afterwards


def test_a_module_in_two_places_is_skipped_by_either_name_and_a_name_of_none_is_told() -> None:
    model = nn.ModuleDict({"a": nn.LayerNorm(8), "c": nn.LayerNorm(8)})
    model["b"] = model["a"]
    report = convert(model, skip=["b", "layer.0"])
    assert [row.path for row in report.rows] == ["c"]
    assert report.unmatched == ("layer.0",)
    assert str(report).endswith("\nskipped nothing, since no module's path matches: 'layer.0'.")
    assert report.as_dict()["unmatched"] == ["layer.0"]


class Copying(nn.LayerNorm):
    """Copies itself by its constructor, as modules of some libraries do."""

    def __deepcopy__(self, memo: Any) -> Any:
        other = type(self)(*self.normalized_shape)
        other.load_state_dict(self.state_dict())
        return other


def test_the_constructor_of_a_converted_class_makes_a_plain_module(models: SimpleNamespace) -> None:
    model = nn.Sequential(models.DecoderLayer(32, 4, 56), Copying(8), nn.Linear(8, 8))
    convert(model, fp8=Float8CurrentScaling())
    for module, given in ((model[0], (32, 4, 56)), (model[0].mlp, (32, 56)), (model[1], (8,)), (model[2], (8, 8))):
        assert is_converted(module)
        made = type(module)(*given)
        assert not any(is_converted(one) for one in made.modules())
        assert isinstance(module, type(made))
    assert type(model)(nn.ReLU())(torch.ones(2)).tolist() == [1, 1]
    other, x = copy.deepcopy(model[1]), torch.randn(3, 8)
    assert type(other) is Copying
    torch.testing.assert_close(other(x), model[1](x))
    assert list(inspect.signature(type(model[2])).parameters)[:3] == ["in_features", "out_features", "bias"]


def test_what_has_no_shape_yet_stays_and_all_around_it_is_swapped(models: SimpleNamespace) -> None:
    model = nn.ModuleList([models.GatedMLP(8, 12), nn.LayerNorm(8), nn.Embedding(5, 8), nn.LazyLinear(5)])
    model[0].up_proj = nn.LazyLinear(12)
    report = convert(model, fp8=Float8CurrentScaling())
    reasons = {row.path: row.reason for row in report.left}
    assert reasons["0"] == "its up_proj.weight has no shape yet: call the model once before"
    assert reasons["3"] == "its weight has no shape yet: call the model once before"
    assert {row.path for row in report.swapped} == {"0.gate_proj", "0.down_proj", "1"}


def test_a_traced_model_keeps_its_own_way_of_being_pickled() -> None:
    traced = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)))
    report = convert(traced, fp8=Float8CurrentScaling())
    assert [row.path for row in report.swapped] == ["0", "1"]
    assert report.left[0].reason.startswith("it is copied and pickled in a way of its own (__reduce__): call it within")
    x = torch.randn(3, 8)
    assert torch.equal(pickle.loads(pickle.dumps(traced))(x), traced(x))
