"""Which implementation a call gets, and why, in words.

The choice is made per call, from the device of the tensors and what this machine has shown that it can do; never at
import, never from a device's name. Three implementations exist:

- `triton`: our kernels;
- `torch`: the op's reference in plain PyTorch, which runs everywhere;
- `emulated`: quantised numerics reproduced without the hardware for them.

A fallback is announced once per reason in the log `fusestep`, shows in `fusestep.explain` and `fusestep doctor`, and
raises `StrictFallbackError` when FUSESTEP_STRICT=1. FUSESTEP_IMPL=torch asks for the reference everywhere: that is a
wish, not a fallback.
"""

from __future__ import annotations

import functools
import logging
import os
from dataclasses import dataclass
from typing import Literal

import torch

from fusestep import hardware
from fusestep.errors import UserError

Implementation = Literal["triton", "torch", "emulated"]

logger = logging.getLogger("fusestep")


class StrictFallbackError(RuntimeError):
    """FUSESTEP_STRICT=1 and this call would have fallen back."""


@dataclass(frozen=True)
class Choice:
    """An implementation, the reason for it in words, and whether it is less than what was hoped for."""

    implementation: Implementation
    reason: str
    is_fallback: bool = False


@functools.cache
def _asked_for_torch() -> bool:
    wish = os.environ.get("FUSESTEP_IMPL", "")
    if wish not in ("", "torch", "triton"):
        raise UserError(f"FUSESTEP_IMPL is {wish!r}; set it to torch, or to triton, or unset it.")
    return wish == "torch"


@functools.cache
def _strict() -> bool:
    wish = os.environ.get("FUSESTEP_STRICT", "0")
    if wish not in ("", "0", "1"):
        raise UserError(f"FUSESTEP_STRICT is {wish!r}; set it to 1 or 0.")
    return wish == "1"


@functools.lru_cache(maxsize=4096)
def explain_choice(op: str, device_type: str, index: int | None, unsupported: str | None = None) -> Choice:
    """The choice for an op on a device, without announcing or refusing it.

    Args:
        op: the op's name, for the reader.
        device_type, index: of the tensors, as in torch.device.
        unsupported: why the kernel cannot take these very arguments, or None.
    """
    if _asked_for_torch():
        return Choice("torch", "FUSESTEP_IMPL=torch")
    support = hardware.triton_support(device_type, index)
    if not support.ok:
        return Choice("torch", support.reason, is_fallback=True)
    if unsupported is not None:
        return Choice("torch", f"{op}: {unsupported}", is_fallback=True)
    return Choice("triton", support.reason)


_announced: set[str] = set()
_chosen: dict[tuple[str, torch.device, str | None], bool] = {}


def uses_triton(op: str, device: torch.device, unsupported: str | None = None) -> bool:
    """Whether this call runs our Triton kernel; announces a fallback once, or refuses it in strict mode.

    Called for every op, so an answer costs one dictionary look-up after the first.

    Raises: StrictFallbackError with FUSESTEP_STRICT=1 where the kernel cannot run.
    """
    key = (op, device, unsupported)
    known = _chosen.get(key)
    if known is not None:
        return known
    choice = explain_choice(op, device.type, device.index, unsupported)
    if choice.is_fallback:
        announce(op, choice.reason)
    answer = choice.implementation == "triton"
    _chosen[key] = answer
    return answer


def announce(op: str, reason: str) -> None:
    """Say once per reason that an op falls back, or refuse with FUSESTEP_STRICT=1.

    Raises: StrictFallbackError in strict mode.
    """
    if _strict():
        raise StrictFallbackError(
            f"{op} cannot run its Triton kernel: {reason}; unset FUSESTEP_STRICT to run the PyTorch reference instead."
        )
    if reason not in _announced:
        _announced.add(reason)
        logger.warning("%s runs as its PyTorch reference, as will every op for the same reason: %s", op, reason)


def reset() -> None:
    """Forget the environment, every choice and every announcement, so that the next call decides anew."""
    _asked_for_torch.cache_clear()
    _strict.cache_clear()
    explain_choice.cache_clear()
    _announced.clear()
    _chosen.clear()
    hardware.reset()
