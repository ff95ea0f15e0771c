"""TrainStep: the same training as its steps taken one by one, in a graph where there is a GPU."""

from __future__ import annotations

import copy
import gc
import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusestep
from fusestep import TrainStep, fp8
from fusestep.dispatch import StrictFallbackError
from fusestep.errors import UserError
from fusestep.fp8.recipes import Recipe
from fusestep.graph import segments
from fusestep.nn import FusedLayerNorm, LayerNormMLP, Linear
from fusestep.optim import FusedAdam

OPTIONS: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "max_grad_norm": 0.5}


def mean_square(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x).float(), y)


def plain(device: torch.device, dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(3)
    layers = (nn.Linear(12, 40), FusedLayerNorm(40), nn.GELU(), nn.Dropout(dropout), nn.Linear(40, 7))
    return nn.Sequential(*layers).to(device)


def batches(count: int, device: torch.device, rows: int = 6) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(4)
    return [(torch.randn(rows, 12, device=device), torch.randn(rows, 7, device=device)) for _ in range(count)]


def pair(
    model: nn.Module, loss_fn: Callable[..., Tensor] = mean_square, adam: dict[str, Any] = OPTIONS, **options: Any
) -> tuple[Any, Any]:
    """A step and its twin on a copy of the model, which runs one launch at a time."""
    twin = copy.deepcopy(model)
    steps = []
    for one, capture in ((model, True), (twin, False)):
        steps.append(TrainStep(one, loss_fn, FusedAdam(one.parameters(), **adam), capture=capture, **options))
    return steps[0], steps[1]


def assert_same(step: Any, twin: Any) -> None:
    for (name, ours), theirs in zip(step.model.state_dict().items(), twin.model.state_dict().values(), strict=True):
        if isinstance(ours, Tensor):
            assert torch.equal(ours, theirs), name
    assert int(step.optimizer.applied_steps) == int(twin.optimizer.applied_steps)


def run_both(step: Any, twin: Any, data: Sequence[tuple[Tensor, ...]]) -> None:
    losses = [step(*batch) for batch in data]
    theirs = [twin(*batch) for batch in data]
    assert torch.equal(torch.stack(losses), torch.stack(theirs))
    assert_same(step, twin)


# Anywhere


def test_a_step_is_the_loop_that_it_stands_for(device: torch.device) -> None:
    model = plain(device)
    twin = copy.deepcopy(model)
    step = TrainStep(model, mean_square, FusedAdam(model.parameters(), **OPTIONS))
    optimizer = FusedAdam(twin.parameters(), **OPTIONS)
    for x, y in batches(7, device):
        loss = step(x, y)
        expected = F.mse_loss(twin(x), y)
        expected.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(loss, expected.detach())
        assert not loss.requires_grad
        assert all(p.grad is None for p in model.parameters())
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert bool(step.captures) == (device.type == "cuda")


def test_losses_are_kept_apart(device: torch.device) -> None:
    model = plain(device)
    step = TrainStep(model, mean_square, FusedAdam(model.parameters(), **OPTIONS))
    losses = [step(x, y) for x, y in batches(8, device)]
    assert len({float(loss) for loss in losses}) == 8


def test_micro_batches_make_the_gradient_of_the_whole(device: torch.device) -> None:
    model = plain(device).double()
    twin = copy.deepcopy(model)
    whole, parts = (
        TrainStep(m, mean_square, FusedAdam(m.parameters(), **OPTIONS), accumulate=n)
        for m, n in ((model, 1), (twin, 3))
    )
    for x, y in batches(6, device):
        one, other = whole(x.double(), y), parts(x.double(), y)
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


def test_a_batch_may_come_by_name(device: torch.device) -> None:
    model = plain(device)
    twin = copy.deepcopy(model)
    named, placed = (
        TrainStep(m, mean_square, FusedAdam(m.parameters(), **OPTIONS), accumulate=2) for m in (model, twin)
    )
    for x, y in batches(6, device):
        assert torch.equal(named(y=y, x=x), placed(x, y))
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    x, y = batches(1, device)[0]
    assert torch.equal(named(x, y=y), placed(x, y))
    assert bool(named.captures) == (device.type == "cuda")


def test_before_runs_first_in_each_step(device: torch.device) -> None:
    model = plain(device)
    rate = torch.tensor(0.0, device=device)
    optimizer = FusedAdam(model.parameters(), lr=rate)
    rates = torch.linspace(0.01, 0.2, 9, device=device)
    step = TrainStep(model, mean_square, optimizer, before=lambda: rate.copy_(rates[optimizer.applied_steps]))
    seen = []
    for x, y in batches(7, device):
        step(x, y)
        seen.append(rate.clone())
    assert torch.equal(torch.stack(seen), rates[:7])


def test_without_a_gpu_it_says_so_once_and_strict_refuses(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = plain(torch.device("cpu"))
    fusestep.dispatch.reset()
    with caplog.at_level(logging.WARNING, "fusestep"):
        for _ in range(2):
            step = TrainStep(model, mean_square, FusedAdam(model.parameters()))
    assert caplog.text.count("CUDA graphs run on CUDA devices, the model is on cpu") == 1
    assert step.fallback == "CUDA graphs run on CUDA devices, the model is on cpu"
    monkeypatch.setenv("FUSESTEP_STRICT", "1")
    fusestep.dispatch.reset()
    with pytest.raises(StrictFallbackError, match="TrainStep cannot capture the step"):
        TrainStep(model, mean_square, FusedAdam(model.parameters()))
    monkeypatch.undo()
    fusestep.dispatch.reset()


def test_what_cannot_be_a_step_is_refused(device: torch.device) -> None:
    model = plain(device)
    optimizer = FusedAdam(model.parameters())
    x, y = batches(1, device)[0]
    with pytest.raises(UserError, match="loss_fn returned a value of shape \\(6, 7\\); return a tensor of one element"):
        TrainStep(model, lambda model, x, y: model(x) - y, optimizer)(x, y)
    with pytest.raises(UserError, match="loss_fn returned a value of type float"):
        TrainStep(model, lambda model, x, y: (model(x) - y).detach().mean().item(), optimizer)(x, y)
    with torch.inference_mode(), pytest.raises(UserError, match=r"within torch\.inference_mode\(\) nothing has"):
        TrainStep(model, mean_square, optimizer)(x, y)
    with pytest.raises(UserError, match="4 micro-batches do not divide"):
        TrainStep(model, mean_square, optimizer, accumulate=4)(x, y)
    with pytest.raises(UserError, match="accumulate is 0; pass a whole number of at least 1"):
        TrainStep(model, mean_square, optimizer, accumulate=0)
    with pytest.raises(UserError, match="max_graphs is 'many'"):
        TrainStep(model, mean_square, optimizer, max_graphs="many")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="LBFGS takes several gradients in a step, by a closure"):
        TrainStep(model, mean_square, torch.optim.LBFGS(model.parameters()))
    parts = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2, device="meta")])
    with pytest.raises(UserError, match="the model's parameters lie on cpu, meta; move it to one device"):
        TrainStep(parts, mean_square, FusedAdam(parts[0].parameters()))


