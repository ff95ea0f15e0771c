"""NVIDIA Apex's names, served by fusestep; removed ones too, where torch has what they were for.

As upstream, `import apex` brings optimizers and normalization; the rest is imported when it is first asked for.
"""

from __future__ import annotations

from fusestep.compat.install import who_serves
from fusestep.compat.names import module_getattr
from fusestep.compat.report import package

__version__ = "0.1+fusestep"

__all__ = [
    "amp",
    "contrib",
    "fused_dense",
    "mlp",
    "multi_tensor_apply",
    "normalization",
    "optimizers",
    "parallel",
    "transformer",
]

NOT_SERVED = {
    "RNN": ("use torch.nn.LSTM or torch.nn.GRU, which run cuDNN's fused kernels", False),
    "fp16_utils": ("use torch.autocast with torch.amp.GradScaler, or bf16, which needs no scaler", False),
    "pyprof": ("use torch.profiler, or Nsight Systems with torch.autograd.profiler.emit_nvtx", False),
    "reparameterization": ("use torch.nn.utils.parametrizations.weight_norm", False),
}

package("apex", who_serves("apex"))
__getattr__ = module_getattr(__name__, NOT_SERVED, submodules=tuple(__all__))

import apex._extensions  # noqa: E402, F401 (from here on it refuses)
from apex import normalization, optimizers  # noqa: E402 (after __getattr__, which they may need)
