"""What only a GPU can show of FusedAdam: no waiting, CUDA graphs, real sizes, several devices."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import nn

from fusestep.errors import UserError
from fusestep.optim import FusedAdam, clip_grad_norm_

pytestmark = pytest.mark.gpu

NoWaiting = Callable[[], AbstractContextManager[None]]

OPTIONS: dict[str, Any] = {"lr": 0.05, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}


def parameters(shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float32) -> list[Any]:
    made = [nn.Parameter(torch.randn(shape, device="cuda", dtype=dtype)) for shape in shapes]
    for p in made:
        p.grad = torch.randn_like(p)
    return made


GPT2 = [(50304, 768), (1024, 768), *[(768,), (768,), (2304, 768), (2304,), (768, 768), (3072, 768), (768, 3072)] * 12]


@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
@pytest.mark.parametrize("store", [False, True])
def test_step_never_waits_for_the_device_from_the_first_on(
    max_grad_norm: float | None, store: bool, no_waiting: NoWaiting
) -> None:
    ours = [*parameters([(40, 30), (7,)]), *parameters([(50, 3)], torch.bfloat16)]
    masters = {"master_weights": True, "store_param_remainders": store}
    optimizer = FusedAdam(ours, max_grad_norm=max_grad_norm, **masters, **OPTIONS)
    with no_waiting():
        for number in range(3):
            optimizer.step()
            optimizer.param_groups[0]["lr"] = 0.1 / (number + 1)
            kept = [p.grad for p in ours]
            optimizer.zero_grad()
            for p, old in zip(ours, kept, strict=True):
                p.grad = torch.randn_like(old)
    assert int(optimizer.applied_steps) == 3


@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_step_with_a_scaler_never_waits(max_grad_norm: float | None, no_waiting: NoWaiting) -> None:
    ours = parameters([(40, 30), (7,)])
    optimizer = FusedAdam(ours, max_grad_norm=max_grad_norm, **OPTIONS)
    scaler = torch.amp.GradScaler("cuda", init_scale=8.0)
    scaler.scale(torch.ones((), device="cuda"))
    with no_waiting():
        for _ in range(3):
            scaler.step(optimizer)
            scaler.update()
    assert int(optimizer.applied_steps) == 3


def test_clip_grad_norm_never_waits(no_waiting: NoWaiting) -> None:
    ours = [*parameters([(40, 30), (7,)]), *parameters([(50, 3)], torch.bfloat16)]
    with no_waiting():
        clip_grad_norm_(ours, 1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_real_shapes_equal_float64(dtype: torch.dtype, max_grad_norm: float | None) -> None:
    ours = parameters(GPT2, dtype)
    optimizer = FusedAdam(ours, master_weights=True, max_grad_norm=max_grad_norm, **OPTIONS)
    exact = [nn.Parameter(p.detach().double()) for p in ours]
    oracle = torch.optim.AdamW(exact, foreach=False, fused=False, **OPTIONS)
    for _ in range(3):
        for p, q in zip(ours, exact, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.double()
        if max_grad_norm is not None:
            norm = torch.nn.utils.clip_grad_norm_(exact, max_grad_norm)
        optimizer.step()
        oracle.step()
        if max_grad_norm is not None:
            assert float(optimizer.last_grad_norm) == pytest.approx(float(norm.detach()), rel=1e-6)
    for p, q in zip(ours, exact, strict=True):
        master = optimizer.state[p].get("master_param", p.detach())
        torch.testing.assert_close(master.double(), q.detach(), rtol=1e-5, atol=2e-6)
        if dtype == torch.bfloat16:
            assert torch.equal(p.detach(), master.bfloat16())


@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_real_shapes_have_the_same_masters_whole_and_by_their_remainders(max_grad_norm: float | None) -> None:
    runs = []
    for store in (False, True):
        torch.manual_seed(8)
        ours = parameters(GPT2, torch.bfloat16)
        masters = {"master_weights": True, "store_param_remainders": store}
        optimizer = FusedAdam(ours, max_grad_norm=max_grad_norm, **masters, **OPTIONS)
        for _ in range(5):
            for p in ours:
                p.grad = torch.randn_like(p)
            optimizer.step()
        runs.append((ours, [state["master_param"] for state in optimizer.state_dict()["state"].values()]))
        del optimizer
    (wholes, masters_of), (stored, others) = runs
    for p, q, master, other in zip(wholes, stored, masters_of, others, strict=True):
        assert torch.equal(master, other)
        places = p.detach().view(torch.int16).int() - q.detach().view(torch.int16).int()
        is_tie = (master.view(torch.int32) & 0xFFFF) == 0x8000
        assert bool(((places == 0) | (is_tie & (places.abs() == 1))).all())


def test_real_shapes_give_the_same_bits_twice() -> None:
    found = []
    for _ in range(2):
        torch.manual_seed(3)
        ours = parameters(GPT2[:9])
        optimizer = FusedAdam(ours, max_grad_norm=0.1, **OPTIONS)
        for _ in range(3):
            for p in ours:
                p.grad = torch.randn_like(p)
            optimizer.step()
        found.append([p.detach().clone() for p in ours])
        del ours, optimizer
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_cold_and_warm_kernels_agree() -> None:
    """The first launch in a process compiles; it must step once, like any other."""
    found = []
    for _ in range(2):
        torch.manual_seed(4)
        ours = parameters([(33, 5)])
        FusedAdam(ours, moment_dtype=torch.bfloat16, **OPTIONS).step()
        found.append(ours[0].detach().clone())
    assert torch.equal(*found)


def captured(optimizer: FusedAdam) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        optimizer.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    return graph


@pytest.mark.parametrize(("max_grad_norm", "store"), [(None, False), (0.5, False), (0.5, True)])
def test_ten_replays_with_a_schedule_equal_ten_eager_steps(max_grad_norm: float | None, store: bool) -> None:
    runs = []
    for is_graph in (True, False):
        torch.manual_seed(5)
        ours = [*parameters([(40, 30), (7,), ()]), *parameters([(50, 30)], torch.bfloat16)]
        options = {**OPTIONS, "lr": 0.1, "master_weights": True, "store_param_remainders": store}
        optimizer = FusedAdam(ours, capturable=True, max_grad_norm=max_grad_norm, **options)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=8)
        generator = torch.Generator("cuda").manual_seed(9)
        if is_graph:
            graph = captured(optimizer)
        else:
            optimizer.step()
        for _ in range(10):
            for p in ours:
                p.grad.copy_(torch.randn(p.shape, generator=generator, device="cuda"))
            graph.replay() if is_graph else optimizer.step()
            schedule.step()
        steps = [float(optimizer.state[p]["step"]) for p in ours]
        assert steps == [11.0] * len(ours)
        assert int(optimizer.applied_steps) == 11
        saved = optimizer.state_dict()["state"]
        runs.append([p.detach().clone() for p in ours] + [optimizer.last_grad_norm.clone().nan_to_num()])
        runs[-1].append(saved[3]["master_param"])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_gradients_made_within_the_capture_are_followed_and_eager_steps_do_not_disturb_the_graph() -> None:
    torch.manual_seed(6)
    model, twin = nn.Linear(30, 20, device="cuda"), nn.Linear(30, 20, device="cuda")
    twin.load_state_dict(model.state_dict())
    optimizer = FusedAdam(model.parameters(), capturable=True, max_grad_norm=0.5, **OPTIONS)
    eager = FusedAdam(twin.parameters(), max_grad_norm=0.5, **OPTIONS)
    x = torch.randn(16, 30, device="cuda")

    def whole_step(of: nn.Module, by: FusedAdam) -> None:
        by.zero_grad()
        of(x).square().sum().backward()
        by.step()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            whole_step(model, optimizer)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        whole_step(model, optimizer)
    for _ in range(2):
        whole_step(twin, eager)
    for number in range(6):
        x.normal_()
        whole_step(twin, eager)
        if number == 3:  # an eager step between replays, with gradients elsewhere
            optimizer.zero_grad()
            keep = torch.randn(1000, device="cuda")
            model(x).square().sum().backward()
            optimizer.step()
            del keep
        else:
            graph.replay()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)
    assert int(optimizer.applied_steps) == int(eager.applied_steps) == 8
    assert all(float(state["step"]) == 8.0 for state in optimizer.state.values())


def test_a_replay_with_gradients_that_are_not_finite_skips() -> None:
    ours = parameters([(40, 30)])
    optimizer = FusedAdam(ours, capturable=True, max_grad_norm=1.0, **OPTIONS)
    graph = captured(optimizer)
    before = ours[0].detach().clone()
    ours[0].grad[3, 4] = math.nan
    graph.replay()
    assert torch.equal(ours[0], before)
    assert (int(optimizer.applied_steps), int(optimizer.skipped_steps)) == (1, 1)


def capture_error(optimizer: FusedAdam, match: str) -> None:
    def capture() -> None:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            torch.zeros(1, device="cuda")  # torch warns of an empty graph
            optimizer.step()

    with pytest.raises(UserError, match=match):
        capture()


def test_capture_refuses_what_a_graph_cannot_hold() -> None:
    ours = parameters([(40, 30), (7,)])
    optimizer = FusedAdam(ours, **OPTIONS)
    optimizer.step()
    capture_error(optimizer, "capturable=True")
    fresh = FusedAdam(ours, capturable=True, **OPTIONS)
    capture_error(fresh, "run one whole training step")
    fresh.step()
    ours[1].grad = None
    capture_error(fresh, "parameter 1 has no gradient")
    before = [p.detach().clone() for p in ours]
    ours[1].grad = torch.ones_like(ours[1])
    fresh.step()
    assert not torch.equal(ours[0], before[0])


def test_more_than_2_31_elements_step_to_the_last(all_are: Callable[[torch.Tensor, float], bool]) -> None:
    size = (1 << 31) + 1031
    ours = nn.Parameter(torch.zeros(size, device="cuda", dtype=torch.bfloat16))
    ours.grad = torch.ones_like(ours)
    with pytest.warns(UserWarning, match="master_weights"):
        optimizer = FusedAdam([ours], lr=0.5, max_grad_norm=math.inf, moment_dtype=torch.bfloat16)
    optimizer.step()
    assert float(optimizer.last_grad_norm) == pytest.approx(math.sqrt(size), rel=1e-6)
    assert all_are(ours.detach(), -0.5)


def test_remainders_past_2_31_elements(all_are: Callable[[torch.Tensor, float], bool]) -> None:
    ours = nn.Parameter(torch.zeros((1 << 31) + 1031, device="cuda", dtype=torch.bfloat16))
    ours.grad = torch.ones_like(ours)
    masters = {"master_weights": True, "store_param_remainders": True}
    optimizer = FusedAdam([ours], lr=1 + 2**-10, moment_dtype=torch.bfloat16, **masters)
    optimizer.step()
    assert all_are(ours.detach(), -1.0)
    remainder = optimizer.state[ours]["master_remainder"]
    assert all_are(remainder, float(remainder[0]))
    assert float(remainder[0]) == pytest.approx(2**-10 * 2**23, abs=16)  # of the places of a number that begins with 1


def test_strided_parameters_past_2_31_elements() -> None:
    base = torch.zeros((1 << 30) + 7, 2, device="cuda", dtype=torch.bfloat16)
    ours = nn.Parameter(base[:, 1])
    ours.grad = torch.ones(1, device="cuda", dtype=torch.bfloat16).expand(ours.shape)
    with pytest.warns(UserWarning, match="master_weights"):
        optimizer = FusedAdam([ours], lr=0.5, moment_dtype=torch.bfloat16)
    optimizer.step()
    assert bool((base[:, 1] == -0.5).all())
    assert not bool(base[:, 0].any())


def test_parameters_on_gpu_and_cpu_share_a_norm_and_a_verdict() -> None:
    ours = [*parameters([(40, 30)]), nn.Parameter(torch.randn(7))]
    ours[1].grad = torch.randn(7)
    exact = [nn.Parameter(p.detach().cpu().double()) for p in ours]
    optimizer = FusedAdam(ours, max_grad_norm=0.5, **OPTIONS)
    oracle = torch.optim.AdamW(exact, foreach=False, fused=False, **OPTIONS)
    for _ in range(2):
        for p, q in zip(ours, exact, strict=True):
            q.grad = p.grad.cpu().double()
        torch.nn.utils.clip_grad_norm_(exact, 0.5)
        optimizer.step()
        oracle.step()
    for p, q in zip(ours, exact, strict=True):
        torch.testing.assert_close(p.detach().cpu().double(), q.detach(), rtol=1e-5, atol=1e-6)
    before = [p.detach().clone() for p in ours]
    ours[1].grad[0] = math.inf
    optimizer.step()
    assert all(torch.equal(p, b) for p, b in zip(ours, before, strict=True))
    assert (int(optimizer.applied_steps), int(optimizer.skipped_steps)) == (2, 1)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_on_a_second_gpu_are_stepped_there_while_the_first_is_current(no_waiting: NoWaiting) -> None:
    ours = [nn.Parameter(torch.randn(40, 30, device=f"cuda:{i}")) for i in (0, 1)]
    for p in ours:
        p.grad = torch.randn_like(p)
    exact = [nn.Parameter(p.detach().cpu().double()) for p in ours]
    for p, q in zip(ours, exact, strict=True):
        q.grad = p.grad.cpu().double()
    torch.nn.utils.clip_grad_norm_(exact, 0.5)
    optimizer = FusedAdam(ours, max_grad_norm=0.5, **OPTIONS)
    with no_waiting():
        optimizer.step()
    torch.optim.AdamW(exact, foreach=False, fused=False, **OPTIONS).step()
    for p, q in zip(ours, exact, strict=True):
        torch.testing.assert_close(p.detach().cpu().double(), q.detach(), rtol=1e-5, atol=1e-6)
