"""What graphs of a step hold of its model and optimizer, as it was when they were captured.

All of it is compared before each replay, at the host's expense: identity where that tells all, as it mostly does. There
are thousands of objects to look at in a model of many layers, so that those of a kind are read and compared without a
line of Python for each.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, repeat
from operator import attrgetter, is_, itemgetter, methodcaller
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from fusestep.distributed.groups import any_dtensor, local_of
from fusestep.fp8.held import Copies, Part, part_of, revision
from fusestep.fp8.settled import Versions, holding, unwritten, versions
from fusestep.fp8.state import Slots
from fusestep.graph.attributes import Attributes
from fusestep.graph.outside import Outside
from fusestep.nn.fp8_module import FP8Module

if TYPE_CHECKING:
    from fusestep.graph.train_step import TrainStep

#: Copies of weights in FP8 or in 16 bits, by the weight.
Held = dict[nn.Parameter, Part[Copies]]

# What a module has of other modules, of tensors, and of hooks.
_children = attrgetter("_modules")
_tensors = attrgetter("_parameters", "_buffers")
_hooks = attrgetter("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")

_TENSOR_HOOKS = attrgetter("_backward_hooks"), attrgetter("_post_accumulate_grad_hooks")
_STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")

_members = itemgetter("params")
_values = methodcaller("values")
_requires_grad = attrgetter("requires_grad")
_version = attrgetter("_version")

#: The last part of what is compared, so that of two neither is the beginning of the other.
_END = (object(),)


class Baked:
    """What the graphs of a step hold."""

    def __init__(self, step: TrainStep) -> None:
        self._owner = weakref.ref(step)  # a cycle would keep the graphs' memory until Python looks for cycles
        self._attributes = Attributes()
        self._outside = Outside(step)
        self.forget()

    @property
    def _step(self) -> TrainStep:
        step = self._owner()
        assert step is not None
        return step

    def forget(self) -> None:
        """Hold nothing, as there are no graphs."""
        self._is_held = False
        self._modules: list[nn.Module] = []
        self._casting: list[FP8Module] = []
        self._parameters: list[nn.Parameter] = []
        self._buffers: list[Tensor] = []
        self._attributes.remember(())
        self._outside.forget()
        self._are_sharded = False
        self._objects: list[list[Any]] = []
        self._values: list[Any] = []
        self._options: list[dict[str, Any]] = []
        self._copies: list[Copies | None] = []
        self._revision = -1
        self._relied_on: Held = {}
        self._watched: Versions = {}
        self._tables: Versions = {}
        self._settled: frozenset[int] = frozenset()

    def remember(self) -> None:
        """A first graph is about to be captured: from now on everything stays as it is."""
        if self._is_held:
            return
        self._is_held = True
        self._outside.remember()
        self._modules = self.modules()
        self._parameters = list(dict.fromkeys(p for one in self._modules for p in one.parameters(recurse=False)))
        self._buffers = list(dict.fromkeys(b for one in self._modules for b in one.buffers(recurse=False)))
        self._casting = [module for module in self._modules if isinstance(module, FP8Module)]
        self._attributes.remember(self._modules, self._outside.names)
        self._are_sharded = any_dtensor(self._parameters)
        self._objects = [[*_flat(parts)] for _, parts in self._found_objects()]
        self._values = [values for _, values in self._found_values()]
        self._options = self._found_options()
        self._copies, self._revision = self._found_copies(), revision()

    def has_changed(self) -> str | None:
        """What changed that graphs hold, in words; None for nothing, or where nothing is remembered."""
        if not self._is_held:
            return None
        for (what, parts), objects in zip(self._found_objects(), self._objects, strict=True):
            if not all(map(is_, _flat(parts), objects)):
                return what
        if (what_else := self._attributes.changed() or self._outside.changed()) is not None:
            return what_else
        for (what, found), known in zip(self._found_values(), self._values, strict=True):
            if found != known:
                return what
        groups = self._found_options()
        if len(groups) != len(self._options):
            return "the optimizer's groups"
        for number, (options, before) in enumerate(zip(groups, self._options, strict=True)):
            if options != before:
                name = [*(options.keys() ^ before.keys()), *(n for n in options if options[n] != before.get(n))][0]
                return f"the option {name!r} in group {number} of {type(self._step.optimizer).__name__}"
        if self._revision != revision():
            if not all(map(is_, self._found_copies(), self._copies)):
                return "what the optimizer has to copy of the weights"
            self._revision = revision()
        return "a scale of FP8, which is gone" if self._has_lost_a_scale() else None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Around a run of the step's Python: what modules write in their plain attributes meanwhile is their own."""
        with self._attributes.running(self.modules()), self._outside.running():
            yield

    def modules(self) -> list[nn.Module]:
        """The model's modules, and those that loss_fn has from elsewhere."""
        found = chain(self._step.model.modules(), *(one.modules() for one in self._outside.modules()))
        return list(dict.fromkeys(found))

    def numbers_outside(self) -> dict[tuple[str, str], Any]:
        """Plain values that loss_fn reads from elsewhere, by (who reads it, its expression)."""
        return self._outside.numbers()

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

    def rely_on(self, copies: Held, settled: frozenset[int], *, is_first: bool) -> None:
        """A graph reads these copies, and relies on these `settled_slots` to hold a scale."""
        if is_first:  # copies that the capture itself has asked for, it writes
            self._copies, self._revision = self._found_copies(), revision()
        self._relied_on |= copies
        self._tables |= self._watched
        self._settled |= settled

    def stale_copies(self) -> list[nn.Parameter]:
        """Weights that a graph reads as copies which are not of what the weights are, as after loading a state."""
        return [parameter for parameter, part in self._relied_on.items() if not part.is_current(parameter)]

    def _has_lost_a_scale(self) -> bool:
        """Whether a slot that graphs rely on has no scale any more. The host waits where somebody wrote in a table."""
        if list(map(_version, self._tables)) == list(self._tables.values()):
            return False
        self._tables = {table: table._version for table in self._tables}
        return not self._settled <= holding(self._tables)

    def _states(self) -> list[Slots]:
        """Scaling state of the modules that cast to FP8."""
        modules = self._step.model.modules()
        return [m.fp8_state for m in modules if isinstance(m, FP8Module) and m.fp8_state is not None]

    def _found_objects(self) -> Iterator[tuple[str, Iterable[Iterable[Any]]]]:
        """Objects that must still be the same ones, in parts, and what they are in words."""
        step, modules = self._step, self._modules
        scaler: Any = step.scaler
        built = step.model, step.loss_fn, step.optimizer, scaler, step.before, step.fp8_recipe
        yield "what the step was built from", (built,)
        yield "the modules", _values_of(map(_children, modules))
        yield "a parameter or a buffer", _values_of(chain.from_iterable(map(_tensors, modules)))
        of_steps = [getattr(step.optimizer, name, {}) for name in _STEP_HOOKS]
        of_tensors = chain.from_iterable(map(read, self._parameters) for read in _TENSOR_HOOKS)
        yield "a hook", _values_of(chain(of_steps, chain.from_iterable(map(_hooks, modules)), of_tensors))
        of_scaler = getattr(scaler, "_scale", None), getattr(scaler, "_growth_tracker", None)
        states: Iterable[Any] = step.optimizer.state.values()
        if all(map(isinstance, states, repeat(dict))):
            states = map(_values, states)
        else:
            states = [one.values() if isinstance(one, dict) else (one,) for one in states]
        yield "the optimizer's state", chain((of_scaler,), states)
        yield "the optimizer's parameters", map(_members, step.optimizer.param_groups)

    def _found_values(self) -> Iterator[tuple[str, Any]]:
        """Values that must still be equal, and what they are in words."""
        step = self._step
        scaler: Any = step.scaler
        scaling: Any = None
        if scaler is not None and scaler.is_enabled():
            scaling = scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()
        yield "what the step was built from", (step.autocast, step.accumulate, scaling)
        parameters: Iterable[Any] = self._parameters
        yield "which parameters are trained", list(map(_requires_grad, parameters))
        if self._are_sharded:
            parameters = map(local_of, parameters)
        places = [*map(Tensor.data_ptr, parameters), *map(Tensor.data_ptr, self._buffers)]
        yield "where a parameter or a buffer lies", places
        states = [module.fp8_state for module in self._casting]
        yield "the state of FP8", [None if state is None else state.number for state in states]

    def _found_options(self) -> list[dict[str, Any]]:
        """The options of the optimizer's groups, a learning rate on the device by its address."""
        found = []
        for group in self._step.optimizer.param_groups:
            options = {name: _told(value) for name, value in group.items() if name not in ("params", "lr")}
            rate = group.get("lr")
            options["lr"] = rate.data_ptr() if isinstance(rate, Tensor) and rate.device.type != "cpu" else _told(rate)
            found.append(options)
        return found

    def _found_copies(self) -> list[Copies | None]:
        """The copies that the optimizer writes with each parameter."""
        return [None if part is None else part.copies for part in map(part_of, self._parameters)]


def _values_of(tables: Iterable[Any]) -> Iterator[Iterable[Any]]:
    """The values of each dictionary that is not empty; some may be None."""
    return map(_values, filter(None, tables))


def _flat(parts: Iterable[Iterable[Any]]) -> Iterator[Any]:
    return chain.from_iterable(chain(parts, (_END,)))


class _Same:
    """Equal to what holds the same object."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._value is other._value

    def __hash__(self) -> int:
        return id(self._value)


def _told(value: Any) -> Any:
    """What tells one option from another: tensors by what the host can read of them, or by which they are."""
    if isinstance(value, Tensor):
        return value.item() if value.device.type == "cpu" and value.numel() == 1 else _Same(value)
    return tuple(map(_told, value)) if isinstance(value, (tuple, list)) else value
