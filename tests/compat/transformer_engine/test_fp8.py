"""Recipes, regions and scaling state under Transformer Engine's names."""

from __future__ import annotations

import copy
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from fusestep import fp8
from fusestep.errors import UserError
from fusestep.fp8 import context


def trained(te: ModuleType, layer: Any, chosen: Any, inputs: list[Tensor], dy: Tensor | None = None) -> None:
    for x in inputs:
        with te.autocast(recipe=chosen):
            y = layer(x)
        y.backward(torch.ones_like(y) if dy is None else dy)


def peaked(amax: float, rows: int = 3, features: int = 5) -> Tensor:
    """A tensor whose largest magnitude is this, exactly."""
    x = torch.rand(rows, features) * amax * 0.5
    x[1, 2] = -amax
    return x


# Recipes


def test_recipes_print_as_transformer_engine_prints_them(recipe: ModuleType) -> None:
    shown = str(recipe.DelayedScaling(fp8_format=recipe.Format.HYBRID, amax_history_len=16))
    assert shown.startswith("recipe_type=DelayedScaling, margin=0, format=HYBRID, amax_history_len=16, ")
    assert recipe.Format.HYBRID.value.max_bwd == 57344
    assert recipe.Format.E4M3.value.max_fwd == 448


def test_predicates_and_casts_of_recipes(recipe: ModuleType) -> None:
    kinds = ["delayed", "mxfp8", "float8_current_scaling", "float8_block_scaling", "nvfp4"]
    classes = ["DelayedScaling", "MXFP8BlockScaling", "Float8CurrentScaling", "Float8BlockScaling", "NVFP4BlockScaling"]
    for name, kind in zip(classes, kinds, strict=True):
        made = getattr(recipe, name)()
        assert [getattr(made, one)() for one in kinds] == [one == kind for one in kinds]
    assert recipe.Float8CurrentScaling(use_power_2_scales=True).fp8_quant_fwd_weight.power_2_scale
    assert not recipe.Float8BlockScaling(use_f32_scales=True).fp8_quant_bwd_grad.power_2_scale
    with pytest.raises(AttributeError):
        recipe.DelayedScaling().fp8_quant_fwd_inp = recipe.QParams()


def test_each_recipe_becomes_that_of_fusestep_and_comes_back(recipe: ModuleType) -> None:
    pairs = [
        (recipe.DelayedScaling(2, recipe.Format.E4M3, 7, "most_recent"),
         fp8.DelayedScaling(margin=2, fp8_format=fp8.Format.E4M3, amax_history_len=7, amax_compute_algo="most_recent")),
        (recipe.Float8CurrentScaling(True), fp8.Float8CurrentScaling(use_power_2_scales=True)),
        (recipe.Float8BlockScaling(True), fp8.Float8BlockScaling(use_f32_scales=True)),
        (recipe.MXFP8BlockScaling(), fp8.MXFP8BlockScaling()),
    ]  # fmt: skip
    for theirs, ours in pairs:
        assert recipe.translated(theirs) == ours
        assert recipe.translated(theirs) is recipe.translated(copy.copy(theirs))  # modules compare by identity first
        assert recipe.restored(ours) == theirs


def test_spellings_of_1_x(recipe: ModuleType) -> None:
    made = recipe.DelayedScaling(margin=0, interval=1, fp8_format=recipe.Format.E4M3, amax_history_len=4)
    assert made == recipe.DelayedScaling(fp8_format=recipe.Format.E4M3, amax_history_len=4)
    recipe.DelayedScaling(override_linear_precision=(False, False, False))
    with pytest.raises(NotImplementedError, match="override_linear_precision"):
        recipe.DelayedScaling(override_linear_precision=(False, False, True))
    with pytest.raises(UserError, match=r"1\.x had interval in second place"):
        recipe.DelayedScaling(0, 1, recipe.Format.HYBRID)


