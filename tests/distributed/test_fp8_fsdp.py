"""Weights that FSDP2 gathers in FP8: their bytes, how many go over the wire, training, saving."""

from __future__ import annotations

import copy
import io
import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import harness
from fusestep import fp8
from fusestep.distributed.storage import write_shards
from fusestep.errors import UserError
from fusestep.fp8.copies import CopyFormat, WeightCopies
from fusestep.fp8.gathered import GatheredWeight
from fusestep.fp8.recipes import Recipe
from fusestep.fp8.tensor import Float8Tensor
from fusestep.nn import LayerNormLinear, LayerNormMLP, Linear, TransformerLayer
from fusestep.optim import FusedAdam
from harness import run_ranks

RECIPES: dict[str, Recipe] = {
    "current": fp8.Float8CurrentScaling(),
    "powers": fp8.Float8CurrentScaling(use_power_2_scales=True),
    "delayed": fp8.DelayedScaling(amax_history_len=4, margin=1),
    "tiles": fp8.Float8BlockScaling(),
    "tiles_f32": fp8.Float8BlockScaling(use_f32_scales=True),
}

#: What FSDP2 gathers by, in torch 2.13 and before.
GATHER = "all_gather_single" if hasattr(torch.distributed, "all_gather_single") else "all_gather_into_tensor"

#: Rows, columns: padded or not, fewer rows than ranks, tiles over the borders of shards, a shard that is empty.
SHAPES = [(32, 48), (33, 50), (3, 17), (300, 130), (257, 16), (6, 40)]


def world() -> int:
    return torch.distributed.get_world_size()


