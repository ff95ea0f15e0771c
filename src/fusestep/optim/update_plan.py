"""Plans of steps other than Adam's: which parameters a launch updates, by which rule (see ops/update.py)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from fusestep.ops.adam_copies import CopySignature
from fusestep.ops.adam_kernel import AdamSignature, Master
from fusestep.ops.tensor_table import build_table, upload
from fusestep.ops.update import Hyper, Members, NormedRule, Rule, Shared, UpdateSignature, update_entry
from fusestep.optim.plan_parts import DevicePlan, KernelPart, ReferencePart, State, real
from fusestep.optim.sharding import WholeNorms
from fusestep.optim.step_plan import StepPlan, lies_on, lr_address


@dataclass(eq=False)
class UpdatePart(KernelPart):
    """Parameters of one signature, with the memory that their launches need, and their 0-d states."""

    scratch: tuple[Tensor, ...] = ()
    scalars: list[Tensor] = field(default_factory=list)


class UpdatePlan(StepPlan):
    """A step by a rule; see StepPlan. A class of ours names the rule, its options and its states."""

    rule: ClassVar[Rule]
    #: Key of a 0-d state that lies on the parameter's device, or None.
    scalar: ClassVar[str | None] = None

    def __init__(self, groups: Sequence[dict[str, Any]], *args: Any) -> None:
        self._dense_of = [self.dense_states(group) for group in groups]
        self.op = self.rule.name
        self._neutral: dict[torch.device, tuple[Tensor, Tensor]] = {}
        self._takes_maxima = self._maxima(groups)
        self._whole: dict[tuple[torch.device, tuple[int, ...]], WholeNorms] = {}
        super().__init__(groups, *args)

    @classmethod
    @abstractmethod
    def dense_states(cls, group: dict[str, Any]) -> tuple[str, ...]:
        """Keys of the states of the parameter's shape that a group's options ask for."""

    @classmethod
    @abstractmethod
    def hyper_of(cls, group: dict[str, Any], lr: float) -> Hyper:
        """A group's options as the rule takes them."""

    def _hyper_row(self, group: dict[str, Any]) -> list[float]:
        lr = group["lr"]
        return self.hyper_of(group, 0.0 if lr_address(lr) else float(lr)).row()

    def _maxima(self, groups: Sequence[dict[str, Any]]) -> list[bool]:
        """Whether a group's norms of tensors are largest magnitudes."""
        rule = self.rule
        return [isinstance(rule, NormedRule) and rule.takes_maxima(self.hyper_of(group, 0.0)) for group in groups]

    def take(self, groups: Sequence[dict[str, Any]], gradients: list[Tensor | None]) -> bool:
        """As StepPlan's; options that ask for other states or norms need a new plan too."""
        if [self.dense_states(group) for group in groups] != self._dense_of:
            return False
        if self.sharding is not None and self._maxima(groups) != self._takes_maxima:
            return False
        return super().take(groups, gradients)

    def _signature(self, i: int, device: torch.device, gradient: Tensor, state: State) -> UpdateSignature:
        weight, dense = real(self.weights[i]).dtype, self._dense_of[self.group_of[i]]
        kept = real(state[dense[0]]).dtype if dense else torch.float32
        return UpdateSignature(device, weight, real(gradient).dtype, kept, Master.of(self._master(i)), len(dense))

    def _launches_of(
        self,
        alike: list[int],
        signature: AdamSignature,
        gradients: list[Tensor | None],  # noqa: ARG002
    ) -> list[tuple[AdamSignature, CopySignature | None]]:
        """One launch for all; no kernel of a rule writes copies, so they are cast after the step."""
        return [(signature, None)] * len(alike)

    def _members(self, places: Sequence[int], gradients: list[Tensor | None]) -> Members:
        """Parameters of one signature, which have gradients and so states."""
        states: list[State] = [state for state in (self.state_of[i] for i in places) if state is not None]
        masters = [self._master(i) for i in places]
        return Members(
            [real(self.weights[i].detach()) for i in places],
            [real(gradient) for gradient in (gradients[i] for i in places) if gradient is not None],
            [[real(state[key]) for state in states] for key in self._dense_of[self.group_of[places[0]]]],
            [] if self.scalar is None else [state[self.scalar] for state in states],
            [master for master in masters if master is not None],
        )

    def _kernel_part(
        self,
        groups: Sequence[dict[str, Any]],
        plan: DevicePlan,
        signature: AdamSignature,
        copied: CopySignature | None,  # noqa: ARG002
        members: list[int],
        gradients: list[Tensor | None],
        place: dict[int, int],
    ) -> UpdatePart:
        assert plan.hyper is not None
        if plan.device not in self._neutral:
            divisor, skip = upload([1.0, 0.0], torch.float32, plan.device).unbind()
            self._neutral[plan.device] = divisor, skip
        entries = []
        for i in members:
            own, group = self._members([i], gradients), self.group_of[i]
            lr = groups[group]["lr"]
            # The kernel reads a learning rate where it lies; one that lies elsewhere has a place in `hyper`.
            learning_rate = lr.data_ptr() if lies_on(lr, plan.device) else plan.hyper.tensor[group].data_ptr()
            entries.append(
                update_entry(
                    own.parameters[0],
                    own.gradients[0],
                    [states[0] for states in own.dense],
                    own.scalars[0] if own.scalars else None,
                    own.masters[0] if own.masters else None,
                    learning_rate,
                    group,
                    place[i],
                )
            )
        table = build_table(plan.device, entries, capturable=self.capturable)
        scalars = self._members(members, gradients).scalars
        return UpdatePart(signature, members, table, scratch=self.rule.scratch(table), scalars=scalars)

    def _launch_part(
        self, plan: DevicePlan, part: KernelPart, counters: Tensor, is_gated: bool, is_counting: bool
    ) -> None:
        assert isinstance(part, UpdatePart)
        assert isinstance(part.signature, UpdateSignature)
        shared = self._shared(plan, counters, is_gated, is_counting)
        self.rule.launch(part.signature, part.table, part.scratch, shared)

    def _shared(self, plan: DevicePlan, counters: Tensor, is_gated: bool, is_counting: bool) -> Shared:
        assert plan.hyper is not None
        assert plan.steps_before is not None
        divisor, skip = (plan.divisor, plan.skip) if is_gated else self._neutral[plan.device]
        return Shared(plan.hyper.tensor, plan.steps_before, plan.steps, divisor, skip, counters, int(is_counting))

    def _launch_parts(self, plan: DevicePlan, counters: Tensor, is_gated: bool, is_counting: bool) -> None:
        """As StepPlan's; where tensors lie over processes, their norms are put together between the rule's halves."""
        rule = self.rule
        if self.sharding is None or not isinstance(rule, NormedRule):
            super()._launch_parts(plan, counters, is_gated, is_counting)
            return
        launches = []
        for number, part in enumerate(plan.kernels):
            assert isinstance(part, UpdatePart)
            assert isinstance(part.signature, UpdateSignature)
            shared = self._shared(plan, counters, is_gated, is_counting and number == 0)
            launches.append((part, part.signature, shared))
        norms = [rule.launch_norms(signature, part.table, part.scratch, shared) for part, signature, shared in launches]
        whole = self._whole_norms([part.members for part, _, _ in launches], norms)
        for (part, signature, shared), its_norms in zip(launches, whole, strict=True):
            rule.launch_rest(signature, part.table, part.scratch, shared, part.scalars, its_norms)

    def _run_reference_parts(
        self,
        groups: Sequence[dict[str, Any]],
        jobs: Sequence[tuple[ReferencePart, list[int]]],
        gradients: list[Tensor | None],
        steps: Mapping[int, float],
        divisor: float,
    ) -> None:
        """As StepPlan's; where tensors lie over processes, their norms are put together between the rule's halves."""
        rule = self.rule
        if self.sharding is None or not isinstance(rule, NormedRule):
            super()._run_reference_parts(groups, jobs, gradients, steps, divisor)
            return
        halves = []
        for part, places in jobs:
            hyper = self.hyper_of(groups[part.group], float(groups[part.group]["lr"]))
            halves.append((self._members(places, gradients), [steps[i] for i in places], hyper, divisor))
        norms = [rule.reference_norms(*half) for half in halves]
        whole = self._whole_norms([places for _, places in jobs], norms)
        for half, its_norms in zip(halves, whole, strict=True):
            rule.reference_rest(*half, its_norms)

    def _whole_norms(self, members: Sequence[list[int]], norms: Sequence[Tensor]) -> Sequence[Tensor]:
        """Norms of whole tensors from those of their parts here, for all parts of a device in one collective."""
        assert self.sharding is not None
        flat, device = tuple(i for one in members for i in one), norms[0].device
        whole = self._whole.get((device, flat))
        if whole is None:
            is_max = [self._takes_maxima[self.group_of[i]] for i in flat]
            whole = self._whole[device, flat] = WholeNorms(self.sharding, flat, is_max, device)
        parts: Sequence[Tensor] = whole(torch.cat(list(norms), dim=1)).split([len(one) for one in members], dim=1)
        return parts

    def _run_reference(
        self,
        group: dict[str, Any],
        part: ReferencePart,  # noqa: ARG002
        members: list[int],
        gradients: list[Tensor | None],
        steps: list[float],
        divisor: float,
    ) -> None:
        hyper = self.hyper_of(group, float(group["lr"]))
        self.rule.reference(self._members(members, gradients), steps, hyper, divisor)
