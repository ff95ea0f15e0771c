"""Activation checkpointing, and states of random numbers by name."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor

from fusestep.compat.names import module_getattr
from fusestep.compat.report import served
from fusestep.errors import UserError
from transformer_engine.pytorch._arguments import PACKAGE, refuse

__all__ = ["CudaRNGStatesTracker", "checkpoint"]

NOT_SERVED = {
    "prepare_te_modules_for_fsdp": ("use torch's FSDP2, fully_shard, which needs no preparation", True),
    "gather_along_first_dim": ("use torch.distributed.all_gather_into_tensor", False),
    "reduce_scatter_along_first_dim": ("use torch.distributed.reduce_scatter_tensor", False),
    "activation_recompute_forward": ("use checkpoint", False),
    "graph_safe_rng_available": ("torch's generators are safe in CUDA graphs", False),
}
__getattr__ = module_getattr(__name__, NOT_SERVED)

DEFAULT = "model-parallel-rng"


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function, keep its inputs alone, and compute it again for backward: torch.utils.checkpoint.checkpoint.

    The second forward casts by the scales and the recipe of the first, and records nothing.

    Args:
        kwargs: those of the function, and use_reentrant (True), distribute_saved_activations, tp_group,
            get_rng_state_tracker, whose states the second forward meets as the first did, context_fn,
            determinism_check, debug.
    """
    served(f"{PACKAGE}.checkpoint", "torch.utils.checkpoint")
    reentrant = kwargs.pop("use_reentrant", True)
    refuse("checkpoint", distribute_saved_activations=kwargs.pop("distribute_saved_activations", False))
    kwargs.pop("tp_group", None)  # of distribute_saved_activations
    tracker = kwargs.pop("get_rng_state_tracker", None)
    names = ("context_fn", "determinism_check", "debug")
    options = {name: kwargs.pop(name) for name in names if name in kwargs}
    run: Callable[..., Any] = functools.partial(function, **kwargs)
    if tracker is not None:
        run = _with_same_states(run, tracker())
    return torch.utils.checkpoint.checkpoint(run, *args, use_reentrant=reentrant, **options)


def _with_same_states(function: Callable[..., Any], tracker: Any) -> Callable[..., Any]:
    """A function that meets the tracker's states of its first call at each later one, and leaves them as they are."""
    first = tracker.get_states()
    is_later = False

    def run(*args: Any) -> Any:
        nonlocal is_later
        if not is_later:
            is_later = True
            return function(*args)
        now = tracker.get_states()
        tracker.set_states(first)
        try:
            return function(*args)
        finally:
            tracker.set_states(now)

    return run


class CudaRNGStatesTracker:
    """States of the CUDA generator by name, so that parts of a model draw from streams of their own.

    Without a GPU they are states of the CPU's generator.
    """

    def __init__(self) -> None:
        self.states_: dict[str, Tensor] = {}
        self.seeds_: set[int] = set()
        served(f"{PACKAGE}.CudaRNGStatesTracker", "torch")

    def reset(self) -> None:
        """Forget all states."""
        self.states_, self.seeds_ = {}, set()

    def get_states(self) -> dict[str, Tensor]:
        """A copy of the states by name."""
        return dict(self.states_)

    def set_states(self, states: dict[str, Tensor]) -> None:
        """Take over what get_states gave."""
        self.states_ = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Begin a stream. Raises: UserError for a name or a seed that there is already."""
        if name in self.states_ or seed in self.seeds_:
            raise UserError(f"CudaRNGStatesTracker: {name!r} or the seed {seed} is there already; choose another one.")
        before = _state()
        _generator().manual_seed(seed)
        self.seeds_.add(seed)
        self.states_[name] = _state()
        _set(before)

    @contextmanager
    def fork(self, name: str = DEFAULT) -> Iterator[None]:
        """Draw from a stream within. Raises: UserError for a name that there is not."""
        if name not in self.states_:
            raise UserError(f"CudaRNGStatesTracker: there is no stream {name!r}; begin it by add({name!r}, seed).")
        before = _state()
        _set(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = _state()
            _set(before)


def _generator() -> torch.Generator:
    if torch.cuda.is_available():
        torch.cuda.init()
        return torch.cuda.default_generators[torch.cuda.current_device()]
    return torch.default_generator


def _state() -> Tensor:
    return _generator().get_state()


def _set(state: Tensor) -> None:
    _generator().set_state(state)
