"""DotProductAttention against attention written out in float64, one query at a time."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from fusestep.errors import UserError
from fusestep.nn import DotProductAttention
from fusestep.nn.attention import MOST_PLANS

MASKS = [
    "no_mask",
    "causal",
    "padding",
    "padding_causal",
    "causal_bottom_right",
    "padding_causal_bottom_right",
    "arbitrary",
]

Window = tuple[int, int] | None


def oracle(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: str = "no_mask",
    window: Window = None,
    real_q: list[int] | None = None,
    real_k: list[int] | None = None,
    masked_out: Tensor | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """(B, Sq, H, D) and (B, Sk, G, D) to (B, Sq, H·D), differentiable, in the dtype of the inputs."""
    batch, sq, heads, size = q.shape
    sk, groups = k.shape[1:3]
    left, right = window or (-1, -1)
    if "causal" in mask:
        right = 0
    rows = []
    for b in range(batch):
        here_q = real_q[b] if real_q is not None else sq
        here_k = real_k[b] if real_k is not None else sk
        offset = here_k - here_q if "bottom_right" in mask else 0
        for i in range(sq):
            for h in range(heads):
                seen = [
                    j
                    for j in range(here_k)
                    if i < here_q
                    and (right < 0 or j - i - offset <= right)
                    and (left < 0 or i + offset - j <= left)
                    and (masked_out is None or not masked_out.expand(batch, heads, sq, sk)[b, h, i, j])
                ]
                group = h // (heads // groups)
                if not seen:
                    rows.append(torch.zeros(v.shape[-1], dtype=v.dtype))
                    continue
                scores = k[b, seen, group] @ q[b, i, h] * (size**-0.5 if scale is None else scale)
                if bias is not None:
                    scores = scores + bias.expand(batch, heads, sq, sk)[b, h, i, seen]
                rows.append(scores.softmax(0) @ v[b, seen, group])
    return torch.stack(rows).view(batch, sq, -1)


def some(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def compare(out: Tensor, wanted: Tensor, inputs: list[Tensor], exact: list[Tensor]) -> None:
    """Outputs, and gradients for a random output gradient, of which `exact` are the oracle's inputs."""
    tolerance = 1e-4 if out.is_cuda else 1e-5
    torch.testing.assert_close(out.double().cpu(), wanted, rtol=tolerance, atol=tolerance)
    upstream = torch.randn_like(wanted)
    ours = torch.autograd.grad(out, inputs, upstream.to(out))
    theirs = torch.autograd.grad(wanted, exact, upstream, retain_graph=True)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.double().cpu(), other, rtol=tolerance, atol=tolerance)


def leaves(*tensors: Tensor, device: torch.device, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [tensor.detach().to(device, dtype).requires_grad_() for tensor in tensors]


def to_layout(tensor: Tensor, layout: str) -> Tensor:
    return tensor.transpose(0, 1) if layout == "sbhd" else tensor


@pytest.mark.parametrize("layout", ["bshd", "sbhd"])
@pytest.mark.parametrize("window", [None, (2, 1), (0, 0), (3, -1)])
@pytest.mark.parametrize("groups", [6, 2, 1])
@pytest.mark.parametrize("mask", MASKS)
def test_masks_and_layouts(mask: str, groups: int, window: Window, layout: str, device: torch.device) -> None:
    exact = [some(2, 7, 6, 5), some(2, 7, groups, 5), some(2, 7, groups, 5)]
    exact = [tensor.requires_grad_() for tensor in exact]
    options: dict[str, Any] = {"mask": mask, "window": window}
    given = None
    if "padding" in mask:
        options["real_q"] = options["real_k"] = [7, 4]
        given = torch.zeros(2, 1, 1, 7, dtype=torch.bool, device=device)
        given[1, ..., 4:] = True
    elif mask == "arbitrary":
        given = torch.rand(2, 1, 7, 7, device=device) < 0.4
        given[0, 0, 3] = True
        options["masked_out"] = given.cpu()
    wanted = oracle(*exact, **options)
    attention = DotProductAttention(6, 5, groups, attn_mask_type=mask, window_size=window, qkv_format=layout)
    inputs = leaves(*exact, device=device)
    out = attention(*(to_layout(tensor, layout) for tensor in inputs), attention_mask=given)
    assert out.is_contiguous()
    compare(to_layout(out, layout), wanted, inputs, exact)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("sq", "sk"), [(3, 8), (8, 3), (1, 5), (5, 1)])
