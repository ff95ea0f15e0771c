"""What is not served raises on use, with its name, what to use instead, and whether it is planned."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import pytest
import torch

from fusestep.compat import report
from fusestep.errors import UserError

MODULES = [
    "transformer_engine",
    *(f"transformer_engine.{name}" for name in ("common", "common.recipe", "pytorch")),
    *(
        f"transformer_engine.pytorch.{name}"
        for name in ("attention", "distributed", "fp8", "module", "module.base", "optimizers", "quantization", "tensor")
    ),
]


@pytest.mark.parametrize("path", MODULES)
def test_names(path: str) -> None:
    module = importlib.import_module(path)
    for name in module.__all__:
        assert hasattr(module, name), name
    for name, (instead, _) in module.NOT_SERVED.items():
        assert not hasattr(module, name), name
        with pytest.raises(ImportError) as raised:
            exec(f"from {path} import {name}", {})
        assert f"fusestep does not serve {path}.{name}; {instead} (it is" in str(raised.value)
        assert report.snapshot().refused[f"{path}.{name}"] == instead


def test_names_that_nobody_knows_are_attribute_errors(te: ModuleType) -> None:
    with pytest.raises(AttributeError, match="no attribute 'Lineer'"):
        _ = te.Lineer


def test_a_probe_for_the_extension_gets_a_truthful_answer(te: ModuleType) -> None:
    if torch.cuda.is_available():
        extension = importlib.import_module("transformer_engine_torch")
        assert extension.DType is te.DType
        assert not hasattr(extension, "layernorm_fwd")
    else:
        with pytest.raises(
            ModuleNotFoundError, match=r"transformer_engine\.pytorch works, on PyTorch's own operations"
        ):
            importlib.import_module("transformer_engine_torch")


CPU = {"device": "cpu"}


@pytest.mark.parametrize(
    ("kind", "sizes", "options"),
    [
        ("Linear", (4, 4), {"ub_overlap_ag": True}),
        ("Linear", (4, 4), {"ub_bulk_wgrad": True}),
        ("Linear", (4, 4), {"delay_wgrad_compute": True}),
        ("Linear", (4, 4), {"symmetric_ar_type": "one_shot"}),
        ("LayerNormLinear", (4, 4), {"ub_overlap_rs_dgrad": True}),
        ("LayerNormMLP", (4, 4), {"activation_params": {"limit": 3.0}}),
        ("LayerNormMLP", (4, 4), {"ub_overlap_rs": True}),
        ("GroupedLinear", (2, 4, 4), {"single_grouped_weight": True}),
        ("GroupedLinear", (2, 4, 4), {"use_grouped_tensor": True}),
        ("MultiheadAttention", (4, 2), {"softmax_type": "learnable"}),
        ("MultiheadAttention", (4, 2), {"ub_bulk_dgrad": True}),
        ("TransformerLayer", (4, 4, 2), {"ub_tp_comm_overlap": True}),
        ("TransformerLayer", (4, 4, 2), {"softmax_type": "off-by-one"}),
    ],
)
def test_arguments_of_constructors(te: ModuleType, kind: str, sizes: Any, options: dict[str, Any]) -> None:
    ((name, _),) = options.items()
    with pytest.raises(
        NotImplementedError, match=rf"transformer_engine\.pytorch\.{kind}\({name}=.*\(it is not planned\)"
    ):
        getattr(te, kind)(*sizes, **options, **CPU)


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("Linear", (4, 4)), ("LayerNormLinear", (4, 4)), ("LayerNormMLP", (4, 4)), ("GroupedLinear", (2, 4, 4)),
        ("MultiheadAttention", (4, 2)), ("TransformerLayer", (4, 4, 2)), ("DotProductAttention", (2, 4)),
    ],
)  # fmt: skip
def test_ranks_that_do_not_fit_a_module(te: ModuleType, kind: str, sizes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    device = {} if kind == "DotProductAttention" else CPU
    modes = {"Linear": {"parallel_mode": "row"}, "LayerNormLinear": {"parallel_mode": "column"}}
    modes |= {"LayerNormMLP": {"set_parallel_mode": True}}
    options = {**device, **modes.get(kind, {})}
    module = getattr(te, kind)(*sizes, sequence_parallel=True, **options)  # of one rank it means nothing
    group = object()
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda one: 4 if one is group else 1)
    if kind == "GroupedLinear":
        with pytest.raises(NotImplementedError, match=r"GroupedLinear\(tp_group of 2 ranks\).*\(it is not planned\)"):
            te.GroupedLinear(*sizes, tp_size=2, **device)
    else:
        with pytest.raises(UserError, match="made for one rank and the group has 4"):
            module.set_tensor_parallel_group(group)
    module.set_tensor_parallel_group("of one")
    if kind in ("MultiheadAttention", "TransformerLayer"):
        with pytest.raises(UserError, match=r"2 ranks .* set_parallel_mode=True"):
            getattr(te, kind)(*sizes, tp_size=2, **device)
    if hasattr(module, "set_context_parallel_group"):
        with pytest.raises(NotImplementedError, match="cp_group of 4 ranks"):
            module.set_context_parallel_group([group])


def test_arguments_of_calls(te: ModuleType) -> None:
    x = torch.randn(3, 2, 4)
    linear, normed = te.Linear(4, 4, **CPU), te.LayerNormLinear(4, 4, **CPU)
    for module, name in ((linear, "fp8_output"), (linear, "fp8_grad"), (normed, "fp8_output")):
        with pytest.raises(NotImplementedError, match=rf"forward\({name}=True\)"):
            module(x, **{name: True})
    group = te.GroupedLinear(1, 4, 4, **CPU)
    with pytest.raises(NotImplementedError, match=r"GroupedLinear\.forward\(out=…\)"):
        group(x, [6], out=torch.empty(3, 2, 4))
    layer = te.TransformerLayer(4, 4, 2, **CPU)
    attention = te.MultiheadAttention(4, 2, **CPU)
    for module in (layer, attention):
        for name, value in (("inference_params", object()), ("pad_between_seqs", True),
                            ("cu_seqlens_q_padded", torch.zeros(3, dtype=torch.int32))):  # fmt: skip
            with pytest.raises(NotImplementedError, match=rf"forward\({name}="):
                module(x, **{name: value})
    with pytest.raises(UserError, match=r"encoder_output, fifth in 1\.x, is now sixth"):
        layer(x, None, None, None, x)
    core, q = te.DotProductAttention(2, 4), torch.randn(3, 2, 2, 4)
    for name, value in (("fp8_output", True), ("bf16_backward", True), ("score_mod", lambda s: s)):
        with pytest.raises(NotImplementedError, match=rf"DotProductAttention\.forward\({name}="):
            core(q, q, q, **{name: value})
    with pytest.raises(NotImplementedError, match="distribute_saved_activations"):
        te.checkpoint(layer, x, distribute_saved_activations=True)
    with pytest.raises(NotImplementedError, match="_order"):
        te.make_graphed_callables(layer, (x,), _order=[1, -1])
    with pytest.raises(NotImplementedError, match="cp_group of 2 ranks"):
        te.apply_rotary_pos_emb(q, te.RotaryPositionEmbedding(4)(3), cp_size=2)


def test_arguments_without_effect_are_taken(te: ModuleType) -> None:
    layer = te.TransformerLayer(
        4, 4, 2, layer_number=3, seq_length=5, micro_batch_size=2, set_parallel_mode=True, sequence_parallel=True,
        ub_overlap_ag=True, hidden_dropout=0.0, attention_dropout=0.0, device="cpu",
    )  # fmt: skip
    x = torch.randn(3, 2, 4)
    assert torch.equal(layer(x, fast_zero_fill=False), layer(x))
    linear = te.Linear(4, 4, parallel_mode="row", ub_name="proj", save_original_input=True, name="x", **CPU)
    assert torch.equal(linear(x), torch.nn.functional.linear(x, linear.weight, linear.bias))


def test_what_was_served_is_in_the_report(te: ModuleType, recipe: ModuleType) -> None:
    te.TransformerLayer(4, 4, 2, **CPU)
    with te.autocast(recipe=recipe.DelayedScaling()):
        pass
    served = report.snapshot().served
    assert served["transformer_engine.pytorch.TransformerLayer"] == ["fusestep.nn.TransformerLayer, torch"]
    assert served["transformer_engine.pytorch.autocast"] == ["fusestep.fp8.fp8_autocast"]
    assert served["transformer_engine.common.recipe.DelayedScaling"] == ["fusestep.fp8.DelayedScaling"]
    assert "transformer_engine.pytorch.LayerNormMLP" not in served  # a part of the layer, not asked for


def test_what_has_kernels_is_reported_with_what_it_ran_as(te: ModuleType) -> None:
    te.MultiheadAttention(4, 2, **CPU)
    te.apply_rotary_pos_emb(torch.randn(3, 2, 2, 4), te.RotaryPositionEmbedding(4)(3))
    for kind in (te.optimizers.FusedAdam, te.optimizers.FusedSGD):
        weight = torch.nn.Parameter(torch.randn(3))
        optimizer = kind([weight], lr=0.1)
        weight.grad = torch.randn(3)
        optimizer.step()
    served = report.snapshot().served
    for name, ours in {
        "MultiheadAttention": "nn.MultiheadAttention",
        "apply_rotary_pos_emb": "nn.functional.apply_rotary_pos_emb",
        "optimizers.FusedAdam": "optim.FusedAdam",
        "optimizers.FusedSGD": "optim.FusedSGD",
    }.items():
        assert served[f"transformer_engine.pytorch.{name}"] == [f"fusestep.{ours}, torch"], name
