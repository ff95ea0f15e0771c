"""Transformer Engine for PyTorch, served by fusestep: what scripts call `te`."""

from __future__ import annotations

from fusestep.compat.names import module_getattr
from transformer_engine.pytorch import attention, distributed, fp8, module, optimizers, quantization, tensor, utils
from transformer_engine.pytorch.attention import (
    DotProductAttention,
    MultiheadAttention,
    RotaryPositionEmbedding,
    apply_rotary_pos_emb,
)
from transformer_engine.pytorch.cross_entropy import parallel_cross_entropy
from transformer_engine.pytorch.distributed import CudaRNGStatesTracker, checkpoint
from transformer_engine.pytorch.export import onnx_export
from transformer_engine.pytorch.graph import make_graphed_callables
from transformer_engine.pytorch.module import (
    Fp8Padding,
    Fp8Unpadding,
    GroupedLinear,
    LayerNorm,
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    RMSNorm,
)
from transformer_engine.pytorch.quantization import (
    autocast,
    check_fp8_block_scaling_support,
    check_fp8_support,
    check_mxfp8_support,
    check_nvfp4_support,
    check_recipe_support,
    fp8_autocast,
    fp8_model_init,
    get_default_recipe,
    is_bf16_available,
    is_fp8_available,
    is_fp8_block_scaling_available,
    is_mxfp8_available,
    is_nvfp4_available,
    quantized_model_init,
)
from transformer_engine.pytorch.tensor import DType, Float8Tensor, QuantizedTensor
from transformer_engine.pytorch.transformer import TransformerLayer
from transformer_engine.pytorch.utils import get_cudnn_version, get_device_compute_capability

__all__ = [
    "CudaRNGStatesTracker",
    "DType",
    "DotProductAttention",
    "Float8Tensor",
    "Fp8Padding",
    "Fp8Unpadding",
    "GroupedLinear",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MultiheadAttention",
    "QuantizedTensor",
    "RMSNorm",
    "RotaryPositionEmbedding",
    "TransformerLayer",
    "apply_rotary_pos_emb",
    "attention",
    "autocast",
    "check_fp8_block_scaling_support",
    "check_fp8_support",
    "check_mxfp8_support",
    "check_nvfp4_support",
    "check_recipe_support",
    "checkpoint",
    "distributed",
    "fp8",
    "fp8_autocast",
    "fp8_model_init",
    "get_cudnn_version",
    "get_default_recipe",
    "get_device_compute_capability",
    "is_bf16_available",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mxfp8_available",
    "is_nvfp4_available",
    "make_graphed_callables",
    "module",
    "onnx_export",
    "optimizers",
    "parallel_cross_entropy",
    "quantization",
    "quantized_model_init",
    "tensor",
    "utils",
]

_MOE = ("sort tokens by expert with torch.argsort and index_select; GroupedLinear takes any numbers of rows", False)
_OFFLOAD = ("use torch.autograd.graph.save_on_cpu", False)
_OVERLAP = ("overlap of products with communication is not served; leave the ub_ arguments out", False)
_OPS = ("use the modules, whose norms, products and activations are fused", False)
NOT_SERVED = {
    "ops": _OPS,
    "cpp_extensions": ("use the modules, or fusestep.ops for single operations", False),
    "constants": ("use the names of torch's dtypes and transformer_engine.common.recipe", False),
    "custom_recipes": ("use one of the recipes that are served", False),
    "jit": ("use torch.compile", False),
    "triton": ("use the modules, whose kernels are Triton's too", False),
    "Sequential": ("use torch.nn.Sequential", False),
    "InferenceParams": attention.NOT_SERVED["InferenceParams"],
    "initialize_ub": _OVERLAP,
    "destroy_ub": _OVERLAP,
    "UserBufferQuantizationMode": _OVERLAP,
    "get_cpu_offload_context": _OFFLOAD,
    "cpu_offload": _OFFLOAD,
    "mark_not_offload": _OFFLOAD,
    "moe_permute": _MOE,
    "moe_permute_with_probs": _MOE,
    "moe_permute_and_pad_with_probs": _MOE,
    "moe_unpermute": _MOE,
    "moe_sort_chunks_by_index": _MOE,
    "moe_sort_chunks_by_index_with_probs": _MOE,
    "router": _MOE,
    "permutation": _MOE,
    "softmax": ("use DotProductAttention, or torch.softmax", False),
    "newton_schulz": ("write it with torch's products", False),
    "set_skip_fp8_weight_update_tensor": ("pass is_first_microbatch", False),
    **tensor.NOT_SERVED,
}
__getattr__ = module_getattr(
    __name__,
    NOT_SERVED,
    submodules=("cross_entropy", "export", "float8_tensor", "graph", "quantized_tensor", "transformer"),
)
