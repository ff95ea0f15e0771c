"""All that an optimizer's step keeps between calls: which tensors are stepped by which launch, and where they lie.

A plan is built at the first step and again when something moved that its tables hold. In the ordinary step nothing
moved but the gradients, and their addresses alone are compared and, where they changed, uploaded. Parameters that
have no gradient in this step stay in their table with an address of 0. Sizes, strides and dtypes are compared too:
memory keeps its address when a parameter becomes another view of it, or is freed and handed out again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from itertools import chain, compress
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor

from fusestep.dispatch import uses_triton
from fusestep.fp8.held import revision
from fusestep.ops.adam_copies import CopySignature
from fusestep.ops.adam_kernel import AdamSignature
from fusestep.ops.adam_reference import HYPER_ROW
from fusestep.ops.gradient_norm import NormScratch, combine_norms, norm_reference, to_device, verdict_of
from fusestep.ops.tensor_table import DeviceArray, gradient_address, upload
from fusestep.optim.plan_parts import DevicePlan, KernelPart, ReferencePart, Scaling, ShardNorm, State, real
from fusestep.optim.sharding import Sharding
from fusestep.optim.step_counts import pack_steps
from fusestep.optim.weight_copies import PlannedCopies, stepped_weight

__all__ = ["Scaling", "State", "StepPlan", "real"]

#: What parameters of one launch have in common: dtypes, FP8 copies, and on how many processes each part of them lies.
Launch = tuple[AdamSignature, CopySignature | None, int]


def lr_address(lr: Tensor | float) -> int:
    """What tells one learning-rate tensor from another; 0 for numbers and for tensors that the host can read."""
    return lr.data_ptr() if isinstance(lr, Tensor) and lr.device.type != "cpu" else 0


class StepPlan(ABC):
    """Built from the optimizer's lists, which must be in one order; see the module's docstring.

    Args:
        groups: the optimizer's parameter groups.
        parameters, group_of: every parameter and the number of its group.
        state_of: the state of each parameter, or None; moments and masters lie as `torch.empty_like(parameter)` does.
        gradients: of this step, None where missing.
        verdicts: (3,) fp32 for each device, kept by the optimizer.
        capturable: whether a CUDA graph may capture steps of this plan.
        sharding: how the parameters lie over processes, whose parts here the lists hold then; None for whole ones.
    """

    #: The op whose kernels step, for dispatch.
    op: str

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        parameters: list[Tensor],
        group_of: list[int],
        state_of: list[State | None],
        gradients: list[Tensor | None],
        verdicts: dict[torch.device, Tensor],
        capturable: bool,
        sharding: Sharding | None,
    ) -> None:
        self.parameters = parameters
        self.sharding = sharding
        self.weights = [stepped_weight(p, state) for p, state in zip(parameters, state_of, strict=True)]
        self.copies = PlannedCopies(parameters, self.weights)
        self.group_of = group_of
        self.state_of = state_of
        self._states = [state for state in state_of if state is not None]
        self.capturable = capturable
        self.is_captured = False
        self.devices: list[DevicePlan] = []

        by_device: dict[torch.device, list[int]] = {}
        for i, parameter in enumerate(parameters):
            by_device.setdefault(parameter.device, []).append(i)
        for device, members in by_device.items():
            if any(state_of[i] for i in members):
                self.devices.append(self._plan_device(groups, device, members, gradients, verdicts))
        self.copies.complete()
        self._remember(groups, gradients)

    def _plan_device(
        self,
        groups: Sequence[dict[str, Any]],
        device: torch.device,
        members: list[int],
        gradients: list[Tensor | None],
        verdicts: dict[torch.device, Tensor],
    ) -> DevicePlan:
        if device not in verdicts:
            verdicts[device] = upload([float("nan"), 1.0, 0.0], torch.float32, device)
        plan = DevicePlan(device, members, pack_steps([self.state_of[i] for i in members], device), verdicts[device])
        launches, references = self._sorted(device, members, gradients)
        if launches:
            rows = [self._hyper_row(group) for group in groups]
            hyper = torch.empty(len(groups), HYPER_ROW, device=device)
            plan.hyper = DeviceArray(rows, hyper, capturable=self.capturable)
            plan.steps_before = torch.empty_like(plan.steps)
        place = {member: p for p, member in enumerate(members)}
        for (signature, copied, _), its_members in launches.items():
            plan.kernels.append(self._kernel_part(groups, plan, signature, copied, its_members, gradients, place))
        for (signature, group), its_members in references.items():
            plan.references.append(ReferencePart(signature, group, its_members))
        if plan.kernels:
            tables = [(part.table, part.signature.gradient) for part in plan.kernels]
            if self.sharding is None:
                plan.scratch = NormScratch(device, tables, plan.verdict)
                return plan
            of_table = [count for _, _, count in launches]
            for count in dict.fromkeys(of_table):
                own = [table for table, its in zip(tables, of_table, strict=True) if its == count]
                measured = torch.zeros(3, device=device)
                plan.shard_norms.append(ShardNorm(count, NormScratch(device, own, measured), measured[0]))
        return plan

    def _replicas(self, i: int) -> int:
        """On how many processes each part of a parameter lies."""
        return 1 if self.sharding is None else self.sharding.replicas[i]

    def _master(self, i: int) -> Tensor | None:
        """The fp32 weight that is stepped in a parameter's stead, which then receives a rounded copy."""
        state = self.state_of[i]
        master: Tensor | None = None if state is None else state.get("master_param")
        return None if master is self.weights[i] else master

    def _sorted(
        self, device: torch.device, members: list[int], gradients: list[Tensor | None]
    ) -> tuple[dict[Launch, list[int]], dict[tuple[AdamSignature, int], list[int]]]:
        """(the members of each launch, those of each group that the reference steps)."""
        by_signature: dict[AdamSignature, list[int]] = {}
        for i in members:
            gradient, state = gradients[i], self.state_of[i]
            if gradient is not None and state is not None:
                by_signature.setdefault(self._signature(i, device, gradient, state), []).append(i)
        launches: dict[Launch, list[int]] = {}
        references: dict[tuple[AdamSignature, int], list[int]] = {}
        for signature, alike in by_signature.items():
            if not uses_triton(self.op, device, signature.unsupported()):
                for i in alike:
                    references.setdefault((signature, self.group_of[i]), []).append(i)
                continue
            for i, launch in zip(alike, self._launches_of(alike, signature, gradients), strict=True):
                launches.setdefault((*launch, self._replicas(i)), []).append(i)
        return launches, references

    def _remember(self, groups: Sequence[dict[str, Any]], gradients: list[Tensor | None]) -> None:
        self._lr_addresses = [lr_address(group["lr"]) for group in groups]
        self._parameter_keys = _parameter_keys(self.weights)
        self._complex = list(filter(Tensor.is_complex, self.weights))
        self._revision = revision()
        present = [g for g in gradients if g is not None]
        keys = _gradient_keys(present, list(map(Tensor.data_ptr, present)))
        # A parameter without a gradient so far has no place in a table: its first one matches nothing.
        self._gradient_keys = tuple(_spread(column, gradients, None) for column in keys)
        self._state_values = self._values()
        self._state_tensors = [value for value in self._state_values if isinstance(value, Tensor)]
        # Step counts have no size that a launch goes by.
        self._walked_states = [
            value
            for state in self._states
            for key, value in state.items()
            if key != "step" and isinstance(value, Tensor)
        ]
        self._state_keys = self._found_of_states()

    def _values(self) -> list[Any]:
        return list(chain.from_iterable(map(dict.values, self._states)))

    def _found_of_states(self) -> tuple[list[Any], ...]:
        """What may change of states that are the same objects: their addresses, strides, sizes in bytes."""
        walked = self._walked_states
        return (
            list(map(Tensor.data_ptr, self._state_tensors)),
            list(map(Tensor.stride, walked)),
            list(map(_nbytes, walked)),
        )

    def take(self, groups: Sequence[dict[str, Any]], gradients: list[Tensor | None]) -> bool:
        """Point the tables at this step's gradients; False if anything else moved, and then a new plan is needed.

        This is most of what a step costs the host, hence the loops that run in C.
        """
        values = self._values()
        if (
            len(values) != len(self._state_values)
            or not all(map(is_, values, self._state_values))
            or self._found_of_states() != self._state_keys
            or _parameter_keys(self.weights) != self._parameter_keys
            or any(map(Tensor.is_conj, self._complex))
            or revision() != self._revision
            or self.copies.have_moved()
            or [lr_address(group["lr"]) for group in groups] != self._lr_addresses
        ):
            return False
        present = [g for g in gradients if g is not None]
        known, found = self._gradient_keys, list(map(Tensor.data_ptr, present))
        is_partial = len(present) < len(gradients)
        if is_partial:
            is_there = [g is not None for g in gradients]
            known = tuple(list(compress(column, is_there)) for column in known)
        if _gradient_keys(present, found) != known:
            return False
        if 0 in found:
            found = list(map(gradient_address, present))
        if is_partial:
            found = _spread(found, gradients, 0)
        parts = [part for plan in self.devices for part in plan.kernels]
        addresses = [[found[i] for i in part.members] for part in parts]
        hypers = [plan.hyper for plan in self.devices if plan.hyper is not None]
        rows = [self._hyper_row(group) for group in groups] if hypers else []
        if self.is_captured and (
            any(part.table.gradients.values != its for part, its in zip(parts, addresses, strict=True))
            or any(hyper.values != rows for hyper in hypers)
        ):
            return False
        for part, its in zip(parts, addresses, strict=True):
            part.table.gradients.update(its)
        for hyper in hypers:
            hyper.update(rows)
        return True

    def run(
        self,
        groups: Sequence[dict[str, Any]],
        gradients: list[Tensor | None],
        counters: Tensor,
        max_norm: float | None,
        scaling: Scaling,
    ) -> None:
        """Step every parameter that has a gradient.

        Args:
            counters: (2,) int64: steps applied and skipped.
            max_norm: clip to this norm and skip where it is not finite; None for neither.
        """
        is_gated = max_norm is not None or scaling.is_active
        if max_norm is not None:
            self._judge(gradients, max_norm, scaling)
        elif is_gated:
            scaling = self._agreed(scaling)
            for plan in self.devices:
                scale, found_inf = scaling.on(plan.device)
                assert scale is not None
                assert found_inf is not None
                plan.divisor.copy_(scale)
                plan.skip.copy_(found_inf)
        if is_gated:
            self.copies.before_a_step_that_may_be_skipped()
        is_counted = False
        stepped: list[int] = []
        for plan in self.devices:
            if plan.kernels:
                is_counted |= self._launch(groups, plan, None if is_counted else counters, is_gated)
            if plan.references and not (is_gated and plan.skip.item()):
                self._run_references(groups, plan, gradients, float(plan.divisor) if is_gated else 1.0)
            lists = [part.members for part in plan.references] + [part.members for part in plan.kernels]
            stepped += [i for members in lists for i in members if gradients[i] is not None]
        self.copies.after_the_step(stepped)
        if not is_counted:
            skip = to_device(self.devices[0].skip, counters.device) if is_gated else counters.new_zeros(())
            counters += torch.stack([skip == 0, skip != 0])

    def _judge(self, gradients: list[Tensor | None], max_norm: float, scaling: Scaling) -> None:
        """Write norm, divisor and skip of this step to every device."""
        first = self.devices[0]
        if self.sharding is not None:
            self._judge_shards(self.sharding, gradients, max_norm, scaling)
            return
        if len(self.devices) == 1 and not first.references and first.scratch is not None:
            scale, found_inf = scaling.on(first.device)
            first.scratch.launch(max_norm, scale, found_inf)
            return
        norms = []
        for plan in self.devices:
            if plan.scratch is not None:
                plan.scratch.launch(float("inf"))
                norms.append(plan.norm)
            members = [i for part in plan.references for i in part.members]
            present = [real(g) for g in (gradients[i] for i in members) if g is not None]
            if present:
                norms.append(norm_reference(present))
        self._give_verdict(combine_norms(norms, self._home()), max_norm, scaling.scale, scaling.found_inf)

    def _judge_shards(
        self, sharding: Sharding, gradients: list[Tensor | None], max_norm: float, scaling: Scaling
    ) -> None:
        """The same where processes hold parts of the parameters: all get one verdict."""
        norms, replicas = [], []
        for plan in self.devices:
            for count, scratch, norm in plan.shard_norms:
                scratch.launch(float("inf"))
                norms.append(norm)
                replicas.append(count)
            members = [i for part in plan.references for i in part.members]
            by_count: dict[int, list[Tensor]] = {}
            for i, gradient in ((i, gradients[i]) for i in members):
                if gradient is not None:
                    by_count.setdefault(self._replicas(i), []).append(real(gradient))
            for count, present in by_count.items():
                norms.append(norm_reference(present))
                replicas.append(count)
        norm, found_inf = sharding.norm(norms, replicas, self._home(), scaling.found_inf)
        self._give_verdict(norm, max_norm, scaling.scale, found_inf)

    def _agreed(self, scaling: Scaling) -> Scaling:
        """What a loss scaler left, with what it saw on any process that holds a part of the parameters."""
        if self.sharding is None or scaling.found_inf is None:
            return scaling
        return Scaling(scaling.scale, self.sharding.any_found(scaling.found_inf, self._home()))

    def _home(self) -> torch.device:
        """Where numbers of several devices meet: on a GPU where one takes part, so that the host need not wait."""
        devices = [plan.device for plan in self.devices]
        return next((device for device in devices if device.type == "cuda"), devices[0])

    def _give_verdict(self, norm: Tensor, max_norm: float, scale: Tensor | None, found_inf: Tensor | None) -> None:
        verdict = verdict_of(norm, max_norm, scale, found_inf)
        for plan in self.devices:
            plan.verdict.copy_(verdict, non_blocking=plan.device.type == "cuda")

    def _launch(
        self, groups: Sequence[dict[str, Any]], plan: DevicePlan, counters: Tensor | None, is_gated: bool
    ) -> bool:
        """The update launches of one device; returns whether one of them counted the step."""
        assert plan.hyper is not None
        assert plan.steps_before is not None
        for number, group in enumerate(groups):
            lr = group["lr"]
            if lr_address(lr) and not lies_on(lr, plan.device):
                plan.hyper.tensor[number, 0].copy_(lr.reshape(()), non_blocking=True)
        plan.steps_before.copy_(plan.steps)
        is_counting = counters is not None and counters.device == plan.device
        # Where another launch counts, any int64 memory will do.
        counted = counters if counters is not None and is_counting else plan.kernels[0].table.rows
        self._launch_parts(plan, counted, is_gated, is_counting)
        return is_counting

    def _launch_parts(self, plan: DevicePlan, counters: Tensor, is_gated: bool, is_counting: bool) -> None:
        """Update the parameters of all parts; arguments as `_launch_part` takes them, the first part counts."""
        for number, part in enumerate(plan.kernels):
            self._launch_part(plan, part, counters, is_gated, is_counting and number == 0)

    def _run_references(
        self, groups: Sequence[dict[str, Any]], plan: DevicePlan, gradients: list[Tensor | None], divisor: float
    ) -> None:
        present = {i for part in plan.references for i in part.members if gradients[i] is not None}
        plan.steps += torch.tensor([float(i in present) for i in plan.members]).to(plan.device)
        steps = dict(zip(plan.members, plan.steps.tolist(), strict=True))
        jobs = [(part, [i for i in part.members if i in present]) for part in plan.references]
        self._run_reference_parts(groups, [job for job in jobs if job[1]], gradients, steps, divisor)

    def _run_reference_parts(
        self,
        groups: Sequence[dict[str, Any]],
        jobs: Sequence[tuple[ReferencePart, list[int]]],
        gradients: list[Tensor | None],
        steps: Mapping[int, float],
        divisor: float,
    ) -> None:
        """Step those parameters of each part that have gradients; `steps` by the parameter's place."""
        for part, members in jobs:
            self._run_reference(groups[part.group], part, members, gradients, [steps[i] for i in members], divisor)

    # What an optimizer's own plan says

    @abstractmethod
    def _hyper_row(self, group: dict[str, Any]) -> list[float]:
        """HYPER_ROW floats of a group's options as the kernels read them, lr first, 0 where that lies on a device."""

    @abstractmethod
    def _signature(self, i: int, device: torch.device, gradient: Tensor, state: State) -> AdamSignature:
        """What the parameters of one launch have in common."""

    @abstractmethod
    def _launches_of(
        self, alike: list[int], signature: AdamSignature, gradients: list[Tensor | None]
    ) -> list[tuple[AdamSignature, CopySignature | None]]:
        """The launch of each of these parameters, with the copies that it writes; others are cast after the step."""

    @abstractmethod
    def _kernel_part(
        self,
        groups: Sequence[dict[str, Any]],
        plan: DevicePlan,
        signature: AdamSignature,
        copied: CopySignature | None,
        members: list[int],
        gradients: list[Tensor | None],
        place: dict[int, int],
    ) -> KernelPart:
        """A launch with its table; `place` is that of each parameter in the device's step counts."""

    @abstractmethod
    def _launch_part(
        self, plan: DevicePlan, part: KernelPart, counters: Tensor, is_gated: bool, is_counting: bool
    ) -> None:
        """Update the parameters of one part.

        Args:
            counters: (2,) int64: steps applied and skipped, which the launch counts where `is_counting`.
            is_gated: whether the plan's divisor and skip apply.
        """

    @abstractmethod
    def _run_reference(
        self,
        group: dict[str, Any],
        part: ReferencePart,
        members: list[int],
        gradients: list[Tensor | None],
        steps: list[float],
        divisor: float,
    ) -> None:
        """Step these parameters of one part in PyTorch; `steps` is the number of this step for each."""


