"""Linear + cross entropy against float64, in both ways of computing gradients, on any device."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fusestep import linear_cross_entropy
from fusestep.errors import UserError
from fusestep.ops import cross_entropy_kernel as kernel
from fusestep.ops import linear_cross_entropy_passes as passes

IGNORED = -7
WAYS = ("forward", "recompute")
#: Relative norm of an error. Logits and their gradients are rounded to 16 bits, as in torch.
LOSS_TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 4e-3}
TOLERANCE = {torch.float64: 1e-11, torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
ALL = {"label_smoothing": 0.15, "z_loss": 2e-3, "softcap": 9.0}
Operands = tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]


def operands(
    tokens: tuple[int, ...], width: int, vocabulary: int, dtype: torch.dtype, device: torch.device, bias: bool = True
) -> Operands:
    """x, weight, bias, target and token weights; x has a mean, and some targets are ignored."""
    x = (torch.randn(*tokens, width, device=device) + 0.3).to(dtype).requires_grad_()
    weight = (torch.randn(vocabulary, width, device=device) * (2.0 / math.sqrt(width))).to(dtype).requires_grad_()
    added = torch.randn(vocabulary, device=device).to(dtype).requires_grad_() if bias else None
    target = torch.randint(vocabulary, tokens, device=device)
    target.view(-1)[1::5] = IGNORED
    return x, weight, added, target, torch.rand(tokens, device=device) * 2


def exact(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    weights: Tensor | None,
    reduction: str,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
) -> Tensor:
    """By the definition, through all logits, of operands in float64."""
    y = x @ weight.t() if bias is None else x @ weight.t() + bias
    if softcap is not None:
        y = softcap * torch.tanh(y / softcap)
    vocabulary = y.shape[-1]
    wanted = F.one_hot(target.clamp(min=0).long(), vocabulary).double() * (1 - label_smoothing)
    normaliser = torch.logsumexp(y, -1)
    loss = -((wanted + label_smoothing / vocabulary) * (y - normaliser[..., None])).sum(-1)
    share = (target != IGNORED).double() if weights is None else (target != IGNORED) * weights.double()
    loss = torch.where(target != IGNORED, (loss + z_loss * normaliser.square()) * share, 0.0)
    return {"none": loss, "sum": loss.sum(), "mean": loss.sum() / share.sum()}[reduction]


def error(value: Tensor, truth: Tensor, floor: float = 0.0) -> float:
    """Norm of the difference over that of the truth and `floor`, which is for what is small by cancellation."""
    assert value.shape == truth.shape
    value, truth = value.detach().double(), truth.detach().double()
    scale = truth.norm() + floor
    return float((value - truth).norm() / (scale if scale > 0 else 1))


def check(
    given: Operands, reduction: str, weighted: bool = False, tolerance: float | None = None, **options: Any
) -> None:
    """Loss and all gradients against float64; a second backward gives the same bits."""
    x, weight, bias, target, token_weights = given
    used = token_weights if weighted else None
    leaves = [leaf for leaf in (x, weight, bias) if leaf is not None]
    wide = [None if leaf is None else leaf.detach().double().requires_grad_() for leaf in (x, weight, bias)]
    meant = {name: options[name] for name in ALL if name in options}
    truth = exact(*wide, target, used, reduction, **meant)  # type: ignore[arg-type]
    loss = linear_cross_entropy(
        *(x, weight, target, bias), ignore_index=IGNORED, reduction=reduction, token_weights=used, **options
    )
    assert loss.dtype is (torch.float64 if x.dtype is torch.float64 else torch.float32)
    assert error(loss, truth, floor=0.1) <= LOSS_TOLERANCE[x.dtype]
    flow = torch.randn(loss.shape, device=loss.device).to(loss.dtype) if reduction == "none" else loss.new_tensor(0.7)
    if x.dtype is torch.float16:  # as a loss scaler has it, without which the smallest gradients are no fp16 numbers
        flow *= 1024
    found = torch.autograd.grad(loss, leaves, flow, retain_graph=True)
    true = torch.autograd.grad(truth, [leaf for leaf in wide if leaf is not None], flow.double())
    for leaf, value, wanted in zip(leaves, found, true, strict=True):
        assert value.dtype is leaf.dtype
        assert error(value, wanted, floor=1e-3) <= (tolerance or TOLERANCE[x.dtype])
    again = torch.autograd.grad(loss, leaves, flow)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))


@pytest.fixture
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices of the vocabulary, and chunks, of a few."""
    monkeypatch.setattr(passes, "CHUNK_BYTES", 1)
    monkeypatch.setattr(passes, "QUARTER_BYTES", 1)
    monkeypatch.setattr(passes, "CHUNK_MULTIPLE", 8)
    monkeypatch.setattr(passes, "FEWEST_COLUMNS", 8)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.usefixtures("small_slices")
