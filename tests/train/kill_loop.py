"""Kill a process that saves a checkpoint at every step, at random moments, many times; a program for the tests.

    python kill_loop.py FOLDER KILLS SEED

The parent imports torch once and forks the runs, so that a kill takes milliseconds. After each kill the newest good
checkpoint must load, must not be older than the one before the kill, and must hold the weights that an undisturbed run
has at its step. It prints how many kills hit a checkpoint that was being written, and the last step.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from fusestep.train import TrainConfig, checkpoint, train

MODEL = {"width": 8, "heads": 1, "layers": 1, "ffn_width": 8, "context": 4}


def config(out: Path, **changes: object) -> TrainConfig:
    settings: dict[str, object] = {
        "preset": "tiny",
        "model": MODEL,
        "batch": 1,
        "steps": 10**6,
        "save_every": 1,
        "eval_every": 0,
        "device": "cpu",
    }
    return TrainConfig(out=str(out), **{**settings, **changes})  # type: ignore[arg-type]


def forked(job: TrainConfig) -> int:
    """Train in a child process and return its id."""
    child = os.fork()
    if child:
        return child
    train(job)
    os._exit(0)


def main(folder: Path, kills: int, seed: int) -> None:
    torch.set_num_threads(1)
    chance = random.Random(seed)
    run = folder / "run"
    torn, last = 0, 0
    # torch imports much of itself when first used: once here, not in every child.
    train(config(folder / "warm", steps=1))
    for _ in range(kills):
        exists = (run / "config.json").exists()
        child = forked(config(run, resume=exists))
        time.sleep(chance.uniform(0.0, 0.3))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        torn += any((run / checkpoint.FOLDER).glob(".writing-*"))
        newest = checkpoint.newest(run)
        step = newest.step if newest else 0
        if step < last:
            raise SystemExit(f"step {step} after step {last}")
        last = step
        if newest is not None:
            newest.state()
            if not all(bool(value.isfinite().all()) for value in newest.weights().values()):
                raise SystemExit(f"step {step} has weights that are not finite")

    straight = folder / "straight"
    train(config(straight, steps=last, schedule_steps=10**6, save_every=0))
    expected, found = checkpoint.newest(straight), checkpoint.newest(run)
    if expected is None or found is None:
        raise SystemExit("no checkpoint was ever written")
    for name, value in expected.weights().items():
        if not torch.equal(value, found.weights()[name]):
            raise SystemExit(f"{name} at step {last} differs from the undisturbed run's")
    sys.stdout.write(f"kills {kills} torn {torn} step {last}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
