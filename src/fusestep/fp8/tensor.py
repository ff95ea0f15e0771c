"""Float8Tensor: a weight that lives in FP8 only, and is a tensor of its nominal dtype to everyone else.

It holds a quantised matrix (ops/quantized.py) and no other copy of its values. Modules of ours multiply by it as it is
(`quantized_weight`); any other operation of torch meets its values in the nominal dtype, made for that operation alone.
What writes into it in place is cast again, with scales from the new values. FusedAdam keeps the fp32 master that such
a weight needs in training, and writes bytes and scales from it in its own pass, as it does for copies.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from fusestep.fp8.copies import CopyFormat, WeightCopies, copies_of, give, overwrite
from fusestep.ops.block_scaling import quantize_blocks
from fusestep.ops.block_scaling_launch import unwritten_scales
from fusestep.ops.quantize import transpose_bytes
from fusestep.ops.quantized import Quantized

_aten = torch.ops.aten


@dataclass
class _Held:
    """What a Float8Tensor and those that are detached from it have in common."""

    quantized: Quantized
    initial: Tensor | None = None
    #: What its shards under FSDP2 have in common (gathered.py).
    scaled: Any = None


class Float8Tensor(Tensor):
    """A matrix (rows, columns) in FP8 with its scales; see the head of this file.

    Args:
        quantized: its bytes and scales, `data` at least.
        form: how values that are written into it are cast.
        dtype: what it passes for: torch.bfloat16, float16 or float32.
        initial: the values before the cast, on the CPU, where they are kept.

    Attributes:
        form: as given.
        dtype: the nominal dtype.
    """

    form: CopyFormat
    _held: _Held

    @staticmethod
    def __new__(
        cls,
        quantized: Quantized,
        form: CopyFormat,
        dtype: torch.dtype,
        requires_grad: bool = False,
        initial: Tensor | None = None,
    ) -> Float8Tensor:
        made: Float8Tensor = Tensor._make_wrapper_subclass(
            cls, quantized.shape, dtype=dtype, device=quantized.device, requires_grad=requires_grad
        )
        made.form = form
        made._held = _Held(quantized, initial)
        return made

    @classmethod
    def of(cls, values: Tensor, form: CopyFormat, *, keep_initial: bool = False) -> Float8Tensor:
        """Cast values (rows, columns), whose dtype becomes the nominal one, and keep them on the CPU if asked."""
        if form.kind == "delayed":
            # Without a module's slot there is no scale yet but the values' own.
            form = replace(form, kind="current")
        values = values.detach()
        initial = values.to("cpu", copy=True) if keep_initial else None
        return cls(WeightCopies(replace(form, transposed=False)).cast(values), form, values.dtype, initial=initial)

    @property
    def quantized(self) -> Quantized:
        """The bytes and scales."""
        return self._held.quantized

    def quantized_both_ways(self) -> Quantized:
        """The bytes and scales with the transpose, which is made once and kept: training reads it."""
        if self._held.quantized.transposed is None:
            self._held.quantized = _with_transpose(self._held.quantized, self.form)
        return self._held.quantized

    def dequantize(self) -> Tensor:
        """A plain tensor of the values, in the nominal dtype."""
        return self.quantized.dequantize(self.dtype)

    def get_high_precision_init_val(self) -> Tensor | None:
        """The values before the cast, on the CPU, if fp8_model_init was asked to preserve them."""
        return self._held.initial

    def clear_high_precision_init_val(self) -> None:
        """Free the values before the cast."""
        self._held.initial = None

    def copies(self) -> WeightCopies:
        """What the optimizer writes: this very tensor's bytes and scales, by a module's slot where one is attached."""
        copies = copies_of(self)
        has_transpose = self.quantized.transposed is not None
        if copies is None:
            copies = WeightCopies(replace(self.form, transposed=has_transpose))
            give((self,), copies)
        elif copies.form.transposed != has_transpose:
            copies = WeightCopies(replace(copies.form, transposed=has_transpose), copies.slots, copies.index)
            give((self,), copies)
        copies.quantized = self.quantized
        return copies

    def _rewritten(self, values: Tensor) -> None:
        """Cast new values in place, over whatever forms are held."""
        has_transpose = self.quantized.transposed is not None
        overwrite(self.quantized, WeightCopies(replace(self.form, transposed=has_transpose)).cast(values.detach()))

    def _like(self, quantized: Quantized, dtype: torch.dtype | None = None) -> Float8Tensor:
        return Float8Tensor(quantized, self.form, dtype or self.dtype, initial=self._held.initial)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Float8Tensor({self.dequantize()}, {self.quantized.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Float8Tensor:
        made = self._like(_cloned(self.quantized))
        made.requires_grad_(self.requires_grad)
        _keep_parameter(made, isinstance(self, torch.nn.Parameter))
        memo[id(self)] = made
        return made

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        q = self.quantized
        parts = (q.shape, q.data, q.scale_inv, q.block)
        is_parameter = isinstance(self, torch.nn.Parameter)
        return _rebuild, (*parts, self.form, self.dtype, self.requires_grad, is_parameter, self._held.initial)

    # What torch.compile and the moves of a module between devices ask of a tensor that is made of tensors.

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        q = self.quantized
        return ["_data", "_scale_inv"], (q.shape, q.block, self.form, self.dtype)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor],
        context: tuple[Any, ...],
        size: Any,
        stride: Any,
    ) -> Float8Tensor:
        shape, block, form, dtype = context
        data, scale_inv = inner["_data"], inner["_scale_inv"]
        return Float8Tensor(Quantized(shape, data, None, scale_inv, scale_inv, block), form, dtype)

    @property
    def _data(self) -> Tensor:
        data = self.quantized.data
        assert data is not None
        return data

    @property
    def _scale_inv(self) -> Tensor:
        return self.quantized.scale_inv

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        special = _SPECIAL.get(func)
        if special is not None and isinstance(args[0], Float8Tensor):
            return special(*args, **kwargs)
        return _by_value(func, args, kwargs)


def _by_value(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation on plain tensors of the values, and cast what it wrote."""
    values: dict[int, tuple[Float8Tensor, Tensor]] = {}

    def plain(tensor: Float8Tensor) -> Tensor:
        return values.setdefault(id(tensor), (tensor, tensor.dequantize()))[1]

    plain_args, plain_kwargs = tree_map_only(Float8Tensor, plain, (args, kwargs))
    result = func(*plain_args, **plain_kwargs)
    written: dict[int, Float8Tensor] = {}
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(tensor, Float8Tensor):
                its_values = values[id(tensor)][1]
                tensor._rewritten(its_values)
                written[id(its_values)] = tensor
    # An operation in place returns the tensor that it was given.
    return tree_map_only(Tensor, lambda tensor: written.get(id(tensor), tensor), result) if written else result