def test_queries_and_keys_of_different_lengths(mask: str, sq: int, sk: int, device: torch.device) -> None:
    exact = [tensor.requires_grad_() for tensor in (some(2, sq, 2, 4), some(2, sk, 2, 4), some(2, sk, 2, 4))]
    options: dict[str, Any] = {"mask": mask}
    given: Any = None
    if "padding" in mask:
        options |= {"real_q": [sq, 1], "real_k": [sk, 1]}
        pair = torch.ones(2, 1, 1, sq, dtype=torch.bool), torch.ones(2, 1, 1, sk, dtype=torch.bool)
        for padded in pair:
            padded[0] = False
            padded[1, ..., 0] = False
        given = tuple(padded.to(device) for padded in pair)
    elif mask == "arbitrary":
        given = torch.rand(sq, sk, device=device) < 0.5
        options["masked_out"] = given.cpu()
    inputs = leaves(*exact, device=device)
    out = DotProductAttention(2, 4, attn_mask_type=mask)(*inputs, attention_mask=given)
    compare(out, oracle(*exact, **options), inputs, exact)


@pytest.mark.parametrize("given", ["mask", "lengths"])
def test_a_query_without_keys_gives_zeros_and_no_gradient(given: str, device: torch.device) -> None:
    q, k, v = (torch.randn(3, 4, 2, 8, device=device, requires_grad=True) for _ in range(3))
    options: dict[str, Tensor] = {}
    if given == "mask":
        options["attention_mask"] = torch.zeros(3, 1, 1, 4, dtype=torch.bool, device=device)
        options["attention_mask"][1] = True
    else:
        options["cu_seqlens_q"] = torch.tensor([0, 4, 4, 8], dtype=torch.int32, device=device)
    out = DotProductAttention(2, 8, attn_mask_type="padding")(q, k, v, **options)
    assert not out[1].any()
    for gradient in torch.autograd.grad(out.square().sum(), (q, k, v)):
        assert gradient.isfinite().all()
        assert not gradient[1].any()
        assert gradient[0].any()


def test_without_any_key_the_output_is_zero(device: torch.device) -> None:
    q, k = torch.randn(2, 3, 2, 8, device=device), torch.randn(2, 0, 2, 8, device=device)
    assert torch.equal(
        DotProductAttention(2, 8, attn_mask_type="no_mask")(q, k, k), torch.zeros(2, 3, 16, device=device)
    )


@pytest.mark.parametrize("shape", [(0, 5, 2, 8), (2, 0, 2, 8)])
@pytest.mark.parametrize("mask", ["causal", "no_mask"])
def test_empty_batches_and_sequences(shape: tuple[int, ...], mask: str, device: torch.device) -> None:
    q = torch.randn(shape, device=device, requires_grad=True)
    out = DotProductAttention(2, 8, attn_mask_type=mask)(q, q, q)
    assert out.shape == (*shape[:2], 16)
    out.sum().backward()
    assert q.grad is not None


