"""The process that runs one rung: `python -m fusestep.ladder.worker`, requests on stdin, replies on stdout.

One request a line, one reply a line, as JSON. Every request has a process of its own, so that nothing of an earlier
rung (peak memory, compiled code, the allocator's pools, a library's handles) is in it. On Linux that process is a fork
of this one, taken before any device is touched: it has the imports, which cost seconds, and nothing else. Elsewhere
this process does one request itself and ends, and the ladder starts another.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import signal
import sys
import tempfile
import traceback
from dataclasses import asdict, dataclass
from typing import IO, Any, Literal, NoReturn

import torch
import torch._dynamo  # torch.optim imports it in its first step, which would count as that rung's

from fusestep.errors import UserError
from fusestep.fp8 import count_saturation
from fusestep.ladder import ceilings
from fusestep.ladder.memory import PeakOfSteps
from fusestep.ladder.rungs import Recipe
from fusestep.ladder.step import Step, batches, parts_that_ran
from fusestep.ladder.timing import clock_of, measure
from fusestep.memory import GIB, ran_out, ran_out_on_gpu
from fusestep.models import GPTConfig

#: Timed steps rotate through this many batches, made beforehand: loading data is not what a rung changes.
_BATCHES = 4

#: A GPU is warmed up for at least this long, so that its clocks have settled.
_WARMUP_MS = 500.0

#: How much of a failed process's stderr is kept.
_LOG_CHARACTERS = 8000

#: Whether requests are served by forks, or each by a worker that then ends.
FORKS = sys.platform.startswith("linux")


@dataclass(frozen=True)
class Request:
    """What to run: the loss curve of a recipe (`gate`), or its times (`time`), over `steps` steps; or `ceilings`,
    for which only the device matters.

    `model` holds the fields of a GPTConfig; `reverse` turns the samples of every batch around; `fp8_stats` counts what
    FP8 saturates while the gate runs, which costs time.
    """

    task: Literal["gate", "time", "ceilings"]
    recipe: Recipe
    model: dict[str, Any]
    data: str
    batch: int
    steps: int
    device: str
    seed: int
    reverse: bool = False
    fp8_stats: bool = False

    @classmethod
    def from_json(cls, text: str) -> Request:
        fields = json.loads(text)
        return cls(**{**fields, "recipe": Recipe(**fields["recipe"])})

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def perform(request: Request) -> dict[str, Any]:
    """Run a request in this process; its losses, what `Round` of `fusestep.ladder.results` reads, or `Ceilings`."""
    device = torch.device(request.device)
    if request.task == "ceilings":
        return asdict(ceilings.measure(device))
    peak = PeakOfSteps(device)
    config = GPTConfig(**request.model)
    stream = batches(
        request.data,
        seed=request.seed,
        batch=request.batch,
        context=config.context,
        device=device,
        reverse=request.reverse,
    )
    if request.task == "gate":
        count_saturation(request.fp8_stats)
        step = Step(request.recipe, config, device, request.seed)
        # Read once, at the end: reading each loss would synchronise every step.
        losses = torch.stack([step(*next(stream)) for _ in range(request.steps)]).tolist()
        return {"losses": losses, "saturation": step.worst_saturation()}

    rotation = itertools.cycle(list(itertools.islice(stream, _BATCHES)))
    step = Step(request.recipe, config, device, request.seed)
    timing = measure(
        lambda: step(*next(rotation)),
        clock_of(device),
        steps=request.steps,
        warmup_ms=_WARMUP_MS if device.type == "cuda" else 0.0,
        after_warmup=peak.begin,
        after_windows=peak.end,
    )
    return {
        "timing": asdict(timing),
        "peak": asdict(peak.result),
        "parts": [asdict(part) for part in parts_that_ran(step)],
        "optimizer": step.optimizer_in_words(),
        "threads": torch.get_num_threads(),
    }


def answer(text: str) -> dict[str, Any]:
    """The reply to a request: {"done": …}, or {"failed": one sentence} for what a person can mend.

    A defect raises, which ends the process; its status and the last line of its stderr tell.
    """
    request = Request.from_json(text)
    mend = f"lower --batch (now {request.batch}) or choose a smaller --preset."
    try:
        return {"done": perform(request)}
    except UserError as error:
        return {"failed": str(error)}
    except (MemoryError, RuntimeError) as error:
        if not ran_out(error):
            raise
        if not ran_out_on_gpu(error):
            return {"failed": f"out of memory on this machine; {mend}"}
        taken = torch.cuda.max_memory_reserved(request.device) / GIB
        total = torch.cuda.get_device_properties(request.device).total_memory / GIB
        return {"failed": f"out of GPU memory after a peak of {taken:.2f} of {total:.2f} GiB; {mend}"}


def main() -> None:
    """Answer the requests on stdin until it ends; replies go to the stdout that this process was started with.

    Its one argument, if there is one, is the process to end with.
    """
    if len(sys.argv) > 1:
        _end_with_parent(int(sys.argv[1]))
    # Whatever a library prints belongs on stderr: stdout carries replies alone.
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        replies.write(json.dumps(_in_child(line) if FORKS else answer(line)) + "\n")
        replies.flush()
        if not FORKS:
            return


def _in_child(line: str) -> dict[str, Any]:
    """Answer in a forked process. One that ends badly becomes a failure in one sentence, its stderr beside it."""
    if torch.cuda.is_initialized():
        raise RuntimeError("CUDA was touched before the fork; a forked process cannot use it then.")
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        server = os.getpid()
        child = os.fork()
        if child == 0:
            _be_child(server, line, output, errors)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        output.seek(0)
        errors.seek(0)
        reply: dict[str, Any] = json.load(output) if code == 0 else failure(code, errors.read())
        return reply


def _be_child(server: int, line: str, output: IO[str], errors: IO[str]) -> NoReturn:
    """The forked process's life; it must never return into its parent's loop."""
    code = 1
    try:
        _end_with_parent(server)
        os.dup2(errors.fileno(), 1)
        os.dup2(errors.fileno(), 2)
        json.dump(answer(line), output)
        output.flush()
        code = 0
    except BaseException:  # whatever it is, the parent tells it
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def failure(code: int, log: str) -> dict[str, Any]:
    """What is said of a process that ended with `code` and no reply."""
    lines = log.strip().splitlines()
    if code < 0:
        why = f"its process was killed by {signal.Signals(-code).name}"
        if -code == signal.SIGKILL:
            why += ", which is what a system does that runs out of memory"
    else:
        why = f"its process ended with status {code}" + (f": {lines[-1].rstrip('.')}" if lines else "")
    return {"failed": why + ".", "log": log[-_LOG_CHARACTERS:]}


def _end_with_parent(parent: int) -> None:
    """Have Linux end this process when `parent`, which started it, ends, however that one ends."""
    if FORKS:
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before it could be watched
            os._exit(1)


if __name__ == "__main__":
    main()
