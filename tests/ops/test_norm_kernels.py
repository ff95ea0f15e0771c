"""The norm kernels through Triton's interpreter on tiny shapes, and how their launches are chosen."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fusestep.nn.functional import layer_norm, rms_norm
from fusestep.ops import norm, norm_backward, norm_forward, norm_ops
from fusestep.ops.layouts import row_stride

EPS = 1e-5
#: The interpreter truncates where hardware rounds to bf16: one unit in the last place instead of half.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 6e-3}


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch that another test chose for the same layouts would serve this one too."""
    for where, known in ((norm, "_calls"), (norm_ops, "_forwards"), (norm_ops, "_backwards")):
        monkeypatch.setattr(where, known, {})


@pytest.fixture
def tiny_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wide kernels from 9 columns on, and fewer programs than tiles, so that every loop goes round."""

    def forward(width: int, multiprocessors: int, centred: bool, itemsize: int) -> norm_forward.ForwardLaunch:
        if width > 8:
            return norm_forward.ForwardLaunch(8, 1, None, 1, wide=True)
        sort = (width < 8) + centred  # one sort for each of the rest
        columns: Any = ("late", "early", "kept")[sort]
        return norm_forward.ForwardLaunch(8, 2, 2 if columns == "kept" else None, 1, 2, columns)

    def backward(*_: object) -> norm_backward.BackwardLaunch:
        return norm_backward.BackwardLaunch(8, 2, 2, 1, 2)

    monkeypatch.setattr(norm_forward, "forward_launch", forward)
    monkeypatch.setattr(norm_backward, "backward_launch", backward)
    monkeypatch.setattr(norm_backward, "MEANS_BLOCK", 8)
    monkeypatch.setattr(norm_backward, "SUM_ROWS", 1)
    monkeypatch.setattr(norm_backward, "LONE_TILES", 0)


@pytest.fixture
def chunks(monkeypatch: pytest.MonkeyPatch, tiny_launches: None) -> None:
    """Every backward in chunks of eight columns, by fewer programs than rows."""
    choice = norm_backward.BackwardLaunch(8, 1, 2, 1, 1, chunks=True)
    monkeypatch.setattr(norm_backward, "backward_launch", lambda *_: choice)


def exact(kind: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    x = x.double()
    if kind == "layer_norm":
        x = x - x.mean(-1, keepdim=True)
    y = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
    return y if bias is None else y + bias.double()


def check(kind: str, x: Tensor, residual: Tensor | None, memory_efficient: bool = False) -> None:
    """y and the gradients of x, residual, weight and bias against float64."""
    width, dtype = x.shape[-1], x.dtype
    x = x.detach().requires_grad_()
    weight = (torch.rand(width) + 0.5).requires_grad_()
    bias = torch.rand(width).requires_grad_() if kind == "layer_norm" else None
    options = {"residual": residual, "memory_efficient": memory_efficient}
    if kind == "layer_norm":
        answer = layer_norm(x, (width,), weight, bias, EPS, **options)
    else:
        answer = rms_norm(x, (width,), weight, EPS, **options)
    y, total = answer if residual is not None else (answer, x)
    rounded = total.detach().double().requires_grad_()
    truth = exact(kind, rounded, weight, bias)
    dy = torch.randn(y.shape).to(dtype)
    parameters = [t for t in (weight, bias) if t is not None]
    true = [*torch.autograd.grad(truth, [rounded, *parameters], dy.double())]
    outputs, gradients = [y], [dy]
    if residual is not None:
        dsum = torch.randn(y.shape).to(dtype)
        outputs, gradients = [y, total], [dy, dsum]
        true[0] = true[0] + dsum.double()
        added = x.detach().double() + residual.double()
        assert float((total.detach().double() - added).norm() / added.norm()) <= 6e-3
    found = torch.autograd.grad(outputs, [x, *parameters], gradients)
    tolerance = TOLERANCE[dtype] * (4 if memory_efficient else 1)
    for value, exactly in zip([y, *found], [truth, *true], strict=True):
        difference = (value.detach().double() - exactly.detach()).norm()
        assert float(difference / exactly.detach().norm()) <= tolerance


@pytest.mark.interpreter
@pytest.mark.usefixtures("tiny_launches")
@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("width", [5, 8, 21])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kernels_agree_with_float64(kind: str, width: int, dtype: torch.dtype) -> None:
    check(kind, (torch.randn(9, width) * 2 + 5).to(dtype), None)


@pytest.mark.interpreter
@pytest.mark.usefixtures("tiny_launches")
@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("width", [5, 21])
@pytest.mark.parametrize("memory_efficient", [False, True])
def test_kernels_with_residual_and_from_the_output(kind: str, width: int, memory_efficient: bool) -> None:
    check(kind, torch.randn(5, width), torch.randn(5, width), memory_efficient)


@pytest.mark.interpreter
@pytest.mark.usefixtures("tiny_launches")
@pytest.mark.parametrize("width", [5, 21])
@pytest.mark.parametrize(("narrow", "wanted"), [("x", (True, True)), ("residual", (True, True)), ("x", (False, True))])
def test_kernels_write_the_gradient_in_the_dtypes_of_both_parts(
    width: int, narrow: str, wanted: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    dtypes = (torch.bfloat16, torch.float32) if narrow == "x" else (torch.float32, torch.bfloat16)
    parts = [torch.randn(9, width).to(dtype).requires_grad_(needs) for dtype, needs in zip(dtypes, wanted, strict=True)]
    weight = torch.rand(width) + 0.5
    y, total = layer_norm(parts[0], (width,), weight, eps=EPS, residual=parts[1])
    assert total.dtype == torch.float32
    dy, dsum = torch.randn(2, 9, width)
    rounded = total.detach().double().requires_grad_()
    (true,) = torch.autograd.grad(exact("layer_norm", rounded, weight, None), rounded, dy.double())
    leaves = [part for part in parts if part.requires_grad]
    monkeypatch.setattr(Tensor, "to", lambda *_: pytest.fail("cast after the kernel"))
    found = torch.autograd.grad((y, total), leaves, (dy, dsum))
    monkeypatch.undo()
    for leaf, gradient in zip(leaves, found, strict=True):
        assert gradient.dtype == leaf.dtype
        difference = (gradient.double() - true - dsum.double()).norm() / (true + dsum.double()).norm()
        assert float(difference) <= TOLERANCE[leaf.dtype]


@pytest.mark.interpreter
@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("width", [5, 16, 21])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_walked_in_chunks(kind: str, width: int, dtype: torch.dtype) -> None:
    check(kind, (torch.randn(7, width) * 2 + 5).to(dtype), None)
    check(kind, torch.randn(7, 3 * width)[:, width : 2 * width].to(dtype), torch.randn(7, width).to(dtype))


@pytest.mark.interpreter
@pytest.mark.usefixtures("tiny_launches")
@pytest.mark.parametrize("width", [5, 21])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_walked_in_chunks_that_are_loaded_ahead(
    width: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    choice = norm_backward.BackwardLaunch(8, 1, 2, 1, 1, chunks=True, ahead=True)
    monkeypatch.setattr(norm_backward, "backward_launch", lambda *_: choice)
    for kind in ("rms_norm", "layer_norm"):
        check(kind, torch.randn(7, 3 * width)[:, width : 2 * width].to(dtype), None, memory_efficient=width == 5)


@pytest.mark.interpreter
@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm"])
def test_rows_walked_in_chunks_from_the_output_in_two_dtypes_and_repeatedly(kind: str) -> None:
    check(kind, torch.randn(5, 21), torch.randn(5, 21), memory_efficient=True)
    x, residual = torch.randn(2, 9, 21)
    parts = [x.bfloat16().requires_grad_(), residual.requires_grad_()]
    weight, dy, dsum = torch.rand(21, requires_grad=True), *torch.randn(2, 9, 21)
    norm = layer_norm if kind == "layer_norm" else rms_norm
    outputs = norm(parts[0], (21,), weight, eps=EPS, residual=parts[1])
    found, again = (torch.autograd.grad(outputs, [*parts, weight], (dy, dsum), retain_graph=True) for _ in range(2))
    total = outputs[1].detach().double().requires_grad_()
    wide = weight.detach().double().requires_grad_()
    true, dweight = torch.autograd.grad(exact(kind, total, wide, None), [total, wide], dy.double())
    for value, repeated, exactly in zip(found, again, [true + dsum, true + dsum, dweight], strict=True):
        assert torch.equal(value, repeated)
        assert float((value.double() - exactly).norm() / exactly.norm()) <= TOLERANCE[value.dtype]


@pytest.mark.interpreter
@pytest.mark.usefixtures("tiny_launches")
@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("width", [5, 21])
def test_kernels_follow_row_strides(kind: str, width: int) -> None:
    check(kind, torch.randn(5, 3 * width)[:, width : 2 * width], torch.randn(10, width)[::2])


@pytest.mark.interpreter
@pytest.mark.usefixtures("tiny_launches")
@pytest.mark.parametrize("wanted", ["x", "weight", "bias", "x and bias"])
@pytest.mark.parametrize("width", [6, 21])
def test_kernels_where_some_gradients_are_not_wanted_and_parameters_are_strided(wanted: str, width: int) -> None:
    x = torch.randn(5, width, requires_grad="x" in wanted)
    # Kept as a column of pairs: neither weight nor bias is one run of memory.
    weight, bias = (torch.rand(width, 2)[:, 0].requires_grad_(name in wanted) for name in ("weight", "bias"))
    assert not weight.is_contiguous()
    leaves = [leaf for leaf in (x, weight, bias) if leaf.requires_grad]
    dy = torch.randn(5, width)
    found = torch.autograd.grad(layer_norm(x, (width,), weight, bias, EPS), leaves, dy)
    true = torch.autograd.grad(exact("layer_norm", x, weight, bias), leaves, dy.double())
    for value, exactly in zip(found, true, strict=True):
        assert float((value.double() - exactly).norm() / exactly.norm()) <= 1e-5


@pytest.mark.interpreter
@pytest.mark.usefixtures("tiny_launches")
def test_kernels_with_a_transposed_weight_of_two_dimensions() -> None:
    x = torch.randn(4, 2, 3, requires_grad=True)
    weight = torch.rand(3, 2).t().requires_grad_()
    dy = torch.randn(4, 2, 3)
    found = torch.autograd.grad(rms_norm(x, (2, 3), weight, EPS), (x, weight), dy)
    truth = exact("rms_norm", x.reshape(4, 6), weight.reshape(6), None).reshape(4, 2, 3)
    for value, exactly in zip(found, torch.autograd.grad(truth, (x, weight), dy.double()), strict=True):
        assert float((value.double() - exactly).norm() / exactly.norm()) <= 1e-5


@pytest.mark.interpreter
@pytest.mark.usefixtures("tiny_launches")
@pytest.mark.parametrize("width", [5, 21])
def test_kernels_keep_large_means(width: int) -> None:
    x = 1e6 + torch.randn(4, width) * 2
    y = layer_norm(x, (width,), eps=EPS)
    truth = exact("layer_norm", x, torch.ones(width), None)
    assert float((y.double() - truth).norm() / truth.norm()) <= 1e-5
    constant = layer_norm(torch.full((3, width), 1e6), (width,))
    assert not bool(constant.any())


def check_where_all_counts(kind: str, x: Tensor, eps: float, tolerance: float) -> None:
    """y and the gradients of x, weight and bias against float64, of rows where eps or the mean's last digits count."""
    width = x.shape[-1]
    x.requires_grad_()
    weight, bias = ((torch.rand(width) + 0.5).requires_grad_() for _ in range(2))
    if kind == "layer_norm":
        leaves = [x, weight, bias]
        y = layer_norm(x, (width,), weight, bias, eps)
    else:
        leaves = [x, weight]
        y = rms_norm(x, (width,), weight, eps)
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    centred = wide[0] - wide[0].mean(-1, keepdim=True) if kind == "layer_norm" else wide[0]
    truth = centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() * wide[1]
    truth = truth + wide[2] if kind == "layer_norm" else truth
    dy = torch.randn(y.shape)
    found, true = torch.autograd.grad(y, leaves, dy), torch.autograd.grad(truth, wide, dy.double())
    for value, exactly in zip([y, *found], [truth, *true], strict=True):
        difference = (value.detach().double() - exactly.detach()).norm()
        assert float(difference / exactly.detach().norm()) <= tolerance


