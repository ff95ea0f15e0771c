"""Linear layers whose bias gradient comes from a kernel of ours: gradients are torch's, and all of torch's uses work.

The kernel's path is also taken here where the interpreter does not run: with the sums of the reference.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fusestep.nn import LayerNormMLP, Linear, biased_linear
from fusestep.ops import column_sums


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """Every bias is worth a kernel; the shapes of the gradients that were summed."""
    seen: list[torch.Size] = []

    def summed(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        seen.append(x.shape)
        return plainly(x, dtype)

    plainly: Callable[..., Tensor] = column_sums.column_sums
    monkeypatch.setattr(biased_linear, "WORTHWHILE", 1)
    monkeypatch.setattr(biased_linear, "interpreted", lambda: True)
    monkeypatch.setattr(column_sums, "serves", lambda x: True)
    monkeypatch.setattr(column_sums, "column_sums", summed)
    return seen


@pytest.fixture
def with_reference(always: list[torch.Size], monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    def summed(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        always.append(x.shape)
        return x.sum(0, dtype=dtype)

    monkeypatch.setattr(column_sums, "column_sums", summed)
    return always


def gradients(layer: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    y = layer(x)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(5)).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, (x, *layer.parameters()), dy)]


def compare(layer: nn.Module, x: Tensor, monkeypatch: pytest.MonkeyPatch, tolerance: float) -> None:
    found = gradients(layer, x)
    with monkeypatch.context() as context:
        context.setattr(biased_linear, "WORTHWHILE", 1 << 40)
        wanted = gradients(layer, x)
    for one, true in zip(found, wanted, strict=True):
        assert one.shape == true.shape
        assert one.dtype == true.dtype
        assert float((one - true).double().norm()) <= tolerance * float(true.double().norm())


@pytest.mark.parametrize("shape", [(9, 6), (2, 5, 6)])
def test_linear_has_the_gradients_of_torch(
    with_reference: list[torch.Size], monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]
) -> None:
    compare(Linear(6, 7), torch.randn(shape), monkeypatch, 1e-6)
    compare(Linear(6, 7), torch.randn(6, *shape[:-1]).movedim(0, -1), monkeypatch, 1e-6)
    rows = torch.Size((shape[0] * (shape[1] if len(shape) == 3 else 1), 7))
    assert with_reference == [rows, rows]


def test_mlp_sums_the_first_bias_with_the_activation(
    with_reference: list[torch.Size], monkeypatch: pytest.MonkeyPatch
) -> None:
    for activation in ("gelu", "swiglu"):
        compare(LayerNormMLP(6, 10, activation=activation), torch.randn(2, 5, 6), monkeypatch, 1e-5)
    assert with_reference == [torch.Size((10, 6))] * 2  # of the second layers


@pytest.mark.interpreter
def test_kernels_have_the_gradients_of_torch(always: list[torch.Size], monkeypatch: pytest.MonkeyPatch) -> None:
    compare(Linear(6, 70), torch.randn(3, 50, 6), monkeypatch, 1e-5)
    compare(LayerNormMLP(6, 70, activation="swiglu"), torch.randn(3, 50, 6), monkeypatch, 1e-5)
    assert always == [torch.Size((150, 70)), torch.Size((150, 6))]


def test_output_may_be_changed_in_place(with_reference: list[torch.Size]) -> None:
    layer = Linear(6, 7)
    layer(torch.randn(2, 5, 6)).add_(1.0).mul_(2.0).sum().backward()
    assert torch.allclose(layer.bias.grad, torch.full((7,), 20.0))
    assert len(with_reference) == 1


def test_under_autocast_the_dtypes_are_those_of_torch(
    with_reference: list[torch.Size], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = Linear(6, 7, dtype=torch.bfloat16)

    def run() -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            return gradients(layer, torch.linspace(-1, 1, 60).view(10, 6))

    found = run()
    assert len(with_reference) == 1
    monkeypatch.setattr(biased_linear, "WORTHWHILE", 1 << 40)
    for one, true in zip(found, run(), strict=True):
        assert one.dtype == true.dtype
        assert float((one - true).double().norm()) <= 1e-2 * float(true.double().norm())


def test_frozen_parts_need_nothing(with_reference: list[torch.Size]) -> None:
    layer = Linear(6, 7)
    layer.weight.requires_grad_(False)
    saved: list[object] = []
    x = torch.randn(5, 6)
    with torch.autograd.graph.saved_tensors_hooks(lambda one: saved.append(one) or one, lambda one: one):
        y = layer(x)
    y.sum().backward()
    assert not saved
    assert layer.weight.grad is None
    assert torch.allclose(layer.bias.grad, torch.full((7,), 5.0))
    assert len(with_reference) == 1


def test_can_be_differentiated_twice(with_reference: list[torch.Size]) -> None:
    layer = Linear(3, 4, dtype=torch.float64)
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    parameters = (layer.weight, layer.bias)

    def function(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return biased_linear.linear(x, weight, bias).square()

    assert torch.autograd.gradgradcheck(function, (x, *parameters))
    assert torch.autograd.gradcheck(function, (x, *parameters))
    assert with_reference  # of the first gradients


def test_transforms_see_torch_itself(with_reference: list[torch.Size]) -> None:
    layer = Linear(3, 4)
    x = torch.randn(5, 3)
    jacobian = torch.func.jacrev(layer)(x)
    assert jacobian.shape == (5, 4, 5, 3)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        tangent = torch.autograd.forward_ad.unpack_dual(layer(dual)).tangent
    assert torch.allclose(tangent, layer.weight.sum(1).expand(5, 4), atol=1e-6)
    assert not with_reference


def test_a_dtype_that_the_kernel_lacks_is_no_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSESTEP_STRICT", "1")
    monkeypatch.setattr(column_sums, "uses_triton", lambda x: pytest.fail("asked, and so announced"))
    assert not column_sums.serves(torch.zeros(2, 2, dtype=torch.float64))


def test_small_outputs_are_left_to_torch() -> None:
    layer = Linear(6, 7)
    assert not biased_linear.sums_bias(torch.randn(9, 6), layer.weight, layer.bias)
    assert not biased_linear.sums_bias(torch.randn(0, 6), layer.weight, layer.bias)
