"""The ladder end to end, on models so small that only the bookkeeping takes time."""

from __future__ import annotations

import signal
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fusestep.errors import UserError
from fusestep.fp8 import support
from fusestep.ladder import Ladder, LadderConfig, ladder, processes
from fusestep.ladder.paths import relative
from fusestep.ladder.plan import BATCH, plan
from fusestep.ladder.processes import Workers
from fusestep.ladder.run import orders_of_rounds
from fusestep.ladder.rungs import RUNGS, Rung, recipe_of
from fusestep.ladder.subject import BuiltIn, _draw
from fusestep.ladder.words import remarks_of
from fusestep.models import GPT, GPTConfig

SMALL = LadderConfig(preset="tiny", rounds=2, steps=12, gate_steps=12, batch=2, device="cpu", natives="none")


def wrong_rung(name: str, **changes: object) -> Rung:
    return Rung(name, "wrong on purpose", lambda recipe: replace(recipe, **changes), None, "")  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def broken() -> Ladder:
    """Two honest rungs, one that trains otherwise, one whose process crashes."""
    rungs = (*RUNGS[:2], wrong_rung("impatient", lr=3e-3), wrong_rung("crashing", optimizer="none such"))
    return ladder(SMALL, rungs=rungs)


def test_an_honest_rung_passes_its_gate(broken: Ladder) -> None:
    verdict = broken.rungs[1].verdict
    assert verdict is not None
    assert verdict.passed
    assert verdict.deviation < 0.0005
    assert len(broken.rungs[1].losses) == 12
    assert broken.rungs[0].losses[-1] < broken.rungs[0].losses[0]


def test_a_rung_that_trains_otherwise_fails_its_gate_and_gets_no_speed(broken: Ladder) -> None:
    wrong = broken.rungs[2]
    assert wrong.verdict is not None
    assert not wrong.verdict.passed
    assert wrong.over_first is not None
    assert wrong.over_first.gain is None
    assert "failed the correctness gate" in wrong.over_first.reason


def test_a_crash_stops_its_own_rung_alone(broken: Ladder) -> None:
    crashed = broken.rungs[3]
    assert crashed.failure is not None
    assert crashed.failure.startswith("its process ended with status 1: KeyError")
    assert "Traceback" in crashed.log
    assert crashed.rounds == ()
    assert all(len(result.rounds) == 2 for result in broken.rungs[:3])


def test_on_a_cpu_a_fused_rung_is_the_reference_and_claims_nothing(broken: Ladder) -> None:
    fused = broken.rungs[1]
    assert [part.implementation for part in fused.rounds[0].parts] == ["torch"]
    assert fused.over_first is not None
    assert fused.over_first.claim in ("none", "slower")
    assert fused.over_first.reason.startswith("the fused part adam ran as its reference, not fused: ")
    assert any(note.startswith("Measured on the CPU") for note in broken.notes)


@pytest.fixture(scope="module")
def in_fp8() -> Ladder:
    """The first rung and the last, which a CPU emulates."""
    return ladder(replace(SMALL, rungs="fp8", rounds=1, amax_history=4, fp8_stats=True))


def test_emulated_fp8_passes_its_gate_and_claims_nothing(in_fp8: Ladder) -> None:
    fp8 = in_fp8.rungs[1]
    assert fp8.failure is None, fp8.log
    assert fp8.verdict is not None
    assert fp8.verdict.passed, fp8.verdict.reason
    assert fp8.verdict.tolerance >= 0.01
    assert fp8.losses != in_fp8.rungs[0].losses
    assert "emulated" in {part.implementation for part in fp8.rounds[0].parts}
    assert fp8.over_first is not None
    assert fp8.over_first.claim in ("none", "slower")
    assert any(note.startswith("FP8 is emulated") for note in in_fp8.notes)


def test_fp8_runs_with_the_recipe_that_was_asked_for_and_counts_its_worst_saturation(in_fp8: Ladder) -> None:
    fp8 = in_fp8.rungs[1]
    assert fp8.recipe.amax_history == 4
    assert any("amax_history_len=4" in note for note in in_fp8.notes)
    assert in_fp8.rungs[0].saturation is None
    assert fp8.saturation is not None
    assert fp8.saturation["module"].startswith("blocks.")
    assert fp8.saturation["tensors"] == 24
    assert 0 <= fp8.saturation["saturated"] < 0.05
    text = "\n".join(remarks_of(in_fp8))
    assert f"of the elements of {fp8.saturation['module']}'s {fp8.saturation['tensor']}" in text


