"""Column sums, alone and with an activation's gradient, against float64; and the tickets by which they are finished."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fusestep.errors import UserError
from fusestep.ops import activation_sums, tickets
from fusestep.ops.activation import activation
from fusestep.ops.column_sums import (
    LAUNCH,
    column_sums,
    column_sums_op,
    prepare_column_sums,
    run_column_sums,
    split_rows,
)

TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}


def exact(h: Tensor, name: str) -> Tensor:
    """The activation of h as PyTorch's own functions make it in float64, differentiable."""
    if name == "gelu":
        return F.gelu(h, approximate="tanh")
    a, b = h.chunk(2, dim=-1)
    if name == "swiglu":
        return F.silu(a) * b
    a, b = a.clamp(max=7.0), b.clamp(-7.0, 7.0)  # clamped_swiglu
    return a * torch.sigmoid(1.702 * a) * (b + 1)


def check(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    sums = column_sums(x, dtype)
    wanted = x.double().sum(0)
    assert sums.dtype == (x.dtype if dtype is None else dtype)
    assert sums.shape == wanted.shape
    assert float((sums.double() - wanted).norm()) <= TOLERANCE[sums.dtype] * float(wanted.norm())
    return sums


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_agrees_with_float64(dtype: torch.dtype, device: torch.device) -> None:
    x = (torch.randn(301, 45, device=device) + 0.5).to(dtype)
    check(x)
    check(x[1:, 3:], torch.float32)
    check(x.t())


def test_of_one_row_is_no_view_of_it(device: torch.device) -> None:
    x = torch.randn(1, 5, device=device)
    sums = column_sums(x)
    sums += 1.0
    assert not torch.equal(sums, x[0])


def test_of_no_rows_is_zero(device: torch.device) -> None:
    assert torch.equal(column_sums(torch.empty(0, 3, device=device)), torch.zeros(3, device=device))


def test_refuses_what_is_no_matrix_of_numbers() -> None:
    with pytest.raises(UserError, match=r"column_sums: x has shape \(3,\); pass a matrix"):
        column_sums(torch.zeros(3))
    with pytest.raises(UserError, match=r"column_sums: x has dtype torch.int32"):
        column_sums(torch.zeros(3, 3, dtype=torch.int32))


@pytest.mark.interpreter
@pytest.mark.parametrize("rows", [7, LAUNCH.rows * 3 + 5])
def test_kernel_agrees_with_float64(rows: int) -> None:
    x = torch.randn(rows, 83) + 0.5
    assert torch.equal(check(x[:, 2:]), check(x[:, 2:].t().contiguous().t()))


@given(rows=st.integers(1, 10**7), tile=st.sampled_from([16, 32, 64]), most=st.integers(1, 128))
def test_parts_cover_all_rows_and_none_is_empty(rows: int, tile: int, most: int) -> None:
    tiles, parts = split_rows(rows, tile, most)
    assert 1 <= parts <= most
    assert (parts - 1) * tiles * tile < rows <= parts * tiles * tile


@pytest.mark.interpreter
def test_counters_are_zero_again_and_belong_to_one_thread() -> None:
    x = torch.randn(300, 130)
    run_column_sums(x, torch.float32)
    mine = tickets.counters(x.device, 3)
    assert not mine.any()
    others: list[Tensor] = []
    thread = threading.Thread(target=lambda: others.append(tickets.counters(x.device, 3)))
    thread.start()
    thread.join()
    assert mine.data_ptr() == tickets.counters(x.device, 3).data_ptr() != others[0].data_ptr()


@pytest.mark.interpreter
def test_a_launch_of_more_columns_than_a_stream_counts_has_counters_of_its_own() -> None:
    mine = tickets.counters(torch.device("cpu"), 1)
    many = tickets.counters(torch.device("cpu"), tickets.OF_A_STREAM + 1)
    assert many.numel() == tickets.OF_A_STREAM + 1
    assert many.data_ptr() != mine.data_ptr()
    assert not many.any()


def test_captured_launches_never_share_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    reserve = tickets._Reserve(torch.zeros(tickets.SET_ASIDE, dtype=torch.int32))
    monkeypatch.setitem(tickets._reserves, 99, reserve)
    first, second = (tickets._for_capture(cpu, 99, 5) for _ in range(2))
    assert first.numel() >= 5
    assert second.data_ptr() - first.data_ptr() >= 5 * 4
    reserve.next = tickets.SET_ASIDE - 4
    last = tickets._for_capture(cpu, 99, 5)
    assert last.numel() == 5
    assert last.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
    assert tickets._for_capture(cpu, 99, 4).untyped_storage().data_ptr() == first.untyped_storage().data_ptr()


def check_with_bias(shape: tuple[int, ...], name: str, dtype: torch.dtype, device: torch.device) -> None:
    bias = torch.randn(shape[-1], device=device).to(dtype).requires_grad_()
    given = torch.randn(shape, device=device).to(dtype)
    h = (given + bias.detach()).requires_grad_()
    y = activation(h, name, bias)
    dy = (torch.randn(y.shape, device=device) + 0.5).to(dtype)
    found = torch.autograd.grad(y, (h, bias), dy)
    wide = h.detach().double().requires_grad_()
    (wanted,) = torch.autograd.grad(exact(wide, name), wide, dy.double())
    for gradient, true in zip(found, (wanted, wanted.reshape(-1, shape[-1]).sum(0)), strict=True):
        assert gradient.dtype == dtype
        assert gradient.shape == true.shape
        assert float((gradient.double() - true).norm()) <= 2 * TOLERANCE[dtype] * float(true.norm())


@pytest.mark.parametrize("name", ["gelu", "swiglu", "clamped_swiglu"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_activation_gives_the_gradient_of_a_bias(name: str, dtype: torch.dtype, device: torch.device) -> None:
    check_with_bias((3, 41, 34), name, dtype, device)


@pytest.mark.interpreter
@pytest.mark.parametrize("name", ["gelu", "swiglu"])
@pytest.mark.parametrize("rows", [9, activation_sums.LAUNCH.rows * 3 + 5])
def test_kernel_gives_the_gradient_of_a_bias(name: str, rows: int) -> None:
    check_with_bias((rows, 134), name, torch.float32, torch.device("cpu"))


def test_activation_with_a_bias_can_be_differentiated_twice() -> None:
    h, bias = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((5, 4), (4,)))

    def function(h: Tensor, bias: Tensor) -> Tensor:
        return activation(h + bias.detach(), "gelu", bias)

    def plainly(h: Tensor, bias: Tensor) -> Tensor:
        return exact(h + bias, "gelu")

    gradients = []
    for one in (function, plainly):
        (dh, dbias) = torch.autograd.grad(one(h, bias).square().sum(), (h, bias), create_graph=True)
        gradients.append((dh.detach(), dbias.detach(), *torch.autograd.grad(dh.sum() + (dbias**2).sum(), h)))
    for found, true in zip(*gradients, strict=True):
        assert torch.allclose(found, true, rtol=1e-10)


def test_activation_refuses_a_bias_of_another_width() -> None:
    with pytest.raises(UserError, match=r"activation: bias has shape \(3,\); pass one of shape \(4,\)"):
        activation(torch.zeros(2, 4), "gelu", torch.zeros(3))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(8192, 768), (8192, 3072), (4099, 1001)])
