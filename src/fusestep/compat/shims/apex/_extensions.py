"""Extension modules that scripts probe for and that are not here: the import raises, and says what serves instead."""

from fusestep.compat.names import module_getattr

_TORCH = "which PyTorch's own operations serve"

NOT_SERVED = {
    "distributed_adam_cuda": ("use torch.distributed.fsdp.fully_shard with apex.optimizers.FusedAdam", False),
    "distributed_lamb_cuda": ("use torch.distributed.fsdp.fully_shard with apex.optimizers.FusedLAMB", False),
    "fast_layer_norm": ("use apex.contrib.layer_norm.FastLayerNorm, which fusestep's norm kernels serve", False),
    "fast_multihead_attn": ("use fusestep.nn.MultiheadAttention", False),
    "fmhalib": ("use fusestep.nn.DotProductAttention", False),
    "focal_loss_cuda": (f"use apex.contrib.focal_loss, {_TORCH}", False),
    "fused_adam_cuda": ("use apex.optimizers.FusedAdam", False),
    "fused_dense_cuda": (f"use apex.fused_dense, {_TORCH}", False),
    "fused_lamb_cuda": ("use apex.optimizers.FusedLAMB", False),
    "fused_rotary_positional_embedding": (
        "use apex.transformer.functional.fused_apply_rotary_pos_emb, which fusestep's rotary kernel serves",
        False,
    ),
    "fused_weight_gradient_mlp_cuda": (
        "use fusestep.optim.accumulate_in_fp32, which sums gradients of 16-bit weights in fp32",
        False,
    ),
    "generic_scaled_masked_softmax_cuda": (f"use apex.transformer.functional, {_TORCH}", False),
    "group_norm_cuda": (f"use apex.contrib.group_norm, {_TORCH}", False),
    "mlp_cuda": (f"use apex.mlp, {_TORCH}", False),
    "scaled_masked_softmax_cuda": (f"use apex.transformer.functional, {_TORCH}", False),
    "scaled_softmax_cuda": (f"use apex.transformer.functional, {_TORCH}", False),
    "scaled_upper_triang_masked_softmax_cuda": (f"use apex.transformer.functional, {_TORCH}", False),
    "syncbn": ("use torch.nn.SyncBatchNorm", False),
    "xentropy_cuda": (
        "use apex.contrib.xentropy.SoftmaxCrossEntropyLoss, which fusestep's cross entropy kernel serves",
        False,
    ),
}

#: Of top-level names, which have no module above them.
refuse = module_getattr("", NOT_SERVED)
