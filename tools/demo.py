"""The whole story on this machine: what runs here, three models trained and used, and the ladder measured.

    python tools/demo.py

Every step is a command that you can copy; it is shown before it runs, and the first that fails ends the demo. The runs
lie in demo/, and a second demo starts them afresh.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

#: What each part shows, and its commands.
STORY = [
    (
        "What this machine can do: each kernel is launched and compared with its reference.",
        ["fusestep doctor"],
    ),
    (
        "A tiny GPT learns what Python looks like, byte by byte, from the standard library's own sources.",
        [
            "fusestep train --preset tiny --data text:stdlib --steps 800 --lr 3e-3 --warmup 20 --out demo/text",
            "fusestep generate demo/text --prompt 'def ' --tokens 200 --temperature 0.9 --seed 1",
        ],
    ),
    (
        "Another learns arithmetic sequences: (phase + stride · t) mod 96. It has to find the stride and keep it.",
        [
            "fusestep train --preset tiny --data synthetic --steps 300 --lr 3e-3 --warmup 20 --out demo/sequences",
            "fusestep generate demo/sequences --tokens 48",
        ],
    ),
    (
        "The same in FP8, emulated with the same numbers where the chip lacks it, and what its scaling has seen.",
        [
            "fusestep train --preset tiny --precision fp8 --fp8-stats --steps 120 --lr 3e-3 --warmup 20 --out demo/fp8",
            "fusestep inspect demo/fp8",
        ],
    ),
    (
        "What each speed-up buys here, measured rung by rung.",
        ["fusestep ladder --out demo/ladder"],
    ),
]


def clear() -> None:
    """Remove the runs of an earlier demo."""
    for name in ("text", "sequences", "fp8", "ladder"):
        shutil.rmtree(Path("demo") / name, ignore_errors=True)


def main() -> int:
    os.chdir(ROOT)
    clear()
    # The commands are those of this environment, as if it were activated.
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    started = time.monotonic()
    for title, commands in STORY:
        print(f"\n# {title}", flush=True)
        for command in commands:
            print(f"\n$ {command}", flush=True)
            status = subprocess.run(shlex.split(command), env=environment, check=False).returncode
            if status != 0:
                print(f"\nThe demo stopped: the command above ended with exit status {status}.", file=sys.stderr)
                return 1
    print(
        f"\nThe demo took {time.monotonic() - started:.0f} s. Its runs are in demo/, its program is .venv/bin/fusestep."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
