"""Plans of Adam's steps: which launch updates a parameter, and writes its copies (weight_copies.py); the reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fusestep.ops.adam_copies import CopySignature, launch_adam_copies, tile_tensors, tiles_of
from fusestep.ops.adam_kernel import AdamSignature, Master, adam_rows, launch_adam
from fusestep.ops.adam_reference import Hyperparameters, adam_reference
from fusestep.ops.roll_scales import AMAX, SLOT
from fusestep.ops.tensor_table import build_table, entry
from fusestep.optim.loading import REMAINDER
from fusestep.optim.plan_parts import CopyPart, DevicePlan, KernelPart, ReferencePart, State, real
from fusestep.optim.step_plan import StepPlan, lies_on, lr_address


class AdamPlan(StepPlan):
    """A step of Adam or AdamW; see StepPlan."""

    op = "adam"

    def _hyper_row(self, group: dict[str, Any]) -> list[float]:
        lr = group["lr"]
        return hyperparameters(group, 0.0 if lr_address(lr) else float(lr)).row()

    def _signature(self, i: int, device: torch.device, gradient: Tensor, state: State) -> AdamSignature:
        """What parameters of one launch have in common."""
        weight, moment = real(self.weights[i]).dtype, real(state["exp_avg"]).dtype
        return AdamSignature(device, weight, real(gradient).dtype, moment, Master.of(self._master(i)))

    def _master(self, i: int) -> Tensor | None:
        state = self.state_of[i]
        remainder: Tensor | None = None if state is None else state.get(REMAINDER)
        return super()._master(i) if remainder is None else remainder

    def _launches_of(
        self, alike: list[int], signature: AdamSignature, gradients: list[Tensor | None]
    ) -> list[tuple[AdamSignature, CopySignature | None]]:
        """The launch of each of these parameters, with the copies that it writes; others are cast after the step."""
        tensors_of: list[list[Tensor] | None] = [None] * len(self.parameters)
        for i in alike:
            tensors_of[i] = self._tensors(i, gradients[i])
        return [(self._with_plain_copy(i, signature), self.copies.in_fp8(i, tensors_of)) for i in alike]

    def _tensors(self, i: int, gradient: Tensor | None) -> list[Tensor]:
        """What the update reads and writes of a parameter."""
        state, master = self.state_of[i], self._master(i)
        assert gradient is not None
        assert state is not None
        tensors = [self.weights[i].detach(), gradient, state["exp_avg"], state["exp_avg_sq"]]
        return tensors if master is None else [*tensors, master]

    def _with_plain_copy(self, i: int, signature: AdamSignature) -> AdamSignature:
        """The signature of a launch that writes a parameter's copy in 16 bits too, if it has one that a launch can."""
        state = self.state_of[i]
        assert state is not None
        memory = self.copies.in_16_bits(i, state)
        if memory is None:
            return signature
        wider = replace(signature, parameter=memory.dtype, master=Master.WHOLE)
        if wider.unsupported() is not None:
            return signature
        self.copies.launch_writes(i, memory)
        return wider

    def _stored_and_master(self, i: int) -> tuple[Tensor, Tensor | None]:
        """What a launch stores rounded, and the fp32 weight that it steps in its stead, if that is another."""
        weight, memory = self.weights[i].detach(), self.copies.launched_memory(i)
        return (weight, self._master(i)) if memory is None else (memory, weight)

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
        assert plan.hyper is not None
        entries = []
        slots: Tensor | None = None
        if copied is not None and not copied.by_tile:
            slots = torch.zeros(len(members), SLOT, dtype=torch.float32, device=plan.device)
        slot_of: dict[int, int] = {}  # of weights, whose parameters share one
        first_tile = 0
        for i in members:
            gradient, state, group = gradients[i], self.state_of[i], self.group_of[i]
            assert gradient is not None
            assert state is not None
            lr = groups[group]["lr"]
            # The kernel reads a learning rate where it lies; one that lies elsewhere has a place in `hyper`.
            learning_rate = lr.data_ptr() if lies_on(lr, plan.device) else plan.hyper.tensor[group].data_ptr()
            stored, master = self._stored_and_master(i)
            tensors, rows = adam_rows(
                real(stored),
                real(state["exp_avg"]),
                real(state["exp_avg_sq"]),
                master,
                learning_rate,
                group,
                place[i],
            )
            if copied is not None:
                number = slot_of.setdefault(self.copies.whole(i), len(slot_of))
                own_slot = 0 if slots is None else slots[number].data_ptr()
                rows = (*rows, *self.copies.fp8_rows(i, first_tile, own_slot))
                first_tile += tiles_of(copied, stored.shape[0], stored.shape[1])
            entries.append(entry(tensors[1], real(gradient), tensors, rows))
        part = KernelPart(signature, members, build_table(plan.device, entries, capturable=self.capturable))
        if copied is not None:
            shapes = [(self.weights[i].shape[0], self.weights[i].shape[1]) for i in members]
            part.copies = CopyPart(copied, tile_tensors(copied, shapes, plan.device), slots)
        return part

    def _launch_part(
        self, plan: DevicePlan, part: KernelPart, counters: Tensor, is_gated: bool, is_counting: bool
    ) -> None:
        assert plan.hyper is not None
        assert plan.steps_before is not None
        divisor, skip = (plan.divisor, plan.skip) if is_gated else (None, None)
        shared = (plan.hyper.tensor, plan.steps_before, plan.steps, counters, divisor, skip, is_counting)
        copies = part.copies
        if copies is None:
            launch_adam(part.signature, part.table, *shared)
            return
        if copies.slots is not None:
            copies.slots[:, AMAX].zero_()
        launch_adam_copies(part.signature, copies.signature, part.table, copies.tile_tensor, *shared)

    def _run_reference(
        self,
        group: dict[str, Any],
        part: ReferencePart,  # noqa: ARG002
        members: list[int],
        gradients: list[Tensor | None],
        steps: list[float],
        divisor: float,
    ) -> None:
        states = [state for state in (self.state_of[i] for i in members) if state is not None]
        adam_reference(
            [real(self.weights[i]) for i in members],
            [real(gradient) for gradient in (gradients[i] for i in members) if gradient is not None],
            [real(state["exp_avg"]) for state in states],
            [real(state["exp_avg_sq"]) for state in states],
            [master for master in map(self._master, members) if master is not None],
            steps,
            hyperparameters(group, float(group["lr"])),
            divisor,
        )


def hyperparameters(group: dict[str, Any], lr: float) -> Hyperparameters:
    """A parameter group's options as the op takes them."""
    beta1, beta2 = group["betas"]
    return Hyperparameters(
        lr, beta1, beta2, group["eps"], group["weight_decay"], group["adam_w_mode"], group["bias_correction"]
    )
