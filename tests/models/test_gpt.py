"""The GPT in its three forms."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fusestep
from fusestep.errors import UserError
from fusestep.models import GPT, GPTConfig
from fusestep.models.config import Form
from fusestep.nn import FusedLayerNorm
from fusestep.optim import FusedAdam

FORMS: tuple[Form, ...] = ("seed", "plain", "fused")

#: Odd and small, no two sizes equal.
SMALL = GPTConfig(vocab_size=31, width=24, heads=3, layers=2, ffn_width=40, context=13)


def build(form: Form, seed: int = 1, **changes: object) -> GPT:
    torch.manual_seed(seed)
    return GPT(dataclasses.replace(SMALL, form=form, **changes))


def perturb(model: GPT) -> GPT:
    """Random biases and norm weights: initial values of 0 and 1 would hide what is not used."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model


def some_tokens(rows: int = 3, columns: int = 11, symbols: int = 31) -> Tensor:
    return torch.randint(0, symbols, (rows, columns))


def reference_logits(state: dict[str, Tensor], config: GPTConfig, tokens: Tensor) -> Tensor:
    """The model written out in float64, one head and one query at a time, from the shared names alone."""
    p = {name: value.double() for name, value in state.items()}

    def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight + bias

    def gelu(x: Tensor) -> Tensor:
        return 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))

    rows = []
    for row in tokens:
        x = p["embedding.weight"][row] + p["position.weight"][: len(row)]
        for i in range(config.layers):
            a, m = f"blocks.{i}.self_attention.", f"blocks.{i}.layernorm_mlp."
            y = norm(x, p[a + "layernorm_qkv.layer_norm_weight"], p[a + "layernorm_qkv.layer_norm_bias"])
            q, k, v = (y @ p[a + "layernorm_qkv.weight"].T + p[a + "layernorm_qkv.bias"]).chunk(3, -1)
            size = config.width // config.heads
            attended = torch.zeros_like(x)
            for h in range(config.heads):
                part = slice(h * size, (h + 1) * size)
                for t in range(len(row)):
                    scores = k[: t + 1, part] @ q[t, part] / size**0.5
                    attended[t, part] = scores.softmax(0) @ v[: t + 1, part]
            x = x + attended @ p[a + "proj.weight"].T + p[a + "proj.bias"]
            y = norm(x, p[m + "layer_norm_weight"], p[m + "layer_norm_bias"])
            x = x + gelu(y @ p[m + "fc1_weight"].T + p[m + "fc1_bias"]) @ p[m + "fc2_weight"].T + p[m + "fc2_bias"]
        x = norm(x, p["final_norm.weight"], p["final_norm.bias"])
        rows.append(x @ p["embedding.weight" if config.tied_head else "head.weight"].T)
    return torch.stack(rows)


