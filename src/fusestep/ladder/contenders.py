"""What stands beside the rungs: the best of native PyTorch in each precision, and other libraries.

A contender has attempts, the best one first: where an attempt does not run, the next one does, in another process, and
the report says why. None of them is a rung, and no gain is counted from one contender to the next.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

import torch

from fusestep.errors import UserError
from fusestep.ladder.rungs import Precision, Recipe

#: Longest that the process of a contender may take, in seconds: one that hangs must not take the rungs with it.
LIMIT_S = 600.0


@dataclass(frozen=True)
class Contender:
    """One answer that is not ours.

    Attributes:
        name: "native-bf16", "te", …
        kind: of which of the two kinds it is.
        summary: what it is, in a few words.
        attempts: recipes, the best first.
        library: the peer whose parts it is made of; "" for native PyTorch.
    """

    name: str
    kind: Literal["native", "peer"]
    summary: str
    attempts: tuple[Recipe, ...]
    library: str = ""


#: The plain form of the GPT with torch's own parts: what a good PyTorch programmer writes.
_PLAIN = Recipe(form="plain", optimizer="torch-fused")

#: Native PyTorch in each precision that it has: name, summary, eager recipe.
_NATIVES: dict[str, tuple[str, Recipe]] = {
    "native-fp32": ("FP32", _PLAIN),
    "native-amp": ("torch.amp BF16, FP32 weights", replace(_PLAIN, precision="bf16")),
    "native-bf16": ("all BF16: weights, gradients and moments too", replace(_PLAIN, precision="bf16", weights="bf16")),
}

#: Which native a rung is set against. PyTorch by itself trains nothing in FP8: its best is BF16.
NATIVE_OF: dict[Precision, str] = {"fp32": "native-fp32", "bf16": "native-amp", "fp8": "native-amp"}

_BF16 = replace(_PLAIN, precision="bf16")
_FP8 = replace(_PLAIN, precision="fp8")

#: Each peer's contenders; where there are several, the fastest one is the peer's column.
_PEERS: dict[str, tuple[Contender, ...]] = {
    "apex": (
        Contender(
            "apex",
            "peer",
            "Apex's FusedAdam and FusedLayerNorm, torch.amp BF16, on the plain form",
            (replace(_BF16, optimizer="fused", peer="apex"),),
            "apex",
        ),
        Contender(
            "apex-seed",
            "peer",
            "Apex's FusedAdam and FusedLayerNorm, torch.amp BF16, on nn.MultiheadAttention",
            (replace(_BF16, form="seed", optimizer="fused", peer="apex"),),
            "apex",
        ),
    ),
    "te": (
        Contender(
            "te-fp8",
            "peer",
            "Transformer Engine's TransformerLayer (bshd), FP8 delayed scaling, its FusedAdam with FP32 masters",
            (replace(_FP8, weights="bf16", optimizer="fused", peer="te"),),
            "te",
        ),
        Contender(
            "te-fp8-graph",
            "peer",
            "the same, its layers by make_graphed_callables",
            (replace(_FP8, weights="bf16", optimizer="fused", graph=True, peer="te"),),
            "te",
        ),
    ),
    "liger": (
        Contender(
            "liger",
            "peer",
            "Liger's LayerNorm and fused linear cross entropy, torch's fused AdamW, torch.amp BF16, whole-step graph",
            (replace(_BF16, loss="fused", peer="liger", graph=True), replace(_BF16, loss="fused", peer="liger")),
            "liger",
        ),
    ),
    "torchao": (
        Contender(
            "torchao",
            "peer",
            "torchao's FP8 linear layers (tensorwise, dynamic), torch.compile, torch's fused AdamW, whole-step graph",
            (
                replace(_FP8, compiled=True, peer="torchao", graph=True),
                replace(_FP8, compiled=True, peer="torchao"),
            ),
            "torchao",
        ),
    ),
    "quack": (
        Contender(
            "quack",
            "peer",
            "QuACK's LayerNorm and linear cross entropy, torch's fused AdamW, torch.amp BF16, whole-step graph",
            (replace(_BF16, loss="fused", peer="quack", graph=True), replace(_BF16, loss="fused", peer="quack")),
            "quack",
        ),
    ),
}

#: What --peers may name.
PEERS: tuple[str, ...] = tuple(_PEERS)

#: Of the contenders that an own model's parts can be swapped for; the others are made of the built-in GPT's blocks.
PEERS_OF_OWN_MODELS = ("apex", "liger", "torchao")


def native_names(text: str, precisions: Iterable[Precision]) -> tuple[str, ...]:
    """The natives that --natives means: "auto", "none", or names.

    auto is the ones that rungs of these precisions are set against, and all-BF16 beside native-amp.

    Raises: UserError for a name that is none of them.
    """
    if text == "none":
        return ()
    if text == "auto":
        wanted = {NATIVE_OF[precision] for precision in precisions}
        return tuple(n for n in _NATIVES if n in wanted or (n == "native-bf16" and "native-amp" in wanted))
    names = [part.strip() for part in text.split(",") if part.strip()]
    for name in names:
        if name not in _NATIVES:
            raise UserError(f"--natives names {name!r}; choose auto, none, or of {', '.join(_NATIVES)}.")
    return tuple(name for name in _NATIVES if name in names)


def peer_names(text: str) -> tuple[str, ...]:
    """The peers that --peers means: "" for none, "all", or names.

    Raises: UserError for a name that is none of them.
    """
    names = list(PEERS) if text == "all" else [part.strip() for part in text.split(",") if part.strip()]
    for name in names:
        if name not in _PEERS:
            raise UserError(f"--peers names {name!r}; choose of {', '.join(PEERS)}, or all.")
    return tuple(name for name in PEERS if name in names)


def native(name: str, device: torch.device, *, compiled: bool) -> Contender:
    """A native by its name: on a GPU with the whole step in one graph, with torch.compile where it is asked for."""
    what, eager = _NATIVES[name]
    graphed = replace(eager, graph=True)
    attempts = [graphed, eager] if device.type == "cuda" else [eager]
    if compiled:
        attempts = [*(replace(one, compiled=True) for one in attempts), *attempts]
    return Contender(name, "native", f"PyTorch's own: {what}, fused AdamW, {_how(attempts[0])}", tuple(attempts))


def _how(recipe: Recipe) -> str:
    ways = [*(["torch.compile"] if recipe.compiled else []), *(["one CUDA graph"] if recipe.graph else [])]
    return " and ".join(ways) or "run eagerly"


def contenders_of_peer(name: str, device: torch.device, *, is_own: bool = False) -> tuple[Contender, ...]:
    """What a peer is measured as on a device: graphs on GPUs alone, and a model of the user's in its own form alone."""
    found = []
    for contender in _PEERS[name]:
        attempts = tuple(one for one in contender.attempts if device.type == "cuda" or not one.graph)
        if attempts and not (is_own and attempts[0].form == "seed"):
            found.append(replace(contender, attempts=attempts))
    return tuple(found)


def can_compile() -> bool:
    """Whether torch.compile finds the C++ compiler that it needs for a CPU."""
    return any(shutil.which(name) for name in ("g++", "clang++", "c++"))
