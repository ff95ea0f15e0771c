"""From a checkpoint into a model and an optimizer, whatever number of processes saved it and whatever wraps them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fusestep.distributed import checkpoint as parts_of
from fusestep.distributed import groups
from fusestep.errors import UserError
from fusestep.fp8.state import KEYS
from fusestep.models import GPT, GPTConfig
from fusestep.models.config import Form
from fusestep.train.checkpoint_format import OWN, REST, Checkpoint, is_fp8_state, plain_name, without_fp8_state

#: The name of an optimizer's tensor there, with the number of its parameter.
_PARAMETER = re.compile(rf"{REST}\.optimizer\.state\.(\d+)\.")


def model_of(
    found: Checkpoint,
    device: torch.device | str = "cpu",
    *,
    dtype: torch.dtype = torch.float32,
    form: Form | None = None,
) -> GPT:
    """The model of a checkpoint, in evaluation mode.

    Args:
        device: where the model goes.
        dtype: of the model, whatever that of the saved weights.
        form: whose code the blocks are (see GPTConfig), if not the one that was trained.

    Raises: DamagedCheckpointError.
    """
    config = GPTConfig.from_dict(found.model)
    if form is not None:
        config = replace(config, form=form, norm=None)
    model = GPT(config, device=device, dtype=dtype)
    load_weights(model, found.weights(device), found.path)
    return model.eval()


def load_weights(
    model: torch.nn.Module, weights: Mapping[str, Tensor], origin: Path, *, with_fp8_state: bool = True
) -> None:
    """Copy saved weights into a model, whatever wraps it.

    State of delayed scaling may be missing, and goes to the modules that can have some; all else must fit.

    Args:
        with_fp8_state: False leaves the modules without any, for a run that would not keep it up to date.

    Raises: UserError, before anything is copied, if names or shapes are another model's.
    """
    fp8_state = _own_fp8_state(model, weights) if with_fp8_state else {}
    names = _own_names(model, {name: tuple(value.shape) for name, value in weights.items()}, origin)
    model.load_state_dict({own: weights[plain] for plain, own in names.items()} | fp8_state)


def restore(
    found: Checkpoint, model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, with_fp8_state: bool = True
) -> dict[str, Any]:
    """Copy a checkpoint into a model and its optimizer, sharded or not, whatever number of processes saved it.

    Each process reads what it holds, and none waits for another; under torch.distributed all call this.

    Args:
        optimizer: of ours; takes the state that was saved under "optimizer".
        with_fp8_state: as `load_weights`.

    Returns: the rest of the state, and under "optimizer" what the optimizer was given.
    Raises: UserError if names or shapes are another model's, before anything is copied; DamagedCheckpointError.
    """
    own = model.state_dict()
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if groups.any_dtensor([*own.values(), *parameters]):
        _restore_sharded_weights(found, model, own, with_fp8_state)
        state = _laid_out_state(found, parameters)
    else:
        device = parameters[0].device if parameters else "cpu"
        load_weights(model, found.weights(device), found.path, with_fp8_state=with_fp8_state)
        state = found.state()
    optimizer.load_state_dict(state["optimizer"])
    return state


def _restore_sharded_weights(
    found: Checkpoint, model: torch.nn.Module, own: Mapping[str, Tensor], with_fp8_state: bool
) -> None:
    shards = found.tensors()
    saved = {plain: name for name, plain in found.names(shards).items()}
    names = _own_names(model, {plain: shards.entries[name].shape for plain, name in saved.items()}, found.path)
    weights = parts_of.read_like(shards, {saved[plain]: own[name] for plain, name in names.items()})
    fp8_names = {name: plain for plain, name in saved.items() if is_fp8_state(plain)} if with_fp8_state else {}
    fp8_state = _own_fp8_state(model, shards.whole(fp8_names))
    model.load_state_dict({name: weights[saved[plain]] for plain, name in names.items()} | fp8_state)


def _laid_out_state(found: Checkpoint, parameters: Sequence[Tensor]) -> dict[str, Any]:
    """The state, with the optimizer's tensors sharded as its parameters are."""
    state = found.small_state()
    if found.shards is None:
        return state  # the optimizer takes its parts of whole tensors
    like: dict[str, Tensor | None] = {}
    for name in parts_of.stand_ins(state):
        number = _PARAMETER.match(name)
        like[name] = parameters[int(number[1])] if number and int(number[1]) < len(parameters) else None
    with found.reading():
        tensors = parts_of.read_like(found.shards, like)
    laid_out: dict[str, Any] = parts_of.put_together(state, tensors)
    return laid_out


def _own_names(model: torch.nn.Module, shapes: Mapping[str, tuple[int, ...]], origin: Path) -> dict[str, str]:
    """The plain names of weights, and what the model calls them.

    Raises: UserError if names or shapes are another model's.
    """
    shapes = {name: shape for name, shape in shapes.items() if not is_fp8_state(name)}
    own = without_fp8_state(model.state_dict())
    names = {plain_name(name): name for name in own}
    if odd := sorted(names.keys() ^ shapes.keys()):
        raise UserError(f"checkpoint {origin} is of another model: {odd[0]} is in one of them alone.")
    for plain, name in names.items():
        if shapes[plain] != tuple(own[name].shape):
            raise UserError(
                f"checkpoint {origin} is of another model: {plain} is {shapes[plain]} there and "
                f"{tuple(own[name].shape)} here."
            )
    return names


def _own_fp8_state(model: torch.nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state of delayed scaling among weights, under the names of those modules that can have some."""
    scaled = {plain_name(path): path for path, module in model.named_modules() if hasattr(module, "fp8_state")}
    return {
        f"{scaled[path]}.{key}": value
        for path, _, key, value in ((*name.rpartition("."), value) for name, value in weights.items())
        if key in KEYS and path in scaled
    }


def own_state(state: Mapping[str, Any]) -> dict[str, Any] | None:
    """What this process passed to `save` as its own; None where another number of processes saved, or none did.

    Args:
        state: as `restore` or `Checkpoint.state` gave it.
    """
    saved: Sequence[dict[str, Any]] = state.get(OWN, ())
    return saved[groups.rank()] if len(saved) == groups.world_size() else None
