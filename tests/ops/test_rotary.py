"""Rotary position embedding against float64, through the reference, the interpreter and the GPU."""

from __future__ import annotations

import copy
import pickle
import re

import pytest
import torch
from torch import Tensor

from fusestep.errors import UserError
from fusestep.nn import RotaryPositionEmbedding
from fusestep.ops.rotary import apply_rotary_pos_emb, rotary
from fusestep.ops.rotary_kernel import compilations, rotary_launch

#: The interpreter truncates where hardware rounds to bf16: one unit in the last place instead of half.
TOLERANCE = {torch.float32: 2e-7, torch.float16: 1e-3, torch.bfloat16: 6e-3}


def exact(t: Tensor, freqs: Tensor, positions: Tensor, interleaved: bool, sign: float = 1.0) -> Tensor:
    """Every pair as a complex number, times e^(iθ); `positions` has one number for each head's row of t."""
    dim = freqs.shape[-1]
    angles = freqs.double().reshape(-1, dim)[positions.long()]
    angles = angles[..., ::2] if interleaved else angles[..., : dim // 2]
    turned = t[..., :dim].double()
    if interleaved:
        pairs = torch.complex(turned[..., ::2], turned[..., 1::2])
    else:
        pairs = torch.complex(turned[..., : dim // 2], turned[..., dim // 2 :])
    pairs = pairs * torch.exp(1j * sign * angles)
    parts = (pairs.real, pairs.imag)
    turned = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
    return torch.cat((turned, t[..., dim:].double()), -1)


def error(value: Tensor, truth: Tensor) -> float:
    return float((value.detach().double() - truth).norm() / truth.norm())


def check(
    t: Tensor,
    freqs: Tensor,
    positions: Tensor,
    tensor_format: str,
    interleaved: bool = False,
    **options: Tensor,
) -> None:
    """The rotation and its gradient against float64; both are contiguous and of t's dtype."""
    t = t.detach().requires_grad_()
    y = apply_rotary_pos_emb(t, freqs, tensor_format, interleaved=interleaved, **options)
    positions = positions[..., None].expand(t.shape[:-1])
    assert y.dtype is t.dtype
    assert y.is_contiguous()
    assert error(y, exact(t.detach(), freqs, positions, interleaved)) <= TOLERANCE[t.dtype]
    # A gradient that is expanded along its heads is read as it lies.
    dy = torch.randn(t.shape[:-2], device=t.device).to(t.dtype)[..., None, None].expand(t.shape)
    for gradient in (dy, torch.randn(t.shape, device=t.device).to(t.dtype)):
        (dt,) = torch.autograd.grad(y, t, gradient, retain_graph=True)
        assert dt.dtype is t.dtype
        assert error(dt, exact(gradient, freqs, positions, interleaved, -1.0)) <= TOLERANCE[t.dtype]


def check_all(device: torch.device, dtype: torch.dtype, interleaved: bool) -> None:
    """Every format: partial rotation, odd sizes, start positions, and views that are no run of memory."""
    freqs = RotaryPositionEmbedding(10, interleaved=interleaved, device=device)(29)
    start = torch.tensor([0, 7, 19], device=device)
    place = torch.arange(9, device=device)
    # As a slice of fused projections, then with heads before the sequence, then every other element of a head.
    fused = torch.randn(3, 9, 3, 5, 13, device=device).to(dtype)
    check(fused[:, :, 1], freqs, place.expand(3, 9), "bshd", interleaved)
    check(fused[:, :, 2], freqs, place + start[:, None], "bshd", interleaved, start_positions=start)
    check(fused[:, :, 0].transpose(1, 2).contiguous().transpose(1, 2), freqs, place.expand(3, 9), "bshd", interleaved)
    wide = torch.randn(9, 3, 5, 26, device=device).to(dtype)[..., ::2]
    check(wide, freqs, place[:, None] + start, "sbhd", interleaved, start_positions=start.int())
    # Packed sequences of 4, 0, 1 and 12 tokens.
    offsets = torch.tensor([0, 4, 4, 5, 17], dtype=torch.int32, device=device)
    packed = torch.randn(17, 2, 13, device=device).to(dtype)
    within = torch.cat([torch.arange(n, device=device) for n in (4, 0, 1, 12)])
    check(packed, freqs, within, "thd", interleaved, cu_seqlens=offsets)
    start = torch.tensor([3, 1, 11, 0], device=device)
    shifted = within + start.repeat_interleave(offsets.diff().long())
    check(packed, freqs, shifted, "thd", interleaved, cu_seqlens=offsets, start_positions=start)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_and_gradient_agree_with_float64(device: torch.device, dtype: torch.dtype, interleaved: bool) -> None:
    check_all(device, dtype, interleaved)


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("interleaved", [False, True])
def test_kernel_agrees_with_float64(dtype: torch.dtype, interleaved: bool) -> None:
    check_all(torch.device("cpu"), dtype, interleaved)


@pytest.mark.interpreter
def test_kernel_passes_on_the_many_elements_that_are_not_rotated() -> None:
    freqs = RotaryPositionEmbedding(2)(3)
    t = torch.randn(1, 3, 1, 37)
    check(t, freqs, torch.arange(3)[None], "bshd")


@pytest.mark.interpreter
@pytest.mark.parametrize("position", [0, 1000, 99_000])
def test_kernel_turns_by_large_angles(position: int) -> None:
    freqs = RotaryPositionEmbedding(16)(32, offset=position)
    t = torch.randn(1, 32, 1, 16)
    y = apply_rotary_pos_emb(t, freqs)
    # On a GPU fused multiply-adds keep 1e-7 throughout; the interpreter has none.
    assert error(y, exact(t, freqs, torch.arange(32)[None, :, None], False)) <= (2e-7 if position < 2000 else 1e-6)


def check_unknown_positions(device: torch.device) -> None:
    freqs = RotaryPositionEmbedding(6, device=device)(8)
    t = torch.randn(3, 5, 2, 8, device=device)
    start = torch.tensor([0, 5, -2], device=device)
    y = apply_rotary_pos_emb(t, freqs, start_positions=start)
    is_unknown = torch.zeros(3, 5, dtype=torch.bool, device=device)
    is_unknown[1, 3:] = is_unknown[2, :2] = True
    assert torch.equal(y[..., :6].isnan(), is_unknown[..., None, None].expand(3, 5, 2, 6))
    assert torch.equal(y[..., 6:], t[..., 6:])
    # Tokens beyond the last sequence.
    offsets = torch.tensor([0, 3, 5], dtype=torch.int32, device=device)
    packed = torch.randn(9, 2, 8, device=device)
    rotated = apply_rotary_pos_emb(packed, freqs, "thd", cu_seqlens=offsets)
    assert torch.equal(rotated[5:], packed[5:])
    assert not bool(torch.equal(rotated[1], packed[1]))


def test_unknown_positions_give_nan_and_tokens_beyond_the_last_sequence_pass(device: torch.device) -> None:
    check_unknown_positions(device)


@pytest.mark.interpreter
def test_kernel_gives_nan_at_unknown_positions_and_passes_tokens_beyond_the_last_sequence() -> None:
    check_unknown_positions(torch.device("cpu"))


@pytest.mark.parametrize("interleaved", [False, True])
def test_gradients_of_the_reference_to_second_order(interleaved: bool) -> None:
    freqs = RotaryPositionEmbedding(6, interleaved=interleaved)(9)
    start = torch.tensor([0, 3])
    t = torch.randn(2, 5, 3, 8, dtype=torch.float64, requires_grad=True)

    def rotate(t: Tensor) -> Tensor:
        return apply_rotary_pos_emb(t, freqs, start_positions=start, interleaved=interleaved)

    assert torch.autograd.gradcheck(rotate, t)
    assert torch.autograd.gradgradcheck(rotate, t)


def test_scores_depend_on_the_distance_alone() -> None:
    freqs = RotaryPositionEmbedding(32)(64)
    q, k = torch.randn(2, 32, dtype=torch.float64).unbind()
    scores = [
        apply_rotary_pos_emb(q.view(1, 1, 1, 32), freqs, start_positions=torch.tensor([p]))
        .mul(apply_rotary_pos_emb(k.view(1, 1, 1, 32), freqs, start_positions=torch.tensor([p + 5])))
        .sum()
        for p in (0, 11, 58)
    ]
    assert float((torch.stack(scores) - scores[0]).abs().max()) <= 1e-4 * float(q.norm() * k.norm())


# torch.compile makes an instance of every autograd.Function that it traces, and warns of that itself.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_works_under_compile_meta_transforms_and_for_nothing() -> None:
    freqs = RotaryPositionEmbedding(8)(12)
    t = torch.randn(2, 5, 3, 8, requires_grad=True)
    y = apply_rotary_pos_emb(t, freqs)
    compiled = torch.compile(apply_rotary_pos_emb, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(t, freqs), y)
    torch.library.opcheck(rotary, (t.detach(), freqs, None, None, "bshd", False, False))
    assert rotary(t.to("meta"), freqs.to("meta"), None, None, "bshd", False, False).shape == t.shape
    assert torch.equal(torch.func.vmap(lambda t: apply_rotary_pos_emb(t, freqs))(t[None].detach())[0], y)
    assert apply_rotary_pos_emb(torch.empty(0, 5, 3, 8), freqs).shape == (0, 5, 3, 8)
    assert apply_rotary_pos_emb(torch.empty(2, 0, 3, 8), freqs).shape == (2, 0, 3, 8)


def test_angles_follow_the_formula_and_the_offset() -> None:
    for interleaved in (False, True):
        rotary_embedding = RotaryPositionEmbedding(20, 0.5, rotary_base=500.0, interleaved=interleaved)
        freqs = rotary_embedding(7, offset=3)
        assert freqs.shape == (7, 1, 1, 10)
        assert freqs.dtype is torch.float32
        pair = torch.arange(10) // 2 if interleaved else torch.arange(10) % 5
        truth = torch.arange(3, 10).double()[:, None] * 500.0 ** (-2.0 * pair.double() / 10)
        assert error(freqs[:, 0, 0], truth) <= 1e-7


def test_positions_are_interpolated_when_both_lengths_are_known() -> None:
    plain = RotaryPositionEmbedding(4)(16)
    assert torch.equal(RotaryPositionEmbedding(4, seq_len_interpolation_factor=2)(16), plain)
    squeezed = RotaryPositionEmbedding(4, seq_len_interpolation_factor=2, pretrained_max_position_embeddings=8)
    torch.testing.assert_close(squeezed(16), plain / 2)
    # Beyond twice the length of pretraining the sequence is squeezed to that length.
    torch.testing.assert_close(squeezed(32)[31], torch.full_like(plain[0], 31 / 4) * plain[1])


def test_angles_survive_casts_copies_and_memory_without_values() -> None:
    module = RotaryPositionEmbedding(16)
    freqs = module(9)
    assert not module.state_dict()
    assert torch.equal(copy.deepcopy(module).bfloat16()(9), freqs)
    assert torch.equal(pickle.loads(pickle.dumps(module)).half()(9), freqs)
    with torch.device("meta"):
        bare = RotaryPositionEmbedding(16)
    assert bare(9).is_meta
    assert torch.equal(bare.to_empty(device="cpu")(9), freqs)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tensor_format": "bhsd"}, 'pass "bshd"'),
        ({"t": torch.randn(5, 3, 8)}, "four dimensions"),
        ({"t": torch.ones(2, 5, 3, 8, dtype=torch.int32)}, "pass float32"),
        ({"freqs": torch.randn(9, 1, 1, 7)}, "even dim of at most 8"),
        ({"freqs": torch.randn(9, 1, 1, 10)}, "even dim of at most 8"),
        ({"freqs": torch.randn(9, 2, 1, 8)}, "even dim of at most 8"),
        ({"freqs": torch.randn(9, 1, 1, 8).bfloat16()}, "pass them in float32"),
        ({"freqs": torch.randn(9, 1, 1, 8, requires_grad=True)}, "freqs.detach()"),
        ({"freqs": torch.randn(4, 1, 1, 8)}, "make freqs for at least 5"),
        ({"start_positions": torch.zeros(5, dtype=torch.int32)}, "pass (2,) of int32"),
        ({"start_positions": torch.zeros(2)}, "pass (2,) of int32"),
        ({"cu_seqlens": torch.zeros(2, dtype=torch.int32)}, 'with "thd"'),
        ({"tensor_format": "thd", "t": torch.randn(5, 3, 8)}, 'with "thd"'),
        ({"t": torch.randn(2, 5, 3, 8, device="meta")}, "move them to one device"),
    ],
)
def test_what_cannot_be_rotated_is_told_in_a_sentence(change: dict[str, object], words: str) -> None:
    arguments: dict[str, object] = {"t": torch.randn(2, 5, 3, 8), "freqs": torch.randn(9, 1, 1, 8)}
    with pytest.raises(UserError, match=re.escape(words)):
        apply_rotary_pos_emb(**(arguments | change))  # type: ignore[arg-type]


@pytest.mark.parametrize("share", [0.0, 1.5, 0.3])
def test_a_share_without_whole_pairs_is_refused(share: float) -> None:
    with pytest.raises(UserError, match="even number"):
        RotaryPositionEmbedding(10, share)


def test_launches_cover_a_head() -> None:
    for dim in (2, 6, 64, 128, 160, 256):
        choice = rotary_launch(dim)
        assert choice.block >= dim // 2
        assert choice.block & (choice.block - 1) == choice.tokens & (choice.tokens - 1) == 0
    assert list(compilations())
