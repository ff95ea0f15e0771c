"""Plans for torch.distributed.tensor.parallel.parallelize_module: fusestep's modules shared by the ranks of a mesh.

    mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("data", "tensor"))
    parallelize_module(model, mesh["tensor"], GPTParallel(sequence_parallel=True))
    for block in model.blocks:
        fully_shard(block, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])

Parameters become DTensors, with the names and the whole shapes that they had, so that checkpoints, optimizers and
fully_shard see them as they see torch's own; the operations work on this rank's parts, as with `tp_group`
(tensor_parallel.py). Initial values are those of the first rank; on the meta device nothing is sent.

`ColwiseParallel` and `RowwiseParallel` have torch's names and arguments, share fusestep's linear layers, and give what
is torch's to torch. The others share a module with all its layers.

A weight that holds several matrices (q, k and v; both halves of a gated activation) is cut where DTensor cuts it, into
equal parts of its rows, so a rank has to trade rows with others before it multiplies: all to all, of the weight's part,
in each forward and backward. So is such a module's attribute `weight`, which all ranks have to ask for together; ask
`named_parameters()` for the DTensor. Weights in several parameters, and rows that go group by group, need no trade.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel as TorchColwise
from torch.distributed.tensor.parallel import RowwiseParallel as TorchRowwise
from torch.distributed.tensor.parallel.style import ParallelStyle

from fusestep import nn as fused
from fusestep.distributed.collectives import Trade, traded
from fusestep.distributed.groups import is_dtensor
from fusestep.distributed.tensor_parallel import TensorParallel, tensor_parallel
from fusestep.errors import UserError
from fusestep.models import GPT
from fusestep.models.blocks import PlainBlock
from fusestep.nn.multihead_attention import sequence_dim_of
from fusestep.ops.activation import is_gated


class Cut(NamedTuple):
    """How ranks share a parameter.

    Attributes:
        dim: that is cut; None: all have it whole.
        blocks: sizes along dim 0 of matrices of which each rank needs its part.
    """

    dim: int | None = None
    blocks: tuple[int, ...] | None = None


WHOLE = Cut()


class ColwiseParallel(TorchColwise):
    """torch's style of this name, for fusestep.nn.Linear and LayerNormLinear too.

    Args: as of torch's. `input_layouts`: Replicate(), or Shard(d) for slices of the sequence along d, which are put
        together behind the norm.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, fused.Linear):
            return super()._apply(module, device_mesh)
        parallel = _of(module, device_mesh, self.input_layouts)
        if parallel is not None:
            share_linear(module, device_mesh, parallel, "column")
        return module


