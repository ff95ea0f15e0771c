"""nn.MultiheadAttention and nn.TransformerEncoderLayer: masks, modes, dropout, weights, layouts."""

from __future__ import annotations

import copy
import math
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusestep import convert
from fusestep.convert import attention
from fusestep.convert.attention import MOST_LOOKS, CausalMasks, FusedMultiheadAttention

B, S, W, H = 3, 6, 24, 4


def pair(**options: Any) -> tuple[nn.MultiheadAttention, nn.MultiheadAttention]:
    """The old one, and a copy of it that is converted."""
    old = nn.MultiheadAttention(W, H, **options)
    for parameter in old.parameters():
        nn.init.normal_(parameter, 0.0, 0.2)
    new = copy.deepcopy(old)
    report = convert(new)
    assert [row.became for row in report.rows] == ["FusedMultiheadAttention"], str(report)
    return old, new


def causal(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full((S, S), -math.inf, dtype=dtype).triu(1)


def exact(module: nn.MultiheadAttention, x: Tensor, hidden: Tensor | None) -> Tensor:
    """Attention in float64 from its definition; x (B, S, W), hidden added to the scores, (S, S) or (B, H, S, S)."""
    q, k, v = (
        (x.double() @ weight.double().t() + bias.double()).unflatten(-1, (H, W // H)).transpose(1, 2)
        for weight, bias in zip(module.in_proj_weight.chunk(3), module.in_proj_bias.chunk(3), strict=True)
    )
    scores = q @ k.transpose(-1, -2) / math.sqrt(W // H)
    weights = (scores if hidden is None else scores + hidden.double()).softmax(-1)
    out = (weights @ v).transpose(1, 2).flatten(2)
    return out @ module.out_proj.weight.double().t() + module.out_proj.bias.double()


def masks() -> dict[str, Tensor | None]:
    ragged = torch.rand(S, S) < 0.4
    ragged[:, 1] = False
    nearly = causal()
    nearly[3, 4] = 0.0  # one query sees one key too many
    return {
        "none": None,
        "causal": causal(),
        "causal, boolean": causal().isinf(),
        "nearly causal": nearly,
        "anticausal": causal().t().contiguous(),
        "boolean": ragged,
        "added": torch.randn(S, S),
        "for each head": torch.randn(B * H, S, S),
    }


@pytest.mark.parametrize("name", list(masks()))
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_agrees_with_float64_and_torch_under_every_mask(name: str, batch_first: bool, training: bool) -> None:
    old, new = pair(batch_first=batch_first)
    old.train(training)
    new.train(training)
    mask = masks()[name]
    x = torch.randn(B, S, W) if batch_first else torch.randn(S, B, W)
    added = mask
    if mask is not None and mask.dtype is torch.bool:
        added = torch.zeros(S, S).masked_fill(mask, -math.inf)
    if added is not None and added.dim() == 3:
        added = added.unflatten(0, (B, H))
    wanted = exact(old, x if batch_first else x.transpose(0, 1), added)
    results = []
    for module in (old, new, new):  # twice, so that a mask that was looked at is met again
        given = x.clone().requires_grad_()
        y, weights = module(given, given, given, attn_mask=mask, need_weights=False)
        assert weights is None
        y.square().sum().backward()
        results.append([y.detach(), given.grad])
        turned = y if batch_first else y.transpose(0, 1)
        torch.testing.assert_close(turned.detach().double(), wanted.detach(), rtol=1e-5, atol=1e-5)
    for found in results[1:]:
        for ours, theirs in zip(found, results[0], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_calls_that_are_not_taken_go_to_torchs_own_forward() -> None:
    old, new = pair(batch_first=True)
    x, other = torch.randn(B, S, W), torch.randn(B, S + 2, W)
    padding = torch.zeros(B, S, dtype=torch.bool)
    padding[0, -2:] = True
    calls: list[tuple[tuple[Tensor, ...], dict[str, Any]]] = [
        ((x, x, x), {}),
        ((x, x, x), {"need_weights": True, "average_attn_weights": False}),
        ((x, x, x), {"key_padding_mask": padding, "need_weights": False, "attn_mask": causal().isinf()}),
        ((x, other, other), {"need_weights": False}),
        ((x[0], x[0], x[0]), {"need_weights": False}),
    ]
    for args, options in calls:
        for (ours, our_weights), (theirs, their_weights) in [(new(*args, **options), old(*args, **options))]:
            assert torch.equal(ours, theirs)
            assert (our_weights is None) == (their_weights is None)
            assert our_weights is None or torch.equal(our_weights, their_weights)
    for wrong in ({"is_causal": True}, {"attn_mask": torch.zeros(1, S)}, {"attn_mask": torch.zeros(S, S).int()}):
        with pytest.raises((RuntimeError, AssertionError)) as theirs:
            old(x, x, x, need_weights=False, **wrong)
        with pytest.raises(theirs.type, match=re.escape(str(theirs.value))):
            new(x, x, x, need_weights=False, **wrong)
    old.eval()
    new.eval()
    with torch.no_grad():  # torch's fast path
        assert torch.equal(new(x, x, x, need_weights=False)[0], old(x, x, x, need_weights=False)[0])


def test_a_hint_is_believed_as_torch_believes_it() -> None:
    old, new = pair(batch_first=True)
    x = torch.randn(B, S, W)
    wrong = torch.zeros(S, S)  # says that all keys are seen; is_causal says otherwise, and wins
    ours = new(x, x, x, need_weights=False, attn_mask=wrong, is_causal=True)[0]
    theirs = old(x, x, x, need_weights=False, attn_mask=wrong, is_causal=True)[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_dropout_drops_attention_weights_while_training_alone() -> None:
    old, new = pair(dropout=0.4, batch_first=True)
    assert new.dropout == 0.4
    x = torch.randn(2, S, W)
    new.eval()
    assert torch.equal(new(x, x, x, need_weights=False)[0], new(x, x, x, need_weights=False)[0])
    new.train()
    old.train()
    means, spreads = [], []
    with torch.no_grad():
        for module in (old, new):
            drawn = torch.stack([module(x, x, x, need_weights=False)[0] for _ in range(1500)])
            means.append(drawn.mean(0))
            spreads.append(drawn.std(0))
    error = spreads[0].mean() / 1500**0.5
    assert float((means[0] - means[1]).abs().mean()) < 3 * float(error)
    assert float((spreads[0] / spreads[1] - 1).abs().mean()) < 0.05


def test_a_causal_mask_is_looked_at_once_until_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    _, new = pair(batch_first=True)
    looks: list[int] = []
    monkeypatch.setattr(attention.torch, "equal", lambda a, b: looks.append(1) or _equal(a, b))
    x, mask = torch.randn(B, S, W), causal()
    for _ in range(3):
        new(x, x, x, need_weights=False, attn_mask=mask)
    assert len(looks) == 1
    mask[2, 5] = 0.0
    y = new(x, x, x, need_weights=False, attn_mask=mask)[0]
    assert len(looks) == 2
    torch.testing.assert_close(y.detach().double(), exact(new, x, mask).detach(), rtol=1e-5, atol=1e-5)


def test_another_mask_at_the_address_of_one_that_is_no_more_is_looked_at() -> None:
    known, mask = CausalMasks(), causal()
    assert known.is_causal(mask)
    place = id(mask)
    del mask
    for _ in range(1000):
        mask = torch.zeros(S, S)
        if id(mask) == place:
            break
    else:
        pytest.fail("no tensor came to lie where the other was")
    assert not known.is_causal(mask)


_equal = torch.equal


def test_masks_made_anew_for_each_call_are_not_looked_at_for_ever() -> None:
    known = CausalMasks()
    assert all(known.is_causal(causal()) for _ in range(MOST_LOOKS))
    assert not known.is_causal(causal())
    kept = causal()
    assert not known.is_causal(kept)
    known = CausalMasks()
    assert [known.is_causal(kept) for _ in range(3 * MOST_LOOKS)] == [True] * 3 * MOST_LOOKS
    assert not known.is_causal(causal().requires_grad_())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kdim": 8, "vdim": 8}, "keys or values of another width"),
        ({"add_bias_kv": True}, "it adds keys of its own"),
        ({"add_zero_attn": True}, "it adds keys of its own"),
    ],
)
def test_other_shapes_of_it_stay_and_say_why(options: dict[str, Any], words: str) -> None:
    (row,) = convert(nn.MultiheadAttention(W, H, **options)).rows
    assert row.became is None
    assert words in row.reason


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_encoder_layers_agree_in_training_and_evaluation(norm_first: bool, dropout: float) -> None:
    old = nn.TransformerEncoderLayer(W, H, 40, dropout, norm_first=norm_first, batch_first=True, activation="gelu")
    for parameter in old.parameters():
        nn.init.normal_(parameter, 0.1, 0.3)
    new = copy.deepcopy(old)
    report = convert(new)
    assert {row.path: row.became for row in report.rows} == {
        "": "FusedEncoderLayer",
        "self_attn": "FusedMultiheadAttention",
        "norm1": "FusedLayerNorm",
        "norm2": "FusedLayerNorm",
    }
    assert type(new).__name__ == "TransformerEncoderLayer"
    padding = torch.zeros(B, S, dtype=torch.bool)
    padding[1, -3:] = True
    for training in (True, False):
        for options in (
            {},
            {"src_mask": causal()},
            {"src_mask": causal().isinf(), "is_causal": True},
            {"src_key_padding_mask": padding},
            {"src_key_padding_mask": padding, "src_mask": causal().isinf()},
        ):
            results = []
            for module in (old.train(training), new.train(training)):
                torch.manual_seed(5)
                x = torch.randn(B, S, W, requires_grad=True)
                torch.manual_seed(6)
                y = module(x, **options)
                y.square().sum().backward()
                results.append([y.detach(), x.grad, *(p.grad.clone() for p in module.parameters())])
                module.zero_grad()
            if dropout and training and "src_key_padding_mask" not in options:
                continue  # attention draws its own dropout, from the same generator in another order
            for ours, theirs in zip(*reversed(results), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=2e-4)
    with torch.no_grad():
        x = torch.randn(B, S, W)
        assert torch.equal(new.eval()(x), old.eval()(x))  # torch's fast path


def test_hooks_on_a_norm_of_an_encoder_layer_are_called(models: SimpleNamespace) -> None:
    model = models.EncoderClassifier()
    convert(model)
    tokens = torch.randint(0, 51, (S, B))
    plain = model(tokens)
    seen: list[Tensor] = []
    handle = model.encoder.layers[0].norm2.register_forward_hook(lambda module, args, y: seen.append(y))
    torch.testing.assert_close(model(tokens), plain)
    assert len(seen) == 1
    handle.remove()
    model(tokens)
    assert len(seen) == 1


@pytest.mark.parametrize("norm_first", [True, False])
def test_the_plain_training_script_trains_alike(models: SimpleNamespace, norm_first: bool) -> None:
    losses = []
    for converts in (False, True):
        torch.manual_seed(1)
        model = models.EncoderClassifier(norm_first)
        if converts:
            convert(model)
            assert sum(isinstance(module, FusedMultiheadAttention) for module in model.modules()) == 2
        optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
        rows = []
        for _ in range(8):
            tokens = (torch.arange(S + 1)[:, None] + torch.randint(0, 40, (1, B))) % 51
            loss = nn.functional.cross_entropy(model(tokens[:-1]).flatten(0, 1), tokens[1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            rows.append(loss.item())
        losses.append(rows)
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert losses[0][-1] < losses[0][0]


def test_attention_of_a_library_is_named(models: SimpleNamespace) -> None:
    class OwnAttention(nn.Module):
        def __init__(self, chosen: str) -> None:
            super().__init__()
            self.config = SimpleNamespace(_attn_implementation=chosen)
            self.proj = nn.Linear(4, 4)

    eager, sdpa = convert(nn.Sequential(OwnAttention("eager"), OwnAttention("sdpa"))).left
    assert "attn_implementation='sdpa'" in eager.reason
    assert "one kernel already (sdpa)" in sdpa.reason


def test_trials_do_not_use_up_the_looks_at_masks() -> None:
    """Each trial makes masks of its own, and a deep model has many trials."""
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8), 20, enable_nested_tensor=False)
    attention._masks._looks_left = attention.MOST_LOOKS
    convert(model)
    assert attention._masks._looks_left == attention.MOST_LOOKS


def test_a_mask_from_inference_mode_is_no_obstacle() -> None:
    module = nn.MultiheadAttention(12, 3, batch_first=True)
    with torch.inference_mode():
        mask = nn.Transformer.generate_square_subsequent_mask(5)
        x = torch.randn(2, 5, 12)
        wanted, _ = module(x, x, x, need_weights=False, attn_mask=mask)
        convert(module)
        for training in (True, False):
            found, _ = module.train(training)(x, x, x, need_weights=False, attn_mask=mask)
            torch.testing.assert_close(found, wanted)
