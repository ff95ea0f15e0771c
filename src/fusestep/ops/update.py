"""What the ops that update parameters share, beside the table of tensors (Adam's own stand in adam.py).

A rule is one optimizer's formula with its kernels and its reference. Its op (`update_once`) builds a table for a single
call; its optimizer keeps tables between steps (optim/update_plan.py). Rows of the table are those of Adam's: where a
rule has one state of the parameter's shape or none, the addresses of the others are 0.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from fusestep.dispatch import one_device, uses_triton
from fusestep.ops.adam_kernel import DTYPE_PAIRS, AdamSignature, Master
from fusestep.ops.adam_reference import HYPER_ROW
from fusestep.ops.dtypes import KERNEL_DTYPES, SHORT_NAMES
from fusestep.ops.gradient_norm import to_device
from fusestep.ops.registry import Compilation
from fusestep.ops.tensor_table import (
    BLOCK,
    COMMON_ROWS,
    TABLE_SIGNATURE,
    TableEntry,
    TensorTable,
    build_table,
    entry,
    upload,
)

#: Rows of a table, for PyTorch (kernels have constants of their own): a parameter's gradient, group and step count.
GRADIENT_ROW, GROUP_ROW, STEP_ROW = 0, COMMON_ROWS + 5, COMMON_ROWS + 6

#: Warps a program; it takes BLOCK elements.
WARPS = 4


class Hyper(Protocol):
    """What one parameter group asks of a rule; a dataclass with the field `lr`."""

    def row(self) -> list[float]:
        """HYPER_ROW floats as the kernels read them, lr first."""
        ...


@dataclass(frozen=True)
class UpdateSignature(AdamSignature):
    """As Adam's, and how many states of the parameter's shape there are."""

    dense: int


@dataclass
class Members:
    """Tensors of one signature, n in each list.

    Attributes:
        dense: for each state of the parameter's shape its n tensors, all of one order of memory.
        scalars: 0-d states, or none.
        masters: fp32 weights to update instead of the parameters, which then receive a copy; or none.
    """

    parameters: list[Tensor]
    gradients: list[Tensor]
    dense: list[list[Tensor]]
    scalars: list[Tensor]
    masters: list[Tensor]

    @property
    def weights(self) -> list[Tensor]:
        return self.masters or self.parameters

    def chosen(self, places: Sequence[int]) -> Members:
        """The members at these places."""
        parameters, gradients, scalars, masters = (
            [one[i] for i in places] if one else []
            for one in (self.parameters, self.gradients, self.scalars, self.masters)
        )
        return Members(parameters, gradients, [[one[i] for i in places] for one in self.dense], scalars, masters)


class Shared(NamedTuple):
    """What the launches of one step share. The caller has copied `steps` to `steps_before`."""

    hyper: Tensor
    steps_before: Tensor
    steps: Tensor
    divisor: Tensor
    skip: Tensor
    counters: Tensor
    is_counting: int


class Rule(ABC):
    """One optimizer's update."""

    #: Of the op, for dispatch and the doctor.
    name: ClassVar[str]

    def scratch(self, table: TensorTable) -> tuple[Tensor, ...]:  # noqa: ARG002
        """Memory that the launches over a table need, kept as long as the table."""
        return ()

    @abstractmethod
    def launch(
        self, signature: UpdateSignature, table: TensorTable, scratch: tuple[Tensor, ...], shared: Shared
    ) -> None:
        """Update the parameters of a table on its device, count their steps, wait for nothing."""

    @abstractmethod
    def reference(self, members: Members, steps: Sequence[float], hyper: Any, divisor: float) -> None:
        """The same in PyTorch, in place.

        Args:
            steps: the number of this step for each parameter, from 1.
        """


