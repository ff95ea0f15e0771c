"""What the ladder calls the peak of a rung: that of whole steps, with what lives through them."""

from __future__ import annotations

import pytest
import torch

from fusestep.ladder.memory import Peak, PeakOfSteps


class Allocator:
    """Bytes that live and that are reserved, and their peaks, which a reset sets to what there is then."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.live = self.reserved = self.peak_live = self.peak_reserved = 0
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _device: self.reset())
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _device: self.peak_live)
        monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda _device: self.peak_reserved)

    def reset(self) -> None:
        self.peak_live, self.peak_reserved = self.live, self.reserved

    def take(self, count: int) -> None:
        self.live += count
        self.reserved = max(self.reserved, self.live)
        self.peak_live = max(self.peak_live, self.live)
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def give_back(self, count: int, *, unreserve: bool = False) -> None:
        self.live -= count
        if unreserve:
            self.reserved = self.live


WEIGHTS = 100


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    return Allocator(monkeypatch)


def begun(gpu: Allocator, build: int, *, unreserve: bool) -> PeakOfSteps:
    """At the first step: the weights live, and what building them took has been given back."""
    peak = PeakOfSteps(torch.device("cuda", 0))
    gpu.take(WEIGHTS)
    gpu.take(build)
    gpu.give_back(build, unreserve=unreserve)
    peak.begin()
    return peak


@pytest.mark.parametrize("build", [0, 50, 5000])
@pytest.mark.parametrize("step", [30, 800])
def test_allocated_is_the_peak_of_the_steps_with_what_lives_through_them(gpu: Allocator, build: int, step: int) -> None:
    peak = begun(gpu, build, unreserve=False)
    for _ in range(3):
        gpu.take(step)
        gpu.give_back(step)
    peak.end()
    gpu.take(9999)  # what comes after the steps is none of theirs
    assert peak.result.allocated == WEIGHTS + step


@pytest.mark.parametrize("build", [0, 50, 5000])
@pytest.mark.parametrize("step", [30, 800])
def test_reserved_counts_what_had_to_fit_before_the_steps(gpu: Allocator, build: int, step: int) -> None:
    peak = begun(gpu, build, unreserve=True)
    gpu.take(step)
    peak.end()
    assert peak.result.reserved == peak.result.headline == WEIGHTS + max(build, step)


def test_on_a_cpu_the_resident_set_stands_for_the_peak() -> None:
    peak = PeakOfSteps(torch.device("cpu"))
    peak.begin()
    peak.end()
    assert (peak.result.allocated, peak.result.reserved) == (None, None)
    assert peak.result.headline == peak.result.resident


@pytest.mark.parametrize(("reserved", "shown"), [(None, 7), (0, 0), (5, 5)])
def test_the_headline_is_what_was_reserved_where_that_is_known(reserved: int | None, shown: int) -> None:
    assert Peak(3, reserved, 7, 1).headline == shown
