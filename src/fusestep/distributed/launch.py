"""Joining the processes that a launcher started, on PyTorch's own engine.

torchrun (or whatever sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT) starts a process for each GPU; `join` makes
one world of them: a process group for the tensors (NCCL on GPUs, gloo on CPUs), and a store, a small table of texts,
for everything that is said beside: who is there, who failed, what rank 0 decided. Nothing that comes out of the store
is unpickled. A process that nobody launched is a world of one.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from fusestep.distributed.failures import Watch, Whereabouts, wait_for
from fusestep.errors import UserError

#: Seconds between two looks at the store while a rank waits for what another one says: at first, and at most.
SHORTEST_WAIT, LONGEST_WAIT = 0.005, 0.25

#: Seconds that a process group takes at most to make, with many ranks or much else to do.
START = 120.0


def is_launched() -> bool:
    """Whether a launcher such as torchrun started this process as one of several (or as the only one)."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launched_size() -> int:
    """How many processes the launcher started; 1 without one."""
    return _number("WORLD_SIZE", 1) if is_launched() else 1


def launched_rank() -> int:
    """The rank that the launcher gave this process; 0 without one."""
    return _number("RANK", 0) if is_launched() else 0


def launched_local_rank() -> int:
    """The rank among the processes of this machine; 0 without a launcher."""
    return _number("LOCAL_RANK", launched_rank()) if is_launched() else 0


def restarts() -> int:
    """How often torchrun has started these processes anew after one of them failed."""
    return _number("TORCHELASTIC_RESTART_COUNT", 0)


