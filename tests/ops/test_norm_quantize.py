"""Norms that are cast to FP8 in the same pass, against float64 and against the reference, bytes included."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from fusestep.errors import UserError
from fusestep.language import interpreted
from fusestep.ops import norm_forward, norm_quantize_kernel
from fusestep.ops import norm_quantize as module
from fusestep.ops.cast_options import CastOptions
from fusestep.ops.norm_ops import norm_backward
from fusestep.ops.norm_quantize import norm_quantize, norm_quantize_op, norm_quantize_reference
from fusestep.ops.quantized import padded

EPS = 1e-5
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SCALE, AMAX = 0, 1


@pytest.fixture
def tiny_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wide kernels from 33 columns on, and fewer programs than tiles, so that every loop goes round."""

    def launch(width: int, multiprocessors: int) -> norm_forward.ForwardLaunch:
        if width > 32:
            return norm_forward.ForwardLaunch(64, 1, None, 1, wide=True)
        columns: Any = "late" if width < 20 else "kept"
        return norm_forward.ForwardLaunch(32, 2, 3 if columns == "kept" else None, 1, 2, columns)

    monkeypatch.setattr(norm_quantize_kernel, "quantize_launch", launch)
    monkeypatch.setattr(norm_quantize_kernel, "AMAX_PROGRAMS", 2)
    monkeypatch.setattr(module, "_known", {})


def exact(x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, centred: bool) -> Tensor:
    """y in float64, of the sum as it was rounded."""
    x = (x if residual is None else x + residual).double()
    if centred:
        x = x - x.mean(-1, keepdim=True)
    y = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()
    if weight is not None:
        y = y * weight.double()
    return y if bias is None else y + bias.double()


def codes(data: Tensor) -> Tensor:
    """FP8 bytes as integers in the order of their values."""
    byte = data.contiguous().view(torch.uint8).int()
    return torch.where(byte < 128, byte, 128 - byte)


def check_same_bytes(data: Tensor, truth: Tensor) -> None:
    """At most one code apart, on fewer than a thousandth of the elements: where an ulp of y crosses a boundary."""
    apart = (codes(data.cpu()) - codes(truth.cpu())).abs()
    assert int(apart.max()) <= 1
    assert int((apart > 0).sum()) <= apart.numel() / 1000


def slots_of(device: torch.device, dtype: torch.dtype, scale: float = 0.0, amax: float = 0.0) -> Tensor:
    slots = torch.zeros(3, 4, device=device)
    slots[1] = torch.tensor([scale, amax, torch.finfo(dtype).max, 0.0])
    return slots


