"""ONNX export, which is refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fusestep.compat.report import not_served

__all__ = ["is_in_onnx_export_mode", "onnx_export"]


@contextmanager
def onnx_export(enabled: bool = False) -> Iterator[None]:
    """Nothing where it is not enabled. Raises: NotImplementedError where it is."""
    if enabled:
        raise not_served(
            "transformer_engine.pytorch.onnx_export(enabled=True)",
            "load the state dict, through fusestep.fp8.export_state_dict, into torch's own modules and export those",
        )
    yield


def is_in_onnx_export_mode() -> bool:
    """False."""
    return False
