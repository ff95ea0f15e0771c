"""Ranks in processes of their own that take one piece of work after another, none of which can hold up the rest.

A crew is started with its first work. Where a rank raises, dies or is silent for too long, all of its ranks are ended,
the work has failed, and the next one gets a fresh crew. NVLink multicast is off (`ENVIRONMENT`): on shared hosts its
set-up may hang, and a figure should not depend on whether it was to be had.

This module must not touch a device when it is imported: processes are forked after that.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import time
import traceback
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore

from benchmarks.training import ENDING
from fusestep.distributed.failures import PeerError
from fusestep.distributed.launch import join

#: What every rank's environment has, before NCCL is loaded.
ENVIRONMENT = {"NCCL_NVLS_ENABLE": "0"}
#: Seconds that ranks may take to come together, and others may still speak after one has failed.
START, GRACE = 90.0, 6.0
#: What a rank may still have allocated after a work, in bytes; with more the next work gets fresh processes.
LEFT = 256 << 20


class Crew:
    """Ranks 0 to `ranks` - 1 on devices of one type.

    Args:
        life: "module:function"; called as function(world, work, kept) on every rank, where `kept` is a dict of the
            rank's own that lives as long as its process. Rank 0's answer counts, a dict of plain values.
    """

    def __init__(self, ranks: int, device_type: str, life: str) -> None:
        self._ranks, self._device_type, self._life = ranks, device_type, life
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["benchmarks.crew"])
        self._running: list[tuple[Any, Connection]] = []
        self._store: Any = None

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def do(self, work: Any, seconds: float) -> dict[str, Any]:
        """What rank 0 answers to a work within so many seconds, or {"failed": why}."""
        more = 0.0
        if not self._running:
            self._start()
            more = START
        try:
            for _, connection in self._running:
                connection.send((work, seconds))
        except OSError:  # a rank is gone, as is told below
            pass
        answers = self._answers(time.monotonic() + seconds + more)
        if all("answer" in answers.get(rank, {}) for rank in range(self._ranks)):
            if max(one["left"] for one in answers.values()) > LEFT:
                self.end()
            return dict(answers[0]["answer"])
        self.end(GRACE if len(answers) == self._ranks else 0.0)
        return {"failed": self._why(answers, seconds)}

    def end(self, patience: float = ENDING) -> None:
        """Let the ranks leave, and end those that do not within `patience` seconds."""
        for _, connection in self._running:
            try:
                connection.send(None)
            except OSError:
                continue  # it is gone already
        deadline = time.monotonic() + patience
        for process, connection in self._running:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
            process.join()
            connection.close()
        self._running, self._store = [], None

    def _start(self) -> None:
        self._store = TCPStore("127.0.0.1", 0, self._ranks, is_master=True, wait_for_workers=False)
        for rank in range(self._ranks):
            ours, theirs = self._context.Pipe()
            told = (theirs, rank, self._ranks, self._store.port, self._device_type, self._life)
            process = self._context.Process(target=_live, args=told)
            process.start()
            theirs.close()
            self._running.append((process, ours))

    def _why(self, answers: dict[int, dict[str, Any]], seconds: float) -> str:
        """What went wrong first, as far as somebody says."""
        for said in ("failed", "ended"):
            for rank, answer in answers.items():
                if said in answer:
                    return f"rank {rank}: {answer[said]}"
        silent = [str(rank) for rank in range(self._ranks) if "answer" not in answers.get(rank, {})]
        return f"rank {' and '.join(silent)} gave no answer within {seconds:.0f} s"

    def _answers(self, deadline: float) -> dict[int, dict[str, Any]]:
        """What each rank says by then, or soon after one of them has failed."""
        found: dict[int, dict[str, Any]] = {}
        waiting = {connection: rank for rank, (_, connection) in enumerate(self._running)}
        while waiting and (left := deadline - time.monotonic()) > 0:
            for connection in wait(list(waiting), left):
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    found[rank] = connection.recv()
                except (EOFError, ConnectionError):
                    found[rank] = {"ended": "its process ended without a word"}
                if "answer" not in found[rank]:
                    deadline = min(deadline, time.monotonic() + GRACE)
        return found


def _live(connection: Connection, rank: int, ranks: int, port: int, device_type: str, life: str) -> None:
    """A rank's process: join the others, and do what is asked until nothing more is."""
    os.environ |= ENVIRONMENT | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    torch.set_num_threads(1)
    kept: dict[Any, Any] = {}
    try:
        with join(device_type, START) as world:
            module, _, function = life.partition(":")
            do = getattr(importlib.import_module(module), function)
            while True:
                # Whoever asks keeps the time: a rank that waits to be asked is not slow.
                world.watch.at("waiting for work", patience=1e6)
                asked = connection.recv()
                if asked is None:
                    break
                work, seconds = asked
                world.watch.at(str(work), patience=seconds + GRACE)
                answer = do(world, work, kept)
                left = torch.cuda.memory_allocated() if device_type == "cuda" else 0
                connection.send({"answer": answer, "left": left})
    except PeerError:
        connection.send({"another": "failed, and tells by itself"})
    except Exception:
        connection.send({"failed": traceback.format_exc()[-2000:]})