@pytest.mark.interpreter
@pytest.mark.usefixtures("tiny_launches")
@pytest.mark.parametrize("width", [5, 8, 21])
@pytest.mark.parametrize("in_chunks", [False, True])
def test_kernels_keep_what_the_means_rounding_lost_for_the_gradients(
    width: int, in_chunks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if in_chunks:
        choice = norm_backward.BackwardLaunch(8, 1, 2, 1, 1, chunks=True)
        monkeypatch.setattr(norm_backward, "backward_launch", lambda *_: choice)
    # Neighbouring fp32 values are 0.06 apart there, so that a mean alone is off by a tenth of the spread.
    check_where_all_counts("layer_norm", 1e6 + torch.randn(9, width) * 0.2, EPS, 2e-5)


@pytest.mark.interpreter
@pytest.mark.usefixtures("tiny_launches")
@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("width", [5, 8, 21])
def test_kernels_add_eps_to_the_variance(kind: str, width: int) -> None:
    check_where_all_counts(kind, torch.randn(5, width) * 1e-2, 3e-4, 1e-5)


@pytest.mark.interpreter
@pytest.mark.usefixtures("tiny_launches")
@pytest.mark.parametrize("width", [9, 16, 23, 31, 64])
@pytest.mark.parametrize("rows", ["far from zero", "beginning far away", "growing"])
def test_statistics_of_wide_rows_lose_no_digits_in_one_pass(width: int, rows: str) -> None:
    x = torch.randn(5, width) * 2
    if rows == "far from zero":
        x -= 3e6
    elif rows == "beginning far away":
        x[:, 0] = 1e4
    else:
        x *= torch.linspace(-8, 8, width).exp()
    for kind in ("layer_norm", "rms_norm"):
        found = layer_norm(x, (width,), eps=EPS) if kind == "layer_norm" else rms_norm(x, (width,), eps=EPS)
        truth = exact(kind, x, torch.ones(width), None)
        assert float((found.double() - truth).norm() / truth.norm()) <= 2e-6


@pytest.mark.interpreter
@pytest.mark.usefixtures("tiny_launches")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [9, 24, 29])
def test_constant_wide_rows_are_centred_to_exact_zeros(width: int, dtype: torch.dtype) -> None:
    x = torch.tensor([[0.1], [-150.0], [7e-6]]).to(dtype).expand(3, width).contiguous()
    assert not bool(layer_norm(x, (width,)).any())


