"""Ranks that die, stall or fall silent: no wait without an end, a sentence with the rank's name, a run that goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
import torch

from fusestep.distributed import failures
from fusestep.distributed.failures import Failure, Watch, Whereabouts
from fusestep.train import TrainConfig, checkpoint, train
from fusestep.train.checkpoint_folder import complete
from fusestep.train.trainer import Trainer
from harness import RanksFailedError, module_of

TIMEOUT = 5.0


def of_runs() -> ModuleType:
    """What test_train.py has to run several ranks."""
    return module_of(Path(__file__).with_name("test_train.py"))


def meet(folder: Path, rank: int) -> None:
    """Begin together: on a busy machine one process may start later than the run's own time-out."""
    (folder / f"here-{rank}").touch()
    ends = time.monotonic() + 60
    while len(list(folder.glob("here-*"))) < 2 and time.monotonic() < ends:
        time.sleep(0.01)


def run_one(rank: int, port: int, folder: Path, fault: str) -> None:
    """A run in which something happens to one rank; what the process says goes to a file."""
    runs = of_runs()
    meet(folder, rank)
    world = runs.launched(port)
    next(world)
    os.dup2(os.open(folder / f"{fault}-{rank}.txt", os.O_WRONLY | os.O_CREAT), 2)
    parallel = "fsdp" if fault == "killed-in-a-checkpoint" else "ddp"
    job = runs.config(folder / fault, parallel=parallel, save_every=2, eval_every=0, timeout=TIMEOUT)

    def die(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def stop(_: Trainer) -> None:
        # The whole process, its beating thread too.
        os.kill(os.getpid(), signal.SIGSTOP)

    if fault == "killed-in-a-step" and rank == 1:
        with runs.at_step(5, die):
            train(job)
    elif fault == "killed-in-a-checkpoint" and rank == 0:
        saved = checkpoint.save

        def half(run: Path, step: int, *arguments: Any, **options: Any) -> Path:
            if step == 4:
                checkpoint.sync_folder = die  # type: ignore[assignment]
            return saved(run, step, *arguments, **options)

        with runs.replaced(checkpoint, "save", half):
            train(job)
    elif fault == "slow" and rank == 1:
        with runs.at_step(5, lambda _: time.sleep(60)):
            train(job)
    elif fault == "silent" and rank == 1:
        with runs.at_step(5, stop):
            train(job)
    else:
        train(job)


FAULTS = {
    "killed-in-a-step": ("rank 1 (process ", "ended without a word, last heard of while "),
    "killed-in-a-checkpoint": ("rank 0 (process ", "ended without a word, last heard of while "),
    "slow": ("rank 1 (process ", "is slow: it has been computing the gradients of step 5 for"),
    "silent": ("rank 1 (process ", "has given no sign of life for"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_rank_that_dies_or_stalls_ends_all_by_name_and_the_run_goes_on(tmp_path: Path, fault: str) -> None:
    runs = of_runs()
    with pytest.raises(RanksFailedError) as raised:
        runs.launch(run_one, tmp_path, fault, timeout=90)
    assert time.time() - (tmp_path / "here-0").stat().st_mtime < TIMEOUT + 20
    survivor = 1 if fault == "killed-in-a-checkpoint" else 0
    told = raised.value.outcomes[survivor]
    said = (tmp_path / f"{fault}-{survivor}.txt").read_text() + (told.failure or "")
    who, what = FAULTS[fault]
    assert who in said
    assert what in said
    last = checkpoint.newest(tmp_path / fault)
    assert last is not None
    assert last.step == (2 if fault == "killed-in-a-checkpoint" else 4)
    assert "step-00000002" in said or "step-00000004" in said
    # The run goes on as if nothing had been, here in one process.
    train(runs.config(tmp_path / fault, save_every=2, eval_every=0, resume=True))
    train(runs.config(tmp_path / "straight", eval_every=0))
    runs.assert_same_run(tmp_path / fault, tmp_path / "straight", 1e-6)


class Store(dict[str, str]):
    """A store of one process."""

    set = dict.__setitem__
    get = dict.__getitem__

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)

    def compare_set(self, key: str, expected: str, desired: str) -> str:
        return self.setdefault(key, desired) if not expected else self[key]


def watch_over(store: Store, rank: int = 0, size: int = 3) -> Watch:
    return Watch(store, rank, size, 5.0, lambda: ".", local_rank=rank)


def failure_in(store: Store) -> Failure:
    return Failure(**json.loads(store["failure"]))


def test_the_rank_that_is_furthest_behind_is_the_slow_one() -> None:
    store = Store()
    places = [(9, "computing", 6.0), (8, "reading the data of step 4", 6.2), (9, "computing", 5.9)]
    for rank, (place, words, since) in enumerate(places):
        store[f"beat/{rank}"] = Whereabouts("far", "", 100 + rank, place, words, since, 1).to_text()
    watch = watch_over(store, rank=2)
    watch._me = replace(Whereabouts.of_this_process(), place=9, words="computing")
    watch._arrived = time.monotonic() - 5.9
    watch._neighbour_heard = time.monotonic()
    watch._look()
    found = failure_in(store)
    assert found.rank == 1
    assert found.sentence == (
        "rank 1 (process 101 on far) is slow: it has been reading the data of step 4 for 6.2 s, and others wait for "
        "it while computing; --timeout is 5"
    )


@pytest.mark.parametrize(
    ("waits", "since", "rank", "words"),
    [
        ((True, False, True), (7.0, 7.1, 7.2), 1, "and others wait there for it"),
        ((True, True, True), (7.0, 7.1, 5.5), 2, "and came there 1.5 s after the others"),
        ((True, True, True), (7.0, 7.1, 7.2), -1, "all 3 ranks have been computing for 7.0 s and none is behind"),
    ],
)
def test_where_all_are_at_one_place_the_one_that_does_not_wait_or_came_last_is_slow(
    monkeypatch: pytest.MonkeyPatch, waits: tuple[bool, ...], since: tuple[float, ...], rank: int, words: str
) -> None:
    store = Store()
    for other in range(3):
        store[f"beat/{other}"] = Whereabouts(
            "far", "", 100 + other, 9, "computing", since[other], 1, waits[other]
        ).to_text()
    monkeypatch.setattr(failures, "_waits_for_others", lambda _: waits[0])
    watch = watch_over(store)
    watch._me = replace(Whereabouts.of_this_process(), place=9, words="computing")
    watch._arrived = time.monotonic() - since[0]
    watch._look()
    assert failure_in(store).rank == rank
    assert words in failure_in(store).sentence


def test_the_first_failure_counts_and_one_who_left_is_not_missed() -> None:
    store = Store()
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    neighbour = Whereabouts.of_this_process()
    store["beat/1"] = Whereabouts(neighbour.host, neighbour.space, gone.pid, 3, "computing", 0.1, 1).to_text()
    store["left/1"] = ""
    watch = watch_over(store)
    watch._look()
    assert "failure" not in store
    del store["left/1"]
    watch._look()
    assert failure_in(store).rank == 1
    assert "ended without a word, last heard of while computing" in failure_in(store).sentence
    watch._write(Failure(2, "another one", 1))
    assert failure_in(store).rank == 1


def torchrun(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with (folder / "out.txt").open("a") as out, (folder / "err.txt").open("a") as err:
        return subprocess.Popen(command, stdout=out, stderr=err, text=True, env=environment)


def until(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


@pytest.mark.slow
def test_torchrun_restarts_a_run_from_its_last_checkpoint_and_sigterm_saves_one(tmp_path: Path) -> None:
    """One launch: a worker is killed, torchrun starts both anew, and they resume by themselves; then all is stopped."""
    out = tmp_path / "run"
    settings = tmp_path / "settings.json"
    settings.write_text(json.dumps({"model": of_runs().MODEL}))
    arguments = ["--preset", "tiny", "--config", str(settings), "--batch", "4", "--steps", "1000000", "--device", "cpu"]
    arguments += ["--save-every", "20", "--eval-every", "0", "--schedule-steps", "100", "--parallel", "ddp"]
    launcher = torchrun(tmp_path, "--max-restarts=1", "-m", "fusestep", "train", *arguments, "--out", str(out))
    try:
        until(lambda: complete(out))
        workers = psutil.Process(launcher.pid).children()
        assert len(workers) == 2
        workers[1].kill()
        until(lambda: "resuming" in (tmp_path / "out.txt").read_text())
        # Though the launcher sends SIGTERM as soon as it misses the process.
        assert f"(process {workers[1].pid} on " in (tmp_path / "err.txt").read_text()
        assert "ended without a word" in (tmp_path / "err.txt").read_text()
        resumed_at = complete(out)[-1]
        until(lambda: complete(out)[-1] > resumed_at)
        launcher.send_signal(signal.SIGTERM)
        launcher.wait(timeout=40)
    finally:
        for process in [*psutil.Process(launcher.pid).children(recursive=True)] if launcher.poll() is None else []:
            process.kill()
        launcher.kill()
        launcher.wait()
    said = (tmp_path / "out.txt").read_text()
    found = checkpoint.newest(out)
    assert found is not None
    assert f"SIGTERM reached a rank: all stop after step {found.step} and save" in said
    assert f"stopped at step {found.step} of 1000000 and saved; go on with: fusestep train --resume --out" in said
    # What came of it is what an undisturbed process comes to.
    straight = TrainConfig(
        preset="tiny", model=of_runs().MODEL, batch=4, steps=found.step, device="cpu", save_every=0, eval_every=0,
        schedule_steps=100, out=str(tmp_path / "straight"),
    )  # fmt: skip
    train(straight)
    of_runs().assert_same_run(out, tmp_path / "straight", 1e-5)


def test_fresh_ranks_say_what_the_launch_lacks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from fusestep.errors import UserError

    runs = of_runs()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UserError, match="2 processes were started and --parallel says nothing"):
        train(runs.config(tmp_path / "run"))
    with pytest.raises(UserError, match="MASTER_ADDR and MASTER_PORT not; start the processes with torchrun"):
        train(runs.config(tmp_path / "run", parallel="ddp"))
    store = torch.distributed.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with pytest.raises(UserError, match=r"of 2 ranks 1 did not come within 2 s \(this is rank 0"):
        train(runs.config(tmp_path / "run", parallel="ddp", timeout=2.0))
    assert not (tmp_path / "run").exists()