def test_bits_repeat_on_several_streams_at_once(shape: tuple[int, int]) -> None:
    """Launches under way together never count on one another's counters."""
    xs = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    alone = [column_sums(x, torch.float32) for x in xs]
    streams = [torch.cuda.Stream() for _ in xs]
    torch.cuda.synchronize()
    found: list[list[Tensor]] = [[], []]
    for _ in range(100):
        for x, stream, mine in zip(xs, streams, found, strict=True):
            with torch.cuda.stream(stream):
                mine.append(column_sums(x, torch.float32))
    torch.cuda.synchronize()
    for first, mine in zip(alone, found, strict=True):
        assert all(torch.equal(first, one) for one in mine)


@pytest.mark.gpu
def test_bits_repeat_in_a_graph_beside_other_work() -> None:
    x, other = (torch.randn(8192, 768, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    wanted, wanted_too = column_sums(x), column_sums(other)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sums = [column_sums(x) for _ in range(3)]
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    beside = []
    for _ in range(100):
        with torch.cuda.stream(side):
            graph.replay()
        beside.append(column_sums(other))
    torch.cuda.synchronize()
    assert all(torch.equal(one, wanted) for one in sums)
    assert all(torch.equal(one, wanted_too) for one in beside)


@pytest.mark.interpreter
def test_launch_of_other_tiles_gives_the_same_sums() -> None:
    x = torch.randn(200, 70)
    other = prepare_column_sums(x.device, 200, 70, 70, type(LAUNCH)(rows=16, columns=32, parts=4))
    assert other.parts == 4  # of four tiles, the last of one
    assert torch.allclose(other(x, torch.float32), column_sums(x), rtol=1e-5, atol=1e-5)


def test_is_one_op_to_torch_compile(device: torch.device) -> None:
    x = torch.randn(9, 5, device=device)
    compiled = torch.compile(lambda x: column_sums(x) + 1.0, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), column_sums(x) + 1.0)
    torch.library.opcheck(column_sums_op, (x, torch.bfloat16))
    torch.library.opcheck(column_sums_op, (x[:1], torch.float32))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # torch records one first that holds nothing
def test_counters_may_first_be_needed_where_torch_records_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that lasts may lie in the pool of such graphs: torch refuses to go on where something does."""
    monkeypatch.setattr(tickets, "_of_streams", {})
    monkeypatch.setattr(tickets, "_reserves", {})
    x = torch.randn(8192, 768, device="cuda", dtype=torch.bfloat16)
    compiled = torch.compile(lambda x: column_sums(x) + 1.0, mode="reduce-overhead")
    found = [compiled(x).clone() for _ in range(4)]
    wanted = column_sums(x) + 1.0
    assert all(torch.equal(one, wanted) for one in found)


@pytest.mark.gpu
def test_counters_may_first_be_needed_where_waiting_is_forbidden(
    monkeypatch: pytest.MonkeyPatch, no_waiting: Any
) -> None:
    """As in the step that TrainStep watches for waits: a false one would keep it from capturing."""
    x = torch.randn(8192, 768, device="cuda", dtype=torch.bfloat16)
    wanted = column_sums(x)
    monkeypatch.setattr(tickets, "_of_streams", {})
    monkeypatch.setattr(tickets, "_reserves", {})
    with no_waiting():
        found = column_sums(x)
    assert torch.equal(found, wanted)
