"""What is planned: a shape, how it is trained, and on which GPUs."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_type_hints

from fusestep.distributed.mesh import Parallel
from fusestep.errors import UserError
from fusestep.fp8.recipes import RecipeName
from fusestep.models.config import Form
from fusestep.plan.shape import LARGEST, Shape

Precision = Literal["fp32", "bf16", "fp16", "fp8"]
Weights = Literal["fp32", "bf16", "fp16"]


@dataclass(frozen=True)
class Work:
    """A step, as `fusestep train` takes it, and where.

    Attributes:
        batch: sequences in one forward and backward pass, over all ranks.
        accumulate: passes whose gradients make one step.
        precision, recipe, weights, form, activation_checkpointing, parallel: as of `fusestep train`.
        gpus, gpus_per_node: of the run.
        shard_over: ranks that share every weight under fsdp, whose groups hold the same (HSDP); None for all. The
            trainer shards over all.
        context_parallel: ranks that share each sequence in attention. The trainer has no such option yet.
        graph: the whole step in one CUDA graph; else launched one kernel at a time, as `fusestep train` does.
        optimizer: "fused", or torch's own: "torch" (one pass for each operation) or "torch-fused".
        remainders: fp32 masters of bf16 weights are kept as what these leave of them (FusedAdam's
            store_param_remainders). The trainer keeps them whole.
        loss: "fused" (no rank holds all logits) or "torch".
        keeps_gradients: gradients live on through the forward pass, as in loops that free them after it.

    Raises: UserError for what does not fit together.
    """

    shape: Shape
    batch: int = 16
    accumulate: int = 1
    precision: Precision = "fp32"
    recipe: RecipeName = "delayed"
    weights: Weights = "fp32"
    form: Form = "fused"
    activation_checkpointing: bool = False
    parallel: str = "none"
    gpus: int = 1
    gpus_per_node: int = 8
    shard_over: int | None = None
    context_parallel: int = 1
    graph: bool = False
    optimizer: Literal["fused", "torch", "torch-fused"] = "fused"
    remainders: bool = False
    loss: Literal["fused", "torch"] = "fused"
    keeps_gradients: bool = False
    layout: Layout = field(init=False)

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for name in ("precision", "recipe", "weights", "form"):
            if getattr(self, name) not in get_args(hints[name]):
                raise UserError(
                    f"--{name} is {getattr(self, name)!r}; choose one of {', '.join(get_args(hints[name]))}."
                )
        for name in ("batch", "accumulate", "gpus", "gpus_per_node", "context_parallel", "shard_over"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise UserError(f"--{name.replace('_', '-')} is {value!r}; pass a whole number of at least 1.")
            if value is not None and value > LARGEST:
                raise UserError(f"--{name.replace('_', '-')} is {value}; pass at most {LARGEST}.")
        if self.precision == "fp8" and self.form != "fused":
            raise UserError(
                f"--precision is fp8 and --form is {self.form}; pass --form fused, whose blocks multiply so."
            )
        if self.weights != "fp32" and self.weights != (self.compute if self.precision != "fp32" else "fp32"):
            raise UserError(
                f"--weights is {self.weights} and --precision is {self.precision}; weights are fp32, or of the "
                "precision that is computed in (bf16 for fp8)."
            )
        if self.remainders and self.weights != "bf16":
            raise UserError(f"remainders are of masters of bf16 weights, and --weights is {self.weights}.")
        object.__setattr__(self, "layout", Layout.of(self))

    @property
    def compute(self) -> str:
        """The dtype between products."""
        return "bf16" if self.precision == "fp8" else self.precision

    @property
    def element(self) -> int:
        """Bytes of a number between products."""
        return 4 if self.precision == "fp32" else 2

    @property
    def weight(self) -> int:
        """Bytes of a weight as it is stored, and of its gradient."""
        return 4 if self.weights == "fp32" else 2

    @property
    def residual(self) -> int:
        """Bytes of a number of the residual stream, which has the dtype of the embedding."""
        return self.weight

    @property
    def micro_tokens(self) -> float:
        """Tokens of one GPU in one pass."""
        return self.batch * self.shape.context / self.layout.sequences_apart / self.context_parallel

    @property
    def tokens(self) -> int:
        """Tokens of a step, over all GPUs."""
        return self.batch * self.accumulate * self.shape.context

    @property
    def travels_as_fp8(self) -> bool:
        """Whether sharded weights of blocks are gathered in FP8: not those that ranks share, nor under mxfp8."""
        return self.precision == "fp8" and self.layout.tensor == 1 and self.recipe != "mxfp8"

    def as_dict(self) -> dict[str, Any]:
        """Plain values of the settings."""
        return {
            one.name: getattr(self, one.name)
            for one in dataclasses.fields(self)
            if one.name not in ("shape", "layout", "keeps_gradients")
        }


@dataclass(frozen=True)
class Group:
    """Ranks that send to each other.

    Attributes: size: how many; in_node: how many of them share a machine.
    """

    size: int
    in_node: int

    @property
    def is_within_node(self) -> bool:
        return self.size <= self.in_node


@dataclass(frozen=True)
class Layout:
    """Which ranks do what. Tensor groups are neighbours; then come those of a sequence, then those of the data.

    Attributes:
        tensor, by_sequence: ranks that share each product; whether also the norms between.
        sequences_apart: groups that train on different sequences.
        shards: ranks that share each weight, gradient and moment; 1: none do.
        replicas: groups of `shards` ranks that hold the same.
    """

    tensor: int
    by_sequence: bool
    sequences_apart: int
    shards: int
    replicas: int
    context: int
    node: int

    @classmethod
    def of(cls, work: Work) -> Layout:
        """Raises: UserError where the numbers do not fit."""
        parallel = Parallel.of(work.parallel)
        ranks = work.gpus
        if parallel.is_alone and ranks > 1:
            raise UserError(f"--gpus is {ranks} and --parallel none is for one; pass --parallel ddp, fsdp or the like.")
        together = work.context_parallel * parallel.tensor
        if ranks % together:
            by_context = "" if work.context_parallel == 1 else f" and --context-parallel {work.context_parallel}"
            below = ranks - ranks % together
            raise UserError(
                f"--gpus is {ranks}, no multiple of the {together} ranks that --parallel {work.parallel}{by_context} "
                f"{'put' if by_context else 'puts'} together; pass --gpus {f'{below} or ' if below else ''}"
                f"{below + together}, or divisors of {ranks}."
            )
        # The ranks of one sequence count as data ranks to those who shard or average.
        holders = parallel.data_ranks(ranks)
        apart = holders // work.context_parallel
        if parallel.data is None and work.context_parallel > 1:
            raise UserError("--context-parallel shares sequences among data ranks; add fsdp or ddp to --parallel.")
        if work.batch % apart:
            below = work.batch - work.batch % apart
            raise UserError(
                f"--batch is {work.batch} sequences over all ranks, which {apart} groups of ranks cannot share evenly; "
                f"pass {f'{below} or ' if below else ''}{below + apart}."
            )
        if work.shape.context % work.context_parallel:
            raise UserError(f"--context-parallel {work.context_parallel} does not divide context {work.shape.context}.")
        sizes = {"heads": work.shape.heads, "kv_heads": work.shape.groups, "ffn_width": work.shape.ffn_width}
        for name, size in {**sizes, "vocab_size": work.shape.vocab_size}.items():
            if size % parallel.tensor:
                raise UserError(
                    f"--parallel {work.parallel} has {parallel.tensor} ranks share each layer, which do not divide the "
                    f"model's {name} {size}; choose a divisor."
                )
        if work.shard_over is not None and parallel.data != "fsdp":
            raise UserError(f"--shard-over is for --parallel fsdp, which shards; --parallel is {work.parallel}.")
        shards = 1 if parallel.data != "fsdp" else work.shard_over or holders
        if holders % shards:
            raise UserError(
                f"--shard-over is {shards}, which does not divide the {holders} ranks that hold each weight."
            )
        return cls(
            parallel.tensor,
            parallel.by_sequence,
            apart,
            shards,
            holders // shards,
            work.context_parallel,
            work.gpus_per_node,
        )

    def group(self, name: Literal["tensor", "context", "shard", "replica"]) -> Group:
        """The ranks of a kind of group."""
        size, stride = {
            "tensor": (self.tensor, 1),
            "context": (self.context, self.tensor),
            "shard": (self.shards, self.tensor),
            "replica": (self.replicas, self.tensor * self.shards),
        }[name]
        return Group(size, max(1, min(size, self.node // stride)))
