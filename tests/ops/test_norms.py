"""What LayerNorm and RMSNorm have in common, on CPU and GPU, against a two-pass float64 oracle of the test's own."""

from __future__ import annotations

import contextlib
import gc
import logging
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from fusestep import dispatch
from fusestep.errors import UserError
from fusestep.nn import functional as fused
from fusestep.ops import norm
from fusestep.ops import norm_ops as ops
from fusestep.ops.registry import CATALOGUE

EPS = 1e-5
KINDS = ("layer_norm", "rms_norm")
#: Largest relative norm of an error: a few fp32 roundings, or the one rounding of 16-bit outputs.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 4e-3}


def call(kind: str, x: Tensor, shape: tuple[int, ...], weight: Any, bias: Any, **options: Any) -> Any:
    if kind == "layer_norm":
        return fused.layer_norm(x, shape, weight, bias, EPS, **options)
    return fused.rms_norm(x, shape, weight, EPS, **options)


def exact(kind: str, x: Tensor, weight: Any, bias: Any, axes: int = 1) -> Tensor:
    """Two-pass, float64, differentiable."""
    dims = tuple(range(-axes, 0))
    x = x.double()
    if kind == "layer_norm":
        x = x - x.mean(dims, keepdim=True)
    y = x / (x.square().mean(dims, keepdim=True) + EPS).sqrt()
    y = y if weight is None else y * weight.double()
    return y if bias is None else y + bias.double()


def error(value: Tensor, truth: Tensor) -> float:
    """Relative norm of the difference; the plain norm where the truth is 0."""
    assert value.shape == truth.shape
    value, truth = value.detach().double(), truth.detach().double()
    scale = truth.norm()
    return float((value - truth).norm() / (scale if scale > 0 else 1))


def leaves(
    kind: str,
    device: torch.device,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    axes: int = 1,
) -> tuple[Tensor, Tensor, Tensor | None]:
    x = (torch.randn(shape, device=device) * 2 + 5).to(dtype).requires_grad_()
    weight = (torch.rand(shape[-axes:], device=device) + 0.5).to(weight_dtype).requires_grad_()
    bias = torch.randn(shape[-axes:], device=device).to(weight_dtype).requires_grad_() if kind == "layer_norm" else None
    return x, weight, bias


def check_gradients(kind: str, x: Tensor, weight: Any, bias: Any, tolerance: float, **options: Any) -> None:
    """y and every gradient against the oracle, from a random dy."""
    wanted = [t for t in (x, weight, bias) if t is not None]
    y = call(kind, x, tuple(x.shape[-1:]), weight, bias, **options)
    dy = torch.randn(y.shape, device=y.device).to(y.dtype)
    found = torch.autograd.grad(y, wanted, dy)
    truth = exact(kind, x, weight, bias)
    assert error(y, truth) <= tolerance
    for value, true, leaf in zip(found, torch.autograd.grad(truth, wanted, dy.double()), wanted, strict=True):
        assert value.dtype == leaf.dtype
        assert error(value, true) <= tolerance


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 2, 31, 33])
@pytest.mark.parametrize("width", [3, 7, 33, 100, 769, 1000, 1600, 5120])
def test_agrees_with_float64_at_any_width(
    kind: str, dtype: torch.dtype, rows: int, width: int, device: torch.device
) -> None:
    x, weight, bias = leaves(kind, device, (rows, width), dtype, dtype)
    # Of a row of three values nearly all that dx holds may cancel, so its fp32 rounding weighs more.
    tolerance = TOLERANCE[dtype] if width > 3 else max(TOLERANCE[dtype], 2e-3)
    check_gradients(kind, x, weight, bias, tolerance)


