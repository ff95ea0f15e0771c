"""QuantizedTensor, by its own path."""

from __future__ import annotations

from transformer_engine.pytorch.tensor import QuantizedTensor

__all__ = ["QuantizedTensor"]
