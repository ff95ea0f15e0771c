"""`fusestep train` from the shell: whole paths as processes, bad input in one sentence with exit status 2."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fusestep import cli
from fusestep.train import checkpoint

CONFIG = """
preset = "tiny"
batch = 3
eval_every = 0
device = "cpu"
[model]
width = 16
heads = 2
layers = 1
ffn_width = 24
context = 8
"""

Cli = Callable[..., tuple[int, list[str], list[str]]]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(CONFIG)
    return path


@pytest.fixture
def fusestep(tmp_path: Path, config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Run a command in this process; returns exit status, lines of stdout, lines of stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, list[str], list[str]]:
        with pytest.raises(SystemExit) as ended:
            cli.main(arguments)
        written = capsys.readouterr()
        return int(ended.value.code or 0), written.out.splitlines(), written.err.splitlines()

    return run


def process(folder: Path, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "fusestep", "train", *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        text=True,
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options},
    )


def drain(screen: int) -> None:
    """Read what a terminal shows, so that it always has room."""
    with contextlib.suppress(BlockingIOError):
        os.read(screen, 1 << 16)


def wait_for_step(
    folder: Path, step: int, running: subprocess.Popen[str], meanwhile: Callable[[], None] = lambda: None
) -> None:
    """Until the run's metrics hold a step."""
    metrics = folder / "metrics.jsonl"
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        assert running.poll() is None, running.communicate()
        if metrics.exists() and f'"step": {step},' in metrics.read_text():
            return
        meanwhile()
        time.sleep(0.005)
    raise AssertionError(f"step {step} was not reached")


def rows(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "ms"} for line in lines]


def newest(folder: Path) -> checkpoint.Checkpoint:
    found = checkpoint.newest(folder)
    assert found is not None
    return found


def same_files(a: Path, b: Path) -> bool:
    return all((a / name).read_bytes() == (b / name).read_bytes() for name in ("model.safetensors", "state.pt"))


def test_a_run_prints_its_size_first_and_its_loss_beside_a_random_guess_last(fusestep: Cli) -> None:
    status, out, _ = fusestep("train", "--config", "tiny.toml", "--steps", "6", "--out", "run")
    assert status == 0
    assert re.search(r"parameters \| 1 layer × 16 wide, 2 heads, feed-forward 24, context 8, vocabulary 96", out[0])
    assert out[1].startswith("device: CPU")
    assert sum(line.startswith("step") for line in out) == 6
    assert re.fullmatch(r"final loss \d\.\d{4} \| a random guess has ln 96 = 4\.5643", out[-1])
    assert len(rows(Path("run"))) == 6


def test_a_run_in_fp8_says_which_recipe_and_that_it_is_emulated(fusestep: Cli) -> None:
    arguments = ("--precision", "fp8", "--fp8-format", "e4m3", "--amax-history", "4", "--steps", "2")
    status, out, _ = fusestep("train", "--config", "tiny.toml", *arguments)
    assert status == 0
    line = next(line for line in out if line.startswith("FP8: "))
    assert "DelayedScaling(fp8_format=Format.E4M3" in line
    assert "amax_history_len=4" in line
    assert "emulated, the same numbers without the speed: FP8 products run on CUDA devices" in line
    used = json.loads(Path("run/config.json").read_text())["train"]
    assert (used["recipe"], used["fp8_format"], used["amax_history"]) == ("delayed", "e4m3", 4)
    assert not Path("run/fp8.jsonl").exists()


def test_the_command_line_is_above_the_config_file_and_that_above_the_resumed_run(fusestep: Cli) -> None:
    fusestep("train", "--config", "tiny.toml", "--steps", "2", "--lr", "0.01", "--clip", "0.5", "--out", "run")
    Path("more.json").write_text(json.dumps({"steps": 9, "lr": 0.02}))
    status, _, err = fusestep("train", "--resume", "--config", "more.json", "--steps", "3", "--out", "run")
    assert (status, err) == (0, [])
    used = json.loads(Path("run/config.json").read_text())["train"]
    assert (used["steps"], used["lr"], used["clip"], used["batch"]) == (3, 0.02, 0.5, 3)
    assert rows(Path("run"))[2]["lr"] == pytest.approx(0.02 * (0.1 + 0.45 * (1 + (-0.5))), rel=1e-5)