@pytest.mark.parametrize("tied_head", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_logits_are_those_of_the_formula(form: Form, tied_head: bool, device: torch.device) -> None:
    model = perturb(build(form, tied_head=tied_head)).to(device)
    tokens = some_tokens()
    state = {name: value.cpu() for name, value in model.state_dict().items()}
    expected = reference_logits(state, model.config, tokens)
    torch.testing.assert_close(model(tokens.to(device)).cpu().double(), expected, rtol=1e-4, atol=1e-4)
    # The fast paths of evaluation, too.
    with torch.no_grad():
        evaluated = model.eval()(tokens.to(device)).cpu().double()
    torch.testing.assert_close(evaluated, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("norm", [None, "fused"])
@pytest.mark.parametrize("other", ["seed", "plain"])
def test_forms_agree_in_logits_and_gradients(other: Form, norm: str | None, device: torch.device) -> None:
    fused, other_model = perturb(build("fused")).to(device), build(other, seed=2, norm=norm).to(device)
    other_model.load_state_dict(fused.state_dict(), strict=True)
    tokens, targets = some_tokens().to(device), some_tokens().to(device)
    losses = []
    for model in (fused, other_model):
        losses.append(F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()))
        losses[-1].backward()
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-5)
    # Parameters of all forms come in the same order.
    for (name, ours), theirs in zip(fused.named_parameters(), other_model.parameters(), strict=True):
        torch.testing.assert_close(theirs.grad, ours.grad, rtol=1e-3, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
        assert ours.grad.abs().max() > 0


@pytest.mark.parametrize("tied_head", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_the_loss_and_its_gradients_are_those_of_the_logits(form: Form, tied_head: bool, device: torch.device) -> None:
    model = perturb(build(form, tied_head=tied_head)).to(device).double()
    tokens, targets = some_tokens().to(device), some_tokens().to(device)
    targets[0, :2] = -100
    for reduction in ("mean", "sum", "none"):
        wanted = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction=reduction)
        found = model.loss(tokens, targets, reduction=reduction)
        torch.testing.assert_close(found, wanted.view(found.shape))
        parameters = list(model.parameters())
        theirs = torch.autograd.grad(wanted.sum(), parameters)
        for ours, other in zip(torch.autograd.grad(found.sum(), parameters), theirs, strict=True):
            torch.testing.assert_close(ours, other, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("tied_head", [False, True])
def test_all_forms_have_the_same_state_dict(tied_head: bool) -> None:
    block = [
        "self_attention.layernorm_qkv.layer_norm_weight",
        "self_attention.layernorm_qkv.layer_norm_bias",
        "self_attention.layernorm_qkv.weight",
        "self_attention.layernorm_qkv.bias",
        "self_attention.proj.weight",
        "self_attention.proj.bias",
        "layernorm_mlp.layer_norm_weight",
        "layernorm_mlp.layer_norm_bias",
        "layernorm_mlp.fc1_weight",
        "layernorm_mlp.fc1_bias",
        "layernorm_mlp.fc2_weight",
        "layernorm_mlp.fc2_bias",
    ]
    names = ["embedding.weight", "position.weight"]
    names += [f"blocks.{i}.{name}" for i in range(2) for name in block]
    names += ["final_norm.weight", "final_norm.bias"] + ([] if tied_head else ["head.weight"])
    for form in FORMS:
        state = build(form, tied_head=tied_head).state_dict()
        assert list(state) == names
        assert state["blocks.1.self_attention.layernorm_qkv.weight"].shape == (72, 24)
        assert state["blocks.1.layernorm_mlp.fc2_weight"].shape == (24, 40)


@pytest.mark.parametrize("source", FORMS)
@pytest.mark.parametrize("target", FORMS)
def test_state_dicts_load_strictly_both_ways_and_are_not_changed_by_it(source: Form, target: Form) -> None:
    saved = perturb(build(source)).state_dict()
    kept = {name: value.clone() for name, value in saved.items()}
    model = build(target, seed=2)
    model.load_state_dict(saved, strict=True)
    assert list(saved) == list(kept)
    for name, value in model.state_dict().items():
        assert torch.equal(value, kept[name]), name


@pytest.mark.parametrize("form", FORMS)
def test_a_missing_and_an_unexpected_key_are_refused(form: Form) -> None:
    state = build(form).state_dict()
    state["blocks.0.extra"] = torch.zeros(1)
    with pytest.raises(RuntimeError, match=r"Unexpected key\(s\).*extra"):
        build(form).load_state_dict(state)
    del state["blocks.0.extra"], state["blocks.1.self_attention.proj.bias"]
    with pytest.raises(RuntimeError, match=r"Missing key\(s\)"):
        build(form).load_state_dict(state)


@pytest.mark.parametrize("tied_head", [False, True])
def test_one_seed_gives_all_forms_the_same_weights(tied_head: bool) -> None:
    first = build("fused", tied_head=tied_head).state_dict()
    for form in ("seed", "plain"):
        for name, value in build(form, tied_head=tied_head).state_dict().items():
            assert torch.equal(value, first[name]), name
    assert not torch.equal(build("fused", seed=2).embedding.weight, first["embedding.weight"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_seed_gives_the_same_weights_on_every_device_and_in_every_dtype(
    device: torch.device, dtype: torch.dtype
) -> None:
    expected = build("plain").state_dict()
    torch.manual_seed(1)
    for name, value in GPT(dataclasses.replace(SMALL, form="plain"), device=device, dtype=dtype).state_dict().items():
        assert torch.equal(value.cpu(), expected[name].to(dtype)), name


@pytest.mark.parametrize("form", FORMS)
def test_initial_values_are_those_documented(form: Form) -> None:
    torch.manual_seed(3)
    model = GPT(GPTConfig(vocab_size=200, width=128, heads=4, layers=1, ffn_width=300, context=150, form=form))
    for name, value in model.state_dict().items():
        if value.dim() == 2:
            assert value.std() == pytest.approx(0.023, rel=0.03), name
            assert abs(float(value.mean())) < 0.001, name
        else:
            assert torch.equal(value, torch.full_like(value, 0.0 if name.endswith("bias") else 1.0)), name


def test_optimizer_state_of_one_form_goes_on_in_another() -> None:
    """Parameters come in the same order, which is all that an optimizer's state dict knows of them."""
    losses = {}
    tokens, targets = some_tokens(), some_tokens()
    for second in ("plain", "seed"):
        model = build("plain")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for step in range(6):
            if step == 3:
                state, moments = model.state_dict(), optimizer.state_dict()
                model = build(second, seed=5)
                model.load_state_dict(state)
                optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
                optimizer.load_state_dict(moments)
            loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses[second] = loss.item()
    assert losses["seed"] == pytest.approx(losses["plain"], rel=1e-4)


@pytest.mark.parametrize("form", FORMS)
def test_a_token_sees_only_those_before_it(form: Form) -> None:
    model = perturb(build(form))
    tokens = some_tokens()
    changed = tokens.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % 31
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(after[:, :7], before[:, :7])
    assert not torch.allclose(after[:, 7], before[:, 7])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(1, 1), (1, 13), (5, 2), (0, 4)])
def test_edge_shapes(form: Form, shape: tuple[int, int]) -> None:
    assert build(form)(some_tokens(*shape)).shape == (*shape, 31)


@pytest.mark.parametrize("form", FORMS)
def test_dropout_acts_while_training_alone(form: Form) -> None:
    model = build(form, dropout=0.5)
    tokens = some_tokens()
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))
    plain = build("plain")
    plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(model(tokens), plain(tokens), rtol=1e-4, atol=1e-5)


