"""What the README and the docs promise: the demo's commands work, documented options exist, code in the docs runs."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import demo
import figures
from fusestep.cli import app, main
from fusestep.compat import run as compat_run

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMANDS = [command for _, commands in demo.STORY for command in commands]


def arguments_of(command: str, more: str = "") -> list[str]:
    program, *arguments = shlex.split(f"{command} {more}")
    assert program == "fusestep"
    return arguments


def process(command: str, folder: Path, more: str = "") -> str:
    """Run a command of the demo in a folder; later options stand before earlier ones. What it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "fusestep", *arguments_of(command, more)],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def fusestep(command: str, folder: Path, more: str = "") -> str:
    """The same in this process, which spares the import of torch; warnings are errors here."""
    out = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(out), pytest.raises(SystemExit) as ended:
        main(arguments_of(command, more))
    assert not ended.value.code, out.getvalue()
    return out.getvalue()


def demo_command(beginning: str) -> str:
    (found,) = [command for command in COMMANDS if command.startswith(f"fusestep {beginning}")]
    return found


def options_of(command: str) -> set[str]:
    """Every option that a command of the program has."""
    if command == "run":  # needs no extra, and so parses by itself
        names = {name for action in compat_run.parser()._actions for name in action.option_strings}
        return {name for name in names if name.startswith("--")} - {"--help"}
    parameters: list[Any] = app._load(command).params
    return {name for p in parameters for name in (*p.opts, *p.secondary_opts) if name.startswith("--")} - {"--help"}


# ---- the demo


def test_the_doctor_shows_and_proves_every_op(tmp_path: Path) -> None:
    page = process(demo_command("doctor"), tmp_path)
    for op in ("adam", "layer_norm", "rms_norm"):
        assert re.search(rf"^\s*{op}\s.*\bok\b", page, re.MULTILINE), page


@pytest.mark.slow
def test_a_model_trains_on_the_standard_library_and_writes(tmp_path: Path) -> None:
    train = demo_command("train --preset tiny --data text:stdlib")
    said = fusestep(train, tmp_path, "--steps 40")
    first, last = said.splitlines()[0], said.splitlines()[-1]
    assert "parameters" in first
    # 40 steps know that letters are not all equally likely: far below a random guess, ln 256 = 5.5452.
    found = re.search(r"final loss (\S+) .* 5\.5452", last)
    assert found is not None, last
    assert float(found[1]) < 3.6
    text = fusestep(demo_command("generate demo/text"), tmp_path)
    assert text.startswith("def ")
    assert len(text) > 100


@pytest.mark.slow
def test_generation_keeps_its_stride_after_half_of_the_demo_s_training(tmp_path: Path) -> None:
    fusestep(demo_command("train --preset tiny --data synthetic"), tmp_path, "--steps 160")
    generate = demo_command("generate demo/sequences")
    samples = json.loads(fusestep(generate, tmp_path, "--json"))["samples"]
    assert len(samples) == 8
    for sample in samples:
        assert len(sample["continuation"]) == 48
        assert sample["constant_stride"], sample
        # Counted here, not taken from the program: one difference, modulo the vocabulary.
        ids = sample["prompt"] + sample["continuation"]
        assert len({(b - a) % 96 for a, b in itertools.pairwise(ids)}) == 1
    assert "constant stride: 8 of 8" in fusestep(generate, tmp_path)


@pytest.mark.slow
def test_a_model_trains_in_fp8_and_shows_its_scales(tmp_path: Path) -> None:
    said = fusestep(demo_command("train --preset tiny --precision fp8"), tmp_path, "--steps 30")
    found = re.search(r"final loss (\S+) ", said.splitlines()[-1])
    assert found is not None
    assert float(found[1]) < 3.5
    table = fusestep(demo_command("inspect demo/fp8"), tmp_path)
    assert len(re.findall(r"^blocks\..* E[45]M[23] .*%", table, re.MULTILINE)) == 24


@pytest.mark.slow
def test_the_ladder_prints_and_keeps_its_rungs(tmp_path: Path) -> None:
    # All that it has without --rungs are measured in the ladder's own tests.
    few = "--rungs adam,loss --rounds 1 --steps 12 --gate-steps 10 --batch 2"
    table = process(demo_command("ladder"), tmp_path, few)
    for rung in ("adam", "loss"):
        assert re.search(rf"^{rung} ", table, re.MULTILINE), table
    kept = json.loads((tmp_path / "demo" / "ladder" / "ladder.json").read_text())
    assert [rung["name"] for rung in kept["rungs"]] == ["adam", "loss"]


