"""MultiheadAttention and TransformerLayer against the composition written out in float64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusestep import fp8
from fusestep.errors import UserError
from fusestep.nn import LayerNorm, MultiheadAttention, RMSNorm, TransformerLayer
from fusestep.nn.rotary import RotaryPositionEmbedding

W, FFN, H = 24, 20, 6

#: What Transformer Engine's state dict of a layer holds, `_extra_state` apart.
SPLIT_NAMES = [
    "self_attention.layernorm_qkv.layer_norm_weight",
    "self_attention.layernorm_qkv.layer_norm_bias",
    "self_attention.layernorm_qkv.query_weight",
    "self_attention.layernorm_qkv.key_weight",
    "self_attention.layernorm_qkv.value_weight",
    "self_attention.layernorm_qkv.query_bias",
    "self_attention.layernorm_qkv.key_bias",
    "self_attention.layernorm_qkv.value_bias",
    "self_attention.proj.weight",
    "self_attention.proj.bias",
    "layernorm_mlp.layer_norm_weight",
    "layernorm_mlp.layer_norm_bias",
    "layernorm_mlp.fc1_weight",
    "layernorm_mlp.fc1_bias",
    "layernorm_mlp.fc2_weight",
    "layernorm_mlp.fc2_bias",
]


def build(kind: type[Any] = TransformerLayer, *, seed: int = 1, spread: float = 0.3, **options: Any) -> Any:
    """A module whose every parameter matters."""
    torch.manual_seed(seed)
    sizes = (W, FFN, H) if kind is TransformerLayer else (W, H)
    if kind is TransformerLayer:
        options = {"hidden_dropout": 0.0, **options}
    module = kind(*sizes, **{"attention_dropout": 0.0, **options})
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=spread)
    return module


def state(module: Any) -> dict[str, Tensor]:
    return {name: value.detach().double().requires_grad_() for name, value in module.named_parameters()}


def norm(x: Tensor, p: dict[str, Tensor], prefix: str, normalization: str, centred: bool, eps: float = 1e-5) -> Tensor:
    weight = p[prefix + "weight"] + (1 if centred else 0)
    if normalization == "LayerNorm":
        x = x - x.mean(-1, keepdim=True)
    y = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight
    return y + p[prefix + "bias"] if prefix + "bias" in p else y


def affine(x: Tensor, p: dict[str, Tensor], weight: str, bias: str) -> Tensor:
    y = x @ p[weight].t()
    return y + p[bias] if bias in p else y


def rotated(t: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """(B, S, heads, D) by (S, D) angles, each element on its own."""
    out = torch.zeros_like(t)
    half = t.shape[-1] // 2
    for j in range(half):
        first, second = (2 * j, 2 * j + 1) if interleaved else (j, j + half)
        angle = angles[: t.shape[1], first].double()[None, :, None]
        out[..., first] = t[..., first] * angle.cos() - t[..., second] * angle.sin()
        out[..., second] = t[..., second] * angle.cos() + t[..., first] * angle.sin()
    return out


def attention(
    p: dict[str, Tensor],
    prefix: str,
    x: Tensor,
    source: Tensor | None = None,
    *,
    groups: int = H,
    interleaved: bool = False,
    causal: bool = True,
    angles: Tensor | None = None,
    turn: bool = False,
    qk_norm: str | None = None,
) -> Tensor:
    """The attention's branch for a normalised x (B, S, W); `source` gives keys and values of cross attention."""
    size = W // H
    first = next(
        name
        for name in ("layernorm_qkv.", "qkv.", "layernorm_query.", "query_layer.")
        if any(key.startswith(prefix + name) for key in p)
    )
    first = prefix + first

    def part(x: Tensor, module: str, name: str, rows: slice) -> Tensor:
        if module + f"{name}_weight" in p:
            return affine(x, p, module + f"{name}_weight", module + f"{name}_bias")
        return affine(x, p, module + "weight", module + "bias")[..., rows]

    rows_q, rows_k = H * size, groups * size
    if source is None and interleaved:
        mixed = affine(x, p, first + "weight", first + "bias").unflatten(-1, (groups, H // groups + 2, size))
        q, k, v = mixed[..., :-2, :].flatten(-3, -2), mixed[..., -2, :], mixed[..., -1, :]
    else:
        if source is None:
            module, start = first, rows_q
        else:
            module, start = prefix + "key_value.", 0
        q = part(x, first, "query", slice(0, rows_q)).unflatten(-1, (H, size))
        over = x if source is None else source
        k = part(over, module, "key", slice(start, start + rows_k)).unflatten(-1, (groups, size))
        v = part(over, module, "value", slice(start + rows_k, start + 2 * rows_k)).unflatten(-1, (groups, size))
    if angles is not None:
        q, k = rotated(q, angles, turn), rotated(k, angles, turn)
    if qk_norm is not None:
        q, k = (norm(t, p, prefix + f"{n}_norm.", qk_norm, False, 1e-6) for t, n in ((q, "q"), (k, "k")))
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    k, v = (t.repeat_interleave(H // groups, 1) for t in (k, v))
    scores = q @ k.mT / size**0.5
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), float("-inf"))
    out = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
    return affine(out, p, prefix + "proj.weight", prefix + "proj.bias")


def mlp(p: dict[str, Tensor], x: Tensor, activation: str) -> Tensor:
    hidden = affine(x, p, "layernorm_mlp.fc1_weight", "layernorm_mlp.fc1_bias")
    if activation == "swiglu":
        gate, value = hidden.chunk(2, -1)
        hidden = gate * gate.sigmoid() * value
    else:
        hidden = 0.5 * hidden * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (hidden + 0.044715 * hidden**3)))
    return affine(hidden, p, "layernorm_mlp.fc2_weight", "layernorm_mlp.fc2_bias")


