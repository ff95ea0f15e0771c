"""Products of FP8 matrices: their values, what is refused, and which implementation a device gets."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.library import opcheck

from fusestep import dispatch, precision
from fusestep.dispatch import StrictFallbackError
from fusestep.errors import UserError
from fusestep.hardware import Support
from fusestep.ops import scaled_mm as module
from fusestep.ops.quantized import padded
from fusestep.ops.scaled_mm import (
    PAIRS,
    random_operand,
    run_scaled_mm,
    scaled_mm,
    scaled_mm_op,
    scaled_mm_reference,
    tolerance,
)

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
CPU = torch.device("cpu")


def operands(rows: int, columns: int, inner: int, device: torch.device = CPU, **dtypes: Any) -> tuple[Tensor, ...]:
    """(a, a_scale_inv, b, b_scale_inv) of random bytes."""
    a = random_operand(rows, inner, dtypes.get("a", E4M3), device)
    b = random_operand(columns, inner, dtypes.get("b", E4M3), device)
    return a, torch.rand((), device=device) + 0.5, b, torch.rand((), device=device) + 0.5


def exact(a: Tensor, a_inv: Tensor, b: Tensor, b_inv: Tensor, rows: int, columns: int) -> Tensor:
    """The product of what is meant, in float64."""
    return (a[:rows].double() @ b[:columns].double().t()) * (a_inv.double() * b_inv.double())


# Values


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("formats", sorted(PAIRS, key=str))
@pytest.mark.parametrize(("rows", "columns", "inner"), [(32, 48, 64), (7, 29, 131), (1, 1, 1), (33, 10, 200)])
def test_a_product_is_that_of_the_dequantised_operands(
    rows: int,
    columns: int,
    inner: int,
    formats: tuple[torch.dtype, torch.dtype],
    out_dtype: torch.dtype,
    fast: bool,
    device: torch.device,
) -> None:
    a, a_inv, b, b_inv = operands(rows, columns, inner, device, a=formats[0], b=formats[1])
    bias = torch.randn(columns, device=device)
    limit = tolerance(dispatch.multiplies_fp8("scaled_mm", device), fast, out_dtype)
    for added in (None, bias, bias.bfloat16()):
        out = scaled_mm(
            a, a_inv, b, b_inv, rows=rows, columns=columns, out_dtype=out_dtype, bias=added, fast_accumulation=fast
        )
        true = exact(a, a_inv, b, b_inv, rows, columns)
        size = true.norm()
        if added is not None:
            true = true + added.to(out_dtype).double()
        assert out.shape == (rows, columns)
        assert out.dtype is out_dtype
        # What the bias takes away from the product takes nothing from its error.
        assert float((out.double() - true).norm() / torch.maximum(size, true.norm())) <= limit


@settings(max_examples=40)
@given(rows=st.integers(1, 70), columns=st.integers(1, 70), inner=st.integers(1, 300), seed=st.integers(0, 2**31))
def test_any_shape_equals_the_product_without_padding(rows: int, columns: int, inner: int, seed: int) -> None:
    torch.manual_seed(seed)
    a, a_inv, b, b_inv = operands(rows, columns, inner)
    out = scaled_mm(a, a_inv, b, b_inv, rows=rows, columns=columns, out_dtype=torch.float32)
    bare = (a[:rows, :inner].float() @ b[:columns, :inner].float().t()) * (a_inv * b_inv)
    torch.testing.assert_close(out, bare, rtol=1e-5, atol=1e-4)


def test_emulation_rounds_once() -> None:
    # 1 + 2⁻⁸ + 2⁻⁹: rounded to bf16 before the bias was added, the sum would be another.
    a = torch.zeros(16, 16)
    a[0, :3] = torch.tensor([1.0, 2.0**-4, 2.0**-5])
    b = torch.zeros(16, 16)
    b[0, :3] = torch.tensor([1.0, 2.0**-4, 2.0**-4])
    one, bias = torch.ones(()), torch.full((1,), 2.0**-9)
    out = scaled_mm(a.to(E4M3), one, b.to(E4M3), one, rows=1, columns=1, out_dtype=torch.bfloat16, bias=bias)
    assert out.item() == torch.tensor(1 + 2.0**-8 + 2.0**-9 + 2.0**-9).bfloat16().item()


@pytest.mark.parametrize("columns", [32, 29])
def test_rows_lie_the_padded_size_apart(columns: int, device: torch.device) -> None:
    a, a_inv, b, b_inv = operands(9, columns, 20, device)
    for out_dtype in (torch.float32, torch.bfloat16):
        out = scaled_mm(a, a_inv, b, b_inv, rows=9, columns=columns, out_dtype=out_dtype)
        assert out.stride() == (32, 1)
        assert out.is_contiguous() is (columns == 32)


@pytest.mark.parametrize(("rows", "columns", "inner"), [(0, 16, 32), (16, 0, 32), (3, 5, 0), (0, 0, 0)])
def test_empty_operands_give_the_bias_alone(rows: int, columns: int, inner: int, device: torch.device) -> None:
    a, a_inv, b, b_inv = operands(rows, columns, inner, device)
    bias = torch.randn(columns, device=device)
    out = scaled_mm(a, a_inv, b, b_inv, rows=rows, columns=columns, out_dtype=torch.float32, bias=bias)
    assert torch.equal(out, bias.expand(rows, columns))


def test_autocast_does_not_touch_the_product(device: torch.device) -> None:
    given_operands = operands(17, 19, 40, device)
    plain = scaled_mm(*given_operands, rows=17, columns=19, out_dtype=torch.float32)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        assert torch.equal(scaled_mm(*given_operands, rows=17, columns=19, out_dtype=torch.float32), plain)


def test_a_bias_that_needs_a_gradient_gets_none(device: torch.device) -> None:
    bias = torch.randn(16, device=device, requires_grad=True)
    for out_dtype in (torch.float32, torch.bfloat16):
        out = scaled_mm(*operands(16, 16, 16, device), rows=16, columns=16, out_dtype=out_dtype, bias=bias)
        assert not out.requires_grad


@pytest.mark.gpu
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
def test_native_and_emulated_products_agree(out_dtype: torch.dtype) -> None:
    device = torch.device("cuda", 0)
    if not dispatch.multiplies_fp8("scaled_mm", device):
        pytest.skip("this GPU does not multiply FP8")
    arguments = operands(513, 301, 700, device)
    bias = torch.randn(301, device=device)
    native = run_scaled_mm(*arguments, 513, 301, out_dtype, bias, False)
    emulated = scaled_mm_reference(*arguments, 513, 301, out_dtype, bias)
    assert native.stride() == emulated.stride()
    error = float((native.double() - emulated.double()).norm() / emulated.double().norm())
    assert error <= tolerance(True, False, out_dtype) + tolerance(False, False, out_dtype)


# torch's side


@pytest.mark.parametrize("columns", [16, 10])
def test_the_op_passes_opcheck(columns: int, device: torch.device) -> None:
    a, a_inv, b, b_inv = operands(5, columns, 20, device)
    # Not the check of the schema, which computes with its inputs, and torch does not add FP8 tensors.
    checks = ("test_faketensor", "test_autograd_registration", "test_aot_dispatch_dynamic")
    for bias in (None, torch.randn(columns, device=device)):
        arguments = (a, a_inv, b, b_inv, 5, columns, torch.bfloat16, bias, True, None, None)
        opcheck(scaled_mm_op, arguments, test_utils=checks)


def test_the_product_compiles_without_a_break() -> None:
    a, a_inv, b, b_inv = operands(5, 10, 20)

    def function(x: Tensor) -> Tensor:
        return scaled_mm(x, a_inv, b, b_inv, rows=5, columns=10, out_dtype=torch.float32) + 1

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(a), function(a))


# What is refused, alike on every device


def refused(words: str, device: torch.device, **change: Any) -> None:
    a, a_inv, b, b_inv = operands(16, 32, 48, device)
    arguments: dict[str, Any] = {"a": a, "a_scale_inv": a_inv, "b": b, "b_scale_inv": b_inv}
    arguments |= {"rows": 16, "columns": 32, "out_dtype": torch.bfloat16} | change
    with pytest.raises(UserError, match=words) as caught:
        scaled_mm(**arguments)
    assert str(caught.value).count(". ") == 0


def test_two_gradients_are_not_multiplied(device: torch.device) -> None:
    a, b = random_operand(16, 48, E5M2, device), random_operand(32, 48, E5M2, device)
    refused("both float8_e5m2", device, a=a, b=b)


@pytest.mark.parametrize("shape", [(15, 48), (16, 40)])
def test_sizes_that_are_not_padded_are_refused(shape: tuple[int, int], device: torch.device) -> None:
    refused(r"a is \(.*multiples of 16", device, a=torch.zeros(shape, device=device).to(E4M3))


def test_what_is_no_fp8_matrix_is_refused(device: torch.device) -> None:
    refused("a is float32 of shape", device, a=torch.zeros(16, 48, device=device))
    refused("b is float8_e4m3fn of shape", device, b=torch.zeros(1, 32, 48, device=device).to(E4M3))


def test_summed_sizes_agree(device: torch.device) -> None:
    refused("summed over and must agree", device, b=torch.zeros(32, 64, device=device).to(E4M3))


def test_a_matrix_is_row_major(device: torch.device) -> None:
    refused("b has strides", device, b=torch.zeros(48, 32, device=device).to(E4M3).t())


@pytest.mark.parametrize(("rows", "columns"), [(17, 32), (0, 32), (16, 16)])
def test_what_is_meant_fits_what_is_stored(rows: int, columns: int, device: torch.device) -> None:
    refused("padded to a multiple of 16", device, rows=rows, columns=columns)


def test_scales_are_one_fp32_value_each(device: torch.device) -> None:
    refused("a_scale_inv is float16", device, a_scale_inv=torch.ones((), device=device).half())
    refused(r"b_scale_inv is float32 of shape \(32,\)", device, b_scale_inv=torch.ones(32, device=device))


def test_bias_and_output_are_checked(device: torch.device) -> None:
    for size in (16, 33, 48):
        refused(rf"bias is float32 of shape \({size},\)", device, bias=torch.zeros(size, device=device))
    a, a_inv, b, b_inv = operands(16, 29, 16, device)
    with pytest.raises(UserError, match=r"bias is float32 of shape \(32,\); pass a floating-point \(29,\)"):
        scaled_mm(a, a_inv, b, b_inv, rows=16, columns=29, out_dtype=torch.float32, bias=torch.zeros(32, device=device))
    refused("bias is int64", device, bias=torch.zeros(32, device=device, dtype=torch.int64))
    refused("out_dtype is float64", device, out_dtype=torch.float64)


def test_everything_is_on_one_device() -> None:
    refused("a_scale_inv is on meta and a on cpu", CPU, a_scale_inv=torch.ones((), device="meta"))


# Which implementation


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FUSESTEP_IMPL", raising=False)
    monkeypatch.delenv("FUSESTEP_STRICT", raising=False)


def test_emulation_is_announced_once(chosen: None, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        scaled_mm(*operands(16, 16, 16), rows=16, columns=16, out_dtype=torch.float32)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1
    assert "scaled_mm emulates FP8" in said[0]
    assert {choice.implementation for choice in dispatch.decided()["scaled_mm"]} == {"emulated"}


def test_strict_mode_refuses_emulation(chosen: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSESTEP_STRICT", "1")
    with pytest.raises(StrictFallbackError, match=r"cannot multiply in FP8 natively: .*unset FUSESTEP_STRICT"):
        scaled_mm(*operands(16, 16, 16), rows=16, columns=16, out_dtype=torch.float32)


def test_asking_for_the_reference_emulates_without_a_word(
    chosen: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FUSESTEP_IMPL", "torch")
    monkeypatch.setenv("FUSESTEP_STRICT", "1")
    scaled_mm(*operands(16, 16, 16), rows=16, columns=16, out_dtype=torch.float32)
    assert not caplog.records


def test_a_device_that_multiplies_fp8_is_native(chosen: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch.hardware, "cuda_support", lambda: Support(True, "1 CUDA device"))
    monkeypatch.setattr(precision, "fp8_support", lambda index, scaling: Support(scaling == "tensor", f"told {index}"))
    cuda = torch.device("cuda", 3)
    assert dispatch.multiplies_fp8("scaled_mm", cuda)
    assert dispatch.explain_product("cuda", 3) == dispatch.Choice("native", "told 3")
    assert not dispatch.multiplies_fp8("scaled_mm", cuda, "mx")


def test_the_native_product_is_handed_what_the_hardware_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's product, seen in place of a GPU: the bias padded and cast for the epilogue, added after for fp32."""
    seen: list[tuple[Any, ...]] = []

    def product(a: Tensor, b: Tensor, a_inv: Tensor, b_inv: Tensor, bias: Any, *rest: Any) -> Tensor:
        seen.append((a, b, bias, *rest))
        out = a.float() @ b.float() * (a_inv * b_inv)
        return (out if bias is None else out + bias.float()).to(rest[1])

    monkeypatch.setattr(dispatch, "multiplies_fp8", lambda op, device, scaling="tensor": True)
    monkeypatch.setattr(torch, "_scaled_mm", product)
    for columns, out_dtype, bias_dtype in itertools.product(
        (32, 29), (torch.float32, torch.bfloat16, torch.float16), (torch.float32, torch.bfloat16)
    ):
        seen.clear()
        a, a_inv, b, b_inv = operands(9, columns, 20)
        bias = torch.randn(columns).to(bias_dtype)
        options = {"rows": 9, "columns": columns, "out_dtype": out_dtype, "bias": bias}
        out = scaled_mm(a, a_inv, b, b_inv, fast_accumulation=True, **options)
        ((_, b_seen, bias_seen, _, dtype_seen, fast_seen),) = seen
        assert b_seen.stride() == (1, padded(20))
        assert dtype_seen is out_dtype
        assert fast_seen is True
        if out_dtype is torch.float32:
            assert bias_seen is None
        else:
            assert bias_seen.shape == (32,)
            assert bias_seen.dtype is out_dtype
            assert bias_seen.is_contiguous()
        emulated = scaled_mm_reference(a, a_inv, b, b_inv, 9, columns, out_dtype, bias)
        torch.testing.assert_close(out, emulated)


