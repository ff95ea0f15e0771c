"""Transformer Engine's names over fusestep's modules: what `import transformer_engine` finds under `fusestep run`.

Module paths, names, order of arguments, layouts of parameters and state dicts are those of Transformer Engine 2.x, and
1.x's spellings are taken by keyword. Numerics are fusestep's. docs/transformer-engine.md lists what is served.
"""

from __future__ import annotations

from fusestep.compat.names import module_getattr

#: The interface that is spoken, and by whom.
__version__ = "2.20.0+fusestep"

__all__ = ["__version__", "common", "pytorch"]

NOT_SERVED = {
    "debug": ("look at scales and amaxes with `fusestep inspect`, and count saturation by fp8.count_saturation", False),
    "jax": ("fusestep serves PyTorch; install the real transformer_engine for JAX", False),
    "plugins": ("use transformer_engine.pytorch", False),
}
__getattr__ = module_getattr(__name__, NOT_SERVED, submodules=("common", "pytorch"))
