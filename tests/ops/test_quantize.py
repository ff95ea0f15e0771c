"""The cast to FP8 against an oracle of its own: x · scale in fp32, then the nearest code from a table in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fusestep.errors import UserError
from fusestep.ops.activation import ACTIVATIONS, activation, is_gated
from fusestep.ops.quantize import (
    quantize,
    quantize_activation,
    quantize_activation_backward,
    transpose_bytes,
)
from fusestep.ops.quantize_ops import quantize_op
from fusestep.ops.quantized import Quantized, padded

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
SHAPES = [(1, 1), (1, 37), (19, 1), (5, 7), (16, 32), (67, 129)]


def slots_of(device: torch.device, scale: float = 0.0, amax: float = 0.0) -> Tensor:
    slots = torch.zeros(3, 4, device=device)
    slots[1, 0], slots[1, 1] = scale, amax
    return slots


def nearest_codes(scaled: Tensor, dtype: torch.dtype) -> Tensor:
    """The code of each fp32 value: the nearest of the finite ones, of two as near the even one; 0x7F of NaN and of an
    infinity, which must stand for an infinite x."""
    table = torch.arange(128, dtype=torch.uint8).view(dtype).double()
    table = table[table.isfinite()]  # ascending, as positive codes are
    value = scaled.detach().cpu().double()
    magnitude = value.abs().clamp(max=LARGEST[dtype]).nan_to_num(0.0)
    above = torch.searchsorted(table, magnitude.contiguous()).clamp(max=len(table) - 1)
    below = (above - 1).clamp(min=0)
    up, down = table[above] - magnitude, magnitude - table[below]
    code = torch.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    code = torch.where(torch.signbit(value), code + 128, code)
    return torch.where(value.isfinite(), code, 127).to(torch.uint8)


def check_bytes(quantized: Quantized, codes: Tensor, allowed: int = 0) -> None:
    """Data and transpose hold these codes and zero padding, but for as many codes that may lie one beside."""
    rows, columns = codes.shape
    whole = torch.zeros(padded(rows), padded(columns), dtype=torch.uint8)
    whole[:rows, :columns] = codes
    for found, wanted in ((quantized.data, whole), (quantized.transposed, whole.t())):
        found = found.view(torch.uint8).cpu()
        assert found.shape == wanted.shape
        wrong = found != wanted
        assert int(wrong.sum()) <= allowed
        assert bool(((found[wrong].int() - wanted[wrong].int()).abs() <= 1).all())


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_first_cast_takes_its_scale_from_the_tensor(
    shape: tuple[int, int], source: torch.dtype, dtype: torch.dtype, device: torch.device
) -> None:
    x = (torch.randn(shape, device=device) * 0.005 + 0.001).to(source)
    slots = slots_of(device)
    quantized, sums = quantize(x, slots, 1, dtype, columnwise=True, column_sums=True)
    amax = x.abs().max().float().cpu()
    scale = torch.tensor(LARGEST[dtype]) / amax
    assert torch.equal(quantized.scale_inv.cpu(), 1.0 / scale)
    assert torch.equal(slots.cpu()[1], torch.tensor([0.0, float(amax), 0.0, 0.0]))
    assert not bool(slots[[0, 2]].any())
    check_bytes(quantized, nearest_codes(x.float().cpu() * scale, dtype))
    assert torch.allclose(sums.double().cpu(), x.double().sum(0).cpu(), atol=1e-6)


@pytest.mark.parametrize("shape", [(5, 7), (33, 130), (48, 1030)])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_without_slots_the_scale_is_the_tensors_own(
    shape: tuple[int, int], power_of_two: bool, device: torch.device
) -> None:
    x = torch.randn(shape, device=device) * 3 + 0.7
    options = {"columnwise": True, "power_of_two": power_of_two, "column_sums": True}
    quantized, sums = quantize(x, None, 2, E4M3, **options)
    scale = torch.tensor(LARGEST[E4M3]) / x.abs().max().cpu()
    scale = torch.exp2(torch.floor(torch.log2(scale.double()))).float() if power_of_two else scale
    assert torch.equal(quantized.scale_inv.cpu(), 1.0 / scale)
    check_bytes(quantized, nearest_codes(x.cpu() * scale, E4M3))
    assert torch.allclose(sums.double().cpu(), x.double().sum(0).cpu(), atol=1e-4)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_every_code_and_every_midpoint(dtype: torch.dtype, device: torch.device) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    codes = codes[codes.isfinite()].sort().values
    middle = (codes[1:] + codes[:-1]) / 2
    beside = [torch.nextafter(middle, torch.full_like(middle, far)) for far in (-1e9, 1e9)]
    small = torch.tensor([1e-30, -1e-30, 1e-42, 0.0, -0.0])
    x = torch.cat([codes, middle, *beside, small])[None].to(device)
    quantized, _ = quantize(x, slots_of(device, scale=1.0), 1, dtype, columnwise=True)
    check_bytes(quantized, nearest_codes(x, dtype))


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_cast_saturates_and_sees_what_is_not_finite(dtype: torch.dtype, device: torch.device) -> None:
    x = torch.tensor([[1.0, -1e6, torch.inf, -torch.inf, 3e38]], device=device)
    slots = slots_of(device, scale=2.0)
    quantized, _ = quantize(x, slots, 1, dtype, columnwise=True, record=True)
    top = LARGEST[dtype] / 2
    assert quantized.data is not None
    infinite = quantized.data.view(torch.uint8)[0, 2:4].tolist()
    assert infinite == [0x7F, 0x7F]  # NaN, whatever the sign
    assert quantized.dequantize().nan_to_num(7.0).cpu().tolist() == [[1.0, -top, 7.0, 7.0, top]]
    assert slots.cpu()[1].tolist() == [2.0, torch.inf, 0.0, 0.0]
    x[0, 2] = torch.nan
    quantized, _ = quantize(x, slots, 1, dtype, columnwise=True, record=True)
    check_bytes(quantized, nearest_codes(x.clamp(max=1e38) * 2, dtype))  # of 3e38 the product is infinite
    assert bool(slots[1, 1].isnan())
    quantize(torch.ones(2, 2, device=device), slots, 1, dtype, record=True)
    assert bool(slots[1, 1].isnan())  # until it rolls


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_first_cast_of_what_is_not_finite_has_scale_one(
    dtype: torch.dtype, poison: float, device: torch.device
) -> None:
    x = torch.tensor([[0.5, poison, -3.0]], device=device)
    quantized, _ = quantize(x, slots_of(device), 1, dtype, columnwise=True)
    assert float(quantized.scale_inv) == 1.0
    check_bytes(quantized, nearest_codes(x, dtype))


def test_zero_tensor_gives_zeros(device: torch.device) -> None:
    quantized, sums = quantize(torch.zeros(5, 7, device=device), slots_of(device), 1, E4M3, column_sums=True)
    assert not bool(quantized.dequantize().any())
    assert float(quantized.scale_inv) == 1.0
    assert not bool(sums.any())


@pytest.mark.parametrize("amax", [1e-45, 1e-40, 1e-38, 1e-36, 1e-30, 1e30, 3e38])
@pytest.mark.parametrize("margin", [0, 16])
def test_scale_and_its_inverse_are_normal_numbers(amax: float, margin: int, device: torch.device) -> None:
    x = torch.tensor([[amax, -amax / 3, 0.0]], device=device)
    quantized, _ = quantize(x, slots_of(device), 1, E4M3, margin=margin)
    assert 2.0**-126 <= float(quantized.scale_inv) <= 2.0**126
    error = (quantized.dequantize() - x).abs().max()
    if margin == 0 and amax >= 1e-36:
        assert float(error) <= amax / 16
    assert float(error) <= float(x[0, 0])


def test_power_of_two_scales_lose_no_bit(device: torch.device) -> None:
    x = torch.randn(9, 5, device=device)
    quantized, _ = quantize(x, slots_of(device), 1, E4M3, columnwise=True, power_of_two=True, margin=2)
    scale = 2.0 ** torch.floor(torch.log2(448.0 / x.abs().max().double() / 4))
    assert float(quantized.scale_inv) == float(1 / scale)
    check_bytes(quantized, nearest_codes(x * float(scale), E4M3))


def test_known_scale_is_used_and_amax_recorded_on_request(device: torch.device) -> None:
    x = torch.randn(40, 70, device=device)
    slots = slots_of(device, scale=3.0, amax=0.25)
    before = slots.clone()
    quantized, _ = quantize(x, slots, 1, E4M3, columnwise=True, margin=5)
    assert torch.equal(slots, before)
    check_bytes(quantized, nearest_codes(x * 3.0, E4M3))
    for _ in range(2):
        quantize(x, slots, 1, E4M3, record=True)
        assert float(slots[1, 1]) == float(x.abs().max())
    quantize(x * 0.01, slots, 1, E4M3, record=True)
    assert float(slots[1, 1]) == float(x.abs().max())


def test_what_was_saturated_or_flushed_is_counted(device: torch.device) -> None:
    counts = torch.zeros(3, 3, dtype=torch.int64, device=device)
    x = torch.tensor([[0.0, 1e-5, 1.0, 500.0, torch.inf, -449.0, torch.nan]], device=device).repeat(70, 1)
    for _ in range(2):
        quantize(x, slots_of(device, scale=1.0), 1, E4M3, counts=counts)
    assert counts.cpu().tolist() == [[0, 0, 0], [2 * 490, 2 * 140, 2 * 70], [0, 0, 0]]


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[:, 3:40],
        lambda x: x[::2],
        lambda x: x[::2, ::3],
        lambda x: x.t(),
        lambda x: x[:1].expand(9, -1),
        lambda x: x[:, :1],
    ],
)
def test_strides(view: Callable[[Tensor], Tensor], device: torch.device) -> None:
    x = view(torch.randn(33, 50, device=device))
    quantized, sums = quantize(x, slots_of(device, scale=7.0), 1, E5M2, columnwise=True, column_sums=True)
    check_bytes(quantized, nearest_codes(x * 7.0, E5M2))
    assert torch.allclose(sums.double(), x.double().sum(0), atol=1e-5)


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16])
def test_activation_and_its_gradient(name: str, source: torch.dtype, device: torch.device) -> None:
    rows, columns = 35, 21
    h = (torch.randn(rows, columns * (2 if is_gated(name) else 1), device=device) * 2).to(source)
    da = torch.randn(rows, columns, device=device).to(source)
    wide = h.double().requires_grad_()
    value = activation(wide, name)
    (gradient,) = torch.autograd.grad(value, wide, da.double())
    # x · scale may differ by an ulp before the cast, so that a value in the middle may go either way.
    quantized = quantize_activation(h, name, slots_of(device, scale=11.0), 1, E4M3, columnwise=True)
    check_bytes(quantized, nearest_codes(value.float() * 11.0, E4M3), allowed=3)
    slots = slots_of(device)
    quantized, sums = quantize_activation_backward(da, h, name, slots, 1, E5M2, columnwise=True, record=True)
    scale = 1.0 / quantized.scale_inv.double()
    check_bytes(quantized, nearest_codes((gradient * scale).float(), E5M2), allowed=3)
    assert torch.allclose(slots[1, 1].double(), gradient.abs().max(), rtol=1e-5)
    assert torch.allclose(sums.double(), gradient.sum(0), rtol=1e-5, atol=1e-5)


def test_one_of_both_forms(device: torch.device) -> None:
    x = torch.randn(5, 20, device=device)
    both, _ = quantize(x, slots_of(device), 1, E4M3, columnwise=True)
    row, _ = quantize(x, slots_of(device), 1, E4M3)
    column, _ = quantize(x, slots_of(device), 1, E4M3, rowwise=False, columnwise=True)
    assert row.transposed is None
    assert column.data is None
    assert torch.equal(row.dequantize(), both.dequantize())
    assert torch.equal(column.dequantize(), both.dequantize())
    assert row.dtype is E4M3
    assert torch.equal(transpose_bytes(both.data).view(torch.uint8), both.transposed.view(torch.uint8))


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
def test_nothing_to_cast(shape: tuple[int, int], device: torch.device) -> None:
    quantized, sums = quantize(torch.empty(shape, device=device), slots_of(device), 1, E4M3, column_sums=True)
    assert quantized.data.shape == (padded(shape[0]), padded(shape[1]))
    assert quantized.dequantize().shape == shape
    assert sums.shape == (shape[1],)
    assert not bool(sums.any())


def test_column_sums_repeat_bit_for_bit(device: torch.device) -> None:
    x = torch.randn(1000, 40, device=device)
    first, second = (quantize(x, slots_of(device), 1, E4M3, column_sums=True)[1] for _ in range(2))
    assert torch.equal(first, second)


def test_blocks_are_dequantised() -> None:
    data = torch.randn(16, 272).to(E4M3)
    scale = torch.rand(3, 3) + 0.5
    row_scale = scale[:1].expand(16, 3)
    quantized = Quantized((3, 260), data, None, row_scale, row_scale, (1, 128))
    wanted = data[:3, :260].float() * scale[0].repeat_interleave(128)[:260]
    assert torch.equal(quantized.dequantize(), wanted)
    exponents = torch.full((16, 9), 127, dtype=torch.uint8)
    exponents[0, 0], exponents[1, 8] = 0, 254
    values = Quantized((3, 260), data, None, exponents, exponents, (1, 32)).dequantize()
    assert torch.equal(values[0, :32], data[0, :32].float() * 2.0**-127)
    assert torch.equal(values[1, 256:], data[1, 256:260].float() * 2.0**127)
    assert torch.equal(values[2], data[2, :260].float())


@pytest.mark.parametrize("gated", [False, True])
def test_op_is_lawful(gated: bool) -> None:
    h = torch.randn(5, 14 if gated else 7)
    name = "swiglu" if gated else "gelu"
    counts = torch.zeros(3, 3, dtype=torch.int64)
    x, slots = torch.randn(5, 7), slots_of(torch.device("cpu"))
    torch.library.opcheck(quantize_op, (x, h, name, slots, 1, E5M2, True, True, True, 0, False, counts, True))
    torch.library.opcheck(quantize_op, (x, h, name, None, 1, E5M2, True, True, False, 0, False, None, True))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_traces_without_a_break() -> None:
    def cast(x: Tensor, slots: Tensor) -> Tensor:
        quantized, sums = quantize(x, slots, 1, E4M3, columnwise=True, record=True, column_sums=True)
        return quantized.dequantize() + sums

    x = torch.randn(5, 7)
    eager, traced = slots_of(torch.device("cpu")), slots_of(torch.device("cpu"))
    wanted = cast(x, eager)
    assert torch.equal(torch.compile(cast, fullgraph=True, backend="aot_eager")(x, traced), wanted)
    assert torch.equal(traced, eager)


X, SLOTS = torch.zeros(4, 4), torch.zeros(2, 4)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: quantize(X, SLOTS, 0, torch.float16), "pass torch.float8_e4m3fn"),
        (lambda: quantize(X, SLOTS, 0, E4M3, rowwise=False), "rowwise=True"),
        (lambda: quantize(X[0], SLOTS, 0, E4M3), "pass \\(rows, columns\\)"),
        (lambda: quantize(X.double(), SLOTS, 0, E4M3), "pass float32, bfloat16 or float16"),
        (lambda: quantize(X, SLOTS, 2, E4M3), "no slot 2 among 2"),
        (lambda: quantize(X, SLOTS[:, :3], 0, E4M3), "pass contiguous"),
        (lambda: quantize(X, SLOTS, 0, E4M3, margin=-1), "margin is -1"),
        (lambda: quantize(X, SLOTS, 0, E4M3, counts=torch.zeros(2, 3)), "int64"),
        (lambda: quantize(X, None, 0, E4M3, record=True), "without slots there is nothing to record"),
        (lambda: quantize_activation(X, "tanh", SLOTS, 0, E4M3), "pass one of gelu"),
        (lambda: quantize_activation_backward(X, X, "swiglu", SLOTS, 0, E4M3), "pass the gradient of swiglu"),
        (lambda: transpose_bytes(X), "pass FP8"),
    ],
)
def test_bad_input_is_one_sentence(call: Callable[[], object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        call()
    assert not bool(SLOTS.any())
