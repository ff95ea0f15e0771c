"""What all our optimizers share: their groups, plans of launches, graphs, states."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Iterable
from functools import cache
from operator import is_
from typing import Any, ClassVar, overload

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from fusestep.distributed.groups import is_dtensor, local_of
from fusestep.errors import UserError
from fusestep.fp8.held import drop_copies
from fusestep.fp8.tensor import Float8Tensor
from fusestep.optim.loading import keep_lr_tensors, loaded_groups, loaded_state
from fusestep.optim.options import HALVES, check_common, check_parameter
from fusestep.optim.sharding import Sharding, check_placements, local_state, sharding_of
from fusestep.optim.state_layout import as_part, like
from fusestep.optim.step_inputs import check_capture, check_sizes, common_max_norm, gathered, scaling_left_on
from fusestep.optim.step_plan import State, StepPlan
from fusestep.optim.weight_copies import first_master

#: Packages between a script and the constructor of an optimizer.
_PASSED_OVER = ("torch", "fusestep", "apex", "transformer_engine")


class FusedOptimizer(torch.optim.Optimizer):
    """A step for all parameters of a device and combination of dtypes in a fixed number of launches.

    A class of ours says which state a parameter has, checks its own options and names its plan; see FusedAdam for what
    all of them do about clipping, loss scaling, masters, graphs and states.

    Args:
        params: parameters, or groups of them.
        defaults: the options of groups, `max_grad_norm` among them.
        master_weights: keep fp32 copies of 16-bit parameters.
        capturable: keep learning rates on the device.
    """

    #: Tells torch.amp.GradScaler to leave unscaling and skipping to `step`.
    _step_supports_amp_scaling = True

    #: Plans the launches of a step.
    _plan_class: ClassVar[type[StepPlan]]
    #: Keys of the state that has the parameter's shape.
    _dense: ClassVar[tuple[str, ...]]
    #: Keys of 0-d states, on the parameter's device.
    _scalars: ClassVar[tuple[str, ...]] = ()
    #: What a state may come from, and what to use for sparse gradients, for errors.
    _kin: ClassVar[str]
    _sparse: ClassVar[str] = "torch.optim.SparseAdam"
    #: Whether a saved state tells how many steps were taken, where it has no count of its own.
    _counts_steps: ClassVar[bool] = True
    #: Attributes that states and plans go by, as the constructor's options of these names.
    _settings: ClassVar[tuple[str, ...]] = ("master_weights", "capturable")

    def __init__(
        self, params: Iterable[Any], defaults: dict[str, Any], *, master_weights: bool, capturable: bool
    ) -> None:
        self.master_weights = master_weights
        self.capturable = capturable
        self._has_warned = False
        self._forget()
        defaults = {**defaults, "capturable": capturable}
        self._check_options(defaults)
        super().__init__(params, defaults)
        _watch_others()
        home = next((p.device for group in self.param_groups for p in group["params"]), torch.device("cpu"))
        self._counters = torch.zeros(2, dtype=torch.int64, device=home)

    @property
    def _who(self) -> str:
        return type(self).__name__

    def _check_options(self, options: dict[str, Any]) -> None:
        """Raises: UserError for options of a group that are out of range."""
        check_common(self._who, options)

    def _check_parameter(self, parameter: object, number: int) -> None:
        """Raises: UserError for a parameter that cannot be stepped."""
        check_parameter(self._who, parameter, number)

    def _dense_states(self, group: dict[str, Any]) -> tuple[str, ...]:  # noqa: ARG002
        """The states of the parameter's shape that a group's options ask for."""
        return self._dense

    def _state_dtype(self, parameter: Tensor) -> torch.dtype:
        """Of the states: fp32, but float64 and complex parameters keep theirs."""
        is_wide = parameter.is_complex() or parameter.dtype == torch.float64
        return parameter.dtype if is_wide else torch.float32

    def _forget(self) -> None:
        """Drop what can be worked out again; never part of a pickle."""
        self._plan: StepPlan | None = None
        self._planned_with: tuple[Any, ...] = ()
        self._members: list[Tensor] = []
        self._sizes: list[int] = []
        self._has_complex = False
        self._states: list[State] = []
        self._sharding: Sharding | None = None
        self._locals: list[Tensor] = []
        self._local_states: list[Tensor] = []
        self._captured_plans: list[StepPlan] = []
        self._verdicts: dict[torch.device, Tensor] = {}

    @property
    def applied_steps(self) -> Tensor:
        """0-d int64 on the device of the first parameter: calls of `step` that changed the parameters."""
        return self._counters[0]

    @property
    def skipped_steps(self) -> Tensor:
        """0-d int64 on the device of the first parameter: calls of `step` that met gradients which were not finite."""
        return self._counters[1]

    @property
    def last_grad_norm(self) -> Tensor:
        """0-d fp32 on the device: the global norm of the last step's unscaled gradients, before clipping.

        NaN until a norm was measured, which takes `max_grad_norm`. The next step overwrites it in place.
        """
        verdict = next(iter(self._verdicts.values()), None)
        return torch.full((), math.nan, device=self._counters.device) if verdict is None else verdict[0]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, also between steps; its parameters start at step 0.

        Raises: UserError for options out of range, another max_grad_norm, and parameters that cannot be stepped.
        """
        if not isinstance(param_group, dict) or isinstance(param_group.get("params"), (set, type(None))):
            super().add_param_group(param_group)  # raises, and says what is wanted
            return
        params = param_group["params"]
        param_group = {**param_group, "params": [params] if isinstance(params, Tensor) else list(params)}
        options = {**self.defaults, **param_group}
        self._check_options(options)
        if self.param_groups and options["max_grad_norm"] != self.param_groups[0]["max_grad_norm"]:
            raise UserError(
                f"{self._who}: max_grad_norm is {options['max_grad_norm']} in group {len(self.param_groups)} and "
                f"{self.param_groups[0]['max_grad_norm']} in group 0; the norm is taken over all groups, so pass one "
                "value to the constructor."
            )
        first = sum(len(group["params"]) for group in self.param_groups)
        parameters = [named[1] if isinstance(named, tuple) else named for named in param_group["params"]]
        for number, parameter in enumerate(parameters, first):
            self._check_parameter(parameter, number)
            check_placements(self._who, parameter, number)
            if isinstance(local_of(parameter), Float8Tensor) and not self.master_weights:
                raise UserError(
                    f"{self._who}: parameter {number} lives in FP8 only (fp8_model_init), whose steps need an fp32 "
                    "master; pass master_weights=True."
                )
        super().add_param_group(param_group)
        self._keep_lr_on_device()
        if not self.master_weights and not self._has_warned and any(p.dtype in HALVES for p in parameters):
            self._has_warned = True
            warnings.warn(
                f"{self._who}: there are 16-bit parameters and master_weights is False, so updates smaller than their "
                "spacing are lost (a bf16 weight at 1.0 moves by 1/128 or not at all); pass master_weights=True to "
                "keep fp32 copies.",
                stacklevel=_callers_level(),
            )

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Step every parameter that has a gradient. Never waits for a GPU whose kernels run.

        Args:
            closure: computes the loss and gradients; run once, first, with gradients enabled.
        Returns: the closure's value.
        Raises: RuntimeError for sparse gradients, UserError for what a CUDA graph cannot hold and for gradients and
            states of another size than their parameter, all before anything is changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._list_members()
        who = type(self).__name__
        gradients, has_main = gathered(who, self._members, self._sharding, self._sparse, is_complex=self._has_complex)
        is_capturing = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
        if is_capturing:
            check_capture(who, self._members, gradients, self.capturable)
        if all(gradient is None for gradient in gradients):
            return loss
        max_norm = common_max_norm(who, self.param_groups)
        scaling = scaling_left_on(self, who, has_main)
        if scaling.is_active and has_main and max_norm is None:
            # The scaler looked at .grad alone, so what is in main_grad has still to be looked at.
            max_norm = math.inf
        plan = self._plan_for(gradients, is_capturing)
        plan.run(self.param_groups, gradients, self._counters, max_norm, scaling)
        if self._sharding is not None:
            # The plan told autograd of the parts; a DTensor has a count of its own.
            stepped = zip(self._members, gradients, strict=True)
            torch.autograd.graph.increment_version([p for p, g in stepped if g is not None and is_dtensor(p)])
        return loss

    def _list_members(self) -> None:
        """Keep the flat list of parameters in step with the groups, whoever changed them."""
        members = [p for group in self.param_groups for p in group["params"]]
        sizes = [len(group["params"]) for group in self.param_groups]
        if sizes != self._sizes or not all(map(is_, members, self._members)):
            self._members, self._sizes = members, sizes
            self._sharding = sharding_of(members)
            self._has_complex = any(map(torch.is_complex, members))
            self._plan = None

    def _plan_for(self, gradients: list[Tensor | None], is_capturing: bool) -> StepPlan:
        plan = self._plan
        if plan is not None and plan.is_captured and not is_capturing:
            plan = None  # its tables belong to the graph now
        if plan is not None and len(self._states) == len(self.state):
            self._keep_lr_on_device()
            is_same = all(map(is_, self.state.values(), self._states)) and self._has_its_parts()
            if is_same and self._planned_with == self._set() and plan.take(self.param_groups, gradients):
                if is_capturing and not plan.is_captured:
                    plan.is_captured = True
                    self._captured_plans.append(plan)
                return plan
        if is_capturing:
            raise UserError(
                f"{self._who}.step: a CUDA graph is being captured and parameters, gradients or options are not those "
                "of the last step before it; run one whole training step with them before each capture."
            )
        return self._new_plan(gradients)

    def _new_plan(self, gradients: list[Tensor | None]) -> StepPlan:
        self._keep_lr_on_device()
        group_of = [number for number, group in enumerate(self.param_groups) for _ in group["params"]]
        self._check_sizes(gradients)
        for parameter, gradient, number in zip(self._members, gradients, group_of, strict=True):
            if gradient is not None:
                self._complete_state(parameter, self.param_groups[number])
        home = self._members[0].device
        if self._counters.device != home:
            self._counters = self._counters.to(home)
        states = [self.state.get(p) for p in self._members]
        if self._sharding is not None:
            self._locals = list(map(local_of, self._members))
            self._local_states = self._parts_of_states()
        parts = states if self._sharding is None else [None if one is None else local_state(one) for one in states]
        self._plan = self._plan_class(
            self.param_groups,
            self._members if self._sharding is None else self._locals,
            group_of,
            parts,
            gradients,
            self._verdicts,
            self.capturable,
            self._sharding,
        )
        for state, part in zip(states, parts, strict=True):
            if state is not None and part is not None:
                state["step"] = part["step"]  # the plan packs them
        self._states = list(self.state.values())
        self._planned_with = self._set()
        return self._plan

    def _set(self) -> tuple[Any, ...]:
        """What the settings are now, which a script may change between steps, and TrainStep does."""
        return tuple(getattr(self, name) for name in self._settings)

    def _check_sizes(self, gradients: list[Tensor | None]) -> None:
        """Raises: UserError for a gradient or a state of another size than its parameter, and for a parameter that was
        given data which cannot be stepped.
        """
        number = 0
        for group in self.param_groups:
            names, dense = group.get("param_names"), self._dense_states(group)
            for place, parameter in enumerate(group["params"]):
                gradient = gradients[number]
                if gradient is not None:
                    self._check_parameter(parameter, number)
                    named = f"parameter {number}" if names is None else f"parameter {number} ({names[place]})"
                    state = self.state.get(parameter, {})
                    check_sizes(self._who, named, parameter, gradient, state, dense, self._scalars)
                number += 1

    def _parts_of_states(self) -> list[Tensor]:
        """What this process holds of all states but the step counts, which a plan keeps."""
        return [
            local_of(value)
            for state in self.state.values()
            for key, value in state.items()
            if key != "step" and isinstance(value, Tensor)
        ]

    def _has_its_parts(self) -> bool:
        """Whether the DTensors of parameters and states still are what the plan was made of."""
        if self._sharding is None:
            return True
        states = self._parts_of_states()
        return (
            all(map(is_, map(local_of, self._members), self._locals))
            and len(states) == len(self._local_states)
            and all(map(is_, states, self._local_states))
        )

    def _first_state(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:  # noqa: ARG002
        """What a dense state is before the first step, of the part of a parameter that lies here."""
        return torch.zeros_like(parameter, dtype=self._state_dtype(parameter), memory_format=torch.preserve_format)

    def _complete_state(self, parameter: Tensor, group: dict[str, Any]) -> None:
        """Give a parameter the state that it lacks, and all of it the parameter's device and order of memory."""
        state: State = self.state[parameter]
        state.setdefault("step", torch.zeros((), dtype=torch.float32))
        if not isinstance(state["step"], Tensor):
            state["step"] = torch.tensor(float(state["step"]))
        dtype = self._state_dtype(parameter)
        for key in self._dense_states(group):
            if key not in state:
                state[key] = self._made_state(parameter, group)
            state[key] = like(parameter, state[key], dtype)
        for key in self._scalars:
            value = state.get(key)
            if value is None:
                value = torch.zeros((), dtype=dtype.to_real(), device=parameter.device)
            state[key] = value.to(parameter.device, dtype.to_real(), non_blocking=parameter.device.type == "cuda")
        if self._has_master(parameter):
            # Made at the first step, not in the constructor: weights may be loaded in between.
            key, dtype = self._master_form(parameter)
            master = state.get(key)
            if master is None:
                master = as_part(self._first_master(local_of(parameter)), parameter)
            state[key] = like(parameter, master, dtype)

    def _made_state(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        return as_part(self._first_state(local_of(parameter.detach()), group), parameter)

    def _has_master(self, parameter: Tensor) -> bool:
        return self.master_weights and (parameter.dtype in HALVES or isinstance(local_of(parameter), Float8Tensor))

    def _master_form(self, parameter: Tensor) -> tuple[str, torch.dtype]:  # noqa: ARG002
        """The key and dtype of the state that keeps the master of a parameter that has one."""
        return "master_param", torch.float32

    def _first_master(self, local: Tensor) -> Tensor:
        """What that state is before the first step, of the part of a parameter that lies here."""
        return first_master(local)

    def _keep_lr_on_device(self) -> None:
        """Where graphs may be captured, turn learning rates into fp32 tensors, which schedulers change in place."""
        for group in self.param_groups if self.capturable else ():
            lr = group["lr"]
            if group["params"] and not (isinstance(lr, Tensor) and lr.device == group["params"][0].device):
                group["lr"] = torch.full((), float(lr), dtype=torch.float32, device=group["params"][0].device)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear `.grad` and `main_grad` of every parameter: to None, or to zeros."""
        super().zero_grad(set_to_none)
        for group in self.param_groups:
            for parameter in group["params"]:
                main: Tensor | None = getattr(parameter, "main_grad", None)
                if main is not None:
                    parameter.main_grad = None if set_to_none else main.zero_()

    def state_dict(self) -> dict[str, Any]:
        """As torch's, with `master_param` where there is one, and a count of applied and skipped steps.

        `step` is a 0-d fp32 tensor on the host, as torch saves it; reading it waits for the device.
        """
        saved: dict[str, Any] = super().state_dict()
        steps = {key: state["step"] for key, state in saved["state"].items() if isinstance(state.get("step"), Tensor)}
        by_device: dict[torch.device, list[Any]] = {}
        for key, step in steps.items():
            by_device.setdefault(step.device, []).append(key)
        saved["state"] = {key: dict(state) for key, state in saved["state"].items()}
        for keys in by_device.values():
            # One transfer a device; a view of it would drag the whole along into a checkpoint.
            for key, value in zip(keys, torch.stack([steps[key] for key in keys]).tolist(), strict=True):
                saved["state"][key]["step"] = torch.tensor(value, dtype=torch.float32)
        applied, skipped = self._counters.tolist()
        saved["step_counts"] = {"applied": applied, "skipped": skipped}
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class, or of what its documentation names.

        States take the dtypes that this class gives them, masters fp32; torch's own method would round both to the
        parameter's dtype (pytorch#43706). A state without masters gets them from the parameters at the next step.

        Raises: UserError, with nothing changed, if groups, sizes or kind of the state do not fit.
        """
        state_dict = dict(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = pre_hook(self, state_dict) or state_dict
        saved_groups = state_dict["param_groups"]
        groups = loaded_groups(self._who, self.param_groups, saved_groups, self.defaults, self._kin)
        for group in groups:
            self._check_options(group)
        members = [p for group in self.param_groups for p in group["params"]]
        group_of = [number for number, group in enumerate(groups) for _ in group["params"]]
        keys = [(key, group.get("step")) for group in saved_groups for key in group["params"]]
        state: dict[Tensor, State] = {}
        for number, ((key, group_step), parameter) in enumerate(zip(keys, members, strict=True)):
            saved = state_dict["state"].get(key)
            if saved:
                state[parameter] = self._loaded_state(saved, group_step, parameter, number, groups[group_of[number]])
        counts = state_dict.get("step_counts")
        if counts is None:
            steps = [int(one["step"]) for one in state.values()] if self._counts_steps else []
            counts = {"applied": max(steps, default=0), "skipped": 0}
        keep_lr_tensors(self.param_groups, groups)
        self.__setstate__({"param_groups": groups})
        self.state.clear()
        self.state.update(state)
        self._counters.copy_(torch.tensor([counts["applied"], counts["skipped"]]))
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _loaded_state(
        self,
        saved: dict[str, Any],
        group_step: Any,
        parameter: Tensor,
        number: int,
        group: dict[str, Any],  # noqa: ARG002
    ) -> State:
        """One parameter's state as this class keeps it, from a saved one; `group_step` is Apex's."""
        saved = {"step": group_step, **saved}
        dtype, has_master = self._state_dtype(parameter), self._has_master(parameter)
        return loaded_state(
            self._who, saved, parameter, number, self._dense, dtype, has_master, self._kin, self._scalars
        )

    def __getstate__(self) -> dict[str, Any]:
        kept = (*self._settings, "_has_warned", "_counters")
        return {**super().__getstate__(), **{name: self.__dict__[name] for name in kept}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._forget()
        super().__setstate__(state)
        _watch_others()


def _callers_level() -> int:
    """The `stacklevel` of a warning that points to who built the optimizer, past torch, fusestep and its shims."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _PASSED_OVER:
        frame, level = frame.f_back, level + 1
    return level


@cache
def _watch_others() -> None:
    """Have copies of parameters dropped after each step of an optimizer that is none of ours.

    Kernels may write parameters and leave their versions as they are: those of torch's with fused=True do.
    """
    register_optimizer_step_post_hook(_drop_after)


def _drop_after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if not isinstance(optimizer, FusedOptimizer):
        drop_copies(parameter for group in optimizer.param_groups for parameter in group["params"])
