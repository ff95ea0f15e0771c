"""Build the wheel as a user's pip would get it, install it into an empty environment elsewhere, and use it there.

    python tools/check_wheel.py

The wheel is built from the source distribution, so both are complete. It is installed without extras first: the
library must import, and the program must say what it lacks. Then with them: the program must work.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: Runs without any extra.
DROP_IN = "import apex.optimizers, importlib.metadata; print(importlib.metadata.version('apex'))"
LIBRARY = "import fusestep, fusestep.data, fusestep.models, fusestep.nn, fusestep.ops, fusestep.optim"


def run(command: list[str | Path], where: Path, status: int = 0) -> str:
    """Run a command outside the checkout, show it and its time, and return what it printed; exit when it goes wrong."""
    shown = " ".join(str(part).removeprefix(f"{where}/") for part in command)
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    started = time.monotonic()
    done = subprocess.run(
        command, cwd=where, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    print(f"[{time.monotonic() - started:5.1f} s] {shown}", flush=True)
    if done.returncode != status:
        sys.exit(f"check_wheel: exit status {done.returncode}, expected {status}; it printed:\n{done.stdout}")
    return done.stdout


def expect(fact: bool, what: str) -> None:
    """Leave with a sentence when a fact does not hold."""
    if not fact:
        sys.exit(f"check_wheel: {what}")


def check_contents(wheel: Path) -> None:
    """The wheel holds the package, its types, its licence, and no more."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = archive.read(next(name for name in names if re.fullmatch(r"[^/]+/METADATA", name))).decode()
    # Among the sources are the metadata of the shims, by which pip takes apex and transformer_engine for installed.
    patterns = ("*.py", "templates/*", "shims/*.dist-info/*", "plan/rates.json")
    files = [path for pattern in patterns for path in (ROOT / "src").rglob(pattern)]
    sources = {str(path.relative_to(ROOT / "src")) for path in files} | {"fusestep/py.typed"}
    packed = {name for name in names if ".dist-info/" not in name or "/shims/" in name}
    expect(packed == sources, f"the wheel and src/ differ in {sorted(packed ^ sources)}")
    expect(any(name.endswith("licenses/LICENSE") for name in names), "the wheel has no licence")
    expect("triton>=3.6; sys_platform == 'linux'" in metadata, "triton must be a requirement on Linux, and there alone")


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="fusestep-wheel-") as folder:
        where = Path(folder).resolve()
        run([sys.executable, "-m", "build", "--outdir", where / "dist", ROOT], where)
        (wheel,) = (where / "dist").glob("*.whl")
        check_contents(wheel)

        run([sys.executable, "-m", "venv", where / "env"], where)
        python, fusestep = where / "env/bin/python", where / "env/bin/fusestep"
        pip: list[str | Path] = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        pip += ["--constraint", ROOT / "constraints.txt"]

        run([*pip, wheel], where)
        origin = run([python, "-c", f"{LIBRARY}; print(fusestep.__file__)"], where).strip().splitlines()[-1]
        expect(Path(origin).is_relative_to(where), f"fusestep was imported from {origin}, not from the wheel")
        said = run([fusestep, "doctor"], where, status=2)
        expect("fusestep[cli]" in said, f"without its extra the program should name fusestep[cli]; it said: {said}")

        (where / "drop_in.py").write_text(DROP_IN)
        served = run([fusestep, "run", "drop_in.py"], where)
        expect("0.1+fusestep" in served, f"the wheel's shims do not serve a script; it printed: {served}")

        run([*pip, f"{wheel}[all]"], where)
        run([fusestep, "--version"], where)
        print(run([fusestep, "doctor"], where))
        expect("schema" in json.loads(run([fusestep, "doctor", "--json"], where)), "doctor --json has no schema number")
        train: list[str | Path] = [fusestep, "train", "--preset", "tiny", "--data", "synthetic", "--steps", "5"]
        run([*train, "--device", "cpu", "--out", "first-run"], where)
        said = run([fusestep, "generate", "first-run", "--tokens", "8"], where)
        expect(bool(said.strip()), "generate printed nothing")
        print(said)
    print("The wheel installs and works outside the checkout.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
