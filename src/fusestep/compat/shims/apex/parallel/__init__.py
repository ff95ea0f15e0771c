"""apex.parallel, which Apex has removed, over torch.distributed and torch.nn.

New code uses torch.nn.parallel.DistributedDataParallel and torch.nn.SyncBatchNorm by themselves.
"""

from apex.parallel.distributed import DistributedDataParallel, Reducer
from apex.parallel.LARC import LARC
from apex.parallel.optimized_sync_batchnorm import SyncBatchNorm, convert_syncbn_model, create_syncbn_process_group
from fusestep.compat.names import module_getattr

__all__ = [
    "LARC",
    "DistributedDataParallel",
    "Reducer",
    "SyncBatchNorm",
    "convert_syncbn_model",
    "create_syncbn_process_group",
]

NOT_SERVED = {"multiproc": ("use torchrun", False)}

__getattr__ = module_getattr(__name__, NOT_SERVED)
