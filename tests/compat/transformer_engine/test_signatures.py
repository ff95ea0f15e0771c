"""The order and defaults of arguments, as the interface that is spoken has them."""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any

import pytest
import torch

# Groups of arguments that stand in several signatures. "x?" defaults to None, "x-" to False, "x+" to True.
GROUPS = {
    "{A}": "sequence_parallel- fuse_wgrad_accumulation- tp_group? tp_size=1 get_rng_state_tracker?",
    "{LN}": "return_layernorm_output- return_layernorm_output_gathered-",
    "{D}": "delay_wgrad_compute- symmetric_ar_type?",
    "{W}": "window_size? bottom_right_diagonal?",
    "{QK}": "qk_norm_type? qk_norm_eps=1e-6 qk_norm_before_rope-",
    "{B}": "core_attention_bias_type='no_bias' core_attention_bias? alibi_slopes?",
    "{CU}": "cu_seqlens_q? cu_seqlens_kv? cu_seqlens_q_padded? cu_seqlens_kv_padded? max_seqlen_q? max_seqlen_kv?",
    "{UB}": "ub_overlap_ag- ub_overlap_rs- ub_overlap_rs_dgrad- ub_bulk_dgrad- ub_bulk_wgrad-",
}

CONSTRUCTORS = {
    "Linear": "in_features out_features {A} rng_tracker_name? init_method? bias+ return_bias- params_dtype? "
    "parallel_mode? parameters_split? device='cuda' {UB} ub_name? {D} save_original_input- name?",
    "LayerNormLinear": "in_features out_features eps=1e-5 {A} init_method? bias+ normalization='LayerNorm' "
    "return_bias- params_dtype? parallel_mode? {LN} parameters_split? zero_centered_gamma- device='cuda' "
    "ub_overlap_ag- ub_overlap_rs- ub_overlap_rs_dgrad- ub_bulk_wgrad- ub_bulk_dgrad- ub_name? {D} name?",
    "LayerNormMLP": "hidden_size ffn_hidden_size eps=1e-5 sequence_parallel- return_bias- get_rng_state_tracker? "
    "tp_group? tp_size=1 init_method? bias+ normalization='LayerNorm' activation='gelu' activation_params? "
    "output_layer_init_method? fuse_wgrad_accumulation- params_dtype? {LN} seq_length? micro_batch_size? "
    "set_parallel_mode- zero_centered_gamma- device='cuda' ub_overlap_ag- name? ub_overlap_rs- ub_overlap_rs_dgrad- "
    "ub_bulk_dgrad- ub_bulk_wgrad- {D} checkpoint-",
    "GroupedLinear": "num_gemms in_features out_features {A} rng_tracker_name? init_method? bias+ return_bias- "
    "params_dtype? parallel_mode? device='cuda' ub_overlap_rs- ub_overlap_ag- ub_name? delay_wgrad_compute- "
    "save_original_input- single_grouped_weight- single_grouped_bias- name? use_grouped_tensor?",
    "DotProductAttention": "num_attention_heads kv_channels num_gqa_groups? attention_dropout=0.0 qkv_format='sbhd' "
    "attn_mask_type='causal' {W} sequence_parallel- tp_size=1 get_rng_state_tracker? tp_group? layer_number? "
    "attention_type='self' cp_group? cp_global_ranks? cp_stream? cp_comm_type='p2p' softmax_scale? "
    "softmax_type='vanilla' return_max_logit- name?",
    "MultiheadAttention": "hidden_size num_attention_heads kv_channels? attention_dropout=0.1 layernorm_epsilon=1e-5 "
    "init_method? output_layer_init_method? layer_number? attn_mask_type='causal' {W} tp_group? tp_size=1 "
    "num_gqa_groups? fuse_wgrad_accumulation- get_rng_state_tracker? sequence_parallel- params_dtype? return_bias- "
    "return_layernorm_output- input_layernorm- attention_type='self' set_parallel_mode- fuse_qkv_params- "
    "zero_centered_gamma- qkv_weight_interleaved+ rotary_pos_interleaved- {UB} bias+ normalization='LayerNorm' "
    "device='cuda' qkv_format='sbhd' name? {QK} seq_length? micro_batch_size? softmax_type='vanilla'",
    "TransformerLayer": "hidden_size ffn_hidden_size num_attention_heads num_gqa_groups? layernorm_epsilon=1e-5 "
    "hidden_dropout=0.1 attention_dropout=0.1 init_method? output_layer_init_method? layer_number? kv_channels? "
    "self_attn_mask_type='causal' {W} enc_dec_attn_mask_type='no_mask' enc_dec_bottom_right_diagonal? "
    "enc_dec_window_size? tp_group? tp_size=1 params_dtype? get_rng_state_tracker? fuse_wgrad_accumulation- "
    "seq_length? micro_batch_size? sequence_parallel- apply_residual_connection_post_layernorm- output_layernorm- "
    "parallel_attention_mlp- layer_type='encoder' drop_path_rate=0.0 set_parallel_mode- fuse_qkv_params- "
    "rotary_pos_interleaved- zero_centered_gamma- qkv_weight_interleaved+ ub_tp_comm_overlap- ub_overlap_ag+ "
    "ub_overlap_rs+ ub_overlap_rs_dgrad- ub_bulk_dgrad+ ub_bulk_wgrad+ bias+ activation='gelu' activation_params? "
    "normalization='LayerNorm' device='cuda' attn_input_format='sbhd' name? {QK} softmax_type='vanilla'",
    "LayerNorm": "normalized_shape? eps=1e-5 sequence_parallel? params_dtype? zero_centered_gamma- hidden_size?",
    "RMSNorm": "normalized_shape? eps=1e-5 sequence_parallel? params_dtype? zero_centered_gamma- hidden_size?",
    "RotaryPositionEmbedding": "dim rotary_percent=1.0 seq_len_interpolation_factor? "
    "pretrained_max_position_embeddings? rotary_base=10000.0 interleaved-",
    "optimizers.FusedAdam": "params lr=1e-3 betas=(0.9,0.999) eps=1e-8 weight_decay=0.0 amsgrad- bias_correction+ "
    "adam_w_mode+ capturable- master_weights- master_weight_dtype=torch.float32 exp_avg_dtype=torch.float32 "
    "exp_avg_sq_dtype=torch.float32 use_decoupled_grad- store_param_remainders- set_grad_none?",
    "optimizers.FusedSGD": "params lr momentum=0.0 dampening=0.0 weight_decay=0.0 nesterov- wd_after_momentum- "
    "materialize_master_grads+ set_grad_none?",
}

