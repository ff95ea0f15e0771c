"""Proof that all ranks reach each other: every collective that training uses, with values that are checked, and timed.

    all_reduce            sums of numbers that differ by rank and place, exact in fp32
    all_gather, reduce_scatter, broadcast
    ring                  send to the next rank, receive from the one before
    links                 the same, one pair after another, so that a slow one has a name
    compute               a product on each rank by itself, so that a slow one has a name

Latency is the median time of a collective of 8 bytes a rank; bandwidth is that of the busiest link, over a median of
large ones, with the bytes that a ring moves: 2 (n − 1) / n of an all-reduce, (n − 1) / n of an all-gather or a
reduce-scatter of the whole, all of the others. Source: NVIDIA's nccl-tests, "Performance" (bus bandwidth).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, distributed

from fusestep.distributed.failures import Whereabouts
from fusestep.distributed.launch import World
from fusestep.tables import counted, table

SCHEMA = 1

#: Elements of fp32 that a rank gives: of a small collective, and of a large one on a CPU and on a GPU.
SMALL, LARGE = 2, {"cpu": 1 << 20, "cuda": 1 << 24}

#: Timed repetitions of each, after WARM_UP ones.
REPEATED, WARM_UP = 10, 2

#: A rank or link that takes so many times the median of all is slow.
SLOW = 2.0

#: More ranks than this are not tried pair by pair.
MOST_LINKS = 64


@dataclass(frozen=True)
class Collective:
    """What became of one collective on all ranks.

    Attributes:
        wrong: the ranks whose values were not what they should be.
        latency: microseconds; bandwidth: GB/s (10⁹ bytes).
    """

    name: str
    wrong: tuple[int, ...]
    latency: float
    bandwidth: float


@dataclass(frozen=True)
class RanksReport:
    """What all ranks found; prints as a page.

    Attributes:
        where: of each rank, its process and machine, and its device.
        slow: ranks and links that take more than SLOW times the median, in words.
    """

    backend: str
    where: tuple[str, ...]
    collectives: tuple[Collective, ...]
    slow: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether every value was right on every rank."""
        return not any(one.wrong for one in self.collectives)

    def as_dict(self) -> dict[str, Any]:
        """Plain values with a `schema` number."""
        return {"schema": SCHEMA, "ok": self.ok, **asdict(self)}

    def __str__(self) -> str:
        size = len(self.where)
        lines = [f"{counted(size, 'rank')} over {self.backend}", ""]
        lines.append(table([(f"rank {rank}", where) for rank, where in enumerate(self.where)], indent="  "))
        rows = [("collective", "latency", "bandwidth", "values")]
        for one in self.collectives:
            verdict = "right on every rank"
            if one.wrong:
                verdict = f"WRONG on rank {', '.join(map(str, one.wrong))}"
            rows.append((one.name, f"{one.latency:,.0f} µs", f"{one.bandwidth:.2f} GB/s", verdict))
        lines += ["", table(rows, indent="  "), ""]
        lines += [f"SLOW: {words}" for words in self.slow]
        wrong = [one.name for one in self.collectives if one.wrong]
        if wrong:
            lines.append(f"WRONG RESULTS: {', '.join(wrong)}. Do not train over these ranks.")
        elif size == 1:
            lines.append("One rank has nobody to reach; start several with torchrun.")
        else:
            lines.append("Every rank reaches every other, and every value is right.")
        return "\n".join(lines)


def probe(world: World, say: Callable[[str], None] = lambda _: None) -> RanksReport:
    """Try every collective; all ranks call this, and all get the report.

    Args:
        say: told in a few words what is being tried.
    """
    device, size = world.device, world.size
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    where = world.gathered(
        f"{Whereabouts.of_this_process()}: {name}{'' if device.index is None else f' {device.index}'}"
    )
    collectives = []
    for title, trial in _TRIALS.items():
        say(title)
        world.watch.at(f"trying {title}", patience=START)
        found: list[list[Any]] = world.gathered(_one(trial, world))
        wrong = tuple(rank for rank, (is_right, _, _) in enumerate(found) if not is_right)
        latency, bandwidth = max(one[1] for one in found), min(one[2] for one in found)
        collectives.append(Collective(title, wrong, latency * 1e6, bandwidth / 1e9))
    say("each rank by itself")
    world.watch.at("computing by itself")
    slow = _slow(world.gathered(_computing(device)), "rank {}")
    if 2 < size <= MOST_LINKS:
        say("links")
        slow += _slow(_links(world), "the link from rank {} to the next")
    return RanksReport(distributed.get_backend(), tuple(where), tuple(collectives), tuple(slow))


# torch 2.13 has new names for these.
_gather: Any = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
_scatter: Any = getattr(distributed, "reduce_scatter_single", None) or distributed.reduce_scatter_tensor

#: Seconds that a backend may take to connect ranks for a kind of collective.
START = 60.0


