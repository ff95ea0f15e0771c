"""Masters as bf16 parameters and 16 bits more: exact both ways, in PyTorch and in Adam's kernel."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fusestep.errors import UserError
from fusestep.language import interpreted
from fusestep.ops.adam import adam_
from fusestep.ops.adam_kernel import AdamSignature, Master, adam_rows, launch_adam
from fusestep.ops.adam_reference import Hyperparameters
from fusestep.ops.adam_remainders import parted, whole
from fusestep.ops.tensor_table import BLOCK, TensorTable, upload

PLACES = [
    pytest.param("cpu", id="cpu"),
    pytest.param("cpu", id="interpreter", marks=pytest.mark.interpreter),
    pytest.param("cuda", id="cuda", marks=pytest.mark.gpu),
]


def of_bits(bits: Tensor) -> Tensor:
    """fp32 numbers of unsigned bits in int64."""
    return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).int().view(torch.float32)


def bits_of(values: Tensor) -> Tensor:
    """The unsigned bits of fp32 or bf16 numbers or int16 ones, int64."""
    wide = values.cpu().view(torch.int32 if values.element_size() == 4 else torch.int16).long()
    return wide & ((1 << 8 * values.element_size()) - 1)


def expected(bits: Tensor) -> tuple[Tensor, Tensor]:
    """(bits of the parameter, remainder) of masters by unsigned arithmetic in int64."""
    magnitude = bits & 0x7FFFFFFF
    is_nan = magnitude > 0x7F800000
    rounded = ((bits & (1 << 31)) >> 16) + (magnitude + 0x8000) // 0x10000  # half away from zero
    low = bits % 0x10000
    return torch.where(is_nan, 0x7FC0, rounded), torch.where(is_nan, 0, torch.where(low < 0x8000, low, low - 0x10000))


#: Every high half beside the low halves where something turns.
ALL_HIGH = (
    torch.arange(1 << 16).reshape(-1, 1) * 0x10000 + torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
).flatten()


def check(bits: Tensor) -> None:
    master = of_bits(bits)
    parameter, remainder = parted(master)
    assert (parameter.dtype, remainder.dtype) == (torch.bfloat16, torch.int16)
    wanted, low = expected(bits)
    assert torch.equal(bits_of(parameter), wanted)
    assert torch.equal(remainder.long(), low)
    back, is_nan = whole(parameter, remainder), master.isnan()
    assert torch.equal(bits_of(back)[~is_nan], bits[~is_nan])
    assert bool(back[is_nan].isnan().all())
    assert torch.equal(parameter.isnan(), is_nan)
    # But for ties the parameter is what a cast gives.
    is_tie = bits % 0x10000 == 0x8000
    assert torch.equal(parameter[~is_nan & ~is_tie], master.bfloat16()[~is_nan & ~is_tie])


def test_every_high_half_comes_back() -> None:
    check(ALL_HIGH)


@given(st.lists(st.integers(0, (1 << 32) - 1), min_size=1, max_size=64))
def test_any_bits_come_back(bits: list[int]) -> None:
    check(torch.tensor(bits))


def test_values_that_are_told_apart_by_their_bits_alone() -> None:
    bits = torch.tensor(
        [0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x80000000, 0x7FFFFFFF, 0xFFFF8000, 0x7F800001]
    )
    parameter, remainder = parted(of_bits(bits))
    wanted = [0x7F80, 0xFF80, 0x7F80, 0xFF80, 0x8000, 0x7FC0, 0x7FC0, 0x7FC0]
    assert bits_of(parameter).tolist() == wanted
    assert remainder.tolist() == [-1, -1, 0, 0, 0, 0, 0, 0]
    # Zeros that a script wrote beside what was there are zeros.
    zeros = torch.tensor([0.0, -0.0, 0.0]).bfloat16()
    found = whole(zeros, torch.tensor([-5, -32768, 7]).short())
    assert torch.equal(bits_of(found), torch.tensor([0, 0x80000000, 7]))


@pytest.mark.parametrize("place", PLACES)
def test_a_step_that_moves_nothing_leaves_every_bit(place: str) -> None:
    """Also where the learning rate is 0: masters go from the pair and back to it in the kernel."""
    finite_or_nan = ALL_HIGH[(ALL_HIGH & 0x7FFFFFFF) != 0x7F800000]  # no decay of an infinite weight is 0 · ∞
    master = of_bits(finite_or_nan[:: 17 if place == "cpu" else 1])
    for weights in (master, master[: 13 * 11].reshape(11, 13).t()):  # flat, and a walk over strides
        wanted = tuple(part.to(place) for part in parted(weights))
        parameter, remainder = (part.contiguous().clone() for part in wanted)
        zero = torch.zeros(weights.shape, device=place)
        moments = [torch.zeros_like(remainder, dtype=torch.float32) for _ in range(2)]
        adam_(
            [parameter], [zero.bfloat16()], [moments[0]], [moments[1]], [torch.zeros((), device=place)],
            lr=0.0, masters=[remainder],
        )  # fmt: skip
        assert torch.equal(bits_of(parameter), bits_of(wanted[0]))
        assert torch.equal(remainder, wanted[1])


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("gradient_dtype", "moment_dtype"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)]
)
def test_masters_are_those_of_whole_ones_and_parameters_differ_at_ties_alone(
    place: str, gradient_dtype: torch.dtype, moment_dtype: torch.dtype
) -> None:
    shapes = [(3, 5), (), (0, 4), (1024,), (1500,)]
    start = [torch.randn(shape) for shape in shapes]
    # Masters half way between two of bf16's numbers, which zero gradients and no decay leave there.
    tie = (bits_of(start[4]) & 0xFFFF0000) | 0x8000
    start[4][:700] = of_bits(tie)[:700]
    start = [one.to(place) for one in start]
    wholes, remainders = [one.clone() for one in start], [parted(one)[1] for one in start]
    lists = [[one.bfloat16() for one in start], [parted(one)[0] for one in start]]
    moments = [[[torch.zeros_like(one, dtype=moment_dtype) for one in start] for _ in range(2)] for _ in lists]
    steps = [[torch.zeros((), device=place) for _ in start] for _ in lists]
    scalars = {"divisor": torch.tensor(2.0, device=place), "skip": torch.zeros((), device=place)}
    for number in range(4):
        gradients = [torch.randn(shape).to(place, gradient_dtype) for shape in shapes]
        gradients[4][:700] = 0
        for parameters, masters, own, counts in zip(lists, (wholes, remainders), moments, steps, strict=True):
            scalars["skip"].fill_(number == 2)
            adam_(parameters, gradients, *own, counts, lr=0.03, masters=masters, **scalars)
    for ours, remainder, master, theirs in zip(lists[1], remainders, wholes, lists[0], strict=True):
        assert torch.equal(whole(ours, remainder), master)
        bits, own = bits_of(master), bits_of(ours)
        assert torch.equal(own, expected(bits)[0])
        if not interpreted():  # which cuts off where a device rounds
            is_tie = bits % 0x10000 == 0x8000
            assert torch.equal(own[~is_tie], bits_of(theirs)[~is_tie])
    is_tie = bits_of(wholes[4]) % 0x10000 == 0x8000
    assert int(is_tie.sum()) >= 700
    apart = bits_of(lists[1][4])[is_tie] - bits_of(wholes[4].bfloat16())[is_tie]
    assert sorted(set(apart.tolist())) == [0, 1]  # one place at most, and away from zero
    for one, other in zip(*moments, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.interpreter
def test_offsets_past_2_31_elements_are_64_bit() -> None:
    """A table that claims 2^31 elements before the real ones: 32-bit products would write elsewhere."""
    master = torch.randn(BLOCK)
    parameter, remainder = parted(master)
    g, m, v = torch.randn(BLOCK), torch.randn(BLOCK), torch.rand(BLOCK)
    twin = [parameter.clone(), remainder.clone(), m.clone(), v.clone()]
    adam_([twin[0]], [g], [twin[2]], [twin[3]], [torch.zeros(())], lr=0.03, masters=[twin[1]])
    before, lr = 1 << 31, torch.tensor(0.03)
    tensors, _ = adam_rows(parameter, m, v, remainder, lr.data_ptr(), 0, 0)
    column = [g.data_ptr() - before * 4, before + BLOCK, -before // BLOCK, 0, 0, 0]
    column += [t.data_ptr() - before * t.element_size() for t in tensors]
    table = TensorTable(
        g.device,
        1,
        1,
        False,
        False,
        torch.tensor([*column, lr.data_ptr(), 0, 0]).reshape(-1, 1),
        torch.zeros(1, dtype=torch.int32),
        torch.zeros(1, 3, dtype=torch.int64),
        None,  # type: ignore[arg-type]
    )
    hyper = upload([Hyperparameters(0.03, 0.9, 0.999, 1e-8, 0.0).row()], torch.float32, g.device)
    signature = AdamSignature(g.device, parameter.dtype, g.dtype, m.dtype, Master.REMAINDER)
    launch_adam(signature, table, hyper, torch.zeros(1), torch.zeros(1), torch.zeros(2, dtype=torch.int64))
    assert not torch.equal(whole(parameter, remainder), master)
    assert torch.equal(whole(parameter, remainder), whole(*twin[:2]))


def test_remainders_of_other_parameters_are_refused_before_anything_changes() -> None:
    lists = [[torch.ones(3), torch.ones(5, dtype=torch.float16)] for _ in range(4)]
    remainders = [torch.zeros(3, dtype=torch.int16), torch.zeros(5, dtype=torch.int16)]
    lists[0][0] = lists[0][0].bfloat16()
    with pytest.raises(UserError, match=r"adam_: master 1 is int16, .* its parameter is torch.float16; pass the fp32"):
        adam_(*lists, [torch.zeros(()) for _ in range(2)], lr=0.1, masters=remainders)
    assert all(torch.equal(t, torch.ones_like(t)) for one in lists for t in one)
    signature = AdamSignature(torch.device("cpu"), torch.float16, torch.float16, torch.float32, Master.REMAINDER)
    assert signature.unsupported() == "remainders of float16 parameters"
