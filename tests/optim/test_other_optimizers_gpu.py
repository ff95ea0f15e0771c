"""What only a GPU can show of the optimizers beside Adam: real sizes, no waiting, CUDA graphs, several devices."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import nn

from fusestep.errors import UserError
from fusestep.optim import FusedAdagrad, FusedLAMB, FusedNovoGrad, FusedSGD

pytestmark = pytest.mark.gpu

NoWaiting = Callable[[], AbstractContextManager[None]]
AllAre = Callable[[torch.Tensor, float], bool]

OPTIONS: dict[type[Any], dict[str, Any]] = {
    FusedSGD: {"lr": 0.05, "momentum": 0.8, "dampening": 0.3, "weight_decay": 0.1},
    # eps: where gradient and decay cancel, what is left of their digits is divided by as little as that.
    FusedAdagrad: {"lr": 0.05, "lr_decay": 0.2, "weight_decay": 0.1, "eps": 1e-2},
    FusedLAMB: {"lr": 0.05, "betas": (0.8, 0.95), "weight_decay": 0.1, "max_grad_norm": None},
    FusedNovoGrad: {"lr": 0.05, "betas": (0.8, 0.95), "weight_decay": 0.1},
}
GPT2 = [(50304, 768), (1024, 768), *[(768,), (768,), (2304, 768), (2304,), (768, 768), (3072, 768), (768, 3072)] * 12]

every = pytest.mark.parametrize("cls", list(OPTIONS))


def parameters(shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float32) -> list[Any]:
    made = [nn.Parameter(torch.randn(shape, device="cuda", dtype=dtype)) for shape in shapes]
    for p in made:
        p.grad = torch.randn_like(p)
    return made


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_real_shapes_equal_float64(
    oracle: Any, cls: type[Any], dtype: torch.dtype, max_grad_norm: float | None
) -> None:
    ours = parameters(GPT2, dtype)
    optimizer = cls(ours, master_weights=True, **{**OPTIONS[cls], "max_grad_norm": max_grad_norm})
    exact = oracle(optimizer)
    for _ in range(2):
        for p in ours:
            p.grad = torch.randn_like(p)
        exact.step()
        optimizer.step()
        if max_grad_norm is not None:
            assert float(optimizer.last_grad_norm) == pytest.approx(exact.norm, rel=1e-6)
    exact.check(rtol=1e-5, atol=4e-6)
    for p in ours:
        if dtype == torch.bfloat16:
            assert torch.equal(p.detach(), optimizer.state[p]["master_param"].bfloat16())


@every
def test_real_shapes_give_the_same_bits_twice(cls: type[Any]) -> None:
    found = []
    for _ in range(2):
        torch.manual_seed(3)
        ours = parameters(GPT2[:9])
        optimizer = cls(ours, **{**OPTIONS[cls], "max_grad_norm": 0.1})
        for _ in range(3):
            for p in ours:
                p.grad = torch.randn_like(p)
            optimizer.step()
        found.append([p.detach().clone() for p in ours])
        del ours, optimizer
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@every
@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_step_never_waits_for_the_device_from_the_first_on(
    cls: type[Any], max_grad_norm: float | None, no_waiting: NoWaiting
) -> None:
    # Not bfloat16, whose gradients torch's scaler looks at from 2.12 on.
    ours = [*parameters([(40, 30), (7,)]), *parameters([(50, 3)], torch.float16)]
    optimizer = cls(ours, master_weights=True, **{**OPTIONS[cls], "max_grad_norm": max_grad_norm})
    scaler = torch.amp.GradScaler("cuda", init_scale=8.0)
    scaler.scale(torch.ones((), device="cuda"))
    with no_waiting():
        for number in range(3):
            optimizer.step()
            optimizer.param_groups[0]["lr"] = 0.1 / (number + 1)
            scaler.step(optimizer)
            scaler.update()
    assert int(optimizer.applied_steps) == 6


def captured(optimizer: Any) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        optimizer.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    return graph


@every
@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
def test_replays_with_a_schedule_equal_eager_steps(cls: type[Any], max_grad_norm: float | None) -> None:
    runs = []
    for is_graph in (True, False):
        torch.manual_seed(5)
        ours = [*parameters([(40, 30), (7,), ()]), *parameters([(50, 30)], torch.bfloat16)]
        options = {**OPTIONS[cls], "max_grad_norm": max_grad_norm}
        optimizer = cls(ours, capturable=True, master_weights=True, **options)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=8)
        generator = torch.Generator("cuda").manual_seed(9)
        if is_graph:
            graph = captured(optimizer)
        else:
            optimizer.step()
        for number in range(10):
            for p in ours:
                p.grad.copy_(torch.randn(p.shape, generator=generator, device="cuda"))
            if number == 4 and max_grad_norm is not None:
                ours[0].grad[3, 3] = math.nan
            graph.replay() if is_graph else optimizer.step()
            schedule.step()
        assert int(optimizer.applied_steps) == (11 if max_grad_norm is None else 10)
        states = [value for p in ours for value in optimizer.state[p].values()]
        runs.append([t.detach().clone() for t in (*ours, *states)])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@every
def test_capture_without_capturable_is_refused(cls: type[Any]) -> None:
    optimizer = cls(parameters([(40, 30)]), **OPTIONS[cls])
    optimizer.step()

    def capture() -> None:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            torch.zeros(1, device="cuda")  # torch warns of an empty graph
            optimizer.step()

    with pytest.raises(UserError, match=f"{cls.__name__}.step: a CUDA graph is being captured"):
        capture()


@every
def test_parameters_on_gpu_and_cpu_share_a_norm_and_a_verdict(oracle: Any, cls: type[Any]) -> None:
    ours = [*parameters([(40, 30)]), nn.Parameter(torch.randn(7))]
    optimizer = cls(ours, **{**OPTIONS[cls], "max_grad_norm": 0.5})
    exact = oracle(optimizer)
    for _ in range(2):
        ours[0].grad, ours[1].grad = torch.randn_like(ours[0]), torch.randn(7)
        exact.step()
        optimizer.step()
    exact.check()
    before = [p.detach().clone() for p in ours]
    ours[1].grad[0] = math.inf
    optimizer.step()
    assert all(torch.equal(p, b) for p, b in zip(ours, before, strict=True))
    assert (int(optimizer.applied_steps), int(optimizer.skipped_steps)) == (2, 1)


@pytest.mark.parametrize(
    ("cls", "options", "moved"),
    [
        (FusedSGD, {"lr": 0.5}, 0.5),
        (FusedLAMB, {"lr": 0.5, "weight_decay": 0.0, "max_grad_norm": None, "eps": 0.0}, 0.5),
        # Without corrections the step is that of the gradient over its norm: 1 over 1.
        (
            FusedNovoGrad,
            {"lr": 0.5, "norm_type": math.inf, "eps": 0.0, "bias_correction": False, "grad_averaging": False},
            0.5,
        ),
    ],
)
def test_more_than_2_31_elements_step_to_the_last(
    cls: type[Any], options: dict[str, Any], moved: float, all_are: AllAre
) -> None:
    size = (1 << 31) + 1031
    ours = nn.Parameter(torch.zeros(size, device="cuda", dtype=torch.bfloat16))
    ours.grad = torch.ones_like(ours)
    with pytest.warns(UserWarning, match="master_weights"):
        optimizer = cls([ours], **options)
    optimizer.step()
    assert all_are(ours.detach(), -moved)


def test_lambs_trust_ratio_of_more_than_2_31_elements(all_are: AllAre) -> None:
    size = (1 << 31) + 1031
    ours = nn.Parameter(torch.full((size,), 2.0, device="cuda", dtype=torch.bfloat16))
    ours.grad = torch.ones_like(ours)
    with pytest.warns(UserWarning, match="master_weights"):
        optimizer = FusedLAMB([ours], lr=0.25, weight_decay=0.0, use_nvlamb=True, max_grad_norm=None, eps=0.0)
    optimizer.step()  # the update is 1 everywhere, and ‖w‖ / ‖u‖ is 2
    assert all_are(ours.detach(), 1.5)


@every
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_on_a_second_gpu_are_stepped_there_while_the_first_is_current(oracle: Any, cls: type[Any]) -> None:
    ours = [nn.Parameter(torch.randn(40, 30, device=f"cuda:{i}")) for i in (0, 1)]
    optimizer = cls(ours, **{**OPTIONS[cls], "max_grad_norm": 0.5})
    exact = oracle(optimizer)
    for p in ours:
        p.grad = torch.randn_like(p)
    exact.step()
    optimizer.step()
    exact.check()