def test_by_default_a_cpu_leaves_fp8_out_and_says_so() -> None:
    planned = plan(SMALL)
    assert planned.rungs == ("adam", "fused-adam", "fused-norm", "amp", "blocks", "loss")
    assert any("The rung fp8 is left out, since FP8 would be emulated" in note for note in planned.notes)
    assert not any("left out" in note for note in plan(replace(SMALL, rungs="1-4")).notes)


def test_raw_rounds_are_kept(broken: Ladder) -> None:
    for result in broken.rungs[:3]:
        for measured in result.rounds:
            assert len(measured.timing.steps) == 12
            assert measured.timing.first_step > 0
            assert measured.peak.resident is not None
            assert measured.peak.resident > 50 * 2**20


def test_an_optimizer_of_torch_names_its_implementation(broken: Ladder) -> None:
    assert broken.rungs[0].rounds[0].optimizer == (
        "torch.optim.AdamW (one parameter at a time, torch's default on cpu)"
    )


def test_reverse_order_gives_the_same_peaks_however_large_the_parent_is() -> None:
    """Nothing of an earlier rung is in a later one's memory, and nothing of the process that started it."""
    ballast = bytearray(900 * 2**20)
    ballast[::4096] = b"x" * len(ballast[::4096])
    small = plan(replace(SMALL, steps=1, batch=1)).request(recipe_of("adam"))
    large = replace(small, model={**small.model, "width": 512, "ffn_width": 4096, "context": 8})
    peaks: dict[str, list[int]] = {"large": [], "small": []}
    with Workers() as workers:
        workers.run(small)  # in a fresh checkout the first process also compiles what it imports
        for order in (("large", "small"), ("small", "large")):
            for name in order:
                reply = workers.run(large if name == "large" else small)
                assert reply.done is not None, reply
                peaks[name].append(reply.done["peak"]["resident"])
    for first, second in peaks.values():
        assert first == pytest.approx(second, rel=0.06)  # what the allocator keeps differs on a busy machine
    assert max(peaks["small"]) < 700 * 2**20
    assert min(peaks["large"]) > max(peaks["small"]) + 100 * 2**20  # weights, gradients and moments of 10 M


def test_orders_differ_between_rounds_and_repeat_with_the_seed() -> None:
    names = [rung.name for rung in RUNGS]
    orders = orders_of_rounds(names, 80, seed=3)
    assert all(sorted(order) == sorted(names) for order in orders)
    assert orders == orders_of_rounds(names, 80, seed=3)
    assert orders != orders_of_rounds(names, 80, seed=4)
    first = Counter(order[0] for order in orders)
    assert all(first[name] >= 4 for name in names)


def test_a_killed_process_is_a_sentence_and_the_next_request_is_answered() -> None:
    request = plan(SMALL).request(recipe_of("adam"))
    killed = [sys.executable, "-c", "import os, signal; input(); os.kill(os.getpid(), signal.SIGKILL)"]
    with Workers(killed) as workers:
        for _ in range(2):
            reply = workers.run(request)
            assert reply.failed is not None
            assert reply.failed.startswith("its process was killed by SIGKILL, which is what a system does")


def test_a_worker_that_cannot_start_says_why() -> None:
    with Workers([sys.executable, "-c", "raise SystemExit('no torch here')"]) as workers:
        reply = workers.run(plan(SMALL).request(recipe_of("adam")))
    assert reply.failed == "its process ended with status 1: no torch here."


def test_what_a_crash_leaves_names_no_folder_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of Python's own code, of a package, of ours and of the working folder, in the log and in the sentence."""
    (tmp_path / "mine.py").write_text(
        "import json, sys, torch, fusestep.factory as factory\n"
        "def object_pairs_hook(pairs):\n"
        "    torch.utils.data.DataLoader([1, 2], collate_fn=fail).__iter__().__next__()\n"
        "def fail(batch):\n"
        "    raise OSError(2, 'no', __file__)\n"
        "if __name__ == '__main__':\n"
        "    input()\n"
        "    print('x' * 9000 + '\\n' + __file__ + ' is not in /elsewhere' + __file__, file=sys.stderr)\n"
        "    json.loads('{\"a\": 1}', object_pairs_hook=object_pairs_hook)\n"
    )
    monkeypatch.chdir(tmp_path)
    with Workers([sys.executable, str(tmp_path / "mine.py")]) as workers:
        reply = workers.run(plan(SMALL).request(recipe_of("adam")))
    assert reply.failed == "its process ended with status 1: FileNotFoundError: [Errno 2] no: 'mine.py'."
    for line in ('File "mine.py", line 9', 'File "json/__init__.py"', 'File "torch/utils/data/dataloader.py"'):
        assert line in reply.log
    assert 'File "/' not in reply.log
    assert reply.log.startswith(f"mine.py is not in /elsewhere{tmp_path}/mine.py\n")