@pytest.mark.parametrize("name", ["DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling"])
def test_unknown_keywords_and_bad_values_are_refused_at_once(recipe: ModuleType, name: str) -> None:
    with pytest.raises(TypeError, match="amax_histroy_len"):
        getattr(recipe, name)(amax_histroy_len=16)
    with pytest.raises(ValueError, match="E5M2"):
        getattr(recipe, name)(fp8_format=recipe.Format.E5M2)
    with pytest.raises(ValueError, match="amax_history_len is 0"):
        recipe.DelayedScaling(amax_history_len=0)


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("DelayedScaling", "fp8_dpa", True),
        ("Float8CurrentScaling", "fp8_mha", True),
        ("DelayedScaling", "scaling_factor_compute_algo", lambda *_: 1.0),
        ("MXFP8BlockScaling", "margin", 1),
        ("MXFP8BlockScaling", "enable_2d_quantization", True),
        ("Float8BlockScaling", "x_block_scaling_dim", 2),
        ("Float8CurrentScaling", "fp8_gemm_fprop", True),
        ("Float8BlockScaling", "fp8_gemm_wgrad", False),
        ("Float8CurrentScaling", "backward_override", "bf16"),
    ],
)
def test_fields_that_are_not_served_are_refused_on_use(
    te: ModuleType, recipe: ModuleType, name: str, field: str, value: Any
) -> None:
    """And nothing is switched on."""
    value = recipe.MMParams(value) if field.startswith("fp8_gemm") else value
    made = getattr(recipe, name)(**{field: value})
    with (
        pytest.raises(NotImplementedError, match=rf"{name}\({field}=.* \(it is not planned\)"),
        te.autocast(recipe=made),
    ):
        pass
    assert not te.fp8.FP8GlobalStateManager.is_fp8_enabled()
    with pytest.raises(NotImplementedError, match="NVFP4BlockScaling; use MXFP8"):
        te.fp8_autocast(fp8_recipe=recipe.NVFP4BlockScaling())
    with pytest.raises(UserError, match=r"fusestep\.fp8|transformer_engine.common.recipe"):
        te.autocast(recipe=fp8.DelayedScaling())


# Scaling state, right where upstream is known to be wrong


def test_recipes_that_differ_in_their_algorithm_alone_do_not_mix(te: ModuleType, recipe: ModuleType) -> None:
    one, two = te.Linear(5, 7, device="cpu"), te.Linear(5, 7, device="cpu")
    for amax in (8.0, 2.0):
        for layer, algorithm in ((one, "max"), (two, "most_recent")):
            options = {"amax_history_len": 4, "amax_compute_algo": algorithm, "fp8_format": recipe.Format.E4M3}
            with te.autocast(recipe=recipe.DelayedScaling(**options)):
                layer(peaked(amax)).sum().backward()
    assert float(one.fp8_meta["scaling_fwd"].scale[0]) == 56.0
    assert float(two.fp8_meta["scaling_fwd"].scale[0]) == 224.0


@pytest.mark.parametrize("algorithm", ["max", lambda history: history.amax(0)], ids=["max", "function"])
def test_modules_that_did_not_run_do_not_roll(te: ModuleType, recipe: ModuleType, algorithm: Any) -> None:
    used, unused = te.Linear(5, 7, device="cpu"), te.Linear(5, 7, device="cpu")
    chosen = recipe.DelayedScaling(amax_history_len=3, amax_compute_algo=algorithm)
    trained(te, used, chosen, [peaked(4.0)])
    trained(te, unused, chosen, [peaked(4.0)])
    before = unused.fp8_meta["scaling_fwd"].amax_history
    trained(te, used, chosen, [peaked(2.0)] * 4)
    assert torch.equal(unused.fp8_meta["scaling_fwd"].amax_history, before)
    assert float(before[-1, 0]) == 4.0
    assert float(used.fp8_meta["scaling_fwd"].amax_history.max(0).values[0]) == 2.0


