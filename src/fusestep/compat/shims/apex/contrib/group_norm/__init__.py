"""apex.contrib.group_norm."""

from apex.contrib.group_norm.group_norm import GroupNorm

__all__ = ["GroupNorm"]
