"""Cross entropy of logits against float64: the reference, the kernel through the interpreter, and on a GPU."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fusestep.errors import UserError
from fusestep.nn.functional import cross_entropy
from fusestep.ops.cross_entropy_parts import find_parts
from fusestep.ops.cross_entropy_rows import Options, write_rows

IGNORED = -7
#: Relative norm of an error of losses, and of gradients; the interpreter truncates where hardware rounds to bf16.
LOSS_TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 2e-6, torch.bfloat16: 2e-6}
TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}


def exact(
    z: Tensor,
    target: Tensor,
    weights: Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
) -> Tensor:
    """Losses in float64 by the definition: minus the expected log-probability under the smoothed target."""
    y = z.double()
    if softcap is not None:
        y = softcap * torch.tanh(y / softcap)
    vocabulary = y.shape[-1]
    is_counted = target != IGNORED
    wanted = F.one_hot(target.clamp(min=0).long(), vocabulary).double() * (1 - label_smoothing)
    wanted = wanted + label_smoothing / vocabulary
    normaliser = torch.logsumexp(y, -1)
    loss = -(wanted * (y - normaliser[..., None])).sum(-1) + z_loss * normaliser.square()
    if weights is not None:
        loss = loss * weights.double()
    return torch.where(is_counted, loss, 0.0)


def error(value: Tensor, truth: Tensor, floor: float = 0.0) -> float:
    """Norm of the difference over that of the truth and `floor`, which is for what is small by cancellation."""
    assert value.shape == truth.shape
    value, truth = value.detach().double(), truth.detach().double()
    scale = truth.norm() + floor
    return float((value - truth).norm() / (scale if scale > 0 else 1))


def some(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, spread: float = 4.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, targets of which some are ignored, and weights."""
    logits = (torch.randn(shape, device=device) * spread + 1.0).to(dtype)
    target = torch.randint(shape[-1], shape[:-1], device=device)
    target.view(-1)[1::5] = IGNORED
    return logits, target, torch.rand(shape[:-1], device=device) * 2


def check(logits: Tensor, target: Tensor, weights: Tensor | None, **options: Any) -> None:
    """Losses, sum and mean, and the gradient of each, against float64."""
    z = logits.detach().requires_grad_()
    wide = logits.detach().double().requires_grad_()
    truth = exact(wide, target, weights, **options)
    count = (target != IGNORED).sum() if weights is None else weights[target != IGNORED].double().sum()
    flow = torch.randn(target.shape, device=target.device)
    for reduction, true in (("none", truth), ("sum", truth.sum()), ("mean", truth.sum() / count)):
        found = cross_entropy(z, target, ignore_index=IGNORED, reduction=reduction, token_weights=weights, **options)
        assert found.dtype is (torch.float64 if logits.dtype is torch.float64 else torch.float32)
        assert error(found, true) <= LOSS_TOLERANCE[logits.dtype]
        dloss = flow.to(found.dtype) if reduction == "none" else torch.full_like(found, 1.7)
        (gradient,) = torch.autograd.grad(found, z, dloss, retain_graph=True)
        (true_gradient,) = torch.autograd.grad(true, wide, dloss.double(), retain_graph=True)
        assert gradient.dtype is logits.dtype
        # Of one class the probability is 1, from which the target's share is taken away.
        floor = float(dloss.norm()) if logits.shape[-1] == 1 else 0.0
        assert error(gradient, true_gradient, floor) <= TOLERANCE[logits.dtype]
        assert bool((gradient[target == IGNORED] == 0).all())
        (again,) = torch.autograd.grad(found, z, dloss)  # a second backward gives the same
        assert torch.equal(again, gradient)


