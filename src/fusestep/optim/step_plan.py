"""All that an Adam step keeps between calls: which tensors are stepped by which launch, and where they lie.

A plan is built at the first step and again when something moved that its tables hold. In the ordinary step nothing
moved but the gradients, and their addresses alone are compared and, where they changed, uploaded. Parameters that
have no gradient in this step stay in their table with an address of 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor

from fusestep.dispatch import uses_triton
from fusestep.fp8.copies import WeightCopies, revision
from fusestep.fp8.tensor import Float8Tensor
from fusestep.ops import adam_copies
from fusestep.ops.adam_copies import CopySignature, launch_adam_copies
from fusestep.ops.adam_kernel import AdamSignature, adam_rows, launch_adam
from fusestep.ops.adam_reference import HYPER_ROW, Hyperparameters, adam_reference
from fusestep.ops.gradient_norm import NormScratch, combine_norms, norm_reference, to_device, verdict_of
from fusestep.ops.roll_scales import AMAX, SLOT
from fusestep.ops.tensor_table import DeviceArray, TensorTable, build_table, entry, gradient_address, upload
from fusestep.optim.weight_copies import copies_to_write, copy_signature, count_versions, finish_copies, stepped_weight

State = dict[str, Any]


@dataclass(frozen=True)
class Scaling:
    """What a loss scaler left for this step: its scale, and whether it saw a non-finite gradient; None for neither."""

    scale: Tensor | None
    found_inf: Tensor | None

    @property
    def is_active(self) -> bool:
        return self.scale is not None or self.found_inf is not None

    def on(self, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
        """Both as 0-d fp32 on a device, or neither."""
        if not self.is_active:
            return None, None
        scale = torch.ones((), device=device) if self.scale is None else to_device(self.scale, device)
        found_inf = torch.zeros((), device=device) if self.found_inf is None else to_device(self.found_inf, device)
        return scale, found_inf


@dataclass(eq=False)
class KernelPart:
    """Parameters of one signature: one launch. `members` are places in the plan's list of parameters."""

    signature: AdamSignature
    members: list[int]
    table: TensorTable
    copies: CopyPart | None = None


@dataclass(eq=False)
class CopyPart:
    """What a launch needs that writes FP8 copies too.

    `tile_tensor`: see adam_copies.py; `slots`: (members, 4) fp32, of matrices whose scales are their own, or None.
    """

    signature: CopySignature
    tile_tensor: Tensor
    slots: Tensor | None


@dataclass(eq=False)
class ReferencePart:
    """Parameters of one signature and one group, stepped by the reference."""

    signature: AdamSignature
    group: int
    members: list[int]


@dataclass(eq=False)
class DevicePlan:
    """The parts of one device, and what they share.

    `members` are all parameters on the device, those without a gradient too, so that a step count keeps its place in
    `steps` whatever receives gradients. `verdict` is (norm, divisor, skip).
    """

    device: torch.device
    members: list[int]
    steps: Tensor
    verdict: Tensor
    kernels: list[KernelPart] = field(default_factory=list)
    references: list[ReferencePart] = field(default_factory=list)
    steps_before: Tensor | None = None
    hyper: DeviceArray | None = None
    scratch: NormScratch | None = None

    def __post_init__(self) -> None:
        # Views are made once; each would cost the host a microsecond a step.
        self.norm, self.divisor, self.skip = self.verdict.unbind()


def real(tensor: Tensor) -> Tensor:
    """A complex tensor as its real and imaginary parts, which Adam treats as two numbers; others as they are."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def hyperparameters(group: dict[str, Any], lr: float) -> Hyperparameters:
    """A parameter group's options as the op takes them."""
    beta1, beta2 = group["betas"]
    return Hyperparameters(
        lr, beta1, beta2, group["eps"], group["weight_decay"], group["adam_w_mode"], group["bias_correction"]
    )


def lr_address(lr: Tensor | float) -> int:
    """What tells one learning-rate tensor from another; 0 for numbers and for tensors that the host can read."""
    return lr.data_ptr() if isinstance(lr, Tensor) and lr.device.type != "cpu" else 0


