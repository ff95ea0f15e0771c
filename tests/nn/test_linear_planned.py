"""Linear layers whose casts and products are planned together compute what casts and products by themselves do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusestep import errors, fp8
from fusestep.fp8 import casts_blocks
from fusestep.fp8.casting import count_saturation
from fusestep.fp8.casts import Casts
from fusestep.fp8.casts_blocks import BlockCasts
from fusestep.fp8.casts_tensorwise import TensorwiseCasts
from fusestep.fp8.copies import copies_of
from fusestep.fp8.plain_copies import attach_plain, write_plain
from fusestep.nn import Linear
from fusestep.ops.block_product import multiply_blocks
from fusestep.ops.block_scaling_launch import ROW, TILE
from fusestep.ops.planned_block_product import PlannedBlockProduct
from fusestep.ops.planned_product import PlannedProduct

RECIPES = (fp8.DelayedScaling(amax_history_len=3), fp8.Float8CurrentScaling())
BLOCKS = (fp8.Float8BlockScaling(), fp8.Float8BlockScaling(use_f32_scales=True, fp8_format=fp8.Format.HYBRID))

#: Shapes of x, options of a layer from 48 to 32 features, and whether its products are planned.
CASES: list[tuple[tuple[int, ...], dict[str, Any], torch.dtype, bool]] = [
    ((32, 48), {}, torch.bfloat16, True),
    ((2, 16, 48), {"parameters_split": {"a": 20, "b": 12}}, torch.bfloat16, True),
    ((16, 48), {"bias": False}, torch.float32, True),
    ((2, 16, 48), {"in_by_out": True}, torch.bfloat16, True),
    ((16, 48), {}, torch.float32, False),  # cuBLASLt adds no bias to fp32
    ((17, 48), {}, torch.bfloat16, False),
]


def linear(inputs: int, outputs: int, in_by_out: bool = False, **options: Any) -> Linear:
    """A layer whose weight is (in, out), if asked for."""
    layer = Linear(inputs, outputs, **options)
    if in_by_out:
        layer._in_by_out = True
        layer.weight = nn.Parameter(layer.weight.detach().t().contiguous())
    return layer


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch, multiplies_fp8: None) -> None:
    """torch's own product of FP8 matrices, which a CPU has as well; that of blocks is emulated."""

    def plan(_: object, a: torch.dtype, b: torch.dtype, block: Any, out: torch.dtype, has_bias: bool) -> Any:
        def multiply(left: Tensor, left_scales: Tensor, right: Tensor, right_scales: Tensor, bias: Any) -> Tensor:
            assert (left.dtype, right.dtype, bias is not None) == (a, b, has_bias)
            assert (
                left.stride(1) == left_scales.stride(0) == right.stride(0) == right_scales.stride(0) == 1
            )  # cuBLASLt's
            scales = right_scales.t() if block == TILE else right_scales
            return multiply_blocks(left, left_scales, right.t(), scales, out, bias, ROW, block)

        return multiply

    monkeypatch.setattr(casts_blocks, "plan_native", plan)


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each forward that goes by a plan, whether the weight came cast already."""
    found: list[bool] = []

    def watch(kind: type[PlannedProduct] | type[PlannedBlockProduct]) -> None:
        forward = kind.forward
        monkeypatch.setattr(
            kind, "forward", lambda self, *given: (found.append(given[2] is not None), forward(self, *given))[1]
        )

    watch(PlannedProduct)
    watch(PlannedBlockProduct)
    return found


def unplanned(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (TensorwiseCasts, BlockCasts):
        monkeypatch.setattr(kind, "planned_product", lambda *_: None)


def equal(found: list[Tensor], wanted: list[Tensor]) -> None:
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.dtype is theirs.dtype
        assert torch.equal(ours, theirs)
        assert bool(ours.any())


def steps(
    layer: Linear, recipe: fp8.Recipe, shape: tuple[int, ...], dtype: torch.dtype, count: int = 2
) -> list[Tensor]:
    """Outputs and gradients of some steps, of random data that are the same every time."""
    device = next(layer.parameters()).device
    generator = torch.Generator().manual_seed(5)
    found: list[Tensor] = []
    for step in range(count):
        x = torch.randn(shape, generator=generator).mul_(3**step).to(device, dtype).requires_grad_()
        with fp8.fp8_autocast(recipe=recipe):
            y = layer(x)
        dy = torch.randn(y.shape, generator=generator).to(device, y.dtype)
        wanted = [x, *(parameter for parameter in layer.parameters() if parameter.requires_grad)]
        found += [y, *torch.autograd.grad(y, wanted, dy)]
    return found


@pytest.mark.interpreter
@pytest.mark.usefixtures("native")
@pytest.mark.parametrize(
    ("shape", "options", "dtype", "is_planned", "recipe"),
    [
        *((*case, recipe) for recipe in RECIPES for case in CASES),
        *((*case, recipe) for recipe, case in zip(BLOCKS, CASES[:2], strict=True)),
        *((*CASES[3], recipe) for recipe in BLOCKS),
    ],
)
def test_outputs_and_gradients_are_those_of_the_unplanned_layer(
    shape: tuple[int, ...],
    options: dict[str, Any],
    dtype: torch.dtype,
    is_planned: bool,
    recipe: fp8.Recipe,
    planned: list[bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer = linear(48, 32, dtype=dtype, **options)
    count = 2 if isinstance(recipe, fp8.DelayedScaling) else 1
    found = steps(layer, recipe, shape, dtype, count)
    assert planned == ([False] * count if is_planned else [])
    layer._reset_fp8()
    unplanned(monkeypatch)
    equal(found, steps(layer, recipe, shape, dtype, count))


@pytest.mark.interpreter
@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("recipe", [RECIPES[0], BLOCKS[0]])
@pytest.mark.parametrize("in_by_out", [False, True])
def test_weights_that_the_optimizer_cast_are_multiplied_as_they_are(
    recipe: fp8.Recipe, in_by_out: bool, planned: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = linear(16, 32, in_by_out, dtype=torch.bfloat16)
    x = torch.randn(16, 16, dtype=torch.bfloat16, requires_grad=True)

    def forward() -> Tensor:
        with fp8.fp8_autocast(recipe=recipe):
            return layer(x).detach()

    def run() -> list[Tensor]:
        """Of a layer that holds copies of twice its weight, until the weight is written."""
        layer._reset_fp8()
        forward()
        copies = copies_of(layer.weight)
        assert copies is not None
        copies.drop()
        copies.write(layer.weight.detach() * 2)
        copies.mark(layer.weight)
        found = steps(layer, recipe, (16, 16), torch.bfloat16, 1)
        with torch.no_grad():
            layer.weight.mul_(1)  # says that it was written
        return [*found, forward()]

    found = run()
    assert planned == [False, True, False]
    unplanned(monkeypatch)
    equal(found, run())


@pytest.mark.interpreter
@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("recipe", [RECIPES[0], BLOCKS[0]])
def test_a_bias_in_fp32_is_added_by_its_copy(
    recipe: fp8.Recipe, planned: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = Linear(16, 32)
    torch.nn.init.normal_(layer.bias)

    def run() -> list[Tensor]:
        """Of a layer that holds a copy of its bias, until the bias is written."""
        layer._reset_fp8()
        copies = attach_plain((layer.bias,), torch.bfloat16)
        write_plain([(copies, 0, layer.bias)])
        copies.mark(layer.bias)
        found = []
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                found += steps(layer, recipe, (16, 16), torch.float32, 1)
            with torch.no_grad():
                layer.bias.neg_()
        return found

    found = run()
    assert planned == [False]
    assert found[3].dtype is torch.float32  # the bias's gradient
    unplanned(monkeypatch)
    equal(found, run())


@pytest.mark.interpreter
@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("recipe", [RECIPES[0], BLOCKS[0]])
@pytest.mark.parametrize("in_by_out", [False, True])
def test_gradients_of_any_layout_are_cast(recipe: fp8.Recipe, in_by_out: bool) -> None:
    layer = linear(16, 32, in_by_out, dtype=torch.bfloat16)
    x = torch.randn(2, 8, 16, dtype=torch.bfloat16, requires_grad=True)
    leaves = [x, *layer.parameters()]
    with fp8.fp8_autocast(recipe=recipe):
        y = layer(x)
    for dy in (torch.randn(32, 8, 2).bfloat16().permute(2, 1, 0), torch.randn(32).bfloat16().expand(2, 8, 32)):
        found = []
        for one in (dy, dy.contiguous()):
            if layer.fp8_state is not None:
                layer.fp8_state.slots[2] = torch.tensor([0, 0, 57344, 0])
            found.append(list(torch.autograd.grad(y, leaves, one, retain_graph=True)))
        equal(*found)
    assert y.add_(1).grad_fn is not None  # which a view that a Function returns forbids


@pytest.mark.interpreter
@pytest.mark.usefixtures("native")
def test_a_plan_serves_no_other_call(planned: list[bool]) -> None:
    layer = Linear(16, 32, dtype=torch.bfloat16)
    x = torch.randn(16, 16, dtype=torch.bfloat16)
    recipe = RECIPES[1]

    def run(x: Tensor) -> Tensor:
        with fp8.fp8_autocast(recipe=recipe):
            return layer(x)

    before = run(x)
    assert torch.equal(run(x.t().contiguous().t()), before)
    with torch.no_grad(), torch.autocast("cpu", torch.float16):
        assert run(x).dtype is torch.float16
    for wrong in (x[:, :8], x.double(), x.to("meta")):
        with pytest.raises(errors.UserError):
            run(wrong)
    layer.weight.data = layer.weight.detach().float().t().contiguous().t()
    layer.bias.data = torch.zeros(64, dtype=torch.bfloat16)[::2]
    count = len(planned)
    after = run(x)
    assert len(planned) == count  # such a bias cuBLASLt does not read
    assert torch.allclose(after.float(), before.float(), rtol=0.02, atol=1e-3)
    layer.bias.data = torch.zeros(32, dtype=torch.bfloat16)
    with Watch() as watch:
        run(x)
    assert len(planned) == count
    assert "fusestep::quantize" in watch.seen


class Watch(torch.utils._python_dispatch.TorchDispatchMode):
    """Sees the names of operations."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(func.name().partition(".")[0])
        return func(*args, **(kwargs or {}))