def test_a_shorter_history_keeps_the_newest_amaxes(te: ModuleType, recipe: ModuleType) -> None:
    layer = te.Linear(5, 7, device="cpu")
    trained(te, layer, recipe.DelayedScaling(amax_history_len=6), [peaked(amax) for amax in (1.0, 2.0, 3.0, 4.0)])
    trained(te, layer, recipe.DelayedScaling(amax_history_len=3), [peaked(5.0)])
    assert layer.fp8_meta["scaling_fwd"].amax_history[:, 0].tolist() == [0, 4, 5]


def test_one_infinity_does_not_freeze_a_scale(te: ModuleType, recipe: ModuleType) -> None:
    layer = te.Linear(5, 7, device="cpu")
    chosen = recipe.DelayedScaling(amax_history_len=8, fp8_format=recipe.Format.E4M3)
    spoilt = peaked(4.0)
    spoilt[0, 0] = float("inf")
    trained(te, layer, chosen, [peaked(4.0), spoilt])
    assert float(layer.fp8_meta["scaling_fwd"].scale[0]) == 112.0
    trained(te, layer, chosen, [peaked(16.0)])
    assert float(layer.fp8_meta["scaling_fwd"].scale[0]) == 28.0
    assert bool(layer.fp8_meta["scaling_fwd"].amax_history.isfinite().all())


# Scaling state


def test_scales_and_histories_follow_the_worked_example(te: ModuleType, recipe: ModuleType) -> None:
    """E4M3, history of four, amaxes 4, 5, 3, 2, 1, 1: scale 112, four times 89.6, then 448 / 3."""
    layer = te.Linear(5, 7, device="cpu")
    assert "scaling_fwd" not in layer.fp8_meta
    chosen = recipe.DelayedScaling(fp8_format=recipe.Format.E4M3, amax_history_len=4)
    scales, histories = [], []
    for amax in (4.0, 5.0, 3.0, 2.0, 1.0, 1.0):
        trained(te, layer, chosen, [peaked(amax)])
        scaling = layer.fp8_meta["scaling_fwd"]
        scales.append(float(scaling.scale[0]))
        histories.append(scaling.amax_history[:, 0].tolist())
    assert scales == pytest.approx([112.0, 89.6, 89.6, 89.6, 89.6, 448 / 3])
    assert histories[0] == [0, 0, 0, 4]
    assert histories[3] == [0, 5, 3, 2]
    assert histories[-1] == [0, 2, 1, 1]
    assert torch.equal(scaling.scale_inv, 1 / scaling.scale)


def test_columns_of_each_kind_of_module(te: ModuleType, recipe: ModuleType) -> None:
    """[input, weight, output] of each product forward, [grad_output, grad_input] backward."""
    chosen = recipe.DelayedScaling(amax_history_len=3)
    linear = te.Linear(5, 7, device="cpu")
    x, dy = peaked(3.0), torch.randn(3, 7)
    trained(te, linear, chosen, [x], dy)
    meta = linear.fp8_meta
    weight = float(linear.weight.detach().abs().max())
    assert meta["scaling_fwd"].scale.tolist() == pytest.approx([448 / 3, 448 / weight, 1.0])
    assert meta["scaling_bwd"].scale.tolist() == pytest.approx([57344 / float(dy.abs().max()), 1.0])
    assert meta["scaling_fwd"].amax_history.shape == (3, 3)
    assert meta["scaling_fwd"].amax_history[-1].tolist() == pytest.approx([3.0, weight, 0.0])
    assert (meta["num_gemms"], meta["fp8_max_fwd"], meta["fp8_max_bwd"]) == (1, 448, 57344)
    assert meta["recipe"] == chosen

    mlp = te.LayerNormMLP(5, 9, activation="relu", device="cpu")
    torch.nn.init.normal_(mlp.fc1_weight)
    trained(te, mlp, chosen, [peaked(2.0)])
    n = torch.nn.functional.layer_norm(peaked(2.0), (5,))
    scaling = mlp.fp8_meta["scaling_fwd"].amax_history[-1]
    assert scaling.shape == (6,)
    assert float(scaling[1]) == pytest.approx(float(mlp.fc1_weight.detach().abs().max()))
    assert float(scaling[4]) == pytest.approx(float(mlp.fc2_weight.detach().abs().max()))
    assert (float(scaling[2]), float(scaling[5])) == (0.0, 0.0)
    assert float(scaling[0]) > 0.5 * float(n.abs().max())
    backward = mlp.fp8_meta["scaling_bwd"].amax_history[-1]
    assert backward.shape == (4,)
    assert float(backward[2]) == 1.0  # the gradient of fc2's output
    assert float(backward[0]) > 0
    assert (float(backward[1]), float(backward[3])) == (0.0, 0.0)


