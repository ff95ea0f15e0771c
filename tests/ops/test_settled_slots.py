"""Slots that a capture relies on: what a cast is told, and the same bytes without the pass before it."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

from fusestep.ops import norm_quantize, quantize_launch, quantize_pair, quantize_plan, settled_slots
from fusestep.ops.cast_options import CastOptions
from fusestep.ops.launch import PreparedLaunch
from fusestep.ops.quantize_pair import plan_pair
from fusestep.ops.quantize_plan import plan_cast
from fusestep.ops.settled_slots import address, is_settled, note, settled

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def test_captures_do_not_meddle_with_each_other() -> None:
    slots = torch.zeros(3, 4)
    at = slots.data_ptr()
    assert address(at, 2) == slots[2].data_ptr()
    first, second = frozenset({address(at, 0)}), frozenset({address(at, 2)})
    one, other = settled(first), settled(second)
    one.__enter__()
    other.__enter__()
    assert [is_settled(at, index) for index in range(3)] == [True, False, True]
    one.__exit__(None, None, None)  # in another order than they began, as in two threads
    assert [is_settled(at, index) for index in range(3)] == [False, False, True]
    other.__exit__(None, None, None)
    assert not settled_slots.captures
    assert not is_settled(at, 2)


def test_the_thread_of_backward_is_told_and_an_error_ends_it() -> None:
    slots = torch.zeros(1, 4)
    seen: list[bool] = []

    def capture() -> None:
        with settled(frozenset({slots.data_ptr()})):
            other = threading.Thread(target=lambda: seen.append(is_settled(slots.data_ptr(), 0)))
            other.start()
            other.join()
            raise KeyError

    with pytest.raises(KeyError):
        capture()
    assert seen == [True]
    assert not settled_slots.captures


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Casts take a pass before them; the names of the kernels that are launched."""
    for module in (quantize_launch, quantize_pair):
        monkeypatch.setattr(module, "quantize_launch", lambda *_: quantize_launch.TileLaunch(32, 32, 4))
        for limit in ("SEARCHED_BY_EACH", "SEARCHED_ALWAYS"):
            monkeypatch.setattr(module, limit, 0)
    for module in (quantize_plan, quantize_pair):
        monkeypatch.setattr(module, "_plans", {})
    monkeypatch.setattr(norm_quantize, "_known", {})
    names: list[str] = []
    real = PreparedLaunch.__call__

    def calling(self: PreparedLaunch, *tensors: Tensor | None) -> None:
        names.append(self._kernel.fn.__name__)
        real(self, *tensors)

    monkeypatch.setattr(PreparedLaunch, "__call__", calling)
    return names


def table(*scales: float) -> Tensor:
    slots = torch.zeros(len(scales), 4)
    slots[:, 0] = torch.tensor(scales)
    return slots


def same(found: object, wanted: object) -> None:
    """Bit for bit."""
    if isinstance(wanted, Tensor):
        assert isinstance(found, Tensor)
        assert torch.equal(found.reshape(-1).view(torch.uint8), wanted.reshape(-1).view(torch.uint8))
    else:
        assert found is wanted


def cast(kind: str, slots: Tensor, counts: Tensor) -> list[Tensor | None]:
    """A cast of the slot 1; of a pair also of the slot 2."""
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    if kind == "a pair":
        options = CastOptions(1, E4M3, columnwise=True, record=True), CastOptions(2, E4M3, record=True)
        a, b = random(37, 21), random(18, 21)
        pair = plan_pair(a, b, options, slots, counts)
        assert pair is not None
        return list(pair.cast(a, b, slots, counts))
    if kind == "a norm":
        outcome = norm_quantize.run_norm_quantize(
            *(random(9, 35), random(9, 35), random(35), None, 1e-5, True, slots),
            *(CastOptions(1, E4M3, record=True), counts, None),
        )
        return list(outcome)
    x, h, activation, dtype = random(41, 23), None, "", E4M3
    if kind == "a gradient":
        h, activation, dtype = random(41, 46), "swiglu", E5M2
    elif kind == "unaligned":
        x = random(41 * 23 + 1)[1:].view(41, 23)
    given = x, h, activation, slots, CastOptions(1, dtype, True, True, True), counts
    plan = plan_cast(*given, torch.float32)
    assert plan is not None
    return list(plan.cast(x, h, slots, counts))