def packed(lengths: list[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=device)


@pytest.mark.parametrize("window", [None, (2, -1)])
@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("mask", ["padding", "padding_causal", "causal", "padding_causal_bottom_right"])
@pytest.mark.parametrize("others", [None, [2, 6, 3, 5]])
def test_packed_sequences_attend_within_themselves(
    mask: str, groups: int, window: Window, others: list[int] | None, device: torch.device
) -> None:
    lengths = [5, 1, 0, 7]
    keys = lengths if others is None else others
    exact = [some(13, 4, 6), some(sum(keys), groups, 6), some(sum(keys), groups, 6)]
    exact = [tensor.requires_grad_() for tensor in exact]
    pieces = exact[0].split(lengths), exact[1].split(keys), exact[2].split(keys)
    wanted = torch.cat(
        [
            oracle(*(piece[None] for piece in one), mask=mask, window=window)[0]
            if one[0].numel()
            else one[0].flatten(1)
            for one in zip(*pieces, strict=True)
        ]
    )
    starts = packed(lengths, device)
    inputs = leaves(*exact, device=device)
    attention = DotProductAttention(4, 6, groups, qkv_format="thd", attn_mask_type=mask, window_size=window)
    out = attention(*inputs, cu_seqlens_q=starts, cu_seqlens_kv=None if others is None else packed(keys, device))
    assert out.shape == (13, 24)
    compare(out, wanted, inputs, exact)


def test_packed_sequences_by_a_mask_over_all_tokens_agree_with_one_by_one() -> None:
    """Where the lengths cannot be looked at, as under torch.compile, one mask holds the sequences apart."""
    q = torch.randn(13, 4, 6)
    starts = packed([5, 1, 0, 7], q.device)
    attention = DotProductAttention(4, 6, qkv_format="thd", window_size=(3, 0))
    whole = torch.compile(attention, backend="eager", fullgraph=True)(q, q, q, cu_seqlens_q=starts)
    torch.testing.assert_close(whole, attention(q, q, q, cu_seqlens_q=starts))


@pytest.mark.parametrize("kind", ["post_scale_bias", "pre_scale_bias"])
@pytest.mark.parametrize("shape", [(2, 3, 5, 5), (1, 3, 5, 5), (5, 5)])
@pytest.mark.parametrize("mask", ["causal", "no_mask"])
def test_bias_is_added_to_the_scores_and_gets_a_gradient(
    kind: str, shape: tuple[int, ...], mask: str, device: torch.device
) -> None:
    exact = [tensor.requires_grad_() for tensor in (*(some(2, 5, 3, 8) for _ in range(3)), some(*shape))]
    scaled = exact[3] * 0.3 if kind == "pre_scale_bias" else exact[3]
    wanted = oracle(*exact[:3], mask=mask, bias=scaled, scale=0.3)
    inputs = leaves(*exact, device=device)
    attention = DotProductAttention(3, 8, attn_mask_type=mask, softmax_scale=0.3)
    out = attention(*inputs[:3], core_attention_bias_type=kind, core_attention_bias=inputs[3])
    compare(out, wanted, inputs, exact)


def test_alibi_lowers_scores_with_the_distance() -> None:
    exact = [tensor.requires_grad_() for tensor in (some(2, 6, 12, 4), some(2, 6, 12, 4), some(2, 6, 12, 4))]
    # The slopes of 8 heads, then every other one of those of 16.
    slopes = torch.tensor([2.0 ** -(i + 1) for i in range(8)] + [2.0 ** -(i + 0.5) for i in range(4)])
    distance = (torch.arange(6)[None] - torch.arange(6)[:, None]).abs()
    wanted = oracle(*exact, mask="causal", bias=-slopes.double()[:, None, None] * distance)
    inputs = leaves(*exact, device=torch.device("cpu"))
    attention = DotProductAttention(12, 4)
    compare(attention(*inputs, core_attention_bias_type="alibi"), wanted, inputs, exact)
    own = attention(*inputs, core_attention_bias_type="alibi", alibi_slopes=slopes)
    compare(own, wanted, inputs, exact)


def test_views_of_one_fused_product_are_taken_as_they_lie(device: torch.device) -> None:
    fused = torch.randn(2, 9, 3, 4, 8, device=device, requires_grad=True)
    apart = [part.detach().contiguous().requires_grad_() for part in fused.unbind(2)]
    attention = DotProductAttention(4, 8)
    one, other = attention(*fused.unbind(2)), attention(*apart)
    torch.testing.assert_close(one, other)
    gradient = torch.autograd.grad(one.square().sum(), fused)[0]
    others = torch.autograd.grad(other.square().sum(), apart)
    torch.testing.assert_close(gradient, torch.stack(others, 2))


def test_values_may_have_another_size(device: torch.device) -> None:
    exact = [tensor.requires_grad_() for tensor in (some(2, 5, 2, 8), some(2, 5, 2, 8), some(2, 5, 2, 3))]
    inputs = leaves(*exact, device=device)
    out = DotProductAttention(2, (8, 3))(*inputs)
    compare(out, oracle(*exact, mask="causal"), inputs, exact)


def test_dropout_drops_weights_while_training_alone(device: torch.device) -> None:
    q = torch.randn(2, 16, 2, 8, device=device)
    attention = DotProductAttention(2, 8, attention_dropout=0.5)
    torch.manual_seed(3)
    first = attention(q, q, q)
    torch.manual_seed(3)
    assert torch.equal(attention(q, q, q), first)
    assert not torch.equal(attention(q, q, q), first)
    attention.eval()
    assert torch.equal(attention(q, q, q), attention(q, q, q))
    torch.testing.assert_close(attention(q, q, q), DotProductAttention(2, 8)(q, q, q))


def test_dropout_keeps_the_mean() -> None:
    q, v = torch.zeros(1, 64, 1, 8), torch.ones(1, 64, 1, 8)
    out = DotProductAttention(1, 8, attention_dropout=0.3, attn_mask_type="no_mask")(q, q, v)
    assert out.mean() == pytest.approx(1.0, abs=0.05)
    assert out.std() > 0


@pytest.mark.parametrize("mask", ["causal", "arbitrary"])
def test_autocast_casts_as_for_scaled_dot_product_attention(mask: str, device: torch.device) -> None:
    q = torch.randn(2, 5, 2, 8, device=device)
    given = torch.zeros(5, 5, dtype=torch.bool, device=device) if mask == "arbitrary" else None
    with torch.autocast(device.type, torch.bfloat16):
        assert DotProductAttention(2, 8, attn_mask_type=mask)(q, q, q, attention_mask=given).dtype == torch.bfloat16


@pytest.mark.parametrize("mask", ["causal", "padding_causal"])
def test_compiles_without_a_break(mask: str) -> None:
    q = torch.randn(2, 5, 2, 8)
    given = None if mask == "causal" else torch.zeros(2, 1, 1, 5, dtype=torch.bool)
    attention = DotProductAttention(2, 8, attn_mask_type=mask)
    compiled = torch.compile(attention, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, q, q, given), attention(q, q, q, given))


