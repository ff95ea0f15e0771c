"""Functions of other libraries as a training step calls them, each at its fastest setting.

Everything of theirs is imported at the first call.

Legend: N rows or tokens, W width, V vocabulary.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fusestep.ladder.peers import load

#: Tokens whose logits exist at one time. Liger's own choice is as many logits as the input has elements, which is far
#: fewer: less memory, and several times as long for a wide vocabulary.
CHUNK = 4096


def liger_loss(x: Tensor, weight: Tensor, target: Tensor, *, chunk: int | None = CHUNK) -> Tensor:
    """Liger's fused linear cross entropy, the mean over tokens.

    Args:
        x: (N, W); weight: (V, W); target: (N,) of int64.
        chunk: tokens at a time, rounded as Liger does; None for its own choice, which versions before 0.8.5 always
            make.
    """
    loss = _liger_loss()
    options: dict[str, Any] = {}
    if chunk is not None and "chunk_mem_const" in inspect.signature(loss).parameters:
        # It cuts N into ceil(V / (const * W)) chunks.
        pieces = -(-x.shape[0] // chunk)
        options["chunk_mem_const"] = -(-weight.shape[0] // (pieces * weight.shape[1]))
    mean: Tensor = loss(x, weight, target, **options)
    return mean


@functools.cache
def _liger_loss() -> Callable[..., Any]:
    found: Callable[..., Any] = load("liger_kernel.transformers.functional").liger_fused_linear_cross_entropy
    return found


def quack_loss(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """QuACK's chunked linear cross entropy, the mean over tokens: x (N, W), weight (V, W), target (N,) of int64.

    N is a multiple of 8. Where the operands are BF16 and V is a multiple of 128, QuACK takes its fastest kernels by
    itself.
    """
    mean: Tensor = _quack_loss()(x, weight, target, chunk_size=CHUNK, reduction="mean")
    return mean


@functools.cache
def _quack_loss() -> Callable[..., Any]:
    _name_what_cannot_be_fingerprinted()
    found: Callable[..., Any] = load("quack.linear_cross_entropy").chunked_linear_cross_entropy
    return found


def _name_what_cannot_be_fingerprinted() -> None:
    """Newer CUTLASS hands QuACK values that it cannot fingerprint for its cache; name those by their type."""
    try:
        identity: Any = load("quack.gemm_runtime.identity")
    except ModuleNotFoundError as problem:
        if not str(problem.name).startswith("quack.gemm_runtime"):
            raise
        return  # an older version, which fingerprints nothing
    key = identity.semantic_value_key

    def named(value: Any, seen: Any = None) -> Any:
        try:
            return key(value, seen)
        except TypeError:
            return ("opaque", str(type(value)))

    identity.semantic_value_key = named


def quack_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """QuACK's LayerNorm over the last dimension with its two passes: x (..., W), weight and bias (W,) of float32."""
    flat: Tensor = _QuackLayerNorm.apply(  # type: ignore[no-untyped-call]
        x.reshape(-1, x.shape[-1]), weight, bias, eps
    )
    return flat.view_as(x)


@functools.cache
def _quack_norms() -> ModuleType:
    return load("quack.rmsnorm")


class _QuackLayerNorm(torch.autograd.Function):
    """QuACK has LayerNorm's two passes and no gradient over them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        y, rstd, mean = _quack_norms().layernorm_fwd(x, weight, bias, eps=eps, return_rstd=True, return_mean=True)
        ctx.save_for_backward(x, weight, rstd, mean)
        out: Tensor = y
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight, rstd, mean = ctx.saved_tensors
        dx, dweight, dbias = _quack_norms().layernorm_bwd(x, weight, gradient.contiguous(), rstd, mean)
        return dx, dweight, dbias, None
