"""GPT-2's linear layer, whose weight is (in, out), in FP8: what a linear layer of the transposed weight computes.

From the optimizer's copies, as that does; and the gradient lies as the weight.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusestep
from fusestep import convert
from fusestep.convert.linears import FP8Conv1D
from fusestep.fp8 import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    fp8_autocast,
)
from fusestep.fp8.copies import CopyFormat, copies_of
from fusestep.fp8.tensor import Float8Tensor
from fusestep.nn import Linear
from fusestep.nn.quantized_weights import QuantizedWeights
from fusestep.ops.planned_block_product import PlannedBlockProduct
from fusestep.ops.planned_product import PlannedProduct
from fusestep.optim import FusedAdam, accumulate_in_fp32

RECIPES: list[Any] = [
    DelayedScaling(amax_history_len=3),
    Float8CurrentScaling(),
    Float8BlockScaling(),
    Float8BlockScaling(use_f32_scales=True),
    MXFP8BlockScaling(),
]


class Conv1D(nn.Module):
    """GPT-2's."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf) * 0.1), nn.Parameter(torch.randn(nf))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], self.nf)


@torch.no_grad()
def distance(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def conv1d_and_linear(inputs: int, outputs: int, recipe: Any, **options: Any) -> tuple[Any, Linear]:
    """A converted Conv1D, and our linear layer of the same weights."""
    layer: Any = Conv1D(outputs, inputs).to(**options)
    reference = Linear(inputs, outputs, **options)
    reference.load_state_dict({"weight": layer.weight.t(), "bias": layer.bias})
    convert(layer, fp8=recipe)
    assert isinstance(layer, FP8Conv1D)
    return layer, reference


def run(modules: Sequence[Any], recipe: Any, x: Tensor, dy: Tensor, **options: Any) -> list[list[Any]]:
    """Of each of some layers in one region y, and the gradients of x, of the bias and of the weight."""
    inputs = [x.clone().requires_grad_() for _ in modules]
    with fp8_autocast(recipe=recipe):
        outputs = [module(given, **options) for module, given in zip(modules, inputs, strict=True)]
    for y in outputs:
        y.backward(dy)
    layers = [getattr(module, "_orig_mod", module) for module in modules]
    return [
        [y.detach(), given.grad, layer.bias.grad, layer.weight.grad]
        for y, given, layer in zip(outputs, inputs, layers, strict=True)
    ]


@pytest.fixture
def are_known(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each product forward, by a plan or without one, whether the weight came cast already; a conversion tries it,
    too."""
    found: list[bool] = []

    def watch(owner: Any, name: str, is_known: Any) -> None:
        method = getattr(owner, name)

        def watched(self: Any, *given: Any) -> Any:
            result = method(self, *given)
            found.append(is_known(given, result))
            return result

        monkeypatch.setattr(owner, name, watched)

    watch(QuantizedWeights, "_known_weight", lambda _, result: result is not None)
    for kind in (PlannedProduct, PlannedBlockProduct):
        watch(kind, "forward", lambda given, _: given[2] is not None)
    return found


def train_beside(
    recipe: Any, sizes: tuple[int, int], rows: int, dtype: torch.dtype, device: torch.device, tolerance: float
) -> None:
    """Three steps of FusedAdam: all is equal but the weight's gradient, whose sums may be formed in another order.

    Both layers are stepped by one and the same gradient, so that nothing grows.
    """
    modules = conv1d_and_linear(*sizes, recipe, device=device, dtype=dtype)
    layer, reference = modules
    has_masters = dtype is not torch.float32
    optimizers = [FusedAdam(module.parameters(), lr=1e-2, master_weights=has_masters) for module in modules]
    for _ in range(3):
        x = torch.randn(2, rows, sizes[0], device=device, dtype=dtype)
        dy = torch.randn(2, rows, sizes[1], device=device, dtype=dtype)
        (*ours, dweight), (*theirs, wanted) = run(modules, recipe, x, dy)
        for found, true in zip(ours, theirs, strict=True):
            assert torch.equal(found, true)
        assert dweight.stride() == layer.weight.stride()
        assert distance(dweight.t(), wanted) <= tolerance
        reference.weight.grad = dweight.t().contiguous()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(layer.weight.t(), reference.weight)
    copies, others = copies_of(layer.weight), copies_of(reference.weight)
    assert copies is not None
    assert others is not None
    assert copies.quantized is not None
    assert others.quantized is not None
    # Both ways round, since blocks of MXFP8 along columns are others than those along rows.
    assert torch.equal(copies.quantized.t().dequantize(), others.quantized.dequantize())
    only_transposed = [one._replace(data=None) for one in (copies.quantized.t(), others.quantized)]
    assert torch.equal(*[one.dequantize() for one in only_transposed])


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    ("sizes", "rows", "dtype"),
    [((40, 24), 7, torch.float32), ((32, 32), 8, torch.bfloat16), ((256, 512), 64, torch.bfloat16)],
)
def test_steps_are_those_of_a_linear_layer_and_the_optimizer_casts_the_weight(
    recipe: Any, sizes: tuple[int, int], rows: int, dtype: torch.dtype, device: torch.device, are_known: list[bool]
) -> None:
    """Sizes with padding and without: the latter planned, on a GPU that multiplies FP8. A square weight would multiply
    either way round."""
    train_beside(recipe, sizes, rows, dtype, device, 1e-6 if device.type == "cpu" else 2e-3)
    assert are_known[-6:] == [False, False, True, True, True, True]


@pytest.mark.interpreter
@pytest.mark.usefixtures("multiplies_fp8")
@pytest.mark.parametrize("recipe", RECIPES[:2])
@pytest.mark.parametrize("sizes", [(48, 32), (32, 32)])
def test_so_are_those_of_planned_products(recipe: Any, sizes: tuple[int, int], are_known: list[bool]) -> None:
    train_beside(recipe, sizes, 16, torch.bfloat16, torch.device("cpu"), 2e-3)
    assert are_known[-6:] == [False, False, True, True, True, True]


def takes_the_leaf(layer: Any, recipe: Any, name: str) -> None:
    """Autograd meets one Function of ours behind y and the parameter behind that, and takes the gradient as it is."""
    x = torch.randn(16, 32, device=layer.weight.device, dtype=torch.bfloat16, requires_grad=True)
    given: list[int] = []
    layer.weight.register_hook(lambda gradient: given.append(gradient.data_ptr()))
    with fp8_autocast(recipe=recipe):
        y = layer(x)
    assert y.grad_fn is not None
    assert name in type(y.grad_fn).__name__
    behind = [getattr(node, "variable", None) for node, _ in y.grad_fn.next_functions if node is not None]
    assert [id(leaf) for leaf in behind] == [id(leaf) for leaf in (x, layer.weight, layer.bias)]
    y.sum().backward()
    gradient = layer.weight.grad
    assert gradient.stride() == layer.weight.stride()
    assert given == [gradient.data_ptr()]  # not a copy


@pytest.mark.parametrize("recipe", RECIPES)
def test_autograd_takes_the_gradient_of_the_parameter_itself(recipe: Any, device: torch.device) -> None:
    layer, _ = conv1d_and_linear(32, 48, recipe, device=device, dtype=torch.bfloat16)
    takes_the_leaf(layer, recipe, "LinearBackward")


@pytest.mark.interpreter
@pytest.mark.usefixtures("multiplies_fp8")
@pytest.mark.parametrize("recipe", RECIPES[:2])
def test_so_it_does_of_a_planned_product(recipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The short way of a call, which asks a module for no weight."""
    layer, _ = conv1d_and_linear(32, 48, recipe, dtype=torch.bfloat16)
    monkeypatch.delattr(Linear, "_weight_and_bias")
    takes_the_leaf(layer, recipe, "_PlannedLinearBackward")


def train_without_gradients_of_the_input(recipe: Any, device: torch.device) -> None:
    """The product forward, and nothing else, reads the transpose of the weight as it lies."""
    layer, reference = modules = conv1d_and_linear(32, 48, recipe, device=device, dtype=torch.bfloat16)
    optimizers = [FusedAdam(module.parameters(), lr=0.0, master_weights=True) for module in modules]
    x = torch.randn(16, 32, device=device, dtype=torch.bfloat16)
    for _ in range(2):
        with fp8_autocast(recipe=recipe):
            y, wanted = layer(x), reference(x)
        assert torch.equal(y, wanted)
        for module, out, optimizer in zip(modules, (y, wanted), optimizers, strict=True):
            out.sum().backward()
            assert module.weight.grad is not None
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("recipe", RECIPES)
def test_copies_serve_also_where_the_input_needs_no_gradient(
    recipe: Any, device: torch.device, are_known: list[bool]
) -> None:
    train_without_gradients_of_the_input(recipe, device)
    assert are_known[-4:] == [False, False, True, True]


@pytest.mark.interpreter
@pytest.mark.usefixtures("multiplies_fp8")
def test_so_they_do_planned_products(are_known: list[bool]) -> None:
    train_without_gradients_of_the_input(Float8CurrentScaling(), torch.device("cpu"))
    assert are_known[-4:] == [False, False, True, True]


@pytest.mark.parametrize("recipe", RECIPES)
def test_copies_are_not_used_when_the_weight_was_written_nor_in_evaluation(
    recipe: Any, device: torch.device, are_known: list[bool]
) -> None:
    layer, reference = conv1d_and_linear(32, 48, recipe, device=device)
    optimizer = FusedAdam(layer.parameters(), lr=1e-2)
    x, dy = torch.randn(16, 32, device=device), torch.randn(16, 48, device=device)

    def is_known() -> bool:
        are_known.clear()
        with fp8_autocast(recipe=recipe):
            y = layer(x)
        (known,) = are_known
        # As it is now, or, where that is known, as it was before it was written through `.data`.
        reference.weight.data = layer.weight.detach().t().contiguous()
        reference.bias.data = layer.bias.detach().clone()
        with fp8_autocast(recipe=recipe):
            assert distance(y, reference(x)) < 0.1
        return known

    run([layer], recipe, x, dy)
    optimizer.step()
    assert is_known()
    with torch.no_grad():
        layer.weight.mul_(-2)
    assert not is_known()
    optimizer.step()
    assert is_known()
    layer.weight.data.mul_(-2)
    fusestep.refresh(layer)
    assert not is_known()
    optimizer.step()
    assert is_known()
    layer.load_state_dict({name: -tensor for name, tensor in layer.state_dict().items()})
    assert not is_known()
    optimizer.step()
    assert not (layer.eval(), is_known())[1]
    layer.train()
    for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert copies_of(copied.weight) is None
        with fp8_autocast(recipe=recipe):
            assert distance(copied(x), layer(x)) < 0.1


@pytest.mark.parametrize("recipe", RECIPES)
def test_micro_batches_share_a_cast_and_sum_their_gradients(
    recipe: Any, device: torch.device, are_known: list[bool]
) -> None:
    layer, reference = modules = conv1d_and_linear(32, 48, recipe, device=device, dtype=torch.bfloat16)
    handles = [accumulate_in_fp32([module.weight]) for module in modules]
    for first in (True, False, False):
        options = {"device": device, "dtype": torch.bfloat16}
        x, dy = torch.randn(16, 32, **options), torch.randn(16, 48, **options)
        (*ours, _), (*theirs, _) = run(modules, recipe, x, dy, is_first_microbatch=first)
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert are_known[-6:] == [False, False, True, True, True, True]
    assert layer.weight.main_grad.stride() == layer.weight.stride()
    assert distance(layer.weight.main_grad.t(), reference.weight.main_grad) < 2e-3
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("recipe", RECIPES)
def test_without_gradients_of_the_weight_there_are_none(recipe: Any, device: torch.device) -> None:
    layer, reference = modules = conv1d_and_linear(32, 48, recipe, device=device, dtype=torch.bfloat16)
    for module in modules:
        module.weight.requires_grad_(False)
    x, dy = torch.randn(16, 32, device=device).bfloat16(), torch.randn(16, 48, device=device).bfloat16()
    ours, theirs = run(modules, recipe, x, dy)
    assert ours.pop() is theirs.pop() is None
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    with torch.no_grad(), fp8_autocast(recipe=recipe):
        assert torch.equal(layer.eval()(x), reference.eval()(x))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_weight_that_lives_in_fp8_is_multiplied_as_it_is(recipe: Any, device: torch.device) -> None:
    modules = conv1d_and_linear(32, 48, recipe, device=device, dtype=torch.bfloat16)
    for module in modules:
        module.weight = nn.Parameter(Float8Tensor.of(module.weight, CopyFormat.of(recipe)))
    x, dy = torch.randn(16, 32, device=device).bfloat16(), torch.randn(16, 48, device=device).bfloat16()
    (*ours, dweight), (*theirs, wanted) = run(modules, recipe, x, dy)
    for found, true in zip(ours, theirs, strict=True):
        # Of MXFP8 the bytes are along the rows as they lie, and those along columns are cast from them.
        assert distance(found, true) <= (0.05 if isinstance(recipe, MXFP8BlockScaling) else 0)
    assert distance(dweight.t(), wanted) < 2e-3


def test_outside_of_a_region_and_undone_it_is_the_old_layer(device: torch.device) -> None:
    layer: Any = Conv1D(24, 40).to(device)
    x = torch.randn(7, 40, device=device)
    plain = layer(x)
    report = convert(layer, fp8=Float8CurrentScaling())
    assert isinstance(layer, FP8Conv1D)
    assert (layer.in_features, layer.out_features) == (40, 24)
    with fp8_autocast(enabled=False):
        assert torch.equal(layer(x), plain)
    with fp8_autocast(recipe=Float8CurrentScaling()):
        assert 1e-3 < distance(layer(x), plain) < 0.1
    assert copies_of(layer.weight) is not None
    report.undo()
    assert type(layer) is Conv1D
    assert not hasattr(layer, "in_features")
    assert copies_of(layer.weight) is None
    assert torch.equal(layer(x), plain)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("recipe", RECIPES[1:], ids=lambda recipe: type(recipe).__name__)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_it_gives_the_same(recipe: Any, backend: str) -> None:
    torch._dynamo.reset()
    layer, _ = conv1d_and_linear(32, 48, recipe)
    x, dy = torch.randn(16, 32), torch.randn(16, 48)
    (wanted,) = run([layer], recipe, x, dy)
    layer.zero_grad()
    (found,) = run([torch.compile(layer, backend=backend, fullgraph=True)], recipe, x, dy)
    assert all(distance(a, b) < 1e-5 for a, b in zip(found, wanted, strict=True))