def layer(
    p: dict[str, Tensor],
    x: Tensor,
    *,
    encoder: Tensor | None = None,
    normalization: str = "LayerNorm",
    centred: bool = False,
    activation: str = "gelu",
    parallel: bool = False,
    at_end: bool = False,
    post: bool = False,
    **options: Any,
) -> Tensor:
    """The whole layer in the dtype of p."""

    def normed(x: Tensor, prefix: str) -> Tensor:
        return norm(x, p, prefix + "layer_norm_", normalization, centred)

    a = "self_attention."
    y = x if at_end else normed(x, a + "layernorm_qkv.")
    branch = attention(p, a, y, **options)
    if parallel:
        return x + branch + mlp(p, normed(x, "layernorm_mlp."), activation)
    x = (y if post else x) + branch
    if encoder is not None:
        y = normed(x, "inter_attention.layernorm_query.")
        options |= {"causal": False, "angles": None}
        x = (y if post else x) + attention(p, "inter_attention.", y, encoder, **options)
    y = normed(x, "layernorm_mlp.")
    x = (y if post else x) + mlp(p, y, activation)
    return norm(x, p, "layernorm.", normalization, centred) if at_end else x


def compare(module: Any, out: Tensor, wanted: Tensor, p: dict[str, Tensor], inputs: dict[str, tuple[Any, Any]]) -> None:
    """Outputs, and all gradients for a random one of the output."""
    torch.testing.assert_close(out.detach().double().cpu(), wanted.detach(), rtol=1e-4, atol=1e-4)
    upstream = torch.randn_like(wanted)
    parameters = dict(module.named_parameters())
    ours = torch.autograd.grad(out, [*parameters.values(), *(one for one, _ in inputs.values())], upstream.to(out))
    exact = torch.autograd.grad(
        wanted, [*(p[name] for name in parameters), *(two for _, two in inputs.values())], upstream
    )
    for name, mine, theirs in zip([*parameters, *inputs], ours, exact, strict=True):
        torch.testing.assert_close(
            mine.double().cpu(), theirs, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"gradient of {n}: {m}"
        )


