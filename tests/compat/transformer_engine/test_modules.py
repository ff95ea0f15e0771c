"""Modules under Transformer Engine's names against float64 of the tests' own, and what their arguments mean."""

from __future__ import annotations

import copy
import math
import pickle
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from fusestep.compat import report
from fusestep.errors import UserError

CPU = {"device": "cpu"}


def close(found: Tensor, wanted: Tensor, tolerance: float = 2e-5) -> None:
    assert found.shape == wanted.shape
    error = (found.double() - wanted.double()).abs().max() / wanted.double().abs().max().clamp(min=1e-12)
    assert error < tolerance, error


def norm64(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float = 1e-5) -> Tensor:
    x = x.double()
    centred = x - x.mean(-1, keepdim=True)
    y = centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()
    return y if bias is None else y + bias.double()


def attend64(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, scale: float | None = None, bias: Any = 0.0) -> Tensor:
    """(batch, heads, sequence, size); keep broadcastable to the scores."""
    q, k, v = q.double(), k.double(), v.double()
    scores = q @ k.transpose(-1, -2) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale) + bias
    scores = scores.masked_fill(~keep, -math.inf)
    return scores.softmax(-1) @ v


def fill(module: torch.nn.Module) -> None:
    """Parameters that are neither 0 nor 1."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)


def layer64(layer: Any, x: Tensor, heads: int) -> Tensor:
    """A default TransformerLayer on (batch, sequence, width), attention causal over the sequence."""
    p = {name: value.detach().double() for name, value in layer.named_parameters()}
    prefix = "self_attention.layernorm_qkv."
    n = norm64(x, p[prefix + "layer_norm_weight"], p[prefix + "layer_norm_bias"])
    parts = [
        (n @ p[prefix + f"{part}_weight"].t() + p[prefix + f"{part}_bias"]).unflatten(-1, (heads, -1)).transpose(1, 2)
        for part in ("query", "key", "value")
    ]
    s = x.shape[1]
    mixed = attend64(*parts, torch.ones(s, s, dtype=torch.bool).tril()).transpose(1, 2).flatten(2)
    x = x.double() + mixed @ p["self_attention.proj.weight"].t() + p["self_attention.proj.bias"]
    n = norm64(x, p["layernorm_mlp.layer_norm_weight"], p["layernorm_mlp.layer_norm_bias"])
    h = n @ p["layernorm_mlp.fc1_weight"].t() + p["layernorm_mlp.fc1_bias"]
    h = 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
    return x + h @ p["layernorm_mlp.fc2_weight"].t() + p["layernorm_mlp.fc2_bias"]


@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
def test_a_layer_attends_over_the_dimension_that_its_layout_names(te: ModuleType, layout: str) -> None:
    layer = te.TransformerLayer(21, 35, 3, hidden_dropout=0.0, attention_dropout=0.0, attn_input_format=layout, **CPU)
    fill(layer)
    x = torch.randn(5, 7, 21)
    over_second = layer64(layer, x.transpose(0, 1), 3).transpose(0, 1) if layout == "sbhd" else layer64(layer, x, 3)
    close(layer(x), over_second)


def test_the_default_layout_has_the_sequence_first_and_says_so_once(te: ModuleType) -> None:
    options = {"hidden_dropout": 0.0, "attention_dropout": 0.0, **CPU}
    layer, chosen = (
        te.TransformerLayer(16, 24, 2, **options),
        te.TransformerLayer(16, 24, 2, attn_input_format="sbhd", **options),
    )
    chosen.load_state_dict(layer.state_dict())
    x = torch.randn(3, 9, 16)
    assert torch.equal(layer(x), chosen(x))
    (hint,) = report.snapshot().hints
    assert "of 3" in hint
    assert "of 9" in hint
    layer(torch.randn(2, 9, 16))  # only the first call is looked at
    te.MultiheadAttention(16, 2, **CPU)(torch.randn(4, 9, 16))  # and one line is enough
    assert len(report.snapshot().hints) == 1


@pytest.mark.parametrize("what", ["chosen", "longer", "bidirectional"])
def test_no_advice_where_the_layout_is_not_suspicious(te: ModuleType, what: str) -> None:
    options: dict[str, Any] = {"chosen": {"qkv_format": "sbhd"}, "bidirectional": {"attn_mask_type": "no_mask"}}
    attention = te.MultiheadAttention(16, 2, attention_dropout=0.0, **options.get(what, {}), **CPU)
    attention(torch.randn(9, 3, 16) if what == "longer" else torch.randn(3, 9, 16))
    assert report.snapshot().hints == []


@pytest.mark.parametrize("kind", ["TransformerLayer", "MultiheadAttention", "DotProductAttention"])
def test_the_layout_that_fusestep_run_was_asked_for(te: ModuleType, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setenv("FUSESTEP_TE_LAYOUT", "bshd")
    name = "attn_input_format" if kind == "TransformerLayer" else "qkv_format"
    sizes = {"TransformerLayer": (16, 24, 2), "MultiheadAttention": (16, 2), "DotProductAttention": (2, 8)}[kind]
    device = {} if kind == "DotProductAttention" else CPU
    assert getattr(getattr(te, kind)(*sizes, **device), name) == "bshd"
    assert getattr(getattr(te, kind)(*sizes, **{name: "sbhd"}, **device), name) == "sbhd"  # the script has the say
    q = torch.randn(3, 9, 2, 8)
    angles = te.RotaryPositionEmbedding(8)(9)
    turned = te.attention.rope.apply_rotary_pos_emb(q, angles)
    assert torch.equal(turned, te.attention.rope.apply_rotary_pos_emb(q, angles, "bshd"))


def test_parameters_start_as_transformer_engine_fills_them(te: ModuleType) -> None:
    layer = te.TransformerLayer(64, 256, 4, params_dtype=torch.bfloat16, **CPU)
    for name, parameter in layer.named_parameters():
        assert parameter.dtype == torch.bfloat16
        if parameter.dim() == 2:
            assert float(parameter.detach().float().std()) == pytest.approx(0.023, rel=0.05), name
        else:
            assert bool((parameter == (1.0 if name.endswith("norm_weight") else 0.0)).all()), name
    zero_centred = te.RMSNorm(8, zero_centered_gamma=True, **CPU)
    assert bool((zero_centred.weight == 0).all())
    filled = te.Linear(4, 6, init_method=lambda w: w.fill_(0.5), **CPU)
    assert bool((filled.weight == 0.5).all())


def test_linear_variants(te: ModuleType) -> None:
    x = torch.randn(3, 5, 7)
    layer = te.Linear(7, 9, return_bias=True, parameters_split={"a": 4, "b_": 5}, **CPU)
    fill(layer)
    assert sorted(name for name, _ in layer.named_parameters()) == ["a_bias", "a_weight", "b_bias", "b_weight"]
    y, bias = layer(x)
    close(y, x.double() @ torch.cat((layer.a_weight, layer.b_weight)).double().t())
    assert torch.equal(bias, torch.cat((layer.a_bias, layer.b_bias)))
    y, bias = te.Linear(7, 9, bias=False, return_bias=True, **CPU)(x)
    assert bias.shape == (0,)  # not None
    y, bias, normed = te.LayerNormLinear(7, 9, return_bias=True, return_layernorm_output=True, **CPU)(x)
    close(normed, norm64(x, torch.ones(7), torch.zeros(7)))
    assert (y.shape, bias.shape) == ((3, 5, 9), (9,))


def test_norms_cast_their_input_to_the_weight(te: ModuleType) -> None:
    x = torch.randn(4, 11, dtype=torch.bfloat16)
    norm = te.LayerNorm(hidden_size=11, params_dtype=torch.float32, **CPU)
    fill(norm)
    assert norm(x).dtype == torch.float32
    close(norm(x), norm64(x, norm.weight, norm.bias))
    assert te.RMSNorm(11, dtype=torch.bfloat16, sm_margin=4, **CPU)(x.float()).dtype == torch.bfloat16
    for both in ({"hidden_size": 11, "normalized_shape": 11}, {}):
        with pytest.raises(UserError, match="normalized_shape and hidden_size are two names"):
            te.LayerNorm(**both, **CPU)
    with pytest.raises(UserError, match="dtype and params_dtype"):
        te.LayerNorm(11, dtype=torch.float32, params_dtype=torch.float32, **CPU)
    with pytest.raises(TypeError, match="elementwise_affine"):
        te.LayerNorm(11, elementwise_affine=False, **CPU)


def test_an_mlp_that_computes_its_forward_again(te: ModuleType) -> None:
    plain = te.LayerNormMLP(12, 20, activation="swiglu", normalization="RMSNorm", **CPU)
    again = te.LayerNormMLP(12, 20, activation="swiglu", normalization="RMSNorm", checkpoint=True, **CPU)
    again.load_state_dict(plain.state_dict())
    gradients = []
    for module in (plain, again):
        x = torch.linspace(-1, 2, 60).view(5, 12).requires_grad_()
        module(x).square().sum().backward()
        gradients.append([x.grad, *(p.grad for p in module.parameters())])
    for one, other in zip(*gradients, strict=True):
        assert one is not None
        assert torch.equal(one, other)


@pytest.mark.parametrize("in_fp8", [False, True])
def test_grouped_linear_is_a_linear_layer_for_each_share_of_the_rows(
    te: ModuleType, recipe: ModuleType, in_fp8: bool
) -> None:
    """In FP8 bit for bit what layers of their own would give."""
    group = te.GroupedLinear(3, 6, 5, **CPU)
    fill(group)
    singles = []
    for i in range(3):
        single = te.Linear(6, 5, **CPU)
        single.load_state_dict({"weight": getattr(group, f"weight{i}"), "bias": getattr(group, f"bias{i}")})
        singles.append(single)
    splits = [4, 0, 7]
    for step in range(3):
        x, other = torch.randn(11, 6).requires_grad_(), None
        other = x.detach().clone().requires_grad_()
        with te.autocast(in_fp8, recipe=recipe.DelayedScaling(amax_history_len=2)):
            y = group(x, torch.tensor(splits) if step else splits)
            parts = [single(part) for single, part in zip(singles, other.split(splits), strict=True) if part.numel()]
        dy = torch.randn(11, 5)
        y.backward(dy)
        torch.cat(parts).backward(dy)
        assert torch.equal(y, torch.cat(parts))
        assert torch.equal(x.grad, other.grad)
        for i, single in enumerate(singles):
            for name in ("weight", "bias"):
                gradient = getattr(group, f"{name}{i}").grad
                if splits[i]:
                    assert torch.equal(gradient, getattr(single, name).grad)
                else:
                    assert not gradient.any()
                    assert gradient.shape == getattr(single, name).shape
    if in_fp8:
        assert group.fp8_meta["num_gemms"] == 3
        scale = group.fp8_meta["scaling_fwd"].scale
        assert scale.shape == (9,)
        assert torch.equal(scale[6:], singles[2].fp8_meta["scaling_fwd"].scale)
        assert bool((scale[3:6] == 1).all())  # the second saw nothing
        assert torch.equal(group.fp8_meta["scaling_bwd"].scale[4:], singles[2].fp8_meta["scaling_bwd"].scale)
    with pytest.raises(UserError, match=r"m_splits is \[4, 0, 6\] for 11 rows"):
        group(torch.randn(11, 6), [4, 0, 6])


def test_packed_queries_keys_and_values(te: ModuleType) -> None:
    attention = te.DotProductAttention(3, 8)
    qkv = torch.randn(6, 2, 3, 3, 8)
    parts = qkv.unbind(2)
    assert torch.equal(attention(qkv_layer=qkv), attention(*parts))
    kv = torch.randn(6, 2, 3, 2, 8)
    by_two = attention(parts[0], kv_layer=kv, qkv_interleave_dim=-2)
    assert torch.equal(by_two, attention(parts[0], *kv.unbind(-2)))
    with pytest.raises(TypeError, match="query_layer"):
        attention(parts[0])


@pytest.mark.parametrize("mask_type", ["no_mask", "padding", "arbitrary"])
@pytest.mark.parametrize("bottom_right", [None, True, False])
def test_windows_begin_at_the_last_query_and_key(te: ModuleType, mask_type: str, bottom_right: bool | None) -> None:
    """For masks that are not causal, unless bottom_right_diagonal is False."""
    sq, sk, window = 4, 7, (2, 1)
    q, k, v = torch.randn(2, sq, 3, 8), torch.randn(2, sk, 3, 8), torch.randn(2, sk, 3, 8)
    real_q, real_k = torch.tensor([4, 3]), torch.tensor([7, 5])
    given: Any = None
    keep = torch.ones(2, 1, sq, sk, dtype=torch.bool)
    shift = torch.full((2, 1, 1, 1), sk - sq)
    if mask_type == "padding":
        padded_q, padded_k = torch.arange(sq) >= real_q[:, None], torch.arange(sk) >= real_k[:, None]
        given = (padded_q[:, None, None], padded_k[:, None, None])
        keep = ~padded_q[:, None, :, None] & ~padded_k[:, None, None]
        shift = (real_k - real_q)[:, None, None, None]
    elif mask_type == "arbitrary":
        given = torch.rand(2, 1, sq, sk) > 0.8
        keep = ~given
    if bottom_right is False:
        shift = torch.zeros_like(shift)
    place = torch.arange(sk) - torch.arange(sq)[:, None] - shift
    keep = keep & (place >= -window[0]) & (place <= window[1])
    attention = te.DotProductAttention(
        3, 8, qkv_format="bshd", attn_mask_type=mask_type, window_size=window, bottom_right_diagonal=bottom_right
    )
    found = attention(q, k, v, given).unflatten(-1, (3, 8))
    wanted = attend64(*(one.transpose(1, 2) for one in (q, k, v)), keep).transpose(1, 2)
    seen = keep.any(-1)[:, 0]
    close(found[seen], wanted[seen])
    assert not found[~seen].any()


@pytest.mark.parametrize("mask_type", ["no_mask", "causal"])
def test_alibi_is_measured_from_the_diagonal_of_the_mask(te: ModuleType, mask_type: str) -> None:
    sq, sk = 4, 6
    q, k, v = torch.randn(1, sq, 4, 8), torch.randn(1, sk, 4, 8), torch.randn(1, sk, 4, 8)
    shift = 0 if mask_type == "causal" else sk - sq
    place = torch.arange(sk) - torch.arange(sq)[:, None] - shift
    slopes = 2.0 ** (-2.0 * torch.arange(1, 5, dtype=torch.float64))
    keep = (place <= 0) if mask_type == "causal" else torch.ones(sq, sk, dtype=torch.bool)
    attention = te.DotProductAttention(4, 8, qkv_format="bshd", attn_mask_type=mask_type)
    found = attention(q, k, v, core_attention_bias_type="alibi")
    wanted = attend64(*(one.transpose(1, 2) for one in (q, k, v)), keep, bias=-slopes[:, None, None] * place.abs())
    close(found, wanted.transpose(1, 2).flatten(2))


def test_the_core_of_attention_computed_again_for_backward(te: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = te.TransformerLayer(
        16, 24, 2, hidden_dropout=0.0, attention_dropout=0.0, layer_type="decoder", attn_input_format="bshd", **CPU
    )
    x, encoded = torch.randn(2, 5, 16), torch.randn(2, 3, 16)
    import transformer_engine.pytorch.attention.dot_product_attention as module

    calls: list[int] = []
    recompute = module.recompute
    monkeypatch.setattr(module, "recompute", lambda *args, **options: calls.append(1) or recompute(*args, **options))
    gradients = []
    for checkpoints in (False, True):
        layer.zero_grad()
        layer(x, encoder_output=encoded, checkpoint_core_attention=checkpoints).square().sum().backward()
        gradients.append([p.grad.clone() for p in layer.parameters()])
        assert len(calls) == 2 * checkpoints  # of the layer's own attention, and of that to the encoder
    assert layer.self_attention.core_attention.checkpoints is False
    for one, other in zip(*gradients, strict=True):
        close(other, one)


def test_options_of_one_call_do_not_stay(te: ModuleType) -> None:
    attention = te.MultiheadAttention(
        16, 2, attention_dropout=0.0, attention_type="cross", attn_mask_type="no_mask", window_size=(1, 0),
        qkv_format="bshd", **CPU,
    )  # fmt: skip
    x, encoded = torch.randn(2, 4, 16), torch.randn(2, 7, 16)
    usual = attention(x, encoder_output=encoded)
    other = attention(x, encoder_output=encoded, bottom_right_diagonal=False)
    assert not torch.equal(usual, other)
    assert torch.equal(usual, attention(x, encoder_output=encoded))


def test_gradients_of_weights_go_to_main_grad(te: ModuleType) -> None:
    layer = te.TransformerLayer(16, 24, 2, fuse_wgrad_accumulation=True, hidden_dropout=0.0, attention_dropout=0.0,
                                params_dtype=torch.bfloat16, **CPU)  # fmt: skip
    plain = te.TransformerLayer(
        16, 24, 2, hidden_dropout=0.0, attention_dropout=0.0, params_dtype=torch.bfloat16, **CPU
    )
    plain.load_state_dict(layer.state_dict())
    for parameter in layer.parameters():
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
    x = torch.randn(3, 2, 16, dtype=torch.bfloat16)
    for _ in range(2):
        layer(x).square().sum().backward()
    plain(x).square().sum().backward()
    for (name, one), other in zip(layer.named_parameters(), plain.parameters(), strict=True):
        if one.dim() == 2:
            assert one.grad is None, name
            assert torch.equal(one.main_grad, 2 * other.grad.float()), name
            assert not hasattr(one, "grad_added_to_main_grad"), name
        else:
            assert torch.equal(one.grad, 2 * other.grad), name
            assert not one.main_grad.any(), name
    other = te.Linear(4, 4, fuse_wgrad_accumulation=True, **CPU)
    with pytest.raises(UserError, match="no main_grad"):
        other(torch.randn(2, 4)).sum().backward()


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "meta", "assigned"])
def test_new_weights_of_a_module_accumulate_too(te: ModuleType, way: str) -> None:
    made = te.Linear(6, 5, fuse_wgrad_accumulation=True, device="meta" if way == "meta" else "cpu")
    if way == "deepcopy":
        made = copy.deepcopy(made)
    elif way == "pickle":
        made = pickle.loads(pickle.dumps(made))
    elif way == "meta":
        made = made.to_empty(device="cpu")
        made.reset_parameters()
    else:
        made.load_state_dict(te.Linear(6, 5, **CPU).state_dict(), assign=True)
        made.weight.requires_grad_()
    made.weight.main_grad = torch.ones(5, 6)
    x = torch.randn(3, 6)
    for _ in range(2):
        made(x).sum().backward()
    assert made.weight.grad is None
    torch.testing.assert_close(made.weight.main_grad, 1 + 2 * x.sum(0).expand(5, 6))


def test_megatrons_hooks_find_a_gradient_that_was_added_already(te: ModuleType) -> None:
    made = te.Linear(6, 5, fuse_wgrad_accumulation=True, **CPU)
    weight, x = made.weight, torch.randn(3, 6)
    weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(5, 6), False
    for _ in range(2):
        made(x).sum().backward()
    assert weight.grad_added_to_main_grad
    assert weight.grad is not None
    torch.testing.assert_close(weight.main_grad, 2 * x.sum(0).expand(5, 6))


def test_initial_weights_and_dropout_from_a_tracker(te: ModuleType) -> None:
    def built() -> tuple[Tensor, Tensor]:
        tracker = te.CudaRNGStatesTracker()
        tracker.add("model-parallel-rng", 12)
        torch.manual_seed(7)
        attention = te.MultiheadAttention(16, 2, attention_dropout=0.5, get_rng_state_tracker=lambda: tracker, **CPU)
        mixed = attention(torch.linspace(-1, 1, 6 * 2 * 16).view(6, 2, 16))
        return mixed.detach(), torch.rand(3)

    first, after = built()
    torch.manual_seed(7)
    assert torch.equal(after, torch.rand(3))  # the ordinary stream was not drawn from
    second, _ = built()
    assert torch.equal(first, second)


def test_without_a_gpu_the_default_device_is_the_cpu_and_that_is_said(
    te: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert te.Linear(4, 4).weight.device.type == "cpu"
    te.TransformerLayer(8, 8, 1)
    assert te.LayerNorm(4, device="cuda:0").weight.device.type == "cpu"
    assert len([record for record in caplog.records if "on the CPU" in record.getMessage()]) == 1
    assert te.Linear(4, 4, device="meta").weight.is_meta


@pytest.mark.parametrize("layout", ["sbhd", "bshd", "thd"])
def test_the_parts_of_a_layer_go_by_their_names(te: ModuleType, layout: str) -> None:
    layer = te.TransformerLayer(
        16, 24, 2, attn_input_format=layout, output_layernorm=True, qk_norm_type="RMSNorm", **CPU
    )
    kinds = {name: type(module) for name, module in layer.named_modules()}
    assert kinds == {
        "": te.TransformerLayer,
        "self_attention": te.MultiheadAttention,
        "self_attention.qkv": te.Linear,
        "self_attention.q_norm": te.RMSNorm,
        "self_attention.k_norm": te.RMSNorm,
        "self_attention.core_attention": te.DotProductAttention,
        "self_attention.proj": te.Linear,
        "layernorm_mlp": te.LayerNormMLP,
        "layernorm": te.LayerNorm,
    }


def test_shapes_that_upstream_refuses_in_fp8(te: ModuleType, recipe: ModuleType) -> None:
    """Nine tokens, odd widths, one token, none."""
    layer = te.LayerNormMLP(33, 19, **CPU)
    for rows in (9, 1, 0):
        x = torch.randn(1, rows, 33, requires_grad=True)
        with te.autocast(recipe=recipe.Float8CurrentScaling()):
            y = layer(x)
        y.sum().backward()
        assert y.shape == x.grad.shape == (1, rows, 33)
