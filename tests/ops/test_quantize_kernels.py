"""The kernels of the cast: through the interpreter on tiny tiles, at their own launches on a GPU, bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fusestep.ops import quantize_launch, quantize_ops, quantize_plan
from fusestep.ops.activation import activation_backward_reference, activation_reference, is_gated
from fusestep.ops.cast_options import CastOptions
from fusestep.ops.quantize import transpose_bytes
from fusestep.ops.quantize_ops import run_quantize
from fusestep.ops.quantize_reference import quantize_reference
from fusestep.ops.quantized import padded

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@pytest.fixture
def tiny_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many tiles, and fewer programs of the amax pass than tiles."""
    monkeypatch.setattr(quantize_launch, "quantize_launch", lambda *_: quantize_launch.TileLaunch(16, 16, 4, 2))
    monkeypatch.setattr(quantize_launch, "transpose_launch", lambda: quantize_launch.TileLaunch(16, 16, 4))
    monkeypatch.setattr(quantize_launch, "amax_launch", lambda _: quantize_launch.TileLaunch(8, 8, 4))
    monkeypatch.setattr(quantize_launch, "AMAX_PROGRAMS", 1)
    monkeypatch.setattr(quantize_plan, "_plans", {})
    monkeypatch.setattr(quantize_ops, "_transposes", {})


def as_bytes(data: Tensor) -> Tensor:
    return data.view(torch.uint8).int()


def check(
    x: Tensor,
    h: Tensor | None,
    name: str,
    dtype: torch.dtype,
    *,
    scale: float = 0.0,
    record: bool = True,
    margin: int = 0,
    power_of_two: bool = False,
) -> None:
    """Every output of the kernels against the reference's on the same device; of activations bytes within a code."""
    if h is not None:
        values = activation_backward_reference(x, h, name)
    else:
        values = activation_reference(x, name) if name else x
    found_slots, slots = (torch.zeros(2, 4, device=x.device) for _ in range(2))
    found_slots[1, 0] = slots[1, 0] = scale
    found_counts, counts = (torch.zeros(2, 3, dtype=torch.int64, device=x.device) for _ in range(2))
    options = CastOptions(1, dtype, True, True, record, margin, power_of_two)
    found = run_quantize(x, h, name, found_slots, options, found_counts, True)
    wanted = quantize_reference(values, slots, options, counts, True)
    for value, exact in zip(found[:2], wanted[:2], strict=True):
        difference = as_bytes(value) - as_bytes(exact)
        if name:  # where an activation underflows, its zero may have either sign
            difference[(as_bytes(value) | as_bytes(exact)) & 0x7F == 0] = 0
        assert int(difference.abs().max()) <= (1 if name else 0)
        assert int(difference.count_nonzero()) <= 2 + difference.numel() // 1000
    assert torch.equal(as_bytes(found[0]).t(), as_bytes(found[1]))
    assert torch.equal(as_bytes(transpose_bytes(found[0])), as_bytes(found[1]))
    rows, columns = values.shape
    assert found[0].shape == (padded(rows), padded(columns))
    assert not bool(as_bytes(found[0])[rows:].any())
    assert not bool(as_bytes(found[0])[:, columns:].any())
    for value, exact in ((found[2], wanted[2]), (found_slots, slots)):
        assert torch.allclose(value, exact, rtol=1e-5 if name else 0.0, atol=0.0)
    assert torch.allclose(found[3], values.double().sum(0).float(), rtol=1e-5, atol=1e-3)
    assert int((found_counts - counts).abs().max()) <= (2 + values.numel() // 1000 if name else 0)


def check_turned(device: torch.device, rowwise: bool, columnwise: bool, shape: tuple[int, int]) -> None:
    """A matrix that lies the other way in memory: the same outputs, from no copy of it."""
    lying = torch.randn(shape, device=device) * 2 + 0.5
    x = lying.t()
    found_slots, slots = (torch.zeros(2, 4, device=device) for _ in range(2))
    found_counts, counts = (torch.zeros(2, 3, dtype=torch.int64, device=device) for _ in range(2))
    options = CastOptions(1, E4M3, rowwise, columnwise, True, 1, False)
    plans = set(quantize_plan._plans)
    found = run_quantize(x, None, "", found_slots, options, found_counts, False)
    (key,) = set(quantize_plan._plans) - plans
    assert key[0][1:4] == (*shape, lying.stride(0)), "it was not cast as it lies"
    wanted = quantize_reference(x.contiguous(), slots, options, counts, False)
    for value, exact, is_wanted in zip(found[:2], wanted[:2], (rowwise, columnwise), strict=True):
        assert (value is not None) is is_wanted
        assert value is None or (value.is_contiguous() and torch.equal(as_bytes(value), as_bytes(exact)))
    for value, exact in ((found[2], wanted[2]), (found_slots, slots), (found_counts, counts)):
        assert torch.equal(value, exact)


@pytest.mark.interpreter
@pytest.mark.usefixtures("tiny_launches")
@pytest.mark.parametrize(("rowwise", "columnwise"), [(True, False), (False, True), (True, True)])
def test_a_matrix_that_lies_the_other_way_is_not_copied(rowwise: bool, columnwise: bool) -> None:
    check_turned(torch.device("cpu"), rowwise, columnwise, (21, 37))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(37, 21), (768, 2304), (4099, 1030)])