def test_rows_of_two_columns_have_next_to_no_gradient(device: torch.device) -> None:
    x, weight, bias = leaves("layer_norm", device, (33, 2), torch.float32, torch.float32)
    dy = torch.randn(33, 2, device=device)
    found = torch.autograd.grad(call("layer_norm", x, (2,), weight, bias), (x, weight), dy)
    true = torch.autograd.grad(exact("layer_norm", x, weight, bias), (x, weight), dy.double())
    rstd = (x.double().var(-1, correction=0) + EPS).rsqrt().unsqueeze(-1)
    assert bool(((found[0] - true[0]).abs() <= 1e-6 * rstd * dy.abs().sum(-1, keepdim=True)).all())
    assert error(found[1], true[1]) <= 2e-6


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [8192, 8193, 16384, 16385, 32768, 32769, 65536, 65537, 131072])
def test_wide_rows_agree_with_float64(kind: str, dtype: torch.dtype, width: int) -> None:
    x, weight, bias = leaves(kind, torch.device("cuda", 0), (300, width), dtype, dtype)
    check_gradients(kind, x, weight, bias, TOLERANCE[dtype])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [65535, 65536, 65537, 140001])
def test_more_rows_than_a_grid_axis_holds(kind: str, rows: int, device: torch.device) -> None:
    x, weight, bias = leaves(kind, device, (rows, 8), torch.float32, torch.float32)
    check_gradients(kind, x, weight, bias, 1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_output_has_the_dtype_of_x_and_each_gradient_its_leafs(
    kind: str, x_dtype: torch.dtype, weight_dtype: torch.dtype, device: torch.device
) -> None:
    x, weight, bias = leaves(kind, device, (9, 96), x_dtype, weight_dtype)
    assert call(kind, x, (96,), weight, bias).dtype == x_dtype
    check_gradients(kind, x, weight, bias, max(TOLERANCE[x_dtype], TOLERANCE[weight_dtype]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dy_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_raw_backward_takes_any_dtype_of_dy(kind: str, dy_dtype: torch.dtype, device: torch.device) -> None:
    centred = kind == "layer_norm"
    x, weight, bias = leaves(kind, device, (6, 40), torch.bfloat16, torch.float32)
    parameters = (weight.detach(), None if bias is None else bias.detach(), 40)
    _, statistics = ops.norm_forward(x.detach(), *parameters, EPS, centred, torch.bfloat16)
    dy = torch.randn(6, 40, device=device).to(dy_dtype)
    dx, dweight, *_ = ops.norm_backward(
        dy, None, x.detach(), statistics, *parameters, centred, False, torch.bfloat16, True, centred
    )
    true_dx, true_dweight = torch.autograd.grad(exact(kind, x, weight, bias), (x, weight), dy.double())
    assert error(dx, true_dx) <= TOLERANCE[torch.bfloat16]
    assert error(dweight, true_dweight) <= 1e-5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(0, 8), (4, 0, 8)])
@pytest.mark.usefixtures("poisoned")
def test_zero_rows_give_zero_weight_gradient(kind: str, shape: tuple[int, ...], device: torch.device) -> None:
    x, weight, bias = leaves(kind, device, shape, torch.float32, torch.float32)
    y = call(kind, x, (8,), weight, bias)
    y.sum().backward()
    assert y.shape == shape
    assert x.grad is not None
    assert x.grad.shape == shape
    for parameter in (weight, bias):
        if parameter is not None:
            assert torch.equal(parameter.grad, torch.zeros_like(parameter))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(768,), (2, 3, 33), (2, 3, 4, 33)])