class RowwiseParallel(TorchRowwise):
    """torch's style of this name, for fusestep.nn.Linear too.

    Args: as of torch's. `output_layouts`: Replicate(), or Shard(d) for slices of the sequence along d.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, fused.Linear):
            return super()._apply(module, device_mesh)
        parallel = _of(module, device_mesh, self.output_layouts)
        if parallel is not None:
            share_linear(module, device_mesh, parallel, "row")
        return module


class _Sharing(ParallelStyle):
    """A style for a module of fusestep's with all its layers.

    Args:
        sequence_parallel: input and output are slices of the sequence.
    """

    def __init__(self, *, sequence_parallel: bool = False) -> None:
        super().__init__()
        self.sequence_parallel = sequence_parallel

    def _ranks(self, module: nn.Module, mesh: DeviceMesh, layout: str) -> TensorParallel | None:
        return tensor_parallel(type(module).__name__, mesh, self.sequence_parallel, sequence_dim_of(layout))

    def _expect(self, module: nn.Module, *kinds: type[nn.Module]) -> None:
        if not isinstance(module, kinds):
            raise UserError(
                f"{type(self).__name__}: it shares {' or '.join(kind.__name__ for kind in kinds)}, and was given a "
                f"{type(module).__name__}; choose the style for that."
            )


class SequenceParallel(_Sharing):
    """A norm of fusestep's or torch's that works on this rank's slice of a sequence; its gradients are added.

    Args:
        sequence_dim: of the slices, for the reader alone.
    """

    def __init__(self, *, sequence_dim: int = 1) -> None:
        super().__init__(sequence_parallel=True)
        self.sequence_dim = sequence_dim

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self._expect(module, nn.LayerNorm, nn.RMSNorm)
        parallel = tensor_parallel(type(module).__name__, device_mesh, sequence_parallel=True)
        if parallel is not None:
            share_parameters(module, device_mesh, {})
            module.__dict__["_adds_gradients_over"] = parallel
        return module


class MLPParallel(_Sharing):
    """fusestep.nn.LayerNormMLP: the first layer by its rows, the second by its columns.

    Args:
        sequence_dim: of the sequence in its input.
    """

    def __init__(self, *, sequence_parallel: bool = False, sequence_dim: int = 1) -> None:
        super().__init__(sequence_parallel=sequence_parallel)
        self.sequence_dim = sequence_dim

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self._expect(module, fused.LayerNormMLP)
        parallel = tensor_parallel(type(module).__name__, device_mesh, self.sequence_parallel, self.sequence_dim)
        if parallel is not None:
            share_mlp(module, device_mesh, parallel)
        return module


class AttentionParallel(_Sharing):
    """fusestep.nn.MultiheadAttention: each rank has some of the heads."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self._expect(module, fused.MultiheadAttention)
        parallel = self._ranks(module, device_mesh, str(module.qkv_format))
        if parallel is not None:
            share_attention(module, device_mesh, parallel)
        return module


class TransformerLayerParallel(_Sharing):
    """fusestep.nn.TransformerLayer."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self._expect(module, fused.TransformerLayer)
        parallel = self._ranks(module, device_mesh, str(module.attn_input_format))
        if parallel is not None:
            share_layer(module, device_mesh, parallel)
        return module


class GPTParallel(_Sharing):
    """fusestep.models.GPT in its plain or fused form: blocks, embedding and head, which the ranks share by symbols.

    Every rank gives the same tokens and targets and has the same logits or loss. With sequence parallelism the length
    of a sequence has to be a multiple of the ranks.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self._expect(module, GPT)
        parallel = self._ranks(module, device_mesh, "bshd")
        if parallel is not None:
            share_gpt(module, device_mesh, parallel)
        return module


# What styles do


def share_gpt(model: Any, mesh: DeviceMesh, parallel: TensorParallel) -> None:
    """Share a GPT in place. Raises: UserError for sizes that the ranks do not divide, before anything is changed."""
    config = model.config
    if config.form == "seed":
        raise UserError("GPT: the form 'seed' is torch's own attention and is not shared; choose plain or fused.")
    for what in ("vocab_size", "heads", "ffn_width"):
        parallel.share(what, getattr(config, what))
    for block in model.blocks:
        share = share_plain_block if isinstance(block, PlainBlock) else share_layer
        share(block, mesh, parallel)
    share_parameters(model.embedding, mesh, {"weight": Cut(0)})
    share_parameters(model.position, mesh, {})
    share_parameters(model.final_norm, mesh, {})
    if model.head is not None:
        share_parameters(model.head, mesh, {"weight": Cut(0)})
    model._parallel = parallel


def share_layer(layer: Any, mesh: DeviceMesh, parallel: TensorParallel) -> None:
    """Share a TransformerLayer in place."""
    share_attention(layer.self_attention, mesh, parallel)
    if layer.layer_type == "decoder":
        share_attention(layer.inter_attention, mesh, parallel)
    share_mlp(layer.layernorm_mlp, mesh, parallel)
    if layer.output_layernorm:
        share_parameters(layer.layernorm, mesh, {})
        layer.layernorm._parallel = None if parallel.sequence_dim is None else parallel
    layer._parallel = parallel


