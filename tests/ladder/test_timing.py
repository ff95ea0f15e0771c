from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from fusestep.ladder.timing import PAIRS, CudaClock, HostClock, Timing, measure, steps_in_windows


class FakeGpu:
    """A device with a queue: launching costs the host `launch` seconds, the work the device `work` seconds.

    With `synchronizes` false its clock forgets to wait.
    """

    def __init__(self, launch: float, work: float, *, synchronizes: bool = True) -> None:
        self.launch, self.work, self.synchronizes = launch, work, synchronizes
        self.host = 0.0
        self.free = 0.0  # when the device will have done all that is queued
        self.steps = 0

    def step(self) -> None:
        self.steps += 1
        self.host += self.launch
        self.free = max(self.free, self.host) + self.work

    def now(self) -> float:
        return self.host

    def synchronize(self) -> None:
        if self.synchronizes:
            self.host = max(self.host, self.free)

    def mark(self) -> float:
        return max(self.free, self.host)

    def elapsed_ms(self, start: float, end: float) -> float:
        return (end - start) * 1e3

    def hold(self, ms: float) -> bool:
        self.free = max(self.free, self.host) + ms / 1e3
        return True


def test_work_that_outlasts_its_launch_is_timed_as_work() -> None:
    gpu = FakeGpu(launch=0.001, work=0.010)
    timing = measure(gpu.step, gpu, steps=12)
    assert timing.step == pytest.approx(10, rel=0.11)  # the first launch of a window is not hidden
    assert timing.host == pytest.approx(1)
    assert timing.device == pytest.approx(10)


class FullQueue(FakeGpu):
    """The driver's queue is too short for a step: once the device is held, launches wait for each other."""

    is_held = False

    def hold(self, ms: float) -> bool:
        self.is_held = ms > 0
        return super().hold(ms)

    def step(self) -> None:
        super().step()
        self.free += 0.004 if self.is_held else 0.0
        self.is_held = False


def test_a_step_that_the_queue_cannot_hold_takes_no_longer_on_the_device_than_in_a_loop() -> None:
    gpu = FullQueue(launch=0.001, work=0.010)
    timing = measure(gpu.step, gpu, steps=12)
    assert timing.device == timing.step == pytest.approx(10, rel=0.11)
    assert timing.is_bound


class Waiting(FakeGpu):
    """A step that reads a value of the device's in its middle, where the device then has nothing to do."""

    def step(self) -> None:
        super().step()
        self.synchronize()
        super().step()


def test_a_step_that_waits_for_the_device_itself_gives_an_upper_bound_of_its_time() -> None:
    gpu = Waiting(launch=0.004, work=0.001)
    timing = measure(gpu.step, gpu, steps=12)
    assert timing.device == pytest.approx(6)  # the launch of its second half is in it
    assert timing.device < timing.step
    assert timing.is_bound


def test_launch_bound_work_shows_the_host_as_the_limit() -> None:
    gpu = FakeGpu(launch=0.010, work=0.002)
    timing = measure(gpu.step, gpu, steps=12)
    assert timing.step == pytest.approx(10, rel=0.21)
    assert timing.host == pytest.approx(10)
    assert timing.device == pytest.approx(2)  # the device alone, with the step queued before it starts
    assert not timing.is_bound


def test_one_launch_that_the_host_is_late_with_does_not_make_a_bound_of_the_others() -> None:
    class Late(FakeGpu):
        held = 0

        def hold(self, ms: float) -> bool:
            self.held += ms > 0
            return super().hold(ms)

        def step(self) -> None:
            self.host += 0.1 if self.held == 2 else 0.0
            super().step()

    gpu = Late(launch=0.010, work=0.002)
    timing = measure(gpu.step, gpu, steps=12)
    assert timing.device == pytest.approx(2)
    assert not timing.is_bound


def test_a_clock_that_does_not_synchronize_reads_launches_for_work() -> None:
    """The fault that the synchronised windows are there for: without them the wall time is the launches'."""
    gpu = FakeGpu(launch=0.001, work=0.010, synchronizes=False)
    timing = measure(gpu.step, gpu, steps=12)
    assert timing.step == pytest.approx(1)
    assert all(step == pytest.approx(10) for step in timing.steps)  # the events are not deceived


def test_twice_the_steps_take_twice_the_time() -> None:
    gpu = FakeGpu(launch=0.001, work=0.010)
    timing = measure(gpu.step, gpu, steps=60)
    assert len(timing.doublings) == PAIRS
    assert all(ratio == pytest.approx(1, abs=0.05) for ratio in timing.doublings)


def test_a_cost_of_each_window_shows_in_the_doubling() -> None:
    class Slow(FakeGpu):
        def synchronize(self) -> None:
            super().synchronize()
            self.host += 0.1

    gpu = Slow(launch=0.001, work=0.001)
    assert max(measure(gpu.step, gpu, steps=12).doublings) < 0.75


