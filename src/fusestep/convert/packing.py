"""Models of the transformers library that ask the device, in each call without a mask, whether sequences are packed.

Such a model numbers the tokens itself where it is given no `position_ids`, and its library then looks in these numbers
for the starts of further sequences: the host waits for the device to learn what it knows, and no CUDA graph can be
captured. With a cache of keys and values nobody looks, since packed sequences are for training. So a call in training
that has neither mask, positions nor cache gets a cache that keeps nothing: the library's own code makes the same masks,
and no one waits. Calls with any of them, in evaluation or under torch.compile are as they were.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fusestep.convert.agreement import Call, Probe
from fusestep.convert.classes import Kind
from fusestep.convert.patterns import Pattern, Stage

#: What the argument that takes the cache is called, in the library's newer and older versions.
_CACHES = ("cache", "past_key_values")

#: What decides about masks; a call that gives one of them decides by itself.
_DECIDING = ("attention_mask", "position_ids")


class UnpackedModel(Kind):
    """A model that is not asked whether the sequences that it numbers itself are packed, in training.

    Attributes:
        known_places: the places of forward's arguments by their names; of those that go by name alone, None.
    """

    _prefix = ""
    known_places: dict[str, int | None]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        name = next(name for name in _CACHES if name in self.known_places)
        if torch.compiler.is_compiling() or not self._is_plain(name, args, kwargs):
            return super().forward(*args, **kwargs)
        place, cache = self.known_places[name], _keeps_nothing()()
        if place is not None and place < len(args):
            args = (*args[:place], cache, *args[place + 1 :])
        else:
            kwargs = kwargs | {name: cache}
        return _without(super().forward(*args, **kwargs), cache)

    def _is_plain(self, cache: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call trains on sequences that the model numbers itself, and nobody wants the cache back."""
        if not (self.training and torch.is_grad_enabled()):
            return False
        # Their layers take no cache, and warn of one, where they are computed again in the backward.
        if any(getattr(one, "gradient_checkpointing", False) for one in (self, *self._stacked())):
            return False

        def given(name: str) -> Any:
            place = self.known_places.get(name)
            return args[place] if place is not None and place < len(args) else kwargs.get(name)

        wanted = given("use_cache")
        wanted = getattr(self.config, "use_cache", False) if wanted is None else wanted
        return not wanted and all(given(name) is None for name in (cache, *_DECIDING))

    def _stacked(self) -> Iterator[nn.Module]:
        """The layers."""
        return itertools.chain.from_iterable(one for one in self._modules.values() if isinstance(one, nn.ModuleList))


@functools.cache
def _keeps_nothing() -> Any:
    """The class of caches that give back what they are given, and always look as if nothing had come before."""
    from transformers import DynamicCache

    class KeepsNothing(DynamicCache):
        def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
            return key_states, value_states

    return KeepsNothing


def _without(output: Any, cache: Any) -> Any:
    """A model's output, without the cache that it was not asked for."""
    if isinstance(output, tuple):
        return tuple(one for one in output if one is not cache)
    if isinstance(output, dict) and any(one is cache for one in output.values()):
        return type(output)(**{name: one for name, one in output.items() if one is not cache})
    return output


def _places(module: nn.Module) -> dict[str, int | None]:
    parameters = inspect.signature(module.forward).parameters.values()
    return {one.name: None if one.kind is one.KEYWORD_ONLY else place for place, one in enumerate(parameters)}


def _matches(module: nn.Module) -> bool:
    library: Any = sys.modules.get("transformers")
    if isinstance(module, UnpackedModel) or library is None or not isinstance(module, library.PreTrainedModel):
        return False
    written: Any = inspect.unwrap(type(module).forward)
    config: Any = module.config
    if "create_causal_mask" not in written.__code__.co_names or getattr(config, "add_cross_attention", False):
        return False
    takes = _places(module)
    return any(name in takes for name in _CACHES) and all(name in takes for name in (*_DECIDING, "inputs_embeds"))


def _inputs(module: nn.Module, probe: Probe) -> Sequence[Call]:
    config: Any = module.config
    width = getattr(config, "embedding_size", None) or config.hidden_size
    embedded = probe.randn(3, 21, width).requires_grad_()
    padded = torch.ones(3, 21, dtype=torch.long, device=probe.device)
    padded[1, 17:] = 0
    plain = {"inputs_embeds": embedded, "use_cache": False}
    return [((), plain), ((), plain | {"attention_mask": padded})]


def _strip(twin: nn.Module) -> None:
    """Leave one layer of each sort in each stack, no embeddings, and have the model train without dropout."""
    embeds = twin.get_input_embeddings()  # type: ignore[operator]
    kinds: Sequence[object] = getattr(twin.config, "layer_types", None) or ()
    for name, child in twin._modules.items():
        if child is embeds:
            twin._modules[name] = nn.Identity()
        elif isinstance(child, nn.ModuleList):
            last = max((kinds.index(kind) for kind in set(kinds)), default=0)
            twin._modules[name] = nn.ModuleList(list(child)[: last + 1])
    twin.training = True


PATTERNS = (
    Pattern(
        "in training, positions that it made itself are not searched for packed sequences",
        UnpackedModel,
        _matches,
        _inputs,
        lambda module: {"known_places": _places(module)},
        Stage.BLOCK,
        stripped=_strip,
    ),
)
