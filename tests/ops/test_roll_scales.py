"""Delayed scaling's step: which amaxes enter a history, and the scales that follow."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from torch import Tensor

from fusestep.errors import UserError
from fusestep.ops.roll_scales import (
    AMAX,
    LARGEST,
    REFUSED,
    SCALE,
    RollTable,
    State,
    _prove,
    roll_scales,
    roll_scales_reference,
    scale_reference,
)

CPU = torch.device("cpu")


def state(slots: int, length: int, device: torch.device = CPU, largest: float = 448.0) -> State:
    slot = torch.zeros(slots, 4)
    slot[:, LARGEST] = largest
    return slot.to(device), torch.zeros(slots, length, device=device), torch.zeros(slots, dtype=torch.int64).to(device)


def scales(
    device: torch.device, length: int, amaxes: list[float], margin: int = 0, most_recent: bool = False
) -> Tensor:
    """The scale after each of these amaxes."""
    slots, history, rolls = state(1, length, device)
    found = []
    for amax in amaxes:
        slots[0, AMAX] = amax
        roll_scales([(slots, history, rolls)], margin=margin, most_recent=most_recent)
        found.append(slots[0, SCALE].clone())
        assert slots[0, AMAX] == 0
    return torch.stack(found).cpu()


def test_scales_follow_the_largest_of_the_history(device: torch.device) -> None:
    # 5 leaves the history of four with the sixth amax.
    expected = torch.tensor([448 / 4, 448 / 5, 448 / 5, 448 / 5, 448 / 5, 448 / 3])
    assert torch.equal(scales(device, 4, [4.0, 5.0, 3.0, 2.0, 1.0, 1.0]), expected)


def test_scales_follow_the_most_recent_amax(device: torch.device) -> None:
    expected = torch.tensor([112.0, 89.6, 448 / 3, 224.0])
    assert torch.equal(scales(device, 4, [4.0, 5.0, 3.0, 2.0], most_recent=True), expected)


def test_a_margin_halves_scales(device: torch.device) -> None:
    assert scales(device, 4, [4.0], margin=3).item() == 112 / 8


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_an_amax_that_is_not_finite_keeps_the_scale_and_is_counted(bad: float, device: torch.device) -> None:
    slots, history, rolls = state(2, 3, device)
    for amaxes in ([2.0, 2.0], [bad, 4.0], [1.0, bad]):
        slots[:, AMAX] = torch.tensor(amaxes, device=device)
        roll_scales([(slots, history, rolls)], margin=0, most_recent=False)
    assert slots[:, SCALE].tolist() == [224.0, 112.0]
    assert slots[:, REFUSED].tolist() == [1.0, 1.0]
    assert history.tolist() == [[2.0, 1.0, 0.0], [2.0, 4.0, 0.0]]
    assert rolls.tolist() == [2, 2]


def test_an_amax_of_zero_changes_nothing(device: torch.device) -> None:
    slots, history, rolls = state(1, 2, device)
    for amax in (2.0, 0.0, 0.0, 0.0):
        slots[0, AMAX] = amax
        roll_scales([(slots, history, rolls)], margin=0, most_recent=True)
    assert slots[0].tolist() == [224.0, 0.0, 448.0, 0.0]
    assert history.tolist() == [[2.0, 0.0]]


@pytest.mark.parametrize("amax", [1e-45, 1e-40, 1e-38, 1e-36, 1e-30])
@pytest.mark.parametrize("largest", [448.0, 57344.0])
def test_a_tiny_amax_gives_a_finite_scale_with_a_normal_inverse(amax: float, largest: float) -> None:
    scale = scale_reference(torch.tensor(amax), largest)
    assert math.isfinite(scale.item())
    assert (1 / scale).item() >= torch.finfo(torch.float32).tiny
    slots, history, rolls = state(1, 2, largest=largest)
    slots[0, AMAX] = amax
    roll_scales([(slots, history, rolls)], margin=0, most_recent=False)
    assert slots[0, SCALE] == scale


def test_a_huge_amax_and_a_margin_leave_a_normal_scale(device: torch.device) -> None:
    assert scales(device, 2, [3.4e38], margin=16).item() == 2.0**-126
    assert scale_reference(torch.tensor(3.4e38), 448.0, 16).item() == 2.0**-126


@pytest.mark.parametrize("amax", [0.0, math.inf, math.nan])
def test_no_amax_gives_a_scale_of_one(amax: float) -> None:
    assert scale_reference(torch.tensor(amax), 448.0).item() == 1.0


def test_modules_are_rolled_together_whatever_their_histories() -> None:
    torch.manual_seed(3)
    shapes = [(3, 1), (2, 4), (3, 4), (1, 7), (0, 4)]
    together, apart = [[state(*shape) for shape in shapes] for _ in range(2)]
    for step in range(6):
        for a, b in zip(together, apart, strict=True):
            a[0][:, AMAX] = b[0][:, AMAX] = torch.rand(a[0].shape[0])
        roll_scales(together, margin=step % 2, most_recent=False)
        for b in apart:
            roll_scales_reference(*b, margin=step % 2, most_recent=False)
    for a, b in zip(together, apart, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def rolled_by_kernel(device: torch.device, given: bool = False) -> None:
    """Compare the kernel with the reference, bit for bit, over unlike histories and every kind of amax.

    Args: given: amaxes come from elsewhere, and those in the slots are others.
    """
    generator = torch.Generator().manual_seed(4)
    shapes = [(3, 1), (1, 16), (2, 5), (2, 1025), (0, 8)]
    for most_recent in (False, True):
        ours = [state(*shape, device, largest) for shape, largest in zip(shapes, (448.0, 57344.0) * 3, strict=False)]
        theirs = [tuple(t.to("cpu", copy=True) for t in s) for s in ours]
        elsewhere = torch.zeros(sum(s[0].shape[0] for s in ours), device=device).split([s[0].shape[0] for s in ours])
        given_or_not = elsewhere if given else None
        tables = [RollTable(ours, given_or_not, margin=margin, most_recent=most_recent) for margin in range(3)]
        for step in range(8):
            for s, t, e in zip(ours, theirs, elsewhere, strict=True):
                amax = torch.rand(s[0].shape[0], generator=generator) * 10.0 ** (5 * step - 20)
                amax[: step % 3] = (0.0, math.inf, math.nan, 1e-45)[step % 4]
                t[0][:, AMAX] = amax
                s[0][:, AMAX] = 3e30 if given else amax.to(device)
                e.copy_(amax)
            tables[step % 3].roll()
            for s, t in zip(ours, theirs, strict=True):
                roll_scales_reference(*t, margin=step % 3, most_recent=most_recent)
                assert all(torch.equal(x.cpu(), y) for x, y in zip(s, t, strict=True))


@pytest.mark.gpu
def test_the_kernel_gives_the_bits_of_the_reference() -> None:
    rolled_by_kernel(torch.device("cuda", 0))
    rolled_by_kernel(torch.device("cuda", 0), given=True)


@pytest.mark.interpreter
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_the_kernel_in_the_interpreter_gives_the_bits_of_the_reference() -> None:
    rolled_by_kernel(CPU)
    rolled_by_kernel(CPU, given=True)


@pytest.mark.interpreter
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_the_proof_holds_in_the_interpreter() -> None:
    assert all(proof.ok for proof in _prove(CPU))


def test_the_proof_holds(device: torch.device) -> None:
    assert all(proof.ok for proof in _prove(device))


@pytest.mark.gpu
def test_a_table_rolls_without_a_wait_and_in_a_graph(no_waiting: Callable[[], AbstractContextManager[None]]) -> None:
    device = torch.device("cuda", 0)
    states = [state(3, 16, device) for _ in range(5)]
    table = RollTable(states, margin=0, most_recent=False)
    table.roll()
    with no_waiting():
        table.roll()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        table.roll()
    del table
    for amax in (2.0, 7.0):
        states[1][0][:, AMAX] = amax
        graph.replay()
    assert states[1][0][:, SCALE].tolist() == [64.0] * 3
    assert states[1][2].tolist() == [2] * 3


@pytest.mark.gpu
def test_a_capture_of_unknown_modules_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(UserError, match="run one whole step before the capture"):
        RollTable([state(3, 16, torch.device("cuda", 0))], margin=0, most_recent=False)
