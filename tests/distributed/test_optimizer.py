"""Optimizers over several processes do what one process does: DDP, FSDP2, tensor parallelism, and both together."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils._pytree import tree_map_only

from fusestep.distributed.groups import mark_shard, shard_group
from fusestep.errors import UserError
from fusestep.optim import (
    FusedAdagrad,
    FusedAdam,
    FusedLAMB,
    FusedNovoGrad,
    FusedSGD,
    accumulate_in_fp32,
    clip_grad_norm_,
)
from fusestep.optim.adam_masters import lying_as
from harness import placed, run_ranks
from layouts import Layout, batch, net, whole

STEPS = 20

MAKERS: dict[str, Callable[[Any], Any]] = {
    "adam": lambda p: FusedAdam(p, lr=0.01, weight_decay=0.1),
    "adam-clip": lambda p: FusedAdam(p, lr=0.01, weight_decay=0.1, max_grad_norm=0.7),
    "lamb": lambda p: FusedLAMB(p, lr=0.02, weight_decay=0.05),
    "sgd": lambda p: FusedSGD(p, lr=0.05, momentum=0.9, nesterov=True, max_grad_norm=0.7),
    "novograd": lambda p: FusedNovoGrad(p, lr=0.02, weight_decay=0.05, max_grad_norm=2.0),
    "novograd-max": lambda p: FusedNovoGrad(p, lr=0.02, norm_type=math.inf),
    "adagrad": lambda p: FusedAdagrad(p, lr=0.05, max_grad_norm=0.7),
}


def trained(kind: str, name: str, steps: int = STEPS) -> dict[str, Any]:
    """What so many steps gave."""
    layout = Layout(kind)
    optimizer = MAKERS[name](layout.model.parameters())
    losses = layout.train(optimizer, steps)
    counts = int(optimizer.applied_steps), int(optimizer.skipped_steps)
    return {"losses": losses, "norm": optimizer.last_grad_norm, "counts": counts, "weights": whole(layout.model)}


def train_all(rank: int, cases: list[tuple[str, str]], steps: int) -> list[dict[str, Any]]:
    return [trained(kind, name, steps) for kind, name in cases]


def compare_with_one_process(
    ranks: int, cases: list[tuple[str, str]], steps: int = STEPS, timeout: float = 120
) -> None:
    found = run_ranks(train_all, ranks, cases, steps, timeout=timeout)
    with placed():
        alone = {name: trained("alone", name, steps) for name in {name for _, name in cases}}
    alone = tree_map_only(Tensor, Tensor.cpu, alone)
    for number, (kind, name) in enumerate(cases):
        expected, label = alone[name], f"{kind} {name}"
        for of_rank in (one[number] for one in found):
            assert of_rank["losses"] == pytest.approx(expected["losses"], rel=1e-6), label
            assert of_rank["counts"] == expected["counts"] == (steps, 0), label
            for weight, value in expected["weights"].items():
                torch.testing.assert_close(of_rank["weights"][weight], value, rtol=1e-5, atol=1e-6, msg=label)
            torch.testing.assert_close(of_rank["norm"], expected["norm"], rtol=2e-6, atol=0.0, equal_nan=True)
            assert of_rank["norm"].view(torch.int32) == found[0][number]["norm"].view(torch.int32), label
        assert expected["losses"][-1] != pytest.approx(expected["losses"][0], rel=1e-2), label


@pytest.mark.usefixtures("ranks_device")
def test_two_processes_train_as_one_does() -> None:
    cases = [(kind, name) for kind in ("fsdp", "tp") for name in MAKERS]
    compare_with_one_process(2, [("ddp", "adam-clip"), ("ddp", "lamb"), *cases])


def test_four_processes_train_as_one_does() -> None:
    compare_with_one_process(
        4, [*(("fsdp-tp", name) for name in ("adam-clip", "lamb", "novograd-max")), ("hsdp", "lamb")]
    )


@pytest.mark.endurance
def test_every_optimizer_in_every_layout_trains_as_one_process_does() -> None:
    for ranks, kinds in ((2, ("ddp", "fsdp", "tp")), (3, ("fsdp",)), (4, ("ddp", "fsdp", "hsdp", "tp", "fsdp-tp"))):
        compare_with_one_process(ranks, [(kind, name) for kind in kinds for name in MAKERS], timeout=600)


@pytest.mark.interpreter
def test_kernels_step_the_parts_that_are_here() -> None:
    cases = [("fsdp", "adam-clip"), ("tp", "lamb"), ("fsdp", "novograd-max")]
    compare_with_one_process(2, cases, steps=2, timeout=250)


def test_one_process_trains_as_torch_does() -> None:
    """So that what several are compared with is no invention of ours."""
    layout = Layout("alone")
    optimizer = torch.optim.AdamW(layout.model.parameters(), lr=0.01, weight_decay=0.1)
    losses = []
    for step in range(STEPS):
        losses.append(layout.backward(step).item())
        torch.nn.utils.clip_grad_norm_(layout.model.parameters(), 0.7)
        optimizer.step()
        optimizer.zero_grad()
    assert trained("alone", "adam-clip")["losses"] == pytest.approx(losses, rel=1e-6)


# What all ranks must agree on


def agreements(rank: int) -> None:
    skips_where_one_rank_has_a_nan(rank)
    skips_where_one_copy_of_a_replicated_parameter_has_a_nan(rank)
    skips_where_a_loss_scaler_found_something_on_one_rank(rank)
    clips_by_any_norm(rank)
    counts_marked_parts()
    measures_over_the_right_ranks(rank)
    follows_a_loss_scaler(rank)
    sums_micro_batches_in_fp32(rank)
    takes_gradients_in_summands(rank)
    has_nothing_to_step_on_some_ranks(rank)
    says_what_does_not_fit()


def test_all_ranks_agree() -> None:
    run_ranks(agreements, 4, timeout=120)


def step_and_compare(layout: Layout, optimizer: Any, *, skipped: bool) -> None:
    before = whole(layout.model)
    moments = [value.clone() for state in optimizer.state.values() for value in state.values()]
    counts = int(optimizer.applied_steps), int(optimizer.skipped_steps)
    optimizer.step()
    after = whole(layout.model)
    same = [torch.equal(value, before[name]) for name, value in after.items()]
    assert all(same) if skipped else not any(same), same
    assert (int(optimizer.applied_steps), int(optimizer.skipped_steps)) == (
        counts[0] + (not skipped),
        counts[1] + skipped,
    )
    if skipped and moments:
        now = [value for state in optimizer.state.values() for value in state.values()]
        assert all(torch.equal(a.to_local(), b.to_local()) for a, b in zip(now, moments, strict=True) if a.ndim)
    optimizer.zero_grad()


def skips_where_one_rank_has_a_nan(rank: int) -> None:
    for name in ("adam-clip", "lamb", "sgd", "novograd", "adagrad"):
        layout = Layout("fsdp-tp")
        optimizer = MAKERS[name](layout.model.parameters())
        for step, (culprit, value) in enumerate([(None, 0.0), (3, math.nan), (1, math.inf), (None, 0.0)]):
            layout.backward(step)
            if rank == culprit:
                gradient = layout.model.second.weight.grad
                assert isinstance(gradient, DTensor)
                gradient.to_local()[0, -1] = value
            step_and_compare(layout, optimizer, skipped=culprit is not None)
            assert math.isfinite(optimizer.last_grad_norm) == (culprit is None)


def skips_where_one_copy_of_a_replicated_parameter_has_a_nan(rank: int) -> None:
    """norm.weight is sharded over data and knows nothing of the other tensor-parallel ranks, which hold it too."""
    layout = Layout("fsdp-tp")
    optimizer = MAKERS["adam-clip"](layout.model.parameters())
    layout.backward(0)
    gradient = layout.model.norm.weight.grad
    assert isinstance(gradient, DTensor)
    assert gradient.device_mesh.size() == 2
    if rank == 1:
        gradient.to_local()[0] = math.nan
    step_and_compare(layout, optimizer, skipped=True)


def skips_where_a_loss_scaler_found_something_on_one_rank(rank: int) -> None:
    for name in ("adam", "adam-clip"):
        expected = trained("alone", name, 1)["weights"]
        layout = Layout("fsdp-tp")
        optimizer = MAKERS[name](layout.model.parameters())
        for found_on in (2, None):
            layout.backward(0)
            for parameter in layout.model.parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(8.0)
            optimizer.grad_scale = torch.tensor(8.0)
            optimizer.found_inf = torch.tensor(float(rank == found_on))
            step_and_compare(layout, optimizer, skipped=found_on is not None)
        for weight, value in whole(layout.model).items():
            torch.testing.assert_close(value, expected[weight], rtol=1e-5, atol=1e-6)


def clips_by_any_norm(rank: int) -> None:
    for order in (2.0, 1.0, 3.0, math.inf):
        alone, layout = Layout("alone"), Layout("fsdp-tp")
        for one in (alone, layout):
            one.backward(1)
        wanted = torch.nn.utils.clip_grad_norm_(alone.model.parameters(), 0.3, order)
        found = clip_grad_norm_(layout.model.parameters(), 0.3, order)
        assert type(found) is Tensor
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=0.0)
        for own, its in zip(layout.model.parameters(), alone.model.parameters(), strict=True):
            assert isinstance(own.grad, DTensor)
            torch.testing.assert_close(own.grad.full_tensor(), its.grad, rtol=1e-5, atol=1e-7)
    if rank == 2:
        layout.model.second.bias.grad.to_local().fill_(math.nan)
    before = layout.model.last.weight.grad.to_local().clone()
    for order in (2.0, math.inf):
        assert clip_grad_norm_(layout.model.parameters(), 0.1, order).isnan(), order
    assert torch.equal(layout.model.last.weight.grad.to_local(), before)


def counts_marked_parts() -> None:
    """Parts that are plain tensors, beside a parameter that is whole everywhere."""
    rank = torch.distributed.get_rank()
    generator = torch.Generator().manual_seed(3)
    gradient, shared = torch.randn(4, 5, generator=generator), torch.randn(3, generator=generator)
    part, other = nn.Parameter(torch.zeros(5)), nn.Parameter(torch.zeros(3))
    mark_shard(part, torch.distributed.group.WORLD)
    part.grad, other.grad = gradient[rank].clone(), shared.clone()
    expected = math.sqrt(float(gradient.double().square().sum() + shared.double().square().sum()))
    optimizer = FusedSGD([part, other], lr=1.0, max_grad_norm=0.5)
    optimizer.step()
    assert float(optimizer.last_grad_norm) == pytest.approx(expected, rel=1e-6)
    torch.testing.assert_close(part.detach(), -gradient[rank] * (0.5 / expected), rtol=1e-5, atol=1e-7)
    copy = pickle.loads(pickle.dumps(part))  # without its group, which no other program has
    assert torch.equal(copy, part)
    assert shard_group(copy) is None


def measures_over_the_right_ranks(rank: int) -> None:
    """Parameters on two meshes none of which holds the other; and models of which each is on some ranks only."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    generator = torch.Generator().manual_seed(9)
    gradients = [torch.randn(size, generator=generator) for size in (5, 3, 7, 7)]
    for own, places in (("both", [0, 1]), ("one", [2 + rank // 2])):
        meshes = [mesh["data"], mesh["tensor"]] if own == "both" else [mesh["tensor"]]
        parameters = []
        for place, its_mesh in zip(places, meshes, strict=True):
            gradient = gradients[place]
            parameters.append(nn.Parameter(distribute_tensor(torch.zeros_like(gradient), its_mesh, [Shard(0)])))
            parameters[-1].grad = distribute_tensor(gradient, its_mesh, [Shard(0)])
        optimizer = FusedSGD(parameters, lr=1.0, max_grad_norm=math.inf)
        optimizer.step()
        expected = torch.cat([gradients[place] for place in places]).norm()
        torch.testing.assert_close(optimizer.last_grad_norm, expected, rtol=1e-6, atol=0.0, msg=own)
        for place, parameter in zip(places, parameters, strict=True):
            assert torch.equal(parameter.full_tensor(), -gradients[place])


def follows_a_loss_scaler(rank: int) -> None:
    """torch's own, whose scale stays the same on all ranks."""
    layout = Layout("fsdp")
    optimizer = MAKERS["adam-clip"](layout.model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=1000)
    for step, culprit in enumerate((None, 2, None)):
        x, y = (rows.chunk(4)[rank] for rows in batch(step))
        scaler.scale((layout.model(x) - y).square().mean()).backward()
        if rank == culprit:
            layout.model.second.weight.grad.to_local().fill_(math.inf)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert (int(optimizer.applied_steps), int(optimizer.skipped_steps)) == (2, 1)
    assert scaler.get_scale() == 8.0


def sums_micro_batches_in_fp32(rank: int) -> None:
    model, alone = fsdp(net(torch.bfloat16)), net(torch.bfloat16)
    for one in (model, alone):
        accumulate_in_fp32(one.parameters())
    for step in range(3):
        x, y = batch(step, torch.bfloat16)  # the same on all, so that means over ranks are exact
        for one in (model, alone):
            (one(x) - y).square().mean().backward()
    for own, its in zip(model.parameters(), alone.parameters(), strict=True):
        assert own.main_grad.dtype == torch.float32
        torch.testing.assert_close(own.main_grad.full_tensor(), its.main_grad, rtol=1e-2, atol=1e-3)
    optimizer = FusedAdam(model.parameters(), lr=0.1, master_weights=True, max_grad_norm=1.0)
    optimizer.step()
    expected = torch.stack([p.main_grad.norm() for p in alone.parameters()]).norm()
    torch.testing.assert_close(optimizer.last_grad_norm, expected, rtol=1e-2, atol=0.0)
    optimizer.zero_grad()
    assert all(own.main_grad is None for own in model.parameters())


def takes_gradients_in_summands(rank: int) -> None:
    mesh = init_device_mesh("cpu", (4,))
    parameter = nn.Parameter(distribute_tensor(torch.ones(3), mesh, [Replicate()]))
    parameter.grad = DTensor.from_local(torch.tensor([1.0, 2.0, 3.0]) * (rank + 1), mesh, [Partial()])
    optimizer = FusedSGD([parameter], lr=0.1, max_grad_norm=math.inf)
    optimizer.step()
    total = torch.tensor([10.0, 20.0, 30.0])
    torch.testing.assert_close(parameter.full_tensor().detach(), 1.0 - 0.1 * total)
    torch.testing.assert_close(optimizer.last_grad_norm, total.norm())


def has_nothing_to_step_on_some_ranks(rank: int) -> None:
    """One element over four ranks, with every optimizer, and its state saved and loaded."""
    mesh = init_device_mesh("cpu", (4,))
    for name, make in MAKERS.items():
        parameter = nn.Parameter(distribute_tensor(torch.tensor([1.5]), mesh, [Shard(0)]))
        alone = nn.Parameter(torch.tensor([1.5]))
        ours, its = make([parameter]), make([alone])
        for value in (0.5, -2.0, 0.25):
            parameter.grad = distribute_tensor(torch.tensor([value]), mesh, [Shard(0)])
            alone.grad = torch.tensor([value])
            ours.step()
            its.step()
            ours.load_state_dict(ours.state_dict())
        assert parameter.to_local().numel() == (rank == 0)
        torch.testing.assert_close(parameter.full_tensor().detach(), alone.detach(), msg=name)
        for key, value in its.state[alone].items():
            if (name, key) == ("sgd", "step"):
                continue  # it says whether a buffer has seen a step, and a saved one has
            found = ours.state[parameter][key]
            torch.testing.assert_close(found.full_tensor() if isinstance(found, DTensor) else found, value, msg=key)


def says_what_does_not_fit() -> None:
    mesh = init_device_mesh("cpu", (4,))
    summands = nn.Parameter(DTensor.from_local(torch.ones(2), mesh, [Partial()]))
    with pytest.raises(
        UserError, match=r"FusedAdam: parameter 0 is laid out as .*Partial.*, in summands; redistribute"
    ):
        FusedAdam([summands])
    plain = nn.Parameter(torch.ones(4))
    other = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
    other.grad = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    optimizer = FusedAdam([plain, other], lr=0.1)
    plain.main_grad = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    with pytest.raises(UserError, match=r"of parameter 0 the gradient is a DTensor and the parameter is not"):
        optimizer.step()
    assert torch.equal(other.full_tensor(), torch.ones(4))


# States


def states(rank: int, folder: Path) -> list[float]:
    for store in (False, True):
        masters_and_moments_lie_as_their_parameters(rank, store)
    remainders_are_saved_as_masters(folder / "remainders")
    states_move_to_and_from_one_process()
    torch_loads_ours_and_ours_loads_torchs()
    return saves_with_dcp(folder)


def fsdp(model: nn.Module) -> nn.Module:
    fully_shard(model, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    return model


def masters_and_moments_lie_as_their_parameters(rank: int, store: bool) -> None:
    """And an update of parts is that of the whole, bit for bit, given the same gradients."""
    options: dict[str, Any] = {"lr": 0.01, "master_weights": True, "moment_dtype": torch.bfloat16}
    options["store_param_remainders"] = store
    alone, model = net(torch.bfloat16), fsdp(net(torch.bfloat16))
    ours, its = FusedAdam(model.parameters(), **options), FusedAdam(alone.parameters(), **options)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        for own, whole_one in zip(model.parameters(), alone.parameters(), strict=True):
            whole_one.grad = torch.randn(whole_one.shape, generator=generator).bfloat16()
            assert isinstance(own, DTensor)
            own.grad = distribute_tensor(whole_one.grad, own.device_mesh, own.placements)
        ours.step()
        its.step()
    for own, whole_one in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.equal(own.full_tensor(), whole_one)
        for key, dtype in (
            ("exp_avg", torch.bfloat16),
            ("exp_avg_sq", torch.bfloat16),
            ("master_remainder", torch.int16) if store else ("master_param", torch.float32),
        ):
            value = ours.state[own][key]
            assert (type(value), value.dtype, value.placements) == (DTensor, dtype, own.placements)
            gathered = lying_as(whole_one, value) if key == "master_remainder" else value.full_tensor()
            assert torch.equal(gathered, its.state[whole_one][key])


def remainders_are_saved_as_masters(folder: Path) -> None:
    """By torch.distributed.checkpoint, from one way of keeping masters into the other, models loaded after them."""

    def trained(model: nn.Module, optimizer: FusedAdam, first: int) -> None:
        for step in range(first, first + 2):
            generator = torch.Generator().manual_seed(step)
            for p in model.parameters():
                assert isinstance(p, DTensor)
                gradient = torch.randn(p.shape, generator=generator).bfloat16()
                p.grad = distribute_tensor(gradient, p.device_mesh, p.placements)
            optimizer.step()

    def masters(model: nn.Module, optimizer: FusedAdam) -> list[Tensor]:
        state = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))["state"]
        return [values["master_param"] for values in state.values()]

    model = fsdp(net(torch.bfloat16))
    optimizer = FusedAdam(model.parameters(), lr=0.01, master_weights=True, store_param_remainders=True)
    for turn, store in enumerate((False, True, False)):
        trained(model, optimizer, 2 * turn)
        kept = masters(model, optimizer)
        weights = {key: value.clone() for key, value in model.state_dict().items()}
        dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=folder / str(turn))
        model = fsdp(net(torch.bfloat16))
        optimizer = FusedAdam(model.parameters(), lr=0.5, master_weights=True, store_param_remainders=store)
        state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.load(state, checkpoint_id=folder / str(turn))
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
        model.load_state_dict(weights)
        found = masters(model, optimizer)
        assert {master.dtype for master in found} <= {torch.float32}
        assert all(map(torch.equal, found, kept))
    straight = fsdp(net(torch.bfloat16))
    other = FusedAdam(straight.parameters(), lr=0.01, master_weights=True)
    trained(model, optimizer, 6)
    for first in range(0, 8, 2):
        trained(straight, other, first)
    assert all(map(torch.equal, masters(model, optimizer), masters(straight, other)))


def states_move_to_and_from_one_process() -> None:
    for name in ("adam-clip", "lamb", "sgd", "novograd-max", "adagrad"):
        straight, alone, layout = Layout("alone"), Layout("alone"), Layout("fsdp")
        make = MAKERS[name]
        straight_losses = straight.train(make(straight.model.parameters()), 6)
        first = make(alone.model.parameters())
        alone.train(first, 2)
        layout.model.load_state_dict(
            {
                key: distribute_tensor(value, layout.model.get_parameter(key).device_mesh, [Shard(0)])
                for key, value in alone.model.state_dict().items()
            }
        )
        second = make(layout.model.parameters())
        second.load_state_dict(first.state_dict())
        assert int(second.applied_steps) == 2
        assert layout.train(second, 2, first=2) == pytest.approx(straight_losses[2:4], rel=1e-6), name
        alone.model.load_state_dict(whole(layout.model))
        first.load_state_dict(second.state_dict())
        assert not any(isinstance(value, DTensor) for state in first.state.values() for value in state.values())
        assert alone.train(first, 2, first=4) == pytest.approx(straight_losses[4:], rel=1e-6), name


def torch_loads_ours_and_ours_loads_torchs() -> None:
    straight = Layout("alone")
    losses = straight.train(torch.optim.AdamW(straight.model.parameters(), lr=0.01, weight_decay=0.1), 6)
    layout = Layout("fsdp")
    ours = MAKERS["adam"](layout.model.parameters())
    theirs = torch.optim.AdamW(layout.model.parameters(), lr=0.01, weight_decay=0.1)
    found = layout.train(ours, 2)
    theirs.load_state_dict(ours.state_dict())
    found += layout.train(theirs, 2, first=2)
    ours.load_state_dict(theirs.state_dict())
    found += layout.train(ours, 2, first=4)
    assert found == pytest.approx(losses, rel=1e-6)


#: How torch.distributed.checkpoint.state_dict may be asked for a state.
OPTIONS = [
    StateDictOptions(),
    StateDictOptions(flatten_optimizer_state_dict=True),
    StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
]


def saves_with_dcp(folder: Path) -> list[float]:
    """Save after three steps, in each way; returns the losses of the next three."""
    for name in ("adam-clip", "sgd"):
        layout = Layout("fsdp")
        optimizer = MAKERS[name](layout.model.parameters())
        layout.train(optimizer, 3)
        weights = {key: value.clone() for key, value in layout.model.state_dict().items()}
        state = get_optimizer_state_dict(layout.model, optimizer)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder / name)
        # What is given is the state itself, which the next step changes.
        saved = [deepcopy(get_optimizer_state_dict(layout.model, optimizer, options=options)) for options in OPTIONS]
        losses = layout.train(optimizer, 3, first=3)
        for state, options in zip(saved, OPTIONS, strict=True):
            other = Layout("fsdp")
            other.model.load_state_dict(weights)
            second = MAKERS[name](other.model.parameters())
            set_optimizer_state_dict(other.model, second, state, options=options)
            assert other.train(second, 3, first=3) == losses, (name, options)
    return losses


def continue_from_dcp(rank: int, kind: str, folder: Path) -> list[float]:
    layout = Layout(kind)
    optimizer = MAKERS["sgd"](layout.model.parameters())
    state = {"model": layout.model.state_dict(), "optimizer": get_optimizer_state_dict(layout.model, optimizer)}
    dcp.load(state, checkpoint_id=folder / "sgd", no_dist=kind == "alone")
    layout.model.load_state_dict(state["model"])
    set_optimizer_state_dict(layout.model, optimizer, state["optimizer"])
    return layout.train(optimizer, 3, first=3)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_states_are_saved_and_loaded_on_any_number_of_processes(tmp_path: Path) -> None:
    losses = run_ranks(states, 2, tmp_path, timeout=120)[0]
    (found, *_) = run_ranks(continue_from_dcp, 4, "fsdp-tp", tmp_path)
    assert found == pytest.approx(losses, rel=1e-6)
    assert continue_from_dcp(0, "alone", tmp_path) == pytest.approx(losses, rel=1e-6)
