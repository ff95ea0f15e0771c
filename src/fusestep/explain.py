"""What each module of a model runs as, and why."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from fusestep.errors import UserError
from fusestep.grouping import grouped
from fusestep.tables import counted, table

if TYPE_CHECKING:
    from torch import nn

    from fusestep.dispatch import Choice

SCHEMA = 1


@dataclass(frozen=True)
class ModuleChoice:
    """One module: its path in the model, its class, and the implementation that a call gets, with the reason."""

    path: str
    kind: str
    is_ours: bool
    implementation: str
    reason: str
    is_fallback: bool


@dataclass(frozen=True)
class Explanation:
    """What `explain` found; prints as a table in which repeated modules share a line."""

    modules: tuple[ModuleChoice, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain values with a `schema` number, one entry for each module."""
        return {"schema": SCHEMA, "modules": [asdict(module) for module in self.modules]}

    def __str__(self) -> str:
        if not self.modules:
            return "no module in this model computes anything"
        rows = [("module", "class", "runs as", "why")]
        rows += [
            (path or "(the model)", m.kind, m.implementation + " (fallback)" * m.is_fallback, m.reason)
            for path, (m, *_) in grouped(self.modules, lambda m: m.path, lambda m: (m.kind, m.implementation, m.reason))
        ]
        # Each module counts once, so that the four add up.
        foreign = sum(not m.is_ours for m in self.modules)
        fallbacks = sum(m.is_ours and m.is_fallback for m in self.modules)
        kernels = sum(m.is_ours and not m.is_fallback and m.implementation == "triton" for m in self.modules)
        rest = len(self.modules) - foreign - fallbacks - kernels
        return (
            f"{table(rows)}\n\n"
            f"Triton kernels: {kernels} of {counted(len(self.modules), 'module')}; fallbacks: {fallbacks}; "
            f"ours on PyTorch's kernels by intent: {rest}; PyTorch's own: {foreign}."
        )


def explain(model: nn.Module) -> Explanation:
    """List the implementation of each module of a model, and why; runs nothing.

    A module of ours answers for itself through its method `implementation()`, from the device of its parameters. Of
    the others, those that have no children, or parameters of their own, are listed as PyTorch's. A module that occurs
    twice is listed once.

    Raises: UserError if `model` is no module.
    """
    if not hasattr(model, "named_modules"):
        raise UserError(f"explain: {type(model).__name__} is no torch.nn.Module; pass the model itself.")
    from torch import nn

    containers = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
    found = []
    for path, module in model.named_modules():
        kind = type(module).__name__
        if _is_ours(module):
            choice: Choice = module.implementation()
            found.append(
                ModuleChoice(path, kind, True, choice.implementation, choice.reason, is_fallback=choice.is_fallback)
            )
        elif not isinstance(module, containers) and _computes(module):
            found.append(ModuleChoice(path, kind, False, "torch", "PyTorch's own", is_fallback=False))
    return Explanation(tuple(found))


def _computes(module: nn.Module) -> bool:
    """Whether a module does more than call its children: it has none, or parameters of its own."""
    return next(module.children(), None) is None or next(module.parameters(recurse=False), None) is not None


def _is_ours(module: nn.Module) -> bool:
    """Whether the module is of a class of ours, or derived from one, that answers for itself."""
    origins = (kind.__module__ for kind in type(module).__mro__)
    return hasattr(module, "implementation") and any(origin.startswith("fusestep.") for origin in origins)