FORWARDS = {
    "Linear": "inp is_first_microbatch? fp8_output- fp8_grad-",
    "LayerNormLinear": "inp is_first_microbatch? fp8_output- fp8_grad-",
    "LayerNormMLP": "inp is_first_microbatch?",
    "GroupedLinear": "inp m_splits is_first_microbatch? out? dgrad_out?",
    "LayerNorm": "inp",
    "RMSNorm": "inp",
    "DotProductAttention": "query_layer? key_layer? value_layer? attention_mask? qkv_format? {CU} attn_mask_type? {W} "
    "checkpoint_core_attention- {B} fast_zero_fill+ inference_params? pad_between_seqs? fp8_output- bf16_backward- "
    "num_splits=1 score_mod? score_mod_bprop? score_mod_tensors? score_mod_bprop_tensors? qkv_layer? kv_layer? "
    "qkv_interleave_dim=-3",
    "MultiheadAttention": "hidden_states attention_mask? encoder_output? attn_mask_type? {W} is_first_microbatch? "
    "checkpoint_core_attention- inference_params? rotary_pos_emb? {B} {CU} fast_zero_fill+ pad_between_seqs?",
    "TransformerLayer": "hidden_states attention_mask? self_attn_mask_type? {W} encoder_output? enc_dec_attn_mask? "
    "enc_dec_attn_mask_type? enc_dec_window_size? enc_dec_bottom_right_diagonal? is_first_microbatch? "
    "checkpoint_core_attention- inference_params? rotary_pos_emb? {B} {CU} fast_zero_fill+ pad_between_seqs?",
    "RotaryPositionEmbedding": "max_seq_len offset=0",
}

FUNCTIONS = {
    "autocast": "enabled+ calibrating- recipe? amax_reduction_group? _graph-",
    "fp8_autocast": "enabled+ calibrating- fp8_recipe? fp8_group? _graph-",
    "quantized_model_init": "enabled+ recipe? preserve_high_precision_init_val-",
    "fp8_model_init": "enabled+ recipe? preserve_high_precision_init_val-",
    "make_graphed_callables": "modules sample_args num_warmup_iters=3 allow_unused_input- sample_kwargs? fp8_enabled? "
    "fp8_calibrating? fp8_recipe? fp8_group? fp8_weight_caching? enabled? calibrating? recipe? amax_reduction_group? "
    "cache_quantized_params? _order? _num_layers_per_chunk? pool? retain_graph_in_backward- "
    "_reuse_graph_input_output_buffers- clone_param_grads_on_return+ pre_warmup_hook? post_warmup_hook? "
    "capture_time_hooks?",
    "attention.rope.apply_rotary_pos_emb": "t freqs tensor_format='sbhd' start_positions? interleaved- fused- "
    "cu_seqlens? cp_size=1 cp_rank=0",
    "attention.apply_rotary_pos_emb": "t freqs tensor_format='sbhd' start_positions? interleaved- fused- cu_seqlens? "
    "cp_size=1 cp_rank=0",
    "onnx_export": "enabled-",
    "is_fp8_available": "return_reason-",
    "check_recipe_support": "recipe",
    "get_cudnn_version": "",
}

