"""`fusestep doctor --distributed`: collectives with checked values, and ranks that are wrong or dead, by name."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import distributed

from fusestep.cli import main
from fusestep.distributed import probe
from fusestep.distributed.launch import join
from harness import RanksFailedError, module_of


def of_runs() -> ModuleType:
    """What test_train.py has to run several ranks."""
    return module_of(Path(__file__).with_name("test_train.py"))


def examine(rank: int, port: int) -> list[Any]:
    """Two reports of this rank: of a sound world, and of one whose rank 1 gets wrong sums."""
    runs = of_runs()
    worlds = runs.launched(port)
    reports = []
    probe.LARGE = {"cpu": 1 << 12}
    original = distributed.all_reduce

    def wrong(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        work = original(tensor, *arguments, **options)
        tensor[-1] += 1.0
        return work

    for replacement in (original, wrong if rank == 1 else original):
        next(worlds)
        with runs.replaced(distributed, "all_reduce", replacement), join("cpu", 20.0) as world:
            found = probe.probe(world)
            reports.append((found.ok, found.as_dict(), str(found)))
    return reports


def test_every_collective_is_tried_and_a_wrong_rank_is_named() -> None:
    first, second, third = of_runs().launch(examine, ranks=3, timeout=90)
    assert first == second == third
    (is_sound, sound, page), (is_sound_too, broken, broken_page) = first
    assert is_sound
    assert not is_sound_too
    assert [one["name"] for one in sound["collectives"]] == [
        "all_reduce",
        "all_gather",
        "reduce_scatter",
        "broadcast",
        "send and receive (ring)",
    ]
    assert all(one["bandwidth"] > 0 and one["latency"] > 0 for one in sound["collectives"])
    assert [one["wrong"] for one in broken["collectives"]] == [(1,), (), (), (), ()]
    assert "3 ranks over gloo" in page
    assert "Every rank reaches every other, and every value is right." in page
    assert "WRONG on rank 1" in broken_page
    assert "WRONG RESULTS: all_reduce. Do not train over these ranks." in broken_page
    json.dumps(sound, allow_nan=False)


def die_of(rank: int, port: int, folder: Path) -> None:
    runs = of_runs()
    worlds = runs.launched(port)
    next(worlds)
    os.dup2(os.open(folder / f"{rank}.txt", os.O_WRONLY | os.O_CREAT), 2)

    def die(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == 1:
        probe._TRIALS["broadcast"] = die  # type: ignore[assignment]
    with join("cpu", 5.0) as world:
        probe.probe(world)


def test_a_rank_that_dies_in_the_trial_is_named(tmp_path: Path) -> None:
    with pytest.raises(RanksFailedError) as raised:
        of_runs().launch(die_of, tmp_path, timeout=60)
    said = (tmp_path / "0.txt").read_text() + (raised.value.outcomes[0].failure or "")
    assert "rank 1 (process " in said
    assert "ended without a word" in said


def test_slow_ranks_are_those_far_from_the_median() -> None:
    assert probe._slow([0.010, 0.011, 0.025, 0.009], "rank {}") == [
        "rank 2 takes 25.00 ms where the median is 10.50 ms"
    ]
    assert probe._slow([0.010, 0.011, 0.012], "rank {}") == []
    assert probe._slow([0.5], "rank {}") == []


def test_the_command_in_one_process(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "LARGE", {"cpu": 1 << 10})
    with pytest.raises(SystemExit) as left:
        main(["doctor", "--distributed", "--device", "cpu", "--json"])
    assert not left.value.code
    report = json.loads(capsys.readouterr().out)
    assert report["ok"]
    assert report["schema"] == probe.SCHEMA
    assert len(report["where"]) == 1
    for wrong, sentence in (
        (["--require", "cuda"], "run fusestep doctor twice"),
        (["--timeout", "0"], "--timeout is 0"),
    ):
        with pytest.raises(SystemExit) as left:
            main(["doctor", "--distributed", "--device", "cpu", *wrong])
        assert left.value.code == 2
        assert sentence in capsys.readouterr().err
