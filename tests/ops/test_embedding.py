"""The embedding and its gradients against float64, through the reference, the interpreter and the GPU."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fusestep import dispatch
from fusestep.errors import UserError
from fusestep.nn import Embedding
from fusestep.nn.functional import embedding
from fusestep.ops import embedding_gradient
from fusestep.ops.embedding import embedding_backward, embedding_forward

#: The interpreter truncates where hardware rounds to bf16: one unit in the last place instead of half.
TOLERANCE = {torch.float32: 3e-7, torch.float16: 1e-3, torch.bfloat16: 8e-3}
CPU = torch.device("cpu")


def exact(ids: Tensor, dy: Tensor, rows: int, places: int, padding: int | None = None) -> tuple[Tensor, Tensor]:
    """Both gradients in float64, one token after the other. Ids that the table does not have are left out."""
    width = dy.shape[-1]
    dw, dp = (torch.zeros(size, width, dtype=torch.float64) for size in (rows, places))
    for (*_, place), row, gradient in zip(
        (list(index) for index in torch.ones(ids.shape).nonzero()),
        ids.flatten().tolist(),
        dy.double().cpu().reshape(-1, width),
        strict=True,
    ):
        dp[int(place)] += gradient
        if 0 <= row < rows and row != padding:
            dw[row] += gradient
    return dw, dp


def assert_near(value: Tensor | None, truth: Tensor, scale: Tensor, tolerance: float) -> None:
    """Within `tolerance` of the sums of magnitudes, element by element."""
    assert value is not None
    assert value.shape == truth.shape
    assert bool(((value.double().cpu() - truth).abs() <= tolerance * scale + 1e-30).all())


def check(
    ids: Tensor, rows: int, width: int, dtype: torch.dtype, *, extra: int = 0, padding: int | None = None
) -> tuple[Tensor, Tensor]:
    """Rows and gradients of these ids, with positions, against float64."""
    length = ids.shape[-1]
    weight, positions = (
        torch.randn(size, width, device=ids.device).to(dtype).requires_grad_() for size in (rows, length + extra)
    )
    y = embedding(ids, weight, padding, positions=positions)
    assert y.dtype is dtype
    assert y.is_contiguous()
    truth = weight.detach().double()[ids.long()] + positions.detach().double()[:length]
    assert_near(y.detach(), truth.cpu(), truth.abs().cpu() + 1, TOLERANCE[dtype])
    dy = torch.randn(y.shape, device=ids.device).to(dtype)
    y.backward(dy)
    wanted, sizes = (exact(ids, one, rows, length + extra, padding) for one in (dy, dy.abs()))
    for table, truth, scale in zip((weight, positions), wanted, sizes, strict=True):
        assert table.grad is not None
        assert table.grad.dtype is dtype
        assert_near(table.grad, truth, scale, TOLERANCE[dtype])
    assert weight.grad is not None
    assert positions.grad is not None
    return weight.grad, positions.grad


#: Names of ids, and how they are made of a shape for a table of so many rows.
IDS: dict[str, Any] = {
    "uniform": lambda shape, rows: torch.randint(rows, shape),
    "all equal": lambda shape, rows: torch.full(shape, rows - 1),
    "all different": lambda shape, rows: torch.randperm(rows)[: shape[0] * shape[1]].view(shape),
    "skewed": lambda shape, rows: (torch.rand(shape) ** 6 * rows).long(),
    "in order": lambda shape, rows: (torch.arange(shape[0] * shape[1]) * rows // (shape[0] * shape[1])).view(shape),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", IDS)
def test_rows_and_gradients_agree_with_float64(device: torch.device, name: str, dtype: torch.dtype) -> None:
    ids = IDS[name]((3, 67), 211).to(device)
    check(ids, 211, 21, dtype, extra=5, padding=int(ids[1, 3]))
    check(ids.int().t(), 211, 8, dtype)


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float32) for name in IDS), ("skewed", torch.bfloat16), ("all equal", torch.float16)],
)
def test_kernels_agree_with_float64(name: str, dtype: torch.dtype) -> None:
    ids = IDS[name]((3, 47), 151)
    check(ids, 151, 5, dtype, extra=3, padding=int(ids[1, 3]))


@pytest.mark.interpreter
@pytest.mark.parametrize("tokens", [1, 31, 32, 33, 64, 65])
def test_kernels_at_the_edges_of_blocks_and_chunks(tokens: int) -> None:
    check((torch.rand(1, tokens) ** 3 * 4).long().int(), 7, 3, torch.float32)


@pytest.mark.interpreter
@pytest.mark.parametrize("most", [0, 128])
def test_kernels_order_the_keys_of_several_chunks(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch.sort does, which takes over where there are too many chunks."""
    monkeypatch.setattr(embedding_gradient, "MOST_CHUNKS", most)
    embedding_gradient._plan.cache_clear()
    assert embedding_gradient.chunk_of(530) == (512 if most else 0)
    ids = torch.cat((torch.randint(9, (33, 10)), torch.full((20, 10), 4)))
    check(ids, 11, 2, torch.float32, padding=3)
    check(IDS["in order"]((53, 10), 101), 101, 2, torch.float32)  # all of one chunk come before all of the next
    embedding_gradient._plan.cache_clear()


