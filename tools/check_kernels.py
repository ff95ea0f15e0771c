"""Compile the launches of every kernel for six generations of GPU, on a machine without one.

    python tools/check_kernels.py [--chip CAPABILITY]… [--share N] [OP…]

Each configuration that an op lists in `compilations()` goes through `triton.compile` down to machine code. It must
compile, and its shared memory must fit what a block may have on every chip that launches it. Registers and the bytes of
stack that spilled registers take are read from the machine code and shown. A kernel that no configuration covers is an
error, so that none escapes.

Every configuration is built for one chip: the oldest that launches it, 9.0, or the newest, for each about a third. The
other pairs prove less, since Triton makes nearly the same of a kernel there: without matrix products, of which ours
have none, the code for the GPU (TTGIR) is one for 8.0 to 9.0, and one for 10.0 and 12.0, and the shared memory with it;
and PTX is one for 8.6 and 8.9, and for 10.0 and 12.0. So each kernel's configuration with the most shared memory is
built once in every other group of one PTX, and any that takes more than half of what a chip of the other TTGIR has is
built there. With --chip, every configuration is built for the named chips alone. With --share, about one in N of the
configurations, and of each kernel one at least.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import inspect
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
import textwrap
import time
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.errors import CompilationError
from triton.runtime.jit import JITFunction

from fusestep import hardware
from fusestep.ops.registry import Compilation, load_catalogue

# Bytes of shared memory that a thread block may use, by compute capability: CUDA C++ Programming Guide, table
# "Technical Specifications per Compute Capability".
SHARED_MEMORY = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
THREADS_PER_BLOCK = 1024

# Chips for which Triton's code for the GPU is one, and those whose PTX is.
ONE_TTGIR = ((80, 86, 89, 90), (100, 120))
ONE_PTX = ((80,), (86, 89), (90,), (100, 120))

# A configuration by its number in `configurations()`, and the chips to build it for.
Task = tuple[int, tuple[int, ...]]

PROBE = Compilation(hardware._probe_kernel, "the doctor's probe", {"out_ptr": "*fp32"}, {}, num_warps=4)


@dataclass(frozen=True)
class Built:
    """What one configuration became on one chip; `failure` tells why it did not."""

    op: str
    label: str
    target: int
    shared: int = 0
    registers: int = 0
    stack: int = 0
    failure: str | None = None


def modules() -> list[ModuleType]:
    """Every module of the package that could hold a kernel."""
    found = [hardware]
    for name in ("ops", "nn", "optim"):
        package = importlib.import_module(f"fusestep.{name}")
        members = pkgutil.walk_packages(package.__path__, prefix=f"{package.__name__}.")
        found += [package, *(importlib.import_module(member.name) for member in members)]
    return found


def key(one: Compilation) -> tuple[Any, ...]:
    """Two configurations with the same key compile to the same code."""
    return (
        one.kernel.cache_key,
        tuple(sorted(one.signature.items())),
        tuple(sorted((name, str(value)) for name, value in one.constexprs.items())),
        one.num_warps,
        one.num_stages,
        tuple(sorted(one.divisible_by_16)),
        one.minimum_capability,
        one.maximum_registers,
    )


@cache
def configurations() -> list[tuple[str, Compilation]]:
    """(op, configuration), each once, in an order that is the same in every process."""
    listed = [(op.name, one) for op in load_catalogue().values() for one in op.compilations()]
    distinct: dict[tuple[Any, ...], tuple[str, Compilation]] = {}
    for op, one in [("hardware", PROBE), *listed]:
        distinct.setdefault(key(one), (op, one))
    return list(distinct.values())


def called_by(kernel: JITFunction[Any]) -> Iterator[JITFunction[Any]]:
    """The jitted functions that a kernel's code names."""
    source = textwrap.dedent(inspect.getsource(kernel.fn))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name):
            value = kernel.fn.__globals__.get(node.id)
            if isinstance(value, JITFunction):
                yield value


def uncovered(compiled: Iterable[JITFunction[Any]], where: Iterable[ModuleType]) -> list[str]:
    """Jitted functions of the modules that no configuration compiles, neither itself nor by way of others' calls."""
    covered: set[int] = set()
    left = list(compiled)
    while left:
        kernel = left.pop()
        if id(kernel) not in covered:
            covered.add(id(kernel))
            left += called_by(kernel)
    found = {
        id(value): f"{value.__module__}.{value.__name__}"
        for module in where
        for value in vars(module).values()
        if isinstance(value, JITFunction) and value.__module__ == module.__name__
    }
    return sorted(name for identity, name in found.items() if identity not in covered)


