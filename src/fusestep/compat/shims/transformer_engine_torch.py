"""transformer_engine_torch: scripts import it to learn whether Transformer Engine's kernels are here, and for names.

The import succeeds on a machine with a GPU that runs fusestep's kernels. Elsewhere it raises, as the real one's does
without CUDA, and transformer_engine.pytorch runs PyTorch's operations.
"""

import torch
from amp_C import (
    multi_tensor_adam,
    multi_tensor_l2norm,
    multi_tensor_scale,
    multi_tensor_sgd,
    multi_tensor_unscale_l2norm,
)
from transformer_engine.pytorch.tensor import DType
from transformer_engine.pytorch.utils import get_cudnn_version

from fusestep import dispatch
from fusestep.compat.names import module_getattr
from fusestep.compat.report import served

__all__ = [
    "DType",
    "get_cudnn_version",
    "multi_tensor_adam",
    "multi_tensor_l2norm",
    "multi_tensor_scale",
    "multi_tensor_sgd",
    "multi_tensor_unscale_l2norm",
]

_MODULES = ("use the modules of transformer_engine.pytorch, which run the kernels", False)
NOT_SERVED = dict.fromkeys(
    (
        *("generic_gemm", "te_general_grouped_gemm", "quantize", "dequantize", "split_quantize", "bgrad_quantize"),
        *("layernorm_fwd", "layernorm_bwd", "rmsnorm_fwd", "rmsnorm_bwd", "fused_attn_fwd", "fused_attn_bwd"),
        *("gelu", "dgelu", "relu", "drelu", "swiglu", "dswiglu", "geglu", "dgeglu", "FP8TensorMeta"),
        *("fused_rope_forward", "fused_rope_backward", "fused_amax_and_scale_update_after_reduction"),
    ),
    _MODULES,
)
__getattr__ = module_getattr(__name__, NOT_SERVED)

_choice = dispatch.explain_choice("quantize", "cuda" if torch.cuda.is_available() else "cpu", None)
if _choice.implementation != "triton":
    raise ModuleNotFoundError(
        f"transformer_engine_torch: no kernel of fusestep's runs on this machine ({_choice.reason}); "
        "transformer_engine.pytorch works, on PyTorch's own operations."
    )
served("transformer_engine_torch", "fusestep, triton")