def test_inside_a_region_row_0_holds_what_was_seen_since_the_last_update(te: ModuleType, recipe: ModuleType) -> None:
    layer = te.Linear(5, 7, device="cpu")
    chosen = recipe.DelayedScaling(amax_history_len=4, fp8_format=recipe.Format.E4M3)
    trained(te, layer, chosen, [peaked(4.0)])
    with te.autocast(recipe=chosen):
        layer(peaked(8.0))
        inside = layer.fp8_meta["scaling_fwd"]
        assert float(inside.scale[0]) == 112.0  # scales stand still within
        assert inside.amax_history[:, 0].tolist() == [8, 0, 0, 4]
    after = layer.fp8_meta["scaling_fwd"]
    assert after.amax_history[:, 0].tolist() == [0, 0, 4, 8]
    assert float(after.scale[0]) == 56.0
    # Looking changes nothing.
    assert torch.equal(layer.fp8_meta["scaling_fwd"].scale, after.scale)


def test_a_function_of_the_history_gets_the_newest_amax_in_row_0(te: ModuleType, recipe: ModuleType) -> None:
    seen: list[list[float]] = []

    def algorithm(history: Tensor) -> Tensor:
        seen.append(history[:, 0].tolist())
        return history.amax(0)

    layer = te.Linear(5, 7, device="cpu")
    chosen = recipe.DelayedScaling(amax_history_len=3, amax_compute_algo=algorithm, fp8_format=recipe.Format.E4M3)
    trained(te, layer, chosen, [peaked(amax) for amax in (4.0, 5.0, 3.0, 2.0, 1.0)])
    assert seen == [[4, 0, 0], [5, 0, 4], [3, 4, 5], [2, 5, 3]]  # the last enters as the next region begins
    assert float(layer.fp8_meta["scaling_fwd"].scale[0]) == pytest.approx(448 / 3)


def test_evaluation_and_calibration(te: ModuleType, recipe: ModuleType) -> None:
    """Casts without gradients leave no trace in the next training step; calibrating records in every module."""
    chosen = recipe.DelayedScaling(amax_history_len=4)
    layer = te.Linear(5, 7, device="cpu")
    trained(te, layer, chosen, [peaked(4.0)])
    before = layer.fp8_meta["scaling_fwd"].scale
    with torch.no_grad(), te.autocast(recipe=chosen):
        layer(peaked(400.0))
    assert torch.equal(layer.fp8_meta["scaling_fwd"].scale, before)
    trained(te, layer, chosen, [peaked(4.0)])
    assert float(layer.fp8_meta["scaling_fwd"].amax_history.max(0).values[0]) == 4.0
    for fresh in (te.Linear(5, 5, device="cpu"), te.LayerNormLinear(5, 5, device="cpu"),
                  te.LayerNormMLP(5, 5, device="cpu"), te.GroupedLinear(1, 5, 5, device="cpu")):  # fmt: skip
        splits = ([3],) if isinstance(fresh, te.GroupedLinear) else ()
        with te.autocast(enabled=False, calibrating=True, recipe=chosen):
            fresh(peaked(2.0), *splits)
        amaxes = fresh.fp8_meta["scaling_fwd"].amax_history[-1]
        assert bool((amaxes[:2] > 0).all()), fresh


