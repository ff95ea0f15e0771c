"""What amp does to an optimizer: fp32 masters in the place of 16-bit weights, unscaling, and steps that are skipped."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor

__all__ = ["Backward"]


class Backward:
    """Keeps an optimizer's gradients unscaled, in fp32 where it steps masters, over any number of backward passes.

    Args:
        optimizer: its `step` and `zero_grad` are replaced, and so are its 16-bit parameters if there are masters.
        keeps_masters: whether 16-bit parameters get fp32 masters.
    Attributes:
        is_scaled: whether gradients of a pass with delay_unscale=True wait for their unscaling.
        found: above 0 where a gradient was not finite since this was last looked at; None before any.
        skips: whether the next step does nothing.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, keeps_masters: bool) -> None:
        self.is_scaled = False
        self.found: Tensor | None = None
        self.skips = False
        self._optimizer = optimizer
        #: (the model's parameter, its master, the parameter's version when it was last equal to its master).
        self._masters: list[tuple[Tensor, Tensor, int]] = []
        self._sums: dict[Tensor, Tensor] = {}
        for group in optimizer.param_groups if keeps_masters else ():
            group["params"] = [self._with_master(parameter) for parameter in group["params"]]
        self._replace_methods()

    def _with_master(self, parameter: Tensor) -> Tensor:
        if parameter.dtype not in (torch.float16, torch.bfloat16):
            return parameter
        # From the rounded weights, which all ranks share; what was there before the cast they may not.
        master = torch.nn.Parameter(parameter.detach().float(), parameter.requires_grad)
        if parameter in self._optimizer.state:
            self._optimizer.state[master] = self._optimizer.state.pop(parameter)
        self._masters.append((parameter, master, parameter._version))
        return master

    def _replace_methods(self) -> None:
        step, zero_grad = self._optimizer.step, self._optimizer.zero_grad

        def new_step(_: Any, closure: Any = None, **options: Any) -> Any:
            if closure is not None and self._masters:
                raise RuntimeError("amp: step(closure) does not go with master weights; call backward before step.")
            if self.skips:
                self.skips = False
                return None
            result = step(**options) if closure is None else step(closure, **options)
            self._copy_to_model()
            return result

        def new_zero_grad(_: Any, *args: Any, **options: Any) -> None:
            zero_grad(*args, **options)
            for parameter, _master, _version in self._masters:
                parameter.grad = None
            self._sums.clear()
            self.is_scaled = False

        self._optimizer.step = types.MethodType(new_step, self._optimizer)  # type: ignore[method-assign]
        self._optimizer.zero_grad = types.MethodType(new_zero_grad, self._optimizer)  # type: ignore[method-assign]

    def has_masters(self) -> bool:
        return bool(self._masters)

    def prepare(self) -> None:
        """Before a backward pass: set aside what was summed so far, and take in weights that were loaded."""
        for number, (parameter, master, version) in enumerate(self._masters):
            if parameter._version != version:
                master.data.copy_(parameter.detach())
                self._masters[number] = (parameter, master, parameter._version)
        if self.is_scaled:
            return
        for target in self._targets():
            if target.grad is not None:
                self._sums[target] = target.grad
                target.grad = None
        for parameter, _, _ in self._masters:
            parameter.grad = None

    def unscale(self, scale: float) -> None:
        """After it: take the scale out of the gradients, look at them, and add what was set aside."""
        for parameter, master, _ in self._masters:
            if parameter.grad is not None:
                master.grad = parameter.grad.float()
                parameter.grad = None
        targets = [target for target in self._targets() if target.grad is not None]
        flag = _unscale_all([target.grad for target in targets if target.grad is not None], scale)
        for target in targets:
            before = self._sums.pop(target, None)
            if before is not None and target.grad is not None:
                target.grad.add_(before)
        for target, before in self._sums.items():  # those without a gradient in this pass
            target.grad = before
        self._sums.clear()
        self.is_scaled = False
        if flag is not None:
            self.found = flag if self.found is None else self.found + flag

    def take_overflow(self) -> bool:
        """Whether a gradient was not finite since this was last asked; waits for the device."""
        found, self.found = self.found, None
        return found is not None and bool(found.item())

    def _targets(self) -> list[Tensor]:
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    @torch.no_grad()
    def _copy_to_model(self) -> None:
        if not self._masters:
            return
        parameters = [parameter for parameter, _, _ in self._masters]
        torch._foreach_copy_(parameters, [master for _, master, _ in self._masters])
        self._masters = [(parameter, master, parameter._version) for parameter, master, _ in self._masters]


def _unscale_all(gradients: list[Tensor], scale: float) -> Tensor | None:
    """Divide in place; whether something was not finite, as a number on the first device."""
    together: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        together.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    found = []
    for (device, _), own in together.items():
        flag = torch.zeros(1, device=device)
        torch._amp_foreach_non_finite_check_and_unscale_(own, flag, torch.full((1,), 1.0 / scale, device=device))
        found.append(flag)
    return sum((flag.to(found[0].device) for flag in found[1:]), found[0]) if found else None
