"""What graphs of a step hold of its model and optimizer, as it was when they were captured.

All of it is compared before each replay, at the host's expense: identity where that tells all, as it mostly does.
"""

from __future__ import annotations

from operator import is_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fusestep.distributed.groups import local_of
from fusestep.fp8.held import Copies, Part, part_of
from fusestep.fp8.settled import Versions, holding, unwritten, versions
from fusestep.fp8.state import Slots
from fusestep.nn.fp8_module import FP8Module

if TYPE_CHECKING:
    from fusestep.graph.train_step import TrainStep

#: Copies of weights in FP8 or in 16 bits, by the weight.
Held = dict[nn.Parameter, Part[Copies]]


class Baked:
    """What the graphs of a step hold."""

    def __init__(self, step: TrainStep) -> None:
        self._step = step
        self.forget()

    def forget(self) -> None:
        """Hold nothing, as there are no graphs."""
        self._known: list[Any] = []
        self._options: list[Any] = []
        self._rates: list[Any] = []
        self._relied_on: Held = {}
        self._watched: Versions = {}
        self._tables: Versions = {}
        self._settled: frozenset[int] = frozenset()

    def remember(self) -> None:
        """The first graph was captured: from now on everything stays as it is."""
        self._known, self._options = self._identities(), self._numbers()
        self._rates = [group.get("lr") for group in self._step.optimizer.param_groups]

    def has_changed(self) -> bool:
        """Whether anything did that graphs hold; a learning rate that is a number goes to where they read it."""
        self._keep_learning_rates()
        found = self._identities()
        is_same = len(found) == len(self._known) and all(map(is_, found, self._known))
        return not is_same or self._numbers() != self._options or self._has_lost_a_scale()

    def current_copies(self) -> Held:
        """The copies of weights that a capture of now would read."""
        return {p: part for p in self._step.model.parameters() if (part := part_of(p)) and part.is_current(p)}

    def watch_slots(self) -> None:
        """The last step before a capture begins: tables of slots in which it writes itself are not relied on."""
        self._watched = versions(self._states())

    def settled_slots(self) -> frozenset[int]:
        """The slots that hold a scale, on which a capture of now may rely. The host waits."""
        self._watched = unwritten(self._watched)
        return holding(self._watched)

    def rely_on(self, copies: Held, settled: frozenset[int]) -> None:
        """A graph reads these copies, and relies on these `settled_slots` to hold a scale."""
        self._relied_on |= copies
        self._tables |= self._watched
        self._settled |= settled

    def stale_copies(self) -> list[nn.Parameter]:
        """Weights that a graph reads as copies which are not of what the weights are, as after loading a state."""
        return [parameter for parameter, part in self._relied_on.items() if not part.is_current(parameter)]

    def _keep_learning_rates(self) -> None:
        """A number that someone put in the place of the tensor which the graph reads goes into that tensor."""
        for group, rate in zip(self._step.optimizer.param_groups, self._rates, strict=False):
            given = group.get("lr")
            if isinstance(rate, Tensor) and given is not rate:
                rate.copy_(torch.as_tensor(given), non_blocking=True)
                group["lr"] = rate

    def _has_lost_a_scale(self) -> bool:
        """Whether a slot that graphs rely on has no scale any more. The host waits where somebody wrote in a table."""
        if len(unwritten(self._tables)) == len(self._tables):
            return False
        self._tables = {table: table._version for table in self._tables}
        return not self._settled <= holding(self._tables)

    def _states(self) -> list[Slots]:
        """Scaling state of the modules that cast to FP8."""
        modules = self._step.model.modules()
        return [m.fp8_state for m in modules if isinstance(m, FP8Module) and m.fp8_state is not None]

    def _identities(self) -> list[Any]:
        """Objects that must still be the same ones."""
        step = self._step
        found: list[Any] = [step.model, step.loss_fn, step.optimizer, step.scaler, step.before, step.fp8_recipe]
        for module in step.model.modules():
            found.append(module)
            found += module._parameters.values()
            found += module._buffers.values()
            found += module._forward_hooks.values()
            found += module._forward_pre_hooks.values()
            found += module._backward_hooks.values()
            found += module._backward_pre_hooks.values()
            found.append(module.training)
        for state in step.optimizer.state.values():
            found += state.values()
        for group in step.optimizer.param_groups:
            found += group["params"]
        return found

    def _numbers(self) -> list[Any]:
        """Values that must still be equal: where parameters lie and whether they are trained, the options."""
        model, optimizer = self._step.model, self._step.optimizer
        found: list[Any] = [self._step.autocast, self._step.accumulate]
        found += [(local_of(p).data_ptr(), p.requires_grad) for p in model.parameters()]
        found += [b.data_ptr() for b in model.buffers()]
        found += [state.number for state in self._states()]
        for group in optimizer.param_groups:
            found.append([(name, value) for name, value in group.items() if name not in ("params", "lr")])
            rate = group.get("lr")
            found.append(rate.data_ptr() if isinstance(rate, Tensor) else rate)
        return found


def host_values(optimizer: torch.optim.Optimizer, device: torch.device) -> dict[tuple[Any, str], Any]:
    """What an optimizer keeps elsewhere than on the device: a graph would hold it as it is at the capture."""
    found: dict[tuple[Any, str], Any] = {}
    owners: list[tuple[Any, dict[str, Any]]] = [*enumerate(optimizer.param_groups)]
    owners += [(id(parameter), state) for parameter, state in optimizer.state.items() if isinstance(state, dict)]
    for owner, values in owners:
        for name, value in values.items():
            if isinstance(value, Tensor) and value.device != device:
                found[owner, name] = value.item() if value.numel() == 1 else (id(value), value._version)
            elif isinstance(value, (int, float)):
                found[owner, name] = value
    return found