def test_a_failing_command_ends_the_demo(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(demo, "STORY", [("Fails.", ["false", "echo never"])])
    monkeypatch.setattr(demo, "clear", lambda: None)
    monkeypatch.chdir(ROOT)
    assert demo.main() == 1
    said = capfd.readouterr()
    assert "$ false" in said.out
    assert "never" not in said.out
    assert "exit status 1" in said.err


# ---- the README and the docs


def code_blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def test_the_readme_shows_the_demo_s_commands() -> None:
    block = next(block for block in code_blocks(ROOT / "README.md", "") if "fusestep doctor" in block)
    assert block.splitlines() == COMMANDS


def test_the_newest_results_of_each_part_are_shown(tmp_path: Path) -> None:
    for name in ("2026-01-09-chip-adam", "2026-01-10-chip-adam", "2026-01-08-chip-norms"):
        (tmp_path / f"{name}.json").write_text("{}")
    found = [result["file"] for result in figures.newest_results(tmp_path)]
    assert found == ["2026-01-10-chip-adam.json", "2026-01-08-chip-norms.json"]


def test_make_targets_in_the_docs_exist() -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        text = page.read_text()
        calls = re.findall(r"^make ([a-z0-9- ]+?)(?:  |$)", text, re.MULTILINE) + re.findall(
            r"`make ([a-z0-9-]+)", text
        )
        named = {word for call in calls for word in call.split()}
        assert named <= targets, f"{page.name}: {sorted(named - targets)}"


def test_bare_make_lists_every_target() -> None:
    listing = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for target in ("demo", "test", "lint", "types", "bench", "check", "check-wheel", "check-kernels", "clean"):
        assert re.search(rf"^  {target} ", listing, re.MULTILINE), listing


def test_ci_calls_targets_that_exist() -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    script = (ROOT / ".ci" / "run").read_text()
    calls = r"^ *make --no-print-directory(?: --jobs=2)?((?: [a-z][a-z0-9-]*)+)"
    called = {target for targets in re.findall(calls, script, re.MULTILINE) for target in targets.split()}
    assert called == {"setup", "lint", "types", "test", "check-wheel", "check-kernels", "check-triton36"}
    assert called <= targets


@pytest.mark.parametrize("command", sorted(app.COMMANDS))
def test_the_command_line_page_lists_exactly_the_options_that_exist(command: str) -> None:
    text = (ROOT / "docs" / "command-line.md").read_text()
    section = re.search(rf"^## fusestep {command}\b.*?(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert section is not None
    rows = "\n".join(line.split("|")[1] for line in section[0].splitlines() if line.startswith("| `"))
    assert set(re.findall(r"--[a-z][a-z0-9-]*", rows)) == options_of(command)


def test_commands_in_the_docs_have_options_that_exist() -> None:
    for page in PAGES:
        lines = [line for block in code_blocks(page, "") for line in block.splitlines()]
        lines += re.findall(r"`(fusestep [^`\n]+)`", page.read_text())
        for line in lines:
            words = re.findall(r"\S+", line.split("  ")[0])
            if words[:1] != ["fusestep"] or len(words) < 2 or words[1] not in app.COMMANDS:
                continue
            own = compat_run.split(words[2:])[0] if words[1] == "run" else words[2:]
            used = {word for word in own if word.startswith("--")} - {"--help"}
            assert used <= options_of(words[1]), f"{page.name}: {line}"


def test_links_in_the_docs_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.fixture(scope="module")
def folder_with_a_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs")
    fusestep("fusestep train --preset tiny --steps 2 --batch 2 --device cpu --out run", folder)
    return folder


@pytest.fixture
def eight_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Process groups that a page asks for are of eight ranks, of which the others are made up, and meshes of CPUs."""
    import torch.distributed as dist
    from torch.distributed import device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    start, mesh = dist.init_process_group, device_mesh.init_device_mesh
    monkeypatch.setattr(dist, "init_process_group", lambda _: start("fake", store=FakeStore(), rank=0, world_size=8))
    monkeypatch.setattr(device_mesh, "init_device_mesh", lambda _, *given, **named: mesh("cpu", *given, **named))
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.usefixtures("eight_ranks")
@pytest.mark.parametrize("page", [page for page in PAGES if code_blocks(page, "python")], ids=lambda page: page.name)
def test_python_in_the_docs_runs(page: Path, folder_with_a_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder_with_a_run)
    names: dict[str, Any] = {"__name__": "docs"}
    for number, code in enumerate(code_blocks(page, "python"), 1):
        exec(compile(code, f"{page.name}, block {number}", "exec"), names)


def test_the_example_trains() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "plain_loop.py"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", done.stdout)]
    # ln 16 = 2.77 is a guess.
    assert losses[0] > 2.5
    assert losses[-1] < 1.0
    assert "FusedLayerNorm" in done.stdout
