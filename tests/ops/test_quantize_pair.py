"""Casts of two matrices in one launch, and of matrices without slots, against the reference, byte for byte."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fusestep.ops import quantize_launch, quantize_pair, quantize_plan
from fusestep.ops.cast_options import CastOptions
from fusestep.ops.quantize_pair import plan_pair
from fusestep.ops.quantize_plan import plan_cast
from fusestep.ops.quantize_reference import quantize_reference

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BOTH_WAYS = CastOptions(0, E4M3, columnwise=True), CastOptions(1, E4M3, columnwise=True)


@pytest.fixture(params=["searched", "after a pass"])
def small_launches(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many tiles, and the amax found by the programs of the cast or by a pass before."""
    for module in (quantize_launch, quantize_pair):
        monkeypatch.setattr(module, "quantize_launch", lambda *_: quantize_launch.TileLaunch(16, 16, 4))
        monkeypatch.setattr(module, "amax_launch", lambda _: quantize_launch.TileLaunch(8, 8, 4))
        for limit in ("SEARCHED_BY_EACH", "SEARCHED_ALWAYS"):
            monkeypatch.setattr(module, limit, 1 << 20 if request.param == "searched" else 0)
    monkeypatch.setattr(quantize_launch, "MOST_MAXIMA", 16)
    monkeypatch.setattr(quantize_launch, "AMAX_PROGRAMS", 3)
    monkeypatch.setattr(quantize_launch, "SUMMED_AT_ONCE", 4)
    monkeypatch.setattr(quantize_plan, "_plans", {})
    monkeypatch.setattr(quantize_pair, "_plans", {})


def same_bytes(found: Tensor | None, wanted: Tensor | None) -> None:
    if found is None or wanted is None:
        assert found is wanted
    else:
        assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.interpreter
@pytest.mark.usefixtures("small_launches")
@pytest.mark.parametrize(
    ("columnwise", "scale", "record", "count"),
    [
        ((True, True), 0.0, True, True),
        ((True, False), 0.0, False, False),
        ((False, True), 3.7, True, False),
        ((False, False), 0.0, True, False),
    ],
)
def test_a_pair_is_two_casts(columnwise: tuple[bool, bool], scale: float, record: bool, count: bool) -> None:
    a = torch.randn(37, 21, dtype=torch.bfloat16)[::2] * 3
    b = torch.randn(25, 21)
    found, wanted = (torch.zeros(3, 4) for _ in range(2))
    for slots in (found, wanted):
        slots[2, 0], slots[0, 1] = scale, 0.5  # b's scale, and an amax of a's from before
    counts, counted = (torch.zeros(3, 3, dtype=torch.int64) if count else None for _ in range(2))
    of_a, of_b = (CastOptions(i, E4M3, True, c, record, 1) for i, c in zip((0, 2), columnwise, strict=True))
    plan = plan_pair(a, b, (of_a, of_b), found, counts)
    assert plan is not None
    for quantized, x, options in zip(plan(a, b, found, counts), (a, b), (of_a, of_b), strict=True):
        reference = quantize_reference(x, wanted, options, counted, False)
        same_bytes(quantized.data, reference[0])
        same_bytes(quantized.transposed, reference[1])
        assert quantized.shape == x.shape
        assert torch.equal(quantized.scale_inv, reference[2])
    assert torch.equal(found, wanted)
    assert counts is None or torch.equal(counts, counted)  # type: ignore[arg-type]


