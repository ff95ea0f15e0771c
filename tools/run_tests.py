"""Run the whole test suite: the ordinary tests, then those that run kernels through Triton's interpreter.

    python tools/run_tests.py [PYTEST ARGUMENTS…]

Two processes, because TRITON_INTERPRET is read when a kernel is defined. Both always run; the exit status is 1 when
either failed. Arguments go to both, so a selection may leave one of them without tests, but not both.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PASSED, NO_TESTS = 0, 5  # pytest's exit statuses
CLOSING_LINE = re.compile(r"^=*\s*((?:\d+ \w+|no tests ran).* in [\d.]+s.*?)\s*=*$")


def run(title: str, command: list[str], environment: dict[str, str]) -> tuple[int, str]:
    """Run pytest with its output passed on as it comes; its exit status and closing line."""
    print(f"\n{title}: {' '.join(command[1:])}", flush=True)
    closing = "no closing line"
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            found = CLOSING_LINE.match(line.strip())
            if found:
                closing = found.group(1)
    return process.returncode, closing


def main() -> int:
    arguments = sys.argv[1:]
    pytest = [sys.executable, "-m", "pytest", *arguments]
    # One thread a process: tiny tensors gain nothing from more. Tests that measure a GPU's memory want it alone.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    interpreter = {**environment, "TRITON_INTERPRET": "1"}
    workers = [] if Path("/dev/nvidiactl").exists() else ["-n", "2"]

    started = time.monotonic()
    results = {
        "ordinary": run("Ordinary tests", [*pytest, *workers], environment),
        "interpreter": run("Kernels through the interpreter", [*pytest, "-n", "2"], interpreter),
    }
    print(f"\nBoth processes took {time.monotonic() - started:.0f} s:", flush=True)
    for title, (_, closing) in results.items():
        print(f"  {title:12} {closing}")
    statuses = [status for status, _ in results.values()]
    if all(status == NO_TESTS for status in statuses):
        return NO_TESTS
    allowed = (PASSED, NO_TESTS) if arguments else (PASSED,)
    return 0 if all(status in allowed for status in statuses) else 1


if __name__ == "__main__":
    sys.exit(main())
