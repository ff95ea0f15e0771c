"""Walks and tables: which elements a launch pairs, and where it looks for them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fusestep.ops.tensor_table import BLOCK, DeviceArray, build_table, entry, gradient_address, is_dense, walk

CPU = torch.device("cpu")


def offsets(dims: tuple[tuple[int, int, int], ...], count: int) -> list[tuple[int, int]]:
    """What the kernel computes: offsets into parameter and gradient, in the order of the walk."""
    found = []
    for index in range(count):
        rest, parameter, gradient = index, 0, 0
        for size, parameter_stride, gradient_stride in dims:
            parameter += rest % size * parameter_stride
            gradient += rest % size * gradient_stride
            rest //= size
        found.append((parameter, gradient))
    return found


@given(
    shape=st.lists(st.integers(1, 4), max_size=4),
    data=st.data(),
)
def test_walk_visits_every_element_once_and_pairs_by_logical_index(shape: list[int], data: st.DataObject) -> None:
    def layout() -> torch.Tensor:
        order = data.draw(st.permutations(range(len(shape))))
        made = torch.empty([shape[d] for d in order])
        return made.permute([order.index(d) for d in range(len(shape))])

    state, parameter = layout(), layout()
    gradient = layout()
    expanded = data.draw(st.booleans())
    if expanded and shape:
        gradient = gradient[:1].expand(shape)
    count = state.numel()
    by_state = {}
    for logical in range(count):
        index, rest = [], logical
        for size in reversed(shape):
            index.insert(0, rest % size)
            rest //= size
        where = [sum(i * s for i, s in zip(index, t.stride(), strict=True)) for t in (state, parameter, gradient)]
        by_state[where[0]] = (where[1], where[2])
    assert offsets(walk(state, parameter, gradient), count) == [by_state[place] for place in range(count)]


def test_tensors_in_one_order_walk_as_one_run() -> None:
    one = torch.empty(4, 3, 5).permute(2, 0, 1)
    assert walk(one, one, one) == ((60, 1, 1),)


def test_dense_means_each_place_once() -> None:
    assert is_dense(torch.empty(3, 4).t())
    assert is_dense(torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last))
    assert is_dense(torch.empty(()))
    assert is_dense(torch.empty(0, 4))
    assert not is_dense(torch.empty(3, 4)[:, :2])
    assert not is_dense(torch.empty(1).expand(4))


def test_aligned_tensors_in_one_order_are_flat_and_odd_addresses_are_not() -> None:
    aligned = torch.empty(64)
    assert aligned.data_ptr() % 16 == 0
    assert entry(aligned, aligned, [aligned]).dims == ()
    odd = torch.empty(65)[1:]
    assert entry(aligned, odd, [aligned]).dims == ((64, 1, 1),)
    assert entry(torch.empty(1), torch.empty(2)[1:], [torch.empty(1)]).dims == ((1, 1, 1),)


def test_chunks_name_their_tensor_and_empty_tensors_have_none() -> None:
    tensors = [torch.empty(n) for n in (0, BLOCK, 1, 2 * BLOCK + 1, 0)]
    table = build_table(CPU, [entry(t, t) for t in tensors])
    assert table.chunk_tensor.tolist() == [1, 2, 3, 3, 3]
    assert table.rows[2].tolist() == [0, 0, 1, 2, 5]
    assert table.rows[1].tolist() == [t.numel() for t in tensors]
    assert not table.is_strided


def test_an_empty_gradient_counts_as_a_gradient_and_a_missing_one_does_not() -> None:
    assert gradient_address(torch.empty(0)) != 0
    assert gradient_address(None) == 0


def test_unchanged_values_are_not_uploaded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    array = DeviceArray([1, 2], torch.zeros(2, dtype=torch.int64))
    array.tensor.zero_()
    array.update([1, 2])
    assert array.tensor.tolist() == [0, 0]
    array.update([1, 3])
    assert array.tensor.tolist() == [1, 3]


def test_a_dense_gradient_is_one_run_for_who_reads_it_alone() -> None:
    state, gradient = torch.empty(8, 4), torch.empty(4, 8).t()
    made = entry(state, gradient, [state])
    assert made.dims == ((4, 1, 8), (8, 4, 1))
    assert made.is_run
    assert not entry(state, torch.empty(8, 8)[:, ::2], [state]).is_run
    table = build_table(CPU, [made])
    assert table.is_strided
    assert not table.has_strided_gradients
