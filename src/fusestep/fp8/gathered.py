"""FSDP2 gathers weights in FP8: a quarter of fp32's bytes, half of bf16's.

`gather_in_fp8(model)` before `fully_shard`. Each rank then keeps its shard of a weight in the weight's own dtype, which
optimizers step as any other; what goes over the wire, and what a rank holds of whole weights while they are used, is
FP8, by the hooks that FSDP2 has for subclasses of Tensor:

    fsdp_pre_all_gather     the amax of the whole weight over all shards; the shard cast with the scale that follows
    fsdp_post_all_gather    a Float8Tensor of all shards' bytes, with its transpose, in memory that FSDP2 frees

A module multiplies by that Float8Tensor as by any weight that lives in FP8 (tensor.py). Bytes and scales are those of a
cast of the whole weight, bit for bit, whatever the shards: the amax is the whole tensor's, or each 128 × 128 tile's,
across the borders of shards. All amaxes that changed since they were last reduced take one collective together.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from fusestep.errors import UserError
from fusestep.fp8.copies import CopyFormat
from fusestep.fp8.gathered_cast import amaxes_of, cast_rows, slots_of, whole_quantized
from fusestep.fp8.model_init import WEIGHT_NAMES, keep_marks
from fusestep.fp8.recipes import Float8CurrentScaling, Recipe
from fusestep.fp8.tensor import Float8Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

_aten = torch.ops.aten


class Share(NamedTuple):
    """Where a rank's rows of a weight lie.

    Attributes: shape: of the whole, (rows, columns); first: the first of its rows; most: how many rows the first rank
        has, none has more; ranks: how many share the weight.
    """

    shape: tuple[int, int]
    first: int
    most: int
    ranks: int

    @property
    def is_full(self) -> bool:
        """Whether every rank has some rows."""
        return self.shape[0] > (self.ranks - 1) * self.most


@dataclass(eq=False)
class Scaled:
    """A weight that is gathered in FP8, whoever holds its shard at the moment.

    Attributes:
        form: how it is cast.
        together: the weights that are reduced together.
        known: what a cast has to know of the whole weight, whose values are as `state` tells them: a slot (1, 4) with
            its scale, or the amaxes of its tiles.
    """

    form: CopyFormat
    together: list[Scaled]
    values: Tensor | None = None
    share: Share | None = None
    group: ProcessGroup | None = None
    known: Tensor | None = None
    state: tuple[int, int] | None = None

    def of_whole(self, values: Tensor, share: Share, group: ProcessGroup) -> Tensor:
        """What is `known` of the whole weight, of which this rank has the rows `values`. All ranks call this alike."""
        self.values, self.share, self.group = values, share, group
        if not share.is_full:
            # Ranks without a row cannot tell that the others changed.
            reduce_amaxes([self])
        elif self.state != _state_of(values):
            reduce_amaxes([one for one in self.together if one._is_stale(group)])
        assert self.known is not None
        return self.known

    def _is_stale(self, group: ProcessGroup) -> bool:
        if self.values is None or self.share is None or self.group is not group or not self.share.is_full:
            return False
        return self.state != _state_of(self.values)


def _state_of(values: Tensor) -> tuple[int, int]:
    return values._version, values.data_ptr()


@torch.no_grad()
def reduce_amaxes(weights: list[Scaled]) -> None:
    """Renew the amaxes of weights of one group, in one collective."""
    found = [amaxes_of(one.values, one.form, one.share) for one in weights]  # type: ignore[arg-type]
    sizes = [one.numel() for one in found]
    flat = torch.cat([one.flatten() for one in found]).nan_to_num_(nan=float("inf"), posinf=float("inf"))
    group = weights[0].group
    if group is not None and group.size() > 1:
        torch.distributed.all_reduce(flat, torch.distributed.ReduceOp.MAX, group)
    form = weights[0].form  # of all that are reduced together
    known = flat.split(sizes) if form.kind == "tiles" else slots_of(flat, form).split(1)
    for one, local, reduced in zip(weights, found, known, strict=True):
        one.known = reduced.view(local.shape) if form.kind == "tiles" else reduced
        assert one.values is not None
        one.state = _state_of(one.values)


class GatheredWeight(Tensor):
    """A weight, or a shard of one, in high precision, that FSDP2 gathers in FP8.

    A tensor of its values to everyone else.

    Args: values: plain; scaled: the weight that it is of.
    """

    _plain: Tensor
    scaled: Scaled

    @staticmethod
    def __new__(cls, values: Tensor, scaled: Scaled, requires_grad: bool = False) -> GatheredWeight:
        made: GatheredWeight = Tensor._make_wrapper_subclass(
            cls,
            values.shape,
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            layout=values.layout,
            device=values.device,
            requires_grad=requires_grad,
        )
        made._plain = values
        made.scaled = scaled
        return made

    # The hooks of FSDP2

    def fsdp_pre_all_gather(
        self,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],  # noqa: ARG002
        module: nn.Module,  # noqa: ARG002
        mp_policy: Any,  # noqa: ARG002
    ) -> tuple[tuple[Tensor, ...], tuple[Any, ...]]:
        """(the shard's bytes, with as many rows on every rank), (what the whole is made with)."""
        rows, columns = outer_size
        most = -(-rows // mesh.size())
        share = Share((rows, columns), mesh.get_local_rank() * most, most, mesh.size())
        known = self.scaled.of_whole(self._plain, share, mesh.get_group())
        data, scale_inv = cast_rows(self._plain, known, self.scaled.form, share)
        return (data,), (scale_inv, share.shape)

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: tuple[Any, ...],
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """(the whole weight, what of its memory FSDP2 frees and gives again); with `out` that is written anew."""
        (data,) = all_gather_outputs
        scale_inv, shape = metadata
        if scale_inv.is_cuda:
            # Made in the stream that casts and gathers ahead, which must not have its memory back before products here
            # have read it.
            scale_inv.record_stream(torch.cuda.current_stream(scale_inv.device))
        known = None if out is None else out.quantized  # type: ignore[attr-defined]
        whole, own = whole_quantized(data, scale_inv, shape, self.scaled.form, known)
        if out is not None:
            out._held.quantized = whole  # type: ignore[attr-defined]
            return None
        return Float8Tensor(whole, self.scaled.form, param_dtype), own

    # A tensor of its values

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"GatheredWeight({self._plain})"

    def __deepcopy__(self, memo: dict[int, Any]) -> GatheredWeight:
        made = GatheredWeight(self._plain.clone(), alone(self.scaled.form), self.requires_grad)
        if isinstance(self, nn.Parameter):
            made._is_param = True
        memo[id(self)] = made
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A file holds the plain values."""
        return self._plain.__reduce_ex__(protocol)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["_plain"], self.scaled

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> GatheredWeight:
        return GatheredWeight(inner["_plain"], context)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given: dict[int, GatheredWeight] = {}

        def plain(tensor: GatheredWeight) -> Tensor:
            given[id(tensor._plain)] = tensor
            return tensor._plain

        plain_args, plain_kwargs = tree_map_only(GatheredWeight, plain, (args, kwargs or {}))
        result = func(*plain_args, **plain_kwargs)
        if func._schema.is_mutable:
            # Down here nobody counts, and whether amaxes are of the values as they are now is told by their version.
            torch.autograd.graph.increment_version([one._plain for one in _written(func, args, kwargs or {})])
        scaled = args[0].scaled if func in _KEPT and isinstance(args[0], GatheredWeight) else None

        def wrapped(tensor: Tensor) -> Tensor:
            # An operation in place returns the tensor that it was given.
            known = given.get(id(tensor))
            if known is not None:
                return known
            return tensor if scaled is None else GatheredWeight(tensor, scaled)

        return tree_map_only(Tensor, wrapped, result)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[GatheredWeight]:
    """What an operation wrote into."""
    found: list[Any] = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            found += value if isinstance(value, (list, tuple)) else [value]
    return [one for one in found if isinstance(one, GatheredWeight)]


#: Operations whose result is still of the weight: those that FSDP2 shards, pads and moves it with.
_KEPT = {
    _aten.detach.default, _aten.alias.default, _aten.clone.default, _aten.empty_like.default, _aten.new_zeros.default,
    _aten.slice.Tensor, _aten.split.Tensor, _aten.view.default, _aten.as_strided.default, _aten._to_copy.default,
    _aten._pin_memory.default,
}  # fmt: skip


def alone(form: CopyFormat) -> Scaled:
    """A weight that is reduced by itself."""
    scaled = Scaled(form, [])
    scaled.together.append(scaled)
    return scaled


def gather_in_fp8(model: nn.Module, recipe: Recipe | None = None) -> int:
    """Have FSDP2 gather the weights of a model's FP8 modules in FP8. Call it before `fully_shard`.

    Weights that live in FP8 (fp8_model_init) are gathered so without it, each reduced by itself; with it their shards
    start from the values before the cast where those were preserved.

    Args:
        model: any module; those of `fusestep.nn` that multiply in FP8 are taken, in it and below.
        recipe: how weights are cast; Float8CurrentScaling() if None. Under delayed scaling too, a weight that is
            gathered has the scale of its own values.
    Returns: how many weights will be gathered in FP8.
    Raises: UserError for MXFP8BlockScaling, whose transposes are cast from values that no rank has, and for a model
        that is sharded already; before anything is changed.
    """
    form = gathered_form(Float8CurrentScaling() if recipe is None else recipe)
    found = []
    for path, module in model.named_modules():
        for name in module.__dict__.get(WEIGHT_NAMES, ()):
            parameter = module._parameters.get(name)
            if parameter is None or isinstance(parameter, GatheredWeight):
                continue
            if not isinstance(parameter, Float8Tensor) and type(parameter) is not nn.Parameter:
                raise UserError(
                    f"gather_in_fp8: {path}.{name} is a {type(parameter).__name__}; call it before fully_shard and "
                    "before whatever else changes parameters."
                )
            found.append((module, name, parameter))
    together: list[Scaled] = []
    for module, name, parameter in found:
        scaled = Scaled(form, together)
        together.append(scaled)
        values = parameter.detach()
        if isinstance(parameter, Float8Tensor):
            initial = parameter.get_high_precision_init_val()
            values = parameter.dequantize() if initial is None else initial.to(parameter.device, copy=True)
        made = nn.Parameter(GatheredWeight(values, scaled), requires_grad=parameter.requires_grad)
        keep_marks(parameter, made)
        module._parameters[name] = made
    return len(found)


def gathered_form(recipe: Recipe) -> CopyFormat:
    """How weights are cast that are gathered in FP8. Raises: UserError for a recipe that cannot be."""
    form = CopyFormat.of(recipe)
    if form.kind == "microblocks":
        raise UserError(
            "gather_in_fp8: recipe is MXFP8BlockScaling, whose transposed weights are cast from values that no rank "
            "has; leave the weights to be gathered in high precision, or pass Float8CurrentScaling or "
            "Float8BlockScaling."
        )
    return replace(form, kind="current") if form.kind == "delayed" else form
