"""Attention of other libraries that rotates queries and keys by a function of its file: that function as one kernel.

Of Hugging Face's attention nothing else is touched. Its forward, whatever stands in it, runs as it is written, but that
`apply_rotary_pos_emb` is ours when it is called from there: the forward's code is bound once more, to global names of
which this one differs. The function must compute q · cos + rotate_half(q) · sin, which is found out by calling it.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fusestep import dispatch
from fusestep.convert.agreement import Call, Probe
from fusestep.convert.classes import Kind
from fusestep.convert.patterns import Pattern
from fusestep.convert.twins import undisturbed
from fusestep.dispatch import Choice
from fusestep.nn.functional import apply_rotary_tables

NAME = "apply_rotary_pos_emb"


class FusedRotaryAttention(Kind):
    """Attention whose queries and keys are rotated by one kernel each."""

    _prefix = ""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        old: Any = super().forward
        if torch.compiler.is_compiling():
            return old(*args, **kwargs)
        new = with_our_rotation(old.__func__)
        return old(*args, **kwargs) if new is None else new(self, *args, **kwargs)

    def implementation(self) -> Choice:
        """What the rotation runs as on the device of the parameters, and why."""
        first = next(self.parameters(), None)
        device = torch.get_default_device() if first is None else first.device
        choice = dispatch.explain_choice("rotary_tables", device.type, device.index)
        return Choice(choice.implementation, f"rotary embedding: {choice.reason}", choice.is_fallback)


class _Globals(dict[str, Any]):
    """The global names of a file, as they are when they are asked for, but for those that are put in here."""

    def __init__(self, theirs: dict[str, Any], ours: dict[str, Any]) -> None:
        super().__init__(ours)
        self._theirs = theirs

    def __missing__(self, name: str) -> Any:
        return self._theirs[name]


@functools.lru_cache(maxsize=256)
def with_our_rotation(forward: Any) -> Any:
    """A forward whose `apply_rotary_pos_emb` is ours, its decorators included; None if it is not bound so."""
    if not isinstance(forward, types.FunctionType):
        return None
    wrapped = forward.__dict__.get("__wrapped__")
    if wrapped is None:
        if NAME not in forward.__code__.co_names or not callable(forward.__globals__.get(NAME)):
            return None
        return _bound_again(forward, _Globals(forward.__globals__, {NAME: _Rotation(forward.__globals__)}), None)
    inner = with_our_rotation(wrapped)
    cells = forward.__closure__ or ()
    places = [place for place, cell in enumerate(cells) if _content(cell) is wrapped]
    if inner is None or len(places) != 1:
        return None
    closure = tuple(types.CellType(inner) if place in places else cell for place, cell in enumerate(cells))
    return _bound_again(forward, forward.__globals__, closure)


def _bound_again(function: Any, names: dict[str, Any], closure: tuple[Any, ...] | None) -> Any:
    cells = function.__closure__ if closure is None else closure
    copy = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__, cells)
    copy.__kwdefaults__, copy.__qualname__ = function.__kwdefaults__, function.__qualname__
    copy.__module__, copy.__doc__ = function.__module__, function.__doc__
    return copy


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # still empty
        return None


class _Rotation:
    """`apply_rotary_pos_emb` as a forward calls it: ours where it may be, else what its file has now."""

    def __init__(self, theirs: dict[str, Any]) -> None:
        self._theirs, self._known = theirs, theirs[NAME]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        function = self._theirs[NAME]
        # Another one than was known: somebody has put it there since.
        if function is not self._known or kwargs or len(args) != 4 or not _fits(*args):
            return function(*args, **kwargs)
        q, k, cos, sin = args
        return apply_rotary_tables(q, cos, sin), apply_rotary_tables(k, cos, sin)


def _fits(q: Any, k: Any, cos: Any, sin: Any) -> bool:
    """Whether these are four-dimensional q and k, in up to 32 bits, and tables for each of their positions."""
    tensors = (q, k, cos, sin)
    if any(type(one) is not Tensor or one.device != q.device for one in tensors):
        return False
    is_shaped = q.dim() == k.dim() == 4 and cos.dim() == 3 and cos.shape == sin.shape
    if not is_shaped or cos.requires_grad or sin.requires_grad or q.dtype is not k.dtype:
        return False
    is_narrow = all(one.is_floating_point() and one.dtype.itemsize in (2, 4) for one in tensors)
    batch, _, length, width = q.shape
    is_alike = k.shape[0] == batch and k.shape[2:] == q.shape[2:] and cos.shape[1:] == (length, width)
    return is_narrow and is_alike and cos.shape[0] in (1, batch) and width % 2 == 0


def recognised(function: Any) -> bool:
    """Whether a function of (q, k, cos, sin) turns halves: q · cos + rotate_half(q) · sin, and k the same."""
    if not callable(function):
        return False
    with undisturbed(torch.device("cpu")), torch.no_grad():
        q, k, cos, sin = (torch.randn(shape, dtype=torch.float64, device="cpu") for shape in _SHAPES)
        try:
            found = function(q, k, cos, sin)
        except (TypeError, RuntimeError, ValueError, IndexError):  # not a function of these four
            return False
        if not isinstance(found, tuple) or len(found) != 2:
            return False
        for t, y in zip((q, k), found, strict=True):
            left, right = t.chunk(2, -1)
            wanted = t * cos[:, None] + torch.cat((-right, left), -1) * sin[:, None]
            if not isinstance(y, Tensor) or y.shape != t.shape or float((y - wanted).abs().max()) > 1e-5:
                return False
    return True


_SHAPES = ((2, 3, 5, 8), (2, 1, 5, 8), (2, 5, 8), (2, 5, 8))


def _function_of(module: nn.Module) -> Callable[..., Any] | None:
    """What a module's forward calls by that name."""
    forward: Any = inspect.unwrap(type(module).forward)
    names = getattr(forward, "__globals__", {})
    is_called = isinstance(forward, types.FunctionType) and NAME in forward.__code__.co_names
    return names.get(NAME) if is_called else None


def _matches(module: nn.Module) -> bool | str:
    if isinstance(module, FusedRotaryAttention):
        return False
    function = _function_of(module)
    # One that writes its scores to memory is told what would help it more.
    is_eager = getattr(getattr(module, "config", None), "_attn_implementation", None) == "eager"
    if function is None or is_eager or "position_embeddings" not in inspect.signature(module.forward).parameters:
        return False
    if not recognised(function):
        return "our kernel does not know how it rotates queries and keys"
    if with_our_rotation(type(module).forward) is None:
        return "its forward is wrapped in a way that is not known"
    return True


def _inputs(module: nn.Module, probe: Probe) -> Sequence[Call]:
    """A causal call, and one with a mask and one table for all sequences."""
    projection: Any = next(child for child in module.modules() if isinstance(child, nn.Linear))
    size: Any = getattr(module, "rotary_ndims", None) or module.head_dim
    calls: list[Call] = []
    for batch, mask in ((3, None), (1, torch.zeros(3, 1, 21, 21, device=probe.device, dtype=probe.dtype))):
        angles = probe.randn(batch, 21, size)
        named = {"position_embeddings": (angles.cos(), angles.sin()), "attention_mask": mask}
        calls.append(((), {"hidden_states": probe.randn(3, 21, projection.in_features).requires_grad_(), **named}))
    return calls


PATTERNS = (
    Pattern(
        "rotary embedding in one kernel for queries and one for keys, the rest as it is",
        FusedRotaryAttention,
        _matches,
        _inputs,
        quiet=("attention_dropout",),
    ),
)
