"""What the optimizers of Apex and of Transformer Engine do around a step of fusestep's.

- `step` takes a GradScaler; `zero_grad` has a habit that was chosen in the constructor.
- Scales of delayed scaling are renewed before the step, as in Transformer Engine, so that the FP8 copies of weights
  that the step writes are those that a run which is resumed here would cast.
- Steps are counted in groups too: schedulers read `group["step"]`, and scripts set it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from fusestep import fp8
from fusestep.compat.implementation import choice
from fusestep.compat.report import served
from fusestep.fp8 import context

if TYPE_CHECKING:
    from fusestep.optim.base import FusedOptimizer as Base
else:
    Base = object


class DropInOptimizer(Base):
    """Mixed into each of fusestep's optimizers.

    Attributes:
        SERVED_BY: the fusestep class behind it.
        op: the op behind it.
        counts_steps: whether groups count steps. The count is an int; where the device may skip a step, and where
            `lr` is kept on it, a tensor there.
        set_grad_none: what zero_grad does when it is not told: gradients become None, or 0. None is None.
        own_attributes: what a pickle keeps beside fusestep's.
    """

    SERVED_BY: ClassVar[str]
    op: ClassVar[str]
    counts_steps: ClassVar[bool] = True
    own_attributes: ClassVar[tuple[str, ...]] = ("set_grad_none", "_shown")
    set_grad_none: bool | None = None
    #: The counts that groups had after the last step or loading, to know those that a script put there.
    _shown: tuple[Any, ...] = ()
    #: The steps taken before the first.
    _first_step = 0.0

    def _served(self, package: str) -> None:
        """The end of every constructor. A class that a script derived is told as the one that it comes from."""
        kind = next(kind for kind in type(self).__mro__ if kind.__module__.startswith(package))
        name = f"{package}.{kind.__name__}"
        served(name, self.SERVED_BY)
        has_told = False

        def tell(*_: Any) -> None:
            """At the first step, since parameters may go to a device after the optimizer was made."""
            nonlocal has_told
            first = next((p for group in self.param_groups for p in group["params"]), None)
            if first is not None and not has_told:
                has_told = True
                served(name, f"{self.SERVED_BY}, {choice(self.op, first).implementation}")

        self.register_step_pre_hook(tell)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **{name: getattr(self, name) for name in self.own_attributes}}

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear every gradient; to None or to 0 as `set_grad_none` says, unless told here."""
        super().zero_grad(self.set_grad_none is not False if set_to_none is None else set_to_none)

    # No parameter is called grad_scaler: by that name torch.amp.GradScaler would know it, and leave unscaling out.
    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None, *scaler: Any, **by_name: Any
    ) -> float | None:
        """One step; see the class of fusestep's.

        Args:
            closure: computes the loss and gradients.
            scaler: `grad_scaler`, second or by name: a torch.amp.GradScaler that the gradients are scaled by, unless
                it has unscaled them already. `scaler.step(optimizer)` needs none.
        """
        if len(scaler) > 1:
            raise TypeError(f"{type(self).__name__}.step takes a closure and a grad_scaler.")
        if scaler:
            by_name["grad_scaler"] = scaler[0]

        def evaluate() -> float:
            assert closure is not None
            loss = closure()
            renew_scales()
            return loss

        if closure is None:
            renew_scales()
        self._take_counts()
        with scaled_by(self, by_name):
            is_certain = not self.capturable and getattr(self, "found_inf", None) is None
            is_certain &= all(group["max_grad_norm"] is None for group in self.param_groups)
            before = None if is_certain else self.applied_steps.clone()
            loss: float | None = without_hooks(super().step)(None if closure is None else evaluate)
        if self.counts_steps:
            self._count(before)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See the class of fusestep's."""
        super().load_state_dict(state_dict)
        if self.counts_steps:
            for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
                if group["params"] and "step" in saved:
                    group["step"] = int(saved["step"])
            self._shown = tuple(group.get("step") for group in self.param_groups)

    def _take_counts(self) -> None:
        """Have parameters count from where a script put their group's `step`."""
        shown = (*self._shown, *(None for _ in self.param_groups))
        for group, before in zip(self.param_groups, shown, strict=False):
            step = group.get("step") if self.counts_steps else None
            is_ours = step is before or (isinstance(step, int) and isinstance(before, int) and step == before)
            for parameter in () if is_ours or step is None else group["params"]:
                held = self.state[parameter].setdefault("step", torch.zeros(()))
                held.copy_(torch.as_tensor(step).reshape(()))

    def _count(self, before: Tensor | None) -> None:
        """Show in the groups that a step was taken; `before` is what was counted before one that may be skipped."""
        members = [p for group in self.param_groups for p in group["params"]]
        if all(p.grad is None and getattr(p, "main_grad", None) is None for p in members):
            return
        for group in self.param_groups:
            if not group["params"]:
                continue
            step = group.get("step", int(self._first_step))
            if before is None:
                group["step"] = step + 1
                continue
            if not isinstance(step, Tensor):
                shape = (1,) if self.capturable else ()
                step = torch.full(shape, step, dtype=torch.int32, device=group["params"][0].device)
            # In place, so that a CUDA graph counts too.
            group["step"] = step.add_((self.applied_steps - before).to(step.device, non_blocking=True))
        self._shown = tuple(group.get("step") for group in self.param_groups)


def renew_scales() -> None:
    """Have amaxes enter the histories of delayed scaling and renew scales, unless a region goes on.

    Not while a CUDA graph is captured, whose replays would do it beside the regions that begin between them.
    """
    is_capturing = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    if not context.is_inside() and not is_capturing:
        # A region rolls as it begins.
        with torch.enable_grad(), fp8.fp8_autocast():
            pass


@contextmanager
def scaled_by(optimizer: Any, options: dict[str, Any]) -> Iterator[None]:
    """Within it `optimizer.grad_scale` and `found_inf` are what `GradScaler.step` would have set.

    Args:
        options: the keywords of `step`: nothing, or grad_scaler.
    Raises: TypeError for other keywords.
    """
    scaler: torch.amp.GradScaler | None = options.pop("grad_scaler", None)
    if options:
        raise TypeError(f"{type(optimizer).__name__}.step has no argument {next(iter(options))!r}.")
    if scaler is None or not scaler.is_enabled():
        yield
        return
    state = scaler._per_optimizer_states[id(optimizer)]
    is_unscaled = state["stage"] is OptState.UNSCALED
    if not state["found_inf_per_device"]:
        scaler._check_inf_per_device(optimizer)
    found = list(state["found_inf_per_device"].values())
    optimizer.grad_scale = None if is_unscaled else scaler._get_scale_async()
    optimizer.found_inf = sum(one.to(found[0].device, non_blocking=True) for one in found)
    try:
        yield
    finally:
        del optimizer.grad_scale, optimizer.found_inf


def without_hooks(step: Callable[..., Any]) -> Callable[..., Any]:
    """A base class's bound `step` less the hooks that torch wraps around it, which the derived one's runs already."""
    function: Any = getattr(step, "__func__", step)
    if not getattr(function, "hooked", False):
        return step
    inner: Callable[..., Any] = function.__wrapped__.__get__(getattr(step, "__self__", None))
    return inner