@dataclass
class World:
    """The processes that work together, as one of them sees it.

    Attributes:
        rank, size: this process among all; local_rank: among those of its machine.
        device: where this process computes.
        timeout: seconds that no rank may stay behind or silent.
        watch: tells of failures, both ways.
    """

    rank: int
    size: int
    local_rank: int
    device: torch.device
    timeout: float
    store: Store
    watch: Watch
    _said: int = 0

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes and speaks for all."""
        return self.rank == 0

    def from_first(self, call: Callable[[], Any]) -> Any:
        """What `call` returns on rank 0, on every rank; it is called there alone and returns what JSON can hold.

        Raises: on rank 0 what `call` raised; elsewhere PeerError, when a rank failed meanwhile.
        """
        key = self._key("said")
        if self.is_first:
            value = call()
            self.store.set(key, json.dumps(value))
            return value
        self._wait_until(lambda: self.store.check([key]))
        return json.loads(self.store.get(key))

    def gathered(self, value: Any) -> list[Any]:
        """What each rank gives, by rank, on every rank; values that JSON can hold.

        Raises: PeerError when a rank failed meanwhile.
        """
        key = self._key("given")
        self.store.set(f"{key}/{self.rank}", json.dumps(value))
        keys = [f"{key}/{rank}" for rank in range(self.size)]
        self._wait_until(lambda: self.store.check(keys))
        return [json.loads(self.store.get(one)) for one in keys]

    def meet(self) -> None:
        """Go on when every rank has come here. Raises: PeerError when a rank failed meanwhile."""
        key = self._key("met")
        self.store.add(key, 1)
        self._wait_until(lambda: self.store.add(key, 0) >= self.size)

    def _key(self, kind: str) -> str:
        self._said += 1
        return f"{kind}/{self._said}"

    def _wait_until(self, has_come: Callable[[], bool]) -> None:
        pause = SHORTEST_WAIT
        while not has_come():
            self.watch.check()
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_WAIT)


@contextmanager
def join(device_type: str, timeout: float, ending: Callable[[], str] = lambda: "") -> Iterator[World]:
    """Be one rank of the world within; the process group is gone afterwards.

    Whatever is raised within is told to all ranks before it passes; where another rank failed first, PeerError is
    raised in its place. A rank that cannot raise, since it waits for one that failed, is ended after a while.

    Args:
        device_type: "cuda", of which each process of a machine takes one, or "cpu".
        timeout: seconds; see World.
        ending: how sentences about a failure end, such as where the last checkpoint is.

    Raises: UserError for a launch that cannot work.
    """
    if distributed.is_initialized():
        raise UserError(
            "a torch.distributed process group is there already; call destroy_process_group() first, as fusestep "
            "makes its own."
        )
    device = _device(device_type)
    rank, size = launched_rank(), launched_size()
    host, prefix = _open_store(rank, size, timeout)
    store = PrefixStore(prefix, host)
    _roll_call(store, rank, size, timeout)
    known: Any = host  # whose types lack `clone`
    beating = PrefixStore(prefix, known.clone() if isinstance(host, TCPStore) else host)
    watch = Watch(beating, rank, size, timeout, ending, local_rank=launched_local_rank())
    try:
        with watch:
            watch.at("making the process group", patience=START)
            distributed.init_process_group(
                "nccl" if device.type == "cuda" else "gloo",
                store=PrefixStore("group", store),
                rank=rank,
                world_size=size,
                # The watch speaks first, and names the rank.
                timeout=timedelta(seconds=max(timeout, START) + 30.0),
                device_id=device if device.type == "cuda" else None,
            )
            world = World(rank, size, launched_local_rank(), device, timeout, store, watch)
            yield world
            # All leave together: a launcher that sees one process end before its time ends the others.
            world.meet()
            watch.leave()
            distributed.destroy_process_group()
    except BaseException:
        # NCCL would wait for what never comes; the process is about to end, and its group with it.
        if device.type != "cuda" and distributed.is_initialized():
            distributed.destroy_process_group()
        raise
    if rank == 0:
        # It may be this process that holds the store which the others say goodbye to.
        wait_for(store, [f"left/{other}" for other in range(1, size)], min(timeout, 10.0))


def _open_store(rank: int, size: int, timeout: float) -> tuple[Store, str]:
    """The launcher's store, and under which prefix this start of the processes speaks there."""
    if not is_launched():
        return HashStore(), "fusestep"
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise UserError(
            f"RANK and WORLD_SIZE are set and {' and '.join(missing)} not; start the processes with torchrun."
        )
    try:
        store = TCPStore(
            os.environ["MASTER_ADDR"],
            _number("MASTER_PORT", 0),
            size,
            # torchrun holds the store itself, so that it outlives any of the processes.
            is_master=rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except distributed.DistError as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise UserError(
            f"rank {rank} of {size} cannot reach the launcher's store at {address} ({str(error).splitlines()[0]}); "
            "check that this machine can reach that one, and that rank 0 runs."
        ) from error
    return store, f"fusestep/{restarts()}"


def _roll_call(store: Store, rank: int, size: int, timeout: float) -> None:
    """Wait for every rank to say that it is there.

    Raises: UserError that names those that did not come in time.
    """
    store.set(f"here/{rank}", Whereabouts.of_this_process().to_text())
    deadline, pause = time.monotonic() + timeout, SHORTEST_WAIT
    missing = [other for other in range(size) if other != rank]
    while missing:
        missing = [other for other in missing if not store.check([f"here/{other}"])]
        if missing and time.monotonic() > deadline:
            names = ", ".join(map(str, missing[:8])) + (", …" if len(missing) > 8 else "")
            raise UserError(
                f"of {size} ranks {names} did not come within {timeout:g} s (this is rank {rank} on "
                f"{socket.gethostname()}); look at their output, or raise --timeout."
            )
        time.sleep(pause if missing else 0.0)
        pause = min(2 * pause, LONGEST_WAIT)


def _device(device_type: str) -> torch.device:
    if device_type != "cuda":
        return torch.device("cpu")
    local_rank, count = launched_local_rank(), torch.cuda.device_count()
    if local_rank >= count:
        raise UserError(
            f"local rank {local_rank} has no GPU on {socket.gethostname()}, which has {count}; start {count} processes "
            "a machine (torchrun --nproc-per-node), or pass --device cpu."
        )
    device = torch.device("cuda", local_rank if is_launched() else torch.cuda.current_device())
    torch.cuda.set_device(device)
    return device


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise UserError(f"{name} is {text!r} in the environment; start the processes with torchrun.") from None
