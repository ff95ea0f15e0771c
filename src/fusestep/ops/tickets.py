"""Column sums that the last program adds up: every program draws a ticket when its part is written.

A kernel of many programs leaves parts of a sum in memory, in fp32. To add them in a second launch costs a few µs, most
of which is the launch. Instead each program, its part written, adds one to a counter of its block of columns; who draws
the last number finds all parts there, adds them in their order, and sets the counter back to zero. Which program that
is does not show in the result.

A part is written before the ticket is drawn by release, and read after it by acquire, at the scope of the GPU; a
barrier on either side carries that from the thread that draws to the others of its program.

Nobody waits for anybody, so programs need not run at the same time. But launches that may do so must never count on the
same counter:

- launches of one stream run one after another and share the stream's counters;
- a launch that a graph captures keeps its counters for ever, since the graph may be replayed on any stream; a graph
  does not overlap itself, and everything else it writes to is its own as well;
- where neither is to be had, the counters are zeroed for the launch, which costs a memset.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from fusestep import hardware
from fusestep.language import tl, triton

#: Counters of a stream; a launch that needs more has them zeroed.
OF_A_STREAM = 4096
#: Counters that are set aside for captured launches at a time, 1 MiB: a graph of a step of 24 layers keeps some 10,000.
SET_ASIDE = 1 << 18
#: Streams that have counters; programs that make ever new ones have them zeroed.
MOST_STREAMS = 256


@triton.jit
def last_of(counter_ptr, parts):
    """Whether this program, which wrote its part, is the last of `parts`; the counter is then zero again."""
    tl.debug_barrier()
    arrived = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu")  # integer ticket
    is_last = arrived == parts - 1
    if is_last:
        tl.store(counter_ptr, 0)
        tl.debug_barrier()
    return is_last


@triton.jit
def sum_of_parts(parts_ptr, parts, stride, column, inside, ROWS: tl.constexpr):
    """The sums of `parts` rows, `stride` apart, at these columns, always in the same order; past the L1 cache, which
    does not see what other multiprocessors write."""
    total = tl.zeros([ROWS, column.shape[0]], tl.float32)
    for start in range(0, parts, ROWS):
        part = start + tl.arange(0, ROWS)[:, None].to(tl.int64)
        there = (part < parts) & inside[None, :]
        total += tl.load(parts_ptr + part * stride + column[None, :], mask=there, other=0.0, cache_modifier=".cg")
    return tl.sum(total, axis=0)


@dataclass(slots=True)
class _Reserve:
    """Counters for captured launches: those from `next` on belong to nobody yet."""

    counters: Tensor
    next: int = 0


_of_streams: dict[tuple[int, int], Tensor | None] = {}
_reserves: dict[int, _Reserve] = {}
_lock = threading.Lock()


def counters(device: torch.device, count: int) -> Tensor:
    """At least `count` counters, int32 and zero, for one launch on the current stream of `device`, which is current."""
    if device.type != "cuda":
        # The interpreter runs programs in the thread that launches.
        key = -1, threading.get_ident()
    else:
        index = torch._C._cuda_getDevice()
        if torch._C._cuda_isCurrentStreamCapturing():
            return _for_capture(device, index, count)
        key = index, torch._C._cuda_getCurrentRawStream(index)
    known = _of_streams.get(key)
    if known is None and key not in _of_streams:
        known = _of_streams[key] = _for_stream(device)
    if device.type == "cuda":
        reserve = _reserves.get(key[0])
        if reserve is None or reserve.next > SET_ASIDE // 2:
            _set_aside(device, key[0])
    return _zeroed(device, count) if known is None or count > OF_A_STREAM else known


def _zeroed(device: torch.device, count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.int32, device=device)


def _lasting(device: torch.device, count: int) -> Tensor:
    """Counters that are kept for ever, zero already whatever stream looks at them.

    A thread and a stream of their own make them: what is allocated on those of the caller may lie in the pool of a
    graph that torch.compile is about to record, which may hold nothing that lasts.
    """
    if device.type != "cuda":
        return _zeroed(device, count)
    index = torch._C._cuda_getDevice()

    def make() -> Tensor:
        # This wait, once a stream, is not one that a user has torch forbid, nor one that TrainStep looks for.
        with hardware.probing(index):
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                made = _zeroed(device, count)
            stream.synchronize()
        return made

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(make).result()


def _for_stream(device: torch.device) -> Tensor | None:
    """The counters of a stream that has none yet; None for one whose handle may come to mean another stream."""
    if len(_of_streams) >= MOST_STREAMS:
        return None
    if device.type == "cuda":
        # Streams of others, whose numbers are even, may be destroyed with work under way; torch's own never are.
        number = torch.cuda.current_stream(device).stream_id
        if number != 0 and number % 2 == 0:
            return None
    return _lasting(device, OF_A_STREAM)


def _set_aside(device: torch.device, index: int) -> None:
    """Make counters for launches that will be captured; those given out before stay in use."""
    made = _lasting(device, SET_ASIDE)
    with _lock:
        _kept.append(made)
        _reserves[index] = _Reserve(made)


#: What graphs count on, for ever.
_kept: list[Tensor] = []


def _for_capture(device: torch.device, index: int, count: int) -> Tensor:
    """Counters for a launch that is being captured; where none are left, the graph's own, which every replay zeroes."""
    size = -(-count // 4) * 4  # 16 bytes, as the launches expect
    with _lock:
        reserve = _reserves.get(index)
        if reserve is not None and reserve.next + size <= SET_ASIDE:
            start = reserve.next
            reserve.next += size
            return reserve.counters[start : start + size]
    return _zeroed(device, count)
