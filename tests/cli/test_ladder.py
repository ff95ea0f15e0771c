"""`fusestep ladder` as a person calls it."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fusestep.cli import main

COMMAND = [sys.executable, "-m", "fusestep", "ladder"]
SMALL = ["--preset", "tiny", "--device", "cpu", "--rounds", "2", "--steps", "12", "--gate-steps", "10", "--batch", "2"]
SMALL += ["--natives", "none"]
# The commit is named, since somebody may be at work in this checkout while a ladder is cut off and goes on.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "FUSESTEP_COMMIT": "test"}


def call(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=120, check=False
    )


def refused(*arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What the command says before it ends with status 2, in this process: it has not come to start any."""
    with pytest.raises(SystemExit) as ended:
        main(["ladder", *arguments])
    said = capsys.readouterr()
    assert ended.value.code == 2
    assert said.out == ""
    assert said.err.startswith("fusestep ladder: ")
    assert said.err.count("\n") == 1
    return said.err


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ladder")


@pytest.fixture(scope="module")
def finished(folder: Path) -> subprocess.CompletedProcess[str]:
    return call(*SMALL, "--out", "kept", folder=folder)


def test_the_rungs_of_a_cpu_end_well_and_claim_nothing(finished: subprocess.CompletedProcess[str]) -> None:
    assert finished.returncode == 0, finished.stderr
    for name in ("adam", "fused-adam", "fused-norm", "amp", "blocks"):
        assert f"\n{name}" in finished.stdout
    assert "\nfp8" not in finished.stdout
    assert "The rung fp8 is left out, since FP8 would be emulated" in finished.stdout
    assert finished.stdout.count("reference, not fused") >= 2
    assert "the fused part adam ran as its reference, not fused" in finished.stdout
    assert "Measured on the CPU" in finished.stdout
    assert "TF32 is off" in finished.stdout
    headline = "no rung is shown to train this model faster than adam"
    assert finished.stdout.index(headline) < finished.stdout.index("step ms")
    assert finished.stdout.rstrip().endswith("kept/ladder.json, kept/ladder.csv, kept/ladder.html, kept/ladder.png")


def test_piped_progress_is_plain_lines_on_stderr(finished: subprocess.CompletedProcess[str]) -> None:
    assert "round 2 of 2: timing amp" in finished.stderr
    assert "\x1b" not in finished.stderr + finished.stdout
    assert "\r" not in finished.stderr