class StepPlan:
    """Built from the optimizer's lists, which must be in one order; see the module's docstring.

    Args:
        groups: the optimizer's parameter groups.
        parameters, group_of: every parameter and the number of its group.
        state_of: the state of each parameter, or None; moments and masters lie as `torch.empty_like(parameter)` does.
        gradients: of this step, None where missing.
        verdicts: (3,) fp32 for each device, kept by the optimizer.
        capturable: whether a CUDA graph may capture steps of this plan.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        parameters: list[Tensor],
        group_of: list[int],
        state_of: list[State | None],
        gradients: list[Tensor | None],
        verdicts: dict[torch.device, Tensor],
        capturable: bool,
    ) -> None:
        self.parameters = parameters
        self.weights = [stepped_weight(p, state) for p, state in zip(parameters, state_of, strict=True)]
        self.copies = [copies_to_write(p) for p in parameters]
        self.group_of = group_of
        self.state_of = state_of
        self.capturable = capturable
        self.is_captured = False
        self.devices: list[DevicePlan] = []

        by_device: dict[torch.device, list[int]] = {}
        for i, parameter in enumerate(parameters):
            by_device.setdefault(parameter.device, []).append(i)
        for device, members in by_device.items():
            if any(state_of[i] for i in members):
                self.devices.append(self._plan_device(groups, device, members, gradients, verdicts))
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
        by_signature: dict[tuple[AdamSignature, CopySignature | None], list[int]] = {}
        for i in members:
            gradient, state = gradients[i], self.state_of[i]
            if gradient is not None and state is not None:
                signature = AdamSignature(
                    device,
                    real(self.weights[i]).dtype,
                    real(gradient).dtype,
                    real(state["exp_avg"]).dtype,
                    self._master(i) is not None,
                )
                copied = self._copied(i, gradient) if signature.unsupported() is None else None
                by_signature.setdefault((signature, copied), []).append(i)
        kernels = {s: uses_triton("adam", device, s[0].unsupported()) for s in by_signature}
        if any(kernels.values()):
            rows = [self._hyper_row(group) for group in groups]
            hyper = torch.empty(len(groups), HYPER_ROW, device=device)
            plan.hyper = DeviceArray(rows, hyper, capturable=self.capturable)
            plan.steps_before = torch.empty_like(plan.steps)
        place = {member: p for p, member in enumerate(members)}
        for (signature, copied), its_members in by_signature.items():
            if kernels[signature, copied]:
                plan.kernels.append(self._kernel_part(groups, plan, signature, copied, its_members, gradients, place))
                continue
            by_group: dict[int, list[int]] = {}
            for i in its_members:
                by_group.setdefault(self.group_of[i], []).append(i)
            plan.references += [ReferencePart(signature, group, of_group) for group, of_group in by_group.items()]
        if plan.kernels:
            tables = [(part.table, part.signature.gradient) for part in plan.kernels]
            plan.scratch = NormScratch(device, tables, plan.verdict)
        return plan

    def _master(self, i: int) -> Tensor | None:
        """The fp32 weight that is stepped in a parameter's stead, which then receives a rounded copy."""
        state = self.state_of[i]
        master: Tensor | None = None if state is None else state.get("master_param")
        return None if master is self.weights[i] else master

    def _copied(self, i: int, gradient: Tensor) -> CopySignature | None:
        """How the update's kernel writes a parameter's copies, None where it does not."""
        copies, state, weight = self.copies[i], self.state_of[i], self.weights[i].detach()
        if copies is None or state is None:
            return None
        master = self._master(i)
        tensors = [weight, gradient, state["exp_avg"], state["exp_avg_sq"], *([] if master is None else [master])]
        return copy_signature(copies, tensors)

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
        first_tile = 0
        for number, i in enumerate(members):
            gradient, state, group = gradients[i], self.state_of[i], self.group_of[i]
            assert gradient is not None
            assert state is not None
            lr = groups[group]["lr"]
            # The kernel reads a learning rate where it lies; one that lies elsewhere has a place in `hyper`.
            learning_rate = lr.data_ptr() if lies_on(lr, plan.device) else plan.hyper.tensor[group].data_ptr()
            tensors, rows = adam_rows(
                real(self.weights[i].detach()),
                real(state["exp_avg"]),
                real(state["exp_avg_sq"]),
                self._master(i),
                learning_rate,
                group,
                place[i],
            )
            if copied is not None:
                copies, (height, width) = self.copies[i], gradient.shape
                assert copies is not None
                slot = 0 if slots is None else copies.slot_address() or slots[number].data_ptr()
                quantized = copies.allocate((height, width), plan.device)
                rows = (*rows, *adam_copies.copy_rows(first_tile, quantized, slot))
                first_tile += adam_copies.tiles_of(copied, height, width)
            entries.append(entry(tensors[1], real(gradient), tensors, rows))
        part = KernelPart(signature, members, build_table(plan.device, entries, capturable=self.capturable))
        if copied is not None:
            shapes = [(self.weights[i].shape[0], self.weights[i].shape[1]) for i in members]
            part.copies = CopyPart(copied, adam_copies.tile_tensors(copied, shapes, plan.device), slots)
        return part

    def _hyper_row(self, group: dict[str, Any]) -> list[float]:
        lr = group["lr"]
        return hyperparameters(group, 0.0 if lr_address(lr) else float(lr)).row()

    def _remember(self, groups: Sequence[dict[str, Any]], gradients: list[Tensor | None]) -> None:
        self._lr_addresses = [lr_address(group["lr"]) for group in groups]
        self._parameter_keys = _keys(self.weights)
        self._revision = revision()
        # Whose memory the tables hold: a weight that lives in FP8 has its transpose made when it is first asked for.
        owners: list[Float8Tensor | WeightCopies] = []
        for part in (part for plan in self.devices for part in plan.kernels if part.copies is not None):
            for i in part.members:
                parameter, copies = self.parameters[i], self.copies[i]
                if isinstance(parameter, Float8Tensor):
                    owners.append(parameter)
                elif copies is not None:
                    owners.append(copies)
        self._quantized = [(owner, owner.quantized) for owner in owners]
        present = [g for g in gradients if g is not None]
        known = iter(zip(*_gradient_keys(present), strict=True))
        # A parameter without a gradient so far has no place in a table: its first one matches nothing.
        self._gradient_keys = [None if g is None else next(known) for g in gradients]
        self._state_values = self._values()
        self._state_tensors = [value for value in self._state_values if isinstance(value, Tensor)]
        self._state_addresses = list(map(Tensor.data_ptr, self._state_tensors))

    def _values(self) -> list[Any]:
        return [value for state in self.state_of if state for value in state.values()]

    def take(self, groups: Sequence[dict[str, Any]], gradients: list[Tensor | None]) -> bool:
        """Point the tables at this step's gradients; False if anything else moved, and then a new plan is needed.

        This is most of what a step costs the host, hence the loops that run in C.
        """
        values = self._values()
        if (
            len(values) != len(self._state_values)
            or not all(map(is_, values, self._state_values))
            or list(map(Tensor.data_ptr, self._state_tensors)) != self._state_addresses
            or _keys(self.weights) != self._parameter_keys
            or revision() != self._revision
            or any(owner.quantized is not quantized for owner, quantized in self._quantized)
            or [lr_address(group["lr"]) for group in groups] != self._lr_addresses
        ):
            return False
        present = [g for g in gradients if g is not None]
        known = self._gradient_keys
        if len(present) < len(gradients):
            known = [key for key, g in zip(known, gradients, strict=True) if g is not None]
        if list(zip(*_gradient_keys(present), strict=True)) != known:
            return False
        parts = [part for plan in self.devices for part in plan.kernels]
        addresses = [[gradient_address(gradients[i]) for i in part.members] for part in parts]
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
            for plan in self.devices:
                scale, found_inf = scaling.on(plan.device)
                assert scale is not None
                assert found_inf is not None
                plan.divisor.copy_(scale)
                plan.skip.copy_(found_inf)
        is_counted = False
        for plan in self.devices:
            if plan.kernels:
                is_counted |= self._launch(groups, plan, None if is_counted else counters, is_gated)
            if plan.references and not (is_gated and plan.skip.item()):
                self._run_references(groups, plan, gradients, float(plan.divisor) if is_gated else 1.0)
            self._finish(plan.references, gradients)
            self._finish(plan.kernels, gradients)
        if not is_counted:
            skip = to_device(self.devices[0].skip, counters.device) if is_gated else counters.new_zeros(())
            counters += torch.stack([skip == 0, skip != 0])

    def _judge(self, gradients: list[Tensor | None], max_norm: float, scaling: Scaling) -> None:
        """Write norm, divisor and skip of this step to every device."""
        first = self.devices[0]
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
        # Where a GPU takes part, the numbers meet there, so that the host need not wait for them.
        home = next((plan.device for plan in self.devices if plan.device.type == "cuda"), first.device)
        verdict = verdict_of(combine_norms(norms, home), max_norm, scaling.scale, scaling.found_inf)
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
        for number, part in enumerate(plan.kernels):
            # Where another launch counts, any int64 memory will do.
            counted = counters if counters is not None and is_counting else part.table.rows
            self._launch_part(plan, part, counted, is_gated, is_counting and number == 0)
        return is_counting

    def _launch_part(
        self, plan: DevicePlan, part: KernelPart, counters: Tensor, is_gated: bool, is_counting: bool
    ) -> None:
        """Update the parameters of one part; see `launch_adam`."""
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

    def _finish(self, parts: Sequence[KernelPart] | Sequence[ReferencePart], gradients: list[Tensor | None]) -> None:
        """After the update: what torch and the modules have to know of the parameters that were stepped.

        Whether a step is skipped is the device's to know, so a skipped one counts here as well.
        """
        for part in parts:
            members = [i for i in part.members if gradients[i] is not None]
            count_versions([self.parameters[i] for i in members])
            by_kernel = isinstance(part, KernelPart) and part.copies is not None
            for i in members:
                copies = self.copies[i]
                if copies is not None:
                    finish_copies(self.parameters[i], self.weights[i], copies, by_kernel=by_kernel)

    def _run_references(
        self, groups: Sequence[dict[str, Any]], plan: DevicePlan, gradients: list[Tensor | None], divisor: float
    ) -> None:
        present = {i for part in plan.references for i in part.members if gradients[i] is not None}
        plan.steps += torch.tensor([float(i in present) for i in plan.members]).to(plan.device)
        steps = dict(zip(plan.members, plan.steps.tolist(), strict=True))
        for part in plan.references:
            members = [i for i in part.members if i in present]
            if members:
                self._run_reference(groups[part.group], part, members, gradients, [steps[i] for i in members], divisor)

    def _run_reference(
        self,
        group: dict[str, Any],
        part: ReferencePart,
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
            [state["master_param"] for state in states] if part.signature.has_master else [],
            steps,
            hyperparameters(group, float(group["lr"])),
            divisor,
        )