@pytest.mark.interpreter
def test_kernels_add_the_parts_of_an_id_from_more_blocks_than_are_taken_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(embedding_gradient, "PARTS", 2)
    embedding_gradient._plan.cache_clear()
    check(torch.cat((torch.randint(3, (1, 40)), torch.full((1, 260), 1)), 1), 3, 2, torch.float32)
    embedding_gradient._plan.cache_clear()


def check_row_strides(device: torch.device) -> None:
    """Tables and gradients that are columns of wider ones: rows are as far apart as theirs."""
    ids = torch.randint(9, (3, 7), device=device)
    weight, positions = (torch.randn(9, width, device=device)[:, 2:7].requires_grad_() for width in (11, 13))
    dy = torch.randn(3, 7, 17, device=device)[..., 4:9]
    y = embedding(ids, weight, positions=positions)
    assert torch.equal(y, weight[ids] + positions[:7])
    found = torch.autograd.grad(y, (weight, positions), dy)
    for gradient, wanted, scale in zip(found, *(exact(ids, one, 9, 9) for one in (dy, dy.abs())), strict=True):
        assert_near(gradient, wanted, scale, TOLERANCE[torch.float32])


def test_rows_may_lie_apart(device: torch.device) -> None:
    check_row_strides(device)


@pytest.mark.interpreter
def test_kernels_follow_row_strides() -> None:
    check_row_strides(CPU)


@pytest.mark.interpreter
def test_offsets_have_sixty_four_bits() -> None:
    # Rows 2^30 elements apart, in memory that is reserved but never touched between them.
    weight, positions, dy = (
        torch.empty(2**31 + 64, dtype=torch.float16).as_strided((3, 5), (2**30, 1)).copy_(torch.randn(3, 5))
        for _ in range(3)
    )
    ids = torch.tensor([[2, 0, 2]], dtype=torch.int32)
    y = embedding(ids, weight.requires_grad_(), positions=positions.requires_grad_())
    truth = weight.detach().double()[ids.long()] + positions.detach().double()
    assert_near(y.detach(), truth, truth.abs() + 1, TOLERANCE[torch.float16])
    found = torch.autograd.grad(y, (weight, positions), dy[None])
    for gradient, wanted, scale in zip(found, *(exact(ids, one[None], 3, 3) for one in (dy, dy.abs())), strict=True):
        assert_near(gradient, wanted, scale, TOLERANCE[torch.float16])


@pytest.mark.gpu
def test_tables_and_outputs_of_more_than_2_31_elements() -> None:
    rows, width = 2**21 + 3, 1024
    weight = torch.zeros(rows, width, dtype=torch.bfloat16, device="cuda")
    weight[-1] = torch.arange(width, device="cuda")
    ids = torch.full((1, rows), rows - 1, device="cuda")
    ids[0, :-1] = 0
    y = embedding(ids, weight.requires_grad_())
    assert torch.equal(y[0, -1], weight[-1])
    assert not bool(y[0, -3:-1].any())
    dy = torch.zeros_like(y)
    dy[0, -1] = 3.0
    (gradient,) = torch.autograd.grad(y, weight, dy)
    assert bool((gradient[-1] == 3.0).all())
    assert not bool(gradient[:-1].any())


