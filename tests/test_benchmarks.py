"""The benchmarks on a CPU: every part runs at a tiny size, and results are compared as they should."""

from __future__ import annotations

import copy
import datetime
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from benchmarks import __main__ as command
from benchmarks import compare, parts, peers, steps, training

from fusestep.ladder.contenders import Contender
from fusestep.ladder.rungs import Recipe
from fusestep.models import GPTConfig

ROOT = Path(__file__).resolve().parents[1]
#: Rehearsed in one process; the rest start processes of their own, or take minutes.
QUICK = ("adam", "norms", "fp8", "loss", "mlp", "pieces", "rates", "scaling")
REHEARSE = """
import sys
from pathlib import Path
import torch
from benchmarks import parts
for name in sys.argv[2:]:
    torch.manual_seed(0)  # of 30 rows PyTorch's sums in bf16 are at times farther off than a timed norm may be
    part = parts.load(name)
    parts.rehearse(part)
    parts.measure(part, Path(sys.argv[1]) / f"{name}.json", 60.0)
"""


def test_every_part_is_a_module_that_the_command_can_show_and_compare() -> None:
    for name in parts.PARTS:
        part = parts.load(name)
        assert part.module.COLUMNS
        assert f"`{name.partition('-')[0]}" in (ROOT / "docs" / "measuring.md").read_text(), name
        assert callable(part.module.cells)
        assert callable(part.module.run)
        assert set(part.ratios.values()) <= {"more", "less"}
        if part.ratios:
            assert part.identity(dict.fromkeys(part.module.IDENTITY, 1)) == (1,) * len(part.module.IDENTITY)