ALL = {"label_smoothing": 0.15, "z_loss": 2e-3, "softcap": 9.0}


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 1.0}, {"z_loss": 0.1}, {"softcap": 3.0}, ALL], ids=str)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_agrees_with_float64(dtype: torch.dtype, options: dict[str, Any], device: torch.device) -> None:
    for shape in ((3, 7, 131), (11, 64)):
        logits, target, weights = some(shape, dtype, device)
        check(logits, target, None, **options)
        check(logits, target.int(), weights, **options)


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", [{}, ALL], ids=["plain", "all"])
def test_kernel_agrees_with_float64(dtype: torch.dtype, options: dict[str, Any]) -> None:
    # One vector, a row that is no whole number of them, whole ones, and more than a tile.
    for vocabulary in (3, 131, 256, 4801):
        logits, target, weights = some((6, vocabulary), dtype, torch.device("cpu"))
        check(logits, target, weights, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", [{}, ALL], ids=["plain", "all"])
def test_kernel_agrees_with_float64_at_real_widths(dtype: torch.dtype, options: dict[str, Any]) -> None:
    for vocabulary in (1, 7, 96, 257, 1000, 8193, 50257, 50304, 128256, 262145):
        logits, target, weights = some((37, vocabulary), dtype, torch.device("cuda", 0))
        check(logits, target, weights, **options)


@settings(max_examples=40)
@given(
    rows=st.integers(1, 9),
    vocabulary=st.integers(1, 70),
    smoothing=st.sampled_from([0.0, 0.1, 1.0]),
    z_loss=st.sampled_from([0.0, 1e-3]),
    softcap=st.sampled_from([None, 0.5, 40.0]),
    weighted=st.booleans(),
    spread=st.sampled_from([0.01, 1.0, 50.0]),
    seed=st.integers(0, 10**6),
)
def test_any_shape_and_option_in_float64(
    rows: int,
    vocabulary: int,
    smoothing: float,
    z_loss: float,
    softcap: float | None,
    weighted: bool,
    spread: float,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    logits, target, weights = some((rows, vocabulary), torch.float64, torch.device("cpu"), spread)
    options = {"label_smoothing": smoothing, "z_loss": z_loss, "softcap": softcap}
    z, wide = logits.requires_grad_(), logits.detach().clone().requires_grad_()
    given_weights = weights if weighted else None
    found = cross_entropy(z, target, ignore_index=IGNORED, reduction="none", token_weights=given_weights, **options)
    truth = exact(wide, target, given_weights, **options)
    torch.testing.assert_close(found, truth, rtol=1e-10, atol=1e-10)
    flow = torch.randn(rows, dtype=torch.float64)
    (gradient,) = torch.autograd.grad(found, z, flow)
    (true,) = torch.autograd.grad(truth, wide, flow)
    torch.testing.assert_close(gradient, true, rtol=1e-9, atol=1e-10)


def test_agrees_with_torch_where_torch_has_the_same(device: torch.device) -> None:
    logits, target, _ = some((13, 57), torch.float32, device)
    for reduction in ("mean", "sum", "none"):
        for smoothing in (0.0, 0.2):
            options = {"ignore_index": IGNORED, "reduction": reduction, "label_smoothing": smoothing}
            torch.testing.assert_close(
                cross_entropy(logits, target, **options), F.cross_entropy(logits, target, **options)
            )


def check_far_out(device: torch.device) -> None:
    inf = math.inf
    logits = torch.tensor(
        [[3e38, 0.0, -3e38, 1.0], [-inf, 2.0, -inf, 1.0], [500.0, 499.0, -inf, 498.0], [-1e4, -1e4, -1e4, -1e4]],
        device=device,
    ).requires_grad_()
    target = torch.tensor([0, 1, 2, 3], device=device)
    losses = cross_entropy(logits, target, reduction="none")
    wanted = F.cross_entropy(logits.detach().double(), target, reduction="none")
    torch.testing.assert_close(losses.double(), wanted, rtol=1e-6, atol=1e-6)
    (gradient,) = torch.autograd.grad(losses.sum(), logits)
    true = torch.softmax(logits.detach().double(), 1) - F.one_hot(target, 4)
    # What backward keeps is a log-sum-exp in fp32: at 500 it is off by 1.5e-5, at 10⁴ by 5e-4.
    torch.testing.assert_close(gradient[:3].double(), true[:3], rtol=3e-5, atol=1e-7)
    torch.testing.assert_close(gradient.double(), true, rtol=1e-3, atol=1e-7)


def test_far_out_and_impossible_classes_give_no_nan(device: torch.device) -> None:
    check_far_out(device)


@pytest.mark.interpreter
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # 3e38 less than the other end is −∞
def test_kernel_gives_no_nan_far_out() -> None:
    check_far_out(torch.device("cpu"))


def check_not_finite(device: torch.device) -> None:
    logits = torch.randn(5, 19, device=device)
    logits[0, 3], logits[1, 18], logits[2, 0] = math.nan, math.inf, math.nan
    target = torch.tensor([5, 6, IGNORED, 2, 18], device=device)
    z = logits.requires_grad_()
    losses = cross_entropy(z, target, reduction="none", ignore_index=IGNORED)
    (gradient,) = torch.autograd.grad(losses.sum(), z)
    # What is ignored is not looked at; all else is seen.
    assert losses.isnan().tolist() == [True, True, False, False, False]
    assert gradient.isnan().any(1).tolist() == [True, True, False, False, False]
    assert bool((gradient[2] == 0).all())


def test_nan_is_seen_and_stays_in_its_row(device: torch.device) -> None:
    check_not_finite(device)


@pytest.mark.interpreter
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy's word for a NaN
def test_kernel_sees_nan() -> None:
    check_not_finite(torch.device("cpu"))


def out_of_range(device: torch.device) -> None:
    """By the function below the checks, which refuse it on a CPU."""
    logits = torch.randn(5, 9, device=device)
    target = torch.tensor([0, 9, -1, 8, 2**40], device=device)
    lse, losses = torch.empty(5, device=device), torch.empty(5, device=device)
    gradient = torch.empty_like(logits)
    write_rows(
        *("cross_entropy", logits, target, None, Options(-100, 0.0, 0.0, 0.0), lse),
        losses=losses,
        upstream=torch.ones((), device=device),
        gradient=gradient,
    )
    assert losses.isnan().tolist() == [False, True, True, False, True]
    assert gradient.isnan().all(1).tolist() == [False, True, True, False, True]
    assert gradient.isnan().any(1).tolist() == [False, True, True, False, True]


def test_targets_out_of_range_give_nan(device: torch.device) -> None:
    out_of_range(device)


@pytest.mark.interpreter
def test_kernel_gives_nan_for_targets_out_of_range() -> None:
    out_of_range(torch.device("cpu"))


def test_targets_out_of_range_are_an_error_on_the_cpu() -> None:
    for wrong in (9, -1):
        with pytest.raises(UserError, match=rf"target {wrong} is outside of the 9 classes"):
            cross_entropy(torch.randn(2, 9), torch.tensor([-100, wrong]))


def check_slices(device: torch.device) -> None:
    """Gradients slice by slice of the vocabulary, from log-sum-exps over all of it, are those of the whole."""
    logits, target, weights = some((7, 101), torch.float32, device)
    options = Options(IGNORED, 0.1, 1e-2, 6.0)
    lse = torch.logsumexp(6.0 * torch.tanh(logits / 6.0), 1)
    upstream = torch.randn(7, device=device)
    found = torch.empty_like(logits)
    for first in range(0, 101, 24):
        part = logits[:, first : first + 24].contiguous()
        gradient = torch.empty_like(part)
        write_rows(
            *("cross_entropy", part, target, weights, options, lse),
            upstream=upstream,
            gradient=gradient,
            first=first,
            vocabulary=101,
        )
        found[:, first : first + 24] = gradient
    wide = logits.double().requires_grad_()
    truth = exact(wide, target, weights, 0.1, 1e-2, 6.0)
    (true,) = torch.autograd.grad(truth, wide, upstream.double())
    assert error(found, true) <= 3e-6


def test_gradients_of_slices_are_those_of_the_whole(device: torch.device) -> None:
    check_slices(device)


@pytest.mark.interpreter
def test_kernel_takes_slices() -> None:
    check_slices(torch.device("cpu"))


def check_layouts(device: torch.device) -> None:
    wide = torch.randn(9, 40, device=device)
    target = torch.randint(20, (9,), device=device)
    for z in (wide[:, 3:23], wide[:, ::2], wide.t()[:20].t(), wide[:1, :20].expand(9, 20)):
        check(z, target, None)


def test_rows_of_any_strides(device: torch.device) -> None:
    check_layouts(device)


@pytest.mark.interpreter
def test_kernel_follows_strides() -> None:
    check_layouts(torch.device("cpu"))


@pytest.mark.interpreter
def test_offsets_have_sixty_four_bits() -> None:
    # Three rows 2^30 elements apart, in memory that is reserved but never touched between them.
    far = torch.empty(2**31 + 64, dtype=torch.float16).as_strided((3, 19), (2**30, 1)).copy_(torch.randn(3, 19) * 4)
    check(far, torch.tensor([3, 18, 7]), None)
    target = torch.tensor([5, 11, 12])
    found = find_parts("cross_entropy", far, target, Options(IGNORED, 0.1, 0.0, 3.0), 2)
    y = 3.0 * torch.tanh(far.double() / 3.0)
    wanted = (y.amax(1), torch.exp(y - y.amax(1, keepdim=True)).sum(1), y[range(3), target - 2], y.sum(1))
    torch.testing.assert_close(found.double(), torch.stack(wanted, 1), rtol=1e-5, atol=1e-5)
    # And what is written: here the losses' gradients.
    lse, gradient = torch.logsumexp(far.double(), 1), torch.empty_like(far).as_strided((3, 19), (19, 1))
    place = torch.empty(2**31 + 64, dtype=torch.float16).as_strided((3, 19), (2**30, 1))
    for one in (gradient, place):
        write_rows(
            *("cross_entropy", far, target, None, Options(IGNORED, 0.0, 0.0, 0.0), lse.float()),
            upstream=torch.ones(()),
            gradient=one,
        )
    assert torch.equal(place, gradient)


def test_no_token_at_all(device: torch.device) -> None:
    z = torch.randn(0, 5, device=device, requires_grad=True)
    target = torch.zeros(0, dtype=torch.int64, device=device)
    assert cross_entropy(z, target, reduction="none").shape == (0,)
    total = cross_entropy(z, target, reduction="sum")
    total.backward()
    assert float(total.detach()) == 0.0
    assert math.isnan(float(cross_entropy(z, target).detach()))


def test_every_token_ignored_is_nan_with_gradients_of_zero_as_in_torch(device: torch.device) -> None:
    z = torch.randn(3, 5, device=device, requires_grad=True)
    target = torch.full((3,), -100, device=device)
    loss = cross_entropy(z, target)
    loss.backward()
    assert math.isnan(float(loss.detach()))
    assert bool((z.grad == 0).all())


def test_gradcheck() -> None:
    logits, target, weights = some((4, 9), torch.float64, torch.device("cpu"))
    for options in ({}, ALL):
        assert torch.autograd.gradcheck(
            lambda z, kept=options: cross_entropy(z, target, ignore_index=IGNORED, token_weights=weights, **kept),
            logits.requires_grad_(),
        )


def test_a_second_derivative_is_one_clear_error(device: torch.device) -> None:
    z = torch.randn(3, 5, device=device, requires_grad=True)
    loss = cross_entropy(z, torch.tensor([0, 1, 2], device=device))
    with pytest.raises(UserError, match=r"^cross_entropy: its gradient has no gradient.*create_graph=True"):
        torch.autograd.grad(loss, z, create_graph=True)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_traces_without_a_break(device: torch.device) -> None:
    logits, target, weights = some((5, 23), torch.float32, device)
    compiled = torch.compile(
        lambda z: cross_entropy(z * 2, target, ignore_index=IGNORED, token_weights=weights, **ALL),
        fullgraph=True,
        backend="aot_eager",
    )
    z, wide = logits.clone().requires_grad_(), logits.double().requires_grad_()
    (gradient,) = torch.autograd.grad(compiled(z), z)
    truth = exact(wide * 2, target, weights, **ALL).sum() / weights[target != IGNORED].double().sum()
    (true,) = torch.autograd.grad(truth, wide)
    assert error(gradient, true) <= 3e-6


def test_transforms_of_torch_func_work() -> None:
    logits, target, _ = some((4, 9), torch.float64, torch.device("cpu"))
    hessian = torch.func.hessian(lambda z: cross_entropy(z, target, ignore_index=IGNORED, **ALL))(logits)
    wide = torch.func.hessian(lambda z: exact(z, target, None, **ALL).sum() / (target != IGNORED).sum())(logits)
    torch.testing.assert_close(hessian, wide)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"input": torch.zeros(2, 3, dtype=torch.int64)}, "pass logits"),
        ({"input": torch.zeros(2, 0)}, "pass logits"),
        ({"target": torch.zeros(3, dtype=torch.int64)}, r"shape \(2,\)"),
        ({"target": torch.zeros(2)}, "int64"),
        ({"reduction": "max"}, '"mean", "sum" or "none"'),
        ({"label_smoothing": 1.5}, "from 0 to 1"),
        ({"label_smoothing": math.nan}, "from 0 to 1"),
        ({"z_loss": -1.0}, "at least 0"),
        ({"softcap": 0.0}, "above 0"),
        ({"token_weights": torch.zeros(3)}, r"shape \(2,\)"),
        ({"token_weights": torch.zeros(2, dtype=torch.int64)}, "floating point"),
        ({"token_weights": torch.zeros(2, requires_grad=True)}, "detach"),
    ],
)
def test_bad_input_is_one_sentence(change: dict[str, Any], words: str) -> None:
    given = {"input": torch.zeros(2, 3), "target": torch.zeros(2, dtype=torch.int64)} | change
    with pytest.raises(UserError, match=words):
        cross_entropy(**given)


@pytest.mark.gpu
def test_repeats_bit_for_bit_on_the_gpu() -> None:
    logits, target, weights = some((301, 50257), torch.bfloat16, torch.device("cuda", 0))
    z = logits.requires_grad_()

    def run() -> tuple[Tensor, Tensor]:
        losses = cross_entropy(z, target, ignore_index=IGNORED, reduction="none", token_weights=weights, **ALL)
        return losses, torch.autograd.grad(losses.sum(), z)[0]

    first = run()
    assert all(torch.equal(a, b) for _ in range(3) for a, b in zip(first, run(), strict=True))
