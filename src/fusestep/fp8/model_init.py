"""fp8_model_init: modules that are built within it keep their weights in FP8 only.

A module calls `prepare_weights(module, names)` once its weights have their values, at the end of its constructor and of
`reset_parameters`. Within fp8_model_init that turns them into Float8Tensors (tensor.py); everywhere it lets the module
load weights of either kind. Weights on the meta device stay as they are until they have values, and shards as they are.

A state dict holds plain tensors: for each such weight its bytes under its own name, (out, in) FP8, and its scales under
NAME_scale_inv; values are bytes · scales. Loading takes those, or weights in any other dtype, which are cast. Once
`fully_shard` has sharded them, each rank keeps its rows in the nominal dtype, and FSDP2 gathers FP8 (gathered.py).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fusestep.distributed.groups import is_dtensor, laid_out, local_of, wrapped
from fusestep.errors import UserError
from fusestep.fp8.copies import CopyFormat
from fusestep.fp8.held import ATTRIBUTE
from fusestep.fp8.recipes import DelayedScaling, Recipe
from fusestep.fp8.tensor import Float8Tensor
from fusestep.ops.quantized import Quantized, padded

SUFFIX = "_scale_inv"

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
#: The entry of a module's __dict__ that names the weights it multiplies by.
WEIGHT_NAMES = "_fp8_weight_names"


@dataclass(frozen=True)
class ModelInit:
    """What fp8_model_init asks of the modules built within."""

    recipe: Recipe
    preserves: bool


class _Thread(threading.local):
    asked: ModelInit | None = None


_thread = _Thread()


def asked() -> ModelInit | None:
    """What the innermost fp8_model_init of this thread asks, or None."""
    return _thread.asked


@contextmanager
def fp8_model_init(
    enabled: bool = True, recipe: Recipe | None = None, preserve_high_precision_init_val: bool = False
) -> Iterator[None]:
    """Build modules of `fusestep.nn` whose weights live in FP8 only: half of bf16's memory, a quarter of fp32's.

    Train them with FusedAdam(master_weights=True), which keeps fp32 masters in its state. Biases and norms stay in high
    precision.

    Args:
        enabled: False builds ordinary modules, also within an enabled one.
        recipe: how weights are cast; DelayedScaling() if None. The first scale comes from the weight itself.
        preserve_high_precision_init_val: keep the values before the cast on the CPU, from which FusedAdam starts its
            masters; `parameter.get_high_precision_init_val()` and `clear_high_precision_init_val()`.
    Raises: UserError for a recipe that is none.
    """
    if recipe is None:
        recipe = DelayedScaling()
    if not isinstance(recipe, Recipe):
        raise UserError(f"fp8_model_init: recipe is {recipe!r}; pass an object such as fusestep.fp8.DelayedScaling().")
    outer = _thread.asked
    _thread.asked = ModelInit(recipe, preserve_high_precision_init_val) if enabled else None
    try:
        yield
    finally:
        _thread.asked = outer


def prepare_weights(module: nn.Module, names: Sequence[str]) -> None:
    """Turn a module's weights into FP8 where that is asked for; let it save and load FP8 weights.

    Args:
        names: of the module's own parameters (out, in) that it multiplies by.
    """
    if WEIGHT_NAMES not in module.__dict__:
        module.__dict__[WEIGHT_NAMES] = tuple(names)
        module.register_state_dict_post_hook(_save)
        module.register_load_state_dict_pre_hook(_load)
    wanted = asked()
    if wanted is None:
        return
    form = CopyFormat.of(wanted.recipe)
    for name in names:
        parameter = getattr(module, name)
        if parameter is None or parameter.is_meta or is_dtensor(parameter) or isinstance(parameter, Float8Tensor):
            continue
        made = nn.Parameter(
            Float8Tensor.of(parameter, form, keep_initial=wanted.preserves), requires_grad=parameter.requires_grad
        )
        keep_marks(parameter, made)
        setattr(module, name, made)


def keep_marks(parameter: Tensor, made: Tensor) -> None:
    """Give a parameter what others have marked the one before it with, such as how ranks share it."""
    for name, value in vars(parameter).items():
        if name not in vars(made) and not name.startswith("_") and name not in ("form", ATTRIBUTE):
            setattr(made, name, value)


def _save(module: nn.Module, state: dict[str, Any], prefix: str, local_metadata: Any) -> None:  # noqa: ARG001
    for name in module.__dict__[WEIGHT_NAMES]:
        value = state.get(prefix + name)
        if isinstance(value, Float8Tensor) and not isinstance(value, nn.Parameter):  # a parameter: keep_vars
            state[prefix + name], state[prefix + name + SUFFIX] = plain_tensors(value)
        elif is_dtensor(value) and not isinstance(value, nn.Parameter) and local_of(value) is not value._local_tensor:
            # A shard of a weight that is gathered in FP8 is saved as any other.
            state[prefix + name] = wrapped(local_of(value), value)


def _load(
    module: nn.Module,
    state: dict[str, Any],
    prefix: str,
    *_others: Any,
) -> None:
    for name in module.__dict__[WEIGHT_NAMES]:
        key = prefix + name
        scale_inv = state.pop(key + SUFFIX, None)
        value = state.get(key)
        if scale_inv is None or not isinstance(value, Tensor) or value.dtype not in _FP8:
            continue
        parameter = getattr(module, name)
        loaded = from_plain_tensors(value, scale_inv, parameter.dtype)
        state[key] = laid_out(loaded.dequantize(), parameter) if is_dtensor(parameter) else loaded


def plain_tensors(tensor: Float8Tensor) -> tuple[Tensor, Tensor]:
    """The bytes (rows, columns) and scales of a Float8Tensor, for a checkpoint."""
    rows, columns = tensor.shape
    return tensor._data[:rows, :columns].contiguous(), tensor._scale_inv.contiguous()


def from_plain_tensors(data: Tensor, scale_inv: Tensor, dtype: torch.dtype) -> Float8Tensor:
    """A Float8Tensor of what `plain_tensors` gave, its blocks told from the scales' shape and dtype."""
    rows, columns = data.shape
    whole = torch.zeros(padded(rows), padded(columns), dtype=torch.uint8, device=data.device)
    whole[:rows, :columns] = data.view(torch.uint8)
    kind, block = _kind_of(scale_inv)
    quantized = Quantized((rows, columns), whole.view(data.dtype), None, scale_inv, scale_inv, block)
    return Float8Tensor(quantized, CopyFormat(kind, data.dtype, power_of_two=block is not None), dtype)


def _kind_of(scale_inv: Tensor) -> tuple[Any, tuple[int, int] | None]:
    if scale_inv.dim() == 0:
        return "current", None
    return ("microblocks", (1, 32)) if scale_inv.dtype == torch.uint8 else ("tiles", (128, 128))
