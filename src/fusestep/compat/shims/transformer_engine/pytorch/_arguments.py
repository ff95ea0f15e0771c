"""Arguments of Transformer Engine that mean nothing here, those that are refused, and its defaults that need a look.

`WITHOUT_EFFECT` and `REFUSED` are what the documentation's tables are made from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, cast

import torch
from torch import nn

from fusestep import dispatch
from fusestep.compat import report, settings
from fusestep.distributed.tensor_parallel import TensorParallel, mark_split
from fusestep.errors import UserError

PACKAGE = "transformer_engine.pytorch"

#: Arguments that are taken and change nothing, and why that is harmless.
WITHOUT_EFFECT = {
    "cp_group, cp_global_ranks, cp_stream, cp_comm_type": "taken for one rank",
    "ub_name": "names the buffers of an overlap that is refused",
    "ub_overlap_ag, ub_overlap_rs, … of TransformerLayer": "they refine ub_tp_comm_overlap, which is refused",
    "seq_length, micro_batch_size": "they warm up kernels; ours need no warming",
    "layer_number": "numbers a layer for the reader",
    "save_original_input": "chooses what is kept for backward; results are the same",
    "sm_margin": "leaves multiprocessors to other work; results are the same",
    "fast_zero_fill, num_splits": "choices of speed inside attention",
    "fused (apply_rotary_pos_emb)": "the rotation is always one kernel",
    "materialize_master_grads (FusedSGD)": "of Apex's old amp, which is gone",
    "is_cg_capturable (parallel_cross_entropy)": "the loss never waits for the device",
    "_graph (autocast)": "Transformer Engine's own mark",
    "interval (DelayedScaling, 1.x)": "without effect since 1.8",
    "fp8_weight_caching, cache_quantized_params, is_first_microbatch (of graphed callables)": (
        "a graph casts its weights at each replay"
    ),
}

_RANKS = "run with one rank, or use torch's DDP or FSDP2 around the model"
_WHOLE = "use torch's DDP or FSDP2 around the model, or tensor parallelism of the other modules"
_OVERLAP = "leave it False; products and communication do not overlap"
_HIGH = "leave it out; modules exchange tensors in high precision"
_SCORES = "pass core_attention_bias, or torch's flex_attention for a function of scores"

#: For each argument: the values that are served, what to do instead of another one, and whether it is planned.
REFUSED: dict[str, tuple[tuple[Any, ...], str, bool]] = {
    "fp8_output": ((False,), _HIGH, False),
    "fp8_grad": ((False,), _HIGH, False),
    "delay_wgrad_compute": ((False,), "leave it False; gradients of weights are computed in backward", False),
    "symmetric_ar_type": ((None,), "leave it out", False),
    **dict.fromkeys(
        (
            *("ub_overlap_ag", "ub_overlap_rs", "ub_overlap_rs_dgrad", "ub_bulk_dgrad", "ub_bulk_wgrad"),
            "ub_tp_comm_overlap",
        ),
        ((False,), _OVERLAP, False),
    ),
    "out": ((None,), "leave it out; the output is a new tensor", False),
    "dgrad_out": ((None,), "leave it out; the gradient is a new tensor", False),
    "single_grouped_weight": ((False,), "leave it False; each layer has its own weight", False),
    "single_grouped_bias": ((False,), "leave it False; each layer has its own bias", False),
    "use_grouped_tensor": ((None, False), "leave it out", False),
    "activation_params": ((None,), "use the activation with its usual constants", False),
    "softmax_type": (("vanilla",), "use the ordinary softmax", False),
    "return_max_logit": ((False,), "leave it False", False),
    "inference_params": (
        (None,),
        "compute the whole prefix at each step, which takes any length, or generate with fusestep.models",
        False,
    ),
    "pad_between_seqs": ((None, False), "pack sequences without padding between them", False),
    "cu_seqlens_q_padded": ((None,), "pack sequences without padding between them", False),
    "cu_seqlens_kv_padded": ((None,), "pack sequences without padding between them", False),
    "bf16_backward": ((False,), "leave it False; attention computes in the dtype of its inputs", False),
    **dict.fromkeys(
        ("score_mod", "score_mod_bprop", "score_mod_tensors", "score_mod_bprop_tensors"), ((None,), _SCORES, False)
    ),
    "distribute_saved_activations": ((False,), "leave it False, and use sequence_parallel, which keeps slices", False),
    "retain_graph_in_backward": ((False,), "run backward once for each forward of a graph", False),
    "capture_time_hooks": ((None,), "register hooks on a module that contains the graphed one", False),
    "_order": ((None,), "capture modules in the order in which they run", False),
    "_num_layers_per_chunk": ((None,), "capture modules in the order in which they run", False),
    "_reuse_graph_input_output_buffers": ((False,), "leave it False", False),
}


class _Default(str):
    """A default that can be told from the same value when it is passed."""

    __slots__ = ()

    def __repr__(self) -> str:
        return repr(str(self))


#: The layout of TransformerLayer, MultiheadAttention and DotProductAttention where the script names none.
SBHD = _Default("sbhd")

Layout = Literal["bshd", "sbhd", "thd"]


def refuse(who: str, **arguments: Any) -> None:
    """Refuse values that are not served.

    Args:
        who: the class or function, after the package's name.
        arguments: of REFUSED.
    Raises: NotImplementedError with the name, what to use instead, and whether it is planned.
    """
    for name, value in arguments.items():
        served, instead, planned = REFUSED[name]
        if not any(value is one or (isinstance(value, type(one)) and value == one) for one in served):
            shown = value if isinstance(value, (bool, int, str)) else "…"
            raise report.not_served(f"{PACKAGE}.{who}({name}={shown!r})".replace("'…'", "…"), instead, planned)


def ranks_of(
    who: str,
    tp_group: Any,
    tp_size: int,
    sequence_parallel: bool,
    *,
    layout: str = "sbhd",
    set_parallel_mode: bool | None = None,
) -> TensorParallel | None:
    """The ranks that share a module, None for one.

    Gradients of parameters that all ranks have are left to the script, as Transformer Engine leaves them: they are
    marked `sequence_parallel` (see `mark_shared`).

    Args:
        tp_group, tp_size: a group, or the size of one that `set_tensor_parallel_group` will give.
        layout: of activations; modules that are not told theirs have the sequence first.
        set_parallel_mode: of modules that are made of several layers.
    Raises: UserError for a group without set_parallel_mode where heads would be shared out and weights not.
    """
    dim = (1 if layout == "bshd" else 0) if sequence_parallel else None
    if tp_group is None and tp_size == 1:
        return None
    parallel = TensorParallel(who, tp_group, tp_size, dim, adds_gradients=False)
    if parallel.size == 1:
        return None
    if set_parallel_mode is False:
        raise UserError(
            f"{who}: it was given {parallel.size} ranks of tensor parallelism and no parallel modes for its layers; "
            "pass set_parallel_mode=True."
        )
    return parallel


def mark_shared(module: nn.Module) -> None:
    """Say on parameters which all ranks have, under sequence parallelism, that their gradients want to be summed."""
    for part in module.modules():
        parallel = getattr(part, "_parallel", None)
        if parallel is not None and parallel.sequence_dim is not None:
            bias = ["bias"] if getattr(part, "parallel_mode", None) == "row" else []
            mark(part, "layer_norm_weight", "layer_norm_bias", "fc2_bias", *bias)


def mark(module: nn.Module, *names: str, sequence_parallel: bool = True) -> None:
    """Set that attribute of those of these parameters that there are."""
    for name in names:
        parameter = module._parameters.get(name)
        if parameter is not None:
            parameter.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]


def check_ranks(who: str, group: Any, size: int = 1, argument: str = "tp") -> None:
    """Refuse more than one rank of tensor or context parallelism.

    Raises: NotImplementedError.
    """
    groups = group if isinstance(group, (list, tuple)) else [] if group is None else [group]
    sizes = [torch.distributed.get_world_size(one) for one in groups]
    if isinstance(size, int) and max([size, *sizes]) > 1:
        instead, planned = (_RANKS, True) if argument == "cp" else (_WHOLE, False)
        raise report.not_served(f"{PACKAGE}.{who}({argument}_group of {max([size, *sizes])} ranks)", instead, planned)


class Ranks:
    """What modules are told of tensor and context parallelism after they were made."""

    _parallel: TensorParallel | None = None

    #: Whether the module was made to be shared by as many ranks as there are.
    _has_modes = False

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Take the group of the ranks that share the module, of the size that it was made for.

        Raises: UserError for a group of another size, or one that this rank is not in.
        """
        if tp_group is None:
            return
        if self._parallel is not None:
            self._parallel.join(tp_group)
            for parameter in self.parameters():  # type: ignore[attr-defined]
                if hasattr(parameter, "partition_dim"):
                    mark_split(parameter, parameter.partition_dim, self._parallel)
        elif self._has_modes and (size := torch.distributed.get_world_size(tp_group)) > 1:
            raise UserError(
                f"{type(self).__name__}: it was made for one rank and the group has {size}; make it with "
                f"tp_size={size} or tp_group."
            )

    def set_context_parallel_group(
        self,
        cp_group: Any,
        cp_global_ranks: Any = None,  # noqa: ARG002
        cp_stream: Any = None,  # noqa: ARG002
        cp_comm_type: str = "p2p",  # noqa: ARG002
    ) -> None:
        """Take a group of one rank. Raises: NotImplementedError for more."""
        check_ranks(type(self).__name__, cp_group, argument="cp")