def test_agrees_with_float64(dtype: torch.dtype, way: str, reduction: str, device: torch.device) -> None:
    if way == "forward" and reduction == "none":
        way = "auto"  # there is no other
    for options in ({}, ALL):
        check(operands((3, 7), 19, 53, dtype, device), reduction, gradients=way, chunk_tokens=6, **options)
        check(operands((21,), 24, 40, dtype, device, bias=False), reduction, True, gradients=way, **options)


@pytest.mark.interpreter
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.usefixtures("small_slices")
def test_kernel_agrees_with_float64(dtype: torch.dtype, way: str) -> None:
    # bf16 is truncated by the interpreter where hardware rounds it.
    tolerance = 2e-2 if dtype is torch.bfloat16 else None
    for options in ({}, ALL):
        given = operands((2, 5), 12, 37, dtype, torch.device("cpu"))
        check(given, "mean", True, tolerance, gradients=way, chunk_tokens=4, **options)


@pytest.mark.interpreter
@pytest.mark.parametrize("vocabulary", [700, 768])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kernel_walks_rows_of_several_tiles_twice(
    dtype: torch.dtype, vocabulary: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "WALKED_TWICE_LONGEST", (32, 1))
    monkeypatch.setattr(kernel, "WALKED_TWICE", ())
    kernel.prepare_rows.cache_clear()
    for options in ({}, ALL):
        given = operands((9,), 12, vocabulary, dtype, torch.device("cpu"), bias=False)
        check(given, "sum", True, 2e-2 if dtype is torch.bfloat16 else None, gradients="forward", **options)
    kernel.prepare_rows.cache_clear()


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_agrees_with_float64_at_real_vocabularies(dtype: torch.dtype, way: str) -> None:
    device = torch.device("cuda", 0)
    for tokens, width, vocabulary in ((777, 768, 50257), (300, 100, 128256), (1024, 129, 1001)):
        given = operands((tokens,), width, vocabulary, dtype, device)
        check(given, "mean", gradients=way, chunk_tokens=256)
        check(given, "mean", True, gradients=way, chunk_tokens=500, **ALL)


