"""Models that parallelize_module shares, and fully_shard besides, train as one process trains them."""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

import harness
from fusestep import explain, nn
from fusestep.distributed.plans import (
    ColwiseParallel,
    GPTParallel,
    MLPParallel,
    RowwiseParallel,
    SequenceParallel,
    plan,
)
from fusestep.errors import UserError
from fusestep.fp8 import DelayedScaling, Float8CurrentScaling, fp8_autocast
from fusestep.models import GPT, GPTConfig
from fusestep.optim import FusedAdam
from harness import near, placed, run_ranks

STEPS, BATCH, LENGTH = 20, 4, 16

SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "width": 32,
    "heads": 4,
    "layers": 1,
    "ffn_width": 48,
    "context": LENGTH,
}

#: Each rank scales its part of a tensor by itself under current scaling: powers of two change no digits by that.
RECIPES: dict[str | None, Any] = {
    None: None,
    "current": Float8CurrentScaling(use_power_2_scales=True),
    "delayed": DelayedScaling(amax_history_len=8),
}

#: Form, whether ranks hold slices of sequences, whether the head is tied, recipe.
Case = tuple[str, bool, bool, str | None]
Wanted = dict[Case, list[float]]


def allowed(recipe: str | None) -> float:
    """How far losses may be from those of one process."""
    return near(1e-6) if recipe is None else 1e-3


def error(found: Tensor, wanted: Tensor) -> float:
    found, wanted = found.detach().double(), wanted.detach().double()
    assert found.shape == wanted.shape
    return float((found - wanted).norm() / wanted.norm())


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    found = []
    for _ in range(STEPS):
        start = torch.randint(32, (BATCH, 1), generator=generator)
        stride = torch.randint(1, 5, (BATCH, 1), generator=generator)
        rows = (start + stride * torch.arange(LENGTH + 1)) % 32
        found.append((rows[:, :-1].contiguous(), rows[:, 1:].contiguous()))
    return found


def losses(model: Any, part: slice, data_group: Any, recipe: Any, group: Any = None) -> list[float]:
    """The mean loss of each of so many steps, of which this rank sees `part` of each batch."""
    # In FP8 small steps: rounding to 3 bits makes of any difference a larger one, in one process as in several.
    optimizer = FusedAdam(model.parameters(), lr=3e-3 if recipe is None else 3e-4, max_grad_norm=1.0)
    found = []
    for tokens, targets in batches():
        with fp8_autocast(enabled=recipe is not None, recipe=recipe, group=group):
            loss = model.loss(tokens[part], targets[part])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        if data_group is not None:
            dist.all_reduce(mean, group=data_group)
            mean /= dist.get_world_size(data_group)
        found.append(float(mean))
    return found


def gpt(form: str, tied: bool, **options: Any) -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(form=form, tied_head=tied, **SIZES, **options))  # type: ignore[arg-type]


def relative(found: list[float], wanted: list[float]) -> float:
    return max(abs(one - other) / other for one, other in zip(found, wanted, strict=True))


def over_one_mesh(rank: int, size: int, wanted: Wanted) -> None:
    mesh = init_device_mesh(harness.device_type, (size,), mesh_dim_names=("tensor",))
    for (form, by_sequence, tied, recipe), expected in wanted.items():
        shared = parallelize_module(gpt(form, tied), mesh, GPTParallel(sequence_parallel=by_sequence))
        assert all(isinstance(one, DTensor) for one in shared.parameters())
        found = losses(shared, slice(None), None, RECIPES[recipe], mesh.get_group())
        assert relative(found, expected) < allowed(recipe), (form, by_sequence, tied, recipe)
        # The same names and whole shapes, and logits of all symbols.
        whole = gpt(form, tied)
        state = {name: one.full_tensor() for name, one in shared.state_dict().items() if isinstance(one, DTensor)}
        assert {name: one.shape for name, one in state.items()} == {
            name: one.shape for name, one in whole.state_dict().items()
        }
        whole.load_state_dict(state)
        tokens = batches()[0][0]
        with torch.no_grad():
            assert error(shared(tokens), whole(tokens)) < near(1e-5)