@pytest.mark.interpreter
@pytest.mark.usefixtures("small_launches")
@pytest.mark.filterwarnings("ignore:invalid value encountered in multiply:RuntimeWarning")  # infinity times zero
@pytest.mark.parametrize(("power_of_two", "largest"), [(True, 1.0), (False, float("inf")), (False, float("nan"))])
def test_without_slots_each_has_the_scale_of_its_own(power_of_two: bool, largest: float) -> None:
    a, b = torch.randn(17, 18) * 1e-3, torch.randn(20, 18, dtype=torch.float16)
    b[17, 5] = 77.0
    a[3, 4] *= largest
    options, others = (CastOptions(i, E5M2, True, True, power_of_two=power_of_two) for i in range(2))
    plan = plan_pair(a, b, (options, others), None, None)
    assert plan is not None
    for quantized, x in zip(plan(a, b, None, None), (a, b), strict=True):
        single = plan_cast(x, None, "", None, options, None, torch.float32)
        assert single is not None
        by_itself, sums = single(x, None, None, None)
        data, transposed, scale_inv, exact = quantize_reference(x, torch.zeros(1, 4), options, None, True)
        for each in (quantized, by_itself):
            same_bytes(each.data, data)
            same_bytes(each.transposed, transposed)
            assert torch.equal(each.scale_inv, scale_inv)
        assert sums is not None
        torch.testing.assert_close(sums, exact, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.interpreter
@pytest.mark.usefixtures("small_launches")
def test_right_operands_are_the_same_bytes_with_the_summed_dimension_first() -> None:
    a, b = torch.randn(32, 16), torch.randn(16, 16)
    plain, right = plan_pair(a, b, BOTH_WAYS, None, None), plan_pair(a, b, BOTH_WAYS, None, None, right=True)
    assert plain is not None
    assert right is not None
    made, turned = plain.cast(a, b, None, None), right.cast(a, b, None, None)
    for place, (one, other) in enumerate(zip(made, turned, strict=True)):
        assert one is not None
        assert other is not None
        if place in (0, 2, 5):  # a's data, and the scales
            assert torch.equal(one.float(), other.float())
        else:
            assert other.t().is_contiguous()
            same_bytes(one, other.t())


@pytest.mark.interpreter
@pytest.mark.usefixtures("small_launches")
@pytest.mark.parametrize("rows", [64, 65])
def test_column_sums_of_one_launch_and_of_two(rows: int) -> None:
    x = torch.randn(rows, 3)
    plan = plan_cast(x, None, "", None, CastOptions(0, E4M3), None, torch.float32)
    assert plan is not None
    sums = plan(x, None, None, None)[1]
    assert (plan._total is None) is (rows <= 64)
    assert sums is not None
    torch.testing.assert_close(sums, x.double().sum(0).float(), rtol=1e-5, atol=1e-5)


@pytest.mark.interpreter
def test_no_plan_for_what_lies_otherwise() -> None:
    options = (BOTH_WAYS, None, None)
    a, b = torch.randn(5, 7), torch.randn(9, 14)
    assert plan_pair(a, b[:, ::2], *options) is None
    assert plan_pair(a, torch.randn(7, 9).t(), *options) is None
    assert plan_pair(a, torch.randn(9, 8), *options) is None
    assert plan_pair(a[:0], torch.randn(9, 7), *options) is None
    plan = plan_pair(a, b[:, :7], *options)
    assert plan is not None
    assert plan_pair(torch.randn(5, 7), b[:, 3:10], *options) is plan
    assert plan_pair(a.double().bfloat16(), b[:, :7], *options) is not plan


@pytest.mark.gpu
@pytest.mark.parametrize("slots", [None, 0.0, 3.7])
@pytest.mark.parametrize("columnwise", [(True, True), (False, True), (False, False)])
@pytest.mark.parametrize(
    ("rows", "columns"), [((1, 3), 1), ((257, 130), 129), ((16, 64), 512), ((1030, 770), 771), ((4096, 33), 1500)]
)
def test_device_bytes_at_every_launch(
    rows: tuple[int, int], columns: int, columnwise: tuple[bool, bool], slots: float | None
) -> None:
    device = torch.device("cuda", 0)
    a = (torch.randn(rows[0], columns + 1, device=device) * 3).bfloat16()[:, 1:]
    b = torch.randn(rows[1], columns, device=device)
    found, wanted = (torch.zeros(2, 4, device=device) for _ in range(2))
    found[:, 0] = wanted[:, 0] = slots or 0.0
    of_a, of_b = (CastOptions(i, E4M3, True, c, slots is not None) for i, c in enumerate(columnwise))
    plan = plan_pair(a, b, (of_a, of_b), None if slots is None else found, None)
    assert plan is not None
    for _ in range(2):  # the second launch is that of a known kernel
        made = plan(a, b, None if slots is None else found, None)
    for quantized, x, options in zip(made, (a, b), (of_a, of_b), strict=True):
        reference = quantize_reference(x, wanted, options._replace(record=True), None, False)
        same_bytes(quantized.data, reference[0])
        same_bytes(quantized.transposed, reference[1])
        assert torch.equal(quantized.scale_inv, reference[2])
    assert slots is None or torch.equal(found, wanted)
