"""Learning rates lie in tensors on the device, where graphs read them, whatever somebody puts in their place."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor


class Rates:
    """The tensors that graphs read the learning rates of an optimizer's groups in.

    Args:
        device: where the parameters lie.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: list[Tensor | None] = []

    def keep(self, optimizer: torch.optim.Optimizer) -> None:
        """Put each group's rate in the tensor that it had, so that no step has to be captured anew for it.

        A group that shares its tensor with another gets one of its own, since they may be given different numbers. A
        number stays one where the optimizer does not take tensors, which those with `capturable` do.
        """
        groups = optimizer.param_groups
        self._known += [None] * (len(groups) - len(self._known))
        readers = Counter(id(rate) for rate in self._known[: len(groups)] if rate is not None)
        for number, group in enumerate(groups):
            given, rate = group.get("lr"), self._known[number]
            if given is None or given is rate:
                continue
            if rate is not None and readers[id(rate)] == 1:
                if isinstance(given, Tensor):
                    rate.copy_(given.reshape(rate.shape), non_blocking=True)
                else:
                    rate.fill_(given)  # a launch with the number, where a copy from the host may wait
            elif isinstance(given, Tensor) and given.device == self._device:
                rate = given
            elif group.get("capturable", False):
                rate = torch.full((), float(given), dtype=torch.float32, device=self._device)
            else:
                rate = None
            self._known[number] = rate
            if rate is not None:
                group["lr"] = rate