def test_fp8_histories_roll_once_a_step(device: torch.device) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(Linear(12, 40), LayerNormMLP(40, 48), nn.Linear(40, 7)).to(device)
    recipe = fp8.DelayedScaling(amax_history_len=4)
    step = TrainStep(model, mean_square, FusedAdam(model.parameters()), fp8_recipe=recipe, accumulate=2)
    for x, y in batches(6, device):
        step(x, y)
    first: Any = model[0]
    assert first.fp8_state.rolls.tolist() == [6] * len(first.fp8_state.names)


# In a graph


@pytest.mark.gpu
class TestGraph:
    """What only a GPU can show."""

    device = torch.device("cuda", 0)

    def test_replays_equal_steps_one_by_one(self) -> None:
        step, twin = pair(plain(self.device))
        run_both(step, twin, batches(12, self.device))
        assert len(step.captures) == 1
        assert step.captures[0].batch == ((6, 12), (6, 7))
        assert step.fallback is None

    def test_batches_come_from_the_host_too(self) -> None:
        step, twin = pair(plain(self.device))
        data = [(x.pin_memory(), y) for x, y in batches(8, torch.device("cpu"))]
        run_both(step, twin, data)
        assert len(step.captures) == 1

    def test_several_shapes_take_turns(self) -> None:
        step, twin = pair(plain(self.device), max_graphs=2)
        data = [batch for rows in (6, 9, 6, 9, 6, 9) for batch in batches(3, self.device, rows)]
        run_both(step, twin, data)
        assert [capture.batch[0] for capture in step.captures] == [(6, 12), (9, 12)]
        more = [batch for rows in (5, 6) for batch in batches(5, self.device, rows)]
        run_both(step, twin, more)  # 5 takes the place of 6, which is captured again
        assert [capture.batch[0][0] for capture in step.captures] == [6, 9, 5, 6]

    def test_dropout_draws_anew_in_each_replay(self) -> None:
        step, twin = pair(plain(self.device, dropout=0.4))
        x, y = batches(1, self.device)[0]
        torch.cuda.manual_seed(7)
        losses = [float(step(x, y)) for _ in range(10)]
        torch.cuda.manual_seed(7)
        theirs = [float(twin(x, y)) for _ in range(10)]
        assert losses == theirs
        assert_same(step, twin)

    @pytest.mark.parametrize("recipe", [fp8.DelayedScaling(amax_history_len=4), fp8.Float8CurrentScaling()], ids=str)
    def test_fp8_with_weights_that_the_optimizer_casts(self, recipe: Recipe) -> None:
        torch.manual_seed(1)
        model = nn.Sequential(Linear(12, 40), LayerNormMLP(40, 48), Linear(40, 7)).to(self.device, torch.bfloat16)
        adam = {**OPTIONS, "master_weights": True}
        step, twin = pair(model, fp8_recipe=recipe, adam=adam)
        data = [(x.bfloat16(), y) for x, y in batches(12, self.device)]
        run_both(step, twin, data)
        # Weights that are loaded between two steps: the copies that the graph reads are stale.
        state = {key: value * 0.5 if value.is_floating_point() else value for key, value in model.state_dict().items()}
        for one in (step, twin):
            with torch.no_grad():
                for name, parameter in one.model.named_parameters():
                    parameter.copy_(state[name])
            for values in one.optimizer.state.values():
                del values["master_param"]
        run_both(step, twin, data)

    def test_loss_scaling(self) -> None:
        scalers = [torch.amp.GradScaler("cuda", init_scale=2.0**10, growth_interval=4) for _ in range(2)]
        model = plain(self.device)
        twin = copy.deepcopy(model)
        steps = []
        for one, scaler, capture in ((model, scalers[0], True), (twin, scalers[1], False)):
            optimizer = FusedAdam(one.parameters(), **OPTIONS)
            step = TrainStep(one, mean_square, optimizer, scaler=scaler, autocast=torch.float16, capture=capture)
            steps.append(step)
        data = batches(12, self.device)
        data[8][0][1, 2] = torch.inf
        for batch in data:
            losses = [step(*batch) for step in steps]
            assert torch.equal(losses[0], losses[1]) or bool(losses[0].isnan() & losses[1].isnan())
        assert_same(*steps)
        assert len(steps[0].captures) == 1
        assert int(optimizer.skipped_steps) == 1
        assert scalers[0].get_scale() == scalers[1].get_scale() != 2.0**10

    def test_batches_in_dicts(self) -> None:
        def of_dict(model: nn.Module, batch: dict[str, Any]) -> Tensor:
            return mean_square(model, batch["x"], batch["more"][0])

        step, twin = pair(plain(self.device), loss_fn=of_dict, accumulate=2)
        data = [({"x": x.pin_memory(), "more": (y, None, 3)},) for x, y in batches(8, torch.device("cpu"))]
        run_both(step, twin, data)
        assert len(step.captures) == 1

    @pytest.mark.parametrize("error", [KeyError("token"), KeyboardInterrupt()], ids=["an error", "an interrupt"])
    def test_what_loss_fn_raises_in_a_capture_passes_and_the_next_call_captures(self, error: BaseException) -> None:
        captures: list[int] = []

        def raising(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            loss = mean_square(model, x + 0 * torch.randn_like(x), y)
            if torch.cuda.is_current_stream_capturing():
                captures.append(1)
                if len(captures) == 2:  # the second micro-batch: gradients are there
                    raise error
            return loss

        step, twin = pair(plain(self.device, dropout=0.2), loss_fn=raising, accumulate=2)
        data = batches(9, self.device)
        losses = []
        torch.cuda.manual_seed(7)
        for number, batch in enumerate(data):
            if number == 3:
                with pytest.raises(type(error)):
                    step(*batch)
            losses.append(float(step(*batch)))
        torch.cuda.manual_seed(7)
        assert [float(twin(*batch)) for batch in data] == losses
        assert_same(step, twin)
        assert step.fallback is None
        assert len(step.captures) == 1

    def test_a_graph_leaves_the_memory_of_gradients_outside_of_the_optimizer_alone(self) -> None:
        model = plain(self.device)
        step = TrainStep(model, mean_square, FusedAdam(model[4].parameters(), **OPTIONS))
        for batch in batches(6, self.device):
            step(*batch)
        model.zero_grad()
        others = [torch.full((40, 12), 3.0, device=self.device) for _ in range(64)]
        for batch in batches(6, self.device):
            step(*batch)
        assert len(step.captures) == 1
        assert all(bool((other == 3.0).all()) for other in others)

    def test_an_optimizer_that_counts_on_the_host_falls_back(self) -> None:
        model = plain(self.device)
        twin = copy.deepcopy(model)
        steps = []
        for one, capture in ((model, True), (twin, False)):
            optimizer = torch.optim.Adagrad(one.parameters(), lr=0.1, lr_decay=0.5)
            steps.append(TrainStep(one, mean_square, optimizer, capture=capture))
        for batch in batches(8, self.device):
            assert torch.equal(steps[0](*batch), steps[1](*batch))
        assert "it changes 'step' of Adagrad on the host" in str(steps[0].fallback)

    def test_accumulation(self) -> None:
        step, twin = pair(plain(self.device), accumulate=3)
        run_both(step, twin, batches(8, self.device))
        assert len(step.captures) == 1

    def test_schedulers_and_numbers_set_the_learning_rate(self) -> None:
        # Both keep the rate in fp32, in which schedulers count then.
        step, twin = pair(plain(self.device), adam={**OPTIONS, "capturable": True})
        schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(one.optimizer, 10) for one in (step, twin)]
        for batch in batches(8, self.device):
            for one, schedule in zip((step, twin), schedules, strict=True):
                one(*batch)
                schedule.step()
        for one in (step, twin):
            one.optimizer.param_groups[0]["lr"] = 0.125
        run_both(step, twin, batches(3, self.device))
        assert len(step.captures) == 1
        assert float(step.optimizer.param_groups[0]["lr"]) == 0.125

    def test_rates_that_are_set_as_numbers_before_each_step(self) -> None:
        step, twin = pair(plain(self.device), adam={**OPTIONS, "capturable": True})
        for number, batch in enumerate(batches(9, self.device)):
            for one in (step, twin):
                one.optimizer.param_groups[0]["lr"] = 0.01 / (1 + number)
            run_both(step, twin, [batch])
        assert (len(step.captures), step.fallback) == (1, None)

    def test_two_steps_share_a_model_and_an_optimizer(self) -> None:
        def other(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            return F.l1_loss(model(x).float(), y)

        step, twin = pair(plain(self.device))
        second, second_twin = (
            TrainStep(one.model, other, one.optimizer, capture=one is step, autocast=torch.bfloat16)
            for one in (step, twin)
        )
        for batch in batches(12, self.device):
            run_both(step, twin, [batch])
            run_both(second, second_twin, [batch])
        assert len(step.captures) >= 1
        assert len(second.captures) >= 1
        assert (step.fallback, second.fallback) == (None, None)

    def test_loss_fn_may_have_the_batch_require_gradients(self) -> None:
        def penalised(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            x.requires_grad_()
            (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
            return mean_square(model, x, y) + slope.square().mean()

        torch.manual_seed(3)
        step, twin = pair(nn.Sequential(nn.Linear(12, 9), nn.Tanh(), nn.Linear(9, 7)).to(self.device), penalised)
        run_both(step, twin, batches(8, self.device))
        assert len(step.captures) == 1

    def test_a_change_right_before_the_capture_is_followed(self) -> None:
        step, twin = pair(plain(self.device))
        data = batches(8, self.device)
        run_both(step, twin, data[:3])
        for one in (step, twin):
            one.model[0].requires_grad_(False)
        run_both(step, twin, data[3:])
        assert (len(step.captures), step.fallback) == (1, None)

    def test_who_waits_in_another_thread_does_no_harm(self) -> None:
        step, twin = pair(plain(self.device))
        data = batches(8, self.device)
        is_over = threading.Event()

        def wait() -> None:
            with torch.cuda.stream(torch.cuda.Stream()):
                one = torch.ones(3, device=self.device)
                while not is_over.is_set():
                    one.sum().item()

        thread = threading.Thread(target=wait)
        thread.start()
        try:
            losses = [step(*batch) for batch in data]
        finally:
            is_over.set()
            thread.join()
        assert torch.equal(torch.stack(losses), torch.stack([twin(*batch) for batch in data]))
        assert step.fallback is None

    def test_memory_is_free_as_soon_as_nobody_holds_the_step(self) -> None:
        gc.collect()
        torch.cuda.synchronize()
        # Of each stream that multiplies cuBLAS keeps a workspace, in the same memory.
        torch._C._cuda_clearCublasWorkspaces()
        before = torch.cuda.memory_allocated()
        model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4))).to(self.device)
        step = TrainStep(model, lambda model, x: model(x).square().mean(), FusedAdam(model.parameters()))
        x = torch.randn(1 << 13, 512, device=self.device)
        for _ in range(6):
            step(x)
        assert len(step.captures) == 1
        gc.disable()
        try:
            del step, model, x
            torch._C._cuda_clearCublasWorkspaces()
            assert torch.cuda.memory_allocated() - before < 1 << 20
        finally:
            gc.enable()

    def test_evaluation_and_checkpoints_between_steps(self) -> None:
        step, twin = pair(plain(self.device, dropout=0.3))
        data = batches(8, self.device)
        torch.cuda.manual_seed(1)
        for batch in data[:6]:
            step(*batch)
        step.model.eval()
        with torch.no_grad():
            mean_square(step.model, *data[0])
        step.model.train()
        saved = copy.deepcopy((step.model.state_dict(), step.optimizer.state_dict(), torch.cuda.get_rng_state()))
        after = [float(step(*batch)) for batch in data]
        twin.model.load_state_dict(saved[0])
        twin.optimizer.load_state_dict(saved[1])
        torch.cuda.set_rng_state(saved[2])
        assert [float(twin(*batch)) for batch in data] == after
        # Back to the checkpoint in the step that has a graph.
        step.model.load_state_dict(saved[0])
        step.optimizer.load_state_dict(saved[1])
        torch.cuda.set_rng_state(saved[2])
        assert [float(step(*batch)) for batch in data] == after
        assert len(step.captures) == 2

    def test_a_change_of_the_model_or_of_options_is_followed(self) -> None:
        step, twin = pair(plain(self.device))
        data = batches(6, self.device)
        run_both(step, twin, data)

        for one in (step, twin):
            one.model[0].weight.requires_grad_(False)
        run_both(step, twin, data)
        for one in (step, twin):
            one.model[2] = nn.ReLU()
        run_both(step, twin, data)
        for one in (step, twin):
            one.optimizer.param_groups[0]["weight_decay"] = 0.5
        run_both(step, twin, data)
        for one in (step, twin):
            one.model[4].bias.data = one.model[4].bias.data + 1  # elsewhere in memory
        run_both(step, twin, data)
        assert len(step.captures) == 5

    def test_code_that_waits_falls_back_and_trains_on(self, caplog: pytest.LogCaptureFixture) -> None:
        def waiting(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            loss = mean_square(model, x, y)
            if loss.item() > 1e9:
                raise AssertionError
            return loss

        step, twin = pair(plain(self.device, dropout=0.2), loss_fn=waiting)
        data = batches(8, self.device)
        with caplog.at_level(logging.WARNING, "fusestep"):
            torch.cuda.manual_seed(7)
            losses = [float(step(*batch)) for batch in data]
            torch.cuda.manual_seed(7)
            assert [float(twin(*batch)) for batch in data] == losses
        assert_same(step, twin)
        assert step.fallback is not None
        assert "test_train_step.py, line" in caplog.text
        assert "makes the host wait for the device" in caplog.text
        assert torch.randn(3, device=self.device).isfinite().all()

    def test_a_capture_that_fails_falls_back_and_trains_on(self, caplog: pytest.LogCaptureFixture) -> None:
        def refusing(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            if torch.cuda.is_current_stream_capturing():
                x = x + torch.randn_like(x)
                raise RuntimeError("this cannot be captured")
            return mean_square(model, x, y)

        step, twin = pair(plain(self.device, dropout=0.2), loss_fn=refusing)
        data = batches(8, self.device)
        with caplog.at_level(logging.WARNING, "fusestep"):
            torch.cuda.manual_seed(7)
            losses = [float(step(*batch)) for batch in data]
            torch.cuda.manual_seed(7)
            assert [float(twin(*batch)) for batch in data] == losses
        assert_same(step, twin)
        assert "the step cannot be captured (this cannot be captured)" in caplog.text

    def test_a_parameter_that_gets_no_gradient_is_named(self, caplog: pytest.LogCaptureFixture) -> None:
        step, twin = pair(plain(self.device))
        for one in (step, twin):
            one.model[4].bias = nn.Parameter(torch.ones(7, device=self.device))  # the optimizer has the other one
        with caplog.at_level(logging.WARNING, "fusestep"):
            run_both(step, twin, batches(6, self.device))
        assert "parameter 5 has no gradient" in caplog.text

    def test_torchs_own_optimizer(self) -> None:
        model = plain(self.device)
        twin = copy.deepcopy(model)
        steps = []
        for one, capture in ((model, True), (twin, False)):
            optimizer = torch.optim.AdamW(one.parameters(), lr=0.01, capturable=True)
            steps.append(TrainStep(one, mean_square, optimizer, capture=capture))
        for batch in batches(8, self.device):
            torch.testing.assert_close(steps[0](*batch), steps[1](*batch), rtol=1e-5, atol=1e-7)
        assert len(steps[0].captures) == 1
        plainly = torch.optim.AdamW(model.parameters())
        assert "capturable=True" in str(TrainStep(model, mean_square, plainly).fallback)

    # Of torch's own making, as it traces an autograd.Function.
    @pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
    @pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")
    def test_a_compiled_model(self) -> None:
        model = plain(self.device)
        compiled: Any = torch.compile(model)
        step = TrainStep(compiled, mean_square, FusedAdam(model.parameters(), **OPTIONS))
        twin = TrainStep(compiled, mean_square, FusedAdam(model.parameters(), **OPTIONS), capture=False)
        start = copy.deepcopy(model.state_dict())
        data = batches(8, self.device)
        losses = [float(step(*batch)) for batch in data]
        model.load_state_dict(start)
        assert [float(twin(*batch)) for batch in data] == losses
        assert len(step.captures) == 1

    def test_a_replay_never_waits(self, no_waiting: Any) -> None:
        step, _ = pair(plain(self.device))
        data = batches(6, self.device)
        for batch in data:
            step(*batch)
        with no_waiting():
            step(*data[0])

    def test_memory_is_that_of_one_step(self) -> None:
        """Warm-up and graph do not hold their activations at once."""
        gc.collect()  # what other tests left in cycles may not be freed in between
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8))).to(self.device)
        step, twin = pair(model, loss_fn=lambda model, x: model(x).square().mean())
        x = torch.randn(1 << 16, 256, device=self.device)
        torch.cuda.reset_peak_memory_stats()
        for _ in range(3):
            twin(x)
        alone = torch.cuda.max_memory_reserved() - before
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(6):
            step(x)
        assert len(step.captures) == 1
        assert torch.cuda.max_memory_reserved() - before <= 1.25 * alone + x.nbytes

    def test_nothing_lies_idle_beside_the_graph(self) -> None:
        """What lasts has segments of its own: neither activations nor gradients of the first steps left gaps there."""

        def idle() -> int:
            ordinary = [one for one in torch.cuda.memory_snapshot() if tuple(one["segment_pool_id"]) == (0, 0)]
            return sum(one["total_size"] - one["allocated_size"] for one in ordinary)

        gc.collect()
        torch.cuda.empty_cache()
        before = idle()
        widths = (1024, 3072, 1024, 5120, 1024, 3072)
        layers = [nn.Linear(a, b, bias=False, device=self.device) for a, b in itertools.pairwise(widths)]
        step, _ = pair(nn.Sequential(*layers), loss_fn=lambda model, x: model(x).square().mean())
        x = torch.randn(1 << 12, widths[0], device=self.device)
        for _ in range(5):
            step(x)
        assert len(step.captures) == 1
        assert idle() - before < 30e6  # a third of what moments that lie between gradients cost here

    def test_a_capture_of_torchs_in_another_thread_is_not_spoilt(self) -> None:
        """By giving back what a graph had that is gone."""
        x = torch.ones(1 << 20, device=self.device)
        dropped = torch.cuda.CUDAGraph()
        with torch.cuda.graph(dropped):
            x.square()
        del dropped
        begun, may_end = threading.Event(), threading.Event()
        results: list[Tensor] = []

        def capture() -> None:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                begun.set()
                may_end.wait(60)
                y = x + 1
            graph.replay()
            results.append(y.clone())

        thread = threading.Thread(target=capture)
        thread.start()
        assert begun.wait(60)
        reason = segments.release()
        may_end.set()
        thread.join(60)
        assert reason == "torch.cuda.graph captures in another thread"
        assert torch.equal(results[0], x + 1)
        assert segments.release() is None
