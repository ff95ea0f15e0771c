"""The ladder's side of its worker processes: send a request, get a reply, leave nothing running."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fusestep.ladder.paths import relative
from fusestep.ladder.request import Request
from fusestep.ladder.worker import FORKS, failure

#: What workers run under where the user has not set it. An OpenMP thread that waits by spinning takes the core from the
#: one that it waits for as soon as anything else runs on the machine: on two busy cores steps took 3 times as long, and
#: some 30 times, where waiting by sleep leaves them their share.
ENVIRONMENT = {"OMP_WAIT_POLICY": "passive"}

COMMAND = (sys.executable, "-m", "fusestep.ladder.worker")


@dataclass(frozen=True)
class Reply:
    """What a request came to: `done`, or the sentence `failed` and what its process last wrote to stderr; `is_late`
    where it was ended for taking too long.
    """

    done: dict[str, Any] | None = None
    failed: str | None = None
    log: str = ""
    is_late: bool = False


def _shareable(reply: Reply) -> Reply:
    """The reply with paths in what its process said that are the same on any machine."""
    done = reply.done
    if done is not None and done.get("unprofiled"):
        done = {**done, "unprofiled": relative(done["unprofiled"])}
    return replace(
        reply, done=done, failed=None if reply.failed is None else relative(reply.failed), log=relative(reply.log)
    )


class Workers:
    """Runs requests one after another, each in a process of its own; a context manager that ends them all.

    A worker that ends without a reply makes a failed request, and the next request gets another worker.
    """

    def __init__(self, command: Sequence[str] = COMMAND) -> None:
        self._command = list(command)
        self._process: subprocess.Popen[str] | None = None
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed by __exit__

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._stop()
        self._errors.close()

    def run(self, request: Request, limit_s: float | None = None) -> Reply:
        """Send a request and wait for its reply, for `limit_s` seconds at most where a limit is given."""
        process = self.start()
        if process.stdin is None or process.stdout is None:
            raise RuntimeError("the worker was started without pipes.")
        # A worker that is gone shows at the read.
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(request.to_json() + "\n")
            process.stdin.flush()
        is_late = threading.Event()

        def end() -> None:
            is_late.set()
            process.kill()  # and with it the fork that works

        timer = None if limit_s is None else threading.Timer(limit_s, end)
        if timer is not None:
            timer.daemon = True
            timer.start()
        line = process.stdout.readline()
        if timer is not None:
            timer.cancel()
        reply = _shareable(Reply(**json.loads(line)) if line else self._failed(process))
        if is_late.is_set() and not line:
            reply = replace(reply, failed=f"it took longer than {limit_s:g} s.", is_late=True)
        if not (line and FORKS) or is_late.is_set():
            self._stop()
        return reply

    def _failed(self, process: subprocess.Popen[str]) -> Reply:
        code = process.wait()
        self._errors.seek(0)
        return Reply(**failure(code, self._errors.read()))

    def start(self) -> subprocess.Popen[str]:
        """Start the worker where none is running, without waiting for it."""
        if self._process is not None:
            return self._process
        self._errors.seek(0)
        self._errors.truncate()
        self._process = subprocess.Popen(
            [*self._command, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**ENVIRONMENT, **os.environ},
            text=True,
            # A session of its own: Ctrl-C reaches the ladder alone, and it ends the worker.
            start_new_session=True,
        )
        return self._process

    def _stop(self) -> None:
        """End the worker; a fork that it is waiting for ends with it."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        process.wait()
