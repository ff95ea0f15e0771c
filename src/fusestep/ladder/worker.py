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
from collections.abc import Callable
from dataclasses import asdict
from typing import IO, Any, NoReturn

import torch
import torch._dynamo  # torch.optim imports it in its first step, which would count as that rung's

from fusestep.errors import UserError
from fusestep.fp8 import count_saturation
from fusestep.graph import train_step
from fusestep.ladder import ceilings, profiling, torch_step
from fusestep.ladder.described import describe
from fusestep.ladder.last_words import last_words, words_of_abort
from fusestep.ladder.memory import PeakOfSteps
from fusestep.ladder.own import Own
from fusestep.ladder.peer_steps import peer_step
from fusestep.ladder.request import Request
from fusestep.ladder.step import Step
from fusestep.ladder.subject import BuiltIn, Subject
from fusestep.ladder.timing import clock_of, measure
from fusestep.ladder.torch_step import TorchStep, native_step
from fusestep.ladder.turns import take_turn
from fusestep.memory import GIB, ran_out, ran_out_on_gpu
from fusestep.models import GPTConfig

#: Timed steps rotate through this many batches, made beforehand: loading data is not what a rung changes.
_BATCHES = 4

#: Losses of the first steps that are kept: as many as any process takes before it is timed.
OPENING = 7

#: A GPU is warmed up for at least this long, so that its clocks have settled.
_WARMUP_MS = 500.0

#: Steps after the first until a graph is captured: one more than the longest of the warm-ups before a capture.
_STEPS_TO_CAPTURE = 1 + max(train_step.WARM_UP, torch_step.WARM_UP)

#: How much of a failed process's stderr is kept.
_LOG_CHARACTERS = 8000

#: Whether requests are served by forks, or each by a worker that then ends.
FORKS = sys.platform.startswith("linux")


#: Told what is known so far of a reply.
Early = Callable[[dict[str, Any]], None]


def perform(request: Request, early: Early = lambda _known: None) -> dict[str, Any]:
    """Run a request in this process; its losses, what `Round` of `fusestep.ladder.measured` reads, or `Ceilings`.

    `early` is told the times before the kernels are looked at: a profiler that takes its process with it must not take
    those.
    """
    device = torch.device(request.device)
    if request.task == "ceilings":
        return asdict(ceilings.measure(device))
    peak = PeakOfSteps(device)
    subject = _subject(request)
    if request.task == "describe":
        assert isinstance(subject, Own)
        return describe(subject, device, request.rungs)
    if request.task == "gate":
        count_saturation(request.fp8_stats)
        rung = Step(request.recipe, subject, device, request.seed)
        stream = subject.batches(device, reverse=request.reverse)
        # Read once, at the end: reading each loss would synchronise every step.
        losses = torch.stack([rung(*next(stream)).float().reshape(()) for _ in range(request.steps)]).tolist()
        return {"losses": losses, "saturation": rung.worst_saturation(), "memory": _memory(device)}

    if request.recipe.compiled and request.beside > 1:
        _share_cores(request.beside)
    step = _step(request, subject, device)
    rotation = itertools.cycle(list(itertools.islice(subject.batches(device), _BATCHES)))
    opening: list[torch.Tensor] = []

    def one_step() -> None:
        loss = step(*next(rotation))
        if len(opening) < OPENING:
            opening.append(loss)

    turn = request.turn
    timing = measure(
        one_step,
        clock_of(device),
        steps=request.steps,
        warmup_ms=_WARMUP_MS if device.type == "cuda" else 0.0,
        enough_ms=request.enough_ms,
        ready=None if turn is None else (_STEPS_TO_CAPTURE if request.recipe.graph else 0, lambda: take_turn(turn)),
        after_warmup=peak.begin,
        after_windows=peak.end,
    )
    reply = {
        "timing": asdict(timing),
        "peak": asdict(peak.result),
        "parts": [asdict(part) for part in step.parts()],
        "optimizer": step.optimizer_in_words(),
        "threads": torch.get_num_threads(),
        "opening": [float(loss) for loss in opening],
        "kernels": [],
        "unprofiled": "",
    }
    if request.profiled:
        early(reply)
        reply["kernels"], reply["unprofiled"] = _profiled(one_step, device)
    return reply


