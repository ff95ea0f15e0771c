"""Transforms of torch.func, batched gradients and forward-mode gradients of every function that has a kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from fusestep.dispatch import StrictFallbackError
from fusestep.nn import functional as fused
from fusestep.ops.activation import activation
from fusestep.ops.cross_entropy import cross_entropy
from fusestep.ops.embedding import embedding
from fusestep.ops.gated import gated_activation
from fusestep.ops.linear_cross_entropy import linear_cross_entropy
from fusestep.ops.registry import TRANSFORMED
from fusestep.ops.rotary import apply_rotary_pos_emb
from fusestep.ops.rotary_tables import apply_rotary_tables

IDS = torch.tensor([[2, 0, 2], [4, 1, 0]])
TARGETS = torch.tensor([3, -100, 0, 6, 3])
LOSS: Any = {"label_smoothing": 0.1, "z_loss": 1e-2, "softcap": 3.0}
WEIGHTS = torch.tensor([1.0, 2.0, 0.5, 3.0, 0.25])


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float = 1e-5) -> Tensor:
    if bias is not None:
        x = x - x.mean(-1, keepdim=True)
    y = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight
    return y if bias is None else y + bias


def losses(z: Tensor) -> Tensor:
    y = LOSS["softcap"] * torch.tanh(z / LOSS["softcap"])
    lse = y.logsumexp(-1)
    target = F.one_hot(TARGETS.to(z.device).clamp(min=0), z.shape[-1]) * 0.9 + 0.1 / z.shape[-1]
    counts = (TARGETS != -100).to(z.device)
    return ((lse - (target * y).sum(-1) + LOSS["z_loss"] * lse.square()) * WEIGHTS.to(z)) * counts


def turned(t: Tensor, angles: Tensor) -> Tensor:
    """t (batch, sequence, heads, width) with the first columns turned by angles (sequence, columns)."""
    columns = angles.shape[-1]
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    left, right = t[..., :columns].chunk(2, -1)
    return torch.cat((t[..., :columns] * cos + torch.cat((-right, left), -1) * sin, t[..., columns:]), -1)


def halves(length: int) -> Tensor:
    return torch.arange(length * 2.0).reshape(length, 2).repeat(1, 2) / 7


@dataclass(frozen=True)
class Case:
    """A function of ours, the same by its definition in float64, and the shapes of what both are differentiated by."""

    name: str
    ours: Callable[..., Tensor]
    exact: Callable[..., Tensor]
    shapes: tuple[tuple[int, ...], ...]

    def operands(self, device: torch.device) -> tuple[Tensor, ...]:
        return tuple(torch.randn(shape, device=device) + 0.5 for shape in self.shapes)


def _rotary(t: Tensor) -> Tensor:
    return apply_rotary_pos_emb(t, halves(3)[:, None, None].to(t.device), "bshd")


def _tables(t: Tensor) -> Tensor:
    angles = halves(3).to(t.device)[None].expand(2, -1, -1)
    return apply_rotary_tables(t.transpose(1, 2), angles.cos(), angles.sin()).transpose(1, 2)


def _loss(z: Tensor) -> Tensor:
    return cross_entropy(z, TARGETS.to(z.device), reduction="none", token_weights=WEIGHTS.to(z.device), **LOSS)


def _head(**options: Any) -> Callable[..., Tensor]:
    def head(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        weights = WEIGHTS.to(x.device)
        return linear_cross_entropy(x, weight, TARGETS.to(x.device), bias, token_weights=weights, **LOSS, **options)

    return head


def _sum_of_head(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return losses(x @ weight.mT + bias).sum()


CASES = (
    Case("layer_norm", lambda x, w, b: fused.layer_norm(x, (9,), w, b), norm, ((4, 9), (9,), (9,))),
    Case("rms_norm", lambda x, w: fused.rms_norm(x, (9,), w, 1e-5), lambda x, w: norm(x, w, None), ((4, 9), (9,))),
    Case(
        "layer_norm of a sum",
        lambda x, r, w, b: torch.stack(fused.layer_norm(x, (9,), w, b, residual=r)),
        lambda x, r, w, b: torch.stack((norm(x + r, w, b), x + r)),
        ((4, 9), (4, 9), (9,), (9,)),
    ),
    Case(
        "layer_norm of what it returned",
        lambda x, w, b: fused.layer_norm(x, (9,), w, b, memory_efficient=True),
        norm,
        ((4, 9), (9,), (9,)),
    ),
    Case("activation", lambda x: activation(x, "gelu"), lambda x: F.gelu(x, approximate="tanh"), ((3, 7),)),
    Case(
        "activation with its bias",
        lambda x, b: activation(x + b.detach(), "silu", b),
        lambda x, b: F.silu(x + b),
        ((3, 7), (7,)),
    ),
    Case("activation of halves", lambda x: activation(x, "swiglu"), lambda x: F.silu(x[:, :5]) * x[:, 5:], ((3, 10),)),
    Case("gated", lambda a, b: gated_activation(a, b, "swiglu"), lambda a, b: F.silu(a) * b, ((3, 7), (3, 7))),
    Case(
        "embedding",
        lambda w, p: embedding(IDS.to(w.device), w, positions=p),
        lambda w, p: w[IDS.to(w.device)] + p[:3],
        ((5, 6), (4, 6)),
    ),
    Case("cross_entropy", _loss, losses, ((5, 8),)),
    Case(
        "linear_cross_entropy, gradients in the forward",
        _head(reduction="sum", gradients="forward"),
        _sum_of_head,
        ((5, 6), (8, 6), (8,)),
    ),
    Case(
        "linear_cross_entropy, logits computed again",
        _head(reduction="none"),
        lambda x, w, b: losses(x @ w.mT + b),
        ((5, 6), (8, 6), (8,)),
    ),
    Case("rotary", _rotary, lambda t: turned(t, halves(3).to(t)), ((2, 3, 2, 6),)),
    Case("rotary_tables", _tables, lambda t: turned(t, halves(3).to(t)), ((2, 3, 2, 6),)),
)
every = pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])


def near(value: Tensor, truth: Tensor) -> None:
    assert value.shape == truth.shape
    assert float((value.double() - truth).norm()) <= 2e-5 * float(truth.norm()) + 1e-9


def wide(operands: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(operand.detach().double() for operand in operands)


def true_gradients(case: Case, operands: tuple[Tensor, ...], dys: Tensor) -> list[Tensor]:
    """The gradients from each dy, one after the other, in float64."""
    leaves = [operand.requires_grad_() for operand in wide(operands)]
    y = case.exact(*leaves)
    rows = [torch.autograd.grad(y, leaves, dy.double(), retain_graph=True) for dy in dys]
    return [torch.stack(column) for column in zip(*rows, strict=True)]


@every
def test_gradients_in_a_batch(case: Case, device: torch.device) -> None:
    operands = [operand.requires_grad_() for operand in case.operands(device)]
    y = case.ours(*operands)
    dys = torch.randn((3, *y.shape), device=device)
    batched = torch.autograd.grad(y, operands, dys, is_grads_batched=True, retain_graph=True)
    mapped = torch.func.vmap(lambda dy: torch.autograd.grad(y, operands, dy, retain_graph=True))(dys)
    for found in (batched, mapped):
        for value, truth in zip(found, true_gradients(case, tuple(operands), dys), strict=True):
            near(value, truth)


@pytest.mark.parametrize("logits_again", [False, True])
def test_batched_gradients_of_a_mean_of_no_row_are_zero(logits_again: bool, device: torch.device) -> None:
    x, weight = torch.randn(2, 6, device=device), torch.randn(8, 6, device=device)
    ignored = torch.full((2,), -100, device=device)

    def loss(x: Tensor) -> Tensor:
        if logits_again:
            return linear_cross_entropy(x, weight, ignored, gradients="recompute")
        return cross_entropy(x, ignored)

    x.requires_grad_()
    (found,) = torch.autograd.grad(loss(x), x, torch.ones(3, device=device), is_grads_batched=True)
    assert torch.equal(found, torch.zeros_like(found))


class _First(torch.autograd.Function):
    """y and y; of two gradients it passes on that of the second, which is made of zeros if only the first is used."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG004
        return y.clone(), y.clone()

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> Tensor:  # noqa: ARG004
        return second