def _detach(tensor: Float8Tensor) -> Float8Tensor:
    made = tensor._like(tensor.quantized)
    made._held = tensor._held
    return made


def _clone(tensor: Float8Tensor, **_options: Any) -> Float8Tensor:
    return tensor._like(_cloned(tensor.quantized))


def _to_copy(
    tensor: Float8Tensor, dtype: torch.dtype | None = None, device: torch.device | None = None, **options: Any
) -> Tensor:
    if dtype is not None and not dtype.is_floating_point:
        return tensor.dequantize().to(dtype=dtype, device=device, copy=True)
    non_blocking = bool(options.get("non_blocking", False))

    def moved(inner: Tensor) -> Tensor:
        return inner.to(device, non_blocking=non_blocking, copy=True)

    return tensor._like(_mapped(tensor.quantized, moved), dtype)


def _copy(tensor: Float8Tensor, source: Tensor, non_blocking: bool = False) -> Float8Tensor:  # noqa: ARG001
    if tensor.shape != source.shape:
        source = source.expand(tensor.shape)
    if isinstance(source, Float8Tensor):
        to, of = tensor.quantized, source.quantized
        if to.dtype == of.dtype and to.block == of.block and of.scale_inv.shape == to.scale_inv.shape:
            # Bytes and scales as they are: casting again might not give the same.
            overwrite(to, of if to.transposed is None else _with_transpose(of, tensor.form))
            return tensor
        source = source.dequantize()
    tensor._rewritten(source.to(tensor.device, tensor.dtype))
    return tensor


def _empty_like(tensor: Float8Tensor, dtype: torch.dtype | None = None, **options: Any) -> Tensor:
    """Of the same kind, unless a dtype is asked for: then a plain tensor."""
    if dtype is not None:
        return torch.empty(tensor.shape, dtype=dtype, device=options.get("device") or tensor.device)
    device = options.get("device") or tensor.device
    return tensor._like(_mapped(tensor.quantized, lambda inner: torch.empty_like(inner, device=device)))


