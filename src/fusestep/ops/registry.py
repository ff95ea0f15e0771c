"""How an op becomes known: to torch, through torch.library, and to us, through a catalogue that the doctor walks.

One file of this package holds one op, and ends with `define(...)` for its raw schemas and one `catalogue(...)`.
Gradients are torch.autograd.Functions outside the raw ops: that costs the host about half of what
`torch.library.register_autograd` does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

_LIBRARY = torch.library.Library("fusestep", "DEF")


@dataclass(frozen=True)
class Proof:
    """An op compared with its reference on fresh random inputs. Errors are relative norms of the difference."""

    what: str
    error: float
    tolerance: float

    @property
    def ok(self) -> bool:
        return self.error <= self.tolerance  # NaN is never ok


@dataclass(frozen=True)
class Compilation:
    """One launch configuration of a kernel: all that `triton.compile` needs to build it for any GPU.

    `signature` gives the type of every run-time argument ('*fp32', 'i64', …) and 'constexpr' for the others;
    `divisible_by_16` names the arguments whose 16-byte alignment (or divisibility) the launch guarantees.
    """

    kernel: Any
    label: str
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any]
    num_warps: int
    num_stages: int = 3
    divisible_by_16: frozenset[str] = field(default_factory=frozenset)


@dataclass(frozen=True)
class Op:
    """What the doctor and the checks know of an op."""

    name: str
    summary: str
    prove: Callable[[torch.device], list[Proof]]
    compilations: Callable[[], Iterable[Compilation]]


CATALOGUE: dict[str, Op] = {}


def define(schema: str, implementation: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Register a raw op for CPU and CUDA and return its overload, bound so that a call skips the name look-up.

    `implementation` asks `dispatch.uses_triton` itself, so that one function holds the whole choice.
    Source of the pattern: a Library definition costs the host half of a custom_op wrapper (pytorch#177109).
    """
    name = schema[: schema.index("(")]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, implementation, "CPU")
    _LIBRARY.impl(name, implementation, "CUDA")
    torch.library.register_fake(f"fusestep::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.fusestep, name).default


def catalogue(op: Op) -> None:
    """Enter an op, so that the doctor proves it and the checks compile it."""
    CATALOGUE[op.name] = op


def relative_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    """‖value − reference‖ / ‖reference‖ in float64; NaN where either holds one, the plain norm where reference is 0."""
    value, reference = value.double(), reference.double()
    scale = reference.norm()
    return float((value - reference).norm() / (scale if scale > 0 else 1.0))
