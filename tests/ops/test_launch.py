"""Launches: which compiled kernel is used again, on which device, and that the arguments arrive."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from fusestep.language import tl, triton
from fusestep.ops import launch as module
from fusestep.ops.launch import PreparedLaunch, launch


@triton.jit
def _add_kernel(x_ptr, extra_ptr, y_ptr, count, amount, BLOCK: tl.constexpr, SIGN: tl.constexpr = 1):
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x_ptr + offset, mask=offset < count) + SIGN * amount
    if extra_ptr is not None:
        value += tl.load(extra_ptr + offset, mask=offset < count)
    tl.store(y_ptr + offset, value, mask=offset < count)


class FakeKernel:
    """A kernel whose 'compilations' are recorded, and the calls of what was compiled."""

    class Parameter:
        def __init__(self, is_constexpr: bool) -> None:
            self.is_constexpr = is_constexpr

    def __init__(self) -> None:
        self.signature = inspect.signature(lambda x, n, BLOCK=8, SIGN=1: None)
        self.arg_names = list(self.signature.parameters)
        self.params = [self.Parameter(name.isupper()) for name in self.arg_names if name != "n"]
        self.params.insert(1, self.Parameter(False))
        self.__name__ = "fake"
        self.compiled = 0
        self.options: list[dict[str, Any]] = []
        self.calls: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def compile_and_launch(*_: Any, **options: Any) -> Any:
            self.compiled += 1
            self.options.append(options)
            number, calls = self.compiled, self.calls

            class Compiled:
                function, packed_metadata = "function", "metadata"

                def __getitem__(self, grid: tuple[int, ...]) -> Any:
                    return lambda *args: calls.append((number, grid, args))

                def run(self, *given: Any) -> None:
                    assert given[3:9] == (0, "function", "metadata", None, None, None)
                    calls.append((number, given[:3], given[9:]))

            return Compiled()

        return compile_and_launch


@pytest.fixture
def kernel() -> FakeKernel:
    return FakeKernel()


CPU = torch.device("cpu")


def test_an_empty_grid_launches_nothing(kernel: FakeKernel) -> None:
    launch(kernel, (3, 0), CPU, torch.ones(1), 4)
    assert kernel.compiled == 0


def test_the_same_specialisation_is_compiled_once_and_called_with_addresses(kernel: FakeKernel) -> None:
    x, y = torch.ones(8), torch.ones(8)
    launch(kernel, (3,), CPU, x, 32, BLOCK=16, num_warps=4)
    launch(kernel, (5, 2), CPU, y, 48, BLOCK=16, num_warps=4)
    assert kernel.compiled == 1
    assert kernel.calls == [(1, (5, 2, 1), (y.data_ptr(), 48, 16, 1))]


@pytest.mark.parametrize(
    ("tensor", "number", "options"),
    [
        (torch.ones(8, dtype=torch.float64), 32, {}),
        (torch.ones(9)[1:], 32, {}),  # not aligned to 16 bytes
        (None, 32, {}),
        (torch.ones(8), 33, {}),  # not divisible by 16
        (torch.ones(8), 1, {}),
        (torch.ones(8), 2**31, {}),  # 64 bits wide
        (torch.ones(8), 32.0, {}),
        (torch.ones(8), 32, {"BLOCK": 32}),
        (torch.ones(8), 32, {"num_warps": 8}),
    ],
)
def test_whatever_triton_specialises_on_is_told_apart(
    kernel: FakeKernel, tensor: Any, number: Any, options: dict[str, int]
) -> None:
    launch(kernel, (1,), CPU, torch.ones(8), 32, BLOCK=16, num_warps=4)
    launch(kernel, (1,), CPU, tensor, number, **({"BLOCK": 16, "num_warps": 4} | options))
    assert kernel.compiled == 2


class _Launcher:
    """What compiled kernels of Triton have as `run`: it hands its arguments and more to a C function, `launch`."""

    global_scratch_size = profile_scratch_size = 0

    def __init__(self, calls: list[tuple[Any, ...]], nested: bool) -> None:
        self.nested, self.uses = nested, 0
        self.launch: Any = lambda *given: calls.append(given)

    def __call__(self, x: int, y: int, z: int, stream: int, function: Any, *rest: Any) -> None:
        self.uses += 1
        given, args = (x, y, z, stream, function, False, *rest[:4]), rest[4:]
        self.launch(*given, *((args,) if self.nested else args))


class _Kernel:
    function, packed_metadata = "function", "metadata"

    def __init__(self, run: Any) -> None:
        self.run = run


@pytest.mark.parametrize("nested", [False, True])
def test_the_launchers_c_function_is_called_as_the_launcher_calls_it(nested: bool) -> None:
    calls: list[tuple[Any, ...]] = []
    launcher = _Launcher(calls, nested)
    compiled = module._Compiled(_Kernel(launcher), (7, 16))
    for grid, values in (((3, 1, 1), [1024, 5]), ((4, 2, 1), [2048, 6])):
        calls.clear()
        compiled.launch(grid, None, values)
        direct = calls.copy()
        launcher(*grid, 0, "function", "metadata", None, None, None, *values, 7, 16)
        assert direct == calls[1:]
        assert len(direct) == 1
    assert launcher.uses == 2  # by this test alone


def test_a_kernel_that_needs_scratch_memory_keeps_its_launcher() -> None:
    calls: list[tuple[Any, ...]] = []
    launcher = _Launcher(calls, nested=False)
    launcher.global_scratch_size = 128
    module._Compiled(_Kernel(launcher), ()).launch((3, 1, 1), None, [1024])
    assert launcher.uses == len(calls) == 1


def test_a_constexpr_by_position_is_refused(kernel: FakeKernel) -> None:
    with pytest.raises(TypeError, match="constexpr of fake was passed by position"):
        launch(kernel, (1,), CPU, torch.ones(8), 32, 16)


def test_every_launch_names_what_tritons_versions_differ_about(kernel: FakeKernel) -> None:
    launch(kernel, (1,), CPU, torch.ones(8), 32, BLOCK=16, num_warps=4)
    PreparedLaunch(kernel, (1,), CPU, (32,), BLOCK=16, num_warps=4)(torch.ones(8))
    assert kernel.options == [{"BLOCK": 16, "num_warps": 4, "enable_fp_fusion": True}] * 2


def test_a_prepared_launch_compiles_once_for_each_alignment(kernel: FakeKernel) -> None:
    prepared = PreparedLaunch(kernel, (4,), CPU, (32,), BLOCK=16)
    x, y, unaligned = torch.ones(8), torch.ones(8), torch.ones(9)[1:]
    for tensor in (x, y, unaligned, unaligned):
        prepared(tensor)
    assert kernel.compiled == 2
    assert kernel.calls == [
        (1, (4, 1, 1), (y.data_ptr(), 32, 16, 1)),
        (2, (4, 1, 1), (unaligned.data_ptr(), 32, 16, 1)),
    ]


def test_a_prepared_launch_goes_to_addresses_once_it_is_compiled_for_aligned_ones(kernel: FakeKernel) -> None:
    prepared = PreparedLaunch(kernel, (4,), CPU, (32,), BLOCK=16)
    x, y = torch.ones(8), torch.ones(8)
    assert not prepared.at((x.data_ptr(),))
    prepared(torch.ones(9)[1:])
    assert not prepared.at((x.data_ptr(),))
    assert kernel.calls == []
    prepared(x)
    assert prepared.at((y.data_ptr(),))
    assert kernel.compiled == 2
    assert kernel.calls == [(2, (4, 1, 1), (y.data_ptr(), 32, 16, 1))]


def test_a_prepared_launch_refuses_to_be_compiled_for_other_dtypes(kernel: FakeKernel) -> None:
    prepared = PreparedLaunch(kernel, (4,), CPU, (32,), BLOCK=16)
    prepared(torch.ones(8))
    unaligned = torch.ones(9, dtype=torch.float64)[1:]
    with pytest.raises(TypeError, match=r"is prepared for .*float32.*, not for .*float64"):
        prepared(unaligned)


def test_a_profilers_hooks_are_served(kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(8)
    launch(kernel, (1,), CPU, x, 32)
    monkeypatch.setattr(triton.knobs.runtime.launch_enter_hook, "calls", [print])
    taken: list[Any] = []
    compiled = next(value._kernel for key, value in module._compiled.items() if key[0] is kernel)
    monkeypatch.setattr(type(compiled), "__getitem__", lambda self, grid: lambda *args: taken.append((grid, args)))
    launch(kernel, (1,), CPU, x, 32)
    assert taken == [((1, 1, 1), (x.data_ptr(), 32, 8, 1))]
    assert kernel.calls == []


def test_another_device_is_made_current_for_the_launch(kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    current = [0]
    seen: list[int] = []

    class Guard:
        def __init__(self, index: int) -> None:
            self.index = index

        def __enter__(self) -> None:
            self.before, current[0] = current[0], self.index

        def __exit__(self, *_: object) -> None:
            current[0] = self.before

    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current[0], raising=False)
    monkeypatch.setattr(torch.cuda, "device", Guard)
    original = module._compile_and_launch
    monkeypatch.setattr(module, "_compile_and_launch", lambda *a: (seen.append(current[0]), original(*a))[1])
    launch(kernel, (1,), torch.device("cuda", 1), torch.ones(8), 4)
    launch(kernel, (1,), torch.device("cuda", 0), torch.ones(8), 4)
    PreparedLaunch(kernel, (1,), torch.device("cuda", 1), (4,))(torch.ones(8))
    assert seen == [1, 0, 1]
    assert current == [0]


def check_adding(device: torch.device) -> None:
    """Aligned and unaligned views, with and without the second pointer, through both forms of launch."""
    base = torch.randn(4097, device=device)
    prepared: dict[tuple[int, bool], PreparedLaunch] = {}
    for _ in range(2):  # the second time through the kept kernels
        for start, count in ((0, 4096), (1, 1000), (4, 1), (16, 33)):
            for has_extra in (False, True):
                x = base[start : start + count]
                extra = x * 2 if has_extra else None
                wanted = x - 2.5 + (0 if extra is None else extra)
                for form in ("launch", "prepared"):
                    y = torch.full_like(x, float("nan"))
                    grid = (-(-count // 64),)
                    if form == "launch":
                        launch(_add_kernel, grid, device, x, extra, y, count, 2.5, BLOCK=64, SIGN=-1)
                    else:
                        made = PreparedLaunch(_add_kernel, grid, device, (count, 2.5), BLOCK=64, SIGN=-1)
                        prepared.setdefault((count, has_extra), made)(x, extra, y)
                    assert torch.allclose(y, wanted)


@pytest.mark.interpreter
def test_arguments_arrive_in_the_interpreter() -> None:
    check_adding(CPU)


@pytest.mark.gpu
def test_arguments_arrive_on_the_gpu() -> None:
    check_adding(torch.device("cuda", 0))