@pytest.mark.interpreter
@pytest.mark.usefixtures("native")
def test_nothing_is_recorded_of_a_call_that_is_refused_or_empty() -> None:
    layer = Linear(16, 32, dtype=torch.bfloat16)
    with fp8.fp8_autocast(recipe=RECIPES[0]):
        with pytest.raises(errors.UserError, match="features"):
            layer(torch.ones(16, 32, dtype=torch.bfloat16))
        assert layer(torch.ones(0, 16, dtype=torch.bfloat16)).shape == (0, 32)
        assert layer.fp8_state is None
        layer(torch.ones(16, 16, dtype=torch.bfloat16))
    assert layer.fp8_state is not None


@pytest.mark.interpreter
@pytest.mark.usefixtures("native")
def test_counts_are_of_the_calls_that_were_to_be_counted(planned: list[bool]) -> None:
    layer = Linear(16, 32, dtype=torch.bfloat16)
    x = torch.randn(16, 16, dtype=torch.bfloat16, requires_grad=True)
    for counting in (False, True, False):
        count_saturation(counting)
        try:
            with fp8.fp8_autocast(recipe=RECIPES[0]):
                layer(x).sum().backward()
        finally:
            count_saturation(False)
    assert layer.fp8_state is not None
    assert layer.fp8_state.counts[:, 0].tolist() == [16 * 16, 32 * 16, 16 * 32]
    assert len(planned) == 3