class DropoutShapes(TorchDispatchMode):
    """Notes the number of elements that each dropout draws for."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.bernoulli_, torch.ops.aten.native_dropout):
            self.drawn.append(args[0].numel())
            assert args[1] in (0.4, 0.6)  # dropped, or kept
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("form", FORMS)
def test_dropout_is_of_embeddings_attention_weights_and_both_branches(form: Form) -> None:
    model = build(form, dropout=0.4)
    with DropoutShapes() as seen:
        model(some_tokens(3, 11))
    stream, attention = 3 * 11 * 24, 3 * 3 * 11 * 11
    assert seen.drawn == [stream, *[attention, stream, stream] * 2]
    with DropoutShapes() as seen:
        model.eval()(some_tokens(3, 11))
    assert seen.drawn == []


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("form", FORMS)
def test_checkpointed_blocks_give_the_same_gradients(form: Form, dropout: float) -> None:
    model = build(form, dropout=dropout)
    tokens = some_tokens()
    gradients = []
    for checkpoint_blocks in (False, True):
        model.checkpoint_blocks = checkpoint_blocks
        model.zero_grad()
        torch.manual_seed(7)
        model(tokens).square().sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    for plain, recomputed in zip(*gradients, strict=True):
        assert torch.equal(plain, recomputed)


def test_checkpointed_blocks_keep_less() -> None:
    model = build("fused", layers=4)
    kept = []
    for checkpoint_blocks in (False, True):
        model.checkpoint_blocks = checkpoint_blocks
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, s=sizes: s.append(t.numel()) or t, lambda t: t):
            model(some_tokens())
        kept.append(sum(sizes))
    assert kept[1] < kept[0] / 3


@pytest.mark.parametrize("form", FORMS)
def test_meta_models_are_filled_by_reset_parameters(form: Form) -> None:
    config = dataclasses.replace(SMALL, form=form)
    model = GPT(config, device="meta")
    assert {p.device.type for p in model.parameters()} == {"meta"}
    with torch.device("meta"):
        assert next(GPT(config).parameters()).device.type == "meta"
    model.to_empty(device="cpu")
    torch.manual_seed(1)
    model.reset_parameters()
    for name, value in build(form).state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_parameters_have_the_dtype_asked_for(form: Form, dtype: torch.dtype) -> None:
    model = GPT(dataclasses.replace(SMALL, form=form), dtype=dtype)
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert model(some_tokens()).dtype == dtype


@pytest.mark.parametrize("form", FORMS)
def test_autocast_computes_in_bf16_and_stays_close(form: Form, device: torch.device) -> None:
    model, tokens = build(form).to(device), some_tokens().to(device)
    with torch.autocast(device.type, torch.bfloat16):
        logits = model(tokens)
    assert logits.dtype == torch.bfloat16
    logits.float().square().sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())
    exact = model(tokens)
    assert (logits - exact).norm() / exact.norm() < 0.02


class FloatsCast(TorchDispatchMode):
    """Notes the shapes of what is cast from one floating-point dtype to another, and of sums; numbers apart."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[torch.Size] = []
        self.added: list[torch.Size] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten._to_copy, torch.ops.aten.copy_):
            source = args[-1] if func.overloadpacket is torch.ops.aten.copy_ else args[0]
            if source.is_floating_point() and source.dim() and result.dtype is not source.dtype:
                self.shapes.append(source.shape)
        if func.overloadpacket in (torch.ops.aten.add, torch.ops.aten.add_) and result.dim():
            self.added.append(result.shape)
        return result


