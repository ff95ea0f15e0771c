"""What the machine has."""

from __future__ import annotations

import torch

from transformer_engine.pytorch.quantization import is_bf16_available

__all__ = ["get_cudnn_version", "get_device_compute_capability", "is_bf16_available", "is_bf16_compatible"]


def get_cudnn_version() -> tuple[int, int, int]:
    """(major, minor, patch) of cuDNN; zeros where torch is built without it."""
    version = torch.backends.cudnn.version() or 0
    # Since 9.0 major · 10000 + minor · 100 + patch, before major · 1000 + minor · 100 + patch.
    major, rest = divmod(version, 10000 if version >= 90000 else 1000)
    return major, *divmod(rest, 100)


def get_device_compute_capability() -> tuple[int, int]:
    """Of the current CUDA device; (0, 0) without one."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)


def is_bf16_compatible() -> bool:
    """Whether the device multiplies bf16."""
    return bool(is_bf16_available())