class NormedRule(Rule):
    """An update that needs norms of each whole tensor: in two halves, for processes that hold parts of tensors.

    Whoever runs the halves puts the parts' norms together in between.
    """

    @abstractmethod
    def launch_norms(
        self, signature: UpdateSignature, table: TensorTable, scratch: tuple[Tensor, ...], shared: Shared
    ) -> Tensor:
        """The first half: (k, n) fp32, k norms of what the table has of each of n tensors; valid until the next."""

    @abstractmethod
    def launch_rest(
        self,
        signature: UpdateSignature,
        table: TensorTable,
        scratch: tuple[Tensor, ...],
        shared: Shared,
        scalars: Sequence[Tensor],
        norms: Tensor,
    ) -> None:
        """The second half.

        Args:
            scalars: the tensors' 0-d states, or none.
            norms: (k, n) float64, of the whole tensors.
        """

    @abstractmethod
    def reference_norms(self, members: Members, steps: Sequence[float], hyper: Any, divisor: float) -> Tensor:
        """The first half in PyTorch; returns (k, n)."""

    @abstractmethod
    def reference_rest(
        self, members: Members, steps: Sequence[float], hyper: Any, divisor: float, norms: Tensor
    ) -> None:
        """The second half in PyTorch."""

    def takes_maxima(self, hyper: Any) -> bool:  # noqa: ARG002
        """Whether a group's norms are largest magnitudes, not L2 norms."""
        return False


def update_entry(
    parameter: Tensor,
    gradient: Tensor,
    dense: Sequence[Tensor],
    scalar: Tensor | None,
    master: Tensor | None,
    learning_rate: int,
    group: int,
    step: int,
) -> TableEntry:
    """A parameter's column: Adam's rows, an absent state's address 0, and a 0-d state's in the second state's place.

    Args:
        learning_rate: address of an fp32.
        group: row of `hyper`.
        step: place in `steps`.
    """
    states = [*dense, *([] if master is None else [master])]
    # What is walked: the states' order of memory, without any that which the parameter would give them.
    order = states[0] if states else torch.empty_like(parameter, device="meta", memory_format=torch.preserve_format)
    made = entry(order, gradient, [parameter, *states])
    first = dense[0].data_ptr() if dense else 0
    second = dense[1].data_ptr() if len(dense) > 1 else 0 if scalar is None else scalar.data_ptr()
    its_master = 0 if master is None else master.data_ptr()
    return replace(made, rows=(parameter.data_ptr(), first, second, its_master, learning_rate, group, step))


def update_once(
    rule: Rule,
    members: Members,
    steps: list[Tensor],
    lr: Tensor,
    hyper: Any,
    divisor: Tensor | None,
    skip: Tensor | None,
) -> None:
    """One step of parameters of one device, with a table for this call alone.

    Args:
        steps: n tensors of one fp32 element, the steps taken so far; counted up.
        hyper: for all of them; its lr is replaced.
        divisor, skip: 0-d, or None.
    Raises: UserError for a tensor on another device, before anything is changed.
    """
    named = {"parameter": members.parameters, "gradient": members.gradients, "master": members.masters}
    named |= {f"state {number}": states for number, states in enumerate((*members.dense, members.scalars))}
    device = one_device(f"{rule.name}_", **{f"{name} {i}": t for name, one in named.items() for i, t in enumerate(one)})
    by_signature: dict[UpdateSignature, list[int]] = {}
    for i, parameter in enumerate(members.parameters):
        state = members.dense[0][i].dtype if members.dense else _state_dtype(parameter)
        signature = UpdateSignature(
            device,
            parameter.dtype,
            members.gradients[i].dtype,
            state,
            Master.WHOLE if members.masters else Master.NONE,
            len(members.dense),
        )
        by_signature.setdefault(signature, []).append(i)
    for signature, places in by_signature.items():
        own, own_steps = members.chosen(places), [steps[i] for i in places]
        reason = signature.unsupported()
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            reason = reason or "a table of addresses cannot be built while a CUDA graph is captured"
        if uses_triton(rule.name, device, reason):
            _launch_once(rule, signature, own, own_steps, lr, hyper, divisor, skip)
        elif skip is None or not skip.item():
            torch._foreach_add_(own_steps, 1.0)
            counts = [float(step) for step in own_steps]
            rule.reference(own, counts, replace(hyper, lr=float(lr)), 1.0 if divisor is None else float(divisor))