@pytest.mark.interpreter
def test_a_batched_gradient_reaches_the_sum_of_a_norm_alone() -> None:
    x, residual, weight = (torch.randn(shape, requires_grad=True) for shape in ((4, 9), (4, 9), (9,)))
    y, total = fused.layer_norm(x, (9,), weight, residual=residual)
    dys = torch.randn(3, 4, 9)
    outputs = [_First.apply(y)[0], total]
    found = torch.autograd.grad(outputs, [x, weight], [dys, dys], is_grads_batched=True)
    assert torch.equal(found[0], dys)
    assert not found[1].any()


@every
def test_rows_and_columns_of_the_jacobian(case: Case, device: torch.device) -> None:
    operands = case.operands(device)
    numbers = tuple(range(len(operands)))
    truth = torch.func.jacrev(case.exact, numbers)(*wide(operands))
    for transform in (torch.func.jacrev, torch.func.jacfwd):
        for value, true in zip(transform(case.ours, numbers)(*operands), truth, strict=True):
            near(value, true)


@every
def test_forward_mode(case: Case, device: torch.device) -> None:
    operands = case.operands(device)
    directions = tuple(torch.randn_like(operand) for operand in operands)
    _, truth = torch.func.jvp(case.exact, wide(operands), wide(directions))
    with forward_ad.dual_level():
        y = case.ours(*(forward_ad.make_dual(*pair) for pair in zip(operands, directions, strict=True)))
        near(forward_ad.unpack_dual(y).tangent, truth)


