"""The project's own checks find what they are there to find."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import check_triton36
import forbidden_calls
import fusestep
import large_files
import run_tests
from fusestep.language import tl, triton
from fusestep.ops.registry import Compilation, load_catalogue

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def check_kernels() -> ModuleType:
    """The script of that name; it needs Triton's compiler."""
    pytest.importorskip("triton")
    return importlib.import_module("check_kernels")


def found_in(tmp_path: Path, code: str) -> list[str]:
    path = tmp_path / "kernel.py"
    path.write_text(code)
    return list(forbidden_calls.findings(path))


@pytest.mark.parametrize(
    "code",
    [
        "tl.atomic_add(out_ptr + columns, partial)\n",
        "tl.atomic_max(out_ptr, value, mask=mask)\n",
        "from triton.language import atomic_add\n",
        "tl.atomic_add(out_ptr, 1.0)  # a sum\n",
    ],
)
def test_atomics_are_found(tmp_path: Path, code: str) -> None:
    (finding,) = found_in(tmp_path, code)
    assert "kernel.py:1: atomic_" in finding


@pytest.mark.parametrize(
    "code",
    [
        "row = tl.program_id(0)\n",
        "row = tl.program_id(0) * R + tl.arange(0, R)\n",
        "row = tl.program_id(axis=0).to(tl.int32)\n",
        "row = (tl.program_id(0)).to(tl.int64)\n",
        "where = tl.program_id\n",
    ],
)
def test_narrow_program_numbers_are_found(tmp_path: Path, code: str) -> None:
    (finding,) = found_in(tmp_path, code)
    assert "kernel.py:1: program_id" in finding


@pytest.mark.parametrize("code", ["@triton.autotune(configs=[], key=[])\n", "from triton import autotune\n"])
def test_kernels_that_are_tuned_as_they_run_are_found(tmp_path: Path, code: str) -> None:
    (finding,) = found_in(tmp_path, code)
    assert "kernel.py:1: autotune" in finding


def test_widened_program_numbers_tickets_and_prose_pass(tmp_path: Path) -> None:
    code = '''
"""Neither tl.atomic_add nor tl.program_id(0) is called here."""
row = tl.program_id(0).to(tl.int64)
tile = tl.program_id(
    axis=tl.constexpr(1)
).to(tl.int64)  # never tl.program_id(0) alone
last = tl.atomic_add(ticket_ptr, 1, sem="acq_rel")  # integer ticket: who is last sums the partials
row = (tl.program_id(0) // across).to(tl.int64)  # widened later
'''
    assert found_in(tmp_path, code) == []


def test_the_text_check_fails_on_a_finding_and_on_nothing_to_read(tmp_path: Path) -> None:
    (tmp_path / "kernel.py").write_text("row = tl.program_id(0)\n")
    assert forbidden_calls.main([str(tmp_path)]) == 1
    assert forbidden_calls.main([str(tmp_path / "absent")]) == 2
    assert forbidden_calls.main([]) == 2


def test_large_files_are_found(tmp_path: Path) -> None:
    (tmp_path / "small").write_bytes(bytes(large_files.LIMIT))
    (tmp_path / "large").write_bytes(bytes(large_files.LIMIT + 1))
    assert large_files.main([str(tmp_path / "small")]) == 0
    assert large_files.main([str(tmp_path / "small"), str(tmp_path / "large")]) == 1


@triton.jit
def _helper(x):
    return x * 2.0


@triton.jit
def _product_kernel(x_ptr, y_ptr, out_ptr, steps, N: tl.constexpr):
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    total = tl.zeros((N, N), tl.float32)
    for step in range(steps):
        total = tl.dot(tl.load(x_ptr + at + step * N * N), tl.load(y_ptr + at + step * N * N), total)
    tl.store(out_ptr + at, _helper(total))


@triton.jit
def _forgotten_kernel(x_ptr):
    tl.store(x_ptr, 1.0)