def check(
    device: torch.device,
    shape: tuple[int, ...],
    element: torch.dtype,
    dtype: torch.dtype,
    centred: bool,
    has_residual: bool,
    scale: float = 0.0,
) -> None:
    """Bytes, scale, amax, sum and statistics against the reference on the same tensors, and against float64."""
    width = shape[-1]
    x, residual = ((torch.randn(shape, device=device) * 3 + 1).to(element) for _ in range(2))
    if interpreted():  # it truncates where hardware rounds: have sums that are bf16 numbers
        x, residual = ((t * 8).round() / 8 for t in (x, residual))
    weight = torch.rand(width, device=device) + 0.5
    bias = torch.randn(width, device=device) if centred else None
    parameters = (x, residual if has_residual else None, weight, bias)
    slots, counts = slots_of(device, dtype, scale, 0.25), torch.zeros(3, 3, dtype=torch.int64, device=device)
    output = torch.empty(shape, dtype=element, device=device)
    options: dict[str, Any] = {"record": True, "margin": 1, "counts": counts, "output": output}
    quantized, total, statistics = norm_quantize(*parameters, EPS, centred, slots, 1, dtype, **options)
    rows = x.numel() // width
    assert quantized.shape == (rows, width)
    data = quantized.data
    assert data is not None
    assert data.shape == (padded(rows), padded(width))
    assert data.dtype is dtype

    cpu = [None if t is None else t.cpu() for t in parameters]
    cpu_slots, cpu_counts = slots_of(torch.device("cpu"), dtype, scale, 0.25), torch.zeros(3, 3, dtype=torch.int64)
    assert cpu[0] is not None
    cpu_output = torch.empty(shape, dtype=element)
    truth, scale_inv, true_total, true_statistics = norm_quantize_reference(
        *(cpu[0], *cpu[1:], EPS, centred, cpu_slots),
        *(CastOptions(1, dtype, record=True, margin=1), cpu_counts, cpu_output),
    )
    check_same_bytes(data, truth)
    torch.testing.assert_close(slots.cpu(), cpu_slots, rtol=2e-6, atol=0.0)
    torch.testing.assert_close(quantized.scale_inv.cpu(), scale_inv, rtol=2e-6, atol=0.0)
    torch.testing.assert_close(statistics.cpu(), true_statistics, rtol=1e-5, atol=1e-5)
    assert counts[1, 0] == rows * width
    assert (counts.cpu() - cpu_counts).abs().max() <= max(1, rows * width // 1000)
    if true_total is None:
        assert total is None
    else:
        assert total is not None
        assert torch.equal(total.cpu(), true_total)

    normed = x if total is None else total
    y = exact(normed, None, weight, bias, centred)
    # Half a place of E4M3 is a 16th, of E5M2 an 8th; below the normal numbers half of the smallest.
    step, smallest = (1 / 16, 2.0**-10) if dtype is E4M3 else (1 / 8, 2.0**-17)
    top = torch.finfo(dtype).max * quantized.scale_inv
    distance = (quantized.dequantize(torch.float64) - y.reshape(rows, width).clamp(-top, top)).abs()
    assert bool((distance <= 1.001 * (y.reshape(rows, width).abs() * step + smallest * quantized.scale_inv)).all())
    torch.testing.assert_close(output.double(), y, rtol=1e-5 if element is torch.float32 else 1e-2, atol=1e-5)
    assert not bool(data.view(torch.uint8)[rows:].any())
    assert not bool(data.view(torch.uint8)[:, width:].any())


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("element", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 7, 33), (50, 769), (16, 2048), (1, 1)])
def test_bytes_agree_with_float64_and_the_reference(
    device: torch.device,
    shape: tuple[int, ...],
    element: torch.dtype,
    dtype: torch.dtype,
    centred: bool,
    has_residual: bool,
) -> None:
    check(device, shape, element, dtype, centred, has_residual)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [16, 1000, 4096, 8192, 16384, 40000])
@pytest.mark.parametrize("scale", [0.0, 20.0])
def test_wider_rows_on_the_device(width: int, scale: float) -> None:
    for centred in (False, True):
        check(torch.device("cuda", 0), (37, width), torch.bfloat16, E4M3, centred, True, scale)


@pytest.mark.interpreter
@pytest.mark.usefixtures("tiny_launches")
@pytest.mark.parametrize("shape", [(19, 21), (5, 19), (7, 77)])
@pytest.mark.parametrize("element", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("dtype", "centred", "has_residual", "scale"), [(E4M3, True, False, 0.0), (E5M2, False, True, 150.0)]
)
def test_kernels_agree_with_the_reference(
    shape: tuple[int, ...],
    element: torch.dtype,
    dtype: torch.dtype,
    centred: bool,
    has_residual: bool,
    scale: float,
) -> None:
    check(torch.device("cpu"), shape, element, dtype, centred, has_residual, scale)


@pytest.mark.interpreter
@pytest.mark.usefixtures("tiny_launches")
@pytest.mark.parametrize("width", [21, 77])
def test_kernels_follow_strides_and_do_without_parameters(width: int) -> None:
    check_strides(torch.device("cpu"), width)


@pytest.mark.parametrize("width", [21, 77])
def test_strided_tensors_and_no_parameters(device: torch.device, width: int) -> None:
    check_strides(device, width)


def check_strides(device: torch.device, width: int) -> None:
    x = torch.randn(5, 3 * width, device=device)[:, width : 2 * width]
    residual = torch.randn(width, 5, device=device).t()
    weight = torch.rand(width, 2, device=device)[:, 0]
    for parameters in ((x, residual, weight, None), (x, None, None, None)):
        slots = slots_of(device, E4M3)
        dense = [None if t is None else t.cpu().contiguous() for t in parameters]
        assert dense[0] is not None
        quantized, _, _ = norm_quantize(*parameters, EPS, True, slots, 1, E4M3)
        truth, *_ = norm_quantize_reference(
            *(dense[0], *dense[1:], EPS, True, slots_of(torch.device("cpu"), E4M3), CastOptions(1, E4M3), None, None)
        )
        assert quantized.data is not None
        check_same_bytes(quantized.data, truth)