@settings(max_examples=60)
@given(
    tokens=st.integers(0, 11),
    width=st.integers(1, 9),
    vocabulary=st.integers(1, 40),
    chunk=st.one_of(st.none(), st.integers(1, 13)),
    way=st.sampled_from(["auto", *WAYS]),
    reduction=st.sampled_from(["mean", "sum", "none"]),
    smoothing=st.sampled_from([0.0, 0.1, 1.0]),
    z_loss=st.sampled_from([0.0, 1e-3]),
    softcap=st.sampled_from([None, 0.5, 40.0]),
    weighted=st.booleans(),
    bias=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_any_shape_and_option_in_float64(
    tokens: int,
    width: int,
    vocabulary: int,
    chunk: int | None,
    way: str,
    reduction: str,
    smoothing: float,
    z_loss: float,
    softcap: float | None,
    weighted: bool,
    bias: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    given = operands((tokens,), width, vocabulary, torch.float64, torch.device("cpu"), bias)
    if reduction == "none" and way == "forward":
        way = "recompute"
    if reduction == "mean" and not bool((given[3] != IGNORED).any()):
        reduction = "sum"  # the mean over nothing has a test of its own
    check(
        *(given, reduction, weighted),
        gradients=way,
        chunk_tokens=chunk,
        label_smoothing=smoothing,
        z_loss=z_loss,
        softcap=softcap,
    )


def test_agrees_with_torch_where_torch_has_the_same(device: torch.device) -> None:
    x, weight, bias, target, _ = operands((4, 9), 16, 31, torch.float32, device)
    for reduction in ("mean", "sum", "none"):
        options = {"reduction": reduction, "label_smoothing": 0.1, "ignore_index": IGNORED}
        wanted = F.cross_entropy(F.linear(x, weight, bias).flatten(0, 1), target.flatten(), **options)
        found = linear_cross_entropy(x, weight, target, bias, **options)
        torch.testing.assert_close(found, wanted.view(found.shape), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("way", WAYS)
def test_autocast_computes_as_it_does_for_torch_and_keeps_gradients_in_fp32(way: str, device: torch.device) -> None:
    x, weight, bias, target, _ = operands((5, 8), 16, 301, torch.float32, device)
    leaves = [x, weight, bias]
    with torch.autocast(device.type, torch.bfloat16):
        loss = linear_cross_entropy(x, weight, target, bias, ignore_index=IGNORED, gradients=way, chunk_tokens=16)
        logits = F.linear(x, weight, bias)
        wanted = F.cross_entropy(logits.float().flatten(0, 1), target.flatten(), ignore_index=IGNORED)
    torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=1e-5)
    # As good as torch's own: the weight's gradient is not rounded to bf16 on its way.
    found = torch.autograd.grad(loss, leaves)
    theirs = torch.autograd.grad(wanted, leaves)
    wide = [leaf.detach().bfloat16().double().requires_grad_() for leaf in leaves]
    truth = torch.autograd.grad(exact(*wide, target, None, "mean"), wide)
    for leaf, ours, other, true in zip(leaves, found, theirs, truth, strict=True):
        assert ours.dtype is leaf.dtype
        assert error(ours, true) <= 1.1 * error(other, true)
    with torch.autocast(device.type, torch.bfloat16):  # which leaves fp64 alone
        loss = linear_cross_entropy(x.double(), weight.double(), target, ignore_index=IGNORED, gradients=way)
    assert loss.dtype is torch.float64


@pytest.mark.parametrize("way", WAYS)
def test_only_the_gradients_that_are_needed(way: str, device: torch.device) -> None:
    given = operands((13,), 8, 29, torch.float32, device)
    for wanted in range(1, 8):
        leaves = [
            leaf.detach().requires_grad_(bool(wanted >> place & 1))
            for place, leaf in enumerate(given[:3])
            if leaf is not None
        ]
        loss = linear_cross_entropy(leaves[0], leaves[1], given[3], leaves[2], ignore_index=IGNORED, gradients=way)
        loss.backward()
        wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
        true = torch.autograd.grad(exact(*wide, given[3], None, "mean"), wide)
        for leaf, gradient in zip(leaves, true, strict=True):
            assert (leaf.grad is not None) == leaf.requires_grad
            assert leaf.grad is None or error(leaf.grad, gradient) <= 5e-6
    with torch.no_grad():
        assert not linear_cross_entropy(*given[:2], given[3], ignore_index=IGNORED).requires_grad


def test_operands_of_any_strides(device: torch.device) -> None:
    for make in (lambda t: t[..., ::2], lambda t: t[..., 1:5], lambda t: t[..., :1].expand(*t.shape[:-1], 4)):
        x = make(torch.randn(3, 5, 8, device=device)).requires_grad_()
        weight = make(torch.randn(23, 8, device=device)).requires_grad_()
        given = (x, weight, None, torch.randint(23, (3, 5), device=device), torch.rand(3, 5, device=device))
        for way in WAYS:
            check(given, "mean", gradients=way)
    transposed = torch.randn(8, 23, device=device).t().requires_grad_()
    x = torch.randn(6, 8, device=device).t().contiguous().t().requires_grad_()
    check((x, transposed, None, torch.randint(23, (6,), device=device), torch.rand(6, device=device)), "sum")


def test_a_head_tied_to_its_embedding_gets_both_gradients(device: torch.device) -> None:
    table = torch.randn(31, 12, device=device, requires_grad=True)
    tokens, target = torch.randint(31, (9,), device=device), torch.randint(31, (9,), device=device)
    linear_cross_entropy(table[tokens].tanh(), table, target, chunk_tokens=4).backward()
    wide = table.detach().double().requires_grad_()
    exact(wide[tokens].tanh(), wide, None, target, None, "mean").backward()
    assert error(table.grad, wide.grad) <= 5e-6


@pytest.mark.parametrize("way", WAYS)
def test_small_gradients_in_fp16_do_not_vanish(way: str, device: torch.device) -> None:
    # Each of 2000 tokens gives each of 3000 classes 1.7e-7, of which fp16 holds three steps, before the loss scale.
    x = (torch.randn(2000, 16, device=device) * 0.01).half().requires_grad_()
    weight = torch.randn(3000, 16, device=device).half().requires_grad_()
    target = torch.zeros(2000, dtype=torch.int64, device=device)
    loss = linear_cross_entropy(x, weight, target, gradients=way) * 8192.0
    found = torch.autograd.grad(loss, [x, weight])
    wide = [leaf.detach().double().requires_grad_() for leaf in (x, weight)]
    true = torch.autograd.grad(exact(*wide, None, target, None, "mean") * 8192.0, wide)
    assert error(found[0], true[0]) <= 3e-3
    assert error(found[1][1:], true[1][1:]) <= 3e-3  # without the target's row, beside which all others are small


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("way", WAYS)
def test_gradients_in_fp16_do_not_overflow_where_few_tokens_count(
    way: str, reduction: str, device: torch.device
) -> None:
    x = (torch.randn(3000, 16, device=device) * 0.5).half().requires_grad_()
    weight = (torch.randn(41, 16, device=device) * 0.5).half().requires_grad_()
    target = torch.randint(41, (3000,), device=device)
    few = torch.where(torch.arange(3000, device=device) % 600 == 7, target, IGNORED)
    some = (few != IGNORED).float()
    for targets, weights in ((few, None), (target, some), (target, 500 * torch.rand(3000, device=device)), (few, some)):
        options: dict[str, Any] = {"reduction": reduction, "ignore_index": IGNORED, "token_weights": weights}
        found = torch.autograd.grad(linear_cross_entropy(x, weight, targets, gradients=way, **options), [x, weight])
        wide = [leaf.detach().double().requires_grad_() for leaf in (x, weight)]
        truth = torch.autograd.grad(exact(*wide, None, targets, weights, reduction), wide)
        assert all(error(a, b) <= 3e-3 for a, b in zip(found, truth, strict=True))


def test_what_flows_in_is_not_rounded_before_it_multiplies(device: torch.device) -> None:
    x, weight, _, target, _ = operands((16,), 8, 24, torch.bfloat16, device, bias=False)
    loss = linear_cross_entropy(x, weight, target, ignore_index=IGNORED, gradients="forward")
    once = torch.autograd.grad(loss, [x, weight], retain_graph=True)
    third = torch.autograd.grad(loss / 3, [x, weight])
    # bf16 would round a third up by a part in 500, for all elements alike.
    for a, b in zip(once, third, strict=True):
        ratio = (b.double() * 3 * a.double()).sum() / a.double().square().sum()
        assert abs(float(ratio) - 1) < 6e-4


def test_gradients_are_scaled_where_they_lie_only_in_the_last_backward(device: torch.device) -> None:
    x, weight, _, target, _ = operands((16,), 8, 24, torch.bfloat16, device, bias=False)
    loss = linear_cross_entropy(x, weight, target, accumulate_dtype=torch.bfloat16, ignore_index=IGNORED)
    kept = loss.grad_fn.saved_tensors[:2]
    before = [one.clone() for one in kept]
    first = torch.autograd.grad(loss, [x, weight], loss.new_tensor(0.3), retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(kept, before, strict=True))
    last = torch.autograd.grad(loss, [x, weight], loss.new_tensor(0.3))
    assert all(torch.equal(a, b) for a, b in zip(last, first, strict=True))
    assert [one.data_ptr() for one in last] == [one.data_ptr() for one in kept]
    assert not any(torch.equal(a, b) for a, b in zip(kept, before, strict=True))


def test_sums_in_bf16_are_off_by_no_more_than_a_rounding_a_chunk(device: torch.device) -> None:
    x, weight, _, target, _ = operands((512,), 24, 67, torch.bfloat16, device, bias=False)
    options = {"ignore_index": IGNORED, "gradients": "forward", "chunk_tokens": 64, "reduction": "sum"}
    narrow, wide = (
        torch.autograd.grad(linear_cross_entropy(x, weight, target, accumulate_dtype=dtype, **options), weight)[
            0
        ].double()
        for dtype in (torch.bfloat16, torch.float32)
    )
    allowed, before = torch.zeros_like(wide), torch.zeros_like(wide)
    for end in range(64, 513, 64):
        exactly = weight.detach().double().requires_grad_()
        sums = exact(x.detach()[:end].double(), exactly, None, target[:end], None, "sum")
        after = torch.autograd.grad(sums, exactly)[0]
        # A GPU may round the product of a chunk before it adds it, as torch's reduced precision of sums allows.
        allowed += (after.abs() + (after - before).abs() * x.is_cuda) * 2**-9
        before = after
    allowed += wide.abs() * 2**-8  # the result in either dtype is rounded at the end
    # Partial sums are known up to the rounding of the logits' gradients.
    assert bool(((narrow - wide).abs() <= allowed * 1.2 + 2e-3).all())
    assert 0 < error(narrow, wide) <= 1.2e-2


def test_no_logits_but_those_of_a_chunk_exist(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    rooms: list[int] = []
    buffer = passes._buffer

    def watched(*arguments: Any) -> Tensor:
        made = buffer(*arguments)
        rooms.append(made.numel())
        return made

    monkeypatch.setattr(passes, "_buffer", watched)
    monkeypatch.setattr(passes, "CHUNK_BYTES", 2**17)
    monkeypatch.setattr(passes, "QUARTER_BYTES", 2**17)
    x, weight, _, target, _ = operands((1000,), 64, 3000, torch.float32, device, bias=False)
    for way in WAYS:
        linear_cross_entropy(x, weight, target, ignore_index=IGNORED, gradients=way).backward()
    assert len(rooms) == 3
    assert max(rooms) <= 1000 * 512  # the least slice; all would be three million


@pytest.mark.parametrize(
    ("count", "limit", "size"),
    [
        (8192, 2668, 2048),
        (8192, 2048, 2048),
        (8192, 10**9, 8192),
        (5, 1, 5),
        (1000, 300, 256),
        (129, 1, 128),
        (0, 7, 1),
    ],
)
def test_chunks_are_even_and_a_multiple(count: int, limit: int, size: int) -> None:
    assert passes._even(count, limit) == size


@pytest.mark.parametrize(
    ("tokens", "width", "vocabulary", "chunks"),
    [(8192, 768, 50304, 4), (16384, 768, 50304, 4), (65536, 768, 50304, 13), (8192, 2048, 128256, 4), (300, 9, 17, 1)],
)
def test_a_chunk_has_a_quarter_of_all_tokens_up_to_a_bound(
    tokens: int, width: int, vocabulary: int, chunks: int
) -> None:
    chunk = passes.chunk_of(tokens, vocabulary, width, torch.bfloat16)
    assert -(-tokens // chunk) == chunks
    assert chunk * vocabulary * 2 <= max(2**29, 2 * vocabulary * width) * 1.05


@pytest.mark.parametrize("way", WAYS)
def test_no_token_at_all(way: str, device: torch.device) -> None:
    x, weight, bias, target, _ = operands((0,), 6, 11, torch.float32, device)
    loss = linear_cross_entropy(x, weight, target, bias, reduction="sum", gradients=way)
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert bool((weight.grad == 0).all())
    assert bool((bias.grad == 0).all())
    assert math.isnan(float(linear_cross_entropy(x, weight, target, bias, gradients=way).detach()))
    assert linear_cross_entropy(x, weight, target, reduction="none").shape == (0,)


@pytest.mark.parametrize("way", WAYS)
def test_every_token_ignored_is_nan_with_gradients_of_zero_as_in_torch(way: str, device: torch.device) -> None:
    x, weight, bias, target, _ = operands((6,), 6, 11, torch.float32, device)
    loss = linear_cross_entropy(x, weight, torch.full_like(target, -100), bias, gradients=way)
    loss.backward()
    assert math.isnan(float(loss.detach()))
    assert all(bool((leaf.grad == 0).all()) for leaf in (x, weight, bias))


def test_targets_out_of_range_are_an_error_on_the_cpu() -> None:
    with pytest.raises(UserError, match=r"^linear_cross_entropy: target 11 is outside of the 11 classes"):
        linear_cross_entropy(torch.randn(2, 6), torch.randn(11, 6), torch.tensor([0, 11]))


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS)
def test_targets_out_of_range_give_nan_on_the_gpu(way: str) -> None:
    x, weight, bias, target, _ = operands((6,), 8, 11, torch.bfloat16, torch.device("cuda", 0))
    target[3] = 11
    loss = linear_cross_entropy(x, weight, target, bias, gradients=way)
    loss.backward()
    assert math.isnan(float(loss.detach()))
    assert bool(weight.grad.isnan().any())


@pytest.mark.parametrize("way", WAYS)
def test_gradcheck(way: str) -> None:
    x, weight, bias, target, weights = operands((7,), 4, 6, torch.float64, torch.device("cpu"))
    for options in ({}, ALL):
        assert torch.autograd.gradcheck(
            lambda *leaves, kept=options: linear_cross_entropy(
                *(leaves[0], leaves[1], target, leaves[2]),
                ignore_index=IGNORED,
                token_weights=weights,
                gradients=way,
                chunk_tokens=3,
                **kept,
            ),
            (x, weight, bias),
        )


@pytest.mark.parametrize("way", WAYS)
def test_a_second_derivative_is_one_clear_error(way: str, device: torch.device) -> None:
    x, weight, _, target, _ = operands((6,), 6, 11, torch.float32, device)
    loss = linear_cross_entropy(x, weight, target, ignore_index=IGNORED, gradients=way)
    with pytest.raises(UserError, match=r"^linear_cross_entropy: its gradient has no gradient"):
        torch.autograd.grad(loss, x, create_graph=True)


def test_transforms_of_torch_func_work() -> None:
    x, weight, bias, target, weights = operands((5,), 4, 7, torch.float64, torch.device("cpu"))
    options = {"ignore_index": IGNORED, "token_weights": weights, **ALL}
    found = torch.func.hessian(lambda w: linear_cross_entropy(x.detach(), w, target, bias.detach(), **options))(
        weight.detach()
    )
    wide = torch.func.hessian(lambda w: exact(x.detach(), w, bias.detach(), target, weights, "mean", **ALL))(
        weight.detach()
    )
    torch.testing.assert_close(found, wide)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_traces_without_a_break(reduction: str, device: torch.device) -> None:
    x, weight, bias, target, weights = operands((3, 5), 8, 23, torch.float32, device)
    options = {"ignore_index": IGNORED, "token_weights": weights, "reduction": reduction, **ALL}
    compiled = torch.compile(
        lambda *leaves: linear_cross_entropy(leaves[0] * 2, leaves[1], target, leaves[2], **options).sum(),
        fullgraph=True,
        backend="aot_eager",
    )
    loss = compiled(x, weight, bias)
    found = torch.autograd.grad(loss, [x, weight, bias])
    wide = [leaf.detach().double().requires_grad_() for leaf in (x, weight, bias)]
    truth = exact(wide[0] * 2, wide[1], wide[2], target, weights, reduction, **ALL).sum()
    assert error(loss, truth) <= 2e-6
    for value, true in zip(found, torch.autograd.grad(truth, wide), strict=True):
        assert error(value, true) <= 5e-6


@pytest.mark.parametrize("op", ["losses", "gradients", "recomputed"])
def test_ops_are_as_they_say(op: str) -> None:
    x, weight, bias, target, weights = (
        None if tensor is None else tensor.detach()
        for tensor in operands((6,), 4, 9, torch.float32, torch.device("cpu"))
    )
    one, options = torch.tensor(0.5), (IGNORED, 0.1, 1e-3, 5.0)
    given = (x, weight, bias, target, weights)
    arguments: dict[str, tuple[Any, ...]] = {
        "losses": (*given, torch.bfloat16, 4, *options),
        "gradients": (*given, one, torch.bfloat16, torch.float32, True, True, False, 4, *options),
        "recomputed": (one.expand(6), torch.rand(6), *given, torch.bfloat16, False, True, True, *options),
    }
    found = getattr(torch.ops.fusestep, f"linear_cross_entropy_{op}").default
    torch.library.opcheck(found, arguments[op], test_utils=("test_schema", "test_faketensor"))


GOOD = {"x": torch.zeros(2, 3), "weight": torch.zeros(5, 3), "target": torch.zeros(2, dtype=torch.int64)}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"weight": torch.zeros(5, 4)}, r"pass x \(…, width\)"),
        ({"weight": torch.zeros(0, 3)}, r"pass x \(…, width\)"),
        ({"x": torch.zeros(2, 0), "weight": torch.zeros(5, 0)}, r"pass x \(…, width\)"),
        ({"weight": torch.zeros(15)}, r"pass x \(…, width\)"),
        ({"bias": torch.zeros(3)}, r"pass \(5,\)"),
        ({"x": torch.zeros(2, 3).bfloat16()}, "mix bfloat16, float32"),
        ({"x": torch.zeros(2, 3, dtype=torch.int64)}, "int64 is no dtype"),
        ({"target": torch.zeros(3, dtype=torch.int64)}, r"shape \(2,\)"),
        ({"gradients": "never"}, '"auto", "forward" or "recompute"'),
        ({"gradients": "forward", "reduction": "none"}, 'pass "recompute"'),
        ({"chunk_tokens": 0}, "at least 1"),
        ({"accumulate_dtype": torch.bfloat16}, "products are in float32"),
        ({"accumulate_dtype": torch.float16}, "accumulate_dtype is float16"),
        ({"label_smoothing": 2.0}, "from 0 to 1"),
        ({"target": torch.zeros(2, dtype=torch.int64, device="meta")}, "target is on meta"),
    ],
)
def test_bad_input_is_one_sentence(change: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        linear_cross_entropy(**(GOOD | change))


# On the GPU


def peak_beyond(run: Callable[[], Any], *kept: Tensor | None) -> int:
    """Bytes that a run needed beside what was there and beside tensors of the sizes of `kept`."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before - sum(one.nbytes for one in kept if one is not None)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("width", "vocabulary", "options", "bytes_allowed"),
    [
        (768, 50304, {}, 0.30e9),
        (768, 50304, {"gradients": "recompute"}, 0.30e9),
        (2048, 128256, {}, 1.10e9),
        (768, 50304, {"accumulate_dtype": torch.bfloat16, "chunk_tokens": 2816}, 0.30e9),
        (2048, 128256, {"accumulate_dtype": torch.bfloat16}, 0.60e9),
        (2048, 128256, {"accumulate_dtype": torch.bfloat16, "chunk_tokens": 4096}, 1.10e9),
        (2048, 128256, {"gradients": "recompute"}, 0.40e9),
    ],
    ids=str,
)
def test_memory_is_bounded(width: int, vocabulary: int, options: dict[str, Any], bytes_allowed: float) -> None:
    x, weight, _, target, _ = operands((8192,), width, vocabulary, torch.bfloat16, torch.device("cuda", 0), bias=False)

    def run() -> None:
        torch.autograd.grad(linear_cross_entropy(x, weight, target, ignore_index=IGNORED, **options), [x, weight])

    run()  # cuBLAS keeps a workspace from the first call on
    assert peak_beyond(run, x, weight) <= bytes_allowed


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS)
def test_repeats_bit_for_bit_and_never_waits(way: str, no_waiting: Callable[[], AbstractContextManager[None]]) -> None:
    given = operands((2049,), 768, 50257, torch.bfloat16, torch.device("cuda", 0))
    x, weight, bias, target, weights = given

    def run() -> tuple[Tensor, ...]:
        loss = linear_cross_entropy(
            *(x, weight, target, bias),
            ignore_index=IGNORED,
            token_weights=weights,
            gradients=way,
            chunk_tokens=512,
            **ALL,
        )
        return (loss.detach(), *torch.autograd.grad(loss, [x, weight, bias]))

    first = run()
    with no_waiting():
        others = [run() for _ in range(3)]
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS)
def test_a_cuda_graph_holds_it(way: str) -> None:
    x, weight, _, target, _ = operands((600,), 64, 5001, torch.bfloat16, torch.device("cuda", 0), bias=False)

    def run() -> tuple[Tensor, ...]:
        loss = linear_cross_entropy(x, weight, target, ignore_index=IGNORED, gradients=way, chunk_tokens=256)
        return (loss.detach(), *torch.autograd.grad(loss, [x, weight]))

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = run()
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
        target.copy_(torch.randint_like(target, 5001))
        target[::3] = IGNORED
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(captured, run(), strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_products_are_added_in_fp32_whichever_way_torch_offers(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = (torch.randn(301, 77, device="cuda").to(dtype), torch.randn(77, 45, device="cuda").to(dtype))
    start = torch.randn(301, 45, device="cuda")
    truth = start.double() + a.double() @ b.double()
    for offers in (passes.adds_in_fp32(a.device, dtype), False):
        monkeypatch.setattr(passes, "adds_in_fp32", lambda *_, answer=offers: answer)
        total = start.clone()
        passes.add_product(a, b, total)
        assert error(total, truth) <= 1e-6


@pytest.mark.gpu
def test_more_logits_than_32_bits_count() -> None:
    device = torch.device("cuda", 0)
    x = torch.randn(17000, 8, device=device).bfloat16().requires_grad_()
    weight = torch.randn(130000, 8, device=device).bfloat16().requires_grad_()
    target = torch.randint(130000, (17000,), device=device)
    whole = linear_cross_entropy(x, weight, target, chunk_tokens=17000, reduction="none")
    parts = linear_cross_entropy(x, weight, target, chunk_tokens=1000, reduction="none")
    torch.testing.assert_close(whole, parts, rtol=1e-6, atol=1e-6)
    wide = F.cross_entropy(x.detach()[-5:].double() @ weight.detach().double().t(), target[-5:], reduction="none")
    torch.testing.assert_close(whole[-5:].double(), wide, rtol=4e-3, atol=1e-2)
