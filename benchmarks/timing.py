"""How the benchmarks measure: device time from graph replays, host time apart, everything of a row interleaved.

- Device time: a CUDA graph holds `CALLS` calls; a replay is timed with events and divided. No host cost is in it.
  The calls of one graph walk through several sets of tensors, together larger than `L2_MULTIPLE` caches, so that no
  call finds its inputs in the L2 cache (triton#405). Rounds visit the candidates in turn, so that clocks and
  temperature drift over all of them alike.
- Host time: wall time to enqueue a call on tensors so small that the device is always ahead.
- The byte floor: bytes that an operation must move (each input read once, each output written once), over the rate of
  a large device-to-device copy timed eagerly in the same run (a copy inside a captured graph is slower).
"""

from __future__ import annotations

import dataclasses
import gc
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fusestep import durable
from fusestep.ladder import environment

CALLS = 12
ROUNDS = 15
L2_MULTIPLE = 3


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


def copy_rate() -> float:
    """Bytes a second, read plus written, of a 4 GiB device-to-device copy, timed eagerly; the median of 20."""
    source = torch.randn(1 << 30, device="cuda")
    target = torch.empty_like(source)
    samples = []
    for _ in range(25):
        start, end = torch.cuda.Event(True), torch.cuda.Event(True)
        start.record()
        target.copy_(source)
        end.record()
        torch.cuda.synchronize()
        samples.append(start.elapsed_time(end))
    return 2 * source.numel() * source.element_size() / (statistics.median(samples[5:]) * 1e-3)


def sets_needed(bytes_per_call: int) -> int:
    """How many sets of tensors the calls of a graph must walk through to stay out of the L2 cache."""
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    return max(1, min(CALLS, -(-L2_MULTIPLE * cache // bytes_per_call)))


class Graph:
    """`CALLS` calls of one candidate, captured; call k gets k modulo the number of its tensor sets."""

    def __init__(self, call: Callable[[int], Any], stream: torch.cuda.Stream, calls: int = CALLS) -> None:
        self.calls = calls
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                for k in range(calls):
                    call(k)
        stream.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=stream):
            for k in range(calls):
                call(k)

    def milliseconds(self) -> float:
        start, end = torch.cuda.Event(True), torch.cuda.Event(True)
        start.record()
        self.graph.replay()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / self.calls


def device_times(candidates: Mapping[str, Graph], rounds: int = ROUNDS) -> dict[str, Timing]:
    """Replay every candidate once a round, in turn; two rounds of warm-up."""
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    for number in range(rounds + 2):
        for name, graph in candidates.items():
            elapsed = graph.milliseconds()
            if number >= 2:
                samples[name].append(elapsed)
    return {name: Timing.of(values) for name, values in samples.items()}


def host_times(candidates: Mapping[str, Callable[[], Any]], calls: int = 100, rounds: int = 15) -> dict[str, Timing]:
    """Milliseconds that the host needs to enqueue one call; candidates interleaved, device drained between rounds."""
    for call in candidates.values():
        for _ in range(20):
            call()
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for name, call in candidates.items():
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(calls):
                    call()
                samples[name].append((time.perf_counter() - start) / calls * 1e3)
                torch.cuda.synchronize()
    finally:
        gc.enable()
    return {name: Timing.of(values) for name, values in samples.items()}


def write_results(path: Path, part: str, copy: float, rows: list[dict[str, Any]]) -> None:
    """Write one results file whole."""
    document = {
        "schema": 1,
        "part": part,
        "environment": environment.describe(torch.device("cuda", 0)),
        "copy_bytes_per_second": copy,
        "rows": rows,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    durable.write_together({path: json.dumps(document, indent=1) + "\n"})