def test_inputs_of_rank_one_to_four(kind: str, shape: tuple[int, ...], device: torch.device) -> None:
    x, weight, bias = leaves(kind, device, shape, torch.float32, torch.float32)
    check_gradients(kind, x, weight, bias, 2e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_normalized_shape_of_several_dimensions(kind: str, device: torch.device) -> None:
    x, weight, bias = leaves(kind, device, (3, 5, 4, 9), torch.float32, torch.float32, axes=2)
    y = call(kind, x, (4, 9), weight, bias)
    dy = torch.randn_like(y)
    found = torch.autograd.grad(y, (x, weight), dy)
    truth = exact(kind, x, weight, bias, axes=2)
    assert error(y, truth) <= 2e-6
    for value, true in zip(found, torch.autograd.grad(truth, (x, weight), dy.double()), strict=True):
        assert error(value, true) <= 2e-6


def views(device: torch.device) -> dict[str, Tensor]:
    """Inputs of (…, 48) whose memory is not one run."""
    return {
        "transposed": torch.randn(48, 7, device=device).t(),
        "sliced columns": torch.randn(7, 100, device=device)[:, 3:51],
        "every other row": torch.randn(14, 48, device=device)[::2],
        "permuted batch": torch.randn(5, 3, 48, device=device).transpose(0, 1),
        "every other column": torch.randn(7, 96, device=device)[:, ::2],
        "expanded rows": torch.randn(1, 48, device=device).expand(7, 48),
        "expanded columns": torch.randn(7, 1, device=device).expand(7, 48),
        "heads of a fused projection": torch.randn(2, 5, 3 * 96, device=device)[..., 96:192].unflatten(-1, (2, 48)),
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", list(views(torch.device("cpu"))))
def test_strides_of_x_do_not_matter(kind: str, name: str, device: torch.device) -> None:
    x = views(device)[name].requires_grad_()
    _, weight, bias = leaves(kind, device, (1, 48), torch.float32, torch.float32)
    if name == "expanded columns":  # rows of equal values: the truth is 0, or 1 for RMSNorm
        assert error(call(kind, x, (48,), weight, bias), exact(kind, x, weight, bias)) <= 1e-5
    else:
        check_gradients(kind, x, weight, bias, 2e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head", ["sum", "transpose", "part"])
def test_expanded_and_strided_gradients(kind: str, head: str, device: torch.device) -> None:
    x, weight, bias = leaves(kind, device, (6, 50), torch.float32, torch.float32)
    factor = torch.randn(50, 6, device=device)

    def loss(y: Tensor) -> Tensor:
        if head == "sum":
            return y.sum()
        return (y.transpose(0, 1) * factor.to(y.dtype)).sum() if head == "transpose" else (y[:, :20] ** 2).sum()

    wanted = [t for t in (x, weight, bias) if t is not None]
    found = torch.autograd.grad(loss(call(kind, x, (50,), weight, bias)), wanted)
    for value, true in zip(found, torch.autograd.grad(loss(exact(kind, x, weight, bias)), wanted), strict=True):
        # A constant dy cancels to rounding in LayerNorm's dx, so the absolute size counts as well.
        assert error(value, true) <= 2e-6 or float((value - true).detach().abs().max()) <= 2e-6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_residual_is_added_and_its_gradient_flows(kind: str, dtype: torch.dtype, device: torch.device) -> None:
    x, weight, bias = leaves(kind, device, (11, 65), dtype, torch.float32)
    residual = torch.randn(11, 65, device=device).to(dtype).requires_grad_()
    y, total = call(kind, x, (65,), weight, bias, residual=residual)
    assert torch.equal(total, x + residual)
    assert y.dtype == total.dtype == dtype
    dy, dsum = (torch.randn(11, 65, device=device).to(dtype) for _ in range(2))
    wanted = [t for t in (x, residual, weight, bias) if t is not None]
    found = torch.autograd.grad((y, total), wanted, (dy, dsum))
    rounded = total.detach().double().requires_grad_()  # what is normalised is the sum as it was stored
    truth = exact(kind, rounded, weight, bias)
    parameters = [t for t in (weight, bias) if t is not None]
    true_dx, *true_rest = torch.autograd.grad(truth, [rounded, *parameters], dy.double())
    assert error(y, truth) <= TOLERANCE[dtype]
    for value, true in zip(found, [true_dx + dsum.double()] * 2 + true_rest, strict=True):
        assert error(value, true) <= TOLERANCE[dtype]


@pytest.mark.parametrize("kind", KINDS)
def test_residual_where_only_one_output_is_used(kind: str, device: torch.device) -> None:
    x, weight, bias = leaves(kind, device, (4, 33), torch.float32, torch.float32)
    residual = torch.randn(4, 33, device=device, requires_grad=True)
    y, _ = call(kind, x, (33,), weight, bias, residual=residual)
    (found,) = torch.autograd.grad(y.square().sum(), residual)
    truth = exact(kind, x + residual, weight, bias)
    assert error(found, torch.autograd.grad(truth.square().sum(), residual)[0]) <= 2e-6
    _, total = call(kind, x, (33,), weight, bias, residual=residual)
    total.square().sum().backward()
    assert torch.allclose(x.grad, 2 * total)
    assert weight.grad is None


@pytest.mark.parametrize("kind", KINDS)
def test_residual_of_a_wider_dtype_keeps_its_digits(kind: str, device: torch.device) -> None:
    x, weight, bias = leaves(kind, device, (4, 33), torch.bfloat16, torch.float32)
    residual = torch.randn(4, 33, device=device, requires_grad=True)
    y, total = call(kind, x, (33,), weight, bias, residual=residual)
    assert total.dtype == y.dtype == torch.float32
    assert torch.equal(total, x + residual)
    (y.sum() + total.square().sum()).backward()
    assert x.grad.dtype == torch.bfloat16
    assert residual.grad.dtype == torch.float32
    assert error(x.grad, residual.grad) <= 4e-3


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_that_nobody_wants_are_not_computed(kind: str, device: torch.device) -> None:
    x, weight, bias = leaves(kind, device, (4, 33), torch.float32, torch.float32)
    call(kind, x, (33,), weight.detach(), None if bias is None else bias.detach()).square().sum().backward()
    only_x, x.grad = x.grad, None
    call(kind, x.detach(), (33,), weight, bias).square().sum().backward()
    only_weight, weight.grad = weight.grad, None
    assert x.grad is None
    call(kind, x, (33,), weight, bias).square().sum().backward()
    assert torch.equal(only_x, x.grad)
    assert torch.equal(only_weight, weight.grad)


@pytest.mark.parametrize("kind", KINDS)
def test_without_weight_and_bias(kind: str, device: torch.device) -> None:
    x, _, _ = leaves(kind, device, (5, 70), torch.float32, torch.float32)
    check_gradients(kind, x, None, None, 2e-6)


def test_bias_without_weight_and_weight_without_bias(device: torch.device) -> None:
    x, weight, bias = leaves("layer_norm", device, (5, 70), torch.float32, torch.float32)
    check_gradients("layer_norm", x, None, bias, 2e-6)
    check_gradients("layer_norm", x, weight, None, 2e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_sixteen_bit_rows_up_to_the_largest_value(kind: str, device: torch.device) -> None:
    x, weight, bias = leaves(kind, device, (3, 64), torch.float16, torch.float32)
    with torch.no_grad():
        x.copy_(torch.where(torch.rand(3, 64, device=device) > 0.5, 60000.0, -60000.0))
    check_gradients(kind, x, weight, bias, 1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_whose_squares_overflow_fp32_give_the_bias(kind: str, device: torch.device) -> None:
    x = torch.randn(3, 64, device=device) * 1e30
    _, weight, bias = leaves(kind, device, (3, 64), torch.float32, torch.float32)
    y = call(kind, x, (64,), weight, bias)
    assert torch.equal(y, torch.zeros_like(y) if bias is None else bias.expand_as(y))


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_the_weight_are_summed_in_fp32(kind: str, device: torch.device) -> None:
    x, weight, bias = leaves(kind, device, (8192, 16), torch.bfloat16, torch.bfloat16)
    dy = torch.rand(8192, 16, device=device).to(torch.bfloat16)  # of one sign, so that a 16-bit sum would stall
    wanted = [t for t in (weight, bias) if t is not None]
    found = torch.autograd.grad(call(kind, x, (16,), weight, bias), wanted, dy)
    true = torch.autograd.grad(exact(kind, x, weight, bias), wanted, dy.double())
    for value, truth in zip(found, true, strict=True):
        assert bool(((value.double() - truth.double()).abs() <= 2**-8 * truth.double().abs() + 1e-2).all())


# ---- memory_efficient


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_efficient_gives_the_same_gradients(kind: str, dtype: torch.dtype, device: torch.device) -> None:
    x, weight, bias = leaves(kind, device, (40, 65), dtype, torch.float32)
    # What rounding y to bf16 costs x̂ is a few times what rounding dx costs.
    check_gradients(kind, x, weight, bias, {torch.float32: 5e-6, torch.bfloat16: 1.5e-2}[dtype], memory_efficient=True)


@pytest.mark.parametrize("kind", KINDS)
def test_memory_efficient_with_a_residual(kind: str, device: torch.device) -> None:
    x, weight, bias = leaves(kind, device, (6, 33), torch.float32, torch.float32)
    residual = torch.randn(6, 33, device=device, requires_grad=True)
    gradients = []
    for memory_efficient in (False, True):
        y, total = call(kind, x, (33,), weight, bias, residual=residual, memory_efficient=memory_efficient)
        gradients.append(torch.autograd.grad(y.square().sum() + total.sum(), (x, residual, weight)))
    for one, other in zip(*gradients, strict=True):
        assert error(one, other) <= 5e-6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("memory_efficient", [False, True])
def test_memory_efficient_frees_the_input(kind: str, memory_efficient: bool, device: torch.device) -> None:
    base, weight, bias = leaves(kind, device, (6, 33), torch.float32, torch.float32)
    x = base * 2
    kept = weakref.ref(x.untyped_storage())
    y = call(kind, x, (33,), weight, bias, memory_efficient=memory_efficient)
    del x
    gc.collect()
    assert (kept() is None) == memory_efficient
    y.sum().backward()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fault", ["a zero", "all zero", "tiny", "small beside its bias"])
def test_memory_efficient_is_right_where_the_output_tells_nothing(
    kind: str, fault: str, device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    norm._tell_that_input_is_kept.cache_clear()
    x, weight, bias = leaves(kind, device, (12, 65), torch.bfloat16, torch.float32)
    with torch.no_grad():
        if fault == "a zero":
            weight[7] = 0
        elif fault == "all zero":
            weight.zero_()
        elif fault == "tiny" or bias is None:
            weight[3] = 1e-6
        else:
            bias[3] = 1000
    with caplog.at_level(logging.WARNING, "fusestep"):
        check_gradients(kind, x, weight, bias, TOLERANCE[torch.bfloat16], memory_efficient=True)
    assert "keeps its input" in caplog.text


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("mode", [contextlib.nullcontext(), FlopCounterMode(display=False)])
def test_the_output_can_be_changed_in_place_as_torchs_can(
    kind: str, has_residual: bool, mode: Any, device: torch.device
) -> None:
    x, weight, bias = leaves(kind, device, (3, 5, 7), torch.float32, torch.float32)
    residual = torch.randn(3, 5, 7, device=device) if has_residual else None
    with mode:
        y = call(kind, x, (7,), weight, bias, residual=residual)
        y = y[0] if has_residual else y
    truth = exact(kind, x if residual is None else x + residual, weight, bias)
    y.mul_(3)
    torch.nn.functional.relu(y, inplace=True)
    found = torch.autograd.grad(y.sum(), (x, weight))
    for value, true in zip(found, torch.autograd.grad(3 * truth.relu().sum(), (x, weight)), strict=True):
        assert error(value, true) <= 2e-6


@pytest.mark.parametrize("kind", KINDS)
def test_memory_efficient_notices_an_output_changed_in_place(kind: str, device: torch.device) -> None:
    x, weight, bias = leaves(kind, device, (6, 33), torch.float32, torch.float32)
    y = call(kind, x, (33,), weight, bias, memory_efficient=True)
    loss = (y * 1.0).sum()
    with torch.no_grad():
        y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("kind", KINDS)
def test_memory_efficient_refuses_a_second_derivative_in_one_sentence(kind: str, device: torch.device) -> None:
    x, weight, bias = leaves(kind, device, (6, 33), torch.float32, torch.float32)
    y = call(kind, x, (33,), weight, bias, memory_efficient=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated twice; build it with memory_efficient=False"):
        torch.autograd.grad(y.square().sum(), x, create_graph=True)


# ---- transformations


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("has_residual", [False, True])
def test_first_and_second_derivatives_by_finite_differences(kind: str, has_residual: bool) -> None:
    x, residual = (torch.randn(3, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weight, bias = (torch.randn(5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    inputs = [x, weight, *([bias] if kind == "layer_norm" else []), *([residual] if has_residual else [])]

    def run(*tensors: Tensor) -> Any:
        x, weight, *rest = tensors
        bias = rest.pop(0) if kind == "layer_norm" else None
        return call(kind, x, (5,), weight, bias, residual=rest[0] if has_residual else None)

    assert torch.autograd.gradcheck(run, inputs)
    assert torch.autograd.gradgradcheck(run, inputs)


@pytest.mark.parametrize("kind", KINDS)
def test_second_derivative_in_fp32(kind: str, device: torch.device) -> None:
    x, weight, bias = leaves(kind, device, (4, 33), torch.float32, torch.float32)
    found, true = (
        torch.autograd.grad(torch.autograd.grad((f * f * f).sum(), x, create_graph=True)[0].square().sum(), (x, weight))
        for f in (call(kind, x, (33,), weight, bias), exact(kind, x, weight, bias))
    )
    for value, truth in zip(found, true, strict=True):
        assert error(value, truth) <= 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_func_grad_and_vmap(kind: str, device: torch.device) -> None:
    x, weight, bias = (None if t is None else t.detach() for t in leaves(kind, device, (6, 33), *[torch.float32] * 2))

    def loss(x: Tensor, weight: Tensor) -> Tensor:
        return call(kind, x, (33,), weight, bias).square().sum()

    per_sample = torch.func.vmap(torch.func.grad(loss, argnums=1), in_dims=(0, None))(x, weight)
    for row in range(6):
        leaf = weight.clone().requires_grad_()
        true = torch.autograd.grad(exact(kind, x[row], leaf, bias).square().sum(), leaf)[0]
        assert error(per_sample[row], true) <= 2e-6


@pytest.mark.parametrize("kind", KINDS)
def test_opcheck_of_the_raw_ops(kind: str, device: torch.device) -> None:
    centred = kind == "layer_norm"
    x, weight, bias = (None if t is None else t.detach() for t in leaves(kind, device, (6, 33), *[torch.float32] * 2))
    parameters = (weight, bias, 33, EPS, centred, torch.float32)
    torch.library.opcheck(ops.norm_forward, (x, *parameters))
    torch.library.opcheck(ops.norm_forward, (x[:0], *parameters))
    torch.library.opcheck(ops.norm_forward_residual, (x, x + 1, *parameters))
    _, statistics = ops.norm_forward(x, *parameters)
    rest = (weight, bias, 33, centred, False, torch.float32)
    torch.library.opcheck(ops.norm_backward, (x + 2, None, x, statistics, *rest, True, centred))
    torch.library.opcheck(ops.norm_backward, (x + 2, x - 1, x, statistics, *rest, True, centred, torch.bfloat16))
    torch.library.opcheck(ops.norm_backward, (x + 2, x - 1, x, statistics, *rest, False, False))


# torch.compile makes an instance of every autograd.Function that it traces, and warns of that itself.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["plain", "residual", "memory_efficient"])
def test_compiles_without_graph_breaks(kind: str, form: str, device: torch.device) -> None:
    x, weight, bias = leaves(kind, device, (6, 33), torch.float32, torch.float32)
    residual = torch.randn(6, 33, device=device, requires_grad=True)
    options = {"residual": {"residual": residual}, "memory_efficient": {"memory_efficient": True}}.get(form, {})

    def run(x: Tensor) -> Tensor:
        y = call(kind, x, (33,), weight, bias, **options)
        return (y[0] * y[1]).sin() if form == "residual" else (y * 2).sin()

    torch.compiler.reset()
    backend = "inductor" if device.type == "cuda" else "aot_eager"
    compiled = torch.compile(run, fullgraph=True, backend=backend)
    found, true = (torch.autograd.grad(f(x).sum(), (x, weight)) for f in (compiled, run))
    for value, truth in zip(found, true, strict=True):
        assert error(value, truth) <= 1e-5


# ---- autocast


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("enabled", [False, True])
def test_cpu_autocast_leaves_layer_norm_alone_as_torch_does(dtype: torch.dtype, enabled: bool) -> None:
    x, weight, bias = leaves("layer_norm", torch.device("cpu"), (4, 32), dtype, dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
        found = fused.layer_norm(x, (32,), weight, bias)
        theirs = torch.nn.functional.layer_norm(x, (32,), weight, bias)
    assert found.dtype == theirs.dtype == dtype


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_cuda_autocast_gives_the_dtypes_that_torch_gives(
    dtype: torch.dtype, enabled: bool, weight_dtype: torch.dtype
) -> None:
    x, weight, bias = leaves("layer_norm", torch.device("cuda", 0), (4, 32), dtype, weight_dtype)
    with torch.autocast("cuda", torch.bfloat16, enabled=enabled):
        y = fused.layer_norm(x, (32,), weight, bias)
    assert y.dtype == (torch.float32 if enabled and dtype != torch.float64 else dtype)
    if enabled and dtype != torch.float64:  # torch refuses most other mixtures
        with torch.autocast("cuda", torch.bfloat16):
            theirs = torch.nn.functional.layer_norm(x, (32,), weight, bias)
        assert y.dtype == theirs.dtype
    y.sum().backward()
    assert x.grad.dtype == dtype
    assert weight.grad.dtype == weight_dtype


# ---- user mistakes, fallbacks, the catalogue


@pytest.mark.parametrize("kind", KINDS)
def test_mistakes_are_one_sentence_with_the_mend(kind: str) -> None:
    weight = torch.ones(768)
    with pytest.raises(UserError, match=r"x has last dimension 766 but normalized_shape is \(768,\); pass x of shape"):
        call(kind, torch.randn(4, 766), (768,), weight, None)
    with pytest.raises(UserError, match=r"x has shape \(4, 9, 8\) but normalized_shape is \(4, 8\)"):
        call(kind, torch.randn(4, 9, 8), (4, 8), None, None)
    with pytest.raises(UserError, match="at least one dimension"):
        call(kind, torch.randn(4, 8), (), None, None)
    with pytest.raises(UserError, match=r"weight has shape \(768,\); pass one of shape \(8,\)"):
        call(kind, torch.randn(4, 8), (8,), weight, None)
    with pytest.raises(UserError, match=r"residual has shape \(8,\); pass one of shape \(4, 8\)"):
        call(kind, torch.randn(4, 8), (8,), None, None, residual=torch.randn(8))
    with pytest.raises(UserError, match=r"x has dtype torch\.int64; pass float32"):
        call(kind, torch.ones(4, 8, dtype=torch.int64), (8,), None, None)
    with pytest.raises(UserError, match=r"weight has dtype torch\.int32"):
        call(kind, torch.ones(4, 8), (8,), torch.ones(8, dtype=torch.int32), None)
    with pytest.raises(UserError, match="weight is on meta and x on cpu; move them to one device"):
        call(kind, torch.ones(4, 8), (8,), torch.ones(8, device="meta"), None)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_float64_on_a_gpu_is_the_announced_reference(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    x, weight, bias = leaves(kind, torch.device("cuda", 0), (4, 33), torch.float64, torch.float64)
    with caplog.at_level(logging.WARNING, "fusestep"):
        check_gradients(kind, x, weight, bias, 1e-12)
    assert "the kernels compute in fp32, not fp64" in caplog.text


@pytest.mark.parametrize("kind", KINDS)
def test_strict_mode_refuses_the_reference(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSESTEP_STRICT", "1")
    with pytest.raises(dispatch.StrictFallbackError, match=kind):
        call(kind, torch.randn(4, 8), (8,), None, None)


@pytest.mark.parametrize("kind", KINDS)
def test_the_catalogue_proves_the_op(kind: str, device: torch.device) -> None:
    proofs = CATALOGUE[kind].prove(device)
    assert {p.what.split(",")[0] for p in proofs} == {"forward", "residual", "backward"}
    assert all(p.ok for p in proofs), [p for p in proofs if not p.ok]


# ---- on the GPU, at real shapes


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_rows_beyond_two_to_the_31_elements(kind: str) -> None:
    rows, width = 2**23 + 16, 256
    x = torch.zeros(rows, width, device="cuda", dtype=torch.bfloat16)
    x[-16:] = torch.randn(16, width, device="cuda").to(torch.bfloat16)
    x.requires_grad_()
    weight = torch.rand(width, device="cuda").add_(0.5).requires_grad_()
    y = call(kind, x, (width,), weight, None)
    tail = x.detach()[-16:].clone().requires_grad_()
    truth = exact(kind, tail, weight, None)
    assert error(y[-16:], truth) <= TOLERANCE[torch.bfloat16]
    assert not bool(y[:-16].any())
    dy = torch.zeros_like(y)
    dy[-16:] = torch.randn(16, width, device="cuda").to(torch.bfloat16)
    dx, dweight = torch.autograd.grad(y, (x, weight), dy)
    true_dx, true_dweight = torch.autograd.grad(truth, (tail, weight), dy[-16:].double())
    assert error(dx[-16:], true_dx) <= TOLERANCE[torch.bfloat16]
    assert error(dweight, true_dweight) <= 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [256, 16384, 40000])
def test_few_rows_far_apart(kind: str, width: int) -> None:
    base = torch.zeros(3 * 2**30 + width, device="cuda", dtype=torch.bfloat16)
    x = base.as_strided((4, width), (2**30, 1))
    with torch.no_grad():
        x.copy_(torch.randn(4, width, device="cuda"))
    x = x.detach().requires_grad_()
    _, weight, bias = leaves(kind, torch.device("cuda", 0), (1, width), torch.float32, torch.float32)
    check_gradients(kind, x, weight, bias, TOLERANCE[torch.bfloat16])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [2048, 40000])
def test_a_hundred_runs_give_the_same_bits(kind: str, width: int) -> None:
    rows = 8192 if width == 2048 else 512
    x, weight, bias = leaves(kind, torch.device("cuda", 0), (rows, width), torch.bfloat16, torch.float32)
    dy = torch.randn(rows, width, device="cuda").to(torch.bfloat16)
    wanted = [t for t in (x, weight, bias) if t is not None]
    noise, other = torch.randn(2048, 2048, device="cuda"), torch.cuda.Stream()
    first: list[Tensor] = []
    torch.use_deterministic_algorithms(True)
    try:
        for run in range(100):
            if run % 3 == 1:  # a changing load beside it changes the order in which programs run
                with torch.cuda.stream(other):
                    for _ in range(run % 7):
                        noise = (noise * 1.0001).sin()
            y = call(kind, x, (width,), weight, bias)
            found = [y, *torch.autograd.grad(y, wanted, dy)]
            first = first or found
            assert all(torch.equal(a, b) for a, b in zip(first, found, strict=True))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("memory_efficient", [False, True])
def test_captured_in_a_graph(kind: str, memory_efficient: bool) -> None:
    x, weight, bias = leaves(kind, torch.device("cuda", 0), (64, 768), torch.bfloat16, torch.float32)
    dy = torch.randn(64, 768, device="cuda").to(torch.bfloat16)

    def step() -> list[Tensor]:
        y = call(kind, x, (768,), weight, bias, memory_efficient=memory_efficient)
        return [y.detach(), *torch.autograd.grad(y, (x, weight), dy)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        x.copy_(torch.randn(64, 768, device="cuda"))
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, step(), strict=True)) or memory_efficient
    assert error(captured[0], exact(kind, x, weight, bias)) <= TOLERANCE[torch.bfloat16]
