"""In FP8 products add the copies of biases that FusedAdam wrote: no cast, the same bits, never stale."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fusestep
from fusestep import TrainStep
from fusestep.fp8 import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, fp8_autocast
from fusestep.fp8.held import part_of
from fusestep.fp8.plain_copies import PlainCopies
from fusestep.fp8.recipes import Recipe
from fusestep.nn import GroupedLinear, LayerNormLinear, LayerNormMLP, Linear, TransformerLayer
from fusestep.optim import FusedAdam, FusedSGD

BF16 = torch.bfloat16
RECIPES = [DelayedScaling(), Float8CurrentScaling(), Float8BlockScaling()]

MODULES: dict[str, Callable[..., Any]] = {
    "Linear": lambda **options: Linear(24, 41, **options),
    "Linear in parts": lambda **options: Linear(
        24, 40, parameters_split={"query": 24, "key": 7, "value": 9}, **options
    ),
    "LayerNormLinear": lambda **options: LayerNormLinear(24, 40, **options),
    "LayerNormLinear in parts": lambda **options: LayerNormLinear(24, 48, parameters_split=("a", "b", "c"), **options),
    "LayerNormMLP": lambda **options: LayerNormMLP(24, 33, activation="swiglu", **options),
    "GroupedLinear": lambda **options: GroupedLinear(2, 24, 19, **options),
    "TransformerLayer": lambda **options: TransformerLayer(
        24, 48, 4, fuse_qkv_params=False, hidden_dropout=0.0, attention_dropout=0.0, **options
    ),
}


@pytest.fixture(params=list(MODULES))
def make(request: pytest.FixtureRequest) -> Callable[..., Any]:
    return MODULES[request.param]


def biases_of(module: nn.Module) -> list[Tensor]:
    """The biases that products add."""
    return [p for name, p in module.named_parameters() if "bias" in name and "layer_norm" not in name]


def copies_of(bias: Tensor) -> PlainCopies | None:
    part = part_of(bias)
    return part.copies if part is not None and isinstance(part.copies, PlainCopies) else None


class Casts(TorchDispatchMode):
    """Counts products that are given a bias, and what is made of biases or their copies: by products, or beforehand."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        biases = biases_of(module)
        held = [copies.values for bias in biases if (copies := copies_of(bias)) is not None]
        self.addresses = {one.data_ptr() for one in (*biases, *held) if one is not None}
        self.products = self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        if name == "scaled_mm" and args[7] is not None:
            self.products += 1
            self.count += args[7].dtype is not args[6] or not args[7].is_contiguous()
        elif name in ("_to_copy", "copy_", "cat", "clone", "constant_pad_nd"):
            given = args[0] if isinstance(args[0], (list, tuple)) else args[:2]
            self.count += any(isinstance(one, Tensor) and one.data_ptr() in self.addresses for one in given)
        return func(*args, **(kwargs or {}))


def forward(module: nn.Module, x: Tensor, recipe: Recipe, dtype: torch.dtype = BF16, **options: Any) -> Tensor:
    splits = ([x.shape[0] - 3, 3],) if isinstance(module, GroupedLinear) else ()
    with torch.autocast(x.device.type, dtype), fp8_autocast(recipe=recipe):
        y: Tensor = module(x, *splits, **options)
    return y


def casts(module: nn.Module, x: Tensor, recipe: Recipe, dtype: torch.dtype = BF16, **options: Any) -> int:
    """How often a forward and its backward cast a bias."""
    with Casts(module) as seen:
        y = forward(module, x, recipe, dtype, **options)
        if y.requires_grad:
            y.float().square().mean().backward()
    assert seen.products > 0
    return seen.count


def step(module: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, recipe: Recipe, **options: Any) -> Tensor:
    y = forward(module, x, recipe, **options)
    y.float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return y.detach()