def _memory(device: torch.device) -> dict[str, int] | None:
    """Bytes of a GPU that this process took and that are free beside it; None on a CPU."""
    if device.type != "cuda":
        return None
    return {"reserved": torch.cuda.max_memory_reserved(device), "free": torch.cuda.mem_get_info(device)[0]}


def _share_cores(processes: int) -> None:
    """Have torch.compile start no more compilers than this process's share of the cores."""
    import torch._inductor.config as inductor

    inductor.compile_threads = max(1, (os.cpu_count() or 1) // processes)


def _subject(request: Request) -> Subject:
    if request.factory is not None:
        return Own(request.factory, request.batch, request.seed)
    assert request.model is not None
    assert request.batch is not None
    return BuiltIn(GPTConfig(**request.model), request.data, request.batch, request.seed)


def _step(request: Request, subject: Subject, device: torch.device) -> Step | TorchStep:
    """A rung's step, a peer's, or native PyTorch's."""
    if request.recipe.peer:
        return peer_step(request.recipe, subject, device, request.seed)
    make = native_step if request.recipe.optimizer == "torch-fused" else Step
    return make(request.recipe, subject, device, request.seed)


def _profiled(step: Callable[[], object], device: torch.device) -> tuple[list[dict[str, Any]], str]:
    """The kernels of a step; where this machine lets nobody look, none, and the sentence that says so."""
    try:
        return [asdict(kernel) for kernel in profiling.measure(step, device)], ""
    except RuntimeError as error:
        if ran_out(error):
            return [], "profiling needs more memory than is left"
        return [], str(error).partition("\n")[0]


def answer(text: str, early: Early = lambda _known: None) -> dict[str, Any]:
    """The reply to a request: {"done": …}, or {"failed": one sentence} for what a person can mend.

    A defect raises, which ends the process; its status and its last words on stderr tell.
    """
    request = Request.from_json(text)
    mend = (
        "lower --batch, or let the factory make smaller batches or a smaller model."
        if request.factory is not None
        else f"lower --batch (now {request.batch}) or choose a smaller --preset."
    )
    try:
        return {"done": perform(request, lambda known: early({"done": known}))}
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
        return _reply(code, output.read().splitlines(), errors.read())


def _reply(code: int, lines: list[str], log: str) -> dict[str, Any]:
    """What a process said last, if it ended well; else its times where it had told them, or the failure."""
    if code == 0:
        whole: dict[str, Any] = json.loads(lines[-1])
        return whole
    failed = failure(code, log)
    if not lines:
        return failed
    known: dict[str, Any] = json.loads(lines[0])
    known["done"]["unprofiled"] = f"the profiler ended its process: {failed['failed'].rstrip('.')}"
    return known | {"log": failed["log"]}


def _be_child(server: int, line: str, output: IO[str], errors: IO[str]) -> NoReturn:
    """The forked process's life; it must never return into its parent's loop."""
    code = 1
    try:
        _end_with_parent(server)
        os.dup2(errors.fileno(), 1)
        os.dup2(errors.fileno(), 2)

        def tell(reply: dict[str, Any]) -> None:
            output.write(json.dumps(reply) + "\n")
            output.flush()

        tell(answer(line, early=tell))
        code = 0
    except BaseException:  # whatever it is, the parent tells it
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def failure(code: int, log: str) -> dict[str, Any]:
    """What is said of a process that ended with `code` and no reply."""
    if code < 0:
        why, words = f"its process was killed by {signal.Signals(-code).name}", words_of_abort(log)
        if -code == signal.SIGKILL:
            why += ", which is what a system does that runs out of memory"
    else:
        why, words = f"its process ended with status {code}", last_words(log)
    why += f": {words.rstrip('.')}" if words else ""
    kept = log[-_LOG_CHARACTERS:]
    # From the start of a line: half a path could not be told from another.
    return {"failed": why + ".", "log": kept if len(kept) == len(log) else kept.partition("\n")[2] or kept}


def _end_with_parent(parent: int) -> None:
    """Have Linux end this process when `parent`, which started it, ends, however that one ends."""
    if FORKS:
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before it could be watched
            os._exit(1)


if __name__ == "__main__":
    main()
