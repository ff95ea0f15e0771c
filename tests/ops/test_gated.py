"""Gated activations of two tensors against float64, in the reference, the kernel and PyTorch's own graph."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusestep.errors import UserError
from fusestep.ops.gated import GATED, gated_activation

GATES = {
    "geglu": lambda a: F.gelu(a, approximate="tanh"),
    "qgeglu": lambda a: a * torch.sigmoid(1.702 * a),
    "reglu": F.relu,
    "sreglu": lambda a: F.relu(a).square(),
    "swiglu": F.silu,
    "glu": torch.sigmoid,
}
#: The interpreter truncates where hardware rounds to bf16.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}


def exact(a: Tensor, b: Tensor, name: str) -> Tensor:
    """The activation as PyTorch's own functions make it, differentiable."""
    if name == "clamped_swiglu":
        a, b = a.clamp(max=7.0), b.clamp(-7.0, 7.0) + 1
        return a * torch.sigmoid(1.702 * a) * b
    return GATES[name](a) * b


def check(a: Tensor, b: Tensor, name: str) -> None:
    a, b = a.detach().requires_grad_(), b.detach().requires_grad_()
    y = gated_activation(a, b, name)
    dy = torch.randn(y.shape, device=y.device).to(y.dtype)
    wide = [tensor.detach().double().requires_grad_() for tensor in (a, b)]
    truth = exact(*wide, name)
    found = (y, *torch.autograd.grad(y, (a, b), dy))
    wanted = (truth, *torch.autograd.grad(truth, wide, dy.double()))
    for ours, true in zip(found, wanted, strict=True):
        assert ours.dtype == a.dtype
        assert ours.shape == true.shape
        assert float((ours.detach().double() - true.detach()).norm()) <= TOLERANCE[a.dtype] * float(
            true.detach().norm()
        )


@pytest.mark.parametrize("name", GATED)
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_agrees_with_float64(name: str, dtype: torch.dtype, device: torch.device) -> None:
    check(*((torch.randn(3, 5, 17, device=device) * 4).to(dtype) for _ in range(2)), name)


@pytest.mark.interpreter
@pytest.mark.parametrize("name", GATED)
def test_kernel_agrees_with_float64(name: str) -> None:
    check(torch.randn(3, 17) * 4, torch.randn(3, 17) * 4, name)


@pytest.mark.interpreter
def test_kernel_follows_each_tensors_strides_and_rounds_once() -> None:
    check(torch.randn(5, 40)[:, 3:17], torch.randn(14, 5).t(), "geglu")
    check(torch.randn(5, 1, 9).expand(5, 3, 9), torch.randn(5, 3, 9), "swiglu")
    check(*(torch.randn(5, 7).bfloat16() for _ in range(2)), "swiglu")


@pytest.mark.parametrize("name", GATED)
def test_can_be_differentiated_twice(name: str) -> None:
    # Off the kinks of relu and of clamped_swiglu, where numeric differences mean nothing.
    a = torch.tensor([[0.3, -0.7, 1.9, -2.4]], dtype=torch.float64, requires_grad=True)
    b = torch.tensor([[8.5, 0.2, -7.9, 5.1]], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, y: gated_activation(x, y, name), (a, b))
    assert torch.autograd.gradgradcheck(lambda x, y: gated_activation(x, y, name), (a, b))


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (2, 1, 2), (6,)])
def test_any_shape(shape: tuple[int, ...], device: torch.device) -> None:
    a, b = (torch.randn(shape, device=device, requires_grad=True) for _ in range(2))
    y = gated_activation(a, b, "swiglu")
    y.sum().backward()
    assert y.shape == shape
    assert a.grad is not None
    assert b.grad is not None


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_traces_without_a_break() -> None:
    compiled = torch.compile(lambda a, b: gated_activation(a, b, "geglu") * 2, fullgraph=True, backend="aot_eager")
    a, b = (torch.randn(3, 4, requires_grad=True) for _ in range(2))
    compiled(a, b).sum().backward()
    wide = [tensor.detach().double().requires_grad_() for tensor in (a, b)]
    exact(*wide, "geglu").mul(2).sum().backward()
    for ours, true in zip((a, b), wide, strict=True):
        assert torch.allclose(ours.grad.double(), true.grad, atol=1e-6)


def test_works_under_vmap() -> None:
    a, b = torch.randn(3, 4, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    found = torch.func.vmap(lambda x, y: gated_activation(x, y, "swiglu"))(a, b)
    assert torch.allclose(found, exact(a, b, "swiglu"))


@pytest.mark.parametrize(
    ("a", "b", "name", "words"),
    [
        (torch.zeros(2, 2), torch.zeros(2, 2), "gelu", "has no gate; pass one of geglu"),
        (torch.zeros(2, 3), torch.zeros(2, 2), "swiglu", "pass two alike"),
        (torch.zeros(2, 2), torch.zeros(2, 2).half(), "swiglu", "pass two alike"),
        (torch.zeros(()), torch.zeros(()), "swiglu", "at least one dimension"),
        (torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64), "reglu", "pass float32"),
    ],
)
def test_bad_input_is_one_sentence(a: Tensor, b: Tensor, name: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        gated_activation(a, b, name)
