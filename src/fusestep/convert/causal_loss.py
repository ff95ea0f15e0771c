"""Language models that compute their own loss, as Hugging Face's do when they are called with labels: head and loss at
once, so that the logits of all tokens never exist together.

The old forward runs. While it does, its head gives `DeferredLogits`, and what comes next, the shift of the labels, the
number of items in the batch, auxiliary losses, is the library's code. That happens in training alone: in evaluation,
in generation, without labels and under torch.compile the head gives logits as ever.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fusestep import dispatch
from fusestep.convert.agreement import Call, NotKnownError, Probe
from fusestep.convert.classes import Kind
from fusestep.convert.deferred import DeferredLogits
from fusestep.convert.patterns import Pattern, Stage, has_hooks, positional_names
from fusestep.dispatch import Choice
from fusestep.ops.cross_entropy_rows import explain
from fusestep.ops.linear_cross_entropy import WHO

_APART = "head and loss stay apart"

#: A trial takes about so many elements of a head, in whole columns: a twin of a large one would not fit beside it.
MOST_TRIED = 2**24


class FusedCausalLM(Kind):
    """A model whose head and loss are computed at once, in training with labels.

    Attributes:
        fused_head: the name of its head.
        fused_labels: the place of `labels` among the arguments; None if it goes by name alone.
    """

    _prefix = ""
    fused_head: str
    fused_labels: int | None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not self._has_loss(args, kwargs):
            return super().forward(*args, **kwargs)
        head = self._modules[self.fused_head]
        if head is None or not is_plain_head(head):
            return super().forward(*args, **kwargs)
        # Found before the child of this name, by this very call; state dicts and walks do not see it.
        deferring = self.__dict__[self.fused_head] = _DeferringHead(head)
        try:
            output = super().forward(*args, **kwargs)
        finally:
            self.__dict__.pop(self.fused_head, None)
        if dispatch.is_examining() and not any(logits.losses for logits in deferring.given):
            raise NotKnownError(f"{_APART}: what it does to its logits before the loss is not known")
        return output

    def _has_loss(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether this call computes a loss to train on."""
        place = self.fused_labels
        labels = args[place] if place is not None and place < len(args) else kwargs.get("labels")
        is_replica = getattr(self, "_is_replica", False)  # nn.DataParallel gathers tensors, and nothing else
        is_training = self.training and torch.is_grad_enabled() and not torch._C._is_tracing()
        return labels is not None and is_training and not is_replica

    def implementation(self) -> Choice:
        """What head and loss run as, and why."""
        weight: Any = self._modules[self.fused_head].weight  # type: ignore[union-attr]
        return explain(WHO, weight.device, weight.dtype)


class _DeferringHead:
    """Stands for a head while the old forward runs.

    Attributes:
        given: the logits that it gave.
    """

    def __init__(self, head: nn.Module) -> None:
        self._head, self.given = head, list[DeferredLogits]()

    def __call__(self, hidden: Any) -> Any:
        head: Any = self._head
        if not isinstance(hidden, Tensor) or type(hidden) not in (Tensor, nn.Parameter) or hidden.dim() < 2:
            return head(hidden)
        casts = torch.is_autocast_enabled(hidden.device.type)
        if hidden.device != head.weight.device or not (casts or hidden.dtype is head.weight.dtype):
            return head(hidden)
        self.given.append(DeferredLogits.of(hidden, head))
        return self.given[-1]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._head, name)


def is_plain_head(head: nn.Module) -> bool:
    """Whether a head is nn.Linear, not sharded or quantised, and nothing else happens when it is called."""
    weight = head._parameters.get("weight")
    is_linear = isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward
    is_whole = type(weight) is nn.Parameter and type(weight.data) is Tensor and not weight.is_inference()
    return is_linear and is_whole and "forward" not in head.__dict__ and not has_hooks(head)


def _head_of(module: nn.Module) -> nn.Module | None:
    if any(isinstance(child, _Passing) for child in module.children()):
        # Stripped: the embeddings, which theirs would ask for, are out.
        return next(child for child in module.children() if not isinstance(child, _Passing))
    get_head = getattr(module, "get_output_embeddings", None)
    if not callable(get_head):
        return None
    try:
        head = get_head()
    except NotImplementedError:  # theirs for models without one
        return None
    return head if isinstance(head, nn.Module) else None


