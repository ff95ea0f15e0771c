"""Run a function in several processes that share one group, for the tests: gloo on CPUs, NCCL on GPUs.

    def check(rank: int, folder: Path) -> float: ...

    results = run_ranks(check, 2, tmp_path)      # [check(0, tmp_path), check(1, tmp_path)]

The function lives at the top of a test's file. Each start is a rendezvous of fresh processes, forked from a server
that has imported torch once, so it costs a fraction of a second; still, put many checks into one. Every wait has an
end: a rank that fails, dies or is slow ends all, and each rank's traceback is in the error.

A test that takes the fixture `ranks_device` runs once more where there are GPUs (`-m gpu`), each rank on one of its
own, where tensors then lie unless they are put elsewhere. With fewer GPUs than ranks it is skipped, with a sentence.
"""

from __future__ import annotations

import importlib.util
import io
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

#: What the server of processes imports before it forks any. None of it may start a thread.
PRELOADED = [
    "torch.distributed.tensor.parallel",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict",
    "torch._dynamo",
    "numpy.random",
    "pytest",
    "fusestep.nn",
    "fusestep.optim",
    "fusestep.train",
]

#: Where ranks compute, "cpu" or "cuda"; of a rank itself too. The fixture `ranks_device` changes it.
device_type = "cpu"

#: Kernels are compiled on a GPU, by each rank.
SLOWER_ON_GPU = 4

#: How long the other ranks may still speak after one has failed, in seconds.
GRACE = 5.0


@dataclass
class Outcome:
    """What became of one rank: a result, a traceback, or neither when it died or was stopped."""

    rank: int
    result: Any = None
    failure: str | None = None
    exit_code: int | None = None
    stopped: bool = False

    def words(self) -> str:
        if self.failure is not None:
            return f"rank {self.rank} failed:\n{self.failure}"
        if self.stopped:
            return f"rank {self.rank} was stopped: it had not ended"
        if self.exit_code:
            return f"rank {self.rank} died with exit code {self.exit_code}"
        return f"rank {self.rank} ended well"


class RanksFailedError(AssertionError):
    """Not all ranks gave a result; `outcomes` holds what became of each."""

    def __init__(self, outcomes: list[Outcome]) -> None:
        super().__init__("\n".join(["", *(one.words() for one in outcomes)]))
        self.outcomes = outcomes