def _launch_once(
    rule: Rule,
    signature: UpdateSignature,
    members: Members,
    steps: list[Tensor],
    lr: Tensor,
    hyper: Hyper,
    divisor: Tensor | None,
    skip: Tensor | None,
) -> None:
    device = signature.device
    learning_rate = lr.to(device, torch.float32, non_blocking=True)
    entries = [
        update_entry(
            parameter,
            members.gradients[i],
            [one[i] for one in members.dense],
            members.scalars[i] if members.scalars else None,
            members.masters[i] if members.masters else None,
            learning_rate.data_ptr(),
            0,
            i,
        )
        for i, parameter in enumerate(members.parameters)
    ]
    table = build_table(device, entries)
    before = torch.stack([step.to(device, torch.float32).reshape(()) for step in steps])
    after = before.clone()
    shared = Shared(
        upload([hyper.row()], torch.float32, device),
        before,
        after,
        torch.ones((), device=device) if divisor is None else to_device(divisor, device),
        torch.zeros((), device=device) if skip is None else to_device(skip, device),
        torch.zeros(2, dtype=torch.int64, device=device),
        0,
    )
    rule.launch(signature, table, rule.scratch(table), shared)
    torch._foreach_copy_(steps, list(after.unbind()))


def _state_dtype(parameter: Tensor) -> torch.dtype:
    return torch.float64 if parameter.dtype == torch.float64 else torch.float32


def row_of(*values: float) -> list[float]:
    """A row of `hyper`."""
    return [*values, *[0.0] * (HYPER_ROW - len(values))]


def log_beta(beta: float, bias_correction: bool) -> float:
    """log β, of which the kernels form 1 − βᵗ as −expm1(t · log β); −∞ makes that 1."""
    return math.log(beta) if bias_correction and beta > 0 else -math.inf


def no_output(*_args: object) -> None:
    """The fake of an op that works in place."""


def programs(table: TensorTable) -> tuple[int]:
    """The grid of a kernel that takes a chunk a program, and counts the steps of as many parameters."""
    return (max(table.chunks, -(-table.count // BLOCK)),)


def constants_of(signature: UpdateSignature, table: TensorTable) -> dict[str, Any]:
    """The constexprs that `signatures` lists, of one launch."""
    return {
        "PARAMETER_DTYPE": KERNEL_DTYPES[signature.parameter],
        "GRADIENT_DTYPE": KERNEL_DTYPES[signature.gradient],
        "HAS_MASTER": signature.has_master,
        "IS_STRIDED": table.is_strided,
    }


def signatures() -> Iterator[tuple[str, dict[str, Any]]]:
    """(label, constexprs) of every combination of dtypes that an update's kernel takes, with and without strides.

    fp16 differs from bf16, of which all are listed, in its conversions: the least code of it, and the most.
    """
    for (parameter, gradient), has_master, is_strided in product(DTYPE_PAIRS, (False, True), (False, True)):
        if has_master and parameter == torch.float32:
            continue
        is_extreme = (parameter, gradient) == (torch.float16, torch.float16) and has_master == is_strided
        if torch.float16 in (parameter, gradient) and not is_extreme:
            continue
        label = f"{SHORT_NAMES[parameter]} parameters, {SHORT_NAMES[gradient]} gradients"
        label += (", masters" if has_master else "") + (", strided" if is_strided else "")
        yield (
            label,
            {
                "PARAMETER_DTYPE": KERNEL_DTYPES[parameter],
                "GRADIENT_DTYPE": KERNEL_DTYPES[gradient],
                "HAS_MASTER": has_master,
                "IS_STRIDED": is_strided,
            },
        )


#: Triton's types of what `Shared` holds, by the names that every kernel of a rule gives them.
SHARED_SIGNATURE = {
    "hyper": "*fp32",
    "steps_before": "*fp32",
    "steps": "*fp32",
    "divisor": "*fp32",
    "skip": "*fp32",
    "counters": "*i64",
    "is_counting": "i32",
}


def compilation(
    kernel: Any, label: str, constants: dict[str, Any], arguments: dict[str, str] = SHARED_SIGNATURE
) -> Compilation:
    """A launch of an update's kernel; `arguments` are the types of those between the table's and the constants."""
    signature = {**TABLE_SIGNATURE, **arguments, **dict.fromkeys(constants, "constexpr")}
    aligned = frozenset(n for n, kind in signature.items() if kind.startswith("*")) - {"divisor", "skip"}
    return Compilation(kernel, label, signature, constants, WARPS, divisible_by_16=aligned)
