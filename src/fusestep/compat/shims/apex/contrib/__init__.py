"""apex.contrib: what scripts for training transformers use of it; each part is imported when it is first asked for."""

from fusestep.compat.names import module_getattr

__all__ = ["clip_grad", "focal_loss", "group_norm", "layer_norm", "optimizers", "xentropy"]

NOT_SERVED = {
    "bottleneck": ("use torchvision's Bottleneck under torch.compile, channels_last", False),
    "conv_bias_relu": ("use nn.Conv2d and nn.ReLU under torch.compile, which fuses bias and activation", False),
    "cudnn_gbn": ("use torch.nn.SyncBatchNorm with a process_group", False),
    "fmha": ("use fusestep.nn.DotProductAttention, or torch.nn.functional.scaled_dot_product_attention", False),
    "gpu_direct_storage": ("use torch.cuda.gds, or torch.load with mmap=True", False),
    "groupbn": ("use torch.nn.SyncBatchNorm with a process_group", False),
    "index_mul_2d": ("use in1[idx] * in2 under torch.compile", False),
    "multihead_attn": ("use fusestep.nn.MultiheadAttention, or torch.nn.MultiheadAttention", False),
    "nccl_allocator": ("use torch.cuda.MemPool with the allocator of torch.distributed's NCCL backend", False),
    "openfold_triton": ("use fusestep.nn.FusedLayerNorm and torch's scaled_dot_product_attention with a bias", False),
    "peer_memory": ("use torch.distributed._symmetric_memory", False),
    "sparsity": ("use torch.sparse.to_sparse_semi_structured, or torchao.sparsity", False),
    "torchsched": ("use torch.compile as it is", False),
    "transducer": ("use torchaudio.functional.rnnt_loss", False),
}

__getattr__ = module_getattr(__name__, NOT_SERVED, submodules=tuple(__all__))