@pytest.mark.interpreter
def test_kernels_walk_long_rows_in_several_programs() -> None:
    check(torch.randint(3, (2, 5)), 3, 1030, torch.float32)


@settings(max_examples=40)
@given(st.data())
def test_any_ids_agree_with_float64(data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, 9))
    shape = data.draw(st.tuples(st.integers(1, 4), st.integers(1, 9)))
    drawn = data.draw(st.lists(st.integers(0, rows - 1), min_size=shape[0] * shape[1], max_size=shape[0] * shape[1]))
    padding = data.draw(st.none() | st.integers(0, rows - 1))
    check(torch.tensor(drawn).view(shape), rows, 3, torch.float32, padding=padding)


@pytest.mark.interpreter
@settings(max_examples=8)
@given(st.data())
def test_kernels_of_any_ids_agree_with_float64(data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, 9))
    tokens = data.draw(st.sampled_from([2, 34, 66]))
    ids = torch.tensor(data.draw(st.lists(st.integers(0, rows - 1), min_size=tokens, max_size=tokens)))
    check(ids.view(2, -1), rows, 2, torch.float32, padding=data.draw(st.none() | st.integers(0, rows - 1)))


@pytest.mark.parametrize("padding", [None, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_on_a_cpu_the_bits_are_torchs(padding: int | None, dtype: torch.dtype) -> None:
    ids, dy = torch.randint(5, (3, 11)), torch.randn(3, 11, 6).to(dtype)
    tables = [torch.randn(5, 6).to(dtype), torch.randn(13, 6).to(dtype)]
    ours, theirs = ([table.clone().requires_grad_() for table in tables] for _ in range(2))
    y = embedding(ids, ours[0], padding, positions=ours[1])
    wanted = F.embedding(ids, theirs[0], padding) + F.embedding(torch.arange(11), theirs[1])
    y.backward(dy)
    wanted.backward(dy)
    assert torch.equal(y, wanted)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(ours, theirs, strict=True))  # type: ignore[arg-type]


def check_unknown_ids(device: torch.device) -> None:
    ids = torch.tensor([[3, -1, 7, 0], [8, 3, 9, 1 << 40]], device=device)
    weight = torch.randn(8, 5, device=device, requires_grad=True)
    y = embedding(ids, weight)
    is_unknown = torch.tensor([[False, True, False, False], [True, False, True, True]], device=device)
    assert torch.equal(y.isnan(), is_unknown[..., None].expand(2, 4, 5))
    dy = torch.randn(2, 4, 5, device=device)
    y.backward(dy)
    wanted, scale = (exact(ids.cpu(), one, 8, 4)[0] for one in (dy, dy.abs()))
    assert_near(weight.grad, wanted, scale, 3e-7)


@pytest.mark.interpreter
def test_kernels_give_nan_for_unknown_ids_and_no_gradient() -> None:
    check_unknown_ids(CPU)


@pytest.mark.interpreter
def test_kernels_write_nothing_beside_the_table_for_unknown_ids() -> None:
    ids = torch.tensor([-1, 3, -2, 4, 5, 1, -1, 1 << 40])
    memory = torch.full((9, 5), 7.0)
    embedding_gradient.gradients(ids, torch.randn(8, 5), 8, -1, memory[3:7], None)
    assert bool((memory[:3] == 7.0).all())
    assert bool((memory[7:] == 7.0).all())
    assert not bool((memory[3:7] == 7.0).any())


@pytest.mark.gpu
def test_on_a_gpu_unknown_ids_give_nan_and_no_gradient() -> None:
    check_unknown_ids(torch.device("cuda", 0))


@pytest.mark.parametrize(("ids", "wrong"), [([1, 5], 5), ([-2, 9], -2)])
def test_on_a_cpu_an_unknown_id_is_an_error(ids: list[int], wrong: int) -> None:
    with pytest.raises(UserError, match=f"id {wrong} is outside the table of 5 rows"):
        embedding(torch.tensor(ids), torch.randn(5, 3))


def check_few(device: torch.device) -> None:
    """Scalars, no ids, views, gradients that are expanded, infinities, one table alone that wants a gradient."""
    weight = torch.randn(6, 10, device=device)[:, ::2].requires_grad_()
    assert torch.equal(embedding(torch.tensor(4, device=device), weight), weight[4])
    none = embedding(torch.empty(2, 0, dtype=torch.int64, device=device), weight, positions=weight)
    assert none.shape == (2, 0, 5)
    (found,) = torch.autograd.grad(none.sum(), weight)
    assert torch.equal(found, torch.zeros(6, 5, device=device))
    ids = torch.tensor([[5, 2, 5], [2, 2, 0]], device=device)
    (found,) = torch.autograd.grad(embedding(ids, weight).sum(), weight)
    assert torch.equal(found[:, 0].cpu(), torch.tensor([1.0, 0, 3, 0, 0, 2]))
    positions = torch.randn(4, 5, device=device, requires_grad=True)
    (found,) = torch.autograd.grad(embedding(ids, weight.detach(), positions=positions).sum(), positions)
    assert torch.equal(found[:, 4].cpu(), torch.tensor([2.0, 2, 2, 0]))
    y = embedding(ids, weight, positions=positions.detach())
    assert torch.equal(y, weight[ids] + positions[:3])
    gradient = torch.ones_like(y)
    gradient[0, 1, 3], gradient[1, 2, 0] = float("inf"), float("nan")
    (found,) = torch.autograd.grad(y, weight, gradient)
    assert found.isfinite().sum() == 28
    assert found[2, 3] == float("inf")
    assert found[0, 0].isnan()


def test_views_scalars_no_ids_and_infinities(device: torch.device) -> None:
    check_few(device)


@pytest.mark.interpreter
def test_kernels_at_views_scalars_no_ids_and_infinities() -> None:
    check_few(CPU)


def test_dtypes_of_the_tables_may_differ(device: torch.device) -> None:
    weight = torch.randn(6, 5, device=device).bfloat16().requires_grad_()
    positions = torch.randn(4, 5, device=device, requires_grad=True)
    y = embedding(torch.tensor([[5, 2, 5]], device=device), weight, positions=positions)
    assert y.dtype is torch.float32
    assert torch.equal(y, weight[[5, 2, 5]].float()[None] + positions[:3])
    y.backward(torch.full_like(y, 1.25))
    assert weight.grad is not None
    assert weight.grad.dtype is torch.bfloat16
    assert torch.equal(weight.grad[5], torch.full((5,), 2.5, dtype=torch.bfloat16, device=device))
    assert positions.grad is not None
    assert positions.grad.dtype is torch.float32


def test_gradients_to_second_order() -> None:
    ids = torch.tensor([[5, 2, 5], [2, 2, 0]])
    tables = [torch.randn(size, 3, dtype=torch.float64, requires_grad=True) for size in (6, 4)]

    def look_up(weight: Tensor, positions: Tensor) -> Tensor:
        return embedding(ids, weight, positions=positions)

    assert torch.autograd.gradcheck(look_up, tables)
    assert torch.autograd.gradgradcheck(look_up, tables)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_the_op_serves_the_compiler_and_transforms() -> None:
    ids, weight, positions = torch.randint(9, (2, 5)), torch.randn(9, 4), torch.randn(6, 4)
    torch.library.opcheck(embedding_forward, (ids, weight, positions))
    torch.library.opcheck(embedding_forward, (ids.int(), weight.bfloat16(), None))
    dy = torch.randn(2, 5, 4)
    torch.library.opcheck(embedding_backward, (dy, ids, 9, 2, 6, torch.float32, torch.bfloat16))
    torch.library.opcheck(embedding_backward, (dy, ids, 9, -1, 0, torch.float32, None))

    def loss(weight: Tensor, positions: Tensor) -> Tensor:
        return (embedding(ids, weight, positions=positions) ** 2).sum()

    found = torch.func.grad(loss, argnums=(0, 1))(weight, positions)
    for one in (weight, positions):
        one.requires_grad_()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for function in (loss, compiled):
        wanted = torch.autograd.grad(function(weight, positions), (weight, positions))
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b)


