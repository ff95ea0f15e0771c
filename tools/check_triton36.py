"""Run the interpreter's tests under Triton 3.6, the oldest that fusestep serves.

    python tools/check_triton36.py [PYTEST ARGUMENTS…]

Everything but Triton and NumPy comes from the running environment: these lie in a folder of their own, in front of it.
Triton 3.6's interpreter reads loop bounds as Python ints from arrays of one element, which NumPy 2.4 refuses and older
ones warn of.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSION = "3.6.0"
NUMPY = "numpy<2.4"
FOLDER = ROOT / "build" / f"triton-{VERSION}-with-numpy"
WARNING = "ignore:Conversion of an array with ndim > 0 to a scalar:DeprecationWarning"


def install() -> None:
    """Put Triton into its folder, unless it is there whole."""
    whole = FOLDER / "whole"
    if whole.exists():
        return
    print(f"Installing triton {VERSION} into {FOLDER.relative_to(ROOT)}", flush=True)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--no-deps", "--upgrade", "--target", FOLDER, f"triton=={VERSION}", NUMPY], check=True)
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
        [sys.executable, "-m", "pytest", "-n", "2", "-W", WARNING, *sys.argv[1:]],
        cwd=ROOT,
        env=environment,
        check=False,
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
