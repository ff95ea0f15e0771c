"""Rotation by tables of cosines and sines, against complex numbers and plain arithmetic in float64."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from fusestep.errors import UserError
from fusestep.nn.functional import apply_rotary_tables
from fusestep.ops.rotary_tables import rotary_tables

#: The interpreter truncates where hardware rounds to bf16: one unit in the last place instead of half.
TOLERANCE = {torch.float32: 2e-7, torch.float16: 1e-3, torch.bfloat16: 6e-3}
DTYPES = list(TOLERANCE)


def exact(t: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """t · cos + rotate_half(t) · sin, element by element."""
    dim = cos.shape[-1]
    t, cos, sin = t.double(), cos.double()[:, None], sin.double()[:, None]
    y = t.clone()
    for j in range(dim):
        partner = -t[..., j + dim // 2] if j < dim // 2 else t[..., j - dim // 2]
        y[..., j] = t[..., j] * cos[..., j] + partner * sin[..., j]
    return y


def error(value: Tensor, truth: Tensor) -> float:
    return float((value.double() - truth).norm() / truth.norm())


def check(t: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype | None = None) -> None:
    """The rotation and its gradient."""
    wide = t.detach().double().requires_grad_()
    truth = exact(wide, cos, sin)
    t = t.detach().requires_grad_()
    y = apply_rotary_tables(t, cos, sin, dtype)
    assert y.dtype is (torch.promote_types(t.dtype, cos.dtype) if dtype is None else dtype)
    assert y.shape == t.shape
    tolerance = TOLERANCE[y.dtype]
    assert error(y.detach(), truth.detach()) <= tolerance
    for dy in (torch.randn(t.shape, device=t.device), torch.randn(t.shape[:2], device=t.device)[..., None, None]):
        upstream = dy.to(y.dtype).expand(t.shape)
        (dt,) = torch.autograd.grad(y, t, upstream, retain_graph=True)
        (wanted,) = torch.autograd.grad(truth, wide, upstream.double(), retain_graph=True)
        assert dt.dtype is t.dtype
        assert error(dt, wanted) <= TOLERANCE[t.dtype]


def check_all(device: torch.device, dtype: torch.dtype, sizes: tuple[int, ...] = (3, 5, 11, 26)) -> None:
    """Tables of each sequence and of all, partial rotation, odd sizes, and views that are no run of memory."""
    batch, heads, length, width = sizes
    for dim, own in ((width, 1), (10, batch), (2, 1)):
        # Not the cosine and sine of anything, nor the same for both elements of a pair.
        cos, sin = torch.randn(2, own, length, dim, device=device).unbind()
        packed = torch.randn(batch, length, heads, 2 * width, device=device).to(dtype)
        heads_last = packed[..., width:].transpose(1, 2)
        check(heads_last, cos.to(dtype), sin.to(dtype))
        check(heads_last.contiguous(), cos, sin)
        check(packed[..., ::2].transpose(1, 2), cos.transpose(1, 2).contiguous().transpose(1, 2), sin, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_turns_as_the_formula_says(device: torch.device, dtype: torch.dtype) -> None:
    check_all(device, dtype)


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kernel_turns_as_the_formula_says(dtype: torch.dtype) -> None:
    check_all(torch.device("cpu"), dtype, (2, 3, 5, 26))


def test_cosines_and_sines_turn_pairs_of_complex_numbers(device: torch.device) -> None:
    t, angles = torch.randn(2, 3, 7, 8, device=device), torch.rand(7, 4, device=device) * 90
    both = torch.cat((angles, angles), -1)[None]
    found = apply_rotary_tables(t, both.cos(), both.sin())
    turned = torch.complex(t[..., :4].double(), t[..., 4:].double()) * torch.exp(1j * angles.double())
    torch.testing.assert_close(found.double(), torch.cat((turned.real, turned.imag), -1), rtol=1e-5, atol=1e-5)


def test_the_result_lies_in_memory_as_the_input_does() -> None:
    cos = torch.randn(1, 5, 8)
    for t in (torch.randn(2, 3, 5, 8), torch.randn(2, 5, 3, 8).transpose(1, 2)):
        assert apply_rotary_tables(t, cos, cos).stride() == t.stride()
    sliced = torch.randn(2, 5, 3, 16)[..., :8].transpose(1, 2)
    assert apply_rotary_tables(sliced, cos, cos).stride(-1) == 1


def test_tables_have_gradients_and_so_has_the_gradient() -> None:
    t, cos, sin = (torch.randn(2, 3, 5, 6, dtype=torch.float64, requires_grad=True),
                   torch.randn(1, 5, 4, dtype=torch.float64), torch.randn(1, 5, 4, dtype=torch.float64))  # fmt: skip
    assert torch.autograd.gradcheck(lambda x: apply_rotary_tables(x, cos, sin), t)
    assert torch.autograd.gradgradcheck(lambda x: apply_rotary_tables(x, cos, sin), t)
    cos.requires_grad_()
    assert torch.autograd.gradcheck(apply_rotary_tables, (t, cos, sin))
    mapped = torch.func.vmap(lambda x: apply_rotary_tables(x, cos.detach(), sin))(torch.stack((t, 2 * t)).detach())
    torch.testing.assert_close(mapped[1], 2 * apply_rotary_tables(t, cos, sin).detach())


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_it_compiles_and_passes_opcheck_and_takes_empty_tensors() -> None:
    t, cos, sin = torch.randn(2, 3, 5, 6), torch.randn(1, 5, 4), torch.randn(1, 5, 4)
    torch.library.opcheck(rotary_tables, (t, cos, sin, torch.bfloat16, False))
    compiled = torch.compile(apply_rotary_tables, backend="eager", fullgraph=True)
    assert torch.equal(compiled(t, cos, sin), apply_rotary_tables(t, cos, sin))
    assert apply_rotary_tables(t[:0], cos, sin).shape == (0, 3, 5, 6)
    assert apply_rotary_tables(t[:, :, :0], cos[:, :0], sin[:, :0]).shape == (2, 3, 0, 6)


@pytest.mark.parametrize(
    ("t", "cos", "sin", "what"),
    [
        ((2, 3, 4), (1, 4, 2), (1, 4, 2), "got shape (2, 3, 4); pass t (batch, heads, sequence, D)"),
        ((2, 3, 4, 6), (1, 4, 3), (1, 4, 3), "cos has shape (1, 4, 3)"),
        ((2, 3, 4, 6), (1, 4, 8), (1, 4, 8), "an even r of at most 6"),
        ((2, 3, 4, 6), (1, 5, 4), (1, 5, 4), "pass both as (2 or 1, 4, r)"),
        ((3, 3, 4, 6), (2, 4, 4), (2, 4, 4), "pass both as (3 or 1, 4, r)"),
        ((2, 3, 4, 6), (1, 4, 4), (2, 4, 4), "sin (2, 4, 4)"),
    ],
)
def test_what_does_not_fit_is_one_sentence(t: list[int], cos: list[int], sin: list[int], what: str) -> None:
    with pytest.raises(UserError, match=re.escape(what)):
        apply_rotary_tables(torch.randn(t), torch.randn(cos), torch.randn(sin))
    with pytest.raises(UserError, match="got int64"):
        apply_rotary_tables(torch.randn(1, 1, 1, 2), torch.ones(1, 1, 2, dtype=torch.int64), torch.randn(1, 1, 2))