def resources(cubin: bytes) -> tuple[int, int]:
    """(registers a thread, bytes of stack a thread) of the machine code."""
    program = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        answer = subprocess.run([program, "-res-usage", file.name], capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+)", answer.stdout)
    if found is None:
        raise RuntimeError(f"cuobjdump answered without registers: {answer.stdout!r}")
    return int(found[1]), int(found[2])


def launched_on(one: Compilation) -> list[int]:
    """The chips on which dispatch launches a configuration, oldest first."""
    return [target for target in SHARED_MEMORY if target >= one.minimum_capability]


def number_of(op: str, one: Compilation) -> int:
    """Chooses among chips by a configuration's label: no option of a launch decides it."""
    return zlib.crc32(f"{op}, {one.label}".encode())


def first_built_for(op: str, one: Compilation) -> int:
    """The oldest of a configuration's chips, 9.0 or the newest."""
    chips = launched_on(one)
    return (chips[0], max(90, chips[0]), chips[-1])[number_of(op, one) % 3]


def first_tasks(ops: list[str], named: list[int] | None, share: int) -> list[Task]:
    """About one in `share` configurations, and one of each kernel, of the ops (of all where none are named)."""
    tasks: list[Task] = []
    met: set[int] = set()
    for index, (op, one) in enumerate(configurations()):
        if (ops and op not in ops) or (id(one.kernel) in met and number_of(op, one) % share):
            continue
        wanted = {first_built_for(op, one)} if named is None else set(named)
        targets = tuple(target for target in launched_on(one) if target in wanted)
        if targets:
            met.add(id(one.kernel))
            tasks.append((index, targets))
    return tasks


def launched_in(one: Compilation, group: tuple[int, ...]) -> list[int]:
    """The chips of a group that launch a configuration."""
    return [target for target in launched_on(one) if target in group]