def _as_strided(tensor: Float8Tensor, size: Any, stride: Any, storage_offset: int | None = None) -> Tensor:
    """Itself as it is, which FSDP2 asks for; else a plain tensor."""
    if tuple(size) == tuple(tensor.shape) and tuple(stride) == tensor.stride() and not storage_offset:
        return _detach(tensor)
    return torch.as_strided(tensor.dequantize(), size, stride, storage_offset)


def _new_zeros(tensor: Float8Tensor, size: Any, **options: Any) -> Tensor:
    """Room for a shard of it, as FSDP2 asks for: in the nominal dtype, gathered in FP8. Else a plain tensor."""
    wanted = {name: value for name, value in options.items() if value is not None}
    made = torch.zeros(size, **{"dtype": tensor.dtype, "device": tensor.device, **wanted})
    is_shard = len(size) == 2 and size[1] == tensor.shape[1] and made.dtype == tensor.dtype
    if not is_shard or tensor.form.kind == "microblocks":
        return made
    from fusestep.fp8.gathered import GatheredWeight, alone

    if tensor._held.scaled is None:
        tensor._held.scaled = alone(tensor.form)
    return GatheredWeight(made, tensor._held.scaled)


def _zeros_like(tensor: Float8Tensor, dtype: torch.dtype | None = None, **options: Any) -> Tensor:
    """Plain: the state of an optimizer, for one."""
    return torch.zeros(tensor.shape, dtype=dtype or tensor.dtype, device=options.get("device") or tensor.device)


_SPECIAL: Mapping[Any, Callable[..., Any]] = {
    _aten.detach.default: _detach,
    _aten.alias.default: _detach,
    _aten.clone.default: _clone,
    _aten._to_copy.default: _to_copy,
    _aten.copy_.default: _copy,
    _aten.empty_like.default: _empty_like,
    _aten.zeros_like.default: _zeros_like,
    _aten.as_strided.default: _as_strided,
    _aten.new_zeros.default: _new_zeros,
}


def quantized_weight(parameter: Tensor, *, transposed: bool = False) -> Quantized | None:
    """The bytes and scales of a weight that lives in FP8, else None.

    Args:
        transposed: with the transpose, which the product for the input's gradient reads.
    """
    if not isinstance(parameter, Float8Tensor):
        return None
    return parameter.quantized_both_ways() if transposed else parameter.quantized


def _with_transpose(quantized: Quantized, form: CopyFormat) -> Quantized:
    data = quantized.data
    assert data is not None
    if form.kind == "microblocks":
        # Blocks along columns are others than those along rows: they are cast from the values that there are.
        made, _ = quantize_blocks(quantized.dequantize(), form.dtype, (1, 32), rowwise=False, columnwise=True)
        return quantized._replace(transposed=made.transposed, transposed_scale_inv=made.transposed_scale_inv)
    scales = quantized.scale_inv
    if quantized.block is not None:
        rows, columns = quantized.shape
        scales = unwritten_scales(columns, rows, quantized.block, data.device).fill_(1)
        blocks = -(-rows // 128), -(-columns // 128)
        scales[: blocks[1], : blocks[0]] = quantized.scale_inv[: blocks[0], : blocks[1]].t()
    return quantized._replace(transposed=transpose_bytes(data), transposed_scale_inv=scales)


def _mapped(quantized: Quantized, function: Callable[[Tensor], Tensor]) -> Quantized:
    """Another quantised matrix of what a function makes of each tensor; tensors that are one stay one."""
    scale_inv = function(quantized.scale_inv)
    is_one = quantized.transposed_scale_inv is quantized.scale_inv
    return quantized._replace(
        data=None if quantized.data is None else function(quantized.data),
        transposed=None if quantized.transposed is None else function(quantized.transposed),
        scale_inv=scale_inv,
        transposed_scale_inv=scale_inv if is_one else function(quantized.transposed_scale_inv),
    )


def _cloned(quantized: Quantized) -> Quantized:
    return _mapped(quantized, torch.clone)


def _keep_parameter(tensor: Tensor, is_parameter: bool) -> None:
    """nn.Parameter knows a subclass of Tensor by this mark."""
    if is_parameter:
        tensor._is_param = True


def _rebuild(
    shape: tuple[int, int],
    data: Tensor,
    scale_inv: Tensor,
    block: tuple[int, int] | None,
    form: CopyFormat,
    dtype: torch.dtype,
    requires_grad: bool,
    is_parameter: bool,
    initial: Tensor | None,
) -> Float8Tensor:
    quantized = Quantized(shape, data, None, scale_inv, scale_inv, block)
    made = Float8Tensor(quantized, form, dtype, requires_grad, initial)
    _keep_parameter(made, is_parameter)
    return made
