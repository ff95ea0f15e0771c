"""The tables of names in the documentation are those of the shims."""

from __future__ import annotations

import importlib
import re
from types import SimpleNamespace

import pytest

import drop_in_tables

#: Every name of the interface that the drop-in speaks: served, or refused with a reason.
TRANSFORMER_ENGINE = {
    "pytorch": """Linear LayerNorm RMSNorm LayerNormLinear LayerNormMLP GroupedLinear DotProductAttention
        MultiheadAttention TransformerLayer RotaryPositionEmbedding autocast fp8_autocast quantized_model_init
        fp8_model_init checkpoint make_graphed_callables parallel_cross_entropy onnx_export get_cudnn_version
        is_fp8_available is_mxfp8_available is_fp8_block_scaling_available is_nvfp4_available is_bf16_available
        get_default_recipe optimizers ops Fp8Padding Fp8Unpadding InferenceParams CudaRNGStatesTracker
        get_cpu_offload_context initialize_ub Float8Tensor MXFP8Tensor Float8BlockwiseQTensor NVFP4Tensor
        QuantizedTensor Quantizer Float8Quantizer Float8CurrentScalingQuantizer MXFP8Quantizer NVFP4Quantizer
        Float8BlockQuantizer DType fp8 attention distributed""",
    "pytorch.fp8": """check_fp8_support check_mxfp8_support check_nvfp4_support check_fp8_block_scaling_support
        check_recipe_support get_default_fp8_recipe get_fp8_torch_dtype get_fp8_te_dtype get_fp8_max
        FP8GlobalStateManager fp8_autocast fp8_model_init DelayedScaling Float8CurrentScaling MXFP8BlockScaling
        Float8BlockScaling NVFP4BlockScaling RecipeState DelayedScalingRecipeState Float8CurrentScalingRecipeState
        MXFP8BlockScalingRecipeState Float8BlockScalingRecipeState NVFP4BlockScalingRecipeState""",
    "pytorch.attention": "DotProductAttention MultiheadAttention RotaryPositionEmbedding apply_rotary_pos_emb rope",
    "pytorch.attention.rope": "RotaryPositionEmbedding apply_rotary_pos_emb",
    "pytorch.optimizers": """FusedAdam FusedSGD multi_tensor_applier multi_tensor_scale multi_tensor_l2norm
        multi_tensor_unscale_l2norm multi_tensor_adam multi_tensor_sgd""",
    "common.recipe": """Format MMParams QParams Recipe DelayedScaling Float8CurrentScaling MXFP8BlockScaling
        Float8BlockScaling NVFP4BlockScaling""",
}


@pytest.mark.parametrize("page", drop_in_tables.PAGES)
def test_pages_are_current(page: str) -> None:
    path = drop_in_tables.DOCS / page
    if not path.exists():
        pytest.skip(f"docs/{page} is not there")
    text = path.read_text(encoding="utf-8")
    assert "<!-- begin served -->" in text
    assert drop_in_tables.written(text, drop_in_tables.PAGES[page]) == text, "run python tools/drop_in_tables.py"


@pytest.mark.parametrize("module", TRANSFORMER_ENGINE)
def test_every_name_is_served_or_refused_with_a_reason(module: str) -> None:
    found = importlib.import_module(f"transformer_engine.{module}")
    for name in TRANSFORMER_ENGINE[module].split():
        assert (name in found.__all__) is not (name in getattr(found, "NOT_SERVED", {})), name


def test_names_share_a_row_with_their_aliases(monkeypatch: pytest.MonkeyPatch) -> None:
    def function() -> None:
        """Do it | so. And more."""

    class Served:
        SERVED_BY = "fusestep.part"

    refused = {"no": ("use yes", True)}
    modules = {
        "pkg": SimpleNamespace(__all__=["Served", "function"], Served=Served, function=function, NOT_SERVED=refused),
        "pkg.sub": SimpleNamespace(__all__=["function"], function=function, NOT_SERVED=refused),
    }  # fmt: skip
    monkeypatch.setattr(drop_in_tables, "modules_of", lambda package: modules.items())
    rows = drop_in_tables.served("pkg").splitlines()[2:]
    assert rows == ["| `pkg.function` | Do it \\| so | `pkg.sub.function` |", "| `pkg.Served` | `fusestep.part` |  |"]
    assert drop_in_tables.refused("pkg").splitlines()[2:] == ["| `pkg.no` | use yes | yes |"]
    page = "before\n<!-- begin refused -->\nold\n<!-- end refused -->\nafter"
    assert re.search(r"(?s)^before\n.*use yes.*\nafter$", drop_in_tables.written(page, "pkg"))
    assert "old" not in drop_in_tables.written(page, "pkg")