def test_help_lists_every_setting(fusestep: Cli) -> None:
    status, out, _ = fusestep("train", "--help")
    assert status == 0
    text = "\n".join(out)
    from dataclasses import fields

    from fusestep.train import TrainConfig

    for field in fields(TrainConfig):
        if field.name != "model":
            assert f"--{field.name.replace('_', '-')}" in text, field.name
    assert "command line" in text


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--preset", "huge"], "--preset is 'huge'; choose one of auto, tiny"),
        (["--lr", "-1"], "--lr is -1.0; pass a learning rate above 0"),
        (["--steps", "0"], "--steps is 0; pass 1 or more"),
        (["--precision", "int4"], "--precision is 'int4'; choose one of fp32, bf16, fp16"),
        (["--recipe", "current"], "--recipe is current and --precision is fp32; pass --precision fp8"),
        (["--precision", "fp8", "--recipe", "delay"], "--recipe is 'delay'; choose one of delayed, current"),
        (["--precision", "fp8", "--amax-history", "0"], "--amax-history is 0; pass 1 to 1048576 steps"),
        (["--precision", "fp8", "--form", "seed"], "--precision is fp8 and --form is seed; pass --form fused"),
        (["--device", "abacus"], "--device is 'abacus'"),
        (["--config", "nowhere.toml"], "--config nowhere.toml cannot be read"),
        (["--config", ""], "--config . cannot be read"),
        (["--config", "broken.toml"], "--config broken.toml is not TOML"),
        (["--config", "unknown.json"], "sets 'stepz', which is no setting; did you mean steps?"),
        (["--config", "heads.json"], "heads"),
        (["--data", "nonsense"], "data is 'nonsense'"),
        (["--data", "text:nowhere"], "nowhere"),
        (["--data", "text:empty"], "empty"),
        (["--data", "text:short.txt"], "short.txt"),
        (["--data", "tokens:notes/diary.txt"], "diary.txt"),
        (["--resume"], "run holds no run to go on with"),
        (["--out", "notes"], "notes exists and is not empty"),
        (["--out", "notes/diary.txt"], "is a file"),
        (["--out", "notes/diary.txt/run"], "cannot be made"),
    ],
)
def test_bad_input_is_one_sentence_with_status_2_and_nothing_is_written(
    fusestep: Cli, tmp_path: Path, arguments: list[str], sentence: str
) -> None:
    (tmp_path / "broken.toml").write_text("steps =")
    (tmp_path / "unknown.json").write_text('{"stepz": 3}')
    (tmp_path / "heads.json").write_text('{"model": {"width": 30, "heads": 7}}')
    (tmp_path / "empty").mkdir()
    (tmp_path / "short.txt").write_text("short")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "diary.txt").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    base = [] if "--config" in arguments else ["--config", "tiny.toml"]
    status, out, err = fusestep("train", "--device", "cpu", "--steps", "3", *base, *arguments)
    assert status == 2
    assert len(err) == 1
    assert sentence in err[0]
    assert err[0].startswith("fusestep train: ")
    assert out == []
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("arguments", [["--fp8"], ["--steps", "many"], ["--precision"]])
def test_what_the_parser_refuses_ends_with_status_2(fusestep: Cli, arguments: list[str]) -> None:
    status, _, err = fusestep("train", *arguments)
    assert status == 2
    assert err
    assert not Path("run").exists()


def test_a_run_that_exists_is_not_written_over(fusestep: Cli) -> None:
    fusestep("train", "--config", "tiny.toml", "--steps", "2")
    before = {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()}
    status, out, err = fusestep("train", "--config", "tiny.toml", "--steps", "2")
    assert (status, out) == (2, [])
    assert "run holds a run already; go on with it by --resume, or choose another folder with --out" in err[0]
    assert {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()} == before


def test_a_damaged_only_checkpoint_is_named(fusestep: Cli) -> None:
    fusestep("train", "--config", "tiny.toml", "--steps", "2")
    os.truncate("run/checkpoints/step-00000002/state.pt", 64)
    status, _, err = fusestep("train", "--resume", "--steps", "4")
    assert status == 2
    assert "run/checkpoints/step-00000002 is damaged (state.pt has 64 bytes instead of " in err[-1]


