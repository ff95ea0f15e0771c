"""Under torch.autocast modules multiply by the copies that FusedAdam wrote: no cast, the same bits, never stale."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fusestep
from fusestep.fp8 import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, fp8_autocast
from fusestep.fp8.recipes import Recipe
from fusestep.nn import LayerNormLinear, LayerNormMLP, Linear, TransformerLayer
from fusestep.optim import FusedAdam

MODULES: dict[str, Callable[..., Any]] = {
    "Linear": lambda **options: Linear(24, 40, **options),
    "Linear without bias": lambda **options: Linear(24, 40, bias=False, **options),
    "Linear in parts": lambda **options: Linear(
        24, 40, parameters_split={"query": 24, "key": 7, "value": 9}, **options
    ),
    "Linear that returns its bias": lambda **options: Linear(24, 40, return_bias=True, **options),
    "LayerNormLinear in parts": lambda **options: LayerNormLinear(24, 48, parameters_split=("a", "b", "c"), **options),
    "LayerNormMLP": lambda **options: LayerNormMLP(24, 33, activation="swiglu", **options),
    "TransformerLayer": lambda **options: TransformerLayer(
        24, 48, 4, fuse_qkv_params=False, hidden_dropout=0.0, attention_dropout=0.0, **options
    ),
}


@pytest.fixture(params=list(MODULES))
def make(request: pytest.FixtureRequest) -> Callable[..., Any]:
    return MODULES[request.param]


class CopiesMade(TorchDispatchMode):
    """Notes what reads parameters, or what was made of them, other than products: casts, and copies put together."""

    OPS = ("_to_copy", "copy_", "cat", "clone", "quantize", "to")

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.addresses = {p.data_ptr() for p in module.parameters()}
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[-1]
        tensors = [
            one for a in args for one in (a if isinstance(a, (list, tuple)) else (a,)) if isinstance(one, Tensor)
        ]
        if any(word in name for word in self.OPS) and any(t.data_ptr() in self.addresses for t in tensors):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def output(result: Any) -> Tensor:
    found: Tensor = result[0] if isinstance(result, tuple) else result
    return found


def casts_in_forward(module: nn.Module, x: Tensor, dtype: torch.dtype | None, recipe: Recipe | None = None) -> int:
    autocast = torch.autocast(x.device.type, dtype, enabled=dtype is not None)
    with CopiesMade(module) as made, autocast, fp8_autocast(enabled=recipe is not None, recipe=recipe):
        output(module(x))
    return len(made.names)


def with_values(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape, device=parameter.device) * 0.1)
    return module


def step(module: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, dtype: torch.dtype) -> Tensor:
    with torch.autocast(x.device.type, dtype):
        y = output(module(x))
    y.float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return y.detach()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_training_forward_casts_no_parameter_once_the_optimizer_has(
    make: Any, dtype: torch.dtype, device: torch.device
) -> None:
    module = make(device=device)
    optimizer = FusedAdam(module.parameters(), lr=1e-3)
    x = torch.randn(2, 5, 24, device=device)
    assert casts_in_forward(module, x, dtype) > 0
    for _ in range(2):
        step(module, optimizer, x, dtype)
        # The bias that is returned instead of added is the parameter itself.
        assert casts_in_forward(module, x, dtype) == 0


@pytest.mark.parametrize("recipe", [DelayedScaling(), Float8CurrentScaling(), Float8BlockScaling()], ids=str)
def test_a_training_forward_in_fp8_puts_no_weight_together_once_the_optimizer_has(
    recipe: Recipe, device: torch.device
) -> None:
    module = Linear(24, 40, bias=False, device=device, parameters_split=("query", "key"))
    optimizer = FusedAdam(module.parameters(), lr=1e-3)
    x = torch.randn(5, 24, device=device)
    for number in range(3):
        assert casts_in_forward(module, x, None, recipe) == (number == 0)
        with fp8_autocast(recipe=recipe):
            module(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("recipe", [Float8CurrentScaling(), Float8BlockScaling()], ids=str)
def test_in_fp8_a_weight_in_parts_trains_as_the_whole_does(recipe: Recipe, device: torch.device) -> None:
    parts = Linear(24, 40, device=device, parameters_split={"query": 16, "key": 7, "value": 17})
    whole = Linear(24, 40, device=device)
    with torch.no_grad():
        for one in ("weight", "bias"):
            for which in ("query", "key", "value"):
                getattr(parts, f"{which}_{one}").normal_()
            getattr(whole, one).copy_(torch.cat([getattr(parts, f"{p}_{one}") for p in ("query", "key", "value")]))
    optimizers = [FusedAdam(module.parameters(), lr=0.01) for module in (parts, whole)]
    for _ in range(3):
        x = torch.randn(11, 24, device=device)
        outputs = []
        for module, optimizer in zip((parts, whole), optimizers, strict=True):
            with fp8_autocast(recipe=recipe):
                outputs.append(module(x))
            outputs[-1].square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(outputs[0], outputs[1])
    weights = torch.cat([parts.query_weight, parts.key_weight, parts.value_weight])
    assert torch.equal(weights, whole.weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_outputs_and_gradients_are_those_of_autocasts_own_casts(
    make: Any, dtype: torch.dtype, device: torch.device
) -> None:
    module = with_values(make(device=device))
    twin = copy.deepcopy(module)  # without an optimizer, so that it casts by itself
    optimizer = FusedAdam(module.parameters(), lr=1e-2)
    is_cpu = device.type == "cpu"
    is_exact = is_cpu or not isinstance(module, TransformerLayer)  # attention adds up in any order there
    close = {"rtol": 0.0, "atol": 0.0} if is_exact else {"rtol": 0.02, "atol": 1e-4}
    for _ in range(3):
        x = torch.randn(2, 5, 24, device=device)
        ys, dxs = [], []
        for each in (module, twin):
            given = x.clone().requires_grad_()
            with torch.autocast(device.type, dtype):
                y = output(each(given))
            y.float().square().mean().backward()
            ys.append(y.detach())
            dxs.append(given.grad)
        torch.testing.assert_close(*ys, **close)
        torch.testing.assert_close(*dxs, **close)
        for (name, ours), theirs in zip(module.named_parameters(), twin.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None), name
            if ours.grad is not None and theirs.grad is not None:
                assert ours.grad.dtype == torch.float32
                # Autocast rounds gradients to its dtype; those by way of copies are rounded to fp32 alone, of weights
                # on a GPU.
                is_rounded_alike = "layer_norm" in name or ("weight" in name and is_cpu)
                bound = 0.0 if is_exact and is_rounded_alike else 0.02
                assert float((ours.grad - theirs.grad).norm()) <= bound * float(theirs.grad.norm()), name
        optimizer.step()
        optimizer.zero_grad()
        twin.zero_grad()
        twin.load_state_dict(module.state_dict())


@pytest.mark.parametrize("parts", [None, {"query": 21, "key": 19}])
def test_gradients_by_way_of_copies_are_rounded_to_fp32_alone(
    parts: dict[str, int] | None, device: torch.device
) -> None:
    module = Linear(24, 40, device=device, parameters_split=parts)
    optimizer = FusedAdam(module.parameters(), lr=1e-2)
    x = torch.randn(3, 101, 24, device=device)
    step(module, optimizer, x, torch.bfloat16)
    # Of every sort: nobody may add into a tensor that is another's gradient, too.
    for accumulated in (1, 2):
        with torch.autocast(device.type, torch.bfloat16):
            y = module(x)
        dy = torch.randn(y.shape, device=device).to(y.dtype)
        if accumulated == 1:
            first = dy
        y.backward(dy)
    rows, operand = (first.double() + dy.double()).view(-1, 40), x.to(torch.bfloat16).double().view(-1, 24)
    weight, bias = (
        torch.cat([p.grad.double() for n, p in module.named_parameters() if n.endswith(what) and p.grad is not None])
        for what in ("weight", "bias")
    )
    exact = rows.t() @ operand
    bound = 1e-6 if device.type == "cuda" else 4e-3  # torch rounds a product in bf16 on a CPU
    assert float((weight - exact).norm()) <= bound * float(exact.norm())
    assert float((bias - rows.sum(0)).norm()) <= 1e-6 * float(rows.sum(0).norm())


@pytest.mark.parametrize("what", ["weight", "bias", "x"])
def test_what_needs_no_gradient_by_way_of_copies_gets_none(what: str, device: torch.device) -> None:
    module = Linear(24, 40, device=device)
    optimizer = FusedAdam(module.parameters(), lr=1e-2)
    x = torch.randn(5, 24, device=device)
    step(module, optimizer, x, torch.bfloat16)
    if what != "x":
        getattr(module, what).requires_grad_(False)
        x.requires_grad_()
    kept: list[Tensor] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda one: one)
    with hooks, torch.autocast(device.type, torch.bfloat16):
        y = module(x)
    assert len(kept) == (2 if what == "bias" else 1)
    assert all(one.dtype is torch.bfloat16 for one in kept)
    y.float().sum().backward()
    for name, one in (("weight", module.weight), ("bias", module.bias), ("x", x)):
        assert (one.grad is None) == (name == what), name


def test_a_forward_gradient_does_not_pass_by_way_of_copies(device: torch.device) -> None:
    module = Linear(24, 40, device=device)
    optimizer = FusedAdam(module.parameters(), lr=1e-2)
    x = torch.randn(5, 24, device=device)
    step(module, optimizer, x, torch.bfloat16)
    with torch.autograd.forward_ad.dual_level(), torch.autocast(device.type, torch.bfloat16):
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        tangent = torch.autograd.forward_ad.unpack_dual(module(dual)).tangent
    wanted = module.weight.sum(1).expand(5, 40)
    torch.testing.assert_close(tangent.float(), wanted, rtol=0.02, atol=0.02)


def step_of_torchs_kernel(module: nn.Module) -> None:
    """Which leaves the versions of parameters as they are."""
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.AdamW(module.parameters(), lr=0.3, fused=True).step()
    module.zero_grad()


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "load_state_dict": lambda m: m.load_state_dict({k: torch.randn_like(v) for k, v in m.state_dict().items()}),
    "copy_": lambda m: [p.copy_(torch.randn_like(p)) for p in m.parameters()],
    "averaging": lambda m: [p.lerp_(torch.ones_like(p), 0.5) for p in m.parameters()],
    "data and refresh": lambda m: ([p.data.mul_(2) for p in m.parameters()], fusestep.refresh(m)),
    "a conversion whose result lies where it lay": lambda m: m._apply(lambda p: p.data.mul_(2)),
    "another optimizer": step_of_torchs_kernel,
    "a skipped step": lambda m: None,
}


@pytest.mark.parametrize("change", CHANGES)
def test_no_forward_multiplies_by_what_the_parameters_were(make: Any, change: str, device: torch.device) -> None:
    module = with_values(make(device=device))
    optimizer = FusedAdam(module.parameters(), lr=1e-2, max_grad_norm=1.0)
    x = torch.randn(2, 5, 24, device=device)
    for _ in range(2):
        step(module, optimizer, x, torch.bfloat16)
    with torch.no_grad():
        CHANGES[change](module)
    if change == "a skipped step":
        step(module, optimizer, x * torch.inf, torch.bfloat16)
        assert int(optimizer.skipped_steps) == 1
    fresh = copy.deepcopy(module)
    with torch.autocast(device.type, torch.bfloat16):
        assert torch.equal(output(module(x)), output(fresh(x)))
    step(module, optimizer, x, torch.bfloat16)
    fresh = copy.deepcopy(module)
    with torch.autocast(device.type, torch.bfloat16):
        assert torch.equal(output(module(x)), output(fresh(x)))


def test_evaluation_casts_afresh_whatever_was_written_through_data(device: torch.device) -> None:
    module = Linear(24, 40, device=device)
    optimizer = FusedAdam(module.parameters(), lr=1e-2)
    x = torch.randn(5, 24, device=device)
    step(module, optimizer, x, torch.bfloat16)
    kept = module.weight.data.clone()
    module.eval()
    module.weight.data.zero_()  # averaged weights, swapped in for an evaluation
    for grad in (True, False):
        with torch.autocast(device.type, torch.bfloat16), torch.set_grad_enabled(grad):
            assert torch.equal(module(x), module.bias.to(torch.bfloat16).expand(5, 40))
    module.weight.data.copy_(kept)
    module.train()
    with torch.no_grad():
        assert casts_in_forward(module, x, torch.bfloat16) == 2
    assert casts_in_forward(module, x, torch.bfloat16) == 0


def test_copies_are_used_under_autocast_in_their_dtype_alone(device: torch.device) -> None:
    module = Linear(24, 40, device=device)
    optimizer = FusedAdam(module.parameters(), lr=1e-2)
    x = torch.randn(5, 24, device=device)
    step(module, optimizer, x, torch.bfloat16)
    exact = nn.functional.linear(x.double(), module.weight.double(), module.bias.double())
    torch.testing.assert_close(module(x).double(), exact, rtol=1e-5, atol=1e-5)
    with torch.autocast(device.type, torch.float16):
        y = module(x)
    assert y.dtype == torch.float16
    torch.testing.assert_close(y.double(), exact, rtol=3e-3, atol=3e-3)
    # It was asked for the other dtype now, and for FP8 then: whoever asked last is served.
    optimizer.step()
    for dtype in (torch.float16, torch.bfloat16):
        step(module, optimizer, x, dtype)
        assert casts_in_forward(module, x, dtype) == 0
    with torch.autocast(device.type, torch.bfloat16), fp8_autocast(recipe=Float8CurrentScaling()):
        module(x).float().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    step(module, optimizer, x, torch.bfloat16)
    assert casts_in_forward(module, x, torch.bfloat16) == 0


def test_what_is_frozen_or_computed_or_of_another_dtype_is_left_to_autocast(device: torch.device) -> None:
    x = torch.randn(5, 24, device=device)
    frozen, half, parametrized = (Linear(24, 40, device=device) for _ in range(3))
    frozen.weight.requires_grad_(False)
    half.to(torch.bfloat16)
    torch.nn.utils.parametrizations.weight_norm(parametrized)
    for module in (frozen, half, parametrized):
        trained = [p for p in module.parameters() if p.requires_grad]
        optimizer = FusedAdam(trained, lr=1e-2, master_weights=True)
        for _ in range(2):
            step(module, optimizer, x, torch.bfloat16)
        with torch.autocast(device.type, torch.bfloat16):
            y = module(x)
            wanted = nn.functional.linear(x, module.weight, module.bias)
        assert torch.equal(y, wanted)


def test_a_backward_after_the_next_step_is_refused(device: torch.device) -> None:
    module = Linear(24, 40, device=device)
    optimizer = FusedAdam(module.parameters(), lr=1e-2)
    x = torch.randn(5, 24, device=device, requires_grad=True)
    step(module, optimizer, x, torch.bfloat16)
    with torch.autocast(device.type, torch.bfloat16):
        loss = module(x).float().square().sum()
    module.weight.grad = torch.ones_like(module.weight)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_gradients_of_gradients_pass_through_copies(device: torch.device) -> None:
    module = Linear(3, 2, device=device)
    optimizer = FusedAdam(module.parameters(), lr=1e-2)
    x = torch.randn(4, 3, device=device, requires_grad=True)
    step(module, optimizer, x, torch.bfloat16)
    results = []
    for each in (module, copy.deepcopy(module)):
        with torch.autocast(device.type, torch.bfloat16):
            y = each(x).float().square().sum()
        (dx,) = torch.autograd.grad(y, x, create_graph=True)
        results.append(torch.autograd.grad(dx.square().sum(), each.weight)[0])
    # Autocast adds the two ways to the weight up in bf16.
    torch.testing.assert_close(*results, rtol=0.02, atol=1e-5)


def test_activation_checkpointing_uses_copies(device: torch.device) -> None:
    for reentrant in (True, False):
        module = LayerNormMLP(24, 33, device=device)
        twin = copy.deepcopy(module)
        optimizers = [FusedAdam(each.parameters(), lr=1e-2) for each in (module, twin)]
        for _ in range(3):
            x = torch.randn(5, 24, device=device, requires_grad=True)
            with torch.autocast(device.type, torch.bfloat16):
                y = torch.utils.checkpoint.checkpoint(module, x, use_reentrant=reentrant)
                z = twin(x)
            (y.float().square().sum() + z.float().square().sum()).backward()
            assert torch.equal(y, z)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert torch.equal(module.fc1_weight, twin.fc1_weight)


def test_calibration_records_the_amax_of_the_parameter_itself(device: torch.device) -> None:
    module = Linear(24, 40, device=device)
    optimizer = FusedAdam(module.parameters(), lr=1e-2)
    x = torch.randn(5, 24, device=device)
    for _ in range(2):
        step(module, optimizer, x, torch.bfloat16)
    with torch.autocast(device.type, torch.bfloat16), fp8_autocast(enabled=False, calibrating=True):
        module(x)
    assert module.fp8_state is not None
    assert float(module.fp8_state.amax[1]) == float(module.weight.detach().abs().max())


@pytest.mark.gpu
def test_a_graph_of_steps_reads_and_writes_copies() -> None:
    device = torch.device("cuda", 0)
    modules = [Linear(64, 96, device=device, parameters_split=("query", "key", "value"))]
    modules.append(copy.deepcopy(modules[0]))
    optimizers = [FusedAdam(m.parameters(), lr=1e-2, max_grad_norm=1.0, capturable=True) for m in modules]
    x = torch.randn(32, 64, device=device)

    def work(number: int) -> None:
        optimizers[number].zero_grad(set_to_none=False)
        with torch.autocast("cuda", torch.bfloat16):
            loss = modules[number](x).float().square().mean()
        loss.backward()
        optimizers[number].step()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            work(0)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work(0)
    for _ in range(3):
        work(1)
    for number in range(4):
        x.copy_(torch.randn(32, 64) * (torch.inf if number == 2 else 1.0))
        graph.replay()
        work(1)
        for ours, theirs in zip(modules[0].parameters(), modules[1].parameters(), strict=True):
            assert torch.equal(ours, theirs)
        with torch.autocast("cuda", torch.bfloat16):
            assert torch.equal(modules[0](x).isnan(), copy.deepcopy(modules[0])(x).isnan())
            if number != 2:
                assert torch.equal(modules[0](x), copy.deepcopy(modules[0])(x))
    assert int(optimizers[0].skipped_steps) == int(optimizers[1].skipped_steps) == 1