def lies_on(lr: Tensor | float, device: torch.device) -> bool:
    """Whether the kernel can read this learning rate where it lies."""
    return isinstance(lr, Tensor) and lr.device == device and lr.dtype == torch.float32 and lr.device.type != "cpu"


_dtype, _nbytes = attrgetter("dtype"), attrgetter("nbytes")


def _keys(tensors: list[Tensor], addresses: list[int]) -> tuple[list[Any], ...]:
    """What a table's entries hold of tensors: these addresses, dtypes, strides, sizes."""
    return (
        addresses,
        list(map(_dtype, tensors)),
        list(map(Tensor.stride, tensors)),
        list(map(Tensor.size, tensors)),
    )


def _parameter_keys(weights: list[Tensor]) -> tuple[list[Any], ...]:
    return _keys(weights, list(map(Tensor.data_ptr, weights)))


def _gradient_keys(gradients: list[Tensor], addresses: list[int]) -> tuple[list[Any], ...]:
    """Of their addresses, which change from step to step, an entry depends on the alignment alone."""
    return _keys(gradients, [address & 15 for address in addresses])


def _spread(values: list[Any], gradients: list[Tensor | None], missing: object) -> list[Any]:
    """One value for each gradient there is, in order, and `missing` where there is none."""
    in_turn = iter(values)
    return [missing if gradient is None else next(in_turn) for gradient in gradients]
