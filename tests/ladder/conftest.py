"""Shared by the ladder's tests: made-up results, and a browser that shows a page and tells what came of it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fusestep.ladder.beside import checked, compared
from fusestep.ladder.ceilings import Ceilings
from fusestep.ladder.contenders import PEERS, contenders_of_peer, native
from fusestep.ladder.gate import Verdict
from fusestep.ladder.measured import Round
from fusestep.ladder.memory import Peak
from fusestep.ladder.profiling import Kernel
from fusestep.ladder.results import ContenderResult, Ladder, RungResult
from fusestep.ladder.run import _compared
from fusestep.ladder.rungs import RUNGS, recipe_of
from fusestep.ladder.step import Part
from fusestep.ladder.timing import Timing

OPENING = (5.0, 4.9, 4.8, 4.7, 4.6, 4.5, 4.4)

SERVED = {"scaled_mm": "native", "train_step": "graph"}


@dataclass(frozen=True)
class Made:
    """A rung as a test wants it: the times of its rounds and what else decides."""

    times: tuple[float, ...] = (10.0, 10.1, 9.9)
    passed: bool = True
    failure: str | None = None
    implementation: str | None = None
    busy: float | tuple[float, ...] | None = None
    host: float = 0.9
    reserved: int | None = None
    stable: bool = True
    losses: tuple[float, ...] = (5.0, 4.0, 3.5)


@pytest.fixture
def make_ladder() -> Callable[..., Ladder]:
    """Makes a ladder of the named rungs, compared as a real one is.

    `busy` is the share of a step that a GPU is busy, or its ms in each round, `host` the share that the host queues;
    with `gpu` every rung has device times and reserved memory.
    `beside` has the times of contenders by their names, and `opening` their first losses.
    """

    def make(
        rungs: Mapping[str, Made],
        *,
        gpu: bool = True,
        beside: Mapping[str, tuple[float, ...]] | None = None,
        opening: tuple[float, ...] = OPENING,
        **plan: Any,
    ) -> Ladder:
        registry = {rung.name: rung for rung in RUNGS}
        results = {}
        for name, made in rungs.items():
            result = RungResult(registry[name], recipe_of(name, RUNGS, list(rungs)), 8192, flops=10**12, moved=10**10)
            if made.failure is not None:
                results[name] = replace(result, failure=made.failure)
                continue
            results[name] = replace(
                result,
                losses=made.losses,
                verdict=Verdict(made.passed, 3.5, 0.0003, 0.002, 0.0, "loss 0.0300% from rung 1, allowed 0.200%")
                if made.passed
                else Verdict(False, 9.0, 0.5, 0.002, 0.0, "its loss after 3 steps is 9.0000"),
                rounds=tuple(_round(made, ms, gpu, number) for number, ms in enumerate(made.times)),
            )
        rounds = max((len(made.times) for made in rungs.values()), default=0)
        device = torch.device("cuda" if gpu else "cpu")
        known = [native(name, device, compiled=gpu) for name in ("native-fp32", "native-amp", "native-bf16")]
        known += [one for peer in PEERS for one in contenders_of_peer(peer, device)]
        others = []
        for name, times in (beside or {}).items():
            contender = next(one for one in known if one.name == name)
            measured = tuple(replace(_round(Made(), ms, gpu), parts=(), opening=opening) for ms in times)
            result = ContenderResult(contender, contender.attempts[0], 8192, measured, flops=10**12, moved=10**10)
            others.append(checked(result, next(iter(results.values()))))
        return Ladder(
            contenders=tuple(others),
            plan={
                "preset": "mini",
                "parameters": 28_900_000,
                "model": {"layers": 4, "width": 768, "context": 256, "vocab_size": 96},
                "batch": 32,
                "tokens_per_step": 8192,
                "rounds": rounds,
                "steps": 36,
                "gate_steps": 200,
                "data": "synthetic",
                "flops_formula": "FLOPs a token",
                "bytes_formula": "bytes a step",
                **plan,
            },
            environment={
                "gpu": "A GPU" if gpu else None,
                "cpu": "a CPU",
                "threads": 2,
                "torch": "2.11.0",
                "triton": "3.6.0",
                "driver": "570",
            },
            rungs=compared(_compared(results, RUNGS), others, RUNGS),
            notes=("A note.",),
            ceilings=Ceilings({"fp32": 5e13, "bf16": 7e14, "fp8": 1.2e15}, 4e12) if gpu else None,
        )

    return make


def _round(made: Made, ms: float, gpu: bool, number: int = 0) -> Round:
    parts = [
        Part(rung.fused, made.implementation or SERVED.get(rung.fused, "triton"), "as the test says")
        for rung in RUNGS
        if rung.fused is not None
    ]
    busy = made.busy[number] if isinstance(made.busy, tuple) else ms * (0.98 if made.busy is None else made.busy)
    device = busy if gpu else None
    reserved = (made.reserved or 4000 * 2**20) if gpu else None
    return Round(
        Timing(800.0, 6, made.stable, ((1, ms), (2, 2 * ms)), (ms,) * 3, made.host * ms if gpu else None, device),
        Peak(reserved, reserved, 900 * 2**20, 300 * 2**20),
        tuple(parts),
        "torch.optim.AdamW",
        2,
        OPENING,
        (Kernel("void gemm<float>(float*)", 8.0, 0.6 * ms, 0.6), Kernel("norm", 2.0, 0.1 * ms, 0.1)),
    )


@dataclass
class Page:
    """A page in a browser, loaded: what it asked the network for, and what went wrong in it."""

    evaluate: Callable[[str], Any]
    press: Callable[[str], None]
    requests: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


class Chromium:
    """A headless Chromium, spoken to through its debugging pipe: messages in JSON that end with a zero byte."""

    def __init__(self, program: str, profile: Path) -> None:
        # The browser reads from its descriptor 3 and writes to 4; above 9 nothing is in the way of those.
        ours, theirs = [], []
        for kept, given in (reversed(os.pipe()), os.pipe()):
            theirs.append(fcntl.fcntl(given, fcntl.F_DUPFD, 10))
            os.close(given)
            ours.append(kept)
        self._write, self._read = ours
        renumber = "import os, sys; [os.dup2(int(n), k) for k, n in ((3, sys.argv[1]), (4, sys.argv[2]))]"
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-c", renumber + "; os.execv(sys.argv[3], sys.argv[3:])", *map(str, theirs)),
                *(program, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
                *("--no-first-run", f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank"),
            ],
            pass_fds=theirs,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for descriptor in theirs:
            os.close(descriptor)
        self._buffer = b""
        self._number = 0
        self._events: list[dict[str, Any]] = []

    def close(self) -> None:
        self.call("Browser.close")
        try:
            self._process.wait(timeout=20)
        finally:
            self._process.kill()
            self._process.wait()
            os.close(self._write)
            os.close(self._read)

    def open(self, file: Path, *, width: int = 1200, scheme: str = "light") -> Page:
        """Show a file in a fresh page of that width, in a light or dark scheme, and wait until it is loaded."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable", session)
        self.call("Emulation.setEmulatedMedia", session, features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call(
            "Emulation.setDeviceMetricsOverride",
            session,
            width=width,
            height=800,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        self._events.clear()
        self.call("Page.navigate", session, url=file.as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self._events):
            self._receive()
        page = Page(lambda script: self._evaluate(session, script, page), lambda key: self._press(session, key))
        # What the load has told comes before this answer.
        page.evaluate("1")
        return page

    def _evaluate(self, session: str, script: str, page: Page) -> Any:
        answer = self.call("Runtime.evaluate", session, expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        for event in self._events:
            told = event["params"]
            if event["method"] == "Network.requestWillBeSent":
                page.requests.append(told["request"]["url"])
            elif event["method"] == "Runtime.exceptionThrown":
                page.problems.append(json.dumps(told["exceptionDetails"]))
            elif event["method"] == "Runtime.consoleAPICalled":
                page.problems.append(json.dumps(told["args"]))
            elif event["method"] == "Log.entryAdded":
                page.problems.append(json.dumps(told["entry"]))
        self._events.clear()
        return answer["result"].get("value")

    def _press(self, session: str, key: str) -> None:
        """A key of the keyboard, down and up: Tab, Shift+Tab, Enter or Space."""
        codes = {"Tab": ("Tab", 9, ""), "Enter": ("Enter", 13, "\r"), "Space": (" ", 32, " ")}
        *shift, code = key.split("+")
        name, number, text = codes[code]
        pressed = {"key": name, "code": code, "windowsVirtualKeyCode": number, "modifiers": 8 if shift else 0}
        self.call("Input.dispatchKeyEvent", session, type="keyDown", text=text, **pressed)
        self.call("Input.dispatchKeyEvent", session, type="keyUp", **pressed)

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Call a method of the DevTools protocol, and wait for its answer."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        os.write(self._write, json.dumps(message | ({"sessionId": session} if session else {})).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer)
                result: dict[str, Any] = answer["result"]
                return result

    def _receive(self, seconds: float = 60.0) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            chunk = os.read(self._read, 1 << 20) if ready else b""
            if not chunk:
                raise RuntimeError(f"the browser said nothing more within {seconds} s; status {self._process.poll()}")
            self._buffer += chunk
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        if "method" in message:
            self._events.append(message)
        return message


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    """A browser for all tests of a module; they skip where it is not installed."""
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        pytest.skip("Chromium is not installed; Debian has it as the package chromium")
    browser = Chromium(program, tmp_path_factory.mktemp("chromium"))
    with contextlib.closing(browser):
        yield browser


@pytest.fixture
def made() -> type[Made]:
    """What `make_ladder` takes for each rung."""
    return Made