def placed(who: str, device: torch.device | str | int | None) -> torch.device | str | int | None:
    """The device for parameters: the CPU where the default "cuda" is not there, which is announced."""
    kind = torch.device("cuda", device).type if isinstance(device, int) else device and torch.device(device).type
    if kind != "cuda" or torch.cuda.is_available():
        return device
    reason = "modules of Transformer Engine are built on CUDA by default, and there is none, so this one is on the CPU"
    dispatch.announce(f"{PACKAGE}.{who}", reason)
    return "cpu"


def layout_of(chosen: str) -> Layout:
    """The layout that a layer works in: what the script says, else sbhd, or what `fusestep run` was asked for."""
    if chosen is SBHD:
        return settings.te_layout() or "sbhd"
    return cast("Layout", chosen)


_ADVICE = "Transformer Engine's layers take"


def advise_on_layout(argument: str, lengths: tuple[int, int]) -> None:
    """Say once, at the end of the run, that attention ran over the first dimension though that looks like the batch.

    Args:
        argument: the one that names the layout.
        lengths: of the first two dimensions, with a causal mask and a layout that nobody chose.
    """
    if lengths[0] >= lengths[1] or any(hint.startswith(_ADVICE) for hint in report.snapshot().hints):
        return
    report.hint(
        f"{_ADVICE} (sequence, batch, …) unless told otherwise, so attention ran over the first dimension, of "
        f'{lengths[0]}, and not over the second, of {lengths[1]}; if the first is your batch, pass {argument}="bshd", '
        "or run `fusestep run --te-layout bshd`."
    )


