"""What Transformer Engine's FP8 modules have in common: their scaling state by its names, and their extra state.

fusestep keeps scaling state in slots (fusestep.fp8.state) and rolls it when a region begins; Transformer Engine shows
it rolled at the end of the region. So does `fp8_meta`, in snapshots, which are read and not written.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fusestep.compat.names import module_getattr
from fusestep.compat.report import served
from fusestep.distributed.collectives import gathered
from fusestep.errors import UserError
from fusestep.fp8 import context
from fusestep.fp8.pending import Pending
from fusestep.fp8.state import KEYS, Slots
from fusestep.nn.fp8_module import GRAPH_BREAK, FP8Module
from transformer_engine.common.recipe import restored
from transformer_engine.pytorch import _arguments, _extra_state

__all__ = ["TransformerEngineBaseModule"]

NOT_SERVED = dict.fromkeys(
    ("initialize_ub", "destroy_ub", "get_ub", "UserBufferQuantizationMode"),
    ("overlap of products with communication is not served; leave the ub_ arguments out", False),
)
__getattr__ = module_getattr(__name__, NOT_SERVED)

#: Where a state dict keeps scaling state: beside `version`, where a strict load of Transformer Engine looks past it.
METADATA = "fusestep_fp8"


class ScalingState:
    """The scales and amaxes of a direction, forward or backward, in Transformer Engine's columns.

    Attributes, each a snapshot, fp32 on the module's device:
        scale: (n,), what a tensor is multiplied by; 1 in columns of tensors that are not cast.
        scale_inv: (n,), 1 / scale.
        amax_history: (length, n): row 0 what was seen since the last update, below it the oldest first.
    """

    def __init__(self, state: Slots, places: list[int | None]) -> None:
        self._state, self._places = state, places

    @property
    def scale(self) -> Tensor:
        scale = _rolled(self._state).scale
        shown = self._columns(scale[None], 1.0)[0]
        return torch.where(shown == 0, 1.0, shown)  # 0 marks a tensor that was not cast yet

    @property
    def scale_inv(self) -> Tensor:
        return 1.0 / self.scale

    @property
    def amax_history(self) -> Tensor:
        state = _rolled(self._state)
        history = state.ordered_history()
        return self._columns(torch.cat((state.amax[None], history[1:])), 0.0)

    def _columns(self, values: Tensor, otherwise: float) -> Tensor:
        """(rows, slots) as (rows, columns)."""
        columns = [
            values.new_full(values.shape[:1], otherwise) if place is None else values[:, place]
            for place in self._places
        ]
        return torch.stack(columns, 1)

    def __repr__(self) -> str:
        return f"ScalingState(scale={self.scale.tolist()})"


def _rolled(state: Slots) -> Slots:
    """A copy of the state as it is between regions: what was seen has entered the histories."""
    if context.current() is not None:
        return state
    shown = copy.deepcopy(state)
    if state.is_pending:
        pending = Pending()
        pending.add(shown)
        pending.roll()
    else:
        shown.amax.zero_()
    return shown


class TransformerEngineBaseModule(_arguments.Ranks, FP8Module):
    """A module of fusestep's that goes by a name of Transformer Engine."""

    #: The class of fusestep's that does the work, for the report.
    SERVED_BY: str

    def _announce(self) -> None:
        part: Any = self
        runs_as = part.implementation().implementation
        served(f"{_arguments.PACKAGE}.{type(self).__name__}", f"{self.SERVED_BY}, {runs_as}")

    # FP8

    @property
    def fp8_meta(self) -> dict[str, Any]:
        """What Transformer Engine keeps of FP8: a snapshot, with `scaling_fwd`, `scaling_bwd` after a training step."""
        meta: dict[str, Any] = {"fp8_checkpoint": False, "fp8_group": None}
        state = self.fp8_state
        if state is None:
            return meta
        forward, backward = _extra_state.names_of_columns(self.SLOTS)
        formats = state.recipe.fp8_format
        meta["recipe"] = restored(state.recipe)
        meta["num_gemms"] = len(forward) // 3
        meta["fp8_max_fwd"], meta["fp8_max_bwd"] = formats.max_fwd, formats.max_bwd
        meta["scaling_fwd"] = ScalingState(state, forward)
        meta["scaling_bwd"] = ScalingState(state, backward)
        return meta

    @property
    def fp8(self) -> bool:
        """Whether a forward now would multiply in FP8."""
        return context.is_enabled()

    @property
    def fp8_calibration(self) -> bool:
        """Whether a forward now would record amaxes."""
        region = context.current()
        return region is not None and region.calibrating

    @property
    def fp8_initialized(self) -> bool:
        """Whether the module has scaling state."""
        return self.fp8_state is not None

    # Checkpoints

    def get_extra_state(self) -> Tensor:
        """Empty: scaling state is in the state dict's metadata, and Transformer Engine passes over an empty one."""
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        """Nothing: `_load_from_state_dict` has read it."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        metadata = getattr(destination, "_metadata", None)
        if metadata is not None and self.fp8_state is not None:
            saved = {key: destination.pop(prefix + key) for key in KEYS}
            metadata.setdefault(prefix[:-1], {})[METADATA] = saved

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
        key = prefix + "_extra_state"
        state = dict(state_dict)
        extra = state.get(key)
        state[key] = torch.empty(0, dtype=torch.uint8)  # it may be absent, as in a state dict of torch's modules
        has_state = all(prefix + name in state for name in KEYS)
        found: Mapping[str, Tensor] | None = None
        if not has_state and METADATA in local_metadata:
            found = local_metadata[METADATA]
        elif not has_state and not _extra_state.is_empty(extra):
            try:
                found = _extra_state.read(extra, self.SLOTS)
            except UserError as error:
                error_msgs.append(f"{prefix[:-1]}: {error}")
        if found is not None:
            state.update({prefix + name: value for name, value in found.items()})
        super()._load_from_state_dict(state, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)

    # torch.compile

    def _outside_of_a_graph(self, *args: Any) -> Any:
        # fusestep's own forward, whose order of arguments these are.
        ours: Any = next(kind for kind in type(self).__mro__ if kind.__module__.startswith("fusestep.nn"))
        return torch.compiler.disable(ours.forward, reason=GRAPH_BREAK)(self, *args)


def bias_or_empty(results: Any, place: int, like: Tensor) -> Any:
    """A tuple whose bias, where the module has none, is an empty tensor, as Transformer Engine gives it."""
    if results[place] is not None:
        return results
    return (*results[:place], like.new_empty(0), *results[place + 1 :])


def gathered_output(module: Any, results: Any) -> Any:
    """Results with the norm's output put together of the slices of all ranks, for return_layernorm_output_gathered."""
    parallel = module._parallel
    if parallel is None or parallel.sequence_dim is None:
        return results
    place = 2 if module.return_bias else 1
    whole = gathered(results[place], parallel.sequence_dim, parallel.group)
    return (*results[:place], whole, *results[place + 1 :])


#: Of functions that fill a weight.
Initialiser = Callable[[Tensor], Any]
