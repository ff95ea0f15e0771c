"""apex.transformer: the functional part; the rest lives on in Megatron-Core."""

from apex.transformer import enums, functional
from apex.transformer.enums import AttnMaskType, AttnType, LayerType, ModelType
from fusestep.compat.names import module_getattr

__all__ = ["AttnMaskType", "AttnType", "LayerType", "ModelType", "enums", "functional"]

_MEGATRON = "use Megatron-Core's "

NOT_SERVED = {
    "amp": (f"{_MEGATRON}optimizer, or torch.amp.GradScaler", False),
    "layers": (f"{_MEGATRON}layers, or fusestep.nn.LayerNorm", False),
    "log_util": ("use Python's logging", False),
    "microbatches": (f"{_MEGATRON}num_microbatches_calculator", False),
    "parallel_state": (f"{_MEGATRON}parallel_state, or torch.distributed.device_mesh", False),
    "pipeline_parallel": (f"{_MEGATRON}pipeline_parallel, or torch.distributed.pipelining", False),
    "tensor_parallel": (f"{_MEGATRON}tensor_parallel, or torch.distributed.tensor.parallel", False),
    "testing": ("use torch.testing._internal.common_distributed", False),
    "utils": (f"{_MEGATRON}utils", False),
}

__getattr__ = module_getattr(__name__, NOT_SERVED)