def share_attention(attention: Any, mesh: DeviceMesh, parallel: TensorParallel) -> None:
    """Share a MultiheadAttention in place."""
    heads = parallel.share("num_attention_heads", attention.num_attention_heads)
    groups = parallel.share("num_gqa_groups", attention.num_gqa_groups)
    for name in ("layernorm_qkv", "qkv", "layernorm_query", "query_layer", "key_value"):
        product = attention._modules.get(name)
        if product is not None:
            blocks = None
            if "" in product.parts and not attention.is_interleaved:
                rows_q, rows_k = (
                    attention.num_attention_heads * attention.kv_channels,
                    attention.num_gqa_groups * attention.kv_channels,
                )
                blocks = {"key_value": (rows_k, rows_k)}.get(name, (rows_q, rows_k, rows_k))
                blocks = None if name in ("layernorm_query", "query_layer") else blocks
            share_linear(product, mesh, parallel, "column", blocks)
    share_linear(attention.proj, mesh, parallel, "row")
    if attention.has_qk_norm:
        for norm in (attention.q_norm, attention.k_norm):
            share_parameters(norm, mesh, {})
            norm._parallel = parallel
    for module in (attention, attention.core_attention):
        module.num_attention_heads, module.num_gqa_groups = heads, groups
    attention._parallel = parallel


def share_mlp(mlp: Any, mesh: DeviceMesh, parallel: TensorParallel) -> None:
    """Share a LayerNormMLP in place."""
    part = parallel.share("ffn_hidden_size", mlp.ffn_hidden_size)
    first = Cut(0, (mlp.ffn_hidden_size,) * 2 if is_gated(mlp.activation) else None)
    cuts = {"fc1_weight": first, "fc1_bias": first, "fc2_weight": Cut(1)}
    share_parameters(mlp, mesh, cuts)
    mlp.ffn_hidden_size, mlp._parallel = part, parallel


def share_linear(
    linear: Any, mesh: DeviceMesh, parallel: TensorParallel, mode: str, blocks: Sequence[int] | None = None
) -> None:
    """Share a Linear or LayerNormLinear in place.

    Args:
        blocks: rows of several matrices in one weight, of each of which the ranks get their parts.
    """
    if mode == "row" and isinstance(linear, fused.LayerNormLinear):
        raise UserError(
            f"{type(linear).__name__}: RowwiseParallel would cut the features that its norm needs all of; use "
            "ColwiseParallel."
        )
    if linear._parallel is not None:
        raise UserError(f"{type(linear).__name__}: ranks share it already; build it without tp_group for a plan.")
    if mode == "row":
        in_features = parallel.share("in_features", linear.in_features)
        share_parameters(linear, mesh, {part + "weight": Cut(1) for part in linear.parts})
        linear.in_features = in_features
    else:
        cut = Cut(0, None if blocks is None else tuple(blocks))
        for rows in cut.blocks or ():
            parallel.share("rows of a matrix,", rows)
        parts = {part: parallel.share("out_features", rows) for part, rows in linear.parts.items()}
        share_parameters(linear, mesh, {part + what: cut for part in parts for what in ("weight", "bias")})
        linear.parts, linear.out_features = parts, sum(parts.values())
    linear.parallel_mode, linear._parallel = mode, parallel


def share_plain_block(block: Any, mesh: DeviceMesh, parallel: TensorParallel) -> None:
    """Share a block of the plain GPT in place."""
    attention, mlp = block.self_attention, block.layernorm_mlp
    heads, width = parallel.share("heads", attention.heads), attention.proj.in_features
    blocks = Cut(0, (width,) * 3)
    share_parameters(attention.layernorm_qkv, mesh, {"weight": blocks, "bias": blocks})
    share_parameters(attention.proj, mesh, {"weight": Cut(1)})
    share_parameters(mlp, mesh, {"fc1_weight": Cut(0), "fc1_bias": Cut(0), "fc2_weight": Cut(1)})
    attention.heads, attention.proj.in_features = heads, width // parallel.size
    for module in (attention, attention.layernorm_qkv, mlp):
        module._parallel = parallel


