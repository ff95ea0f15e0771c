"""Three matrices cast as one against the cast of what they are put together, byte for byte."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fusestep.errors import UserError
from fusestep.fp8 import DelayedScaling
from fusestep.fp8.casts_tensorwise import DelayedCasts
from fusestep.ops import quantize_joined, quantize_launch
from fusestep.ops.cast_options import CastOptions
from fusestep.ops.quantize_joined import Joined, plan_joined
from fusestep.ops.quantize_reference import quantize_reference
from fusestep.ops.settled_slots import address, settled

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@pytest.fixture
def small_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many tiles, and fewer programs of the amax pass than tiles."""
    monkeypatch.setattr(quantize_joined, "quantize_launch", lambda *_: quantize_launch.TileLaunch(16, 16, 4))
    monkeypatch.setattr(quantize_joined, "amax_launch", lambda _: quantize_launch.TileLaunch(16, 32, 4))
    monkeypatch.setattr(quantize_launch, "MOST_MAXIMA", 16)
    monkeypatch.setattr(quantize_launch, "AMAX_PROGRAMS", 3)
    monkeypatch.setattr(quantize_joined, "SUMMED_AT_ONCE", 2)
    monkeypatch.setattr(quantize_joined, "_plans", {})


def matrices(
    rows: int, widths: tuple[int, int, int], stretches: int, dtype: torch.dtype, device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor]:
    """Each with rows a stride of its own apart, and magnitudes of its own."""
    made = [
        torch.randn(rows, width * stretches + 8 * place, device=device)[:, : width * stretches] * 3.0**place
        for place, width in enumerate(widths)
    ]
    a, b, c = [one.to(dtype) for one in made]
    return a, b, c


def test_together_is_the_columns_in_their_order() -> None:
    a, b, c = torch.arange(8).view(2, 4), 10 + torch.arange(4).view(2, 2), 20 + torch.arange(4).view(2, 2)
    assert Joined((a, b, c), (4, 2, 2), 1).together().tolist() == [
        [0, 1, 2, 3, 10, 11, 20, 21],
        [4, 5, 6, 7, 12, 13, 22, 23],
    ]
    assert Joined((a, b, c), (2, 1, 1), 2).together().tolist() == [
        [0, 1, 10, 20, 2, 3, 11, 21],
        [4, 5, 12, 22, 6, 7, 13, 23],
    ]
    heads = Joined((a.view(1, 2, 2, 2), b.view(1, 2, 1, 2), c.view(1, 2, 1, 2)), (4, 2, 2), 1)
    assert torch.equal(heads.together(), Joined((a, b, c), (4, 2, 2), 1).together())


def check(
    joined: Joined, options: CastOptions, scale: float, sums_dtype: torch.dtype | None, *, has_slot: bool = True
) -> None:
    whole = joined.together()
    device = whole.device
    found, wanted = (torch.zeros(2, 4, device=device) for _ in range(2))
    for slots in (found, wanted):
        slots[1, 0], slots[1, 1] = scale, 0.5
    counts, counted = (torch.zeros(2, 3, dtype=torch.int64, device=device) for _ in range(2))
    if not has_slot:
        wanted.zero_()
    given = (found, counts) if has_slot else (None, None)
    plan = plan_joined(joined, given[0], options, given[1], sums_dtype)
    assert plan is not None
    data, transposed, scale_inv, exact = quantize_reference(whole, wanted, options, counted, True)
    for _ in range(2 if whole.is_cuda else 1):  # the second launch goes by addresses
        slots = None if given[0] is None else found.clone()
        seen = None if given[1] is None else torch.zeros_like(counts)
        quantized, sums = plan(joined.matrices, slots, seen)
        assert quantized.shape == whole.shape
        for one, other in ((quantized.data, data), (quantized.transposed, transposed)):
            assert (one is None) is (other is None)
            if one is not None and other is not None:
                assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
        assert torch.equal(quantized.scale_inv, scale_inv)
        assert slots is None or torch.equal(slots, wanted)
        assert seen is None or torch.equal(seen, counted)
        if sums_dtype is None:
            assert sums is None
        else:
            assert sums is not None
            assert sums.dtype is sums_dtype
            assert exact is not None
            tolerance = 1e-5 if sums_dtype is torch.float32 else 1e-2
            torch.testing.assert_close(sums.double(), whole.double().sum(0), rtol=tolerance, atol=1e-3, equal_nan=True)


@pytest.mark.interpreter
@pytest.mark.usefixtures("small_launches")
@pytest.mark.parametrize(
    ("widths", "stretches", "rows", "dtype", "scale"),
    [
        ((16, 32, 16), 1, 37, torch.bfloat16, 3.7),
        ((16, 16, 32), 2, 9, torch.float16, 0.0),
        ((32, 16, 16), 1, 1, torch.float32, 0.0),
    ],
)
def test_bytes_are_those_of_the_whole(
    widths: tuple[int, int, int], stretches: int, rows: int, dtype: torch.dtype, scale: float
) -> None:
    joined = Joined(matrices(rows, widths, stretches, dtype), widths, stretches)
    check(joined, CastOptions(1, E5M2, True, True, True, 1), scale, torch.float32)