def layers(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    made = nn.Sequential(*[Linear(columns, rows) for rows, columns in SHAPES])
    with torch.no_grad():
        for layer in made:
            layer.weight.mul_(torch.rand(()) * 10).view(-1)[0] = 3.0
    return made


def whole_cast(weight: Tensor, recipe: Recipe) -> list[Tensor]:
    """What a process by itself casts: bytes and inverse scales, both ways."""
    form = CopyFormat.of(recipe)
    cast = WeightCopies(form).cast(weight)
    assert cast.data is not None
    assert cast.transposed is not None
    return [cast.data.view(torch.uint8), cast.transposed.view(torch.uint8), cast.scale_inv, cast.transposed_scale_inv]


def gathered(layer: nn.Module) -> list[Tensor]:
    weight = layer.weight
    assert isinstance(weight, Float8Tensor)
    q = weight.quantized
    assert q.data is not None
    assert q.transposed is not None
    return [q.data.view(torch.uint8), q.transposed.view(torch.uint8), q.scale_inv, q.transposed_scale_inv]


@contextmanager
def counted(name: str) -> Iterator[list[int]]:
    """The bytes that each call of a collective brings, of its last argument that is a tensor."""
    sizes: list[int] = []
    real = getattr(torch.distributed, name)

    def counting(*args: Any, **options: Any) -> Any:
        tensors = [one for one in (*args, *options.values()) if isinstance(one, Tensor)]
        sizes.append(tensors[-1].numel() * tensors[-1].itemsize)
        return real(*args, **options)

    setattr(torch.distributed, name, counting)
    try:
        yield sizes
    finally:
        setattr(torch.distributed, name, real)


def check_bytes(rank: int) -> dict[str, Any]:
    """Every weight, at first and after a change on every rank, with what is not finite in one shard."""
    from torch.distributed.fsdp import fully_shard

    same: dict[str, bool] = {}
    for name, recipe in RECIPES.items():
        model, alone = layers(5), layers(5)
        if name == "tiles":  # weights that lived in FP8 before
            model = nn.Sequential(*[copy.deepcopy(layer) for layer in model])
        assert fp8.gather_in_fp8(model, recipe) == len(SHAPES)
        for layer in model:
            fully_shard(layer)
        for turn in range(3):
            for layer, other in zip(model, alone, strict=True):
                layer.unshard()
                wanted = whole_cast(other.weight.detach(), recipe)
                found = gathered(layer)
                same[f"{name} {tuple(other.weight.shape)} {turn}"] = all(
                    a.shape == b.shape and torch.equal(a, b) for a, b in zip(found, wanted, strict=True)
                )
                layer.reshard()
            with torch.no_grad():
                for layer, other in zip(model, alone, strict=True):
                    layer.weight.mul_(-3.5)
                    other.weight.mul_(-3.5)
                    if turn == 1:
                        bad = [math.inf, -math.inf, math.nan][rank % 3] if rank == 0 else 1.0
                        layer.weight.to_local()[:1] *= bad if rank == 0 else 1.0
                        other.weight[:1] *= [math.inf, -math.inf, math.nan][0]
    return {"wrong": [key for key, value in same.items() if not value]}


class Small(nn.Module):
    """Three kinds of modules with odd sizes, and a layer that FP8 leaves alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Linear(48, 33)
        self.second = LayerNormMLP(33, 50)
        self.third = LayerNormLinear(33, 24)
        self.head = nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        y: Tensor = self.head(self.third(self.second(x) + x))
        return y


def sharded(model: nn.Module, **options: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for child in model.children():
        fully_shard(child, **options)
    return fully_shard(model, **options)


def built(how: str, recipe: Recipe) -> nn.Module:
    """A model: plain, gathered in FP8, or with weights that live in FP8."""
    torch.manual_seed(11)
    with fp8.fp8_model_init(recipe=recipe) if how == "init" else nullcontext():
        model = Small()
    if how == "gathered":
        fp8.gather_in_fp8(model, recipe)
    return model


def batch(step: int, rank: int, ranks: int) -> tuple[Tensor, Tensor]:
    """This rank's rows of a batch of 192."""
    generator = torch.Generator().manual_seed(1000 + step)
    x, target = torch.randn(192, 48, generator=generator), torch.randn(192, 24, generator=generator)
    rows = slice(rank * 192 // ranks, (rank + 1) * 192 // ranks)
    return x[rows], target[rows]


def losses_of(rank: int, model: nn.Module, recipe: Any, steps: int, masters: bool, micro: int = 1) -> list[float]:
    """The mean losses over ranks of training steps with FusedAdam."""
    optimizer = FusedAdam(model.parameters(), lr=1e-3, master_weights=masters)
    losses = []
    for step in range(steps):
        total = torch.zeros(())
        with fp8.fp8_autocast(recipe=recipe):
            x, target = batch(step, rank, world())
            for x_part, target_part in zip(x.chunk(micro), target.chunk(micro), strict=True):
                loss = (model(x_part) - target_part).square().mean() / micro
                loss.backward()
                total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        torch.distributed.all_reduce(total)
        losses.append(total.item() / world())
    return losses


def check_losses(rank: int, ways: list[tuple[str, str, str]]) -> dict[str, list[float]]:
    """(engine, how the model is built, recipe) to losses over 20 steps."""
    found = {}
    for engine, how, name in ways:
        model = built(how, RECIPES[name])
        if engine == "ddp":
            model = nn.parallel.DistributedDataParallel(model)
        elif engine == "fsdp":
            model = sharded(model, reshard_after_forward=name != "tiles")
        found[f"{engine} {how} {name}"] = losses_of(rank, model, RECIPES[name], 20, how == "init")
    return found


def check_wire(rank: int) -> dict[str, Any]:
    """Bytes gathered in a step, in high precision and in FP8, and how often amaxes are reduced."""
    found = {}
    for how, dtype in itertools.product(("plain", "gathered", "init"), (None, torch.bfloat16)):
        from torch.distributed.fsdp import MixedPrecisionPolicy

        recipe = RECIPES["current"]
        model = sharded(built(how, recipe), mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
        losses_of(rank, model, recipe, 1, False)
        with counted(GATHER) as gathers, counted("all_reduce") as reduces:
            losses_of(rank, model, recipe, 1, False)
        found[how, dtype] = sum(gathers), reduces
        assert model.first.weight.to_local().dtype is torch.float32
    return found


def check_training(rank: int) -> dict[str, Any]:
    """Micro-batches, an evaluation between steps, masters of bf16 weights; bytes follow the optimizer."""
    recipe = RECIPES["current"]
    model = sharded(built("gathered", recipe))
    first = losses_of(rank, model, recipe, 3, False, micro=3)
    with torch.no_grad(), fp8.fp8_autocast(recipe=recipe):
        model.eval()
        y = model(batch(0, rank, world())[0])
        model.train()
    more = losses_of(rank, model, recipe, 2, False)
    whole = model.first.weight.full_tensor()
    model.first.unshard()
    held = gathered(model.first)
    same = [torch.equal(a, b) for a, b in zip(held, whole_cast(whole, recipe), strict=True)]
    model.first.reshard()
    kept = [one.untyped_storage().size() for one in held[:2]]
    kinds = {type(parameter.to_local()) for parameter in model.parameters()}
    bf16 = sharded(built("init", recipe).bfloat16())
    optimizer = FusedAdam(bf16.parameters(), lr=1e-3, master_weights=True)
    with fp8.fp8_autocast(recipe=recipe):
        bf16(batch(0, rank, world())[0].bfloat16()).square().mean().backward()
    optimizer.step()
    state = optimizer.state[bf16.first.weight]["master_param"]
    return {
        "finite": all(map(math.isfinite, [*first, *more])) and bool(y.isfinite().all()),
        "same": same,
        "kept": kept,
        "kinds": [kind.__name__ for kind in kinds],
        "master": (str(state.dtype), tuple(state.shape)),
    }


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    return dict(get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)))


def check_saving(rank: int, state: dict[str, Tensor] | None, folder: Path | None = None) -> dict[str, Any]:
    """The state after three steps, of a fresh model or of one that takes up a state of any number of ranks."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    recipe = RECIPES["delayed"]
    model = sharded(built("gathered", recipe))
    if state is not None:
        set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True, strict=False))
        for path, module in model.named_modules():
            own = {key.removeprefix(f"{path}."): value for key, value in state.items() if key.startswith(f"{path}.fp8")}
            if own:
                module._load_fp8(own)
    losses = losses_of(rank, model, recipe, 3, False)
    with fp8.fp8_autocast(recipe=recipe):
        pass
    plain = {type(value.to_local()).__name__ for value in model.state_dict().values() if hasattr(value, "to_local")}
    saved = copy.deepcopy(whole_state(model))
    if folder is not None:
        written = write_shards(folder, model.state_dict())
        if written is not None:
            read = written[0].whole({name: name for name in written[0].entries})
            assert {name: value.shape for name, value in read.items()} == {n: v.shape for n, v in saved.items()}
            assert all(torch.equal(read[name], value) for name, value in saved.items())
    return {"losses": losses, "state": saved, "plain": plain, "more": losses_of(rank, model, recipe, 3, False)}


def check_meta(rank: int) -> dict[str, Any]:
    """Built without memory, sharded, and only then given values."""
    recipe = RECIPES["tiles"]
    with torch.device("meta"):
        model: nn.Module = nn.Sequential(Linear(48, 33), Linear(33, 7))
    fp8.gather_in_fp8(model, recipe)
    model = sharded(model)
    model.to_empty(device=harness.device_type)
    for layer in model:
        layer.reset_parameters()
    with fp8.fp8_autocast(recipe=recipe):
        y = model(batch(0, rank, world())[0])
    y.square().mean().backward()
    return {
        "kind": type(model[0].weight.to_local()).__name__,
        "grad": bool(model[0].weight.grad.to_local().isfinite().all()),
    }


def check_two(rank: int, folder: Path) -> dict[str, Any]:
    return {
        "bytes": check_bytes(rank),
        "wire": check_wire(rank),
        "training": check_training(rank),
        "saving": check_saving(rank, None, folder),
        "meta": check_meta(rank),
    }


@pytest.fixture(scope="module")
def two(ranks_device: str, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(check_two, 2, tmp_path_factory.mktemp("shards"))


def test_gathered_bytes_are_those_of_a_cast_of_the_whole(two: list[dict[str, Any]]) -> None:
    assert [one["bytes"]["wrong"] for one in two] == [[], []]


def test_a_quarter_or_half_of_the_bytes_go_over_the_wire(two: list[dict[str, Any]]) -> None:
    wire = two[0]["wire"]
    in_fp8 = 33 * 48 + 50 * 33 + 33 * 50 + 24 * 33
    rest = 33 + 2 * 33 + 50 + 33 + 2 * 33 + 24 + 24 * 24 + 24
    both = 2  # forward and backward
    for dtype, width in ((None, 4), (torch.bfloat16, 2)):
        plain, _ = wire["plain", dtype]
        for how in ("gathered", "init"):
            less, _ = wire[how, dtype]
            # Each of two ranks pads its rows to the first's.
            assert less < plain
            assert abs((plain - less) - both * (width - 1) * in_fp8 / 2) < both * width * 4 * 50
            assert less < both * (in_fp8 + width * rest) / 2 * 1.1
    # One reduction for all weights together, where they know of each other, and the loss's.
    _, together = wire["gathered", None]
    assert together == [4 * 4, 4]


def test_training_goes_on_as_the_optimizer_writes(two: list[dict[str, Any]]) -> None:
    for one in two:
        assert one["training"]["finite"]
        assert all(one["training"]["same"])
        assert one["training"]["kept"] == [0, 0]  # FSDP2 has freed bytes and transpose
        assert set(one["training"]["kinds"]) == {"GatheredWeight", "Tensor"}
        assert one["training"]["master"] == ("torch.float32", (33, 48))


def test_what_is_saved_is_plain_and_goes_to_another_number_of_ranks(two: list[dict[str, Any]]) -> None:
    saved = two[0]["saving"]
    assert saved["plain"] == {"Tensor"}
    assert "first.fp8_slots" in saved["state"]
    for name in ("fp8_slots", "fp8_history", "fp8_rolls"):
        assert torch.equal(saved["state"][f"second.{name}"], two[1]["saving"]["state"][f"second.{name}"])
    assert run_ranks(check_saving, 1, saved["state"])[0]["losses"] == pytest.approx(saved["more"], rel=1e-3)
    lone = Small()
    lone.load_state_dict(saved["state"])
    assert torch.equal(lone.third.weight, saved["state"]["third.weight"])


def test_a_model_without_memory_is_sharded_and_filled(two: list[dict[str, Any]]) -> None:
    assert all(one["meta"] == {"kind": "GatheredWeight", "grad": True} for one in two)


ORDINARY = [
    ("ddp", "plain", "delayed"), ("ddp", "plain", "current"), ("ddp", "plain", "tiles"),
    ("fsdp", "plain", "delayed"), ("fsdp", "gathered", "delayed"), ("fsdp", "gathered", "current"),
    ("fsdp", "gathered", "tiles"), ("fsdp", "init", "current"),
]  # fmt: skip


def assert_losses(ranks: int, ways: list[tuple[str, str, str]]) -> None:
    alone = {("alone", "init" if how == "init" else "plain", name) for _, how, name in ways}
    single = run_ranks(check_losses, 1, sorted(alone))[0]
    several = run_ranks(check_losses, ranks, ways, timeout=600)
    for engine, how, name in ways:
        wanted = single[f"alone {'init' if how == 'init' else 'plain'} {name}"]
        for one in several:
            assert one[f"{engine} {how} {name}"] == pytest.approx(wanted, rel=1e-3), (engine, how, name)


@pytest.mark.usefixtures("ranks_device")
def test_losses_are_those_of_one_process() -> None:
    assert_losses(2, ORDINARY)


@pytest.mark.endurance
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_losses_of_every_way_are_those_of_one_process(ranks: int) -> None:
    hows = [("ddp", "plain"), ("fsdp", "plain"), ("fsdp", "gathered"), ("fsdp", "init")]
    assert_losses(ranks, [(*how, name) for how in hows for name in RECIPES])


@pytest.mark.endurance
def test_a_state_of_two_ranks_goes_to_four_and_back() -> None:
    first = run_ranks(check_saving, 2, None)[0]
    second = run_ranks(check_saving, 4, first["state"])[0]
    assert second["losses"] == pytest.approx(first["more"], rel=1e-3)
    third = run_ranks(check_saving, 2, second["state"])[0]
    assert third["losses"] == pytest.approx(second["more"], rel=1e-3)


def check_meshes(rank: int) -> dict[str, Any]:
    """Transformer layers over all ranks, with recomputation, replicated shards, and with tensor parallelism beside."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (4,))
    replicas = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    quarter, half = slice(2 * rank, 2 * rank + 2), slice(4 * (rank // 2), 4 * (rank // 2) + 4)
    ways: list[tuple[str, Any, Any, slice, bool]] = [
        ("alone", None, None, slice(None), False),
        ("flat", mesh, None, quarter, False),
        ("recomputed", mesh, None, quarter, True),
        ("replicas", replicas, None, quarter, False),
        ("tensor", grid["data"], grid["tensor"].get_group(), half, False),
    ]
    found = {}
    for name, over, tp_group, rows, recomputes in ways:
        torch.manual_seed(1)
        options: dict[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "tp_group": tp_group}
        model = nn.Sequential(*[TransformerLayer(64, 128, 4, **options) for _ in range(2)])
        if over is not None:
            fp8.gather_in_fp8(model, RECIPES["delayed"])
            for layer in model:
                fully_shard(layer, mesh=over)
            fully_shard(model, mesh=over)
        optimizer = FusedAdam(model.parameters(), lr=1e-3, max_grad_norm=1.0)
        losses = []
        for step in range(4):
            x = torch.randn(8, 16, 64, generator=torch.Generator().manual_seed(step))[rows]
            with fp8.fp8_autocast(recipe=RECIPES["delayed"]):
                y = x
                for layer in model:
                    y = checkpoint(layer, y, use_reentrant=False) if recomputes else layer(y)
                loss = (y - x.flip(-1)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total = loss.detach().clone()
            torch.distributed.all_reduce(total)
            losses.append(total.item() / 4)
        found[name] = losses
    return found


@pytest.mark.endurance
def test_meshes_of_four_ranks() -> None:
    for found in run_ranks(check_meshes, 4, timeout=300):
        assert found["recomputed"] == found["flat"]
        assert found["replicas"] == pytest.approx(found["flat"], rel=1e-6)
        for name in ("flat", "tensor"):
            assert found[name] == pytest.approx(found["alone"], rel=1e-3), name


@pytest.mark.endurance
def test_gathered_bytes_on_four_ranks() -> None:
    assert [one["wrong"] for one in run_ranks(check_bytes, 4)] == [[]] * 4


# In one process


def test_a_gathered_weight_is_a_tensor_of_its_values() -> None:
    model = Linear(5, 3)
    values = model.weight.detach().clone()
    assert fp8.gather_in_fp8(model) == 1
    assert fp8.gather_in_fp8(model) == 0
    weight = model.weight
    assert isinstance(weight, nn.Parameter)
    assert isinstance(weight, GatheredWeight)
    x = torch.randn(2, 5)
    assert torch.equal(model(x), x @ values.t() + model.bias)
    model(x).square().sum().backward()
    assert weight.grad is not None
    copied = copy.deepcopy(model)
    with torch.no_grad():
        assert weight.add_(1.0) is weight
        torch._foreach_mul_([weight], 2.0)
    assert torch.equal(weight.detach() + 0, (values + 1) * 2)
    assert torch.equal(copied.weight.detach() + 0, values)
    assert copied.weight.scaled is not weight.scaled
    buffer = io.BytesIO()
    torch.save(weight.detach(), buffer)
    buffer.seek(0)
    assert type(torch.load(buffer, weights_only=True)) is Tensor
    with fp8.fp8_autocast(recipe=fp8.Float8CurrentScaling()):
        y = model(x)
    assert y.isfinite().all()


class Odd(nn.Parameter):
    """Some other kind of parameter."""


def test_what_cannot_be_gathered_in_fp8_is_refused() -> None:
    with pytest.raises(UserError, match="recipe is MXFP8BlockScaling, whose transposed weights"):
        fp8.gather_in_fp8(Linear(5, 3), fp8.MXFP8BlockScaling())
    other = nn.Sequential(Linear(5, 3), Linear(3, 3))
    other[1]._parameters["weight"] = Odd(torch.zeros(3, 3))
    with pytest.raises(UserError, match=r"1\.weight is a Odd; call it before fully_shard"):
        fp8.gather_in_fp8(other)
    assert type(other[0].weight) is nn.Parameter


def test_what_others_have_marked_a_weight_with_stays() -> None:
    for recipe in (None, fp8.Float8CurrentScaling()):
        model = Linear(5, 3)
        model.weight.partition_dim = 1
        with fp8.fp8_model_init(enabled=recipe is not None, recipe=recipe):
            model.reset_parameters()
        assert isinstance(model.weight, Float8Tensor) == (recipe is not None)
        assert model.weight.partition_dim == 1
        fp8.gather_in_fp8(model)
        assert isinstance(model.weight, GatheredWeight)
        assert model.weight.partition_dim == 1
        assert not hasattr(model.weight, "form")


def test_preserved_values_are_what_shards_start_from() -> None:
    torch.manual_seed(0)
    with fp8.fp8_model_init(preserve_high_precision_init_val=True):
        model = Linear(5, 3)
    initial = model.weight.get_high_precision_init_val().clone()
    fp8.gather_in_fp8(model)
    assert torch.equal(model.weight.detach() + 0, initial)