@pytest.mark.slow
def test_a_rehearsal_measures_every_quick_part(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", REHEARSE, str(tmp_path), *QUICK],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for name in QUICK:
        document = json.loads((tmp_path / f"{name}.json").read_text())
        part = parts.load(name)
        assert not document["unfinished"], name
        mine = [row for row in document["rows"] if part.ours(row)]
        assert mine, name
        assert len({part.identity(row) for row in document["rows"]}) == len(document["rows"]), name
        for row in mine:
            assert "failed" not in row
            assert len(part.module.cells(row)) == len(part.module.COLUMNS)
            # Memory is not counted on a CPU.
            assert all(row[ratio] > 0 for ratio in part.ratios if ratio != "extra_bytes"), (name, row)


@pytest.mark.slow
def test_whole_steps_run_in_processes_of_their_own_and_agree_on_the_loss(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.parts", "steps-a", str(tmp_path / "a.json"), "--rehearse"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = {row["configuration"]: row for row in json.loads((tmp_path / "a.json").read_text())["rows"]}
    native = rows["native, amp"]
    for name, row in rows.items():
        assert "failed" not in row, row
        assert row["loss"] == pytest.approx(native["loss"], rel=2e-3), name
    assert rows["fusestep bf16"]["weights"] == rows["fusestep bf16"]["moments"] == "fp32"
    masters = rows["fusestep bf16, masters"]
    assert (masters["weights"], masters["moments"], masters["masters"]) == ("bf16", "fp32", "fp32")
    assert rows["native, all bf16"]["moments"] == "bf16"
    assert sum(kernel["share"] for kernel in masters["kernels"]) > 0.3


def test_of_another_librarys_ways_the_first_that_runs_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def contender(name: str, *attempts: int) -> Contender:
        return Contender(name, "peer", "", tuple(Recipe(lr=float(one), peer=name) for one in attempts), name)

    asked: list[list[tuple[str, float]]] = []

    def measured(works: list[training.Work], together: int) -> Iterator[tuple[training.Work, dict[str, Any]]]:
        asked.append([(one.setup.name, one.setup.recipe.lr) for one in works])
        for one in works:
            fails = one.setup.recipe.lr in (1, 4)
            yield one, {"failed": f"{one.setup.name} cannot"} if fails else {"loss": 1.0}

    found = [contender("liger", 1, 2), contender("quack", 3, 3), contender("torchao", 4)]
    monkeypatch.setattr(steps, "measured", measured)
    monkeypatch.setattr(steps, "others", lambda: found)
    setups = [training.Setup("ours", Recipe(lr=5.0, optimizer="fused")), training.Setup("native, amp", Recipe(lr=0.0))]
    monkeypatch.setattr(steps, "chosen", lambda model: list(setups))
    replies = [(setup.name, setup.recipe.lr, reply) for setup, reply in steps.replies(steps.MODELS["a"])]
    assert replies == [
        ("native, amp", 0.0, {"loss": 1.0}),
        ("quack", 3.0, {"loss": 1.0}),
        ("torchao", 4.0, {"failed": "torchao cannot"}),
        ("ours", 5.0, {"loss": 1.0}),
        ("liger", 2.0, {"loss": 1.0, "first_choice_failed": "liger cannot"}),
    ]
    # What compiles longest gets ready in the first group, beside what all are set against.
    first = [("native, amp", 0), ("quack", 3), ("torchao", 4), ("ours", 5), ("liger", 1)]
    assert asked == [first, [("liger", 2)]]


class Threads:
    """What `training.measured` needs of multiprocessing, in threads: what runs in them can be replaced."""

    Pipe = staticmethod(multiprocessing.Pipe)

    def set_forkserver_preload(self, names: list[str]) -> None: ...

    class Process(threading.Thread):
        def __init__(self, target: Any, args: tuple[Any, ...]) -> None:
            super().__init__(daemon=True)
            theirs = Connection(os.dup(args[0].fileno()))
            self.life, self.connection, self.work = target, theirs, args[1]

        def run(self) -> None:
            try:
                self.life(self.connection, self.work)
            except SystemExit:
                pass
            finally:
                self.connection.close()

        def kill(self) -> None: ...


def test_processes_that_fail_or_end_have_replies_that_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    class Prepared:
        losses: ClassVar = [4.5]

        def __init__(self, work: training.Work) -> None:
            self.name = work.setup.name
            if self.name == "raises":
                raise RuntimeError("no such kernel")
            if self.name == "ends":
                raise SystemExit
            events.append(f"{self.name} ready")

        def timed(self) -> dict[str, Any]:
            events.append(f"{self.name} timed")
            return {"device_ms": 1.0}

        def kernels(self) -> dict[str, Any]:
            if self.name == "ends in the profiler":
                raise SystemExit
            return {"kernels": []}

    monkeypatch.setattr(training, "Prepared", Prepared)
    monkeypatch.setattr(training.multiprocessing, "get_context", lambda _: Threads())
    config, recipe = GPTConfig(), Recipe(optimizer="fused")
    names = ["first", "raises", "second", "ends", "ends in the profiler"]
    works = [training.Work(training.Setup(name, recipe), config, 1, 1, "cpu") for name in names]
    replies = {work.setup.name: reply for work, reply in training.measured(works, together=3)}
    assert list(replies) == names
    assert replies["first"] == replies["second"] == {"device_ms": 1.0, "kernels": []}
    assert "no such kernel" in replies["raises"]["failed"]
    assert replies["ends"]["failed"] == "its process ended without a word"
    ended = {"device_ms": 1.0, "unprofiled": "its process ended without a word"}
    assert replies["ends in the profiler"] == ended
    # Nobody gets ready while another is timed, and those of the next group begin when this one is through.
    assert set(events[:2]) == {"first ready", "second ready"}
    assert events[2:] == ["first timed", "second timed", "ends in the profiler ready", "ends in the profiler timed"]


# ---- comparing


def document(*rows: dict[str, Any]) -> dict[str, Any]:
    return {"rows": list(rows), "environment": {"gpu": "NVIDIA Chip 9"}}


def adam_row(share: float, *, implementation: str = "fusestep", spread: float = 0.01) -> dict[str, Any]:
    quartiles = [1 - spread, 1 + spread]
    return {
        "set": "29M",
        "implementation": implementation,
        "of_floor": share,
        "device_ms": 1.0,
        "device_ms_quartiles": quartiles,
    }


@pytest.mark.parametrize(
    ("old", "new", "spread", "is_slower"),
    [
        (0.90, 0.86, 0.001, False),  # 4.4 %: noise
        (0.90, 0.85, 0.001, True),  # 5.6 %
        (0.90, 0.85, 0.02, False),  # within three times the spread of either
        (0.90, 0.99, 0.001, False),  # faster
    ],
)
def test_only_what_is_worse_than_noise_is_slower(old: float, new: float, spread: float, *, is_slower: bool) -> None:
    part = parts.load("adam")
    before, now = document(adam_row(old)), document(adam_row(new, spread=spread))
    found = compare.slower(part, before, now)
    assert bool(found) == is_slower
    if is_slower:
        assert "29M, fusestep" in str(found[0])
        assert "of_floor was 0.900, is 0.850" in str(found[0])


def test_less_is_better_for_the_loss_and_a_missing_row_is_told() -> None:
    part = parts.load("loss")
    row = {"tokens": 8, "width": 4, "vocabulary": 9, "implementation": "fusestep", "of_products": 1.0}
    assert not compare.slower(part, document(row), document(row | {"of_products": 0.5}))
    assert compare.slower(part, document(row), document(row | {"of_products": 1.2}))
    gone = compare.slower(part, document(row), document())
    assert "was not measured now" in str(gone[0])


def test_other_implementations_may_become_slower() -> None:
    part = parts.load("adam")
    before = document(adam_row(0.9, implementation="torch fused"))
    assert not compare.slower(part, before, document(adam_row(0.2, implementation="torch fused")))


def test_results_are_compared_with_the_newest_of_the_same_model(tmp_path: Path) -> None:
    for name in ("2026-01-09-nvidia-chip-9-adam", "2026-02-01-nvidia-chip-9-adam", "2026-03-01-other-adam"):
        (tmp_path / f"{name}.json").write_text(json.dumps(document(adam_row(0.9))))
    (tmp_path / "2026-04-01-nvidia-chip-9-adam.unfinished").write_text("{}")
    part = parts.load("adam")
    path, changes = compare.with_results(part, tmp_path, document(adam_row(0.5)))
    assert path is not None
    assert path.name == "2026-02-01-nvidia-chip-9-adam.json"
    assert [change.new for change in changes] == [0.5]
    assert compare.with_results(part, tmp_path / "none", document(adam_row(0.5))) == (None, [])


@pytest.mark.parametrize("name", ["adam", "norms", "fp8"])
def test_the_committed_results_are_as_fast_as_themselves_and_can_be_shown(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    part = parts.load(name)
    path = compare.newest(command.RESULTS, "NVIDIA H200", name)
    assert path is not None
    found = json.loads(path.read_text())
    assert not compare.slower(part, found, found)
    slow = copy.deepcopy(found)
    ratio, better = next((r, b) for r, b in part.ratios.items() if found["rows"][0].get(r))
    for row in slow["rows"]:
        row[ratio] *= 0.5 if better == "more" else 2.0
    assert len(compare.slower(part, found, slow)) == sum(part.ours(row) for row in found["rows"])


def test_the_committed_results_name_no_folder_of_the_machine_that_they_are_from() -> None:
    found = list(command.RESULTS.glob("*.json"))
    assert found
    assert [path.name for path in found if 'File \\"/' in path.read_text()] == []


def test_a_part_that_failed_or_was_cut_off_is_a_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    part = parts.load("adam")
    problems, nothing = command.report(part, tmp_path / "none.json", tmp_path, "failed with status 1")
    assert (problems, nothing) == (["adam: failed with status 1"], None)
    file = tmp_path / "adam.json"
    row = adam_row(0.9) | {"floor_ms": 1.0, "host_ms": 1.0, "parameters": 1, "tensors": 1}
    whole = document(row) | {"copy_bytes_per_second": 4e12, "peers": {"liger": "not installed"}, "seconds": 3.0}
    file.write_text(json.dumps(whole))
    problems, read = command.report(part, file, tmp_path, "cut off after 3 s, 1 rows measured")
    assert problems == ["adam: cut off after 3 s, 1 rows measured"]
    assert read == whole
    assert "not installed: liger" in capsys.readouterr().out


def test_rows_stop_when_the_time_is_over_and_what_there_is_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rows(copy: float) -> Any:
        for number in range(1000):
            clock[0] += 10.0
            yield {"number": number, "failed": f'File "{tmp_path}/mine.py", line 3'}

    clock = [0.0]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(parts.time, "monotonic", lambda: clock[0])
    part = parts.Part("made", SimpleNamespace(run=rows), "")  # type: ignore[arg-type]
    made = parts.measure(part, tmp_path / "made.json", 25.0)
    assert [row["number"] for row in made["rows"]] == [0, 1, 2]
    assert {row["failed"] for row in made["rows"]} == {'File "mine.py", line 3'}
    assert made["unfinished"]
    assert json.loads((tmp_path / "made.json").read_text()) == made


def test_libraries_that_are_absent_or_lack_what_they_need_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("liger_kernel", "quack"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    # QuACK is of no use without CUTLASS's package.
    assert peers.versions() == {"liger": "unknown version", "quack": "not installed", "torchao": "not installed"}


@pytest.mark.parametrize(("share", "unfinished", "status"), [(0.9, False, 0), (0.5, False, 1), (0.9, True, 1)])
def test_the_command_writes_results_and_exits_as_it_went(
    share: float, unfinished: bool, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = {"floor_ms": 1.0, "host_ms": 1.0, "parameters": 1, "tensors": 1}
    made = document(adam_row(share) | more) | {"copy_bytes_per_second": 4e12, "peers": {}, "seconds": 3.0}
    made |= {"unfinished": unfinished}

    def run(name: str, file: Path, seconds: float, is_rehearsal: bool) -> str | None:
        file.write_text(json.dumps(made))
        return "cut off after 75 s, 1 rows measured" if unfinished else None

    before, out = tmp_path / "before", tmp_path / "out"
    before.mkdir()
    out.mkdir()
    # A run that was cut off earlier on this day; the whole one takes its place.
    name = f"{datetime.date.today().isoformat()}-nvidia-chip-9-adam"
    (out / f"{name}.unfinished").write_text("{}")
    (before / "2026-01-01-nvidia-chip-9-adam.json").write_text(json.dumps(document(adam_row(0.9))))
    monkeypatch.setattr(command, "run", run)
    monkeypatch.setattr(command.hardware, "devices", lambda: ["a GPU"])
    arguments = ["benchmarks", "adam", "--out", str(out), "--against", str(before)]
    monkeypatch.setattr(sys, "argv", arguments)
    if status:
        with pytest.raises(SystemExit) as ended:
            command.main()
        assert ended.value.code == status
    else:
        command.main()
    (file,) = out.iterdir()
    assert file.name == name + (".unfinished" if unfinished else ".json")
    assert json.loads(file.read_text()) == made


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
def test_a_command_that_is_told_to_end_ends_its_part_and_keeps_what_that_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A part leads a group of its own, so that no signal to the command reaches it."""
    pids: list[int] = []
    popen = subprocess.Popen

    def endless(words: list[str], **options: Any) -> subprocess.Popen[bytes]:
        file = Path(words[4])
        file.write_text(json.dumps({"rows": [], "unfinished": True, "environment": {"gpu": None}}))
        process = popen([sys.executable, "-c", "import time; time.sleep(600)"], **options)
        pids.append(process.pid)
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
        return process

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(command.subprocess, "Popen", endless)
    monkeypatch.setattr(sys, "argv", ["benchmarks", "adam", "norms", "--rehearse"])
    try:
        with pytest.raises(SystemExit) as told:
            command.main()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert told.value.code == 1
    assert len(pids) == 1, "the next part was begun"
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


@pytest.mark.parametrize(
    ("gpus", "arguments", "words"),
    [
        (0, ["adam"], "a CUDA device is needed (.*); --rehearse runs tiny shapes here"),
        (1, ["adams"], "unknown part adams; choose from adam, norms, .*"),
        (1, ["ranks-b"], "ranks-b needs 2 GPUs and there is 1; leave it out, or run it on a machine with more of them"),
        (1, ["--seconds", "0"], "argument --seconds: 0 is not above 0"),
        (1, ["--seconds", "nan"], "argument --seconds: nan is not above 0"),
        (1, ["--seconds", "long"], "argument --seconds: invalid positive value: 'long'"),
        (1, ["--against", "gone"], "--against names gone, which is no folder; leave it out, .*"),
        (1, ["--out", "file/there"], "--out file/there cannot be written, for .*/file stands in the way; .*"),
    ],
)
def test_what_cannot_be_measured_is_one_sentence_before_anything_is_begun(
    gpus: int,
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    monkeypatch.setattr(command.hardware, "devices", lambda: ["a GPU"] * gpus)
    monkeypatch.setattr(command, "run", None)
    monkeypatch.setattr(sys, "argv", ["benchmarks", *arguments])
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == 2
    assert re.fullmatch(f"python -m benchmarks: {words}\n", capsys.readouterr().err)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


# ---- other libraries, by stand-ins


class Doubled(torch.nn.LayerNorm):
    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        return super().forward(input) * 2


def test_a_library_that_is_wrong_or_fails_has_a_row_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    norms = parts.load("norms").module
    options: dict[str, Any] = {"eps": norms.EPS, "dtype": torch.bfloat16}

    class Fails(torch.nn.LayerNorm):
        def forward(self, _: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("no kernel for this width")

    makers = {"right": torch.nn.LayerNorm, "doubled": Doubled, "fails": Fails}
    monkeypatch.setattr(norms.timing, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(
        peers, "norms", lambda kind, width, *_: {n: lambda m=m: m(width, **options) for n, m in makers.items()}
    )
    monkeypatch.setattr(norms, "CHECKED", 30)
    monkeypatch.setattr(norms, "COMPILES", False)
    rows = {row["implementation"]: row for row in norms.measure("layer_norm", 40, 24, 1e12)}
    assert {name for name, row in rows.items() if "failed" in row} == {"doubled", "fails"}
    assert rows["doubled"]["failed"].startswith("wrong: relative error")
    assert rows["fails"]["failed"] == "RuntimeError: no kernel for this width"
    assert rows["right"]["forward_us"] > 0


def test_our_own_wrong_results_end_the_part(monkeypatch: pytest.MonkeyPatch) -> None:
    loss = parts.load("loss").module
    monkeypatch.setattr(loss.timing, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(loss, "COMPILES", False)
    monkeypatch.setattr(loss, "linear_cross_entropy", lambda x, w, t, **_: loss.whole(x, w, t) * 1.1)
    with pytest.raises(SystemExit, match=r"fusestep.*wrong: relative error 1\.\d+e-01"):
        loss.measure(40, 24, 96, {})


def test_calls_of_a_graph_walk_through_three_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    timing = parts.load("norms").module.timing
    monkeypatch.setattr(timing, "DEVICE", torch.device("cuda"))
    device = SimpleNamespace(L2_cache_size=50 << 20)
    monkeypatch.setattr(timing.torch.cuda, "get_device_properties", lambda _: device)
    for bytes_per_call in (14 << 20, 50 << 20, 60 << 20, 149 << 20):
        sets = timing.sets_needed(bytes_per_call)
        assert (sets - 1) * bytes_per_call < 3 * device.L2_cache_size <= sets * bytes_per_call
        assert sets <= timing.CALLS  # else calls of one graph would not reach the last
    assert timing.sets_needed(1 << 30) == 1