def _of(module: nn.Module, mesh: DeviceMesh, layouts: Any) -> TensorParallel | None:
    """The ranks, of torch's words for where a sequence is cut."""
    layout = layouts[0] if isinstance(layouts, (tuple, list)) else layouts
    if not isinstance(layout, (Replicate, Shard)):
        raise UserError(
            f"{type(module).__name__}: its layout is {layout}; pass Replicate(), or Shard(d) for slices of the "
            "sequence along dimension d."
        )
    cut = layout.dim if isinstance(layout, Shard) else None
    return tensor_parallel(type(module).__name__, mesh, cut is not None, cut or 0)


# Parameters


def share_parameters(module: nn.Module, mesh: DeviceMesh, cuts: Mapping[str, Cut]) -> None:
    """Make a module's own parameters DTensors, of which it sees this rank's parts; without a cut all ranks have all."""
    for name, parameter in list(module._parameters.items()):
        if parameter is None:
            continue
        if is_dtensor(parameter) or type(parameter) is not nn.Parameter:
            raise UserError(
                f"{type(module).__name__}: its {name} is a {type(parameter.data).__name__}; share modules before they "
                "are sharded, and with weights in high precision."
            )
        dim = cuts.get(name, WHOLE).dim
        placement: Placement = Replicate() if dim is None else Shard(dim)
        shared = distribute_tensor(parameter.detach(), mesh, [placement])
        module.register_parameter(name, nn.Parameter(shared, requires_grad=parameter.requires_grad))
    size = mesh.size()
    trades = {
        name: Trade.of_blocks(cut.blocks, mesh.get_local_rank(), size)
        for name, cut in cuts.items()
        if cut.blocks is not None and module._parameters.get(name) is not None
    }
    module.__dict__["_trades"] = trades
    # Anew for each class, as torch's fully_shard does it, under the name that it had.
    kind = type(module)
    namespace = {name: _part_property(name) for name in module._parameters}
    module.__class__ = type(kind.__name__, (LocalParts, kind), {**namespace, "__module__": kind.__module__})


class LocalParts:
    """A module whose parameters are DTensors and whose attributes are this rank's parts of them, for autograd."""

    _trades: dict[str, Trade]
    _adds_gradients_over: TensorParallel | None = None

    def _parameter(self, name: str) -> Any:
        """What FP8 modules ask for."""
        return getattr(self, name)

    def _first_weight(self) -> Any:
        """A weight that tells device and dtype, whole: its part may have to be traded for."""
        parameters: dict[str, Any] = self._parameters  # type: ignore[attr-defined]
        return next(one for one in parameters.values() if one is not None and one.dim() == 2)

    def _mark_parts(self) -> None:
        """DTensors tell it themselves."""

    def reset_parameters(self) -> None:
        """Raises: UserError."""
        raise UserError(
            f"{type(self).__name__}: ranks share its parameters, whose initial values are drawn before; build the "
            "module with values, or fill them as DTensors."
        )


def _part_property(name: str) -> property:
    def part(self: Any) -> Any:
        parameter = self._parameters[name]
        # Between forwards fully_shard has it sharded over a second dimension, and asks for the parameter itself.
        if not is_dtensor(parameter) or parameter.device_mesh.ndim > 1:
            return parameter
        local: Tensor = parameter.to_local()
        trade = self._trades.get(name)
        if trade is not None:
            return traded(local, trade, parameter.device_mesh.get_group())
        adds = self._adds_gradients_over
        return local if adds is None else adds.partial(local)[0]

    return property(part)


def plan(model: nn.Module, *, sequence_parallel: bool = False) -> ParallelStyle:
    """The style for a model or a layer of fusestep's.

    Raises: UserError for a module that has none.
    """
    for kind, style in _STYLES.items():
        if isinstance(model, kind):
            return style(sequence_parallel=sequence_parallel)
    raise UserError(
        f"plan: there is no ready plan for a {type(model).__name__}; there are some for "
        f"{', '.join(kind.__name__ for kind in _STYLES)}."
    )


_STYLES: dict[type[nn.Module], type[_Sharing]] = {
    GPT: GPTParallel,
    fused.TransformerLayer: TransformerLayerParallel,
    fused.MultiheadAttention: AttentionParallel,
    fused.LayerNormMLP: MLPParallel,
}