@pytest.mark.interpreter
@pytest.mark.usefixtures("small_launches")
def test_what_is_wanted_alone_and_a_scale_of_their_own() -> None:
    widths = (32, 16, 16)
    joined = Joined(matrices(7, widths, 1, torch.bfloat16), widths, 1)
    check(joined, CastOptions(1, E4M3, False, True), 2.0, torch.bfloat16)
    check(joined, CastOptions(1, E4M3, True, False, True), 0.0, None)
    for place, largest in enumerate((100.0, 1e4, float("nan"))):
        joined.matrices[place][5, 3] = largest
        check(joined, CastOptions(0, E5M2, True, True, power_of_two=True), 0.0, torch.float32, has_slot=False)


class _Pass:
    """What must not be launched."""

    was_launched = True

    def at(self, *_: object) -> bool:
        raise AssertionError("a pass looks for the amax")

    __call__ = at


@pytest.mark.interpreter
@pytest.mark.usefixtures("small_launches")
def test_a_slot_that_is_known_to_hold_a_scale_takes_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    widths = (16, 16, 16)
    joined = Joined(matrices(5, widths, 1, torch.bfloat16), widths, 1)
    options, slots = CastOptions(1, E4M3, True, True), torch.full((2, 4), 2.0)
    plan = plan_joined(joined, slots, options, None, None)
    assert plan is not None
    wanted = plan(joined.matrices, slots, None)[0]
    monkeypatch.setattr(plan, "_amax", _Pass())
    with settled(frozenset([address(slots.data_ptr(), 1)])):
        found = plan(joined.matrices, slots, None)[0]
    assert torch.equal(found.dequantize(), wanted.dequantize())
    with settled(frozenset([address(slots.data_ptr(), 0)])), pytest.raises(AssertionError, match="a pass"):
        plan(joined.matrices, slots, None)


@pytest.mark.interpreter
@pytest.mark.usefixtures("small_launches")
def test_heads_are_taken_as_attention_leaves_them() -> None:
    q = (
        torch.randn(2, 9, 2, 16).transpose(1, 2).contiguous().transpose(1, 2)[:, :, :1]
    )  # as (batch, heads, …) holds one
    k, v = torch.randn(2, 9, 1, 16), torch.randn(2, 9, 32)[..., 16:].unflatten(-1, (1, 16))
    assert plan_joined(Joined((q, k, v), (16, 16, 16), 1), None, CastOptions(0, E4M3), None, None) is None
    joined = Joined((q.contiguous(), k, v), (16, 16, 16), 1)
    check(joined, CastOptions(1, E4M3, True, True), 0.0, torch.float32)


@pytest.mark.interpreter
@pytest.mark.usefixtures("small_launches")
def test_what_no_kernel_takes_is_put_together_first() -> None:
    widths = (32, 16, 16)
    a, b, c = matrices(18, widths, 1, torch.float32)
    options = CastOptions(0, E4M3)
    for odd in (
        Joined((a[:, ::2].repeat(1, 2).t().contiguous().t(), b, c), widths, 1),  # rows are not dense
        Joined((a, b.to(torch.bfloat16), c), widths, 1),
        Joined((a[:, :24].contiguous(), b, c), (24, 16, 16), 1),  # no tile of columns lies in one
        Joined((a[:0], b[:0], c[:0]), widths, 1),
    ):
        assert plan_joined(odd, None, options, None, None) is None
    with pytest.raises(UserError, match="no slot 3"):
        plan_joined(Joined((a, b, c), widths, 1), torch.zeros(2, 4), options._replace(slot=3), None, None)


def casts(record: bool = True) -> DelayedCasts:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    slots = torch.zeros(3, 4, device=device)
    return DelayedCasts(DelayedScaling(), slots, None, record)


@pytest.mark.interpreter
@pytest.mark.usefixtures("small_launches")
def test_casts_plan_what_they_can_and_put_together_the_rest() -> None:
    for widths in ((32, 16, 16), (24, 8, 8)):
        joined = Joined(matrices(7, widths, 1, torch.float32), widths, 1)
        ours, theirs = casts(), casts()
        for _ in range(2):
            found, sums = ours.joined_gradient(joined, 2, True, True, torch.float32)
            wanted, exact = theirs.gradient(joined.together(), 2, True, True, torch.float32)
            assert sums is not None
            assert exact is not None
            assert torch.equal(found.dequantize(), wanted.dequantize())
            torch.testing.assert_close(sums, exact, rtol=1e-5, atol=1e-4)
        assert torch.equal(ours.slots, theirs.slots)  # type: ignore[arg-type]
        assert [plan is not None for plan in ours._joined.values()] == [widths[0] == 32]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("widths", "stretches", "rows"), [((2048, 512, 512), 1, 1027), ((128, 64, 64), 12, 999), ((768, 768, 768), 1, 8192)]
)
@pytest.mark.parametrize("scale", [0.0, 3.7])
def test_on_a_gpu(widths: tuple[int, int, int], stretches: int, rows: int, scale: float) -> None:
    joined = Joined(matrices(rows, widths, stretches, torch.bfloat16, "cuda"), widths, stretches)
    check(joined, CastOptions(1, E5M2, True, True, True), scale, torch.float32)
    check(joined, CastOptions(0, E5M2, True, True), 0.0, torch.bfloat16, has_slot=False)