def test_a_step_under_autocast_adds_nothing_and_casts_what_a_cpu_must_alone(device: torch.device) -> None:
    model, tokens = build("fused").to(device), some_tokens().to(device)
    optimizer = FusedAdam(model.parameters(), lr=1e-3)

    def gradients() -> None:
        with torch.autocast(device.type, torch.bfloat16):
            loss = model.loss(tokens, tokens)
        loss.backward()

    for _ in range(2):  # the first step writes the copies that the second multiplies by
        gradients()
        optimizer.step()
        optimizer.zero_grad()
    with FloatsCast() as cast:
        gradients()
    # On a CPU torch's products give the gradients of weights in bf16: of four in each layer.
    weights = [one.shape for one in model.blocks.parameters() if one.dim() > 1]
    assert sorted(cast.shapes) == (sorted(weights) if device.type == "cpu" else [])
    assert not cast.added


@pytest.mark.parametrize("form", FORMS)
def test_the_head_multiplies_the_norm_as_autocast_would_cast_it(form: Form, device: torch.device) -> None:
    model, tokens = perturb(build(form)).to(device), some_tokens().to(device)
    with torch.autocast(device.type, torch.bfloat16):
        hidden = model._hidden(tokens)
        logits = model(tokens)
    weight = model.head.weight.to(torch.bfloat16)
    assert hidden.dtype == (torch.bfloat16 if form == "fused" else torch.float32)
    assert torch.equal(logits, F.linear(hidden.to(torch.bfloat16), weight))


@pytest.mark.parametrize("form", FORMS)
def test_copies_are_independent_and_equal(form: Form) -> None:
    model, tokens = build(form), some_tokens()
    twin = copy.deepcopy(model)
    assert torch.equal(twin(tokens), model(tokens))
    perturb(twin)
    assert not torch.equal(twin(tokens), model(tokens))
    # The hooks that translate names go with the copy.
    again = build(form, seed=9)
    again.load_state_dict(twin.state_dict())
    assert torch.equal(again(tokens), twin(tokens))


