"""How the benchmarks measure: device time from graph replays, host time apart, everything of a row interleaved.

- Device time: a CUDA graph holds `CALLS` calls; a replay is timed with events and divided. No host cost is in it.
  The calls of one graph walk through several sets of tensors, together larger than `L2_MULTIPLE` caches, so that no
  call finds its inputs in the L2 cache (triton#405). Rounds visit the candidates in turn, so that clocks and
  temperature drift over all of them alike.
- Host time: wall time to enqueue a call on tensors so small that the device is always ahead.
- Event time: an eager call between two events, the L2 cache flushed before it, as other projects time theirs. The
  host's time is in it where the device waits for the host.
- The byte floor: bytes that an operation must move (each input read once, each output written once), over the rate of
  a large device-to-device copy timed eagerly in the same run (a copy inside a captured graph is slower).

On a CPU, where nothing is measured but all of it can be rehearsed, a graph is its calls and a stream is nothing.
"""

from __future__ import annotations

import dataclasses
import gc
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from fusestep import hardware
from fusestep.graph.recovery import recovered_capture

#: Where everything is measured; a CPU rehearses.
DEVICE = torch.device("cuda" if hardware.devices() else "cpu")
CALLS = 12
ROUNDS = 15
L2_MULTIPLE = 3
#: Elements of the copy, and bytes that are written to flush the cache.
COPIED, FLUSHED = (1 << 30, 256 << 20) if DEVICE.type == "cuda" else (1 << 20, 1 << 20)


@dataclasses.dataclass
class Timing:
    """Milliseconds a call: the median and the quartiles over rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Timing:
        low, median, high = statistics.quantiles(samples, n=4)
        return cls(median, low, high)


def synchronize() -> None:
    """Wait for the device."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def free() -> None:
    """Give cached memory back, so that the next shape has it."""
    gc.collect()
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()


def new_stream() -> torch.cuda.Stream | None:
    """A stream to capture on."""
    return torch.cuda.Stream() if DEVICE.type == "cuda" else None


@contextmanager
def on(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Work on a stream within, ordered with the current one at both ends."""
    if stream is None:
        yield
        return
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


def elapsed(call: Callable[[], Any]) -> float:
    """Milliseconds of a call between two events (on a CPU: by its clock)."""
    if DEVICE.type != "cuda":
        begin = time.perf_counter()
        call()
        return (time.perf_counter() - begin) * 1e3
    start, end = torch.cuda.Event(True), torch.cuda.Event(True)
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end))


def copy_rate() -> float:
    """Bytes a second, read plus written, of a 4 GiB device-to-device copy, timed eagerly; the median of 20."""
    source = torch.randn(COPIED, device=DEVICE)
    target = torch.empty_like(source)
    samples = [elapsed(lambda: target.copy_(source)) for _ in range(25)]
    return 2 * source.numel() * source.element_size() / (statistics.median(samples[5:]) * 1e-3)


def sets_needed(bytes_per_call: int) -> int:
    """How many sets of tensors the calls of a graph must walk through to stay out of the L2 cache."""
    if DEVICE.type != "cuda":
        return 2
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    return max(1, min(CALLS, -(-L2_MULTIPLE * cache // bytes_per_call)))


class Graph:
    """`CALLS` calls of one candidate, captured; call k gets k modulo the number of its tensor sets."""

    def __init__(self, call: Callable[[int], Any], stream: torch.cuda.Stream | None, calls: int = CALLS) -> None:
        self.calls = calls
        self._call = call
        with on(stream):
            for _ in range(3 if stream is not None else 1):
                self._all()
        self.graph: torch.cuda.CUDAGraph | None = None
        if stream is not None:
            stream.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            # A capture that fails, as those of other libraries may, must not leave torch within it.
            with recovered_capture(DEVICE), torch.cuda.graph(self.graph, stream=stream):
                self._all()

    def _all(self) -> None:
        for k in range(self.calls):
            self._call(k)

    def milliseconds(self) -> float:
        return elapsed(self._all if self.graph is None else self.graph.replay) / self.calls


def captured(
    calls: Mapping[str, Callable[[int], Any]],
    stream: torch.cuda.Stream | None,
    may_fail: Collection[str] = (),
    number: int = CALLS,
) -> tuple[dict[str, Graph], dict[str, str]]:
    """A graph of each candidate, and why those that `may_fail` have none."""
    graphs: dict[str, Graph] = {}
    failed: dict[str, str] = {}
    for name, call in calls.items():
        try:
            graphs[name] = Graph(call, stream, number)
        except Exception as error:
            if name not in may_fail:
                raise
            failed[name] = in_words(error)
    return graphs, failed


def in_words(error: BaseException) -> str:
    """What failed, in a line or two."""
    return f"{type(error).__name__}: {error}"[:400]


def _enough(rounds: int) -> int:
    """Rounds, or as few as a rehearsal needs."""
    return rounds if DEVICE.type == "cuda" else 2


def device_times(candidates: Mapping[str, Graph], rounds: int = ROUNDS) -> dict[str, Timing]:
    """Replay every candidate once a round, in turn; two rounds of warm-up."""
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    for number in range(_enough(rounds) + 2):
        for name, graph in candidates.items():
            taken = graph.milliseconds()
            if number >= 2:
                samples[name].append(taken)
    return {name: Timing.of(values) for name, values in samples.items()}


def event_times(candidates: Mapping[str, Callable[[], Any]], rounds: int = 15) -> dict[str, Timing]:
    """Milliseconds between two events around an eager call, the L2 cache flushed; in turn, two rounds of warm-up."""
    cache = torch.empty(FLUSHED, dtype=torch.int8, device=DEVICE)
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    for number in range(_enough(rounds) + 2):
        for name, call in candidates.items():
            cache.zero_()
            taken = elapsed(call)
            if number >= 2:
                samples[name].append(taken)
    return {name: Timing.of(values) for name, values in samples.items()}


def host_times(candidates: Mapping[str, Callable[[], Any]], calls: int = 100, rounds: int = 15) -> dict[str, Timing]:
    """Milliseconds that the host needs to enqueue one call; see `host_samples`."""
    return {name: Timing.of(values) for name, values in host_samples(candidates, calls, rounds).items()}


def host_samples(candidates: Mapping[str, Callable[[], Any]], calls: int, rounds: int) -> dict[str, list[float]]:
    """Milliseconds that the host needs to enqueue one call, of each round; the device is drained between rounds.

    Candidates are interleaved, in turns from the first to the last and back, so that none always follows the same one.
    """
    calls = calls if DEVICE.type == "cuda" else 2
    for call in candidates.values():
        for _ in range(20 if DEVICE.type == "cuda" else 1):
            call()
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    gc.collect()
    gc.disable()
    try:
        for number in range(_enough(rounds)):
            for name, call in list(candidates.items())[:: -1 if number % 2 else 1]:
                synchronize()
                start = time.perf_counter()
                for _ in range(calls):
                    call()
                samples[name].append((time.perf_counter() - start) / calls * 1e3)
                synchronize()
    finally:
        gc.enable()
    return samples


def ratio_by_rounds(samples: Sequence[float], others: Sequence[float]) -> float:
    """How many times as long as others: the median over rounds, so that what slows a whole round is not in it."""
    return statistics.median(a / b for a, b in zip(samples, others, strict=True))
