"""fused_layer_norm_cuda: scripts import it to learn whether norms run as fused kernels here.

They do where the import succeeds: on a machine with a GPU that runs fusestep's kernels. Elsewhere it raises, as
Apex's does where it was built without, and apex.normalization runs PyTorch's operations.
"""

import torch

from fusestep import dispatch
from fusestep.compat.names import module_getattr
from fusestep.compat.report import served

__all__: list[str] = []

_USE = "call apex.normalization, which runs the kernels of this name"

_FUNCTIONS = (
    "backward",
    "backward_affine",
    "backward_affine_mixed_dtypes",
    "forward",
    "forward_affine",
    "forward_affine_mixed_dtypes",
    "rms_backward",
    "rms_backward_affine",
    "rms_backward_affine_mixed_dtypes",
    "rms_forward",
    "rms_forward_affine",
    "rms_forward_affine_mixed_dtypes",
)

NOT_SERVED = dict.fromkeys(_FUNCTIONS, (_USE, False))

_choice = dispatch.explain_choice("layer_norm", "cuda" if torch.cuda.is_available() else "cpu", None)
if _choice.implementation != "triton":
    raise ModuleNotFoundError(
        f"fused_layer_norm_cuda: no fused kernel runs on this machine ({_choice.reason}); apex.normalization works, on "
        "PyTorch's own operations."
    )
served("fused_layer_norm_cuda", "fusestep.ops.layer_norm, triton")
__getattr__ = module_getattr(__name__, NOT_SERVED)
