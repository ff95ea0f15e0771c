"""Linear layers that multiply in FP8: nn.Linear, GPT-2's Conv1D, whose weight lies the other way, and those of
nn.MultiheadAttention.

Which layers stay in the model's dtype, whatever was asked: heads, layers that share their weight with an embedding,
routers and low-rank adapters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fusestep.convert.agreement import Call, Probe, Trial
from fusestep.convert.attention import FusedMultiheadAttention, attention_inputs, is_attention
from fusestep.convert.classes import Kind
from fusestep.convert.patterns import Pattern, has_no_shape, is_a, is_named, rows
from fusestep.dispatch import Choice
from fusestep.errors import UserError
from fusestep.fp8 import Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling, context, fp8_autocast
from fusestep.fp8.context import Region
from fusestep.fp8.held import ATTRIBUTE
from fusestep.fp8.recipes import Recipe
from fusestep.nn import Linear
from fusestep.nn.fp8_module import GRAPH_BREAK, FP8Module
from fusestep.nn.linear_function import GRADIENT, INPUT, WEIGHT
from fusestep.nn.module_state import StatefulModule

#: How far FP8 may be from the model's dtype: E5M2 keeps two bits of a gradient's mantissa.
FP8_TOLERANCE = 0.15

_HEADS = {"lm_head", "head", "score", "classifier", "embed_out", "output_projection", "qa_outputs"}
_ROUTERS = {"router", "gate"}


class FP8Linear(Linear, Kind):
    """nn.Linear that multiplies in FP8 within an fp8_autocast region."""

    _prefix = "FP8"

    def forward(  # type: ignore[override]
        self,
        input: Tensor,  # noqa: A002 (nn.Linear's name)
        is_first_microbatch: bool | None = None,
    ) -> Any:
        return super().forward(input, is_first_microbatch)

    def reset_parameters(self) -> None:
        """As the old class has it; scales are forgotten."""
        reset = getattr(super(FP8Module, self), "reset_parameters", None)  # that of the old class, if it has one
        if reset is not None:
            reset()
        self._reset_fp8()

    def _released(self) -> None:
        _forget_copies(self.weight, self.bias)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        # Without the scales: the old model's state dict has none, and the first step finds them in the tensors.
        super(StatefulModule, self)._save_to_state_dict(destination, prefix, keep_vars)


class FP8Conv1D(FP8Linear):
    """A linear layer whose weight is (in, out)."""

    _in_by_out = True

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Any:  # type: ignore[override]
        return Linear.forward(self, x, is_first_microbatch)

    def _in_high_precision(self, x: Tensor, region: Region | None, adds_bias: bool) -> Tensor:  # noqa: ARG002
        # The old forward adds the bias itself, which nobody asks a converted layer to return.
        self._calibrate(region, INPUT, x)
        self._calibrate(region, WEIGHT, self._parameter("weight"))
        y: Tensor = super(FP8Module, self).forward(x)  # that of the old class
        self._calibrate_gradient(region, GRADIENT, y)
        return y


class FP8MultiheadAttention(FusedMultiheadAttention, FP8Linear):  # type: ignore[misc]  # the first forward is meant
    """nn.MultiheadAttention whose packed product of q, k and v is an FP8 linear layer; `out_proj` may be one too.

    As a linear layer it has the parameters in_proj_weight and in_proj_bias.
    """

    def _in_proj(self, x: Tensor) -> Tensor:
        mixed: Tensor = Linear.forward(self, x)
        return mixed

    def _out_proj(self, x: Tensor) -> Tensor:
        if not is_a(self.out_proj, FP8Linear):
            return super()._out_proj(x)
        y: Tensor = FP8Linear.forward(self.out_proj, x)  # type: ignore[arg-type]
        return y

    def _outside_of_a_graph(self, *args: Any) -> Any:
        return torch.compiler.disable(Linear.forward, reason=GRAPH_BREAK)(self, *args)

    def implementation(self) -> Choice:
        """What the products run as, and why."""
        return Linear.implementation(self)

    def _released(self) -> None:
        _forget_copies(self.in_proj_weight, self.in_proj_bias)


class FP8Forward(Kind):
    """A model whose forward runs within fp8_autocast, unless it is called in a region of the caller's own."""

    _prefix = ""
    fp8_recipe: Recipe

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if context.is_inside():
            return super().forward(*args, **kwargs)
        with fp8_autocast(recipe=self.fp8_recipe):
            return super().forward(*args, **kwargs)


def _forget_copies(*parameters: Tensor | None) -> None:
    """Forget the copies of parameters that the optimizer was asked to write."""
    for parameter in parameters:
        if getattr(parameter, ATTRIBUTE, None) is not None:
            delattr(parameter, ATTRIBUTE)


def fp8_patterns(model: nn.Module, recipe: Recipe, skip: Sequence[str], keep: tuple[int, int]) -> list[Pattern]:
    """The patterns that make linear layers of this very model multiply in FP8."""
    kept = _kept_layers(model, skip, keep)
    users = {id(module.out_proj): module for module in model.modules() if isinstance(module, nn.MultiheadAttention)}

    def of(
        kind: type[nn.Module],
        is_kind: Callable[[nn.Module], bool | str],
        inputs: Callable[[nn.Module, Probe], Sequence[Call]],
        quiet: tuple[str, ...] = (),
    ) -> Pattern:
        def matches(module: nn.Module) -> bool | str:
            answer = is_kind(module)
            if answer is not True:
                return answer
            user = users.get(id(module))
            if user is not None and not is_a(user, FP8MultiheadAttention):
                return "nn.MultiheadAttention multiplies by its weight without calling it"
            return kept.get(id(module), True)

        what, trials = f"products in FP8 ({type(recipe).__name__})", functools.partial(_trials, recipe)
        return Pattern(what, kind, matches, inputs, _attributes, quiet=quiet, trials=trials)

    return [
        of(FP8Linear, _is_linear, _inputs),
        of(FP8Conv1D, _is_conv1d, _inputs),
        of(FP8MultiheadAttention, is_attention, attention_inputs, quiet=("dropout",)),
    ]


