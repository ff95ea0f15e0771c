"""Every name that Apex has, or had, is served or refused with a reason; none is merely absent."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
from typing import Any

import pytest

#: By module, what public descriptions of Apex name.
NAMES = {
    "apex": """
        amp contrib fused_dense mlp multi_tensor_apply normalization optimizers parallel transformer
        fp16_utils RNN pyprof reparameterization
    """,
    "apex.optimizers": "FusedAdam FusedLAMB FusedSGD FusedNovoGrad FusedAdagrad FusedMixedPrecisionLamb",
    "apex.normalization": "FusedLayerNorm FusedRMSNorm MixedFusedLayerNorm MixedFusedRMSNorm",
    "apex.normalization.fused_layer_norm": """
        fused_layer_norm_affine mixed_dtype_fused_layer_norm_affine fused_layer_norm fused_rms_norm_affine
        mixed_dtype_fused_rms_norm_affine fused_rms_norm FusedLayerNormAffineFunction
        FusedLayerNormAffineMixedDtypesFunction FusedLayerNormFunction FusedRMSNormAffineFunction
        FusedRMSNormAffineMixedDtypesFunction FusedRMSNormFunction
    """,
    "apex.multi_tensor_apply": "multi_tensor_applier MultiTensorApply",
    "amp_C": """
        multi_tensor_scale multi_tensor_axpby multi_tensor_l2norm multi_tensor_l2norm_mp
        multi_tensor_l2norm_scale multi_tensor_unscale_l2norm multi_tensor_adam multi_tensor_adam_capturable
        multi_tensor_adam_capturable_master multi_tensor_sgd multi_tensor_lamb multi_tensor_lamb_mp
        multi_tensor_lamb_stage1_cuda multi_tensor_lamb_stage2_cuda multi_tensor_novograd
        multi_tensor_adagrad update_scale_hysteresis
    """,
    "apex_C": "flatten unflatten",
    "apex.contrib": """
        bottleneck clip_grad conv_bias_relu cudnn_gbn fmha focal_loss gpu_direct_storage group_norm groupbn
        index_mul_2d layer_norm multihead_attn nccl_allocator openfold_triton optimizers peer_memory
        sparsity torchsched transducer xentropy
    """,
    "apex.contrib.clip_grad": "clip_grad_norm_",
    "apex.contrib.xentropy": "SoftmaxCrossEntropyLoss",
    "apex.contrib.layer_norm": "FastLayerNorm",
    "apex.contrib.focal_loss.focal_loss": "focal_loss FocalLoss",
    "apex.contrib.group_norm": "GroupNorm",
    "apex.contrib.optimizers": """
        FP16_Optimizer FusedAdam FusedLAMB DistributedFusedAdam DistributedFusedLAMB distributed_fused_adam
        distributed_fused_lamb
    """,
    "apex.fused_dense": "FusedDense FusedDenseGeluDense DenseNoBiasFunc",
    "apex.mlp": "MLP",
    "apex.amp": """
        initialize scale_loss master_params state_dict load_state_dict disable_casts init half_function
        float_function promote_function register_half_function register_float_function
        register_promote_function
    """,
    "apex.parallel": """
        DistributedDataParallel Reducer SyncBatchNorm convert_syncbn_model create_syncbn_process_group LARC
    """,
    "apex.transformer": """
        functional enums parallel_state pipeline_parallel tensor_parallel layers amp utils microbatches
    """,
    "apex.transformer.enums": "AttnMaskType AttnType LayerType ModelType",
    "apex.transformer.functional": """
        FusedScaleMaskSoftmax fused_apply_rotary_pos_emb fused_apply_rotary_pos_emb_cached
        fused_apply_rotary_pos_emb_thd fused_apply_rotary_pos_emb_2d
    """,
}


@pytest.mark.parametrize("module", NAMES)
def test_every_name_is_served_or_refused_with_a_reason(module: str) -> None:
    found = importlib.import_module(module)
    refused: dict[str, tuple[str, bool]] = getattr(found, "NOT_SERVED", {})
    for name in NAMES[module].split():
        assert (name in found.__all__) is not (name in refused), name
    for name in found.__all__:
        served: Any = getattr(found, name)
        assert inspect.ismodule(served) or inspect.getdoc(served), name
    for name, (instead, _) in refused.items():
        assert re.match("use |call |fusestep ", instead), name


def test_what_is_named_as_a_replacement_exists() -> None:
    """As far as it is fusestep's or torch's."""
    from apex import _extensions

    tables = [getattr(importlib.import_module(module), "NOT_SERVED", {}) for module in NAMES]
    for instead in {one for table in [*tables, _extensions.NOT_SERVED] for one, _ in table.values()}:
        for path in re.findall(r"\b(?:fusestep|torch|apex)(?:\.\w+)+", instead):
            *parents, name = path.split(".")
            module = parents[0]
            for part in parents[1:]:
                module = f"{module}.{part}"
                importlib.import_module(module)
            holder = importlib.import_module(module)
            assert hasattr(holder, name) or importlib.util.find_spec(path), path


@pytest.mark.parametrize(
    "statement",
    [
        "from apex import nothing",
        "from apex.contrib import nothing",
        "import apex.nothing",
        "from apex.nothing import there",
        "from amp_C import nothing",
    ],
)
def test_importing_a_name_that_nobody_knows_says_whose_it_is(statement: str) -> None:
    with pytest.raises(
        ImportError, match=r"^fusestep does not serve \S+nothing; it is not among the names that fusestep"
    ):
        exec(statement, {})


@pytest.mark.parametrize(
    ("statement", "there"),
    [
        ("import apex.optimiser", ": apex has .*optimizers.* and 1 more; docs/apex.md"),
        ("from apex.contrib.clip_grad import clip_grad_norm", ": apex.contrib.clip_grad has clip_grad_norm_; docs"),
        (
            "import transformer_engine.pytorch.Linear",
            ": transformer_engine.pytorch has Linear, .* and [0-9]+ more; docs",
        ),
    ],
)
def test_a_name_that_nobody_knows_is_told_what_is_there_instead(statement: str, there: str) -> None:
    with pytest.raises(ImportError, match=there) as caught:
        exec(statement, {})
    assert "planned" not in str(caught.value)


def test_asking_for_a_module_that_nobody_knows_is_answered() -> None:
    assert importlib.util.find_spec("apex.nothing") is None
    assert not hasattr(importlib.import_module("apex"), "nothing")