@pytest.mark.interpreter
@pytest.mark.parametrize("kind", ["plain", "unaligned", "a gradient", "a pair", "a norm"])
def test_a_settled_cast_is_the_cast_without_its_pass(launches: list[str], kind: str) -> None:
    tables = [table(0.0, 3.7, 0.3) for _ in range(2)]
    counts = [torch.zeros(3, 3, dtype=torch.int64) for _ in range(2)]
    wanted = cast(kind, tables[0], counts[0])
    usual = list(launches)
    launches.clear()
    with settled(frozenset(address(tables[1].data_ptr(), index) for index in (1, 2))):
        found = cast(kind, tables[1], counts[1])
    assert launches == usual[1:]  # the first of them is the pass
    for ours, theirs in zip([*found, tables[1], counts[1]], [*wanted, tables[0], counts[0]], strict=True):
        same(ours, theirs)
    launches.clear()
    with settled(frozenset({address(tables[1].data_ptr(), 0 if kind != "a pair" else 1)})):
        cast(kind, tables[1], counts[1])
    assert launches == usual  # another slot is, or one of a pair alone


@pytest.mark.interpreter
@pytest.mark.parametrize("kind", ["plain", "a gradient", "a pair", "a norm"])
def test_a_cast_whose_slots_were_read_outside_of_captures_leaves_out_its_pass(launches: list[str], kind: str) -> None:
    tables = [table(0.0, 3.7, 0.3) for _ in range(2)]
    counts = [torch.zeros(3, 3, dtype=torch.int64) for _ in range(2)]
    wanted = cast(kind, tables[0], counts[0])
    usual = list(launches)
    launches.clear()
    note(tables[1], tables[1]._version, frozenset((1, 2)))
    found = cast(kind, tables[1], counts[1])
    assert launches == usual[1:]  # the first of them is the pass
    for ours, theirs in zip([*found, tables[1], counts[1]], [*wanted, tables[0], counts[0]], strict=True):
        same(ours, theirs)
    launches.clear()
    tables[1][0, 0] = 0.0  # a write, though it leaves these slots their scales
    cast(kind, tables[1], counts[1])
    assert launches == usual


@pytest.mark.interpreter
@pytest.mark.usefixtures("launches")
def test_a_cast_that_relied_on_a_scale_that_is_gone_reads_no_memory_that_nothing_was_written_to() -> None:
    """Who wrote it past torch's versions has the scale 1, and with the next roll a scale of the tensor's own."""
    relied, one = table(0.0, 0.0, 0.0), table(0.0, 1.0, 0.0)
    counts = [torch.zeros(3, 3, dtype=torch.int64) for _ in range(2)]
    wanted = cast("plain", one, counts[1])
    with settled(frozenset({address(relied.data_ptr(), 1)})):
        found = cast("plain", relied, counts[0])
    for ours, theirs in zip(found, wanted, strict=True):
        same(ours, theirs)
    assert relied[1, 1] == one[1, 1] > 2.0


@pytest.mark.interpreter
@pytest.mark.parametrize("kind", ["plain", "a pair", "a norm"])
def test_the_first_cast_of_its_kind_makes_its_pass_so_that_a_capture_finds_it_compiled(
    launches: list[str], kind: str
) -> None:
    slots, counts = table(0.0, 3.7, 0.3), torch.zeros(3, 3, dtype=torch.int64)
    note(slots, slots._version, frozenset((1, 2)))
    cast(kind, slots, counts)
    first = list(launches)
    launches.clear()
    cast(kind, slots, counts)
    assert launches == first[1:]