def test_a_tied_head_is_the_embedding() -> None:
    model, tokens = build("fused", tied_head=True), some_tokens(symbols=30)
    before = model(tokens)
    with torch.no_grad():
        model.embedding.weight[30] += 1
    after = copy.deepcopy(model)(tokens)
    # Id 30 occurs in no input, so only its logit moves, and only through the head.
    assert torch.equal(after[..., :30], before[..., :30])
    assert not torch.allclose(after[..., 30], before[..., 30])
    model(tokens)[..., 30].sum().backward()
    assert model.embedding.weight.grad[30].abs().max() > 0


# Dynamo looks at autograd functions in a way that torch itself deprecates.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("form", FORMS)
def test_the_compiled_model_gives_the_same_logits_and_saves_loadable_names(form: Form) -> None:
    model, tokens = build(form), some_tokens()
    compiled = torch.compile(model, backend="eager")
    torch.testing.assert_close(compiled(tokens), model(tokens))
    names = [name.removeprefix("_orig_mod.") for name in compiled.state_dict()]
    assert names == list(model.state_dict())


@pytest.mark.parametrize("form", FORMS)
def test_wrong_tokens_are_refused_in_a_sentence(form: Form) -> None:
    model = build(form)
    for tokens, message in (
        (torch.zeros(1, 14, dtype=torch.int64), "a sequence of 14 tokens does not fit the context of 13"),
        (torch.zeros(1, 0, dtype=torch.int64), "a sequence of 0 tokens does not fit"),
        (torch.zeros(5, dtype=torch.int64), r"torch\.int64 of shape \(5,\); give int64 ids of shape"),
        (torch.zeros(1, 5), r"tokens are torch\.float32"),
        (torch.zeros(1, 5, dtype=torch.uint8), r"tokens are torch\.uint8"),
        (torch.tensor([[3, 31]]), "token id 31 is outside the vocabulary of 31"),
        (torch.tensor([[-1, 3]]), "token id -1 is outside"),
    ):
        with pytest.raises(UserError, match=message):
            model(tokens)


@pytest.mark.parametrize(("form", "norm", "fused_norms"), [("seed", None, 0), ("seed", "fused", 5), ("fused", None, 1)])
def test_norms_are_whose_the_config_says(form: Form, norm: str | None, fused_norms: int) -> None:
    model = build(form, norm=norm)
    assert sum(isinstance(module, FusedLayerNorm) for module in model.modules()) == fused_norms


def test_explain_tells_what_the_norms_run_as() -> None:
    rows = {row.path: row for row in fusestep.explain(build("fused")).modules}
    for path in ("blocks.0.self_attention.layernorm_qkv", "blocks.1.layernorm_mlp"):
        assert rows[path].is_ours
        assert rows[path].implementation == rows["final_norm"].implementation
        assert rows["final_norm"].reason in rows[path].reason
    assert rows["blocks.1.self_attention.core_attention"].is_ours
    rows = {row.path: row for row in fusestep.explain(build("plain")).modules}
    assert rows["blocks.0.layernorm_mlp"].implementation == "torch"
    assert not rows["blocks.0.layernorm_mlp"].is_fallback


def test_description_gives_count_and_dimensions() -> None:
    assert build("fused", vocab_size=64, padded_from=31, tied_head=True).describe() == (
        "fused GPT: 0.0 M parameters | 2 layers × 24 wide, 3 heads, feed-forward 40, context 13, "
        "vocabulary 31 (padded to 64), head tied"
    )


@pytest.mark.interpreter
def test_the_fused_form_agrees_through_the_kernels() -> None:
    fused, seed = perturb(build("fused", layers=1)), build("seed", layers=1)
    seed.load_state_dict(fused.state_dict())
    tokens = some_tokens(1, 3)
    for model in (fused, seed):
        model(tokens).square().sum().backward()
    torch.testing.assert_close(fused(tokens), seed(tokens), rtol=1e-4, atol=1e-4)
    for ours, theirs in zip(fused.parameters(), seed.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
def test_the_check_of_ids_does_not_make_the_host_wait(no_waiting: Callable[[], AbstractContextManager[None]]) -> None:
    model, tokens = build("fused").cuda(), some_tokens().cuda()
    model(tokens)
    with no_waiting():
        model(tokens).sum().backward()