@pytest.mark.parametrize(("columns", "size"), [(32, 32), (32, 16), (29, 16), (29, 32)])
def test_a_bias_is_handed_on_as_it_is_or_padded_and_never_made_to_fit(
    columns: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the products of modules hand to torch's own, which refuses a bias of another length than b has rows."""
    seen: list[Tensor] = []
    monkeypatch.setattr(dispatch, "multiplies_fp8", lambda op, device, scaling="tensor": True)
    monkeypatch.setattr(torch, "_scaled_mm", lambda *given: (seen.append(given[4]), torch.zeros(16, 32))[1])
    bias = torch.randn(size).bfloat16()
    module.multiply(*operands(9, columns, 20), 9, columns, torch.bfloat16, bias, True)
    if columns == 32:
        assert seen[0] is bias
    else:
        assert seen[0].shape == (size + 3,)


def test_the_doctor_proves_the_product(device: torch.device) -> None:
    with dispatch.examination():
        proofs = module.prove(device)
    assert len(proofs) == 24
    assert all(proof.ok for proof in proofs)


@pytest.mark.parametrize("wrong", [1.0, 1.005])
def test_the_doctor_forgives_what_tensor_cores_round_but_no_wrong_scale(
    wrong: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's product, seen in place of a GPU's, with 1.3e-4 of noise as on an H200."""

    def product(a: Tensor, b: Tensor, a_inv: Tensor, b_inv: Tensor, bias: Any, *rest: Any) -> Tensor:
        out = a.float() @ b.float() * (a_inv * b_inv * wrong)
        out += torch.randn_like(out) * (1.3e-4 * out.norm() / out.numel() ** 0.5)
        return (out if bias is None else out + bias.float()).to(rest[1])

    monkeypatch.setattr(dispatch, "multiplies_fp8", lambda op, device, scaling="tensor": True)
    monkeypatch.setattr(torch, "_scaled_mm", product)
    proofs = module.prove(CPU)
    if wrong == 1.0:
        assert all(proof.ok for proof in proofs)
    else:
        assert not any(proof.ok for proof in proofs if "float32" in proof.what)