def product(size: int, stages: int) -> Compilation:
    return Compilation(
        kernel=_product_kernel,
        label=f"{size} × {size}",
        signature={"x_ptr": "*fp16", "y_ptr": "*fp16", "out_ptr": "*fp32", "steps": "i32", "N": "constexpr"},
        constexprs={"N": size},
        num_warps=8,
        num_stages=stages,
        divisible_by_16=frozenset({"x_ptr", "y_ptr", "out_ptr"}),
    )


def test_shared_memory_is_held_against_each_chip(check_kernels: ModuleType) -> None:
    # Three stages of two tiles of 128 × 128 fp16 are 192 KiB or less: too much for 8.6, 8.9 and 12.0, well within 9.0.
    chips = check_kernels.SHARED_MEMORY
    built = {one.target: one for one in check_kernels.build("product", product(128, 3), chips)}
    assert set(built) == {80, 86, 89, 90, 100, 120}
    for target in (86, 89, 120):
        assert built[target].failure is not None
        assert f"{built[target].shared} bytes of shared memory" in built[target].failure
    assert built[90].failure is None
    assert built[90].registers > 16


def test_a_kernel_is_compiled_for_the_chips_that_it_is_launched_on(check_kernels: ModuleType) -> None:
    one = dataclasses.replace(product(16, 1), minimum_capability=89)
    assert check_kernels.launched_on(one) == [89, 90, 100, 120]
    assert check_kernels.launched_on(product(16, 1)) == [80, 86, 89, 90, 100, 120]


def test_every_launch_is_built_for_the_oldest_of_its_chips_for_hopper_or_for_the_newest(
    check_kernels: ModuleType,
) -> None:
    chosen: dict[int, int] = {}
    for op, one in check_kernels.configurations():
        target = check_kernels.first_built_for(op, one)
        assert target in (check_kernels.launched_on(one)[0], 90, 120)
        chosen[target] = chosen.get(target, 0) + 1
    assert min(chosen[80], chosen[90], chosen[120]) > sum(chosen.values()) / 4


def test_what_one_chip_takes_is_held_against_those_with_less_that_take_the_same(check_kernels: ModuleType) -> None:
    def failures(target: int, shared: int, lowest: int = 80) -> dict[int, str]:
        one = dataclasses.replace(product(16, 1), minimum_capability=lowest)
        built = [check_kernels.Built("product", "", target, shared, 32)]
        return {result.target: result.failure for result in check_kernels.too_large_elsewhere(one, built)}

    assert failures(90, 99 << 10) == {}
    assert failures(90, 100 << 10).keys() == {86, 89}
    assert failures(80, 100 << 10, lowest=90) == {}
    assert failures(90, 200 << 10).keys() == {80, 86, 89}
    assert failures(100, 100 << 10) == {120: "needs 102400 bytes of shared memory, a block has 101376"}
    twice = [check_kernels.Built("product", "", target, 100 << 10, 32) for target in (90, 80, 89)]
    assert [result.target for result in check_kernels.too_large_elsewhere(product(16, 1), twice)] == [86]


def test_a_share_has_some_launches_of_every_kernel(check_kernels: ModuleType) -> None:
    found = check_kernels.configurations()

    def kernels(tasks: list[Any]) -> set[int]:
        return {id(found[index][1].kernel) for index, _ in tasks}

    every, half = check_kernels.first_tasks([], None, 1), check_kernels.first_tasks([], None, 2)
    assert len(every) == len(found)
    assert set(half) < set(every)
    assert 0.4 * len(every) < len(half) < 0.65 * len(every)
    assert kernels(half) == kernels(every)
    of_hopper = check_kernels.first_tasks(["adam"], [90], 4)
    assert {found[index][0] for index, _ in of_hopper} == {"adam"}
    assert {targets for _, targets in of_hopper} == {(90,)}