def one_of(who: str, new: str, value: Any, old: str, old_value: Any) -> Any:
    """An argument that has an old name too.

    Raises: UserError if both are given, or neither.
    """
    if (value is None) == (old_value is None):
        given = "both are given" if value is not None else "neither is given"
        raise UserError(f"{who}: {new} and {old} are two names of one argument and {given}; pass {new}.")
    return old_value if value is None else value


@contextmanager
def own_randomness(tracker: Callable[[], Any] | None, name: str | None = None) -> Iterator[None]:
    """Draw random numbers from the states of a tracker, CudaRNGStatesTracker for instance, where there is one."""
    if tracker is None:
        yield
        return
    with tracker().fork() if name is None else tracker().fork(name):
        yield


def accumulate_into_main_grad(module: nn.Module) -> None:
    """For fuse_wgrad_accumulation: gradients of the module's own weights go to their `main_grad`."""
    module.register_forward_pre_hook(_have_weights_accumulate)
    _have_weights_accumulate(module)


def _have_weights_accumulate(module: nn.Module, *_: Any) -> None:
    """Before each forward too, as the weights of a copy, a pickle or a module that left `meta` are new tensors."""
    for weight in module.parameters(recurse=False):
        hooks = weight._post_accumulate_grad_hooks or {}
        if weight.dim() == 2 and weight.requires_grad and _add_to_main_grad not in hooks.values():
            weight.register_post_accumulate_grad_hook(_add_to_main_grad)


@torch.no_grad()
def _add_to_main_grad(weight: torch.Tensor) -> None:
    main = getattr(weight, "main_grad", None)
    if not isinstance(main, torch.Tensor):
        raise UserError(
            "fuse_wgrad_accumulation: a weight has no main_grad to add its gradient to; give each weight a tensor "
            "weight.main_grad of its shape before backward, or leave the argument out."
        )
    if weight.grad is None:
        return
    main.add_(weight.grad)
    if hasattr(weight, "grad_added_to_main_grad"):
        # Megatron's, whose hooks ask whether there is a gradient and must not add it again.
        weight.grad_added_to_main_grad = True
        weight.grad.zero_()
    else:
        weight.grad = None