def test_a_region_inside_a_disabled_one_and_one_that_fails(te: ModuleType, recipe: ModuleType) -> None:
    layer = te.Linear(5, 7, device="cpu")
    chosen = recipe.DelayedScaling(amax_history_len=4)
    for amax in (4.0, 8.0):
        with te.autocast(enabled=False), te.autocast(recipe=chosen):
            y = layer(peaked(amax))
        y.sum().backward()
    assert float(layer.fp8_meta["scaling_fwd"].scale[0]) == 56.0

    @te.autocast(recipe=chosen)
    def failing() -> None:
        layer(peaked(16.0))
        raise KeyError

    with pytest.raises(KeyError):
        failing()
    assert not te.fp8.FP8GlobalStateManager.is_fp8_enabled()
    assert float(layer.fp8_meta["scaling_fwd"].scale[0]) == 28.0
    region = te.autocast(recipe=chosen)
    for _ in range(2):  # usable again, and as a decorator
        with region:
            assert te.fp8.FP8GlobalStateManager.is_fp8_enabled()
    assert te.autocast(recipe=chosen)(te.fp8.FP8GlobalStateManager.is_fp8_enabled)()


def test_power_of_two_scales_and_f32_scales_reach_the_modules(
    te: ModuleType, recipe: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = te.Linear(37, 19, device="cpu")
    x = torch.randn(11, 37)
    for name, field in (("Float8CurrentScaling", "use_power_2_scales"), ("Float8BlockScaling", "use_f32_scales")):
        results = []
        for value in (False, True):
            with te.autocast(recipe=getattr(recipe, name)(**{field: value})):
                results.append(layer(x))
        assert not torch.equal(*results), name
        for result in results:
            torch.testing.assert_close(result, layer(x), rtol=0, atol=0.05)


def test_copies_train_on_their_own(te: ModuleType, recipe: ModuleType) -> None:
    chosen = recipe.DelayedScaling(amax_history_len=4)
    layer = te.LayerNormLinear(5, 7, device="cpu")
    trained(te, layer, chosen, [peaked(4.0)])
    twin = copy.deepcopy(layer)
    torch.nn.init.constant_(twin.layer_norm_weight, 9.0)
    before = layer.fp8_meta["scaling_fwd"].scale
    trained(te, twin, chosen, [peaked(4.0)] * 2)
    assert float(twin.fp8_meta["scaling_fwd"].scale[0]) < float(before[0]) / 4
    assert torch.equal(layer.fp8_meta["scaling_fwd"].scale, before)


def test_weights_that_live_in_fp8_with_any_layout_of_parameters(te: ModuleType, recipe: ModuleType) -> None:
    with te.fp8_model_init(enabled=True, recipe=recipe.DelayedScaling(), preserve_high_precision_init_val=True):
        assert te.fp8.FP8GlobalStateManager.with_fp8_parameters()
        layer = te.TransformerLayer(16, 24, 2, hidden_dropout=0.0, attention_dropout=0.0, device="cpu")
    assert not te.fp8.FP8GlobalStateManager.with_fp8_parameters()
    weight = layer.self_attention.layernorm_qkv.query_weight
    assert isinstance(weight, te.Float8Tensor)
    assert isinstance(weight, te.QuantizedTensor)
    assert not isinstance(layer.self_attention.layernorm_qkv.query_bias, te.Float8Tensor)
    exact = weight.get_high_precision_init_val()
    torch.testing.assert_close(weight.dequantize(), exact, rtol=0.07, atol=1e-4)
    optimizer = te.optimizers.FusedAdam(layer.parameters(), lr=0.05, master_weights=True)
    x = torch.randn(5, 2, 16)
    losses = []
    for _ in range(4):
        with te.autocast(recipe=recipe.DelayedScaling(amax_history_len=4)):
            loss = layer(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    chosen = recipe.DelayedScaling(amax_history_len=4)
    with te.quantized_model_init(recipe=recipe.DelayedScaling()):
        other = te.TransformerLayer(16, 24, 2, hidden_dropout=0.0, attention_dropout=0.0, device="cpu")
    other.load_state_dict(layer.state_dict())
    with torch.no_grad(), te.autocast(recipe=chosen):
        assert torch.equal(other(x), layer(x))
    with te.quantized_model_init(False):
        assert not isinstance(te.Linear(4, 4, device="cpu").weight, te.Float8Tensor)


def test_the_state_of_the_region(te: ModuleType, recipe: ModuleType) -> None:
    manager = te.fp8.FP8GlobalStateManager
    chosen = recipe.Float8CurrentScaling(use_power_2_scales=True)
    assert (manager.is_fp8_enabled(), manager.FP8_ENABLED, manager.quantization_state.fp8_enabled) == (False,) * 3
    with te.autocast(recipe=chosen):
        assert (manager.is_fp8_enabled(), manager.FP8_ENABLED, manager.quantization_state.fp8_enabled) == (True,) * 3
        assert manager.get_fp8_recipe() == chosen
        assert not manager.is_fp8_calibration()
    with te.autocast(False, True, chosen):
        assert manager.is_fp8_calibration()
        assert manager.FP8_CALIBRATION
    assert manager.get_fp8_group() is None
    assert isinstance(manager.get_fp8_recipe(), recipe.Recipe)
    manager.reset()


def test_an_update_by_hand(te: ModuleType, recipe: ModuleType) -> None:
    layer = te.Linear(5, 7, device="cpu")
    trained(te, layer, recipe.DelayedScaling(amax_history_len=4), [peaked(4.0)])
    assert float(layer.fp8_state.scale[0]) == 0.0
    te.fp8.FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=True)
    assert float(layer.fp8_state.scale[0]) == 0.0
    te.fp8.FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=False)
    assert float(layer.fp8_state.scale[0]) == 112.0
    assert context.current() is None
    with te.autocast(), pytest.warns(UserWarning, match="inside a region scales stand still"):
        te.fp8.FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=False)