def check_eps(device: torch.device, width: int) -> None:
    """Rows so small that eps counts."""
    x, eps = torch.randn(5, width, device=device) * 1e-2, 3e-4
    output = torch.empty_like(x)
    _, _, statistics = norm_quantize(x, None, None, None, eps, False, slots_of(device, E4M3), 1, E4M3, output=output)
    rstd = (x.double().square().mean(-1, keepdim=True) + eps).rsqrt()
    torch.testing.assert_close(statistics.double(), rstd, rtol=1e-6, atol=0.0)
    torch.testing.assert_close(output.double(), x.double() * rstd, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("width", [21, 77])
def test_eps_is_added_to_the_variance(device: torch.device, width: int) -> None:
    check_eps(device, width)


@pytest.mark.interpreter
@pytest.mark.usefixtures("tiny_launches")
@pytest.mark.parametrize("width", [21, 77])
def test_kernels_add_eps_to_the_variance(width: int) -> None:
    check_eps(torch.device("cpu"), width)


def check_large_means(device: torch.device, width: int) -> None:
    """Rows whose mean in fp32 alone is off by a tenth of their spread."""
    x = 1e6 + torch.randn(5, width, device=device) * 0.2
    output = torch.empty_like(x)
    norm_quantize(x, None, None, None, EPS, True, slots_of(device, E4M3), 1, E4M3, output=output)
    torch.testing.assert_close(output.double(), exact(x, None, None, None, True), rtol=0.0, atol=1e-4)


@pytest.mark.parametrize("width", [21, 77])
def test_large_means_lose_no_digits(device: torch.device, width: int) -> None:
    check_large_means(device, width)


@pytest.mark.interpreter
@pytest.mark.usefixtures("tiny_launches")
@pytest.mark.parametrize("width", [21, 77])
def test_kernels_keep_large_means(width: int) -> None:
    check_large_means(torch.device("cpu"), width)


@pytest.mark.interpreter
@pytest.mark.usefixtures("tiny_launches")
@pytest.mark.parametrize("width", [19, 20, 21])
def test_offsets_have_sixty_four_bits(width: int) -> None:
    # Three rows 2^30 elements apart, in memory that is reserved but never touched between them.
    x, residual = (
        torch.empty(2**31 + 128, dtype=torch.float16).as_strided((3, width), (2**30, 1)).copy_(torch.randn(3, width))
        for _ in range(2)
    )
    found = norm_quantize(x, residual, None, None, EPS, True, slots_of(torch.device("cpu"), E4M3), 1, E4M3)
    dense = norm_quantize(
        *(x.contiguous(), residual.contiguous(), None, None, EPS, True, slots_of(torch.device("cpu"), E4M3), 1, E4M3)
    )
    assert found[0].data is not None
    assert dense[0].data is not None
    assert torch.equal(found[0].data.view(torch.uint8), dense[0].data.view(torch.uint8))
    assert all(torch.equal(a, b) for a, b in zip(found[1:], dense[1:], strict=True))  # type: ignore[arg-type]


def check_slots(device: torch.device, width: int) -> None:
    """What a call does to its slot, with and without a scale, recording or not; other slots stay."""
    x = torch.randn(9, width, device=device)
    amax = float(exact(x, None, None, None, False).abs().max())
    close = {"rel": 1e-5}
    for record in (False, True):
        slots = slots_of(device, E4M3)
        quantized, _, _ = norm_quantize(x, None, None, None, EPS, False, slots, 1, E4M3, record=record)
        assert slots[1].tolist() == [0.0, pytest.approx(amax, **close), 448.0, 0.0]
        assert float(quantized.scale_inv) == pytest.approx(amax / 448, **close)
        # A scale that is set is used, whatever the amax; the amax rises where it is recorded, and never falls.
        slots = slots_of(device, E4M3, 16.0, amax / 2)
        quantized, _, _ = norm_quantize(x, None, None, None, EPS, False, slots, 1, E4M3, record=record)
        assert float(quantized.scale_inv) == 1 / 16
        assert float(slots[1, AMAX]) == pytest.approx(amax if record else amax / 2, **close)
        slots = slots_of(device, E4M3, 16.0, amax * 2)
        norm_quantize(x, None, None, None, EPS, False, slots, 1, E4M3, record=record)
        assert float(slots[1, AMAX]) == pytest.approx(amax * 2, **close)
        assert not bool(slots[[0, 2]].any())
    quantized, _, _ = norm_quantize(
        x, None, None, None, EPS, False, slots_of(device, E4M3), 1, E4M3, margin=2, power_of_two=True
    )
    assert float(quantized.scale_inv) == 2.0 ** -int(torch.tensor(448 / 4 / amax).log2().floor())


@pytest.mark.parametrize("width", [21, 77])
def test_scale_and_amax_of_the_slot(device: torch.device, width: int) -> None:
    check_slots(device, width)


@pytest.mark.interpreter
@pytest.mark.usefixtures("tiny_launches")
@pytest.mark.parametrize("width", [21, 77])
def test_kernels_read_and_raise_the_slot(width: int) -> None:
    check_slots(torch.device("cpu"), width)


def check_unusual(device: torch.device, width: int) -> None:
    # An output that is infinite becomes NaN.
    weight = torch.ones(width, device=device)
    weight[7] = float("inf")
    quantized, _, _ = norm_quantize(
        torch.randn(5, width, device=device), None, weight, None, EPS, False, slots_of(device, E4M3, 2.0), 1, E4M3
    )
    assert quantized.data is not None
    assert quantized.data.view(torch.uint8)[:5, 7].tolist() == [0x7F] * 5
    assert int(quantized.data.float().isnan().sum()) == 5
    # Rows of padding stay zero whatever the bias; a row with NaN is NaN, its neighbours are not.
    x = torch.randn(5, width, device=device)
    x[3, 2] = float("nan")
    bias = torch.full((width,), 1e4, device=device)
    slots = slots_of(device, E4M3, 1.0)
    counts = torch.zeros(3, 3, dtype=torch.int64, device=device)
    options: dict[str, Any] = {"record": True, "counts": counts}
    quantized, _, _ = norm_quantize(x, None, None, bias, EPS, True, slots, 1, E4M3, **options)
    assert quantized.data is not None
    values = quantized.data.float()
    assert bool(values[3, :width].isnan().all())
    assert bool((values[[0, 1, 2, 4], :width] == 448).all())
    assert not bool(values[5:].any())
    assert not bool(values[:, width:].any())
    assert bool(slots[1, AMAX].isnan())
    assert counts[1].tolist() == [5 * width, 4 * width, 0]
    # Zeros stay zeros, under a scale of 1.
    slots = slots_of(device, E4M3)
    quantized, _, _ = norm_quantize(torch.zeros_like(x), None, None, None, EPS, True, slots, 1, E4M3, record=True)
    assert quantized.data is not None
    assert not bool(quantized.data.view(torch.uint8).any())
    assert float(quantized.scale_inv) == 1.0
    assert slots[1, :2].tolist() == [0.0, 0.0]
    # What is flushed to zero is counted.
    counts.zero_()
    slots = slots_of(device, E4M3, 2.0**-20)
    norm_quantize(x[:3], None, None, None, EPS, True, slots, 1, E4M3, **options)
    assert counts[1].tolist() == [3 * width, 0, 3 * width]


@pytest.mark.parametrize("width", [21, 77])
def test_padding_nan_zeros_and_counts(device: torch.device, width: int) -> None:
    check_unusual(device, width)


@pytest.mark.interpreter
@pytest.mark.usefixtures("tiny_launches")
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy, of NaN
@pytest.mark.parametrize("width", [21, 77])
def test_kernels_pad_keep_nan_and_count(width: int) -> None:
    check_unusual(torch.device("cpu"), width)


@pytest.mark.gpu
def test_every_place_of_the_output_is_written(poisoned: None) -> None:
    for width in (1, 33, 769, 2049, 33001):
        check(torch.device("cuda", 0), (3, width), torch.bfloat16, E4M3, True, True)


@pytest.mark.parametrize("centred", [False, True])
def test_the_norms_backward_takes_statistics_and_sum(device: torch.device, centred: bool) -> None:
    x, residual, dy = (torch.randn(7, 33, device=device) for _ in range(3))
    weight = torch.rand(33, device=device)
    slots = slots_of(device, E4M3)
    _, total, statistics = norm_quantize(x, residual, weight, None, EPS, centred, slots, 1, E4M3)
    assert total is not None
    dx, dweight, *_ = norm_backward(
        dy, None, total, statistics, weight, None, 33, centred, False, torch.float32, True, False
    )
    leaves = (total.double().requires_grad_(), weight.double().requires_grad_())
    y = exact(leaves[0], None, leaves[1], None, centred)
    for value, truth in zip((dx, dweight), torch.autograd.grad(y, leaves, dy.double()), strict=True):
        assert float((value.double() - truth).norm() / truth.norm()) <= 1e-5


def test_nothing_is_normalised_to_nothing(device: torch.device) -> None:
    for shape in ((0, 33), (3, 0)):
        slots = slots_of(device, E4M3)
        quantized, _, _ = norm_quantize(
            torch.empty(shape, device=device), None, None, None, EPS, True, slots, 1, E4M3, record=True
        )
        assert quantized.shape == shape
        assert quantized.data is not None
        assert quantized.data.numel() == 0
        assert float(quantized.scale_inv) == 1.0


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_is_traced_as_one_op_that_changes_its_slots(device: torch.device) -> None:
    x, weight = torch.randn(2, 5, 33, device=device), torch.rand(33, device=device)
    slots = slots_of(device, E4M3)
    arguments = (x, x, weight, None, EPS, True, slots, 1, E4M3, True, 0, False, None, None)
    torch.library.opcheck(norm_quantize_op, arguments)

    def run(x: Tensor, slots: Tensor) -> tuple[Tensor | None, Tensor]:
        quantized, _, _ = norm_quantize(x, None, weight, None, EPS, True, slots, 1, E4M3, record=True)
        return quantized.data, quantized.scale_inv

    slots, traced = slots_of(device, E4M3), slots_of(device, E4M3)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for value, truth in zip(compiled(x, traced), run(x, slots), strict=True):
        assert value is not None
        assert truth is not None
        assert torch.equal(value.float(), truth.float())
    assert torch.equal(traced, slots)
    assert bool(slots[1, AMAX] > 0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dtype": torch.bfloat16}, "pass torch.float8_e4m3fn"),
        ({"x": torch.tensor(1.0)}, "x has no dimension"),
        ({"x": torch.randn(4, 9, dtype=torch.float64)}, "x has dtype torch.float64"),
        ({"residual": torch.randn(4, 8)}, "residual has shape (4, 8); pass one of shape (4, 9)"),
        ({"weight": torch.randn(8)}, "weight has shape (8,)"),
        ({"bias": torch.ones(9, dtype=torch.int64)}, "bias has dtype torch.int64"),
        ({"output": torch.empty(9, 4).t()}, "output is not contiguous"),
        ({"slots": torch.zeros(4)}, "slots are (4,)"),
        ({"slots": torch.zeros(3, 4, dtype=torch.float64)}, "slots are (3, 4) torch.float64"),
        ({"counts": torch.zeros(2, 3, dtype=torch.int64)}, "counts are (2, 3)"),
        ({"index": 3}, "no slot 3 among 3"),
        ({"weight": torch.ones(9, device="meta")}, "move them to one device"),
    ],
)
def test_what_cannot_be_cast_is_told_before_anything_is_written(change: dict[str, Any], words: str) -> None:
    arguments: dict[str, Any] = {"x": torch.randn(4, 9), "residual": None, "weight": None, "bias": None, "eps": EPS}
    arguments |= {"centred": True, "slots": torch.zeros(3, 4), "index": 1, "dtype": E4M3}
    arguments |= change
    with pytest.raises(UserError, match=re.escape(words)):
        norm_quantize(**arguments)
    assert not bool(arguments["slots"].any())
