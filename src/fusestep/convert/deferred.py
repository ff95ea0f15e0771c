"""Logits that are not there yet: what a head would have given, computed when somebody uses it.

A model's forward does little with its logits before the loss: it widens them, shifts and flattens them, scales them by
a power of two, or caps them by c · tanh(x / c). What it does is noted, and where a cross entropy comes next, product
and loss are computed at once by `linear_cross_entropy`. For anything else the product is computed first and all that
was noted is done to it, so that whoever looks at them finds the logits of the old forward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fusestep.errors import UserError
from fusestep.nn.functional import linear_cross_entropy

#: Named so, since the class below has a method `float`.
_Real = float


class _Step(NamedTuple):
    """What is done to every logit: / value, · value, tanh, or a cast to fp32."""

    kind: Literal["divide", "multiply", "tanh", "widen"]
    value: float = 0.0

    def __call__(self, x: Tensor) -> Tensor:
        if self.kind == "divide":
            return x / self.value
        if self.kind == "multiply":
            return x * self.value
        return torch.tanh(x) if self.kind == "tanh" else x.float()


class Form(NamedTuple):
    """What steps amount to, as `linear_cross_entropy` knows it: logits · scale, then capped."""

    scale: float
    softcap: float | None


def form_of(steps: Iterable[_Step]) -> Form | None:
    """The form of the logits after these steps; None if it is none that the loss knows exactly."""
    left = [step for step in steps if step.kind != "widen"]
    scale = 1.0
    while left:
        kinds = [step.kind for step in left]
        if kinds == ["divide", "tanh", "multiply"] and left[0].value == left[2].value > 0:
            return Form(scale, left[0].value)
        value = left.pop(0).value
        if kinds[0] == "tanh" or value <= 0 or math.frexp(value)[0] != 0.5:
            return None  # only a power of two scales without rounding
        scale = scale * value if kinds[0] == "multiply" else scale / value
    return Form(scale, None)


class _Product:
    """The product that the logits are: of hidden states with a head's weight, in the autocast of its time.

    Attributes:
        losses: how many losses were computed at once with it.
    """

    def __init__(self, hidden: Tensor, head: nn.Linear) -> None:
        self.head, self.losses, self._weight = head, 0, head.weight
        self._kind = hidden.device.type
        self._casts = torch.is_autocast_enabled(self._kind)
        self._cast_dtype = torch.get_autocast_dtype(self._kind)
        casts = self._casts and hidden.dtype is not torch.float64
        self.dtype = self._cast_dtype if casts else torch.promote_types(hidden.dtype, head.weight.dtype)
        self._read = [(one, one._version) for one in (hidden, head.weight, head.bias) if one is not None]

    def autocast(self) -> torch.autocast:
        return torch.autocast(self._kind, self._cast_dtype, self._casts)

    def check(self) -> None:
        """Raise UserError where what is multiplied is not what it was in the forward."""
        # Sharded models put shards in the place of their weights after backward.
        is_same = self.head.weight is self._weight
        if not is_same or any(one._version != version for one, version in self._read):
            raise UserError(
                "the logits of this forward cannot be computed any more, since the head's weight or its input was "
                "written (by optimizer.step?) or sharded again; use them before backward, or convert with "
                "fused_loss=False."
            )


class DeferredLogits:
    """Stands where a tensor of logits was. Shape, dtype and device are known; the numbers are computed on first use.

    It takes part in torch's functions and in arithmetic as a tensor does, and has a tensor's methods. `isinstance(…,
    torch.Tensor)` is False: `tensor()` gives the tensor.
    """

    def __init__(self, hidden: Tensor, product: _Product, steps: tuple[_Step, ...] = ()) -> None:
        self._hidden, self._product, self._steps = hidden, product, steps
        self._made: Tensor | None = None

    @classmethod
    def of(cls, hidden: Tensor, head: nn.Linear) -> DeferredLogits:
        """What head(hidden) would give; hidden is (…, width)."""
        return cls(hidden, _Product(hidden, head))

    def tensor(self) -> Tensor:
        """The logits, with a gradient if gradients are enabled now.

        Raises: UserError if the weight was written since the forward.
        """
        if self._made is None or (torch.is_grad_enabled() and not self._made.requires_grad):
            self._product.check()
            with self._product.autocast():
                logits: Tensor = self._product.head(self._hidden)
                for step in self._steps:
                    logits = step(logits)
            self._made = logits
        return self._made

    @property
    def losses(self) -> int:
        """How many losses were computed without the logits."""
        return self._product.losses

    # What a tensor tells of itself

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self._hidden.shape[:-1], self._product.head.weight.shape[0]))

    @property
    def ndim(self) -> int:
        return self._hidden.dim()

    @property
    def dtype(self) -> torch.dtype:
        widened = any(step.kind == "widen" for step in self._steps)
        return torch.float32 if widened else self._product.dtype

    @property
    def device(self) -> torch.device:
        return self._hidden.device

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return self.ndim

    def numel(self) -> int:
        return self.shape.numel()

    def __len__(self) -> int:
        return int(self.shape[0])

    def __repr__(self) -> str:
        if self._made is not None:
            return repr(self._made)
        return f"DeferredLogits(shape={tuple(self.shape)}, dtype={self.dtype}, not computed)"

    # What is only noted

    def _and(self, step: _Step) -> DeferredLogits:
        return type(self)(self._hidden, self._product, (*self._steps, step))

    def _of_rows(self, hidden: Tensor) -> DeferredLogits:
        return type(self)(hidden, self._product, self._steps)

    def float(self) -> Any:
        return self.to(torch.float32)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        dtype = args[0] if len(args) == 1 and not kwargs else None
        if dtype is self.dtype:
            return self
        if dtype is torch.float32 and self.dtype in (torch.bfloat16, torch.float16):
            return self._and(_Step("widen"))
        return self.tensor().to(*args, **kwargs)

    def contiguous(self) -> DeferredLogits:
        return self

    def view(self, *shape: Any) -> Any:
        return self._reshaped("view", shape)

    def reshape(self, *shape: Any) -> Any:
        return self._reshaped("reshape", shape)

    def _reshaped(self, how: str, shape: tuple[Any, ...]) -> Any:
        wanted = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        if len(wanted) < 2 or wanted[-1] != self.shape[-1]:
            return getattr(self.tensor(), how)(*shape)
        return self._of_rows(self._hidden.reshape(*wanted[:-1], self._hidden.shape[-1]))

    def __getitem__(self, index: Any) -> Any:
        parts = index if isinstance(index, tuple) else (index,)
        leading = parts[1:-1] if parts[0] is Ellipsis else parts
        is_short = len(parts) == self.ndim if parts[0] is not Ellipsis else len(parts) > 1
        all_last = parts[-1] == slice(None) if isinstance(parts[-1], slice) else False
        if is_short and all_last and all(isinstance(one, slice) for one in leading):
            return self._of_rows(self._hidden[index])
        return self.tensor()[index]

    def tanh(self) -> Any:
        return self._and(_Step("tanh"))

    def mul(self, other: Any) -> Any:
        return self._and(_Step("multiply", other)) if _is_number(other) else self.tensor() * other

    def div(self, other: Any) -> Any:
        return self._and(_Step("divide", other)) if _is_number(other) else self.tensor() / other

    __mul__ = __rmul__ = mul
    __truediv__ = div

    # What needs the numbers

    def cross_entropy(
        self,
        target: Tensor,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: _Real = 0.0,
    ) -> Tensor:
        """torch.nn.functional.cross_entropy of these logits, with its arguments."""
        form = form_of(self._steps)
        is_plain = weight is None and size_average is None and reduce is None and self._made is None
        is_known = self.ndim == 2 and isinstance(target, Tensor) and target.dtype is torch.int64 and target.dim() == 1
        is_exact = form is not None and (form.scale == 1.0 or self._product.dtype is not torch.float16)
        if form is None or not (is_plain and is_known and is_exact):
            return F.cross_entropy(
                self.tensor(), target, weight, size_average, ignore_index, reduce, reduction, label_smoothing
            )
        self._product.check()
        head, hidden = self._product.head, self._hidden
        bias: Tensor | None = head.bias
        if form.scale != 1.0:
            hidden, bias = hidden * form.scale, None if bias is None else bias * form.scale
        with self._product.autocast():
            loss = linear_cross_entropy(
                hidden,
                head.weight,
                target,
                bias,
                ignore_index=ignore_index,
                label_smoothing=label_smoothing,
                softcap=form.softcap,
                reduction=reduction,  # type: ignore[arg-type]
            )
        self._product.losses += 1
        # torch's has the dtype of its input, and under autocast fp32.
        return loss if torch.is_autocast_enabled(self.device.type) else loss.to(self.dtype)

    _noted: ClassVar[dict[Any, Callable[..., Any]]] = {}

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in cls._noted and args and isinstance(args[0], cls):
            return cls._noted[func](*args, **kwargs)
        if func in (torch.mul, Tensor.mul) and len(args) == 2 and not kwargs and isinstance(args[1], cls):
            return args[1].mul(args[0])
        args, kwargs = pytree.tree_map_only(cls, cls.tensor, (args, kwargs))
        return func(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        # Those who only probe (hasattr) shall not pay, nor copies, which ask before there is a __dict__.
        if name.startswith("_") or not hasattr(Tensor, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.tensor(), name)

    def __setitem__(self, index: Any, value: Any) -> None:
        self.tensor()[index] = value

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.tensor().__reduce_ex__(protocol)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self.tensor().__array__(*args, **kwargs)

    def __hash__(self) -> int:
        return id(self)


DeferredLogits._noted = {
    F.cross_entropy: DeferredLogits.cross_entropy,
    torch.tanh: DeferredLogits.tanh,
    torch.mul: DeferredLogits.mul,
    torch.div: DeferredLogits.div,
    torch.true_divide: DeferredLogits.div,
}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _by_tensor(name: str) -> Callable[..., Any]:
    def operator(self: DeferredLogits, *args: Any) -> Any:
        return getattr(self.tensor(), name)(*args)

    return operator


#: Operators are looked up on the class, so that __getattr__ does not see them.
_OPERATORS = """
add radd sub rsub neg pow rpow rtruediv floordiv mod matmul rmatmul eq ne lt le gt ge and or xor invert abs
iter bool float int index contains format
""".split()  # noqa: SIM905 (a list of words reads better so)
for _name in _OPERATORS:
    setattr(DeferredLogits, f"__{_name}__", _by_tensor(f"__{_name}__"))
