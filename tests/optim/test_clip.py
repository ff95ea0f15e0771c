"""clip_grad_norm_ and accumulate_in_fp32."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from fusestep.errors import UserError
from fusestep.optim import accumulate_in_fp32, clip_grad_norm_


def parameters(place: torch.device, gradients: list[torch.Tensor]) -> list[Any]:
    made = [nn.Parameter(torch.zeros(g.shape, dtype=g.dtype, device=place)) for g in gradients]
    for parameter, gradient in zip(made, gradients, strict=True):
        parameter.grad = gradient.to(place, copy=True)
    return made


@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, math.inf])
@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_clips_as_torch_does(place: torch.device, norm_type: float, max_norm: float) -> None:
    gradients = [torch.randn(33, 7), torch.randn(5), torch.randn(()), torch.randn(0, 3)]
    ours, exact = parameters(place, gradients), parameters(torch.device("cpu"), [g.double() for g in gradients])
    norm = clip_grad_norm_(ours, max_norm, norm_type)
    expected = torch.nn.utils.clip_grad_norm_(exact[:-1], max_norm, norm_type, foreach=False)  # refuses empty ones
    assert (norm.shape, norm.dtype, norm.device.type) == ((), torch.float32, place.type)
    assert float(norm) == pytest.approx(float(expected.detach()), rel=1e-6)
    for p, q in zip(ours, exact, strict=True):
        torch.testing.assert_close(p.grad.cpu().double(), q.grad, rtol=1e-5, atol=1e-9)


def test_dtypes_are_clipped_together(place: torch.device) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    ours = parameters(place, [torch.full((4,), 2.0, dtype=dtype) for dtype in dtypes])
    assert float(clip_grad_norm_(ours, 1.0)) == pytest.approx(8.0)
    for p in ours:
        torch.testing.assert_close(p.grad.float().cpu(), torch.full((4,), 0.25), rtol=1e-2, atol=0)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_norm_that_is_not_finite_is_returned_and_changes_nothing(place: torch.device, value: float) -> None:
    ours = parameters(place, [torch.tensor([1.0, value]), torch.ones(3)])
    before = [p.grad.clone() for p in ours]
    assert not math.isfinite(float(clip_grad_norm_(ours, 1.0)))
    assert all(torch.equal(p.grad.nan_to_num(7.0), b.nan_to_num(7.0)) for p, b in zip(ours, before, strict=True))
    with pytest.raises(RuntimeError, match=str(value)):
        clip_grad_norm_(ours, 1.0, error_if_nonfinite=True)


def test_fp16_gradients_are_clipped_not_zeroed(place: torch.device) -> None:
    (ours,) = parameters(place, [torch.full((2,), 6e4, dtype=torch.float16)])
    assert float(clip_grad_norm_(ours, 1.0)) == pytest.approx(84853, rel=1e-3)
    torch.testing.assert_close(ours.grad.float().cpu(), torch.full((2,), 0.5**0.5), rtol=1e-3, atol=0)


def test_one_parameter_none_and_missing_gradients(place: torch.device) -> None:
    (ours,) = parameters(place, [torch.tensor([3.0, 4.0])])
    assert float(clip_grad_norm_(ours, 10.0)) == 5.0
    assert float(clip_grad_norm_([nn.Parameter(torch.ones(3))], 1.0)) == 0.0
    assert float(clip_grad_norm_(iter([ours, nn.Parameter(torch.ones(3))]), 10.0)) == 5.0


def test_main_grad_is_what_is_clipped(place: torch.device) -> None:
    (ours,) = parameters(place, [torch.ones(2)])
    ours.main_grad = torch.tensor([30.0, 40.0], device=place)
    assert float(clip_grad_norm_([ours], 5.0)) == 50.0
    torch.testing.assert_close(ours.main_grad.cpu(), torch.tensor([3.0, 4.0]))
    assert torch.equal(ours.grad.cpu(), torch.ones(2))


def test_bad_arguments_are_named() -> None:
    (ours,) = parameters(torch.device("cpu"), [torch.ones(2)])
    for arguments in ((0.0,), (-1.0,), (math.nan,), (1.0, 0.0)):
        with pytest.raises(UserError, match="clip_grad_norm_: "):
            clip_grad_norm_([ours], *arguments)
    embedding = nn.Embedding(5, 3, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse"):
        clip_grad_norm_([ours, embedding.weight], 1.0)
    assert torch.equal(ours.grad, torch.ones(2))


def test_micro_batches_add_up_in_fp32(place: torch.device) -> None:
    ours = nn.Parameter(torch.ones(3, dtype=torch.bfloat16, device=place))
    accumulate_in_fp32([ours])
    for _ in range(1000):
        (ours * 0.125).sum().backward()
        assert ours.grad is None
    assert ours.main_grad.dtype == torch.float32
    assert ours.main_grad.tolist() == [125.0] * 3


def test_removed_handles_leave_gradients_where_torch_puts_them(place: torch.device) -> None:
    ours = nn.Parameter(torch.ones(3, device=place))
    frozen = nn.Parameter(torch.ones(3, device=place), requires_grad=False)
    handle = accumulate_in_fp32([ours, frozen])
    ours.sum().backward()
    handle.remove()
    handle.remove()
    ours.sum().backward()
    assert ours.main_grad.tolist() == [1.0] * 3
    assert ours.grad.tolist() == [1.0] * 3


def test_fp32_gradients_add_up_too_and_none_of_them_stays_in_grad(place: torch.device) -> None:
    ours = nn.Parameter(torch.ones(3, device=place))
    accumulate_in_fp32([ours])
    (ours * 2.0).sum().backward()
    (ours * 3.0).sum().backward()
    assert ours.main_grad.tolist() == [5.0] * 3
    assert ours.grad is None
