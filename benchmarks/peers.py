"""Other libraries on the same work, where they are installed: Liger, QuACK and torchao, each at its best setting.

Nothing of ours needs them. One that is not installed has no rows, and the results say so.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fusestep.ladder.peer_functions import CHUNK, liger_loss, quack_layer_norm, quack_loss
from fusestep.ladder.peers import load as load_anew
from fusestep.ladder.peers import place_of, version_of

LIBRARIES = ("liger", "quack", "torchao")
NOT_INSTALLED = "not installed"

#: Looked up within what is timed, so once.
load = functools.cache(load_anew)


def versions() -> dict[str, str]:
    """The version of each library, or "not installed", as for one that lacks what it needs.

    Liger and QuACK run on CUTLASS's DSL where there is one, so its version is told too.
    """
    found = {name: (version_of(name) or "unknown version") if has(name) else NOT_INSTALLED for name in LIBRARIES}
    cutlass = next(iter(importlib.metadata.distributions(name="nvidia-cutlass-dsl")), None)
    for name in ("liger", "quack"):
        if cutlass is not None and found[name] != NOT_INSTALLED:
            found[name] += f", CUTLASS DSL {cutlass.version}"
    return found


def has(name: str) -> bool:
    """Whether a library is installed. QuACK also needs the folder that CUTLASS DSL's wheel keeps its package in."""
    if place_of(name) is None:
        return False
    if name == "quack" and importlib.util.find_spec("cutlass") is None:
        found = importlib.util.find_spec("nvidia_cutlass_dsl")
        places = found.submodule_search_locations if found is not None else None
        for place in places or ():
            for folder in ("python_packages", "dsl_packages"):
                if (Path(place) / folder).is_dir():
                    sys.path.append(str(Path(place) / folder))
        importlib.invalidate_caches()
        return importlib.util.find_spec("cutlass") is not None
    return True


def norms(kind: str, width: int, eps: float, device: torch.device) -> dict[str, Callable[[], nn.Module]]:
    """Norms of a width, bf16 in and out, as modules with a weight (and a bias for layer_norm)."""
    made: dict[str, Callable[[], nn.Module]] = {}
    if has("liger"):
        made["liger"] = lambda: _liger_norm(kind, width, eps).to(device, torch.bfloat16)
    if has("quack"):
        made["quack"] = lambda: _QuackNorm(kind, width, eps, device)
    return made


def _liger_norm(kind: str, width: int, eps: float) -> nn.Module:
    transformers = load("liger_kernel.transformers")
    # in_place=False: the upstream gradient belongs to the caller, and is used again by the next call.
    options: dict[str, Any] = {} if kind == "layer_norm" else {"in_place": False}
    name = "LigerLayerNorm" if kind == "layer_norm" else "LigerRMSNorm"
    made: nn.Module = getattr(transformers, name)(width, eps=eps, **options)
    return made


class _QuackNorm(nn.Module):
    """QuACK's norms, whose parameters are fp32."""

    def __init__(self, kind: str, width: int, eps: float, device: torch.device) -> None:
        super().__init__()
        self.kind, self.eps = kind, eps
        self.weight = nn.Parameter(torch.ones(width, device=device))
        self.bias = nn.Parameter(torch.zeros(width, device=device)) if kind == "layer_norm" else None

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is not None:
            return quack_layer_norm(x, self.weight, self.bias, self.eps)
        made: Tensor = load("quack.rmsnorm").rmsnorm(x, self.weight, eps=self.eps)
        return made


def losses() -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """Head product and mean loss of x (tokens, width), weight (V, width), target (tokens,)."""
    made: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {}
    if has("liger"):
        made["liger"] = functools.partial(liger_loss, chunk=None)
        made[f"liger, {CHUNK} tokens at a time"] = liger_loss
    if has("quack"):
        made["quack"] = quack_loss
    return made


def cross_entropies() -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """Mean loss of logits (tokens, V)."""
    return {"quack": _quack_cross_entropy} if has("quack") else {}


def _quack_cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    loss: Tensor = load("quack.cross_entropy").cross_entropy(logits, target)
    return loss


def float8(module: nn.Module) -> nn.Module:
    """torchao's FP8 training with one scale a tensor, computed anew, compiled: its fastest recipe on a Hopper chip."""
    float8 = load("torchao.float8")
    config = float8.Float8LinearConfig.from_recipe_name("tensorwise")
    float8.convert_to_float8_training(module, config=config)
    compiled: nn.Module = torch.compile(module, dynamic=False)  # type: ignore[assignment]
    return compiled