@cache
def _fork_server() -> ForkServerContext:
    """The server of processes, once it has imported what it is to: seconds that no rank's timeout should count."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    first = context.Process(target=int)
    first.start()
    first.join()
    return context


def run_ranks(
    function: Callable[..., Any],
    ranks: int,
    *arguments: Any,
    timeout: float = 60.0,
    group_timeout: float = 30.0,
    environment: Mapping[str, str] | None = None,
    places: bool = True,
) -> list[Any]:
    """Call `function(rank, *arguments)` in `ranks` processes of one group and return what each returned, by rank.

    Results and arguments are pickled; tensors travel by value. `timeout` (seconds) is for the whole call, but for the
    start of the server, and `group_timeout` for one collective. `environment` is set in the processes before anything
    else. `places`: on GPUs, tensors lie on the rank's unless they are put elsewhere (`placed`). torch has one thread in
    each and the same seed in all. Raises RanksFailedError when a rank raised, died or did not end in time.
    """
    if device_type == "cuda":
        need_gpus(ranks)
        timeout, group_timeout = SLOWER_ON_GPU * timeout, SLOWER_ON_GPU * group_timeout
    context = _fork_server()
    deadline = time.monotonic() + timeout
    pickled = pickle.dumps(arguments)  # multiprocessing's own way would share the memory of tensors
    with tempfile.TemporaryDirectory() as folder:
        processes, pipes = [], []
        for rank in range(ranks):
            receiver, sender = context.Pipe(duplex=False)
            job = _Job(
                Path(sys.modules[function.__module__].__file__ or ""),
                function.__qualname__,
                pickled,
                rank,
                ranks,
                str(Path(folder, "rendezvous")),
                timeout,
                group_timeout,
                {**(environment or {})},
                device_type,
                places,
            )
            process = context.Process(target=_run, args=(job, sender), daemon=True)
            process.start()
            sender.close()
            processes.append(process)
            pipes.append(receiver)
        try:
            outcomes = _gather(processes, pipes, deadline)
        finally:
            for process, pipe in zip(processes, pipes, strict=True):
                process.kill()
                process.join()
                process.close()
                pipe.close()
    if any(one.failure is not None or one.stopped or one.exit_code for one in outcomes):
        raise RanksFailedError(outcomes)
    return [one.result for one in outcomes]


def need_gpus(ranks: int) -> None:
    """Skip the test where there are fewer."""
    count = torch.cuda.device_count()
    if count < ranks:
        pytest.skip(f"{ranks} ranks need a GPU each, and there {'is' if count == 1 else 'are'} {count}")


def _gather(processes: list[Any], pipes: list[Connection], deadline: float) -> list[Outcome]:
    """Wait until all ranks have ended, until the deadline, or until a while after the first failure."""
    outcomes = [Outcome(rank) for rank in range(len(processes))]
    running = dict(enumerate(processes))
    while running and (left := deadline - time.monotonic()) > 0:
        wait([pipes[rank] for rank in running], left)
        for rank in [rank for rank in running if pipes[rank].poll()]:
            try:
                kind, content = torch.load(io.BytesIO(pipes[rank].recv_bytes()), weights_only=False)
            except EOFError:
                processes[rank].join(GRACE)
                outcomes[rank].exit_code = processes[rank].exitcode or -signal.SIGABRT
            else:
                setattr(outcomes[rank], kind, content)
                processes[rank].join(GRACE)
            del running[rank]
            if outcomes[rank].failure is not None or outcomes[rank].exit_code:
                deadline = min(deadline, time.monotonic() + GRACE)
    for rank in running:
        outcomes[rank].stopped = True
    return outcomes


@dataclass
class _Job:
    """What one process is told."""

    file: Path
    name: str
    arguments: bytes
    rank: int
    ranks: int
    rendezvous: str
    timeout: float
    group_timeout: float
    environment: dict[str, str]
    device_type: str
    places: bool


def _run(job: _Job, sender: Connection) -> None:
    """One process: join the group, call the function, send what came of it."""
    if hasattr(signal, "SIGALRM"):
        signal.alarm(int(job.timeout) + 10)  # it ends, even where the test's own process is gone
    kind, content = "result", None
    try:
        _prepare(job)
        function, arguments = _resolve(job), pickle.loads(job.arguments)
        if job.places and job.device_type == "cuda":
            with placed(job.rank):
                content = function(job.rank, *tree_map_only(Tensor, lambda one: one.to(f"cuda:{job.rank}"), arguments))
            content = tree_map_only(Tensor, Tensor.cpu, content)
        else:
            content = function(job.rank, *arguments)
    except BaseException:
        kind, content = "failure", traceback.format_exc()
    stream = io.BytesIO()
    torch.save((kind, content), stream)
    sender.send_bytes(stream.getvalue())
    if kind == "result" and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads of a broken group may never end


def _prepare(job: _Job) -> None:
    os.environ.update(
        RANK=str(job.rank),
        LOCAL_RANK=str(job.rank),
        WORLD_SIZE=str(job.ranks),
        LOCAL_WORLD_SIZE=str(job.ranks),
        GLOO_SOCKET_IFNAME="lo" if sys.platform == "linux" else "lo0",
    )
    os.environ.update(job.environment)
    global device_type
    device_type = job.device_type
    device = None
    if device_type == "cuda":
        # The set-up of NVLink multicast may hang on shared hosts.
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        device = torch.device("cuda", job.rank)
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    torch.manual_seed(20240229)
    torch.distributed.init_process_group(
        "gloo" if device is None else "nccl",
        device_id=device,
        store=torch.distributed.FileStore(job.rendezvous, job.ranks),
        rank=job.rank,
        world_size=job.ranks,
        timeout=timedelta(seconds=job.group_timeout),
    )


@contextmanager
def placed(index: int = 0) -> Iterator[None]:
    """Where ranks compute on GPUs, tensors lie on this one within, unless they are put elsewhere.

    Random ones are drawn on the CPU, so that they have the same values everywhere.
    """
    if device_type == "cpu":
        yield
        return
    torch.set_default_device(torch.device("cuda", index))
    try:
        with _DrawnOnTheHost():
            yield
    finally:
        torch.set_default_device(None)


class _DrawnOnTheHost(TorchFunctionMode):
    DRAW = (torch.rand, torch.randn, torch.randint, torch.randperm, torch.normal)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = {**(kwargs or {})}
        if func not in self.DRAW or options.get("device") is not None:
            return func(*args, **options)
        needs_grad = options.pop("requires_grad", False)
        made = func(*args, **{**options, "device": "cpu"})
        return made.to(torch.get_default_device()).requires_grad_(needs_grad)


def near(tolerance: float) -> float:
    """A tolerance of results in fp32: a GPU's kernels add up in other orders, and attention's round more coarsely."""
    return tolerance * (10 if device_type == "cuda" else 1)


def module_of(file: Path) -> ModuleType:
    """A file of tests as a module, in any process: pytest imports them under names that no other process knows."""
    name = f"ranks_{file.stem}"
    module = sys.modules.get(name)
    if module is None:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return module


def _resolve(job: _Job) -> Callable[..., Any]:
    """The function, from its file."""
    found: ModuleType | Callable[..., Any] = module_of(job.file)
    for part in job.name.split("."):
        found = getattr(found, part)
    assert callable(found)
    return found