def check_arguments(recipe: object, keep: object) -> None:
    """Raise UserError for what is no recipe, or no pair of numbers of blocks."""
    if recipe is not None and (not isinstance(recipe, Recipe) or type(recipe) is Recipe):
        raise UserError(f"convert: fp8 is {recipe!r}; pass a recipe such as fusestep.fp8.DelayedScaling(), or None.")
    if not (
        isinstance(keep, (tuple, list))
        and len(keep) == 2
        and all(type(number) is int and number >= 0 for number in keep)
    ):
        raise UserError(
            f"convert: fp8_keep_blocks is {keep!r}; pass how many of the first and of the last blocks, as in (1, 1)."
        )


def _is_linear(module: nn.Module) -> bool | str:
    if not isinstance(module, nn.Linear) or is_a(module, Linear):
        return False
    if type(module).forward is not nn.Linear.forward:
        return f"{type(module).__name__} overrides the forward of nn.Linear"
    if module._parameters.get("weight") is None:
        return "its weight is computed from others"
    return True


def _is_conv1d(module: nn.Module) -> bool | str:
    if type(module).__name__ != "Conv1D" or isinstance(module, (Linear, nn.Conv1d)):
        return False
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    return weight is not None and weight.dim() == 2 and bias is not None and bias.shape == weight.shape[1:]


def _inputs(module: Any, probe: Probe) -> Sequence[Call]:
    return rows(probe, int(module.weight.shape[1 if isinstance(module, nn.Linear) else 0]))


def _out_features(module: Any) -> int:
    return int(module.weight.shape[0 if isinstance(module, nn.Linear) else 1])


def _attributes(module: nn.Module) -> dict[str, Any]:
    """What Linear's constructor would have set, and the module lacks."""
    part = "in_proj_" if isinstance(module, nn.MultiheadAttention) else ""
    weight: Tensor = module._parameters[part + "weight"]  # type: ignore[assignment]
    out_features, in_features = weight.shape[::-1] if _is_conv1d(module) is True else weight.shape
    made = Linear(1, 1, bias=False, device="meta").__dict__ | {
        "parts": {part: out_features},
        "has_bias": module._parameters[part + "bias"] is not None,
        "in_features": in_features,
        "out_features": out_features,
    }
    return {name: value for name, value in made.items() if name not in module.__dict__}


def _trials(recipe: Recipe, dtype: torch.dtype, device: torch.device) -> list[Trial]:  # noqa: ARG001
    """As it is, where nothing may change, and in FP8 by scales that follow from the tensors alone."""
    if not isinstance(recipe, (Float8BlockScaling, MXFP8BlockScaling)):
        recipe = Float8CurrentScaling(fp8_format=recipe.fp8_format)
    return [
        Trial(),
        Trial("fp8", region=lambda: fp8_autocast(recipe=recipe), only_new=True, always=True, tolerance=FP8_TOLERANCE),
    ]


def _kept_layers(model: nn.Module, skip: Sequence[str], keep: tuple[int, int]) -> dict[int, str]:
    """Why layers stay in the model's dtype, by their ids."""
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    tied = {id(embedding.weight) for embedding in embeddings}
    head = _head_of(model)
    vocabularies = {embedding.num_embeddings for embedding in embeddings}
    layers = [module for module in model.modules() if _is_linear(module) or _is_conv1d(module)]
    if head is None and layers and not has_no_shape(layers[-1].weight) and _out_features(layers[-1]) in vocabularies:
        head = layers[-1]
    reasons: dict[int, str] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if id(module) in reasons:
            continue
        names = path.split(".")
        if is_named(path, skip):
            reasons[id(module)] = "fp8_skip names it"
        elif id(module._parameters.get("weight")) in tied and not isinstance(module, nn.Embedding):
            reasons[id(module)] = "it shares its weight with an embedding"
        elif module is head or names[-1] in _HEADS:
            reasons[id(module)] = "heads stay in the model's dtype"
        elif names[-1] in _ROUTERS:
            reasons[id(module)] = "routers stay in the model's dtype"
        elif any(name.startswith("lora_") for name in names):
            reasons[id(module)] = "low-rank adapters stay in the model's dtype"
        elif (which := _kept_block(model, names, keep)) is not None:
            reasons[id(module)] = f"fp8_keep_blocks keeps the {which}"
    return reasons


def _head_of(model: nn.Module) -> object:
    """What a model of Hugging Face's calls its head; None if it has none, or is not of theirs."""
    get_head = getattr(model, "get_output_embeddings", None)
    try:
        return get_head() if callable(get_head) else None
    except NotImplementedError:  # theirs for models without one
        return None


def _kept_block(model: nn.Module, names: Sequence[str], keep: tuple[int, int]) -> str | None:
    """'first block' or 'last 2 blocks' where the path leads through one of them."""
    first, last = keep
    module = model
    for name in names:
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and name.isdecimal():
            if int(name) < first:
                return "first block" if first == 1 else f"first {first} blocks"
            if int(name) >= len(module) - last:
                return "last block" if last == 1 else f"last {last} blocks"
            return None  # a list inside a block is no list of blocks
        module = module._modules.get(name) or nn.Module()
    return None