@pytest.mark.interpreter
@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("frozen", ["x", "weight", "bias"])
@pytest.mark.parametrize("in_by_out", [False, True])
def test_what_needs_no_gradient_gets_none_and_is_not_kept(frozen: str, in_by_out: bool) -> None:
    layer = linear(32, 16, in_by_out, dtype=torch.bfloat16)
    x = torch.randn(16, 32, dtype=torch.bfloat16).requires_grad_(frozen != "x")
    if frozen != "x":
        getattr(layer, frozen).requires_grad_(False)
    kept: list[Tensor] = []
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor),
        fp8.fp8_autocast(recipe=RECIPES[1]),
    ):
        y = layer(x)
    y.float().square().sum().backward()
    gradients = {"x": x.grad, "weight": layer.weight.grad, "bias": layer.bias.grad}
    assert [name for name, gradient in gradients.items() if gradient is None] == [frozen]
    assert sum(tensor.dtype is torch.float8_e4m3fn for tensor in kept) == (2 if frozen == "bias" else 1)


@pytest.mark.interpreter
@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("recipe", [RECIPES[1], BLOCKS[0]])
@pytest.mark.parametrize("in_by_out", [False, True])
def test_what_is_kept_may_come_back_with_other_strides(
    recipe: fp8.Recipe, in_by_out: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = linear(32, 48, in_by_out, dtype=torch.bfloat16)
    multiply, strides = torch._scaled_mm, []
    monkeypatch.setattr(
        torch, "_scaled_mm", lambda a, b, *rest: (strides.append(b.stride(0)), multiply(a, b, *rest))[1]
    )
    x = torch.randn(144, 32, dtype=torch.bfloat16, requires_grad=True)  # two blocks of scales along the rows
    found = []
    for pack in (torch.Tensor.contiguous, lambda tensor: tensor):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), fp8.fp8_autocast(recipe=recipe):
            y = layer(x)
        found.append(torch.autograd.grad(y, [x, layer.weight], torch.ones_like(y)))
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)
    if recipe is RECIPES[1]:
        assert strides == [1] * 6  # which cuBLASLt asks for


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", [*RECIPES, *BLOCKS])
@pytest.mark.parametrize(("rows", "columns", "outputs"), [(64, 256, 512), (512, 768, 2304), (320, 1600, 4800)])
@pytest.mark.parametrize("has_copies", [False, True])
@pytest.mark.parametrize("in_by_out", [False, True])
def test_on_the_device_too(
    recipe: fp8.Recipe,
    rows: int,
    columns: int,
    outputs: int,
    has_copies: bool,
    in_by_out: bool,
    planned: list[bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not fp8.support()[0]:
        pytest.skip("this GPU does not multiply FP8")
    layer = linear(columns, outputs, in_by_out, dtype=torch.bfloat16, device="cuda")

    def run() -> list[Tensor]:
        layer._reset_fp8()
        found = steps(layer, recipe, (rows, columns), torch.bfloat16)
        copies = copies_of(layer.weight)
        assert copies is not None
        copies.drop()
        if has_copies:
            copies.write(layer.weight)
            copies.mark(layer.weight)
        return found + steps(layer, recipe, (rows, columns), torch.bfloat16)

    found = run()
    if not isinstance(recipe, fp8.Float8BlockScaling):  # which cuBLASLt may not multiply
        assert planned == [False, False, has_copies, has_copies]
    unplanned(monkeypatch)
    monkeypatch.setattr(TensorwiseCasts, "operands", Casts.operands)  # and each by itself
    equal(found, run())
