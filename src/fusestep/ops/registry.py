"""How an op becomes known: to torch, through torch.library, and to us, through a catalogue that the doctor walks.

One file of this package holds one op, and ends with `define(...)` for its raw schemas and one `catalogue(...)`.
Gradients are torch.autograd.Functions outside the raw ops: that costs the host about half of what
`torch.library.register_autograd` does.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fusestep import dispatch
from fusestep.transforms import is_mapped

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

    `signature` gives the type of every run-time argument ('*fp32', 'i64', …) and 'constexpr' for the others, whose
    values are in `constexprs`; `divisible_by_16` names the run-time arguments whose 16-byte alignment (or
    divisibility) the launch guarantees. `minimum_capability` is the least of compute capability, as 89, on which
    dispatch launches it; `maximum_registers`: of a thread, where the launch limits them.

    Raises: ValueError where these do not fit the kernel's parameters.
    """

    kernel: Any
    label: str
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any]
    num_warps: int
    num_stages: int = 3
    divisible_by_16: frozenset[str] = field(default_factory=frozenset)
    minimum_capability: int = 80
    maximum_registers: int | None = None

    def __post_init__(self) -> None:
        # Triton keeps the Python function in `fn`; without Triton the kernel is that function.
        parameters = set(inspect.signature(getattr(self.kernel, "fn", self.kernel)).parameters)
        constant = {name for name, kind in self.signature.items() if kind == "constexpr"}
        for what, named, wanted in (
            ("signature", set(self.signature), parameters),
            ("constexprs", set(self.constexprs), constant),
            ("divisible_by_16", set(self.divisible_by_16), self.divisible_by_16 & (parameters - constant)),
        ):
            if named != wanted:
                odd = ", ".join(sorted(named ^ wanted))
                raise ValueError(f"{self.label}: {what} and the kernel's parameters do not agree about {odd}")


@dataclass(frozen=True)
class Op:
    """What the doctor and the checks know of an op.

    Attributes:
        name: as in `fusestep doctor --require NAME`.
        summary: what it computes, in a few words.
        prove: runs the op on a device, forward and backward, and compares it with its reference.
        compilations: every launch configuration of every kernel of the op.
        is_product: whether it is a product of FP8 matrices, which runs as `native` or `emulated`, not in a kernel.
    """

    name: str
    summary: str
    prove: Callable[[torch.device], list[Proof]]
    compilations: Callable[[], Iterable[Compilation]]
    is_product: bool = False


CATALOGUE: dict[str, Op] = {}


def define(schema: str, implementation: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Register a raw op for every device and return its overload, bound so that a call skips the name look-up.

    `implementation` asks `dispatch.uses_triton` itself, so that one function holds the whole choice, and the
    reference serves the devices that no kernel of ours knows. `fake` gives the outputs' shapes for tracing and for
    meta tensors.
    Source of the pattern: a Library definition costs the host half of a custom_op wrapper (pytorch#177109).
    """
    name = schema[: schema.index("(")]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fusestep::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.fusestep, name).default


def is_plain(x: torch.Tensor) -> bool:
    """Whether nothing watches or traces the call, so that the op's implementation can be called without the op.

    That spares the host a third of the call. Tracing, fake tensors, other subclasses and dispatch modes (activation
    checkpointing that selects ops, counters of operations) see the op.
    """
    return (type(x) is torch.Tensor or type(x) is torch.nn.Parameter) and torch._C._len_torch_dispatch_stack() == 0


#: Why an op runs as its reference within a transform.
TRANSFORMED = "transforms of torch.func, batched gradients and forward-mode gradients work on PyTorch's own operations"


def announce_transformed(op: str) -> None:
    """Say once that an op, whose kernel would have run, runs as its reference within a transform."""
    dispatch.announce(op, TRANSFORMED)


def runs_mapped(op: str, dy: torch.Tensor) -> bool:
    """Whether a backward has to consist of PyTorch's own operations; said once where the op's kernel would have run."""
    if torch.compiler.is_compiling() or not is_mapped(dy):
        return False
    if dispatch.uses_triton(op, dy.device):
        announce_transformed(op)
    return True


def shows_gradient(op: str, dy: torch.Tensor) -> bool:
    """As `runs_mapped`, and with create_graph=True, which differentiates the backward."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        return True
    return runs_mapped(op, dy)


def catalogue(op: Op) -> None:
    """Enter an op, so that the doctor proves it and the checks compile it.

    Raises: ValueError if the name is taken.
    """
    if op.name in CATALOGUE:
        raise ValueError(f"two ops are named {op.name}")
    CATALOGUE[op.name] = op


def load_catalogue() -> Mapping[str, Op]:
    """Import every op of the package, and return the catalogue, which is then whole, by name."""
    package = importlib.import_module(__package__)
    for module in pkgutil.iter_modules(package.__path__, prefix=f"{__package__}."):
        importlib.import_module(module.name)
    return dict(sorted(CATALOGUE.items()))


def relative_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    """‖value − reference‖ / ‖reference‖ in float64; NaN where either holds one, the plain norm where reference is 0.

    Raises: ValueError if the shapes differ; they are not broadcast.
    """
    if value.shape != reference.shape:
        raise ValueError(f"value is {tuple(value.shape)}, reference {tuple(reference.shape)}")
    value, reference = value.double(), reference.double()
    scale = reference.norm()
    return float((value - reference).norm() / (scale if scale > 0 else 1.0))