def test_a_kernel_that_does_not_compile_is_a_finding(check_kernels: ModuleType) -> None:
    # 48 is no power of two, which tl.arange wants.
    failures = [one.failure for one in check_kernels.build("product", product(48, 1), (80, 120))]
    assert len(failures) == 2
    assert all("power of 2" in failure for failure in failures)


def test_the_most_demanding_configurations_go_to_every_group_of_chips(
    check_kernels: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def built(shared: int, registers: int, stack: int = 0, lowest: int = 80) -> list[Any]:
        """What the oldest and the newest chip made of a configuration."""
        newest = min(shared, 90 << 10)
        return [
            check_kernels.Built("product", "", lowest, shared, registers, stack),
            check_kernels.Built("product", "", 120, newest, registers - 1, stack),
        ]

    other = Compilation(_forgotten_kernel, "", {"x_ptr": "*fp32"}, {}, num_warps=4, minimum_capability=89)
    found = [
        *(("product", product(16, stages)) for stages in range(1, 6)),
        ("other", other),
        ("product", product(16, 6)),
    ]
    monkeypatch.setattr(check_kernels, "configurations", lambda: found)
    left = check_kernels.left_to_build(
        {
            0: built(shared=160 << 10, registers=32)[:1],  # much, but the next takes as much and more registers
            1: built(shared=1 << 10, registers=255, stack=8),  # many registers alone make it none of the most demanding
            2: built(shared=4 << 10, registers=40)[:1],
            3: built(shared=160 << 10, registers=40)[:1],  # the most shared memory, and of those the most registers
            4: built(shared=60 << 10, registers=40)[:1],  # more than half of what 12.0 has
            5: built(shared=0, registers=8, lowest=89),  # the only one of its kernel
            6: built(shared=60 << 10, registers=8)[1:],  # built for the newest alone, more than half of what 8.6 has
        }
    )
    chips: dict[int, list[int]] = {}
    for index, targets in left:
        chips.setdefault(index, []).extend(targets)
    between, newest = chips[3][0], chips[3][2]
    assert between in (86, 89)
    assert newest in (100, 120)
    assert chips == {0: [120], 3: [between, 90, newest], 4: [120], 5: [90], 6: [86]}


def test_the_oldest_triton_compiles_and_interprets(monkeypatch: pytest.MonkeyPatch) -> None:
    def status(compiled: int, interpreted: int, version: str = check_triton36.VERSION) -> int:
        calls = []

        def run(command: list[str], env: dict[str, str], **_: Any) -> subprocess.CompletedProcess[str]:
            assert env["PYTHONPATH"] == str(check_triton36.FOLDER)
            if command[1] == "-c":
                return subprocess.CompletedProcess(command, 0, stdout=f"{version}\n")
            interpreter = "pytest" in command
            calls.append(interpreter)
            assert ("TRITON_INTERPRET" in env) == interpreter
            assert interpreter or command[1:] == ["tools/check_kernels.py", "--chip", "90", "--share", "1"]
            return subprocess.CompletedProcess(command, interpreted if interpreter else compiled)

        monkeypatch.setattr(check_triton36, "install", lambda: None)
        monkeypatch.setattr(subprocess, "run", run)
        monkeypatch.setattr(sys, "argv", ["check_triton36.py"])
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        answer = int(check_triton36.main())
        assert calls == ([False, True] if version == check_triton36.VERSION else [])
        return answer

    assert status(0, 0) == 0
    assert status(1, 0) == 1
    assert status(0, 1) == 1
    assert status(0, 0, version="3.9.0") == 1


def test_a_kernel_that_no_configuration_covers_is_found(check_kernels: ModuleType) -> None:
    here = sys.modules[__name__]
    assert check_kernels.uncovered([_product_kernel], [here]) == [f"{__name__}._forgotten_kernel"]
    assert check_kernels.uncovered([_product_kernel, _forgotten_kernel], [here]) == []


def test_every_kernel_of_the_package_is_covered(check_kernels: ModuleType) -> None:
    kernels = [one.kernel for _, one in check_kernels.configurations()]
    assert check_kernels.uncovered(kernels, check_kernels.modules()) == []


def test_every_op_lists_its_launches() -> None:
    ops = load_catalogue()
    assert {"adam", "layer_norm", "rms_norm"} <= set(ops)
    for op in ops.values():
        assert op.is_product or list(op.compilations()), op.name


#: The layers of docs/architecture.svg, lowest first, and the small parts beside them; a package uses only lower ones.
#: A module that stands elsewhere than its package is named with it.
LAYERS = [
    {
        "errors",
        "installed",
        "language",
        "tables",
        "durable",
        "memory",
        "grouping",
        "transforms",
        "distributed.groups",
    },
    {"hardware", "factory", "distributed.amax", "distributed.collectives"},
    {"precision", "distributed.tensor_parallel"},
    {"dispatch"},
    {"ops"},
    {"fp8"},
    {"nn", "optim", "explain", "doctor"},
    {"models", "data", "convert", "graph"},
    {"compat", "distributed"},
    {"train", "ladder", "run", "plan"},
    {"cli"},
]


def imports(path: Path) -> set[str]:
    """The modules of fusestep that a file imports, without that first name."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == "fusestep":
            names |= {fusestep._FUNCTIONS.get(alias.name, f"fusestep.{alias.name}") for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.removeprefix("fusestep.") for name in names if name.startswith("fusestep.")}


def part(module: str, rank: dict[str, int]) -> str:
    """The name by which the layers know a module: its own, or its package's."""
    package, *rest = module.split(".")
    named = ".".join([package, *rest[:1]])
    return named if named in rank else package


def test_arrows_between_packages_run_one_way() -> None:
    rank = {name: number for number, layer in enumerate(LAYERS) for name in layer}
    rank["examine"] = rank["doctor"]  # one part in two files
    source = ROOT / "src" / "fusestep"
    wrong = []
    for path in source.rglob("*.py"):
        module = ".".join(path.relative_to(source).with_suffix("").parts)
        if module in ("__init__", "__main__"):
            continue
        own = part(module, rank)
        for used in {part(name, rank) for name in imports(path)} - {own, "__version__"}:
            together = {own, used} == {"doctor", "examine"}
            if rank[used] >= rank[own] and not together:
                wrong.append(f"{path.relative_to(source)} imports {used}")
    assert not wrong


@pytest.mark.parametrize(
    ("line", "closing"),
    [
        ("======= 12 passed, 3 deselected in 4.05s =======", "12 passed, 3 deselected in 4.05s"),
        ("===== 1 failed, 12 passed in 74.05s (0:01:14) =====", "1 failed, 12 passed in 74.05s (0:01:14)"),
        ("============ no tests ran in 3.95s ============", "no tests ran in 3.95s"),
    ],
)
def test_the_runner_reads_the_closing_line(line: str, closing: str) -> None:
    found = run_tests.CLOSING_LINE.match(line)
    assert found is not None
    assert found.group(1) == closing


def test_the_runner_fails_when_either_process_fails_or_runs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def status(ordinary: int, interpreter: int, *arguments: str) -> int:
        answers = iter([(ordinary, "first"), (interpreter, "second")])
        monkeypatch.setattr(run_tests, "run", lambda *_: next(answers))
        monkeypatch.setattr(sys, "argv", ["run_tests.py", *arguments])
        return int(run_tests.main())

    assert status(0, 0) == 0
    assert status(1, 0) == 1
    assert status(0, 1) == 1
    # A whole run without interpreter tests has lost them; a selection may hold none.
    assert status(0, 5) == 1
    assert status(0, 5, "-k", "name") == 0
    assert status(5, 5, "-k", "name") == 5
