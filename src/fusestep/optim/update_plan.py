"""Plans of steps other than Adam's: which parameters a launch updates, by which rule (see ops/update.py)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fusestep.ops.adam_copies import CopySignature
from fusestep.ops.adam_kernel import AdamSignature
from fusestep.ops.tensor_table import build_table, upload
from fusestep.ops.update import Hyper, Members, Rule, Shared, UpdateSignature, update_entry
from fusestep.optim.plan_parts import DevicePlan, KernelPart, ReferencePart, State, real
from fusestep.optim.step_plan import StepPlan, lies_on, lr_address


@dataclass(eq=False)
class UpdatePart(KernelPart):
    """Parameters of one signature, with the memory that their launches need."""

    scratch: tuple[Tensor, ...] = ()


class UpdatePlan(StepPlan):
    """A step by a rule; see StepPlan. A class of ours names the rule, its options and its states."""

    rule: ClassVar[Rule]
    #: Key of a 0-d state that lies on the parameter's device, or None.
    scalar: ClassVar[str | None] = None

    def __init__(self, groups: Sequence[dict[str, Any]], *args: Any) -> None:
        self._dense_of = [self.dense_states(group) for group in groups]
        self.op = self.rule.name
        self._neutral: dict[torch.device, tuple[Tensor, Tensor]] = {}
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

    def take(self, groups: Sequence[dict[str, Any]], gradients: list[Tensor | None]) -> bool:
        """As StepPlan's; options that ask for other states need a new plan too."""
        return [self.dense_states(group) for group in groups] == self._dense_of and super().take(groups, gradients)

    def _signature(self, i: int, device: torch.device, gradient: Tensor, state: State) -> UpdateSignature:
        weight, dense = real(self.weights[i]).dtype, self._dense_of[self.group_of[i]]
        kept = real(state[dense[0]]).dtype if dense else torch.float32
        return UpdateSignature(device, weight, real(gradient).dtype, kept, self._master(i) is not None, len(dense))

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
        return UpdatePart(signature, members, table, scratch=self.rule.scratch(table))

    def _launch_part(
        self, plan: DevicePlan, part: KernelPart, counters: Tensor, is_gated: bool, is_counting: bool
    ) -> None:
        assert plan.hyper is not None
        assert plan.steps_before is not None
        assert isinstance(part, UpdatePart)
        assert isinstance(part.signature, UpdateSignature)
        divisor, skip = (plan.divisor, plan.skip) if is_gated else self._neutral[plan.device]
        shared = Shared(plan.hyper.tensor, plan.steps_before, plan.steps, divisor, skip, counters, int(is_counting))
        self.rule.launch(part.signature, part.table, part.scratch, shared)

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