def sharded(model: GPT, mesh: DeviceMesh, by_sequence: bool) -> GPT:
    parallelize_module(model, mesh["tensor"], plan(model, sequence_parallel=by_sequence))
    for block in model.blocks:
        fully_shard(block, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    register_fsdp_forward_method(model, "loss")
    return model


def over_two_meshes(rank: int, size: int, wanted: Wanted) -> None:
    mesh = init_device_mesh(harness.device_type, (2, size // 2), mesh_dim_names=("data", "tensor"))
    data = mesh["data"]
    part = slice(data.get_local_rank() * BATCH // 2, (data.get_local_rank() + 1) * BATCH // 2)
    for (form, by_sequence, tied, recipe), expected in wanted.items():
        shared = sharded(gpt(form, tied), mesh, by_sequence)
        assert all(one.device_mesh.ndim == 2 for one in shared.parameters())
        found = losses(shared, part, data.get_group(), RECIPES[recipe])
        assert relative(found, expected) < allowed(recipe), (form, by_sequence, tied, recipe)
        shared.reshard()  # type: ignore[operator]
        with pytest.raises(UserError, match="register_fsdp_forward_method"):
            shared._hidden(batches()[0][0])


def single_layers(rank: int, size: int) -> None:
    """torch's styles by their names on fusestep's modules beside torch's own, and what they do to gradients."""
    mesh = init_device_mesh(harness.device_type, (size,), mesh_dim_names=("tensor",))
    torch.manual_seed(6)
    model = torch.nn.Sequential(
        nn.FusedLayerNorm(16),
        nn.LayerNormLinear(16, 24, normalization="RMSNorm"),
        nn.Linear(24, 16),
        torch.nn.Linear(16, 24),
        torch.nn.Linear(24, 16),
        nn.LayerNormMLP(16, 24, activation="swiglu"),
        nn.RMSNorm(16),
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.3)
    for by_sequence in (False, True):
        exact, shared = copy.deepcopy(model).double(), copy.deepcopy(model)
        cut = Shard(1) if by_sequence else Replicate()
        styles: dict[str, Any] = {
            "1": ColwiseParallel(input_layouts=cut),
            "2": RowwiseParallel(output_layouts=cut),
            "3": ColwiseParallel(input_layouts=cut),
            "4": RowwiseParallel(output_layouts=cut),
            "5": MLPParallel(sequence_parallel=by_sequence),
        }
        if by_sequence:
            styles |= {"0": SequenceParallel(), "6": SequenceParallel()}
        parallelize_module(shared, mesh, styles)
        x = torch.randn(2, 8, 16)
        mine = (x.chunk(size, 1)[rank] if by_sequence else x).clone().requires_grad_()
        whole = x.double().requires_grad_()
        upstream = torch.randn(2, 8, 16)
        wanted, found = exact(whole), shared(mine)
        wanted.backward(upstream.double())
        found.backward(upstream.chunk(size, 1)[rank] if by_sequence else upstream)
        assert whole.grad is not None
        assert mine.grad is not None
        expected = [wanted, whole.grad]
        for one, other in zip((found, mine.grad), expected, strict=True):
            assert error(one, other.chunk(size, 1)[rank] if by_sequence else other) < near(2e-6)
        for name, parameter in shared.named_parameters():
            gradient = parameter.grad
            assert gradient is not None
            whole_gradient = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            assert error(whole_gradient, exact.get_parameter(name).grad) < near(2e-6), name
        assert type(shared[5]).__name__ == "LayerNormMLP"
        assert isinstance(shared[5], nn.LayerNormMLP)


def trades(rank: int, size: int) -> None:
    """Rows of q, k and v are traded once in a forward and once in a backward, and nothing else asks for them."""
    mesh = init_device_mesh(harness.device_type, (size,), mesh_dim_names=("tensor",))
    counted = []
    all_to_all = dist.all_to_all_single
    dist.all_to_all_single = lambda *given, **options: (counted.append(1), all_to_all(*given, **options))
    try:
        for options, expected in (({}, 0), ({"fuse_qkv_params": True, "qkv_weight_interleaved": False}, 2)):
            layer = nn.TransformerLayer(16, 32, 4, hidden_dropout=0.0, **options)
            parallelize_module(layer, mesh, plan(layer))
            for recipe in (None, Float8CurrentScaling()):
                with fp8_autocast(enabled=recipe is not None, recipe=recipe):
                    y = layer(torch.randn(2, 16, 16))
                assert len(counted) == expected  # weight and bias
                y.sum().backward()
                assert len(counted) == 2 * expected
                counted.clear()
            assert len(str(explain(layer))) > 0
            assert not counted
    finally:
        dist.all_to_all_single = all_to_all


def mistakes(rank: int, size: int) -> None:
    mesh = init_device_mesh(harness.device_type, (size,), mesh_dim_names=("tensor",))

    def told(module: torch.nn.Module, style: Any, words: str) -> None:
        with pytest.raises(UserError, match=words) as caught:
            parallelize_module(module, mesh, style)
        assert str(caught.value).count(". ") == 0

    told(gpt("seed", tied=False), GPTParallel(), "form 'seed'")
    told(GPT(GPTConfig(**{**SIZES, "vocab_size": 33})), GPTParallel(), "vocab_size 33 cannot be shared out")
    told(nn.LayerNormMLP(8, 8 * size + 1), MLPParallel(), "ffn_hidden_size")
    told(nn.LayerNormLinear(8, 8), RowwiseParallel(), "ColwiseParallel")
    told(nn.Linear(8, 8), MLPParallel(), "was given a Linear")
    told(nn.Linear(8, 8, parallel_mode="row", tp_group=dist.group.WORLD), RowwiseParallel(), "already")
    with pytest.raises(UserError, match="no ready plan"):
        plan(torch.nn.Linear(2, 2))
    shared = parallelize_module(gpt("fused", tied=True), mesh, GPTParallel(sequence_parallel=True))
    with pytest.raises(UserError, match=f"is {size + 1} long"):
        shared.loss(torch.zeros(2, size + 1, dtype=torch.int64), torch.zeros(2, size + 1, dtype=torch.int64))
    with pytest.raises(UserError, match="initial values"):
        shared.blocks[0].reset_parameters()
    # On the meta device nothing is sent, and values can be filled in later.
    with torch.device("meta"):
        layer = nn.TransformerLayer(16, 32, 4)
    parallelize_module(layer, mesh, plan(layer))
    assert all(one.device.type == "meta" for one in layer.parameters())


def by_themselves(rank: int, size: int, wanted: Wanted) -> None:
    for one in (single_layers, trades, mistakes):
        torch.manual_seed(1234)
        one(rank, size)
    over_one_mesh(rank, size, wanted)


def expected(cases: list[Case]) -> Wanted:
    """The losses of one process."""
    found: Wanted = {}
    for case in cases:
        form, _, tied, recipe = case
        with placed():
            found[case] = losses(gpt(form, tied), slice(None), None, RECIPES[recipe])
        assert found[case][-1] < found[case][0]
    return found


@pytest.mark.usefixtures("ranks_device")
def test_plans_train_as_one_process_does() -> None:
    cases: list[Case] = [("plain", False, True, None), ("fused", True, False, None), ("fused", True, False, "delayed")]
    run_ranks(by_themselves, 2, 2, expected(cases))


def test_plans_under_fully_shard_train_as_one_process_does() -> None:
    cases: list[Case] = [("plain", True, False, None), ("fused", False, False, None), ("fused", True, False, "current")]
    run_ranks(over_two_meshes, 4, 4, expected(cases))


@pytest.mark.endurance
@pytest.mark.parametrize("size", [2, 4])
def test_all_forms_train_as_one_process_does(size: int) -> None:
    matrix = expected(list(product(("plain", "fused"), (False, True), (False, True), (None,))))
    in_fp8 = expected(list(product(("fused",), (False, True), (False,), ("current", "delayed"))))
    run_ranks(by_themselves, size, size, matrix | in_fp8, timeout=600)
    untied = {case: of for case, of in (matrix | in_fp8).items() if not case[2] and case[3] != "delayed"}
    run_ranks(over_two_meshes, 4, 4, untied, timeout=600)