RECIPES = {
    "DelayedScaling": "margin=0 fp8_format=HYBRID amax_history_len=1024 amax_compute_algo='max' "
    "scaling_factor_compute_algo? reduce_amax+ fp8_dpa- fp8_mha- backward_override?",
    "Float8CurrentScaling": "use_power_2_scales- fp8_format=HYBRID fp8_gemm_fprop=MM(False) fp8_gemm_dgrad=MM(True) "
    "fp8_gemm_wgrad=MM(True) fp8_dpa- fp8_mha- backward_override?",
    "MXFP8BlockScaling": "margin=0 fp8_format=E4M3 fp8_dpa- fp8_mha- backward_override? enable_2d_quantization-",
    "Float8BlockScaling": "use_f32_scales- fp8_format=E4M3 x_block_scaling_dim=1 w_block_scaling_dim=2 "
    "grad_block_scaling_dim=1 fp8_gemm_fprop=MM(True) fp8_gemm_dgrad=MM(True) fp8_gemm_wgrad=MM(True) fp8_dpa- "
    "fp8_mha- backward_override?",
    "NVFP4BlockScaling": "disable_rht- disable_stochastic_rounding- disable_2d_quantization- row_scaled_activation- "
    "nvfp4_4over6='none' nvfp4_4over6_e4m3_use_256='all' nvfp4_4over6_err_mode='MAE' fp4_format=E2M1 fp8_format=E4M3 "
    "fp8_dpa- fp8_mha- backward_override?",
}


def wanted(text: str, **names: Any) -> list[tuple[str, Any]]:
    """(name, default) of each argument; inspect.Parameter.empty where there is none."""
    for group, members in GROUPS.items():
        text = text.replace(group, members)
    found: list[tuple[str, Any]] = []
    for word in text.split():
        if "=" in word:
            name, default = word.split("=", 1)
            found.append((name, eval(default, {"torch": torch, **names})))
        elif word[-1] in "?-+":
            found.append((word[:-1], {"?": None, "-": False, "+": True}[word[-1]]))
        else:
            found.append((word, inspect.Parameter.empty))
    return found


def offered(function: Any) -> list[tuple[str, Any]]:
    return [
        (name, parameter.default)
        for name, parameter in inspect.signature(function).parameters.items()
        if name != "self" and parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]


def reached(te: ModuleType, path: str) -> Any:
    found: Any = te
    for name in path.split("."):
        found = getattr(found, name)
    return found


@pytest.mark.parametrize("path", CONSTRUCTORS)
def test_constructors(te: ModuleType, path: str) -> None:
    assert offered(reached(te, path).__init__) == wanted(CONSTRUCTORS[path])


@pytest.mark.parametrize("path", FORWARDS)
def test_forwards(te: ModuleType, path: str) -> None:
    """Ours may have more, behind."""
    expected = wanted(FORWARDS[path])
    found = offered(reached(te, path).forward)
    assert found[: len(expected)] == expected
    assert {name for name, _ in found[len(expected) :]} <= {"residual"}


@pytest.mark.parametrize("path", FUNCTIONS)
def test_functions(te: ModuleType, path: str) -> None:
    assert offered(reached(te, path)) == wanted(FUNCTIONS[path])


def test_cross_entropy(te: ModuleType) -> None:
    names = [name for name, _ in offered(te.parallel_cross_entropy)]
    assert names == [
        *("inp", "target", "label_smoothing", "reduce_loss", "dist_process_group", "ignore_idx", "is_cg_capturable"),
        "_input",
    ]


@pytest.mark.parametrize("name", RECIPES)
def test_recipes(recipe: ModuleType, name: str) -> None:
    formats = {one.name: one for one in recipe.Format}
    expected = wanted(RECIPES[name], MM=recipe.MMParams, **formats)
    found = [(argument, default) for argument, default in offered(getattr(recipe, name))]
    old = ["interval", "override_linear_precision"] if name == "DelayedScaling" else []  # of 1.x, by keyword
    assert [argument for argument, _ in found[len(expected) :]] == old
    assert found[: len(expected)] == expected


def test_keyword_only_arguments_of_the_optimizers(te: ModuleType) -> None:
    for optimizer, first in (
        (te.optimizers.FusedAdam, "bias_correction"),
        (te.optimizers.FusedSGD, "wd_after_momentum"),
    ):
        parameters = inspect.signature(optimizer).parameters.values()
        assert next(p.name for p in parameters if p.kind is p.KEYWORD_ONLY) == first


def test_the_third_argument_is_not_the_bias(te: ModuleType) -> None:
    layer = te.Linear(4, 6, False, device="cpu")
    assert layer.bias is not None
    normed = te.LayerNormLinear(4, 6, 1e-3, False, device="cpu")
    assert normed.bias is not None
    assert normed.eps == 1e-3


def test_names_of_modules(te: ModuleType) -> None:
    import transformer_engine

    assert "fusestep" in transformer_engine.__version__
    assert not hasattr(te, "__version__")
    assert te.fp8.check_fp8_support()[0] in (True, False)
    assert te.fp8.FP8GlobalStateManager is te.quantization.FP8GlobalStateManager
    from importlib.metadata import version

    assert version("transformer_engine") == transformer_engine.__version__
