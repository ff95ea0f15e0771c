"""Products that hand out queries, keys and values themselves: the same gradients, bit for bit, as from one output."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fusestep import fp8
from fusestep.fp8.casts import Casts
from fusestep.fp8.casts_tensorwise import TensorwiseCasts
from fusestep.fp8.recipes import Recipe
from fusestep.nn import LayerNormLinear, Linear, MultiheadAttention
from fusestep.nn.head_split import HeadSplit
from fusestep.ops import quantize_joined
from fusestep.ops.quantize_joined import Joined, JoinedPlan
from fusestep.ops.quantize_launch import TileLaunch

W, D = 24, 4

DELAYED, CURRENT = fp8.DelayedScaling(), fp8.Float8CurrentScaling()

#: Heads, groups, whether columns are interleaved.
SPLITS = [(6, 6, False), (6, 2, False), (6, 6, True), (6, 2, True), (6, 1, True)]


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[Joined]:
    """The gradients that come as three."""
    seen: list[Joined] = []

    def spy(self: Casts, dy: Joined, *rest: Any) -> Any:
        seen.append(dy)
        return self.gradient(dy.together(), *rest)

    for kind in (Casts, TensorwiseCasts):
        monkeypatch.setattr(kind, "joined_gradient", spy)
    return seen


def attention(heads: int, groups: int, interleaved: bool, **options: Any) -> MultiheadAttention:
    options = {"input_layernorm": True, "fuse_qkv_params": True, "attention_dropout": 0.0, **options}
    module = MultiheadAttention(
        W, heads, D, num_gqa_groups=groups, qkv_weight_interleaved=interleaved, dtype=torch.bfloat16, **options
    )
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return module


def watch(module: MultiheadAttention) -> None:
    """Have the product give one output, as to hooks that know of no other."""
    product_of(module).register_forward_hook(lambda *_: None)


def product_of(module: MultiheadAttention) -> Any:
    return module.layernorm_qkv if module.input_layernorm else module.qkv


def gradients(
    module: MultiheadAttention,
    x: Tensor,
    recipe: Recipe,
    run: Callable[..., Any] = lambda module, *args, **options: module(*args, **options),
    **options: Any,
) -> list[Tensor | None]:
    """What two training steps make: outputs, and gradients of everything in the second."""
    results: list[Tensor | None] = []
    for _ in range(2):
        x = x.detach().requires_grad_()
        module.zero_grad()
        with fp8.fp8_autocast(recipe=recipe):
            out = run(module, x, **options)
        outputs = out if isinstance(out, tuple) else (out,)
        weights = torch.linspace(-1, 2, outputs[0].numel(), dtype=x.dtype).view_as(outputs[0])
        sum((one * weights).sum() for one in outputs).backward()  # type: ignore[union-attr]
        results = [*outputs, x.grad, *[parameter.grad for parameter in module.parameters()]]
    return results


def assert_same(found: list[Tensor | None], wanted: list[Tensor | None]) -> None:
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert (one is None) is (other is None)
        if one is not None and other is not None:
            assert bool(one.isfinite().all())
            assert torch.equal(one, other)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("layout", ["bshd", "sbhd"])
def test_gradients_are_those_of_one_output(split: tuple[int, int, bool], layout: str, joined: list[Joined]) -> None:
    module = attention(*split, qkv_format=layout)
    other = copy.deepcopy(module)
    watch(other)
    x = torch.randn(5, 3, W, dtype=torch.bfloat16)
    residual = torch.randn_like(x)
    found = gradients(module, x, DELAYED, residual=residual)
    assert len(joined) == 2
    assert_same(found, gradients(other, x, DELAYED, residual=residual))
    assert len(joined) == 2
    with fp8.fp8_autocast(recipe=DELAYED):  # the amaxes of the last step enter the histories
        ours, theirs = module.layernorm_qkv.fp8_state, other.layernorm_qkv.fp8_state
    assert torch.equal(ours.slots, theirs.slots)
    assert torch.equal(ours.history, theirs.history)


@pytest.mark.parametrize(
    "options",
    [
        {"return_layernorm_output": True},
        {"qk_norm_type": "RMSNorm"},
        {"bias": False},
        {"input_layernorm": False},
        {"input_layernorm": False, "bias": False},
    ],
)
def test_every_recipe_and_other_outputs(options: dict[str, Any], recipe: Recipe, joined: list[Joined]) -> None:
    module = attention(6, 2, False, **options)
    other = copy.deepcopy(module)
    watch(other)
    x = torch.randn(3, 5, W, dtype=torch.bfloat16)
    assert_same(gradients(module, x, recipe), gradients(other, x, recipe))
    assert len(joined) == 2


@pytest.mark.parametrize("has_norm", [True, False])
def test_a_checkpointed_forward_hands_them_out_again(has_norm: bool, joined: list[Joined]) -> None:
    module = attention(6, 6, False, input_layernorm=has_norm)
    other = copy.deepcopy(module)
    x = torch.randn(3, 5, W, dtype=torch.bfloat16)

    def again(module: Any, x: Tensor) -> Any:
        return checkpoint(module, x, use_reentrant=False)

    assert_same(gradients(module, x, DELAYED, again), gradients(other, x, DELAYED))
    assert len(joined) == 4


@pytest.mark.parametrize("kind", [LayerNormLinear, Linear])
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("used", [(0,), (1,), (0, 2), (1, 2)])
def test_what_nothing_depends_on_has_no_gradient(
    kind: type[Linear], split: tuple[int, int, bool], used: tuple[int, ...]
) -> None:
    heads = HeadSplit(split[0], split[1], D, split[2])
    module = kind(W, (split[0] + 2 * split[1]) * D)
    x = torch.randn(7, W)
    weights = [torch.randn(7, size, D) for size in (split[0], split[1], split[1])]
    results = []
    for hands_out in (True, False):
        module.zero_grad()
        with fp8.fp8_autocast(recipe=CURRENT):
            parts = module(x, split=heads) if hands_out else heads.views(module(x))
        for part, wanted in zip(parts, weights, strict=True):
            assert part.shape == wanted.shape
        sum((parts[one] * weights[one]).sum() for one in used).backward()  # type: ignore[union-attr]
        results.append([*parts, *[parameter.grad for parameter in module.parameters()]])
    assert_same(*results)


@pytest.mark.parametrize("kind", [LayerNormLinear, Linear])
def test_outside_of_fp8_they_are_views_of_one_output(kind: type[Linear]) -> None:
    heads = HeadSplit(6, 2, D, False)
    module = kind(W, 10 * D)
    x = torch.randn(7, W)
    q, k, v = module(x, split=heads)
    assert torch.equal(torch.cat([part.flatten(1) for part in (q, k, v)], 1), module(x))
    (q.sum() + k.square().sum() + v.sum()).backward()
    assert module.weight.grad is not None


@pytest.mark.parametrize("kind", [LayerNormLinear, Linear])
def test_they_cannot_be_changed_in_place_nor_differentiated_twice(kind: type[Linear]) -> None:
    heads = HeadSplit(6, 6, D, False)
    module = kind(W, 18 * D)
    x = torch.randn(7, W, requires_grad=True)
    with fp8.fp8_autocast(recipe=CURRENT):
        q, k, v = module(x, split=heads)
    with pytest.raises(RuntimeError, match="view"):
        q.mul_(2)
    loss = (q * k * v).sum()
    (dx,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated twice"):
        dx.sum().backward()


@pytest.mark.parametrize("how", ["forward hook", "backward hook", "subclass"])
def test_who_knows_one_output_sees_one(how: str, joined: list[Joined]) -> None:
    module = attention(6, 6, False)
    seen: list[Any] = []
    product = product_of(module)
    if how == "forward hook":
        product.register_forward_hook(lambda _module, _args, output: seen.append(output))
    elif how == "backward hook":
        product.register_full_backward_hook(lambda _module, _inputs, outputs: seen.append(outputs[0]))
    else:
        product.__class__ = type("Other", (LayerNormLinear,), {"forward": lambda *args: _noted(seen, args)})
    gradients(module, torch.randn(3, 5, W, dtype=torch.bfloat16), DELAYED)
    assert not joined
    assert [one.shape for one in seen] == [(3, 5, 18 * D)] * 2


@pytest.fixture
def small_kernels(monkeypatch: pytest.MonkeyPatch, multiplies_fp8: None) -> list[JoinedPlan]:
    """The plans by which three gradients are cast, in tiles of 16 columns; torch's own product of FP8 matrices."""
    monkeypatch.setattr(quantize_joined, "quantize_launch", lambda *_: TileLaunch(16, 16, 4))
    monkeypatch.setattr(quantize_joined, "_plans", {})
    used: list[JoinedPlan] = []

    class Seen(JoinedPlan):
        __slots__ = ()

        def __call__(self, *args: Any) -> Any:
            used.append(self)
            return super().__call__(*args)

    monkeypatch.setattr(quantize_joined, "JoinedPlan", Seen)
    return used


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("has_norm", "recipe", "options"),
    [(True, DELAYED, {}), (False, DELAYED, {"bias": False}), (False, CURRENT, {"num_gqa_groups": 1})],
)
def test_kernels_read_them_where_attention_leaves_them(
    has_norm: bool, recipe: Recipe, options: dict[str, Any], small_kernels: list[JoinedPlan]
) -> None:
    module = MultiheadAttention(
        *(32, 2, 16, 0.0), input_layernorm=has_norm, fuse_qkv_params=True, qkv_weight_interleaved=False, **options
    ).to(torch.bfloat16)
    other = copy.deepcopy(module)
    watch(other)
    x = torch.randn(2, 8, 32, dtype=torch.bfloat16)
    found = gradients(module, x, recipe)
    assert len(small_kernels) == 2
    wanted = gradients(other, x, recipe)
    assert len(small_kernels) == 2
    for (name, _), one, exact in zip(
        [("y", None), ("x", None), *module.named_parameters()], found, wanted, strict=True
    ):
        assert one is not None
        assert exact is not None
        # Sums over rows have an order of their own in each launch.
        is_sum = name.endswith("bias")
        assert torch.allclose(one, exact, rtol=1e-2 if is_sum else 0.0, atol=1e-2 if is_sum else 0.0), name


def _noted(seen: list[Any], args: Any) -> Any:
    seen.append(LayerNormLinear.forward(*args))
    return seen[-1]