def lies_on(lr: Tensor | float, device: torch.device) -> bool:
    """Whether the kernel can read this learning rate where it lies."""
    return isinstance(lr, Tensor) and lr.device == device and lr.dtype == torch.float32 and lr.device.type != "cpu"


_dtype = attrgetter("dtype")


def _keys(tensors: list[Tensor]) -> tuple[list[int], list[torch.dtype], list[tuple[int, ...]]]:
    """What a table's entries hold of parameters: addresses, dtypes, strides."""
    return list(map(Tensor.data_ptr, tensors)), list(map(_dtype, tensors)), list(map(Tensor.stride, tensors))


def _gradient_keys(gradients: list[Tensor]) -> tuple[list[torch.dtype], list[tuple[int, ...]], list[int]]:
    """What a table's entries depend on, other than the gradients' addresses: dtypes, strides, alignment."""
    addresses, dtypes, strides = _keys(gradients)
    return dtypes, strides, [address & 15 for address in addresses]


def pack_steps(states: Sequence[State | None], device: torch.device) -> Tensor:
    """The step counts of one device in one fp32 tensor, and each state's `step` a 0-d view of it.

    Counts that already lie so keep their memory, which a CUDA graph may hold. No wait for the device.
    """
    present = [(place, state) for place, state in enumerate(states) if state is not None]
    packed = _packed_already(present, len(states), device)
    if packed is not None:
        return packed
    # Counts that the host can read are uploaded together; those on a device are gathered there.
    on_host = [0.0 if s is None or s["step"].device.type == "cuda" else float(s["step"]) for s in states]
    packed = upload(on_host, torch.float32, device)
    on_device = [(place, state["step"]) for place, state in present if state["step"].device.type == "cuda"]
    if on_device:
        places = upload([place for place, _ in on_device], torch.int64, device)
        packed[places] = torch.stack([to_device(step, device) for _, step in on_device])
    for place, state in present:
        state["step"] = packed[place]
    return packed


def _packed_already(present: list[tuple[int, State]], count: int, device: torch.device) -> Tensor | None:
    """The tensor of which every present step is the view at its place, if there is one."""
    first_place, first_state = present[0]
    first: Tensor = first_state["step"]
    start = first.storage_offset() - first_place
    if first.device != device or first.dtype != torch.float32:
        return None
    if start < 0 or (start + count) * first.element_size() > first.untyped_storage().nbytes():
        return None
    memory = first.untyped_storage().data_ptr()
    for place, state in present:
        step: Tensor = state["step"]
        if step.shape != () or step.device != device or step.dtype != torch.float32:
            return None
        if step.untyped_storage().data_ptr() != memory or step.storage_offset() != start + place:
            return None
    return first.as_strided((count,), (1,), start)
