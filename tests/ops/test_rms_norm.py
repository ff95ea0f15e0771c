"""RMSNorm: what it does not share with LayerNorm."""

from __future__ import annotations

import pytest
import torch

from fusestep.nn.functional import rms_norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_the_default_eps_is_torchs(dtype: torch.dtype, device: torch.device) -> None:
    x = (torch.randn(4, 64, device=device) * 3e-4).to(dtype)  # so small that eps decides
    theirs = torch.nn.functional.rms_norm(x, (64,)).double()
    assert float((rms_norm(x, (64,)).double() - theirs).norm() / theirs.norm()) <= 4e-3


def test_rows_are_not_centred(device: torch.device) -> None:
    y = rms_norm(torch.full((3, 33), 5.0, device=device), (33,), eps=0.0)
    assert torch.allclose(y, torch.ones_like(y))


def test_one_column_is_its_sign(device: torch.device) -> None:
    x = torch.tensor([[3.0], [-7.0], [1e6]], device=device, requires_grad=True)
    weight = torch.full((1,), 2.0, device=device, requires_grad=True)
    y = rms_norm(x, (1,), weight, 1e-12)
    dx, dweight = torch.autograd.grad(y, (x, weight), torch.tensor([[1.0], [2.0], [3.0]], device=device))
    assert torch.allclose(y, torch.tensor([[2.0], [-2.0], [2.0]], device=device))
    assert bool((dx.abs() <= 1e-6).all())
    assert float(dweight) == pytest.approx(2.0)


def test_zero_rows_of_zeros_stay_zero(device: torch.device) -> None:
    x = torch.zeros(2, 16, device=device, requires_grad=True)
    y = rms_norm(x, (16,), eps=1e-6)
    y.sum().backward()
    assert not bool(y.any())
    assert torch.allclose(x.grad, torch.full_like(x, 1e3))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_cuda_autocast_gives_the_dtype_that_torch_gives(dtype: torch.dtype) -> None:
    x, weight = torch.randn(4, 64, device="cuda").to(dtype), torch.ones(64, device="cuda", dtype=dtype)
    with torch.autocast("cuda", torch.bfloat16):
        # fp32 on a torch after 2.11, which has rms_norm on autocast's list.
        assert rms_norm(x, (64,), weight).dtype == torch.nn.functional.rms_norm(x, (64,), weight).dtype