# Of torch's own making, where it adds up a sparse gradient.
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning")
@pytest.mark.parametrize("options", [{"max_norm": 0.5}, {"scale_grad_by_freq": True}, {"sparse": True}])
def test_other_options_are_torchs(
    options: dict[str, Any], device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    ids = torch.tensor([[5, 2, 5]], device=device)
    module = Embedding(6, 5, device=device, **options)
    theirs = torch.nn.Embedding(6, 5, device=device, _weight=module.weight.detach().clone(), **options)
    y, wanted = module(ids), theirs(ids)
    assert torch.equal(y, wanted)
    for one in (y, wanted):
        one.sum().backward()
    assert module.weight.grad is not None
    assert theirs.weight.grad is not None
    assert torch.equal(module.weight.grad.to_dense(), theirs.weight.grad.to_dense())
    assert module.implementation().implementation == "torch"
    assert any("embedding" in record.message for record in caplog.records)


def test_the_module_is_torchs_but_for_its_kernels(device: torch.device) -> None:
    ours, theirs = (kind(7, 5, padding_idx=-2, device=device) for kind in (Embedding, torch.nn.Embedding))
    ours.load_state_dict(theirs.state_dict())
    ids = torch.tensor([[5, 2, 5]], device=device)
    assert torch.equal(ours(ids), theirs(ids))
    for one in (ours, theirs):
        one(ids).sum().backward()
        assert one.weight.grad is not None
    assert torch.equal(ours.weight.grad, theirs.weight.grad)  # type: ignore[arg-type]
    assert repr(ours) == repr(theirs)
    assert ours.implementation() == dispatch.explain_choice("embedding", device.type, device.index)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"input": torch.zeros(3)}, "input has dtype torch.float32; pass ids"),
        ({"weight": torch.zeros(3)}, "weight has shape (3,)"),
        ({"weight": torch.zeros(3, 4, dtype=torch.int8)}, "dtype torch.int8; pass (rows, width)"),
        ({"padding_idx": 5}, "padding_idx is 5 for a table of 5 rows"),
        ({"padding_idx": -6}, "padding_idx is -6 for a table of 5 rows"),
        ({"positions": torch.zeros(2, 4)}, "pass (places, 4), a row for each place"),
        ({"positions": torch.zeros(3, 5)}, "pass (places, 4), a row for each place"),
        ({"input": torch.tensor(1), "positions": torch.zeros(3, 4)}, "ids of shape ()"),
        ({"positions": torch.zeros(3, 4, device="meta")}, "positions is on meta"),
    ],
)
def test_what_does_not_fit_is_one_sentence(change: dict[str, Any], says: str) -> None:
    arguments: dict[str, Any] = {"input": torch.tensor([1, 2, 0]), "weight": torch.zeros(5, 4)} | change
    with pytest.raises(UserError, match=re.escape(says)):
        embedding(**arguments)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("batch", "length", "rows", "width", "dtype"),
    [
        (32, 256, 96, 768, torch.float32),
        (32, 256, 96, 2048, torch.bfloat16),
        (16, 1024, 50304, 768, torch.float32),
        (4, 2048, 128256, 1000, torch.bfloat16),
        (3, 50001, 1000, 72, torch.float32),  # more tokens than are ranked by halving
    ],
)
@pytest.mark.parametrize("name", ["uniform", "all equal", "skewed"])
@pytest.mark.usefixtures("poisoned")
def test_real_shapes_give_the_same_bits_each_time(
    name: str, batch: int, length: int, rows: int, width: int, dtype: torch.dtype, no_waiting: Any
) -> None:
    device = torch.device("cuda", 0)
    ids = IDS[name]((batch, length), rows).to(device)
    weight, positions = (
        torch.randn(size, width, device=device).to(dtype).requires_grad_() for size in (rows, length + 7)
    )
    dy = torch.randn(batch, length, width, device=device).to(dtype)

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(embedding(ids, weight, 3, positions=positions), (weight, positions), dy)

    first = both()
    with no_waiting():
        again = [both() for _ in range(10)]
    assert all(torch.equal(a, b) for one in again for a, b in zip(first, one, strict=True))
    flat = dy.double().view(-1, width)
    for gradient, where, size in ((first[0], ids, rows), (first[1], torch.arange(length, device=device), length + 7)):
        places = where.expand(batch, length).reshape(-1)
        wanted, scale = (
            torch.zeros(size, width, dtype=torch.float64, device=device).index_add_(0, places, one)
            for one in (flat, flat.abs())
        )
        if size == rows:
            wanted[3] = scale[3] = 0.0
        limit = (4e-6 if dtype is torch.float32 else TOLERANCE[dtype]) * scale + 1e-30
        assert bool(((gradient.double() - wanted).abs() <= limit).all())