def with_biases(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for bias in biases_of(module):
            bias.copy_(torch.randn(bias.shape))
    return module


def data(module: nn.Module, device: torch.device) -> Tensor:
    shape = (11, 24) if isinstance(module, GroupedLinear) else (2, 5, 24)
    return torch.randn(shape, device=device)


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize("kind", [FusedAdam, FusedSGD])
def test_a_step_casts_no_bias_once_the_optimizer_has(
    make: Any, recipe: Recipe, kind: Callable[..., torch.optim.Optimizer], device: torch.device
) -> None:
    module = make(device=device)
    optimizer = kind(module.parameters(), lr=1e-3)
    x = data(module, device)
    afresh = casts(module, x, recipe)
    assert afresh > 0
    for _ in range(2):
        step(module, optimizer, x, recipe)
        assert casts(module, x, recipe) == 0
    assert casts(module.eval(), x, recipe) == afresh


def test_a_bias_in_the_dtype_of_the_output_or_of_another_optimizer_has_no_copy(device: torch.device) -> None:
    x = torch.randn(5, 24, device=device)
    half, other, frozen = (Linear(24, 40, device=device) for _ in range(3))
    half.bias.data = half.bias.detach().to(BF16)
    frozen.bias.requires_grad_(False)
    wanted = []
    for module, kind in ((half, torch.optim.AdamW), (other, torch.optim.AdamW), (frozen, FusedAdam)):
        optimizer = kind([p for p in module.parameters() if p.requires_grad], lr=1e-2)
        for _ in range(2):
            step(module, optimizer, x, RECIPES[1])
        wanted.append(casts(module, x, RECIPES[1]))
    assert wanted == [0, 1, 1]
    assert not hasattr(half.bias, "fusestep_copies")
    assert not hasattr(frozen.bias, "fusestep_copies")


def test_parameters_of_two_dtypes_get_gradients_of_their_own(device: torch.device) -> None:
    parts = Linear(24, 40, device=device, parameters_split={"query": 31, "value": 9})
    for part in ("query", "value"):
        getattr(parts, f"{part}_weight").data = getattr(parts, f"{part}_weight").detach().to(BF16)
    x = torch.randn(7, 24, device=device)
    y = forward(parts, x, RECIPES[1])
    dy = torch.randn(7, 40, device=device).to(BF16)
    y.backward(dy)
    sums = [parts.query_bias.grad, parts.value_bias.grad]
    assert [one.dtype for one in sums] == [torch.float32] * 2
    torch.testing.assert_close(torch.cat(sums), dy.double().sum(0).float(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("recipe", RECIPES[1:], ids=str)
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_outputs_and_gradients_are_those_of_a_cast(
    make: Any, recipe: Recipe, dtype: torch.dtype, device: torch.device
) -> None:
    module = with_biases(make(device=device))
    twin = copy.deepcopy(module)  # without an optimizer, so that it casts by itself
    optimizer = FusedAdam(module.parameters(), lr=1e-2)
    for number in range(3):
        x = data(module, device)
        found = []
        for each in (module, twin):
            given = x.clone().requires_grad_()
            y = forward(each, given, recipe, dtype)
            y.float().square().mean().backward()
            found.append([y.detach(), given.grad, *(p.grad for p in each.parameters())])
        for ours, theirs in zip(*found, strict=True):
            assert ours is not None
            assert theirs is not None
            assert ours.dtype is theirs.dtype
            if device.type == "cpu" or not isinstance(module, TransformerLayer):  # attention adds up in any order there
                assert torch.equal(ours, theirs)
            assert bool(ours.any())
        optimizer.step()
        assert number == 0 or casts(module, x, recipe, dtype) == 0
        optimizer.zero_grad()
        twin.zero_grad()
        twin.load_state_dict(module.state_dict())


def converted(tensor: Tensor) -> Tensor:
    """A conversion to other values whose memory is where the old was, as an allocator gives freed memory out again."""
    return tensor.data.mul_(2)


CHANGES: dict[str, Callable[[Linear, torch.optim.Optimizer], object]] = {
    "load_state_dict": lambda m, _: m.load_state_dict({k: torch.randn_like(v) for k, v in m.state_dict().items()}),
    "copy_": lambda m, _: m.bias.copy_(torch.randn_like(m.bias)),
    "averaging": lambda m, _: m.bias.lerp_(torch.ones_like(m.bias), 0.5),
    "data and refresh": lambda m, _: (m.bias.data.mul_(2), fusestep.refresh(m)),
    "other memory": lambda m, _: setattr(m.bias, "data", torch.randn_like(m.bias)),
    "another parameter": lambda m, _: setattr(m, "bias", nn.Parameter(torch.randn_like(m.bias))),
    "a conversion": lambda m, _: m._apply(converted),
    "half precision and back": lambda m, _: m.half().float(),
    "another optimizer": lambda m, _: torch.optim.SGD([m.bias], lr=0.3).step(),
    "another in lists": lambda m, _: torch.optim.AdamW([m.bias], lr=0.3, foreach=True).step(),
    "another in a kernel": lambda m, _: torch.optim.AdamW([m.bias], lr=0.3, fused=True).step(),
    "another step": lambda _, optimizer: optimizer.step(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_no_product_adds_what_the_bias_was(change: str, device: torch.device) -> None:
    layer = with_biases(Linear(24, 41, device=device))
    assert isinstance(layer, Linear)
    optimizer = FusedAdam(layer.parameters(), lr=1e-2, max_grad_norm=1.0)
    x, nothing = torch.randn(5, 24, device=device), torch.zeros(3, 24, device=device)

    def added() -> bool:
        """Whether y of zeros is the bias, rounded once."""
        return torch.equal(forward(layer, nothing, RECIPES[1]), layer.bias.detach().to(BF16).expand(3, 41))

    for _ in range(2):
        step(layer, optimizer, x, RECIPES[1])
    assert casts(layer, x, RECIPES[1]) == 0
    assert added()
    before = layer.bias.detach().clone()
    with torch.no_grad():
        CHANGES[change](layer, optimizer)
    assert not torch.equal(before, layer.bias)
    assert added()
    # A step that is skipped leaves right what it did not write.
    step(layer, optimizer, x * torch.inf, RECIPES[1])
    assert int(optimizer.skipped_steps) == 1
    assert added()


def test_a_bias_of_less_rows_is_added_by_a_copy_of_as_many(device: torch.device) -> None:
    layer = with_biases(Linear(24, 41, device=device))
    assert isinstance(layer, Linear)
    x = torch.randn(5, 24, device=device)
    for number, rows in enumerate((41, 35, 19)):
        for parameter in layer.parameters():
            kept = parameter.detach()[:rows]
            parameter.data = kept.clone() if number == 1 else kept
            parameter.grad = None
        if number == 2:
            fusestep.refresh(layer)  # the same memory
        optimizer = FusedAdam(layer.parameters(), lr=1e-2)
        for _ in range(2):
            y = forward(layer, x * 0, RECIPES[1]).detach()  # whose graph knows the rows that there were
            assert torch.equal(y, layer.bias.detach().to(BF16).expand(5, rows))
            step(layer, optimizer, x, RECIPES[1])
            assert casts(layer, x, RECIPES[1]) == 0


def test_a_bias_in_parts_of_which_one_is_written_is_put_together_anew(device: torch.device) -> None:
    layer = with_biases(MODULES["Linear in parts"](device=device))
    optimizer = FusedAdam(layer.parameters(), lr=1e-2)
    x = torch.randn(5, 24, device=device)
    step(layer, optimizer, x, RECIPES[1])
    assert casts(layer, x, RECIPES[1]) == 0
    for changed in ("key_bias", "value_bias"):
        if changed == "key_bias":
            with torch.no_grad():
                layer.key_bias.neg_()
        else:
            layer.value_bias = nn.Parameter(torch.randn(9, device=device))
        y = forward(layer, x * 0, RECIPES[1])
        wanted = torch.cat([layer.query_bias, layer.key_bias, layer.value_bias]).detach().to(BF16)
        assert torch.equal(y, wanted.expand(5, 40))
        if changed == "key_bias":
            optimizer.zero_grad()
            layer.key_bias.grad = torch.ones_like(layer.key_bias)
            optimizer.step()  # of one part alone: the others' copies are still of what they are
            assert casts(layer, x, RECIPES[1]) == 0


def test_copies_stay_where_they_are(device: torch.device) -> None:
    layer = with_biases(MODULES["Linear in parts"](device=device))
    optimizer = FusedAdam(layer.parameters(), lr=1e-2, max_grad_norm=1.0)
    x = torch.randn(5, 24, device=device)
    found = set()
    for number in range(5):
        step(layer, optimizer, x * torch.inf if number == 2 else x, RECIPES[1])
        copies = copies_of(layer.query_bias)
        assert copies is not None
        assert copies.values is not None
        found.add((id(copies), copies.values.data_ptr()))
        if number == 1:
            layer.load_state_dict({key: value * 2 for key, value in layer.state_dict().items()})
        if number == 3:
            layer.double().float()
    assert len(found) == 1


def test_a_run_that_is_resumed_equals_one_that_was_not_stopped(make: Any) -> None:
    first = with_biases(make())
    optimizer = FusedAdam(first.parameters(), lr=1e-2)
    x = data(first, torch.device("cpu"))
    for _ in range(2):
        step(first, optimizer, x, RECIPES[1])
    second = make()
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    resumed = FusedAdam(second.parameters(), lr=1e-2)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert casts(first, x, RECIPES[1]) == 0
    assert casts(second, x, RECIPES[1]) > 0
    for module in (first, second):
        module.zero_grad()
    for _ in range(2):
        assert torch.equal(step(first, optimizer, x, RECIPES[1]), step(second, resumed, x, RECIPES[1]))
        for ours, theirs in zip(first.parameters(), second.parameters(), strict=True):
            assert torch.equal(ours, theirs)


def test_a_layer_that_had_no_memory_has_copies_as_any_other(device: torch.device) -> None:
    layer = Linear(24, 41, device="meta")
    layer.to_empty(device=device)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    optimizer = FusedAdam(layer.parameters(), lr=1e-2)
    x = torch.randn(5, 24, device=device)
    for _ in range(2):
        y = forward(layer, x * 0, RECIPES[1])
        assert torch.equal(y, layer.bias.detach().to(BF16).expand(5, 41))
        step(layer, optimizer, x, RECIPES[1])
    assert casts(layer, x, RECIPES[1]) == 0


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # of torch's own making
def test_a_compiled_layer_adds_the_bias_as_it_is() -> None:
    layer = with_biases(Linear(24, 41))
    assert isinstance(layer, Linear)
    optimizer = FusedAdam(layer.parameters(), lr=1e-2)
    x = torch.randn(5, 24)
    step(layer, optimizer, x, RECIPES[1])
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for _ in range(3):
        y = forward(compiled, x * 0, RECIPES[1])
        assert torch.equal(y, layer.bias.detach().to(BF16).expand(5, 41))
        y.float().square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            layer.bias.neg_()


def test_a_sharded_bias_is_gathered_and_cast() -> None:
    layer = with_biases(Linear(24, 41))
    twin = copy.deepcopy(layer)
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        sharded: nn.Module = torch.distributed.fsdp.fully_shard(layer, mesh=mesh)
        optimizers = [FusedAdam(each.parameters(), lr=1e-2) for each in (sharded, twin)]
        for _ in range(3):
            x = torch.randn(5, 24)
            ys = [step(each, one, x, RECIPES[1]) for each, one in zip((sharded, twin), optimizers, strict=True)]
            assert torch.equal(*ys)
        assert torch.equal(sharded.bias.full_tensor(), twin.bias)
    finally:
        torch.distributed.destroy_process_group()


def test_a_graph_of_steps_knows_of_a_bias_that_its_copies_are_not_of(device: torch.device) -> None:
    layer = with_biases(Linear(24, 41, device=device))
    assert isinstance(layer, Linear)
    optimizer = FusedAdam(layer.parameters(), lr=1e-2, capturable=True)
    train: Any = TrainStep(
        layer, lambda m, x: m(x).float().square().mean(), optimizer, autocast=BF16, fp8_recipe=RECIPES[1], capture=False
    )
    for _ in range(2):
        train(torch.randn(5, 24, device=device))
    baked = train._baked
    baked.watch_slots()
    baked.rely_on(baked.current_copies(), baked.settled_slots(), is_first=True)
    assert baked.stale_copies() == []
    with torch.no_grad():
        layer.bias.neg_()
    (stale,) = baked.stale_copies()
    assert stale is layer.bias
    train(torch.randn(5, 24, device=device))
    assert baked.stale_copies() == []


@pytest.mark.gpu
def test_replays_add_and_write_copies_of_biases() -> None:
    device = torch.device("cuda", 0)
    model = with_biases(nn.Sequential(MODULES["Linear in parts"](device=device), LayerNormMLP(40, 33, device=device)))
    twin = copy.deepcopy(model)
    steps: list[Any] = []
    for each, capture in ((model, True), (twin, False)):
        optimizer = FusedAdam(each.parameters(), lr=1e-2, max_grad_norm=1.0, capturable=True)
        options: dict[str, Any] = {"autocast": BF16, "fp8_recipe": RECIPES[1], "capture": capture}
        steps.append(TrainStep(each, lambda m, x: m(x).float().square().mean(), optimizer, **options))
    for number in range(16):
        x = torch.randn(16, 24, device=device) * (torch.inf if number == 12 else 1.0)
        ours, theirs = (one(x) for one in steps)
        assert torch.equal(ours.isnan(), theirs.isnan())
        for left, right in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(left, right)
        if number == 10:
            with torch.no_grad():
                for bias in (*biases_of(model), *biases_of(twin)):
                    bias.neg_()
    assert steps[0].captures
    assert not steps[1].captures


def test_evaluation_casts_afresh_whatever_was_written_through_data(device: torch.device) -> None:
    layer = with_biases(Linear(24, 41, device=device))
    assert isinstance(layer, Linear)
    optimizer = FusedAdam(layer.parameters(), lr=1e-2)
    x = torch.randn(5, 24, device=device)
    step(layer, optimizer, x, RECIPES[1])
    kept = layer.bias.data.clone()
    layer.eval()
    layer.bias.data.fill_(3.0)  # an average, swapped in for an evaluation
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            assert torch.equal(forward(layer, x * 0, RECIPES[1]), torch.full((5, 41), 3.0, device=device, dtype=BF16))
    layer.bias.data.copy_(kept)
    layer.train()
    with torch.no_grad():
        assert casts(layer, x, RECIPES[1]) == 1
    assert casts(layer, x, RECIPES[1]) == 0
    assert casts(copy.deepcopy(layer), x, RECIPES[1]) == 1


def test_micro_batches_with_a_kept_weight_add_the_bias_as_it_is(device: torch.device) -> None:
    layer = with_biases(Linear(24, 41, device=device))
    assert isinstance(layer, Linear)
    optimizer = FusedAdam(layer.parameters(), lr=1e-2)
    x, recipe = torch.randn(5, 24, device=device), RECIPES[1]
    for _ in range(2):
        forward(layer, x, recipe, is_first_microbatch=True).sum().backward()
        step(layer, optimizer, x, recipe, is_first_microbatch=False)
    assert casts(layer, x, recipe, is_first_microbatch=True) == casts(layer, x, recipe, is_first_microbatch=False) == 0
    with torch.no_grad():
        layer.bias.neg_()
    y = forward(layer, x * 0, recipe, is_first_microbatch=False)
    assert torch.equal(y, layer.bias.detach().to(BF16).expand(5, 41))


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_is_computed_again_for_backward_adds_the_same(reentrant: bool, device: torch.device) -> None:
    modules = [with_biases(LayerNormMLP(24, 33, device=device))]
    modules.append(copy.deepcopy(modules[0]))
    optimizers = [FusedAdam(each.parameters(), lr=1e-2) for each in modules]
    for _ in range(3):
        x = torch.randn(5, 24, device=device, requires_grad=True)
        with torch.autocast(device.type, BF16), fp8_autocast(recipe=RECIPES[1]):
            y = torch.utils.checkpoint.checkpoint(modules[0], x, use_reentrant=reentrant)
            z = modules[1](x)
        (y.float().square().sum() + z.float().square().sum()).backward()
        assert torch.equal(y, z)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for ours, theirs in zip(*(each.parameters() for each in modules), strict=True):
            assert torch.equal(ours, theirs)
