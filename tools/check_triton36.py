"""Run the interpreter's tests under Triton 3.6, the oldest that fusestep serves.

    python tools/check_triton36.py [PYTEST ARGUMENTS…]

Everything but Triton comes from the running environment: Triton 3.6 lies in a folder of its own, in front of it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSION = "3.6.0"
FOLDER = ROOT / "build" / f"triton-{VERSION}"


def install() -> None:
    """Put Triton into its folder, unless it is there whole."""
    whole = FOLDER / "whole"
    if whole.exists():
        return
    print(f"Installing triton {VERSION} into {FOLDER.relative_to(ROOT)}", flush=True)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--no-deps", "--upgrade", "--target", FOLDER, f"triton=={VERSION}"], check=True)
    whole.touch()


def main() -> int:
    install()
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(FOLDER)}
    said = subprocess.run(
        [sys.executable, "-c", "import triton; print(triton.__version__)"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    if said != VERSION:
        print(f"check_triton36: the tests would run under Triton {said}, not {VERSION}", file=sys.stderr)
        return 1
    print(f"Tests under Triton {said}", flush=True)
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "2", *sys.argv[1:]], cwd=ROOT, env=environment, check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
