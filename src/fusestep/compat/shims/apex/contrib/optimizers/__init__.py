"""apex.contrib.optimizers: what apex.optimizers and torch have taken the place of."""

from fusestep.compat.names import module_getattr

__all__: list[str] = []

_SHARDED = "use torch.distributed.fsdp.fully_shard with apex.optimizers."

NOT_SERVED = {
    "DistributedFusedAdam": (f"{_SHARDED}FusedAdam", False),
    "DistributedFusedLAMB": (f"{_SHARDED}FusedLAMB", False),
    "FP16_Optimizer": ("use apex.optimizers.FusedAdam(master_weights=True) with torch.amp.GradScaler", False),
    "FusedAdam": ("use apex.optimizers.FusedAdam, which leaves unscaling to torch.amp.GradScaler", False),
    "FusedLAMB": ("use apex.optimizers.FusedLAMB", False),
    "FusedSGD": ("use apex.optimizers.FusedSGD", False),
    "distributed_fused_adam": (f"{_SHARDED}FusedAdam", False),
    "distributed_fused_lamb": (f"{_SHARDED}FusedLAMB", False),
    "fp16_optimizer": ("use apex.optimizers.FusedAdam(master_weights=True) with torch.amp.GradScaler", False),
    "fused_adam": ("use apex.optimizers.FusedAdam, which leaves unscaling to torch.amp.GradScaler", False),
    "fused_lamb": ("use apex.optimizers.FusedLAMB", False),
    "fused_sgd": ("use apex.optimizers.FusedSGD", False),
}

__getattr__ = module_getattr(__name__, NOT_SERVED)