def test_a_path_below_home_is_told_from_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    said = "left /home/someone/.triton/cache and /mnt/home/someone/data"
    assert relative(said) == "left ~/.triton/cache and /mnt/home/someone/data"
    said = "in /home/someone, of file:///home/someone/a.py, in /home/someone. Not /home/someone.old or /home/someone-b"
    wanted = "in ~, of file://~/a.py, in ~. Not /home/someone.old or /home/someone-b"
    assert relative(said) == wanted
    monkeypatch.setenv("HOME", "/")
    assert relative(said) == said


def test_the_working_folder_and_the_users_own_temporary_one_are_not_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert relative(f"no such folder: '{tmp_path}', nor {tmp_path}/a") == "no such folder: '.', nor a"
    said = 'File "/tmp/torchinductor_someone/ab/cab.py", line 3'
    assert relative(said) == 'File "/tmp/torchinductor/ab/cab.py", line 3'


def test_a_profiler_that_ends_its_process_leaves_its_times(monkeypatch: pytest.MonkeyPatch) -> None:
    request = replace(plan(SMALL).request(recipe_of("adam")), profiled=True)
    crash = (
        "import os, fusestep.ladder.worker as worker, fusestep.ladder.profiling as profiling\n"
        "profiling.measure = lambda step, device: os.kill(os.getpid(), 11)\n"
        "worker.main()"
    )
    with Workers([sys.executable, "-c", crash]) as workers:
        reply = workers.run(request)
    assert reply.failed is None
    assert reply.done is not None
    assert reply.done["timing"]["windows"]
    assert reply.done["kernels"] == []
    assert reply.done["unprofiled"] == "the profiler ended its process: its process was killed by SIGSEGV"


def test_leaving_early_ends_the_worker() -> None:
    with Workers([sys.executable, "-c", "import time; time.sleep(60)"]) as workers:
        process = workers.start()
    assert process.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"preset": "huge"}, "--preset is 'huge'; choose one of auto, tiny, mini, scaleup, gpt2"),
        ({"rounds": 0}, "--rounds is 0"),
        ({"rounds": 10**20}, f"--rounds is {10**20}; give 1 to 1000000"),
        ({"batch": 10**20}, f"--batch is {10**20}; give 1 to 1000000"),
        ({"steps": -3}, "--steps is -3"),
        ({"gate_steps": 0}, "--gate-steps is 0"),
        ({"batch": 0}, "--batch is 0"),
        ({"seed": -1}, "--seed is -1"),
        ({"device": "tpu"}, "--device is 'tpu'"),
        ({"device": "cuda:77"}, "--device is cuda:77, but"),
        ({"rungs": "apex"}, "no rung"),
        ({"scaling": "block"}, "--recipe is of the rung fp8, which is not run; name it with --rungs"),
        ({"fp8_stats": True, "rungs": "1-5"}, "--fp8-stats is of the rung fp8, which is not run"),
        ({"scaling": "block", "rungs": "fp8", "fp8_stats": True}, "--fp8-stats looks at the state of delayed scaling"),
        ({"scaling": "current", "rungs": "fp8", "amax_history": 4}, "--amax-history is 4 and --recipe is current"),
        ({"rungs": "fp8", "amax_history": 0}, "amax_history_len is 0; pass a number of steps"),
        ({"data": "audio:x"}, "audio"),
        ({"data": "text:/no/such/folder"}, "/no/such/folder"),
    ],
)
def test_a_config_that_cannot_be_is_one_sentence_before_anything_runs(
    change: dict[str, object], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "COMMAND", ("/bin/false",))
    with pytest.raises(UserError, match=message) as caught:
        ladder(replace(SMALL, **change))  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_a_preset_keeps_its_vocabulary_unless_the_data_needs_more(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be, that is the question. " * 200)
    assert plan(SMALL).model.vocab_size == 96
    assert plan(SMALL).gate_model.vocab_size == 256
    assert plan(replace(SMALL, data=f"text:{text}")).model.vocab_size == 256
    assert plan(replace(SMALL, preset="gpt2")).model.vocab_size == 50304


def test_a_large_vocabulary_is_timed_on_random_ids_of_all_of_it_and_a_small_one_on_sequences() -> None:
    assert plan(SMALL).data == "synthetic"
    for preset, parameters in (("gpt2-untied", 163_109_376), ("long", 1_418_842_112)):
        planned = plan(replace(SMALL, preset=preset, batch=None))
        assert planned.data == "random"
        assert planned.parameters == parameters
        assert planned.batch == BATCH[preset]
        assert planned.model is not None
        assert planned.model.vocab_size == 50304
        assert not planned.model.tied_head
    config = GPTConfig(vocab_size=64, padded_from=50, context=700)
    stream = BuiltIn(config, "random", 3, seed=1).batches(torch.device("cpu"))
    (tokens, targets), (later, _) = next(stream), next(stream)
    assert tokens.shape == targets.shape == (3, 700)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert set(tokens.unique().tolist()) == set(range(50))
    assert not torch.equal(tokens, later)
    assert torch.equal(
        next(BuiltIn(config, "random", 3, seed=1).batches(torch.device("cpu"), reverse=True))[0][0], tokens[2]
    )


def test_weights_that_are_drawn_on_the_device_are_the_same_in_every_form() -> None:
    config = GPTConfig(vocab_size=37, width=24, heads=3, layers=2, ffn_width=40, context=8)
    states = []
    for form in ("seed", "plain", "fused"):
        torch.manual_seed(11)
        model = GPT(replace(config, form=form), device="meta").to_empty(device="cpu")  # type: ignore[arg-type]
        _draw(model)
        states.append(model.state_dict())
    torch.manual_seed(11)
    expected = GPT(config).state_dict()
    for state in states:
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[name], value) for name, value in expected.items())