def test_a_large_matrix_that_lies_the_other_way_is_not_copied(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantize_plan, "_plans", {})
    check_turned(torch.device("cuda", 0), True, True, shape)


@pytest.mark.interpreter
@pytest.mark.usefixtures("tiny_launches")
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize(("source", "scale"), [(torch.float32, 0.0), (torch.bfloat16, 3.7), (torch.float16, 3e3)])
def test_bytes_are_those_of_the_reference(source: torch.dtype, scale: float, dtype: torch.dtype) -> None:
    check((torch.randn(19, 35) * 3).to(source), None, "", dtype, scale=scale, margin=1)


@pytest.mark.interpreter
@pytest.mark.usefixtures("tiny_launches")
@pytest.mark.parametrize("name", ["gelu", "srelu", "swiglu", "clamped_swiglu"])
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")  # to infinity, as on a device
def test_activations_before_the_cast(name: str, backward: bool) -> None:
    rows, columns = 17, 21
    h = torch.randn(rows, columns * (2 if is_gated(name) else 1)) * 4
    if backward:
        check(torch.randn(rows, columns), h, name, E5M2, power_of_two=True)
    else:
        check(h, None, name, E4M3, record=False)


@pytest.mark.interpreter
@pytest.mark.usefixtures("tiny_launches")
@pytest.mark.parametrize("shape", [(1, 1), (1, 18), (18, 1), (16, 16)])
def test_small_shapes(shape: tuple[int, int]) -> None:
    check(torch.randn(shape), None, "", E4M3)


@pytest.mark.interpreter
@pytest.mark.usefixtures("tiny_launches")
def test_strides_and_wide_offsets() -> None:
    check(torch.randn(9, 40)[:, 3:20], None, "", E4M3)
    check(torch.randn(17, 9).t(), None, "", E4M3)
    # Rows 2^30 elements apart, in memory that is reserved but never touched between them.
    far = torch.empty(2**31 + 64, dtype=torch.float16).as_strided((3, 5), (2**30, 1))
    far.copy_(torch.randn(3, 5))
    check(far, None, "", E4M3)


@pytest.mark.filterwarnings("ignore:invalid value encountered in multiply:RuntimeWarning")  # infinity times zero
@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_every_code_every_midpoint_and_what_is_not_finite(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    codes = codes[codes.isfinite()].sort().values
    middle = (codes[1:] + codes[:-1]) / 2
    beside = [torch.nextafter(middle, torch.full_like(middle, far)) for far in (-1e9, 1e9)]
    odd = torch.tensor([torch.nan, -torch.nan, torch.inf, -torch.inf, 1e-42, 1e-30, 1e6, -0.0])
    x = torch.cat([codes, middle, *beside, odd])[None]
    slots = torch.zeros(1, 4)
    slots[0, 0] = 1.0
    options = CastOptions(0, dtype, True, True, record=True)
    found = run_quantize(x, None, "", slots.clone(), options, None, False)
    wanted = quantize_reference(x, slots.clone(), options, None, False)
    assert torch.equal(as_bytes(found[0]), as_bytes(wanted[0]))


@pytest.mark.interpreter
@pytest.mark.parametrize("columnwise", [False, True])
def test_kernels_at_their_own_launches(columnwise: bool) -> None:
    x = torch.randn(5, 70)
    options = CastOptions(0, E4M3, True, columnwise, record=True)
    found = run_quantize(x, None, "", torch.zeros(1, 4), options, None, False)
    wanted = quantize_reference(x, torch.zeros(1, 4), options, None, False)
    assert torch.equal(as_bytes(found[0]), as_bytes(wanted[0]))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["", "gelu", "swiglu"])
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1), (3, 4099), (257, 129), (1030, 770), (4096, 2048)])
def test_device_bytes_at_every_launch(
    shape: tuple[int, int], source: torch.dtype, dtype: torch.dtype, backward: bool, name: str
) -> None:
    if backward and not name:
        return
    device = torch.device("cuda", 0)
    rows, columns = shape
    wide = columns * 2 if name == "swiglu" else columns
    h = (torch.randn(rows, wide + 1, device=device) * 3).to(source)[:, 1:]
    x = torch.randn(shape, device=device).to(source) if backward else h
    check(x, h if backward else None, name, dtype)
    check(x, h if backward else None, name, dtype, scale=3.7, margin=1)


@given(rows=st.integers(1, 10**6), columns=st.integers(1, 10**6), columnwise=st.booleans(), column_sums=st.booleans())
def test_launches_are_lawful(rows: int, columns: int, columnwise: bool, column_sums: bool) -> None:
    for choice in (
        quantize_launch.quantize_launch(columnwise, column_sums),
        quantize_launch.amax_launch(columns),
        quantize_launch.transpose_launch(),
    ):
        assert choice.rows & (choice.rows - 1) == choice.columns & (choice.columns - 1) == 0
        assert choice.rows * choice.columns <= 65536
        assert -(-rows // choice.rows) * -(-columns // choice.columns) >= 1