def test_support_is_told_truthfully(te: ModuleType, recipe: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, kind in (
        ("fp8", "DelayedScaling"), ("mxfp8", "MXFP8BlockScaling"), ("fp8_block_scaling", "Float8BlockScaling"),
    ):  # fmt: skip
        ok, reason = getattr(te.fp8, f"check_{name}_support")()
        assert ok is fp8.support(recipe=getattr(fp8, kind)())[0]
        assert (reason == "") is ok
        assert ok or "emulated here" in reason
        assert getattr(te, f"is_{name}_available")(return_reason=True) == (ok, reason)
        assert getattr(te, f"is_{name}_available")() is ok
        te.fp8.check_recipe_support(getattr(recipe, kind)())
    assert te.fp8.check_nvfp4_support()[0] is False
    with pytest.raises(NotImplementedError):
        te.fp8.check_recipe_support(recipe.NVFP4BlockScaling())
    defaults = {}
    for major in (8, 9, 10, 11, 12):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda major=major: (major, 0))
        defaults[major] = type(te.fp8.get_default_fp8_recipe()).__name__
    assert defaults == {
        8: "DelayedScaling", 9: "DelayedScaling", 10: "MXFP8BlockScaling", 11: "MXFP8BlockScaling",
        12: "Float8CurrentScaling",
    }  # fmt: skip
    hybrid = recipe.DelayedScaling()
    assert te.fp8.get_fp8_torch_dtype(hybrid) == torch.float8_e4m3fn
    assert te.fp8.get_fp8_torch_dtype(hybrid, fprop_tensor=False) == torch.float8_e5m2
    assert te.fp8.get_fp8_max(hybrid, fprop_tensor=False) == 57344
    assert te.fp8.get_fp8_te_dtype(hybrid) is te.DType.kFloat8E4M3
