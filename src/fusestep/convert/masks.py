"""Models of the transformers library that make a causal mask in each call, or ask the device whether they need one.

Such a model numbers the tokens itself where it is given no `position_ids`; then its library looks in these numbers for
the starts of further sequences, and the host waits for the device to learn what it knows, so that no CUDA graph can be
captured. In a capture it does not ask, and some of its versions write a mask of all pairs of tokens, which takes
attention from its fast kernel. In training, sequences that nobody has masked or numbered need no mask at all: attention
through torch.nn.functional.scaled_dot_product_attention is causal by itself. The library makes none for an attention
that it knows no masks of, so that is what the model's configuration says during such a call, to the model alone: its
layers have theirs. All other calls, and those in evaluation or under torch.compile, are as they were.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fusestep.convert.agreement import Call, Probe
from fusestep.convert.classes import Kind
from fusestep.convert.patterns import Pattern, Stage, positional_names

#: What a call may give for its tokens, and what it may want of them.
_TOKENS = ("input_ids", "inputs_embeds")
#: Tensors that models hand down to one another and that say nothing of masks: how many tokens a loss is divided by.
_OF_LOSSES = ("num_items_in_batch",)
#: Fewer tokens than these attributes of a configuration say see all that came before.
_WINDOWS = ("sliding_window", "attention_chunk_size")
#: The name of an attention that the library knows no masks of.
_UNMASKED = "causal by itself"


class UnmaskedModel(Kind):
    """A model that makes no causal mask, in training, for tokens that it numbers itself.

    Attributes:
        known_names: the names of forward's positional arguments.
    """

    _prefix = ""
    config: Any
    known_names: tuple[str, ...]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not self._is_plain(args, kwargs):
            return super().forward(*args, **kwargs)
        config = self.config
        self.config = copy.copy(config)
        self.config._attn_implementation = _UNMASKED
        try:
            return super().forward(*args, **kwargs)
        finally:
            self.config = config

    def _is_plain(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call trains on whole sequences from their first tokens, all of which see all before them."""
        if not (self.training and torch.is_grad_enabled()) or self.config._attn_implementation != "sdpa":
            return False
        given = dict(zip(self.known_names, args, strict=False)) | kwargs
        tokens = [given.pop(name, None) for name in _TOKENS]
        for name in _OF_LOSSES:
            given.pop(name, None)
        # Switches and numbers decide about outputs alone; a tensor or a cache may decide about the mask.
        if not all(one is None or isinstance(one, (bool, int, float, str)) for one in given.values()):
            return False
        length = max((one.shape[1] for one in tokens if isinstance(one, Tensor) and one.dim() > 1), default=0)
        windows = [getattr(self.config, name, None) for name in _WINDOWS]
        return all(length < window for window in windows if window is not None)


def _matches(module: nn.Module) -> bool:
    library: Any = sys.modules.get("transformers")
    if isinstance(module, UnmaskedModel) or library is None or not isinstance(module, library.PreTrainedModel):
        return False
    written: Any = inspect.unwrap(type(module).forward)
    config: Any = module.config
    if "create_causal_mask" not in written.__code__.co_names or config._attn_implementation != "sdpa":
        return False
    # A configuration with others in it would tell them too.
    has_others = bool(getattr(config, "sub_configs", None)) or getattr(config, "add_cross_attention", False)
    return not has_others and {"inputs_embeds", "position_ids"} <= set(positional_names(module))


def _inputs(module: nn.Module, probe: Probe) -> Sequence[Call]:
    """Whole sequences, and some that are padded."""
    config: Any = module.config
    width = getattr(config, "embedding_size", None) or config.hidden_size
    embedded = probe.randn(3, 21, width).requires_grad_()
    padded = torch.ones(3, 21, dtype=torch.long, device=probe.device)
    padded[1, 17:] = 0
    plain = {"inputs_embeds": embedded, "use_cache": False}
    return [((), plain), ((), plain | {"attention_mask": padded})]


def _strip(twin: Any) -> None:
    """Leave no embeddings of tokens, and as many layers as have one of each sort, and have the model train."""
    embeddings = twin.get_input_embeddings()
    sorts: Sequence[object] = getattr(twin.config, "layer_types", None) or ()
    last = max((sorts.index(sort) for sort in set(sorts)), default=0)
    for name, child in twin._modules.items():
        if child is embeddings:
            twin._modules[name] = nn.Identity()
        elif isinstance(child, nn.ModuleList):
            twin._modules[name] = nn.ModuleList(list(child)[: last + 1])
    twin.training = True


PATTERNS = (
    Pattern(
        "in training, no causal mask is made where attention is causal by itself",
        UnmaskedModel,
        _matches,
        _inputs,
        lambda module: {"known_names": positional_names(module)},
        Stage.BLOCK,
        stripped=_strip,
    ),
)