def leaf(*shape: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The same values in fp32 on the device, and in float64."""
    exact = torch.randn(*shape, dtype=torch.float64)
    return exact.to(device, torch.float32).requires_grad_(), exact.requires_grad_()


LAYERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gpt": ({"fuse_qkv_params": True, "qkv_weight_interleaved": False}, {}),
    "split": ({}, {}),
    "interleaved": ({"fuse_qkv_params": True}, {"interleaved": True}),
    "interleaved groups": ({"fuse_qkv_params": True, "num_gqa_groups": 2}, {"interleaved": True, "groups": 2}),
    "llama": (
        {"normalization": "RMSNorm", "activation": "swiglu", "bias": False, "num_gqa_groups": 3},
        {"normalization": "RMSNorm", "activation": "swiglu", "groups": 3},
    ),
    "centred": ({"zero_centered_gamma": True}, {"centred": True}),
    "parallel": ({"parallel_attention_mlp": True}, {"parallel": True}),
    "norm at the end": ({"output_layernorm": True, "zero_centered_gamma": True}, {"at_end": True, "centred": True}),
    "added to the norm": ({"apply_residual_connection_post_layernorm": True}, {"post": True}),
    "normed heads": ({"qk_norm_type": "RMSNorm"}, {"qk_norm": "RMSNorm"}),
}


@pytest.mark.parametrize("layout", ["bshd", "sbhd"])
@pytest.mark.parametrize("kind", LAYERS)
def test_a_layer_is_its_formula(kind: str, layout: str, device: torch.device) -> None:
    options, formula = LAYERS[kind]
    module = build(attn_input_format=layout, **options).to(device)
    x, exact = leaf(2, 7, W, device=device)
    given = x.transpose(0, 1) if layout == "sbhd" else x
    p = {name: value.cpu().detach().requires_grad_() for name, value in state(module).items()}
    out = module(given)
    out = out.transpose(0, 1) if layout == "sbhd" else out
    compare(module, out, layer(p, exact, **formula), p, {"x": (x, exact)})


@pytest.mark.parametrize("kind", [kind for kind in LAYERS if kind != "norm at the end"])
def test_a_stack_hands_on_the_stream_in_two_parts(kind: str) -> None:
    options, _ = LAYERS[kind]
    first, second = build(**options), build(seed=2, **options)
    x = torch.randn(2, 7, W)
    branch, stream = first(x, return_residual=True)
    torch.testing.assert_close(branch + stream, first(x))
    torch.testing.assert_close(second(branch, residual=stream), second(first(x)), rtol=1e-4, atol=1e-5)
    parts = second(branch, residual=stream, return_residual=True)
    torch.testing.assert_close(sum(parts), second(first(x)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("layout", ["bshd", "sbhd", "thd"])
def test_rotary_embedding_turns_queries_and_keys(layout: str, interleaved: bool, device: torch.device) -> None:
    module = build(attn_input_format=layout, rotary_pos_interleaved=interleaved, num_gqa_groups=3).to(device)
    angles = RotaryPositionEmbedding(W // H, interleaved=interleaved).to(device)(9)
    x, exact = leaf(2, 7, W, device=device)
    p = {name: value.cpu().detach().requires_grad_() for name, value in state(module).items()}
    wanted = layer(p, exact, groups=3, angles=angles.cpu().reshape(9, -1), turn=interleaved)
    options: dict[str, Any] = {"rotary_pos_emb": angles}
    given = x.transpose(0, 1) if layout == "sbhd" else x
    if layout == "thd":
        given = x.flatten(0, 1)
        options["cu_seqlens_q"] = torch.tensor([0, 7, 14], dtype=torch.int32, device=device)
        options["max_seqlen_q"] = 7
    out = module(given, **options)
    out = out.transpose(0, 1) if layout == "sbhd" else out.view(2, 7, W)
    compare(module, out, wanted, p, {"x": (x, exact)})


@pytest.mark.parametrize("fused", [False, True])
def test_a_decoder_attends_to_the_encoder(fused: bool) -> None:
    module = build(layer_type="decoder", fuse_qkv_params=fused, qkv_weight_interleaved=False, num_gqa_groups=2)
    cpu = torch.device("cpu")
    x, exact = leaf(2, 7, W, device=cpu)
    encoder, exact_encoder = leaf(2, 4, W, device=cpu)
    p = state(module)
    wanted = layer(p, exact, encoder=exact_encoder, groups=2)
    out = module(x, encoder_output=encoder)
    compare(module, out, wanted, p, {"x": (x, exact), "encoder": (encoder, exact_encoder)})
    with pytest.raises(UserError, match="pass encoder_output"):
        module(x)


def test_a_decoder_of_packed_sequences_attends_to_the_encoder_of_each() -> None:
    options: dict[str, Any] = {"layer_type": "decoder", "enc_dec_attn_mask_type": "padding"}
    module, apart = build(attn_input_format="thd", **options), build(**options)
    x, encoder = torch.randn(9, W), torch.randn(8, W)
    starts = torch.tensor([0, 4, 9], dtype=torch.int32), torch.tensor([0, 6, 8], dtype=torch.int32)
    out = module(x, encoder_output=encoder, cu_seqlens_q=starts[0], cu_seqlens_kv=starts[1])
    wanted = [
        apart(one[None], encoder_output=source[None], enc_dec_attn_mask_type="no_mask")[0]
        for one, source in ((x[:4], encoder[:6]), (x[4:], encoder[6:]))
    ]
    torch.testing.assert_close(out, torch.cat(wanted), rtol=1e-4, atol=1e-5)


def test_names_are_transformer_engines() -> None:
    assert list(build().state_dict()) == SPLIT_NAMES
    fused = [name for name in SPLIT_NAMES if "key_" not in name and "value_" not in name]
    fused = [name.replace("query_", "") for name in fused]
    module = build(fuse_qkv_params=True)
    assert list(module.state_dict()) == fused
    assert [name for name, _ in module.named_parameters()] == fused
    without = [name for name in SPLIT_NAMES if not name.endswith("bias")]
    assert list(build(normalization="RMSNorm", bias=False).state_dict()) == without
    ends = build(output_layernorm=True).state_dict()
    assert {"self_attention.qkv.query_weight", "layernorm.weight", "layernorm.bias"} <= set(ends)
    assert not any("layernorm_qkv" in name for name in ends)
    decoder = set(build(layer_type="decoder").state_dict())
    assert {
        "inter_attention.layernorm_query.layer_norm_weight",
        "inter_attention.layernorm_query.query_weight",
        "inter_attention.key_value.key_weight",
        "inter_attention.key_value.value_bias",
        "inter_attention.proj.weight",
    } <= decoder
    assert {"query_layer.weight", "key_value.weight"} <= set(
        build(MultiheadAttention, attention_type="cross", fuse_qkv_params=True).state_dict()
    )
    assert {"self_attention.q_norm.weight", "self_attention.k_norm.weight"} <= set(
        build(qk_norm_type="RMSNorm").state_dict()
    )


def test_shapes_are_transformer_engines() -> None:
    shapes = {
        name: tuple(value.shape) for name, value in build(num_gqa_groups=2, activation="swiglu").state_dict().items()
    }
    qkv = "self_attention.layernorm_qkv."
    assert shapes[qkv + "query_weight"] == (24, 24)
    assert shapes[qkv + "key_weight"] == shapes[qkv + "value_weight"] == (8, 24)
    assert shapes["layernorm_mlp.fc1_weight"] == (2 * FFN, 24)
    assert shapes["layernorm_mlp.fc2_weight"] == (24, FFN)
    assert build(fuse_qkv_params=True, num_gqa_groups=2).state_dict()[qkv + "weight"].shape == (40, 24)
    wide = build(kv_channels=6, fuse_qkv_params=True).state_dict()
    assert wide[qkv + "weight"].shape == (3 * 36, 24)
    assert wide["self_attention.proj.weight"].shape == (24, 36)


def test_a_state_dict_of_transformer_engine_loads() -> None:
    module = build()
    saved = {name: torch.randn_like(value) for name, value in module.state_dict().items()}
    empty = torch.empty(0, dtype=torch.uint8)
    for owner in ("layernorm_qkv", "core_attention", "proj"):
        saved[f"self_attention.{owner}._extra_state"] = empty
    saved["layernorm_mlp._extra_state"] = empty
    module.load_state_dict(saved, strict=True)
    assert torch.equal(module.state_dict()["layernorm_mlp.fc1_bias"], saved["layernorm_mlp.fc1_bias"])


def test_initial_values_are_those_documented() -> None:
    torch.manual_seed(0)
    module = TransformerLayer(128, 256, 4, zero_centered_gamma=True, init_method=torch.nn.init.ones_)
    for name, value in module.state_dict().items():
        if name.endswith(("proj.weight", "fc2_weight")):
            assert value.std() == pytest.approx(0.023, rel=0.05), name
        else:
            wanted = 1.0 if value.dim() == 2 else 0.0
            assert torch.equal(value, torch.full_like(value, wanted)), name


def test_meta_layers_are_filled_later() -> None:
    module = TransformerLayer(W, FFN, H, device="meta", dtype=torch.bfloat16, output_layernorm=True)
    assert {value.device.type for value in module.state_dict().values()} == {"meta"}
    module.to_empty(device="cpu").reset_parameters()
    assert {value.dtype for value in module.state_dict().values()} == {torch.bfloat16}
    assert module(torch.randn(2, 3, W, dtype=torch.bfloat16)).isfinite().all()


def test_dropout_and_dropped_paths_act_while_training_alone() -> None:
    module = TransformerLayer(W, FFN, H, hidden_dropout=0.4, attention_dropout=0.4)
    x = torch.randn(3, 5, W)
    assert not torch.equal(module(x), module(x))
    module.eval()
    assert torch.equal(module(x), module(x))
    for layout, batch in (("bshd", 0), ("sbhd", 1)):
        dropped = TransformerLayer(
            W, FFN, H, hidden_dropout=0.0, attention_dropout=0.0, drop_path_rate=0.5, attn_input_format=layout
        )
        x = torch.randn(64, 64, W)
        branch = (dropped(x, return_residual=True)[0] == 0).all(-1)
        # A sequence's branch is there or not, as a whole.
        assert torch.equal(branch.all(1 - batch), branch.any(1 - batch))
        assert 8 < branch.all(1 - batch).sum() < 56


@pytest.mark.parametrize("return_bias", [False, True])
def test_attention_returns_what_was_asked_for(return_bias: bool) -> None:
    module = build(MultiheadAttention, input_layernorm=True, return_bias=return_bias, return_layernorm_output=True)
    x, residual = torch.randn(2, 5, W), torch.randn(2, 5, W)
    out, *others, normed, stream = module(x, residual=residual)
    torch.testing.assert_close(stream, x + residual)
    qkv = module.layernorm_qkv
    torch.testing.assert_close(
        normed, F.layer_norm(stream, (W,), qkv.layer_norm_weight, qkv.layer_norm_bias), rtol=1e-4, atol=1e-5
    )
    assert len(others) == return_bias
    if return_bias:
        assert torch.equal(others[0], module.proj.bias)
        module.proj.return_bias = module.return_bias = False
        torch.testing.assert_close(out + others[0], module(x, residual=residual)[0])


def test_attention_without_a_norm_adds_the_residual_too() -> None:
    module = build(MultiheadAttention)
    x, residual = torch.randn(2, 5, W), torch.randn(2, 5, W)
    out, stream = module(x, residual=residual)
    torch.testing.assert_close(stream, x + residual)
    torch.testing.assert_close(out, module(x + residual))


@pytest.mark.parametrize("recipe", [fp8.DelayedScaling(), fp8.Float8CurrentScaling()], ids=["delayed", "current"])
@pytest.mark.parametrize("kind", ["gpt", "split", "llama", "added to the norm", "norm at the end"])
def test_a_region_changes_results_by_casts_alone(kind: str, recipe: Any, device: torch.device) -> None:
    module = build(spread=0.1, **LAYERS[kind][0]).to(device)
    x = torch.randn(2, 7, W, device=device, requires_grad=True)
    upstream = torch.randn(2, 7, W, device=device)
    exact = [module(x)]
    exact += torch.autograd.grad(exact[0], [x, *module.parameters()], upstream)
    with fp8.fp8_autocast(recipe=recipe):
        cast = [module(x)]
    cast += torch.autograd.grad(cast[0], [x, *module.parameters()], upstream)
    assert not torch.equal(cast[0], exact[0])
    # All gradients together: some, as that of a bias of keys, are zero but for rounding.
    for one, two in ((cast[:1], exact[:1]), (cast[1:], exact[1:])):
        difference = torch.cat([(a - b).flatten() for a, b in zip(one, two, strict=True)])
        assert difference.norm() < 0.2 * torch.cat([b.flatten() for b in two]).norm()


# Dynamo looks at autograd functions in a way that torch itself deprecates.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiles_without_a_break() -> None:
    module, x = build(), torch.randn(2, 5, W)
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), module(x))


def test_copies_are_independent() -> None:
    module, x = build(), torch.randn(2, 5, W)
    twin = copy.deepcopy(module)
    assert torch.equal(twin(x), module(x))
    with torch.no_grad():
        twin.self_attention.proj.weight.zero_()
    assert not torch.equal(twin(x), module(x))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_gqa_groups": 4}, "6 attention heads cannot be shared out over 4 groups"),
        ({"normalization": "BatchNorm"}, "normalization is 'BatchNorm'; choose one of LayerNorm, RMSNorm"),
        ({"qk_norm_type": "L2Normalization"}, "qk_norm_type is 'L2Normalization'"),
        ({"layer_type": "both"}, "layer_type is 'both'"),
        ({"hidden_dropout": 1.5}, "hidden_dropout is 1.5"),
        ({"drop_path_rate": -0.1}, "drop_path_rate is -0.1"),
        ({"parallel_attention_mlp": True, "layer_type": "decoder"}, "leaves no place"),
        ({"parallel_attention_mlp": True, "apply_residual_connection_post_layernorm": True}, "in front of each"),
        ({"self_attn_mask_type": "none"}, "attn_mask_type is 'none'"),
        ({"activation": "tanh"}, "tanh"),
    ],
)
def test_wrong_settings_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build(**options)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(UserError, match="hidden_size 25 is not a multiple of 6 heads"):
        MultiheadAttention(25, 6)
    with pytest.raises(UserError, match="return_layernorm_output needs a norm"):
        MultiheadAttention(W, H, return_layernorm_output=True)
    with pytest.raises(UserError, match="ends in a norm"):
        build(output_layernorm=True)(torch.randn(1, 2, W), return_residual=True)
    x = torch.randn(1, 2, W)
    with pytest.raises(UserError, match="encoder_output was passed and layer_type is 'encoder', which attends to no"):
        build()(x, encoder_output=x)
    with pytest.raises(UserError, match="enc_dec_attn_mask was passed and layer_type is 'encoder'"):
        build()(x, enc_dec_attn_mask=torch.zeros(1, 1, 1, 2, dtype=torch.bool))
    with pytest.raises(UserError, match="encoder_output was passed and attention_type is 'self'"):
        MultiheadAttention(W, H)(x, encoder_output=x)
    packed = build(attn_input_format="thd", drop_path_rate=0.1)
    with pytest.raises(UserError, match="drops whole sequences"):
        packed(torch.randn(3, W), cu_seqlens_q=torch.tensor([0, 3], dtype=torch.int32))


@pytest.mark.parametrize("kind", [LayerNorm, RMSNorm])
@pytest.mark.parametrize("centred", [False, True])
def test_norms_cast_to_the_weights_dtype_and_take_a_residual(kind: Any, centred: bool, device: torch.device) -> None:
    module = kind(7, zero_centered_gamma=centred, device=device)
    assert torch.equal(module.weight, torch.full_like(module.weight, 0.0 if centred else 1.0))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter))
    x, residual = (torch.randn(3, 7, device=device, dtype=torch.bfloat16) for _ in range(2))
    p = {name: value.detach().double() for name, value in module.named_parameters()}
    for given, stream in ((None, x.double()), (residual, x.double() + residual.double())):
        result = module(x) if given is None else module(x, given)
        y = result if given is None else result[0]
        assert y.dtype == torch.float32
        torch.testing.assert_close(y.double(), norm(stream, p, "", kind.__name__, centred), rtol=1e-4, atol=1e-5)
        if given is not None:
            torch.testing.assert_close(result[1].double(), stream)
    assert "zero_centered_gamma" in repr(module) or not centred


def test_a_small_centred_weight_keeps_its_digits_in_bf16() -> None:
    """1.003 rounds to 1 in bf16, which would make all of the output smaller by that."""
    module = RMSNorm(64, zero_centered_gamma=True, dtype=torch.bfloat16)
    with torch.no_grad():
        module.weight.fill_(0.003)
    x = torch.randn(64, 64)
    exact = norm(x.bfloat16().double(), {"weight": module.weight.detach().double()}, "", "RMSNorm", True)
    ratio = module(x).detach().double() / exact
    assert ratio.mean() == pytest.approx(1.0, abs=3e-4)
