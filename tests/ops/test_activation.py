"""Activations and their gradients against float64, in the reference, the kernel and PyTorch's own graph."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusestep.errors import UserError
from fusestep.ops.activation import ACTIVATIONS, activation, is_gated

PLAIN = {
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "qgelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "srelu": lambda x: F.relu(x).square(),
    "silu": F.silu,
}
GATES = {"geglu": "gelu", "qgeglu": "qgelu", "reglu": "relu", "sreglu": "srelu", "swiglu": "silu"}
#: The interpreter truncates where hardware rounds to bf16.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}


def exact(h: Tensor, name: str) -> Tensor:
    """The activation of h as PyTorch's own functions make it in float64, differentiable."""
    if name in PLAIN:
        return PLAIN[name](h)
    a, b = h.chunk(2, dim=-1)
    if name == "glu":
        return torch.sigmoid(a) * b
    if name == "clamped_swiglu":
        a, b = a.clamp(max=7.0), b.clamp(-7.0, 7.0)
        return a * torch.sigmoid(1.702 * a) * (b + 1)
    return PLAIN[GATES[name]](a) * b


def check(h: Tensor, name: str) -> None:
    h = h.detach().requires_grad_()
    y = activation(h, name)
    dy = torch.randn(y.shape, device=y.device).to(y.dtype)
    wide = h.detach().double().requires_grad_()
    truth = exact(wide, name)
    (gradient,) = torch.autograd.grad(y, h, dy)
    (true_gradient,) = torch.autograd.grad(truth, wide, dy.double())
    assert y.dtype == gradient.dtype == h.dtype
    for found, true in ((y.detach(), truth.detach()), (gradient, true_gradient)):
        assert found.shape == true.shape
        assert float((found.double() - true).norm()) <= TOLERANCE[h.dtype] * float(true.norm())


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_agrees_with_float64(name: str, dtype: torch.dtype, device: torch.device) -> None:
    check((torch.randn(3, 5, 34, device=device) * 4).to(dtype), name)


@pytest.mark.interpreter
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_kernel_agrees_with_float64(name: str) -> None:
    check(torch.randn(3, 34) * 4, name)


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_kernel_rounds_once(dtype: torch.dtype) -> None:
    check((torch.randn(5, 14) * 4).to(dtype), "swiglu")
    check((torch.randn(5, 7) * 4).to(dtype), "gelu")


@pytest.mark.interpreter
def test_kernel_follows_strides() -> None:
    check(torch.randn(5, 40)[:, 3:17], "geglu")
    check(torch.randn(7, 5).t(), "silu")


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_can_be_differentiated_twice(name: str) -> None:
    # Off the kinks of relu and of clamped_swiglu, where numeric differences mean nothing.
    h = torch.tensor([[0.3, -0.7, 1.9, -2.4], [8.5, 0.2, -7.9, 5.1]], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: activation(x, name), h)
    assert torch.autograd.gradgradcheck(lambda x: activation(x, name), h)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_far_out_nothing_is_nan(name: str, device: torch.device) -> None:
    h = torch.tensor([[-1e20, -90.0, -30.0, 30.0, 90.0, 1e18]], device=device).repeat(1, 2).requires_grad_()
    y = activation(h[:, :6], name) if not is_gated(name) else activation(h, name)
    (gradient,) = torch.autograd.grad(y.sum(), h)
    assert not bool(gradient.isnan().any())
    assert not bool(y.isnan().any())


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_nan_is_seen(name: str, device: torch.device) -> None:
    y = activation(torch.full((1, 4), torch.nan, device=device), name)
    assert bool(y.isnan().all())


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (2, 1, 2), (6,)])
def test_any_shape(shape: tuple[int, ...], device: torch.device) -> None:
    h = torch.randn(shape, device=device, requires_grad=True)
    y = activation(h, "swiglu")
    y.sum().backward()
    assert y.shape == (*shape[:-1], shape[-1] // 2)
    assert h.grad is not None


def test_keeps_no_view_of_its_input(device: torch.device) -> None:
    h = torch.randn(3, 4, device=device, requires_grad=True)
    y = activation(h, "relu")
    y.mul_(2)  # as torch's own can be changed in place
    y.sum().backward()
    assert torch.equal(h.grad, 2.0 * (h.detach() > 0))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_traces_without_a_break() -> None:
    compiled = torch.compile(lambda x: activation(x, "gelu") * 2, fullgraph=True, backend="aot_eager")
    h = torch.randn(3, 4, requires_grad=True)
    compiled(h).sum().backward()
    wide = h.detach().double().requires_grad_()
    exact(wide, "gelu").mul(2).sum().backward()
    assert torch.allclose(h.grad.double(), wide.grad, atol=1e-6)


@pytest.mark.parametrize(
    ("h", "name", "words"),
    [
        (torch.zeros(2, 2), "mish", "pass one of gelu"),
        (torch.zeros(2, 3), "swiglu", "pass an even one"),
        (torch.zeros(2, 2, dtype=torch.int64), "relu", "pass float32"),
        (torch.zeros(()), "relu", "no dimension"),
    ],
)
def test_bad_input_is_one_sentence(h: Tensor, name: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        activation(h, name)
