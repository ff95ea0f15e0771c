"""LayerNorm where centring is hard: large means, constant rows, one column; on CPU and GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fusestep.nn.functional import layer_norm

EPS = 1e-5


def exact(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Two-pass, float64."""
    centred = x.double() - x.double().mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double() + bias.double()


def worst_error(x: Tensor, memory_efficient: bool = False) -> float:
    """The largest relative error of y and of the gradients of x, weight and bias."""
    width = x.shape[-1]
    x = x.detach().requires_grad_()
    weight = (torch.rand(width, device=x.device) + 0.5).requires_grad_()
    bias = torch.randn(width, device=x.device).requires_grad_()
    with torch.no_grad():
        bias.clamp_(-1, 1)
    dy = torch.randn(x.shape, device=x.device)
    y = layer_norm(x, (width,), weight, bias, EPS, memory_efficient=memory_efficient)
    truth = exact(x, weight, bias)
    values = [y, *torch.autograd.grad(y, (x, weight, bias), dy.to(y.dtype))]
    truths = [truth, *torch.autograd.grad(truth, (x, weight, bias), dy.to(y.dtype).double())]
    pairs = [(a.detach().double(), b.detach().double()) for a, b in zip(values, truths, strict=True)]
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


@pytest.mark.parametrize("memory_efficient", [False, True])
def test_large_mean_and_small_spread(memory_efficient: bool, device: torch.device) -> None:
    x = torch.randn(4, 32768, device=device) * 0.01 + 100
    assert worst_error(x, memory_efficient) <= 2e-5


@pytest.mark.parametrize("mean", [0, 100, 1000, 10000])
@pytest.mark.parametrize("width", [33, 1024])
@pytest.mark.parametrize("memory_efficient", [False, True])
def test_row_means_far_from_zero_with_a_step_of_a_thousandth(
    mean: float, width: int, memory_efficient: bool, device: torch.device
) -> None:
    x = mean + 1e-3 * torch.arange(width, device=device) + torch.randn(5, width, device=device) * 1e-3
    assert worst_error(x, memory_efficient) <= 1e-4


@pytest.mark.parametrize("memory_efficient", [False, True])
def test_a_million_with_spread_of_a_few_roundings(memory_efficient: bool, device: torch.device) -> None:
    x = 1e6 + torch.randn(4, 4096, device=device) * 0.2  # neighbouring fp32 values are 0.06 apart there
    assert worst_error(x, memory_efficient) <= 2e-5


def test_one_column_far_from_the_others(device: torch.device) -> None:
    x = torch.randn(5, 769, device=device)
    x[:, 0] = 1e6
    assert worst_error(x) <= 1e-4
    x[:, [0, 300]] = x[:, [300, 0]]
    assert worst_error(x) <= 1e-4


@pytest.mark.parametrize("width", [3, 33, 769, 4097])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [0.1, -1e4, 6e4, 1e6])
def test_a_constant_row_is_centred_to_zero(width: int, dtype: torch.dtype, value: float, device: torch.device) -> None:
    if value > 65504 and dtype == torch.float16:
        value = 65504.0
    x = torch.full((3, width), value, device=device).to(dtype).requires_grad_()
    bias = torch.randn(width, device=device).to(dtype)
    weight = torch.rand(width, device=device).to(dtype).requires_grad_()
    y = layer_norm(x, (width,), weight, bias)
    assert torch.equal(y, bias.expand_as(y))
    (dweight,) = torch.autograd.grad(y, weight, torch.randn(3, width, device=device).to(dtype))
    assert not bool(dweight.any())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_column_gives_the_bias_and_no_gradient(dtype: torch.dtype, device: torch.device) -> None:
    x = (torch.rand(7, 1, device=device) * 1e6).to(dtype).requires_grad_()
    weight = torch.full((1,), 1.7, device=device).to(dtype).requires_grad_()
    bias = torch.full((1,), 0.3, device=device).to(dtype).requires_grad_()
    y = layer_norm(x, (1,), weight, bias)
    dx, dweight, dbias = torch.autograd.grad(y, (x, weight, bias), torch.ones_like(y))
    assert torch.equal(y, bias.expand_as(y))
    assert not bool(dx.any())
    assert not bool(dweight.any())
    assert float(dbias) == 7


def test_ordinary_data_agrees_with_torch(device: torch.device) -> None:
    x, weight, bias = torch.randn(9, 96, device=device), torch.rand(96, device=device), torch.randn(96, device=device)
    theirs = torch.nn.functional.layer_norm(x, (96,), weight, bias, EPS)
    assert torch.allclose(layer_norm(x, (96,), weight, bias, EPS), theirs, atol=1e-5)
