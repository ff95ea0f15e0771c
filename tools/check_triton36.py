"""Compile every kernel and run the interpreter's tests under Triton 3.6, the oldest that fusestep serves.

    python tools/check_triton36.py [--share N] [PYTEST ARGUMENTS…]

The interpreter takes what the compiler refuses, such as a string as the default of a constexpr parameter, so
tools/check_kernels.py compiles every configuration here too, for one chip; with --share about one in N of them. Both
always run; the exit status is 1 when either failed.

Everything but Triton and NumPy comes from the running environment: these lie in a folder of their own, in front of it.
Triton 3.6's interpreter reads loop bounds as Python ints from arrays of one element, which NumPy 2.4 refuses and older
ones warn of.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSION = "3.6.0"
NUMPY = "numpy<2.4"
CHIP = "90"
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


def run(title: str, arguments: list[str], environment: dict[str, str]) -> int:
    """Run Python with these arguments in the project's folder; its exit status."""
    print(f"\n{title}: {' '.join(arguments)}", flush=True)
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", type=int, default=1, metavar="N", help="compile about one in N configurations")
    options, for_pytest = parser.parse_known_args()
    install()
    compiler = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(FOLDER)}
    compiler.pop("TRITON_INTERPRET", None)
    said = subprocess.run(
        [sys.executable, "-c", "import triton; print(triton.__version__)"],
        env=compiler,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    if said != VERSION:
        print(f"check_triton36: the checks would run under Triton {said}, not {VERSION}", file=sys.stderr)
        return 1
    interpreter = {**compiler, "TRITON_INTERPRET": "1"}
    tests = ["-m", "pytest", "-n", "2", "-W", WARNING, *for_pytest]
    statuses = [
        run("Kernels compiled", ["tools/check_kernels.py", "--chip", CHIP, "--share", str(options.share)], compiler),
        run("Kernels through the interpreter", tests, interpreter),
    ]
    return 1 if any(statuses) else 0


if __name__ == "__main__":
    sys.exit(main())
