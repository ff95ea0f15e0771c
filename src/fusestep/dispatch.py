"""Which implementation a call gets, and why, in words.

The choice is made per call, from the device of the tensors and what this machine has shown that it can do; never at
import, never from a device's name. Four implementations exist:

- `triton`: our kernels;
- `torch`: the op's reference in plain PyTorch, which runs everywhere;
- `native`: the device's own FP8 product, through torch;
- `emulated`: quantised numerics reproduced without the hardware for them.

A fallback is announced once per reason in the log `fusestep`, shows in `fusestep.explain` and `fusestep doctor`, and
raises `StrictFallbackError` when FUSESTEP_STRICT=1.

Two environment variables are read at the first call and kept for the process:

- FUSESTEP_IMPL=torch asks for the reference everywhere. That is a wish, not a fallback: it is not announced, and
  strict mode accepts it. Unset: our kernels wherever they run.
- FUSESTEP_STRICT=1 refuses every fallback, on CPU tensors too. Unset or 0: fallbacks are announced.

Op implementations ask `uses_triton`, or `multiplies_fp8`, themselves, behind torch.library, so that torch.compile never
traces the question.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch

from fusestep import hardware, precision
from fusestep.errors import UserError
from fusestep.precision import Scaling

Implementation = Literal["triton", "torch", "native", "emulated"]

logger = logging.getLogger("fusestep")


class StrictFallbackError(UserError):
    """FUSESTEP_STRICT=1 and this call would have fallen back."""


@dataclass(frozen=True)
class Choice:
    """An implementation, the reason for it in words, and whether it is less than what was hoped for."""

    implementation: Implementation
    reason: str
    is_fallback: bool = False


@functools.cache
def asked_for_torch() -> bool:
    """Whether FUSESTEP_IMPL asks for the reference everywhere.

    Raises: UserError for a value that it does not have.
    """
    wish = os.environ.get("FUSESTEP_IMPL", "")
    if wish not in ("", "torch"):
        raise UserError(
            f"FUSESTEP_IMPL is {wish!r}; set it to torch for the PyTorch reference, or unset it for Triton where it "
            "runs (FUSESTEP_STRICT=1 then refuses fallbacks)."
        )
    return wish == "torch"


@functools.cache
def strict() -> bool:
    """Whether FUSESTEP_STRICT refuses fallbacks.

    Raises: UserError for a value that it does not have.
    """
    wish = os.environ.get("FUSESTEP_STRICT", "")
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
    if asked_for_torch():
        return Choice("torch", "FUSESTEP_IMPL=torch")
    support = hardware.triton_support(device_type, index)
    if not support.ok:
        return Choice("torch", support.reason, is_fallback=True)
    if unsupported is not None:
        return Choice("torch", f"{op}: {unsupported}", is_fallback=True)
    return Choice("triton", support.reason)


@functools.lru_cache(maxsize=4096)
def explain_product(device_type: str, index: int | None, scaling: Scaling = "tensor") -> Choice:
    """The choice for products of FP8 matrices on a device: `native` or `emulated`, without announcing or refusing it.

    Args:
        device_type, index: of the tensors, as in torch.device.
        scaling: what shares a scale.
    """
    if asked_for_torch():
        return Choice("emulated", "FUSESTEP_IMPL=torch")
    if device_type != "cuda":
        reason = f"FP8 products run on CUDA devices, these tensors are on {device_type}"
        return Choice("emulated", reason, is_fallback=True)
    if not hardware.cuda_support().ok:
        return Choice("emulated", hardware.cuda_support().reason, is_fallback=True)
    support = precision.fp8_support(torch.cuda.current_device() if index is None else index, scaling)
    return Choice("native", support.reason) if support.ok else Choice("emulated", support.reason, is_fallback=True)


# Backward runs on autograd's own threads, so the first call of an op may come from two at once.
_lock = threading.RLock()
_announced: set[str] = set()
_chosen: dict[tuple[str, torch.device], bool] = {}
_multiplies: dict[tuple[str, torch.device, Scaling], bool] = {}
_decided: dict[str, set[Choice]] = {}
_examining = False


def uses_triton(op: str, device: torch.device, unsupported: str | None = None) -> bool:
    """Whether this call runs our Triton kernel; announces a fallback once, or refuses it in strict mode.

    Called for every op, so an answer costs one dictionary look-up after the first.

    Args:
        op: the op's name, for the reader.
        device: of the tensors.
        unsupported: why the kernel cannot take these very arguments, or None; announced once for each wording, so
            let it name the limit, not the call's sizes.
    Raises: StrictFallbackError with FUSESTEP_STRICT=1 where the kernel cannot run.
    """
    if unsupported is None:
        known = _chosen.get((op, device))
        if known is not None:
            return known
    with _lock:
        choice = explain_choice(op, device.type, device.index, unsupported)
        answer = choice.implementation == "triton"
        if _examining:
            return answer
        if choice.is_fallback:
            announce(op, choice.reason)
        _decided.setdefault(op, set()).add(choice)
        if unsupported is None:
            _chosen[op, device] = answer
    return answer


def multiplies_fp8(op: str, device: torch.device, scaling: Scaling = "tensor") -> bool:
    """Whether this device multiplies FP8 matrices itself; announces emulation once, or refuses it in strict mode.

    Args:
        op: the op's name, for the reader.
        device: of the matrices.
        scaling: what shares a scale.
    Raises: StrictFallbackError with FUSESTEP_STRICT=1 where the product would be emulated.
    """
    known = _multiplies.get((op, device, scaling))
    if known is not None:
        return known
    with _lock:
        choice = explain_product(device.type, device.index, scaling)
        answer = choice.implementation == "native"
        if _examining:
            return answer
        if choice.is_fallback:
            announce(op, choice.reason, choice.implementation)
        _decided.setdefault(op, set()).add(choice)
        _multiplies[op, device, scaling] = answer
    return answer


def announce(op: str, reason: str, implementation: Implementation = "torch") -> None:
    """Say once per reason that an op falls back, or refuse with FUSESTEP_STRICT=1.

    Args:
        implementation: what it falls back to, "torch" or "emulated".
    Raises: StrictFallbackError in strict mode.
    """
    if implementation == "emulated":
        says, cannot, mend = (
            "emulates FP8, with the same quantised numbers and no gain in speed",
            "cannot multiply in FP8 natively",
            "to emulate FP8, or train in bf16",
        )
    else:
        says, cannot, mend = (
            "runs as its PyTorch reference, as does every op that meets the same",
            "cannot run its Triton kernel",
            "to run the PyTorch reference instead",
        )
    announce_fallback(op, says, reason, cannot, mend)


def announce_fallback(who: str, says: str, reason: str, cannot: str, mend: str) -> None:
    """Say once per reason that something is less than what was hoped for, or refuse with FUSESTEP_STRICT=1.

    Args:
        who, says: the warning is "{who} {says}: {reason}".
        cannot, mend: the refusal is "{who} {cannot}: {reason}; unset FUSESTEP_STRICT {mend}."
    Raises: StrictFallbackError in strict mode.
    """
    if strict():
        raise StrictFallbackError(f"{who} {cannot}: {reason}; unset FUSESTEP_STRICT {mend}.")
    with _lock:
        if reason in _announced:
            return
        _announced.add(reason)
    logger.warning("%s %s: %s", who, says, reason)


def decided() -> dict[str, frozenset[Choice]]:
    """What each op that was called in this process has run as, examinations left out."""
    with _lock:
        return {op: frozenset(choices) for op, choices in _decided.items()}


@contextmanager
def examination() -> Iterator[None]:
    """Within it fallbacks are neither announced nor refused, so that the doctor can look at each of them."""
    global _examining
    with _lock:
        before, _examining = _examining, True
    try:
        yield
    finally:
        _examining = before


def is_examining() -> bool:
    """Whether the calls of now are those of an examination."""
    return _examining


def one_device(op: str, **tensors: torch.Tensor | None) -> torch.device:
    """The device that all of an op's tensors are on.

    Raises: UserError naming the first tensor that is elsewhere, before anything is launched: a kernel that is handed
        another device's address reads whatever lies there.
    """
    first, device = "", None
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if device is None:
            first, device = name, tensor.device
        elif tensor.device != device:
            raise UserError(f"{op}: {name} is on {tensor.device} and {first} on {device}; move them to one device.")
    if device is None:
        raise TypeError(f"{op}: one_device was given no tensor")
    return device


def reset() -> None:
    """Forget the environment, every choice and every announcement, so that the next call decides anew."""
    asked_for_torch.cache_clear()
    strict.cache_clear()
    explain_choice.cache_clear()
    explain_product.cache_clear()
    _announced.clear()
    _chosen.clear()
    _multiplies.clear()
    _decided.clear()
    hardware.reset()
    precision.reset()