@pytest.mark.slow
@pytest.mark.parametrize("precision", [[], ["--precision", "fp8", "--fp8-stats"]], ids=["fp32", "fp8"])
def test_kill_9_and_resume_equals_the_uninterrupted_run(tmp_path: Path, fusestep: Cli, precision: list[str]) -> None:
    settings = ["--config", "tiny.toml", "--steps", "120", "--save-every", "15", "--dropout", "0.1", *precision]
    broken = process(tmp_path, *settings, "--out", "broken")
    wait_for_step(tmp_path / "broken", 35, broken)
    broken.send_signal(signal.SIGKILL)
    broken.communicate()
    assert 30 <= newest(tmp_path / "broken").step < 120
    assert fusestep("train", "--resume", "--out", "broken")[0] == 0
    assert fusestep("train", *settings, "--out", "straight")[0] == 0
    assert rows(tmp_path / "broken") == rows(tmp_path / "straight")
    assert same_files(newest(tmp_path / "broken").path, newest(tmp_path / "straight").path)
    if precision:
        assert (tmp_path / "broken" / "fp8.jsonl").read_bytes() == (tmp_path / "straight" / "fp8.jsonl").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_saves_and_prints_the_command_that_goes_on(
    tmp_path: Path, fusestep: Cli, number: signal.Signals, status: int
) -> None:
    running = process(tmp_path, "--config", "tiny.toml", "--steps", "100000", "--save-every", "0", "--out", "run")
    wait_for_step(tmp_path / "run", 3, running)
    running.send_signal(number)
    out, err = running.communicate(timeout=60)
    assert running.returncode == status
    assert "Traceback" not in err
    stopped = re.search(r"stopped at step (\d+) of 100000 and saved; go on with: fusestep (train .*)", out)
    assert stopped is not None
    step = int(stopped[1])
    assert newest(tmp_path / "run").step == step
    assert [row["step"] for row in rows(tmp_path / "run")] == list(range(1, step + 1))
    assert fusestep(*stopped[2].split(), "--steps", str(step + 2))[0] == 0
    assert [row["step"] for row in rows(tmp_path / "run")] == list(range(1, step + 3))


@pytest.mark.slow
@pytest.mark.usefixtures("fusestep")
def test_a_terminal_that_closes_ends_the_run_with_a_checkpoint(tmp_path: Path) -> None:
    """Whatever is written to it from then on fails, which must not keep the run from being saved."""
    keyboard, terminal = os.openpty()

    def take_terminal() -> None:
        fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)

    running = process(
        tmp_path,
        *("--config", "tiny.toml", "--steps", "100000", "--save-every", "0", "--out", "run"),
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
        preexec_fn=take_terminal,
    )
    os.close(terminal)
    os.set_blocking(keyboard, False)
    wait_for_step(tmp_path / "run", 3, running, meanwhile=lambda: drain(keyboard))
    os.close(keyboard)
    assert running.wait(60) == 129
    assert newest(tmp_path / "run").step == rows(tmp_path / "run")[-1]["step"]


@pytest.mark.slow
def test_a_full_disk_is_one_sentence_and_the_last_checkpoint_stays(tmp_path: Path, fusestep: Cli) -> None:
    """A limit of the system on the size of files stands for the full disk."""
    assert fusestep("train", "--config", "tiny.toml", "--save-every", "4", "--steps", "4")[0] == 0
    good = newest(tmp_path / "run").path
    before = {path.name: path.read_bytes() for path in good.iterdir()}

    def limit() -> None:
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))

    limited = process(tmp_path, "--resume", "--steps", "8", preexec_fn=limit)
    _, err = limited.communicate(timeout=60)
    assert limited.returncode == 2
    sentence = err.splitlines()[-1]
    assert "the checkpoint of step 8 could not be written (File too large)" in sentence
    assert f"{good.relative_to(tmp_path)}, is untouched" in sentence
    assert "Traceback" not in err
    assert {path.name: path.read_bytes() for path in good.iterdir()} == before
    assert [path.name for path in good.parent.iterdir()] == [good.name]
    assert fusestep("train", "--resume", "--steps", "8")[0] == 0
    assert [row["step"] for row in rows(tmp_path / "run")] == list(range(1, 9))


def test_a_terminal_without_our_characters_still_trains(tmp_path: Path, config: Path) -> None:
    # Its name is no UTF-8 either.
    folder = os.fsdecode(b"run-\xff")
    ran = subprocess.run(
        [sys.executable, "-m", "fusestep", "train", "--config", str(config), "--steps", "1", "--out", folder],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert b"1 layer ? 16 wide" in ran.stdout
    assert checkpoint.newest(tmp_path / folder) is not None