def test_the_first_step_is_apart() -> None:
    gpu = FakeGpu(launch=0.001, work=0.010)

    def step() -> None:
        if gpu.steps == 0:
            gpu.host += 5.0  # compilation
        gpu.step()

    timing = measure(step, gpu, steps=12)
    assert timing.first_step > 5000
    assert max(ms for _, ms in timing.windows) < 300


def test_warm_up_goes_on_until_the_time_is_stable() -> None:
    gpu = FakeGpu(launch=0.001, work=0.010)

    def step() -> None:
        gpu.work = max(0.010, 0.040 * 0.9**gpu.steps)  # clocks that rise
        gpu.step()

    timing = measure(step, gpu, steps=12)
    assert timing.stable
    assert timing.step == pytest.approx(10, rel=0.11)
    assert timing.warmup_steps >= 12


def test_warm_up_that_never_settles_ends_and_says_so() -> None:
    gpu = FakeGpu(launch=0.001, work=0.010)

    def step() -> None:
        gpu.work *= 1.2
        gpu.step()

    assert not measure(step, gpu, steps=12).stable


def test_warm_up_lasts_at_least_as_long_as_asked() -> None:
    gpu = FakeGpu(launch=0.001, work=0.010)
    timing = measure(gpu.step, gpu, steps=12, warmup_ms=900)
    assert timing.warmup_steps * 10 >= 900
    assert timing.stable


def test_memory_is_watched_around_the_timed_windows_alone() -> None:
    gpu = FakeGpu(launch=0.001, work=0.010)
    at: list[int] = []
    watch: Callable[[], None] = lambda: at.append(gpu.steps)  # noqa: E731
    timing = measure(gpu.step, gpu, steps=12, after_warmup=watch, after_windows=watch)
    assert at[0] == 1 + timing.warmup_steps  # past the optimizer's lazy state
    assert at[1] - at[0] == len(timing.steps) == 12


def test_a_process_that_waits_for_its_turn_warms_up_after_it() -> None:
    gpu = FakeGpu(launch=0.001, work=0.010)
    at: list[int] = []
    timing = measure(gpu.step, gpu, steps=12, ready=(4, lambda: at.append(gpu.steps)), warmup_ms=200)
    assert at == [5]  # the first step and those until a capture
    assert (timing.warmup_steps - 4) * 10 >= 200
    assert len(timing.steps) == 12


@pytest.mark.parametrize(("work", "steps"), [(0.010, 36), (0.045, 36), (0.060, 24), (0.120, 12), (0.900, 12)])
def test_steps_that_take_long_are_timed_less_often(work: float, steps: int) -> None:
    gpu = FakeGpu(launch=0.001, work=work)
    timing = measure(gpu.step, gpu, steps=36, enough_ms=100)
    assert len(timing.steps) == steps
    assert timing.step == pytest.approx(work * 1e3, rel=0.04)
    assert timing.device == pytest.approx(work * 1e3)


@pytest.mark.parametrize("steps", [1, 12, 13, 24, 100])
def test_steps_are_rounded_up_to_whole_pairs_of_windows(steps: int) -> None:
    gpu = FakeGpu(launch=0.001, work=0.010)
    timing = measure(gpu.step, gpu, steps=steps)
    assert len(timing.steps) == steps_in_windows(steps) >= steps
    assert sum(count for count, _ in timing.windows) == len(timing.steps)


def test_a_cpu_has_no_time_apart_from_its_own() -> None:
    generator = random.Random(0)
    timing = measure(lambda: sum(generator.random() for _ in range(2000)), HostClock(), steps=12)
    assert timing.host is None
    assert timing.device is None
    assert sum(timing.steps) <= sum(ms for _, ms in timing.windows)


def test_the_median_window_is_the_step() -> None:
    timing = Timing(1.0, 6, True, ((1, 10.0), (2, 22.0), (1, 12.0), (2, 90.0)), (), None, None)
    assert timing.step == pytest.approx(11.5)
    assert timing.doublings == pytest.approx((1.1, 3.75))


@pytest.mark.gpu
def test_on_a_gpu_the_device_time_is_the_kernels_and_the_host_does_not_wait() -> None:
    device = torch.device("cuda", 0)
    a = torch.randn(4096, 4096, device=device)

    def step() -> None:
        for _ in range(4):
            torch.mm(a, a)

    timing = measure(step, CudaClock(device), steps=24)
    assert timing.device is not None
    assert timing.host is not None
    assert timing.host < 0.3 * timing.step
    assert timing.device == pytest.approx(timing.step, rel=0.15)
    assert sorted(timing.doublings)[PAIRS // 2] == pytest.approx(1, abs=0.1)
