"""The set-up that every make target does by itself: what it says, and that half a set-up is never taken for a whole."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="make and sh are not there")

#: Stands for python3: writes what it is asked into a log, and makes an environment whose Python is itself.
PYTHON = """#!/bin/sh
echo "$*" >>{log}
case "$*" in
    *version_info*11*) exit {too_old} ;;
    *ensurepip*) exit {no_ensurepip} ;;
    *"%d.%d"*) echo 3.12 ;;
    --version) echo "Python {version}" ;;
    "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && touch "$3/pyvenv.cfg" ;;
    "-m pip install"*) [ "$PIP_REQUIRE_VIRTUALENV" = true ] && exit {pip_fails} ;;
esac
"""


class Setup:
    """tools/setup.sh on a folder of its own, with a Python that only pretends."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "environment"
        self.python = folder / "python"
        self.log = folder / "log"

    def run(self, **changes: object) -> subprocess.CompletedProcess[str]:
        settings = {"too_old": 0, "no_ensurepip": 0, "version": "3.12.1", "pip_fails": 0, **changes}
        for path in (self.python, self.folder / "bin" / "python"):
            if path == self.python or path.exists():
                path.write_text(PYTHON.format(log=self.log, **settings))
                path.chmod(0o755)
        self.log.write_text("")
        return subprocess.run(
            [ROOT / "tools" / "setup.sh", self.folder],
            env={**os.environ, "PYTHON": str(self.python)},
            capture_output=True,
            text=True,
            check=False,
        )

    def has_made_environment(self) -> bool:
        return "-m venv" in self.log.read_text()


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    return Setup(tmp_path)


def test_a_new_environment_gets_the_pinned_versions(setup: Setup) -> None:
    assert setup.run().returncode == 0
    assert setup.has_made_environment()
    assert "--constraint constraints.txt --editable .[dev]" in setup.log.read_text()
    assert (setup.folder / "ready").read_text().strip() == str(ROOT)


def test_a_whole_environment_is_brought_up_to_date_and_not_made_again(setup: Setup) -> None:
    setup.run()
    assert setup.run().returncode == 0
    assert not setup.has_made_environment()
    assert "-m pip install" in setup.log.read_text()


def test_after_an_interrupted_set_up_the_next_starts_afresh(setup: Setup) -> None:
    assert setup.run(pip_fails=1).returncode != 0
    assert not (setup.folder / "ready").exists()
    assert setup.run().returncode == 0
    assert setup.has_made_environment()
    assert (setup.folder / "ready").exists()


def test_an_update_that_fails_takes_the_mark_of_a_whole_environment_away(setup: Setup) -> None:
    setup.run()
    assert setup.run(pip_fails=1).returncode != 0
    assert not (setup.folder / "ready").exists()


def test_an_environment_that_lost_its_configuration_is_never_installed_into(setup: Setup) -> None:
    # Without pyvenv.cfg its Python is the system's, and pip would install there.
    setup.run()
    (setup.folder / "pyvenv.cfg").unlink()
    done = setup.run()
    assert done.returncode == 2
    assert "is no virtual environment" in done.stderr
    assert "pip" not in setup.log.read_text()
    (setup.folder / "unfinished").touch()
    assert setup.run().returncode == 0
    assert setup.has_made_environment()


def test_a_folder_of_someone_s_own_is_left_alone(setup: Setup) -> None:
    setup.folder.mkdir()
    (setup.folder / "thesis.tex").write_text("years of work")
    assert setup.run().returncode == 2
    assert (setup.folder / "thesis.tex").read_text() == "years of work"


def test_two_set_ups_at_once_wait_for_each_other(setup: Setup) -> None:
    setup.run()
    lock = setup.folder.with_name(f"{setup.folder.name}.lock")
    with subprocess.Popen(["sleep", "3"]) as other:
        lock.symlink_to(str(other.pid))
        started = time.monotonic()
        killer = subprocess.Popen(["sh", "-c", f"sleep 1; rm {lock}"])
        done = setup.run()
        killer.wait()
        assert time.monotonic() - started > 0.9
        other.kill()
    assert done.returncode == 0
    assert f"process {other.pid}" in done.stderr
    # What the other one made is current, so nothing is installed a second time.
    assert setup.log.read_text() == ""


def test_the_lock_of_a_process_that_is_gone_is_no_lock(setup: Setup) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    setup.folder.with_name(f"{setup.folder.name}.lock").symlink_to(str(gone.pid))
    assert setup.run().returncode == 0
    assert not setup.folder.with_name(f"{setup.folder.name}.lock").is_symlink()


def test_a_python_that_is_too_old_is_named_with_the_mend(setup: Setup) -> None:
    done = setup.run(too_old=1, version="3.9.2")
    assert done.returncode == 2
    assert "Python 3.11 or newer" in done.stderr
    assert "Python 3.9.2" in done.stderr
    assert not setup.folder.exists()


def test_a_missing_venv_module_is_named_with_the_mend(setup: Setup) -> None:
    done = setup.run(no_ensurepip=1)
    assert done.returncode == 2
    assert "python3.12-venv" in done.stderr
    assert not setup.folder.exists()


def test_make_is_satisfied_by_a_whole_environment_of_this_checkout_alone(tmp_path: Path) -> None:
    def plan(content: str) -> str:
        environment = tmp_path / "environment"
        (environment / "bin").mkdir(parents=True, exist_ok=True)
        python = environment / "bin" / "python"
        python.write_text("#!/bin/sh\n")
        python.chmod(0o755)
        (environment / "ready").write_text(f"{content}\n")
        return subprocess.run(
            ["make", "--dry-run", f"VENV={environment}", "setup"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout

    assert "tools/setup.sh" not in plan(str(ROOT))
    assert "tools/setup.sh" in plan("/where/the/checkout/was/before")