def test_tells_what_it_ran_as_and_can_be_copied() -> None:
    attention = DotProductAttention(2, 8)
    assert "first call" in attention.implementation().reason
    q = torch.randn(1, 3, 2, 8)
    attention(q, q, q)
    for twin in (attention, copy.deepcopy(attention), pickle.loads(pickle.dumps(attention))):
        assert "torch chooses itself" in twin.implementation().reason
    assert list(attention.state_dict()) == []


def test_an_empty_extra_state_is_accepted() -> None:
    attention = DotProductAttention(2, 8)
    attention.load_state_dict({"_extra_state": torch.empty(0, dtype=torch.uint8)})
    attention.load_state_dict({"_extra_state": None})


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: DotProductAttention(6, 8, 4), "6 attention heads cannot be shared out over 4 groups"),
        (lambda: DotProductAttention(0, 8), "0 attention heads"),
        (lambda: DotProductAttention(2, 8, attn_mask_type="casual"), "attn_mask_type is 'casual'; choose one of"),
        (lambda: DotProductAttention(2, 8, qkv_format="bhsd"), "qkv_format is 'bhsd'; choose one of bshd, sbhd, thd"),
        (lambda: DotProductAttention(2, 8, attention_dropout=1.0), "attention_dropout is 1.0"),
        (lambda: DotProductAttention(2, 8, window_size=(-2, 0)), r"window_size is \(-2, 0\)"),
    ],
)
def test_wrong_settings_are_refused(build: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        build()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention_mask": torch.zeros(5, 5, dtype=torch.bool)}, "attn_mask_type is 'causal', which has none"),
        ({"attn_mask_type": "arbitrary"}, "attention_mask is missing"),
        ({"attn_mask_type": "arbitrary", "attention_mask": torch.zeros(5, 5)}, "attention_mask is torch.float32"),
        (
            {"attn_mask_type": "arbitrary", "attention_mask": torch.zeros(5, 4, dtype=torch.bool)},
            r"attention_mask has shape \(5, 4\); pass one that broadcasts",
        ),
        ({"attn_mask_type": "padding"}, "a padding mask was asked for"),
        (
            {"attn_mask_type": "padding", "attention_mask": torch.zeros(2, 5, dtype=torch.bool)},
            r"of shape \(2, 5\); a padding mask is boolean, True where masked out, of shape \(2, 1, 1, 5\)",
        ),
        ({"core_attention_bias_type": "post_scale_bias"}, "core_attention_bias is missing"),
        ({"core_attention_bias": torch.zeros(5, 5)}, "core_attention_bias is given"),
        ({"core_attention_bias_type": "alibi", "alibi_slopes": torch.ones(3)}, r"alibi_slopes have shape \(3,\)"),
        ({"core_attention_bias_type": "rotary"}, "core_attention_bias_type is 'rotary'"),
        ({"qkv_format": "thd"}, r"query_layer has shape \(2, 5, 2, 8\); pass \(tokens, 2 heads, 8\)"),
        (
            {"attn_mask_type": "padding", "cu_seqlens_q": torch.tensor([0, 5], dtype=torch.int32)},
            "cu_seqlens_q has 2 entries for a batch of 2",
        ),
        (
            {"attn_mask_type": "padding", "cu_seqlens_q": torch.tensor([0, 5, 9])},
            "cu_seqlens_q is torch.int64",
        ),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    q = torch.randn(2, 5, 2, 8)
    with pytest.raises(UserError, match=message):
        DotProductAttention(2, 8)(q, q, q, **options)


def test_tensors_that_do_not_fit_each_other_are_refused() -> None:
    attention, q = DotProductAttention(2, 8), torch.randn(2, 5, 2, 8)
    with pytest.raises(UserError, match=r"key_layer has shape \(2, 5, 1, 8\); pass \(batch, sequence, 2 heads, 8\)"):
        attention(q, q[:, :, :1], q)
    with pytest.raises(UserError, match=r"value_layer is torch\.bfloat16 on cpu and query_layer torch\.float32"):
        attention(q, q, q.bfloat16())
    with pytest.raises(UserError, match="keys and values must agree, and all three in the batch"):
        attention(q, q[:1], q[:1])


def test_packed_tokens_that_do_not_fit_their_lengths_are_refused() -> None:
    attention, q = DotProductAttention(2, 8, qkv_format="thd"), torch.randn(5, 2, 8)
    with pytest.raises(UserError, match="pass cu_seqlens_q"):
        attention(q, q, q)
    with pytest.raises(UserError, match="cu_seqlens_q ends with 4 and there are 5 packed tokens"):
        attention(q, q, q, cu_seqlens_q=torch.tensor([0, 4], dtype=torch.int32))


HALF_CASES = [
    ("bshd", "causal", None, 12),
    ("sbhd", "causal", None, 4),
    ("bshd", "no_mask", None, 3),
    ("bshd", "causal", (17, 0), 12),
    ("sbhd", "no_mask", (5, 9), 4),
    ("bshd", "padding_causal", None, 4),
    ("thd", "padding_causal", None, 4),
    ("thd", "padding_causal", (9, 0), 12),
]


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("layout", "mask", "window", "groups"), HALF_CASES)
def test_bf16_on_the_gpu(layout: str, mask: str, window: Window, groups: int, deterministic: bool) -> None:
    """From strided views of one product, at the size of a model; the oracle is dense here."""
    B, S, H, D = 2, 93, 12, 64
    fused = torch.randn(B, S, (H + 2 * groups) * D, device="cuda", dtype=torch.bfloat16)
    if layout == "sbhd":
        fused = fused.transpose(0, 1).contiguous()
    elif layout == "thd":
        fused = fused.flatten(0, 1)
    fused.requires_grad_()
    options: dict[str, Any] = {}
    i = torch.arange(S, device="cuda")
    left, right = (window or (-1, -1))[0], 0 if "causal" in mask else (window or (-1, -1))[1]
    distance = i[None] - i[:, None]
    keep = ((distance <= right) | (right < 0)) & ((-distance <= left) | (left < 0))
    keep = keep.expand(B, 1, S, S)
    if layout == "thd":
        options["cu_seqlens_q"] = torch.tensor([0, S, 2 * S], dtype=torch.int32, device="cuda")
    elif mask == "padding_causal":
        options["attention_mask"] = (i >= 50)[None, None, None].repeat(B, 1, 1, 1)
        keep = keep & (i < 50)[:, None] & (i < 50)[None]
    exact = fused.detach().double().requires_grad_()

    def heads(tensor: Tensor) -> list[Tensor]:
        parts = tensor.split([H * D, groups * D, groups * D], -1)
        return [part.unflatten(-1, (-1, D)) for part in parts]

    as_batch = exact.view(B, S, -1) if layout == "thd" else exact.transpose(0, 1) if layout == "sbhd" else exact
    q, k, v = (part.transpose(1, 2) for part in heads(as_batch))
    k, v = (part.repeat_interleave(H // groups, 1) for part in (k, v))
    scores = (q @ k.mT / D**0.5).masked_fill(~keep, float("-inf"))
    wanted = (scores.softmax(-1).nan_to_num(0.0) @ v).transpose(1, 2).flatten(2)
    torch.use_deterministic_algorithms(deterministic)
    try:
        attention = DotProductAttention(H, D, groups, qkv_format=layout, attn_mask_type=mask, window_size=window)
        out = attention(*heads(fused), **options)
        assert out.is_contiguous()
        given = out.view(B, S, -1) if layout == "thd" else out.transpose(0, 1) if layout == "sbhd" else out
        upstream = torch.randn_like(given)
        gradient = torch.autograd.grad(given, fused, upstream)[0]
    finally:
        torch.use_deterministic_algorithms(False)
    exact_gradient = torch.autograd.grad(wanted, exact, upstream.double().nan_to_num(0.0))[0]
    assert (given - wanted).norm() / wanted.norm() < 0.01
    assert (gradient - exact_gradient.nan_to_num(0.0)).norm() / exact_gradient.nan_to_num(0.0).norm() < 0.01


def test_settings_changed_after_a_call_count() -> None:
    attention, q = DotProductAttention(2, 8, attention_dropout=0.5), torch.randn(2, 5, 2, 8)
    attention(q, q, q)
    attention.eval()
    causal = attention(q, q, q)
    attention.attn_mask_type = "no_mask"
    whole = attention(q, q, q)
    assert not torch.equal(whole[:, 0], causal[:, 0])
    attention.window_size = (0, 0)
    torch.testing.assert_close(attention(q, q, q), q.flatten(2))
    attention.softmax_scale, attention.window_size = 0.0, None
    torch.testing.assert_close(attention(q, q, q), q.mean(1, keepdim=True).expand_as(q).flatten(2))
    attention.qkv_format = "sbhd"
    torch.testing.assert_close(attention(q, q, q), q.mean(0, keepdim=True).expand_as(q).flatten(2))


def test_what_is_kept_of_layouts_does_not_grow_without_bound() -> None:
    attention = DotProductAttention(1, 8)
    q = torch.randn(1, MOST_PLANS + 10, 1, 8)
    for length in range(1, MOST_PLANS + 10):
        part = q[:, :length][:, -1:]  # the same shape, of another tensor
        attention(part.expand(1, 1 + length % 7, 1, 8), q[:, :length], q[:, :length])
    assert len(attention._plans) <= MOST_PLANS