def left_to_build(built: dict[int, list[Built]]) -> list[Task]:
    """What the builds of every configuration (by its number) leave to be seen on further chips."""
    found = configurations()
    of_kernel: dict[int, list[int]] = {}
    for index in built:
        of_kernel.setdefault(id(found[index][1].kernel), []).append(index)
    tasks: list[Task] = []
    for members in of_kernel.values():
        # Where several need as much, the one with the most registers. Registers alone choose none: too many of them are
        # spilled, which is no error, and is seen where every configuration is built first.
        demanding = max(members, key=lambda index: max((one.shared, one.registers, one.stack) for one in built[index]))
        for index in members:
            op, one = found[index]
            seen = {result.target for result in built[index]}
            shared = max(result.shared for result in built[index])
            for group in ONE_PTX if index == demanding else ONE_TTGIR:
                chips = launched_in(one, group)
                if not chips or seen & set(group):
                    continue
                least = min(chips, key=SHARED_MEMORY.__getitem__)
                if index == demanding:
                    tasks.append((index, (chips[number_of(op, one) // 3 % len(chips)],)))
                elif 2 * shared > SHARED_MEMORY[least]:  # it may take more there than here
                    tasks.append((index, (least,)))
    return tasks


def too_large_elsewhere(one: Compilation, built: list[Built]) -> list[Built]:
    """What builds tell of chips with the same TTGIR, and so the same shared memory, that have less of it."""
    seen = {result.target for result in built}
    found = []
    for group in ONE_TTGIR:
        whole = [result for result in built if result.target in group and result.failure is None]
        for target in launched_in(one, group):
            if whole and target not in seen and whole[0].shared > SHARED_MEMORY[target]:
                failure = _too_large(whole[0].shared, target)
                found.append(dataclasses.replace(whole[0], target=target, failure=failure))
    return found


def _too_large(shared: int, target: int) -> str:
    return f"needs {shared} bytes of shared memory, a block has {SHARED_MEMORY[target]}"


def build_task(task: Task) -> list[Built]:
    """`build` for another process, which lists the configurations again: kernels do not travel between processes."""
    index, targets = task
    return build(*configurations()[index], targets)


def reason(error: Exception) -> str:
    """The first line of what the compiler said and, where that is but a place in the kernel, the error behind it."""
    behind: BaseException = error
    while isinstance(behind, CompilationError) and (behind.__cause__ or behind.__context__):
        behind = behind.__cause__ or behind.__context__
    place = [] if behind is error else [f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"]
    said = str(behind).strip().splitlines() or ["no words"]
    return " ".join([*place, f"{type(behind).__name__}: {said[0]}"])


def build(op: str, one: Compilation, targets: Iterable[int]) -> list[Built]:
    """Compile one configuration for each of the chips."""
    position = {name: place for place, name in enumerate(one.kernel.arg_names)}
    attributes = {(position[name],): [["tt.divisibility", 16]] for name in one.divisible_by_16}
    source = ASTSource(one.kernel, dict(one.signature), dict(one.constexprs), attributes)
    # Named, since the default differs between Triton's versions, and 3.9 warns where it is left open.
    options = {"num_warps": one.num_warps, "num_stages": one.num_stages, "enable_fp_fusion": True}
    if one.maximum_registers is not None:
        options["maxnreg"] = one.maximum_registers
    results = []
    for target in targets:
        try:
            compiled = triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)
        except Exception as error:  # whatever the compiler raises is this check's finding
            results.append(Built(op, one.label, target, failure=reason(error)))
            continue
        shared = compiled.metadata.shared
        registers, stack = resources(compiled.asm["cubin"])
        failure = None
        if shared > SHARED_MEMORY[target]:
            failure = _too_large(shared, target)
        elif compiled.metadata.num_warps * 32 > THREADS_PER_BLOCK:
            failure = f"needs {compiled.metadata.num_warps * 32} threads, a block has {THREADS_PER_BLOCK}"
        results.append(Built(op, one.label, target, shared, registers, stack, failure))
    return results


def report(results: list[Built]) -> None:
    """A line for each op and chip, then each configuration that spills."""
    print(f"{'op':24} {'chip':>6} {'builds':>7} {'shared, most':>13} {'of':>7} {'registers':>10} {'spill':>6}")
    for op in sorted({one.op for one in results}):
        for target, limit in SHARED_MEMORY.items():
            mine = [one for one in results if (one.op, one.target) == (op, target)]
            if not mine:
                continue
            shared, registers, spilling = (
                max(one.shared for one in mine),
                max(one.registers for one in mine),
                sum(one.stack > 0 for one in mine),
            )
            print(f"{op:24} sm_{target:<3} {len(mine):7} {shared:13} {limit:7} {registers:10} {spilling:6}")
    spilled: dict[tuple[str, str], list[Built]] = {}
    for one in results:
        if one.stack:
            spilled.setdefault((one.op, one.label), []).append(one)
    for (op, label), them in spilled.items():
        where = ", ".join(f"sm_{one.target} {one.stack} B" for one in them)
        print(f"note: {op}, {label} keeps registers on the stack: {where}")


def build_all(pool: Executor, what: str, tasks: list[Task]) -> list[list[Built]]:
    """What each of the tasks became."""
    print(f"{what}: {sum(len(targets) for _, targets in tasks)} builds", flush=True)
    started = time.monotonic()
    results = []
    for done, built in enumerate(pool.map(build_task, tasks), 1):
        results.append(built)
        if done % 50 == 0 or done == len(tasks):
            print(f"  {done}/{len(tasks)} after {time.monotonic() - started:.0f} s", flush=True)
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ops", nargs="*", metavar="OP", help="only these ops (default: all)")
    parser.add_argument(
        "--chip",
        dest="chips",
        action="append",
        type=int,
        choices=list(SHARED_MEMORY),
        help="build every configuration for this chip, as 90, and for no other that is not named too",
    )
    parser.add_argument("--share", type=int, default=1, metavar="N", help="build about one in N configurations")
    options = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET", "0") != "0":
        parser.error("unset TRITON_INTERPRET: the interpreter compiles nothing")
    if options.share < 1:
        parser.error(f"--share is {options.share}; give 1 or more")
    found = configurations()
    ops = {op for op, _ in found}
    unknown = set(options.ops) - ops
    if unknown:
        parser.error(f"no op is named {', '.join(sorted(unknown))}; there are {', '.join(sorted(ops))}")

    tasks = first_tasks(options.ops, options.chips, options.share)
    if not tasks:
        parser.error("none of these kernels is launched on these chips")
    workers = min(len(tasks), os.cpu_count() or 1)
    print(f"Triton {triton.__version__}: {len(tasks)} configurations, {workers} processes", flush=True)
    started = time.monotonic()
    with ProcessPoolExecutor(workers) as pool:
        built = {index: them for (index, _), them in zip(tasks, build_all(pool, "First", tasks), strict=True)}
        if options.chips is None:
            left = left_to_build(built)
            for (index, _), them in zip(left, build_all(pool, "The most demanding elsewhere", left), strict=True):
                built[index] += them
    results = [one for them in built.values() for one in them]
    results += [one for index, them in built.items() for one in too_large_elsewhere(found[index][1], them)]
    report(results)

    errors = [f"{one.op}, {one.label}, sm_{one.target}: {one.failure}" for one in results if one.failure]
    errors += [
        f"{name} is compiled by no configuration; list its launches in its op's compilations()"
        for name in uncovered((one.kernel for _, one in found), modules())
    ]
    for error in errors:
        print(f"error: {error}", file=sys.stderr)
    print(f"{len(results)} builds, {len(errors)} errors, {time.monotonic() - started:.0f} s")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
