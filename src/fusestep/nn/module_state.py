"""Scaling state of a module that multiplies in FP8: how it comes into being, moves, is copied, saved and loaded.

State comes into being with the first training forward under delayed scaling, so that a model that never trained in FP8
has none, and its state dict is that of PyTorch's modules. It moves with the module to another device but never changes
its dtype, goes with deep copies and pickles, and starts anew where a module is initialised anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from fusestep.errors import UserError
from fusestep.fp8.held import drop_copies
from fusestep.fp8.pending import Pending
from fusestep.fp8.recipes import DelayedScaling
from fusestep.fp8.seats import owner_of, take_seat
from fusestep.fp8.state import KEYS, Slots
from fusestep.nn.quantized_weights import QuantizedWeights

#: Entries of a module's __dict__ that belong to a run, not to the module.
TRANSIENT: dict[str, Any] = {"_region": None, "_recipe": None, "_casts": None, "_cached": None, "_asked": None}
TRANSIENT["_has_unrolled"] = False


class StatefulModule(QuantizedWeights):
    """The part of FP8Module that has scaling state, for the tensors named by `SLOTS`."""

    #: What the module casts; names that begin with "grad" are of gradients.
    SLOTS: tuple[str, ...]

    # Whether the state came from a checkpoint or a copy, so that no region knows yet whether it is pending.
    _has_unrolled: bool

    # Of subclasses

    def _first_weight(self) -> Tensor:
        """A weight of the module, which tells its device."""
        raise NotImplementedError

    def _described(self) -> str:
        """The layer in an error message: its class and sizes, and its name if it has one."""
        return f"{type(self).__name__}({self.extra_repr()})"

    # Coming into being, and going

    def shared_state(self, recipe: DelayedScaling) -> Slots:
        """The scaling state under a recipe, made where there is none yet.

        Ranks ask for it too, of a module that ran on another of them (fp8/ranks.py).
        """
        state = self.fp8_state
        if state is None:
            state = Slots(self.SLOTS, recipe, self._first_weight().device)
            state.seat = self._own_seat()
            self.fp8_state = state
            self._forget_casts()
        elif state.recipe is not recipe:
            state.follow(recipe)
        if self._has_unrolled:
            # What this region would have done as it began, had there been no break.
            self.__dict__["_has_unrolled"] = False
            state.seat = self._own_seat()
            if state.is_pending:
                unrolled = Pending()
                unrolled.add(state)
                unrolled.roll()
        return state

    def _take_seat(self) -> None:
        """Have a number by which ranks know the module; a copy has one of its own."""
        self.__dict__["_seat"] = take_seat(self, type(self).__name__)

    def _own_seat(self) -> int:
        seat = self.__dict__.get("_seat")
        if seat is None or owner_of(seat) is not self:  # put together by other means
            self._take_seat()
        number: int = self.__dict__["_seat"]
        return number

    def _forget_casts(self) -> None:
        """Let go of what was worked out from state, parameters or their places that are no more."""
        self.__dict__["_casts"] = self.__dict__["_cached"] = self.__dict__["_asked"] = None

    # Moving, copying, saving, loading

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        result = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        drop_copies(self.parameters(recurse=False))  # new values may lie where the old did, in the same version
        self._forget_casts()
        if self.fp8_state is not None:
            device = self._first_weight().device
            # Nothing can be brought back from "meta", so that state starts anew after it.
            self.fp8_state = None if device.type == "meta" else self.fp8_state.to(device)
        return result

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | TRANSIENT | {"_has_unrolled": True}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._take_seat()

    def _reset_fp8(self) -> None:
        """Forget all scales, as a module does whose weights are new."""
        self._forget_casts()
        self.fp8_state = None

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.fp8_state is not None:
            for key, value in self.fp8_state.as_dict().items():
                destination[prefix + key] = value

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        self._forget_casts()
        ours = [prefix + key for key in KEYS]
        extra = prefix + "_extra_state"
        for key in (*ours, extra):
            if key in unexpected_keys:
                unexpected_keys.remove(key)
        if isinstance(state_dict.get(extra), Tensor) and state_dict[extra].numel():
            error_msgs.append(
                f"{extra} holds FP8 state that Transformer Engine pickled, which is not read; delete the key, and "
                "scales start from the tensors."
            )
        there = [key for key in ours if key in state_dict]
        if len(there) == len(ours):
            try:
                self._load_fp8({key: state_dict[prefix + key] for key in KEYS})
            except UserError as error:
                error_msgs.append(f"{self._described()}: {error}")
        elif there:
            missing_keys.extend(key for key in ours if key not in there)
        elif any(key.startswith(prefix) for key in state_dict):
            # Another model's weights: scales of the old ones would not fit them.
            self.fp8_state = None

    def _load_fp8(self, saved: Mapping[str, Tensor]) -> None:
        state = self.fp8_state
        if state is None:
            state = Slots.restored(self.SLOTS, saved, self._first_weight().device)
        else:
            state.load(saved)
        self.fp8_state = state
        self._forget_casts()
        self.__dict__["_has_unrolled"] = True

    # The entries of the state dict as attributes, by which torch.distributed.checkpoint finds what has them.

    @property
    def fp8_slots(self) -> Tensor:
        return self._entry("fp8_slots")

    @property
    def fp8_history(self) -> Tensor:
        return self._entry("fp8_history")

    @property
    def fp8_rolls(self) -> Tensor:
        return self._entry("fp8_rolls")

    def _entry(self, key: str) -> Tensor:
        if self.fp8_state is None:
            raise AttributeError(f"{type(self).__name__} has no {key} before its first training forward in FP8")
        return self.fp8_state.as_dict()[key]