def _one(trial: Callable[[World, int], tuple[bool, float, float]], world: World) -> tuple[bool, float, float]:
    """(whether the values of both sizes are right, seconds of a small one, bytes a second of a large one)."""
    is_right, latency, _ = trial(world, SMALL)
    is_right_too, seconds, moved = trial(world, LARGE[world.device.type])
    return is_right and is_right_too, latency, moved / seconds


def _numbers(rank: int, count: int, device: torch.device) -> Tensor:
    """Whole numbers that differ by rank and place, small enough that no sum of them is rounded."""
    return (torch.arange(count, device=device) % 13 + 17 * (rank % 101)).float()


def _timed(call: Callable[[], Any], device: torch.device) -> float:
    """The median seconds of a call, its device's work included."""
    samples = []
    for number in range(WARM_UP + REPEATED):
        began = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if number >= WARM_UP:
            samples.append(time.perf_counter() - began)
    return statistics.median(samples)


def _all_reduce(world: World, count: int) -> tuple[bool, float, float]:
    own = _numbers(world.rank, count, world.device)
    total = own.clone()
    distributed.all_reduce(total)
    expected = torch.stack([_numbers(rank, count, world.device).double() for rank in range(world.size)]).sum(0)
    is_right = torch.equal(total.double(), expected)
    seconds = _timed(lambda: distributed.all_reduce(own.clone()), world.device)
    return is_right, seconds, 2 * (world.size - 1) / world.size * own.nbytes


def _all_gather(world: World, count: int) -> tuple[bool, float, float]:
    own = _numbers(world.rank, count, world.device)
    whole = own.new_empty(world.size * count)
    _gather(whole, own)
    expected = torch.cat([_numbers(rank, count, world.device) for rank in range(world.size)])
    is_right = torch.equal(whole, expected)
    seconds = _timed(lambda: _gather(whole, own), world.device)
    return is_right, seconds, (world.size - 1) / world.size * whole.nbytes


def _reduce_scatter(world: World, count: int) -> tuple[bool, float, float]:
    own = _numbers(world.rank, world.size * count, world.device)
    part = own.new_empty(count)
    _scatter(part, own)
    mine = slice(world.rank * count, (world.rank + 1) * count)
    every = [_numbers(rank, world.size * count, world.device)[mine].double() for rank in range(world.size)]
    is_right = torch.equal(part.double(), torch.stack(every).sum(0))
    seconds = _timed(lambda: _scatter(part, own), world.device)
    return is_right, seconds, (world.size - 1) / world.size * own.nbytes


def _broadcast(world: World, count: int) -> tuple[bool, float, float]:
    is_right = True
    for source in {0, world.size - 1}:
        values = _numbers(world.rank, count, world.device)
        distributed.broadcast(values, source)
        is_right &= torch.equal(values, _numbers(source, count, world.device))
    seconds = _timed(lambda: distributed.broadcast(values, 0), world.device)
    return is_right, seconds, values.nbytes if world.size > 1 else 0.0


def _ring(world: World, count: int) -> tuple[bool, float, float]:
    own = _numbers(world.rank, count, world.device)
    before, after = (world.rank - 1) % world.size, (world.rank + 1) % world.size
    received = torch.empty_like(own)

    def pass_on() -> None:
        if world.size == 1:
            received.copy_(own)
            return
        works = distributed.batch_isend_irecv(
            [distributed.P2POp(distributed.isend, own, after), distributed.P2POp(distributed.irecv, received, before)]
        )
        for work in works:
            work.wait()

    pass_on()
    is_right = torch.equal(received, _numbers(before, count, world.device))
    return is_right, _timed(pass_on, world.device), own.nbytes if world.size > 1 else 0.0


_TRIALS: dict[str, Callable[[World, int], tuple[bool, float, float]]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "broadcast": _broadcast,
    "send and receive (ring)": _ring,
}


def _computing(device: torch.device) -> float:
    """Seconds of a product that this rank takes by itself."""
    width = 4096 if device.type == "cuda" else 256
    matrix = torch.ones(width, width, device=device)
    return _timed(lambda: matrix @ matrix, device)


def _links(world: World) -> list[float]:
    """Seconds that each rank needs to send to the next, one after another."""
    values = _numbers(world.rank, LARGE[world.device.type], world.device)
    taken = 0.0
    for sender in range(world.size):
        receiver = (sender + 1) % world.size
        world.watch.at(f"trying the link from rank {sender} to rank {receiver}")
        world.meet()
        if world.rank == sender:
            taken = _timed(lambda to=receiver: distributed.send(values, to), world.device)  # type: ignore[misc]
        elif world.rank == receiver:
            _timed(lambda source=sender: distributed.recv(values, source), world.device)  # type: ignore[misc]
    return world.gathered(taken)


def _slow(seconds: list[float], who: str) -> list[str]:
    """Those that take much longer than the median."""
    usual = statistics.median(seconds)
    return [
        f"{who.format(rank)} takes {taken * 1e3:.2f} ms where the median is {usual * 1e3:.2f} ms"
        for rank, taken in enumerate(seconds)
        if len(seconds) > 1 and taken > SLOW * usual
    ]