def test_the_files_agree_with_each_other(finished: subprocess.CompletedProcess[str], folder: Path) -> None:
    kept = json.loads((folder / "kept" / "ladder.json").read_text())
    with (folder / "kept" / "ladder.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert kept["schema"] == 1
    assert kept["plan"]["batch"] == 2
    assert kept["environment"]["command"].startswith("python -m fusestep ladder --preset tiny")
    names = ["adam", "fused-adam", "fused-norm", "amp", "blocks", "loss"]
    assert [rung["name"] for rung in kept["rungs"]] == [row["name"] for row in rows] == names
    for rung, row in zip(kept["rungs"], rows, strict=True):
        assert float(row["step_ms"]) == rung["step_ms"] > 0
        assert len(rung["rounds"]) == 2
        assert rung["gate_passed"]
        assert len(rung["losses"]) == 10
    assert "faster" not in [rung["claim_over_first"] for rung in kept["rungs"]]


def test_a_second_ladder_does_not_overwrite_the_first(
    finished: subprocess.CompletedProcess[str],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = (folder / "kept" / "ladder.json").read_bytes()
    monkeypatch.chdir(folder)
    assert "--out kept already holds a ladder" in refused(*SMALL, "--out", "kept", capsys=capsys)
    assert (folder / "kept" / "ladder.json").read_bytes() == before


@pytest.mark.parametrize(("option", "value"), [("--data", "text:/no/such/folder"), ("--model", "no_such_module:model")])
def test_what_a_person_gets_wrong_is_one_sentence_and_status_2(
    option: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert value.partition(":")[0 if option == "--model" else 2] in refused(option, value, capsys=capsys)
    assert list(tmp_path.iterdir()) == []


def test_no_name_is_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a shell passes a variable that is not set; the working folder was taken."""
    monkeypatch.chdir(tmp_path)
    assert refused("--out", "", capsys=capsys).endswith("--out is ''; name a folder for the ladder.\n")
    assert list(tmp_path.iterdir()) == []


def test_what_could_not_be_written_and_what_nobody_reads_is_still_kept(tmp_path: Path) -> None:
    """A limit of the system on the size of files, and a reader of stdout that leaves at once."""

    def limit() -> None:
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))

    arguments = [*COMMAND, *SMALL, "--rungs", "adam,fused-adam"]
    kept = tmp_path / "ladder"
    limited = subprocess.run(
        arguments, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=120, preexec_fn=limit
    )
    assert limited.returncode == 2
    assert "Traceback" not in limited.stderr
    assert limited.stderr.splitlines()[-2:] == [
        "ladder/ladder.unfinished.json keeps what is measured; the same command with --resume goes on.",
        "fusestep ladder: ladder/ladder.png would be larger than the limit of a file's size allows (File too large); "
        "raise the limit (ulimit -f), or choose another folder.",
    ]
    assert "\nadam " in limited.stdout
    assert [path.name for path in kept.iterdir()] == ["ladder.unfinished.json"]

    reader, writer = os.pipe()
    os.close(reader)
    unread = subprocess.run(
        [*arguments, "--resume"], cwd=tmp_path, env=ENVIRONMENT, stdout=writer, stderr=subprocess.PIPE, timeout=120
    )
    os.close(writer)
    assert unread.returncode == 141
    assert b"timing" not in unread.stderr
    names = ["ladder.csv", "ladder.html", "ladder.json", "ladder.png"]
    assert sorted(path.name for path in kept.iterdir()) == names


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
@pytest.mark.parametrize("options", [[], ["--resume"], ["--parallel", "ddp"]])
def test_a_folder_that_cannot_be_made_is_one_sentence_before_anything_runs(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused("--preset", "tiny", "--device", "cpu", "--out", "/proc/kept", *options, capsys=capsys)
    assert said.endswith(
        "--out /proc/kept cannot be used: /proc is not a folder that you may write to; name another.\n"
    )


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_stopping_it_leaves_no_worker_and_resume_goes_on(number: signal.Signals, status: int, tmp_path: Path) -> None:
    marked = {**ENVIRONMENT, "LADDER_TEST": str(tmp_path)}
    with subprocess.Popen(
        [*COMMAND, *SMALL, "--rungs", "adam,amp"],
        cwd=tmp_path,
        env=marked,
        stderr=subprocess.PIPE,
        text=True,
        # Whoever runs the tests in the background made them deaf to SIGINT, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        assert process.stderr is not None
        # Only what is resumed below needs a whole round.
        begun = "round 2 of 2" if number == signal.SIGKILL else "round 1 of 2"
        for line in process.stderr:
            if begun in line:
                break
        process.send_signal(number)
        rest = process.stderr.read()
    assert process.returncode == status
    assert "Traceback" not in rest
    assert ("the same command with --resume goes on" in rest) is (number != signal.SIGKILL)
    assert [path.name for path in (tmp_path / "ladder").iterdir()] == ["ladder.unfinished.json"]
    # A process that its parent's death ends takes a moment to end.
    deadline = time.monotonic() + 20
    while (left := _marked_processes(str(tmp_path))) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []
    if number != signal.SIGKILL:
        return

    resumed = call(*SMALL, "--rungs", "adam,amp", "--resume", "--json", folder=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert resumed.stderr.count("timing") == 2
    assert "gate" not in resumed.stderr
    kept = json.loads((tmp_path / "ladder" / "ladder.json").read_text())
    assert json.loads(resumed.stdout) == kept  # and it is all of stdout
    assert [len(rung["rounds"]) for rung in kept["rungs"]] == [2, 2]
    assert kept["notes"][-1].startswith("Measured in 2 sittings")
    assert not (tmp_path / "ladder" / "ladder.unfinished.json").exists()


def _marked_processes(mark: str) -> list[str]:
    """Processes whose environment holds the mark, zombies left out."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            marked = f"LADDER_TEST={mark}".encode() in (folder / "environ").read_bytes()
        except (PermissionError, FileNotFoundError, ProcessLookupError):
            continue
        if marked:
            found.append(folder.name)
    return found