def _name_of(head: nn.Module, module: nn.Module) -> str | None:
    return next((name for name, child in module._modules.items() if child is head), None)


def _matches(module: nn.Module) -> bool | str:
    head = None if isinstance(module, FusedCausalLM) else _head_of(module)
    if head is None:
        return False
    takes = inspect.signature(module.forward).parameters
    if "labels" not in takes:
        return False
    if _name_of(head, module) is None:
        owners = (one for one in module.modules() if _name_of(head, one) is not None)
        if any("labels" in inspect.signature(one.forward).parameters for one in owners):
            return False  # a wrapper, of torch.compile's for instance: it is the model inside that computes the loss
        return f"{_APART}: its head is inside of another module"
    if not is_plain_head(head):
        return f"{_APART}: its head, a {type(head).__name__}, is more than a product, or has hooks"
    if "inputs_embeds" not in takes:
        return f"{_APART}: its forward takes no inputs_embeds, by which it could be tried"
    return True


def _attributes(module: nn.Module) -> dict[str, Any]:
    head = _head_of(module)
    assert head is not None
    names = positional_names(module)
    place = names.index("labels") if "labels" in names else None
    return {"fused_head": _name_of(head, module), "fused_labels": place}


# The trial: what comes before the head is taken out, and hidden states are put in its place.


class _Passing(nn.Module):
    """Stands for the model under the head: gives the embeddings that it is called with as its last hidden state."""

    def __init__(self, children: Iterable[str]) -> None:
        super().__init__()
        self._known = frozenset(children)

    def forward(self, *_: Any, inputs_embeds: Tensor | None = None, **__: Any) -> Any:
        return _Hidden(inputs_embeds)

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__.get("_known", ()):
            return self  # some call a child of the model instead
        return super().__getattr__(name)


class _Hidden:
    """The output of a model that has computed nothing but hidden states."""

    def __init__(self, hidden: Tensor | None) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]

    def __len__(self) -> int:
        return 1

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def _strip(twin: nn.Module) -> None:
    """Leave the head of a model alone, narrow if it is large, and have it train."""
    head: Any = _head_of(twin)
    for name, child in twin._modules.items():
        if child is not None and child is not head:
            twin._modules[name] = _Passing(child._modules)
    columns = max(8, MOST_TRIED // head.weight.shape[0])
    head._parameters["weight"] = nn.Parameter(head.weight.detach()[:, :columns], head.weight.requires_grad)
    twin.training = True


def _inputs(module: nn.Module, probe: Probe) -> Sequence[Call]:
    """The mean over tokens, some of them ignored, and the sum over a number of items that the caller knows."""
    head: Any = _head_of(module)
    takes = inspect.signature(module.forward).parameters
    shape = (3, 21)
    labels = torch.randint(head.weight.shape[0], shape, generator=probe.generator, device="cpu")
    labels[0, 1], labels[1, 2:4] = -100, -100
    given: dict[str, Any] = {"labels": labels.to(probe.device)}
    for name in ("inputs_embeds", "decoder_inputs_embeds"):
        if name in takes:
            given[name] = probe.randn(*shape, head.weight.shape[1]).requires_grad_()
    calls: list[Call] = [((), given)]
    if any(one.kind is one.VAR_KEYWORD for one in takes.values()):
        calls.append(((), given | {"num_items_in_batch": torch.tensor(37, device=probe.device)}))
    return calls


def _outcome(output: Any) -> Any:
    """The loss with its gradients, and the other outputs' numbers."""
    if not isinstance(output, dict):
        return output
    whole = {name: one.tensor() if isinstance(one, DeferredLogits) else one for name, one in output.items()}
    return {name: one if name == "loss" or not isinstance(one, Tensor) else one.detach() for name, one in whole.items()}


def _uses(module: nn.Module) -> Sequence[nn.Module]:
    head = _head_of(module)
    return () if head is None else (head,)


PATTERNS = (
    Pattern(
        "in training, head and loss at once; outputs.logits are computed when they are used",
        FusedCausalLM,
        _matches,
        _inputs,
        _attributes,
        Stage.BLOCK,
        _uses,
        stripped=_strip,
        outcome=_outcome,
    ),
)
