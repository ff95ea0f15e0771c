"""A tensor times a number on the device: the reference, the kernel through the interpreter, and on a GPU."""

from __future__ import annotations

import pytest
import torch

from fusestep.ops.scale import BLOCK, BLOCKS_IN_PLACE, run_scale, scale_in_place, scale_op

FLOATING = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(
    params=[pytest.param("cpu", marks=pytest.mark.interpreter), pytest.param("cuda", marks=pytest.mark.gpu)]
)
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


def rounded_once(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A product of two floats of 24 bits is exact in float64."""
    return (x.double() * scale.double()).float().to(dtype)


def check(device: torch.device) -> None:
    for source in FLOATING:
        for dtype in FLOATING:
            for shape in ((), (1,), (3, 7), (2 * BLOCK,), (5, BLOCK // 2 + 3), (0, 4)):
                x = (torch.randn(shape, device=device) * 3).to(source)
                scale = torch.rand((), device=device) + 0.3
                found = run_scale(x, scale, dtype)
                assert found.dtype is dtype
                assert found.shape == x.shape
                # fp32 rounds the product before it is narrowed; the interpreter truncates to bf16.
                torch.testing.assert_close(found.float(), rounded_once(x, scale, dtype).float(), rtol=2**-7, atol=1e-7)
    x = torch.randn(9, 33, device=device)
    # A view from an odd element on is not aligned for vectors.
    assert torch.equal(run_scale(x.view(-1)[1:], x[0, 0], torch.float32), x.view(-1)[1:] * x[0, 0].reshape(1))


def check_in_place(device: torch.device) -> None:
    for dtype in FLOATING:
        for shape in (
            (),
            (3, 7),
            (5, BLOCK // 2 + 3),
            (2, BLOCK * BLOCKS_IN_PLACE),
            (BLOCK * BLOCKS_IN_PLACE + 5,),
            (0, 4),
        ):
            x = (torch.randn(shape, device=device) * 3).to(dtype)
            scale = torch.rand((), device=device) + 0.3
            before, wanted = x.clone(), run_scale(x, scale, dtype)
            assert scale_in_place(x, torch.ones((), device=device)) is x
            assert torch.equal(x, before)
            assert scale_in_place(x, scale) is x
            assert torch.equal(x, wanted)
    x = torch.randn(9, 33, device=device)
    before = x.clone()
    scale_in_place(x.view(-1)[1:], before[0, 0])
    assert torch.equal(x.view(-1)[1:], before.view(-1)[1:] * before[0, 0].reshape(1))
    assert x[0, 0] == before[0, 0]
    assert scale_in_place(x, x.new_tensor(float("nan"))).isnan().all()


def test_the_kernel_agrees_with_float64(device: torch.device) -> None:
    check(device)


def test_the_kernel_in_place_gives_the_same_and_leaves_what_a_factor_of_one_would(device: torch.device) -> None:
    check_in_place(device)


def test_the_reference_agrees_with_float64() -> None:
    check(torch.device("cpu"))
    check_in_place(torch.device("cpu"))
    x, scale = torch.randn(4, 5, dtype=torch.float64), torch.tensor(0.7, dtype=torch.float64)
    assert torch.equal(run_scale(x, scale, torch.float64), x * scale)


def test_a_factor_in_fp32_is_not_rounded_to_the_tensors_dtype() -> None:
    x, scale = torch.full((4,), 3.0, dtype=torch.bfloat16), torch.tensor(1.001953125)  # between two bf16 numbers
    assert run_scale(x, scale, torch.float32).tolist() == [3.0 * 1.001953125] * 4


def test_special_values_and_the_op() -> None:
    x = torch.tensor([float("inf"), float("nan"), 0.0, -0.0, 1e38])
    found = run_scale(x, torch.tensor(10.0), torch.float32)
    assert found[0] == float("inf")
    assert found[1].isnan()
    assert found[4] == float("inf")
    torch.library.opcheck(scale_op, (torch.randn(3, 4), torch.tensor(2.0), torch.bfloat16))


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements() -> None:
    x = torch.empty(2**31 + 4096, dtype=torch.bfloat16, device="cuda").fill_(2.0)
    x[-1] = 3.0
    found = run_scale(x, torch.tensor(0.5, device="cuda"), torch.bfloat16)
    assert float(found[-1]) == 1.5
    assert bool((found[:-1] == 1.0).all())
    assert float(scale_in_place(found, torch.tensor(4.0, device="cuda"))[-1]) == 6.0
    assert bool((found[:-1] == 4.0).all())
