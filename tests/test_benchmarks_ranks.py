"""The benchmark of several ranks: rehearsed on two CPU processes, and what becomes of ranks that fail or hang."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from benchmarks import __main__ as command
from benchmarks import parts, ranks
from benchmarks.crew import Crew

#: One rank in both precisions; plain PyTorch; each way to share data or products once.
REHEARSED = (
    "A in bf16, one rank, graph, weak",
    "A in fp8, one rank, graph, strong",
    "A in bf16, fsdp, compiled, weak",
    "A in bf16, fsdp, graph, weak",
    "A in fp8, ddp, graph, strong",
    "A in fp8, tp=2,sp, graph, strong",
)


def test_ranks_are_measured_beside_one_and_have_its_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = parts.load("ranks-a")
    for name, value in ranks.TINY.items():
        monkeypatch.setattr(ranks, name, value)
    every = ranks.cases("a")
    monkeypatch.setattr(ranks, "cases", lambda _: [case for case in every if str(case) in REHEARSED])
    document = parts.measure(part, tmp_path / "a.json", 120.0)
    assert json.loads((tmp_path / "a.json").read_text()) == document
    rows = {f"{row['precision']}, {row['path']}, {row['mode']}": row for row in document["rows"]}
    assert len(rows) == len(REHEARSED) == len({part.identity(row) for row in document["rows"]})
    for row in rows.values():
        assert "failed" not in row, row["failed"]
        assert len(part.module.cells(row)) == len(part.module.COLUMNS)
        assert row["loss_deviation"] < 1e-3
        assert row["norm_deviation"] < 1e-2
    fsdp, native = rows["bf16, fsdp, graph"], rows["bf16, fsdp, compiled"]
    # The norm of twice as many sequences is another one, by far.
    assert rows["fp8, one rank, graph"]["norm"] > 1.2 * fsdp["norm"]
    assert (fsdp["sequences"], rows["fp8, ddp, graph"]["sequences"]) == (4, 2)
    assert fsdp["efficiency"] == pytest.approx(fsdp["one_ms"] / fsdp["step_ms"])
    assert fsdp["alone_ms"] == fsdp["one_ms"]
    ddp, tensor = rows["fp8, ddp, graph"], rows["fp8, tp=2,sp, graph"]
    assert ddp["efficiency"] == pytest.approx(ddp["one_ms"] / (2 * ddp["step_ms"]))
    assert ddp["exposed_ms"] == pytest.approx(max(0.0, ddp["step_ms"] - ddp["alone_ms"]))
    assert tensor["exposed_ms"] is None
    assert fsdp["over_native"] == pytest.approx(native["step_ms"] / fsdp["step_ms"])
    assert all(row["sent_ms"] > 0 for row in (fsdp, native, ddp, tensor))
    assert rows["bf16, one rank, graph"]["sent_ms"] == 0
    assert all(row["plan_ms"] > 0 for row in (fsdp, ddp, tensor))
    assert "CUDA graphs run on CUDA devices" in fsdp["fallback"]


def test_every_case_of_a_model_is_measured_in_every_way() -> None:
    found = {str(case) for case in ranks.cases("d")}
    # 2 precisions, 4 ways, 2 modes and 2 kinds; one rank and plain PyTorch beside them.
    assert len(found) == 2 * 4 * 2 * 2 + 2 * 2 + 2
    assert {"D in fp8, fsdp, eager, strong", "D in bf16, tp=2, graph, weak", "D in bf16, ddp, compiled, weak"} < found


@pytest.mark.parametrize(("loss", "norm"), [(2.02, 1.0), (2.0, 1.2), (float("nan"), 1.0), (2.0, float("nan"))])
def test_other_losses_than_those_of_one_rank_have_failed(loss: float, norm: float) -> None:
    case = ranks.cases("a")[-1]
    one = {"losses": [2.5, 2.0], "norm": 1.0}
    assert "failed" not in ranks.compared(case, {"losses": [2.5, 2.001], "norm": 1.01}, one)
    wrong = {"losses": [2.5, loss], "norm": norm}
    if case.precision == "fp8":
        wrong["losses"] = [2.5, loss + 0.01]
    assert ranks.compared(case, wrong, one)["failed"].startswith("wrong: it has losses 2.5000, ")
    assert "nothing says whether" in ranks.compared(case, wrong, None)["failed"]


LIVES = """
import os, time

def live(world, work, kept):
    kept["done"] = kept.get("done", 0) + 1
    if work.startswith("hang") and world.rank == 1:
        time.sleep(60)
    if work.startswith("raise") and world.rank == 1:
        raise ValueError("one is the odd one out")
    if work.startswith("die") and world.rank == 0:
        os._exit(9)
    world.meet()
    return {"rank": world.rank, "done": kept["done"], "multicast": os.environ["NCCL_NVLS_ENABLE"]}
"""


def test_what_hangs_raises_or_dies_is_ended_and_the_rest_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lives_of_ranks.py").write_text(LIVES)
    monkeypatch.syspath_prepend(tmp_path)
    began = time.monotonic()
    with Crew(2, "cpu", "lives_of_ranks:live") as crew:
        assert crew.do("well", 20.0) == {"rank": 0, "done": 1, "multicast": "0"}
        assert crew.do("well again", 20.0)["done"] == 2
        assert crew.do("hang", 1.0) == {"failed": "rank 0 and 1 gave no answer within 1 s"}
        assert crew.do("after", 20.0)["done"] == 1
        assert "ValueError: one is the odd one out" in crew.do("raise", 20.0)["failed"]
        assert crew.do("die", 20.0)["failed"].startswith("rank 0: its process ended without a word")
        assert crew.do("after all", 20.0)["done"] == 1
        processes = [process for process, _ in crew._running]
    assert all(not process.is_alive() for process in processes)
    assert time.monotonic() - began < 60


def fake_command(monkeypatch: pytest.MonkeyPatch, gpus: int, *words: str) -> list[str]:
    """The parts that the command runs on so many GPUs."""
    ran: list[str] = []

    def run(name: str, *_: Any) -> str | None:
        ran.append(name)
        return None

    monkeypatch.setattr(command, "run", run)
    monkeypatch.setattr(command, "report", lambda *_: ([], None))
    monkeypatch.setattr(command.hardware, "devices", lambda: ["a GPU"] * gpus)
    monkeypatch.setattr(command.parts, "PARTS", {"adam": 1, "ranks-a": 1, "ranks-b": 1})
    monkeypatch.setattr(sys, "argv", ["benchmarks", *words])
    command.main()
    return ran


def test_with_one_gpu_ranks_are_left_out_and_refused_where_they_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fake_command(monkeypatch, 1) == ["adam"]
    assert "ranks-a needs 2 GPUs and there is 1: it is left out" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        fake_command(monkeypatch, 1, "ranks")
    assert ended.value.code == 2
    assert "ranks-a needs 2 GPUs and there is 1; leave it out" in capsys.readouterr().err
    assert fake_command(monkeypatch, 2, "ranks") == ["ranks-a", "ranks-b"]
    assert fake_command(monkeypatch, 2) == ["adam", "ranks-a", "ranks-b"]