@every
def test_gradients_of_each_sample(case: Case, device: torch.device) -> None:
    operands = [torch.stack(pair) for pair in zip(case.operands(device), case.operands(device), strict=True)]
    numbers = tuple(range(len(operands)))

    def of(function: Callable[..., Tensor]) -> Callable[..., Any]:
        return torch.func.vmap(torch.func.grad(lambda *given: function(*given).square().sum(), numbers))

    for value, truth in zip(of(case.ours)(*operands), of(case.exact)(*wide(tuple(operands))), strict=True):
        near(value, truth)


@pytest.mark.interpreter
@every
def test_where_kernels_run_it_is_said_once_that_they_give_way(
    case: Case, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FUSESTEP_STRICT", raising=False)
    operands = [operand.requires_grad_() for operand in case.operands(torch.device("cpu"))]
    y = case.ours(*operands)
    dys = torch.randn((2, *y.shape))
    assert not caplog.records
    for _ in range(2):
        found = torch.autograd.grad(y, operands, dys, is_grads_batched=True, retain_graph=True)
        torch.func.vmap(case.ours)(*(operand.detach()[None] for operand in operands))
    assert [TRANSFORMED in record.message for record in caplog.records] == [True]
    for value, truth in zip(found, true_gradients(case, tuple(operands), dys), strict=True):
        near(value, truth)


@pytest.mark.interpreter
@every
def test_in_strict_mode_kernels_do_not_give_way(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSESTEP_STRICT", "1")
    operands = [operand.requires_grad_() for operand in case.operands(torch.device("cpu"))]
    y = case.ours(*operands)
    with pytest.raises(StrictFallbackError, match=TRANSFORMED):
        torch.autograd.grad(y, operands, torch.randn((2, *y.shape)), is_grads_batched=True)
    with pytest.raises(StrictFallbackError, match=TRANSFORMED):
        torch.func.jvp(case.ours, tuple(t.detach() for t in operands), tuple(t.detach() for t in operands))