def test_a_request_that_takes_too_long_is_ended_with_a_sentence_and_the_next_is_answered() -> None:
    request = plan(SMALL).request(recipe_of("adam"))
    sleeping = [sys.executable, "-c", "import time; input(); time.sleep(60)"]
    with Workers(sleeping) as workers:
        for _ in range(2):
            assert workers.run(request, limit_s=0.5).failed == "it took longer than 0.5 s."


def test_a_first_rung_that_crashes_ends_the_ladder_at_once_and_keeps_nothing(tmp_path: Path) -> None:
    rungs = (
        wrong_rung("nothing", optimizer="none such"),
        Rung("adam", "", lambda r: replace(r, optimizer="torch"), None, ""),
    )
    told: list[str] = []
    said = (
        "^nothing, which all rungs are compared with, did not run: its process ended with status 1: KeyError: .*--base"
    )
    with pytest.raises(UserError, match=said):
        ladder(
            replace(SMALL, rungs="1-2"),
            rungs=rungs,
            folder=tmp_path / "kept",
            progress=lambda _, text: told.append(text),
        )
    assert told == ["gate: nothing trains"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.gpu
def test_on_a_gpu_the_fused_rungs_run_kernels_and_pass_their_gate() -> None:
    config = LadderConfig(preset="mini", rounds=2, steps=12, gate_steps=30, batch=4, device="cuda", natives="none")
    measured = ladder(config)
    for result in measured.rungs:
        assert result.failure is None, result.log
        assert result.verdict is not None
        assert result.verdict.passed, result.verdict.reason
        for r in result.rounds:
            assert r.timing.host is not None
            assert r.timing.device is not None
            assert r.timing.device <= 1.2 * r.timing.step
            assert r.peak.allocated is not None
            assert r.peak.reserved is not None
            assert r.peak.reserved >= r.peak.allocated > 4 * 4 * 28_000_000  # weights, gradients and two moments
        reserved = [r.peak.reserved for r in result.rounds]
        assert max(reserved) <= 1.05 * min(reserved)  # whatever the order of the round
    assert {part.implementation for part in measured.rungs[2].rounds[0].parts} == {"triton"}
    if support(torch.device("cuda"))[0]:
        fp8 = next(result for result in measured.rungs if result.rung.name == "fp8")
        assert {part.implementation for part in fp8.rounds[0].parts} == {"triton", "native"}
    assert measured.rungs[0].rounds[0].optimizer == "torch.optim.AdamW (foreach, torch's default on cuda)"
