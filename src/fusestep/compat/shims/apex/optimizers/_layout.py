"""What Apex's optimizers share: states with one step count a group.

fusestep counts steps for each parameter, as torch does. A state dict has Apex's layout: `step` in each group, and in a
parameter's own state only where it differs from its group's. One that Apex saved loads. What Apex has not is beside
that, and it passes over it: `master_param`, the fp32 masters, and `step_counts`.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch

from fusestep.compat.report import not_served
from fusestep.compat.stepping import DropInOptimizer


def refuse_amsgrad(name: str, amsgrad: bool) -> None:
    """Raise, as Apex does, for a variant that it has the argument for and no more."""
    if amsgrad:
        raise not_served(
            f"apex.optimizers.{name}(amsgrad=True), nor does Apex",
            "use torch.optim.AdamW(amsgrad=True, fused=True)",
            kind=RuntimeError,
        )


def clipping(max_grad_norm: float | None) -> float:
    """LAMB's max_grad_norm: 0, by which Apex sets gradients to 0, and None clip nothing."""
    return max_grad_norm or math.inf


class ApexOptimizer(DropInOptimizer):
    """Mixed into each of fusestep's optimizers.

    Attributes:
        group_options: the options that Apex keeps in groups, and so saves.
        saves_tensors: whether Apex keeps `step` and `lr` of its groups on the device, also when not capturable.
    """

    group_options: ClassVar[tuple[str, ...]]
    saves_tensors: ClassVar[bool] = False

    def state_dict(self) -> dict[str, Any]:
        """In Apex's layout; reading the counts waits for the device."""
        saved = super().state_dict()
        # What schedulers and scripts put into groups stays.
        ours = set(self.defaults) - set(self.group_options)
        for number, group in enumerate(saved["param_groups"]):
            states = {key: saved["state"][key] for key in group["params"] if key in saved["state"]}
            kept = {name: value for name, value in group.items() if name not in ours}
            self._save_group(kept, states, self.param_groups[number])
            if self.counts_steps:
                # A group without parameters counts too, since a checkpoint may be loaded where it has some.
                # A script that steps by amp_C itself counts in its groups alone.
                applied = group.get("step", saved["step_counts"]["applied"])
                steps = [int(state["step"]) for state in states.values() if "step" in state]
                kept["step"] = step = max(steps, default=int(applied))
                for state in states.values():
                    if int(state.get("step", -1)) == step:
                        del state["step"]
                if self.capturable or self.saves_tensors:
                    device = next((p.device for p in self.param_groups[number]["params"]), torch.device("cpu"))
                    kept["step"] = torch.tensor([step], dtype=torch.int32, device=device)
                    kept["lr"] = torch.as_tensor(kept["lr"], dtype=torch.float32).to(device)
            else:
                for state in states.values():
                    state.pop("step", None)
            saved["param_groups"][number] = kept
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of Apex, of this class, or of fusestep's; see the fusestep class for the rest.

        Raises: UserError, with nothing changed, if groups, sizes or kind of the state do not fit.
        """
        state_dict = {
            **state_dict,
            "state": {key: dict(state) for key, state in state_dict["state"].items()},
            "param_groups": [dict(group) for group in state_dict["param_groups"]],
        }
        # That there are as many groups as today, fusestep's own method asks.
        for group, today in zip(state_dict["param_groups"], self.param_groups, strict=False):
            states = {key: state_dict["state"].get(key, {}) for key in group["params"]}
            self._load_group(group, states, today)
        super().load_state_dict(state_dict)

    def _save_group(self, saved: dict[str, Any], states: dict[Any, dict[str, Any]], group: dict[str, Any]) -> None:
        """Put a group and its parameters' states, by their keys, into Apex's form."""

    def _load_group(self, saved: dict[str, Any], states: dict[Any, dict[str, Any]], group: dict[str, Any]) -> None:
        """Undo that."""