@pytest.mark.interpreter
@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("width", [4, 37])
def test_kernels_at_their_own_launches(kind: str, width: int) -> None:
    check(kind, torch.randn(3, width) + 2, None)


@pytest.mark.interpreter
@pytest.mark.usefixtures("tiny_launches")
@pytest.mark.parametrize("wanted", ["", "weight", "bias", "weight and bias"])
@pytest.mark.parametrize("width", [6, 21])
@pytest.mark.parametrize("in_chunks", [False, True])
def test_few_rows_take_one_program_that_writes_the_gradients_itself(
    wanted: str, width: int, in_chunks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if in_chunks:
        choice = norm_backward.BackwardLaunch(8, 1, 2, 1, 1, chunks=True)
        monkeypatch.setattr(norm_backward, "backward_launch", lambda *_: choice)
    monkeypatch.setattr(norm_backward, "LONE_TILES", 5)
    monkeypatch.delattr(norm_backward, "_sum_partials_kernel")
    x = torch.randn(5, width, requires_grad=True)
    weight, bias = (torch.rand(width).requires_grad_(name in wanted) for name in ("weight", "bias"))
    leaves = [leaf for leaf in (x, weight, bias) if leaf.requires_grad]
    dy = torch.randn(5, width)
    found = torch.autograd.grad(layer_norm(x, (width,), weight, bias, EPS), leaves, dy)
    true = torch.autograd.grad(exact("layer_norm", x, weight, bias), leaves, dy.double())
    for value, exactly in zip(found, true, strict=True):
        assert float((value.double() - exactly).norm() / exactly.norm()) <= 1e-5


@pytest.mark.interpreter
@pytest.mark.parametrize("which", [0, 1])
def test_a_tensor_that_outlived_its_transform_is_unwrapped(which: int) -> None:
    given = [torch.randn(3, 8), torch.rand(8)]
    kept: list[Tensor] = []
    torch.func.grad(lambda tensor: (kept.append(tensor), tensor.sum())[1])(given[which])
    x, weight = (kept[0], given[1]) if which == 0 else (given[0], kept[0])
    y = rms_norm(x, (8,), weight, EPS)
    assert torch.allclose(y.double(), exact("rms_norm", *given, None), rtol=1e-5)


@pytest.mark.interpreter
def test_kernels_at_one_column() -> None:
    x = torch.tensor([[3.0], [-1e6]], requires_grad=True)
    y = layer_norm(x, (1,), None, torch.full((1,), 0.3))
    y.sum().backward()
    assert torch.equal(y, torch.full_like(y, 0.3))
    assert not bool(x.grad.any())
    assert torch.allclose(rms_norm(x, (1,)), x.sign())


@pytest.mark.interpreter
@pytest.mark.usefixtures("tiny_launches")
@pytest.mark.parametrize("width", [4, 20])
def test_offsets_have_sixty_four_bits(width: int) -> None:
    # Three rows 2^30 elements apart, in memory that is reserved but never touched between them.
    base = torch.empty(2**31 + 64, dtype=torch.float16)
    x = base.as_strided((3, width), (2**30, 1))
    x.copy_(torch.randn(3, width))
    check("layer_norm", x, None)


@given(
    width=st.integers(1, 70000),
    streams=st.sampled_from([4, 6, 8, 12]),
    centred=st.booleans(),
    copied=st.sampled_from([0, 2]),
)
@settings(deadline=None, max_examples=300)
def test_backward_launch_fits_every_gpu_since_ampere(width: int, streams: int, centred: bool, copied: int) -> None:
    choice = norm_backward.backward_launch(width, streams, 4, 132, centred, copied)
    tile = choice.rows * choice.block * (streams + copied)
    assert (choice.stages - 1) * tile <= norm_backward.SHARED_MEMORY
    assert choice.programs >= 1
    assert choice.warps in (1, 2, 4, 8, 16)
    assert choice.rows & (choice.rows - 1) == choice.block & (choice.block - 1) == 0


@given(
    width=st.integers(1, 200000),
    multiprocessors=st.sampled_from([4, 46, 108, 132, 170]),
    centred=st.booleans(),
    itemsize=st.sampled_from([2, 4, 6, 8]),
)
@settings(deadline=None, max_examples=300)
def test_forward_launch_is_lawful(width: int, multiprocessors: int, centred: bool, itemsize: int) -> None:
    choice = norm_forward.forward_launch(width, multiprocessors, centred, itemsize)
    assert choice.wide or choice.block >= width
    assert not choice.wide or (choice.rows, choice.programs) == (1, None)
    assert (choice.columns == "kept") == (choice.programs is not None)
    assert choice.rows * choice.block <= 32768
    assert 1 <= choice.warps <= 32


@pytest.mark.parametrize(
    ("width", "rows", "programs", "warps", "stages"),
    [(768, 4, 264, 4, 4), (2048, 2, 264, 8, 3), (4096, 2, 132, 8, 3), (8192, 1, 132, 8, 3)],
)
def test_backward_launch_is_the_measured_one(width: int, rows: int, programs: int, warps: int, stages: int) -> None:
    choice = norm_backward.backward_launch(width, 4, 2, 132, centred=True)
    assert (choice.rows, choice.programs, choice.warps, choice.stages) == (rows, programs, warps, stages)


def test_wide_rows_are_walked_in_chunks_where_they_fit() -> None:
    launch = norm_backward.backward_launch
    assert [launch(width, 4, 2, 132, centred=True).chunks for width in (8192, 8193, 16384, 16385)] == [0, 1, 1, 0]
    assert [launch(12288, size, 4, 132, centred=True).chunks for size in (4, 6, 8, 12)] == [1, 1, 0, 0]
    assert launch(12288, 8, 2, 132, centred=True).chunks
    assert [launch(16384, size, 2, 132, centred=False).ahead for size in (4, 6, 8)] == [1, 0, 0]


@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    order=st.randoms(use_true_random=False),
    steps=st.lists(st.sampled_from([1, 2]), min_size=4, max_size=4),
    axes=st.integers(1, 2),
)
@settings(deadline=None, max_examples=300)
def test_row_stride_describes_the_memory(sizes: list[int], order: object, steps: list[int], axes: int) -> None:
    dimensions = list(range(len(sizes)))
    order.shuffle(dimensions)  # type: ignore[attr-defined]
    x = torch.arange(math.prod(2 * size for size in sizes)).view([2 * size for size in sizes])
    for dimension, size in enumerate(sizes):
        x = x.narrow(dimension, 0, size * steps[dimension])
    x = x[tuple(slice(None, None, step) for step in steps[: len(sizes)])].permute(dimensions)
    width = math.prod(x.shape[-axes:])
    stride = row_stride(x, width)
    if stride is not None:
        assert torch.equal(x.as_strided((x.numel() // width, width), (stride, 1)), x.reshape(-1, width))


def test_row_stride_sees_rows_of_a_slice_and_refuses_columns_of_one() -> None:
    base = torch.randn(2, 5, 100)
    assert row_stride(base[..., :30], 30) == 100
    assert row_stride(base[:, 0, :30], 30) == 500
    assert row_stride(base[..., ::2], 50) is None
    assert row_stride(base.transpose(0, 1), 100) is None
    assert row_stride(base[:1].expand(3, 5, 100)[:, :1], 100) == 0
