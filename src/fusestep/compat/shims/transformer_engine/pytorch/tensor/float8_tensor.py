"""Float8Tensor, by its path in 2.x."""

from __future__ import annotations

from transformer_engine.pytorch.tensor import Float8Tensor

__all__ = ["Float8Tensor"]
