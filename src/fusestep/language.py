"""Triton, or where it does not exist (macOS, Windows, a broken install) a stand-in that lets modules import.

Every file with a kernel takes `triton` and `tl` from here. The stand-in's `jit` returns the function unchanged: it
is never launched, because dispatch asks `hardware.triton_support` first.
"""

from __future__ import annotations

import os
import sys
from typing import Any

TRITON_IMPORT_ERROR: str | None = None

try:
    import triton
    import triton.language as tl
except Exception as error:  # a broken Triton raises far more than ImportError; the doctor shows what
    TRITON_IMPORT_ERROR = f"{type(error).__name__}: {error}"
    if not isinstance(error, ImportError):
        # torch asks for Triton too, when it makes an optimizer, and goes on without it after an ImportError alone.
        sys.modules["triton"] = None  # type: ignore[assignment]

    class _Missing:
        """Answers every attribute with itself and every call with its argument."""

        __version__ = "missing"

        def __getattr__(self, name: str) -> Any:
            return self

        def __call__(self, *args: Any, **_options: Any) -> Any:
            return args[0] if args else self

    triton = _Missing()
    tl = _Missing()

# Read once: Triton decides it for each kernel as the kernel is defined, so a later change would split the two.
_INTERPRETED = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


def interpreted() -> bool:
    """Whether kernels run through Triton's interpreter, as the environment said when they were defined."""
    return TRITON_IMPORT_ERROR is None and _INTERPRETED


__all__ = ["TRITON_IMPORT_ERROR", "interpreted", "tl", "triton"]
