"""CUDA graphs of modules, by torch.cuda.make_graphed_callables, with FP8's scaling state looked after."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from fusestep import dispatch, refresh
from fusestep.compat.report import served
from fusestep.errors import UserError
from fusestep.fp8.replay import kept_state, note_replay
from fusestep.fp8.state import Slots
from fusestep.fp8.statistics import states_of
from fusestep.graph import recovered_capture
from transformer_engine.common.recipe import Recipe
from transformer_engine.pytorch._arguments import PACKAGE, one_of, refuse
from transformer_engine.pytorch.quantization import autocast

__all__ = ["make_graphed_callables"]


def make_graphed_callables(
    modules: Any,
    sample_args: Any,
    num_warmup_iters: int = 3,
    allow_unused_input: bool = False,
    sample_kwargs: Any = None,
    fp8_enabled: bool | tuple[bool, ...] | None = None,
    fp8_calibrating: bool | None = None,
    fp8_recipe: Recipe | None = None,
    fp8_group: Any = None,
    fp8_weight_caching: bool | None = None,
    enabled: bool | tuple[bool, ...] | None = None,
    calibrating: bool | None = None,
    recipe: Recipe | None = None,
    amax_reduction_group: Any = None,
    cache_quantized_params: bool | None = None,
    _order: Any = None,
    _num_layers_per_chunk: Any = None,
    pool: Any = None,
    retain_graph_in_backward: bool = False,
    _reuse_graph_input_output_buffers: bool = False,
    clone_param_grads_on_return: bool = True,
    pre_warmup_hook: Callable[[], Any] | None = None,
    post_warmup_hook: Callable[[], Any] | None = None,
    capture_time_hooks: Any = None,
) -> Any:
    """Modules whose forward and backward replay CUDA graphs, in the order in which they were captured.

    Each module's forward is replaced, and the module returned. Without a GPU modules are returned as they are, which is
    announced. A call replays the graph if it is of the training mode of the capture and gradients are enabled; else it
    computes as before. In FP8 replay within autocast: amaxes enter histories as regions begin, and scales stand still
    without. A graph casts the weights at each replay. Scaling state is after the capture what it was before.

    Args:
        modules, sample_args, sample_kwargs: a module with a tuple of arguments and a dict, or tuples of such. Tensors
            may have other values at a call; what is not a tensor is as in the sample, or the call computes as before.
        enabled, calibrating, recipe, amax_reduction_group: of autocast; enabled also for each module. The fp8_… are
            their old names.
        clone_param_grads_on_return: gradients of parameters are not the graph's own memory, so that they may be kept
            over a replay, for accumulation.
        pre_warmup_hook, post_warmup_hook: called before the warm-up and after the capture.
    """
    del fp8_weight_caching, cache_quantized_params
    refuse(
        "make_graphed_callables",
        _order=_order,
        _num_layers_per_chunk=_num_layers_per_chunk,
        retain_graph_in_backward=retain_graph_in_backward,
        _reuse_graph_input_output_buffers=_reuse_graph_input_output_buffers,
        capture_time_hooks=capture_time_hooks,
    )
    is_one = not isinstance(modules, (tuple, list))
    callables = [modules] if is_one else list(modules)
    samples = [sample_args] if is_one else list(sample_args)
    named = [sample_kwargs or {}] if is_one else list(sample_kwargs or [{}] * len(callables))
    if not len(callables) == len(samples) == len(named) or not all(isinstance(one, nn.Module) for one in callables):
        raise UserError(
            "make_graphed_callables: modules, sample_args and sample_kwargs do not go together; pass one module with "
            "one tuple of arguments, or tuples of as many modules and tuples."
        )
    wanted = _chosen("enabled", enabled, "fp8_enabled", fp8_enabled)
    in_fp8 = list(wanted) if isinstance(wanted, (tuple, list)) else [bool(wanted)] * len(callables)
    served(f"{PACKAGE}.make_graphed_callables", "torch.cuda.make_graphed_callables")
    if not all(_on_cuda(module, args) for module, args in zip(callables, samples, strict=True)):
        dispatch.announce(
            f"{PACKAGE}.make_graphed_callables", "there are no graphs on a CPU, so modules run as they are"
        )
        return modules

    region = autocast(
        any(in_fp8),
        bool(_chosen("calibrating", calibrating, "fp8_calibrating", fp8_calibrating)),
        _chosen("recipe", recipe, "fp8_recipe", fp8_recipe),
        _chosen("amax_reduction_group", amax_reduction_group, "fp8_group", fp8_group),
        _graph=True,
    )
    graphed = [_Graphed(*parts) for parts in zip(callables, samples, named, in_fp8, strict=True)]
    with ExitStack() as stack:
        for module in callables:
            refresh(module)  # copies that an optimizer wrote would be read by each replay, whoever steps later
            stack.enter_context(kept_state(module))
        if pre_warmup_hook is not None:
            pre_warmup_hook()
        stack.enter_context(region)
        stack.enter_context(recovered_capture(next(callables[0].parameters()).device))
        # Of torch's own making in each such capture: its warm-up ran on another stream.
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "The AccumulateGrad node's stream")
        torch.cuda.make_graphed_callables(
            tuple(graphed),
            tuple(one.sample for one in graphed),
            num_warmup_iters=num_warmup_iters,
            allow_unused_input=allow_unused_input,
            pool=pool,
        )
    if post_warmup_hook is not None:
        post_warmup_hook()
    for one, module in zip(graphed, callables, strict=True):
        if clone_param_grads_on_return:
            for parameter in module.parameters():
                if parameter.requires_grad:
                    parameter.register_hook(torch.clone)
        one.states = [state for _, state in states_of(module)]
        module.forward = one.replay
    return modules


def _chosen(name: str, value: Any, old: str, old_value: Any) -> Any:
    if value is None and old_value is None:
        return None
    return one_of("make_graphed_callables", name, value, old, old_value)


def _on_cuda(module: nn.Module, args: Sequence[Any]) -> bool:
    tensors = [*module.parameters(), *(one for one in args if isinstance(one, Tensor))]
    return any(tensor.is_cuda for tensor in tensors)


class _Graphed(nn.Module):
    """A module's forward as a function of tensors alone, which is what torch captures.

    Args: those of the sample, and whether the forward is in FP8.
    """

    def __init__(self, module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], in_fp8: bool) -> None:
        super().__init__()
        self.module, self.in_fp8 = module, in_fp8
        self.original = module.forward
        # Flags of a micro-batch do not matter: a graph casts its weights at each replay.
        kwargs = {name: value for name, value in kwargs.items() if name != "is_first_microbatch"}
        self.args, self.kwargs = tuple(args), dict(sorted(kwargs.items()))
        self.sample, _ = _tensors_and_rest(self.args, self.kwargs)
        self.training = module.training
        self.states: list[Slots] = []

    def forward(self, *tensors: Tensor) -> Any:
        """The module's own forward; torch replaces this by the replay."""
        given = iter(tensors)
        args = [next(given) if isinstance(one, Tensor) else one for one in self.args]
        kwargs = {name: next(given) if isinstance(one, Tensor) else one for name, one in self.kwargs.items()}
        if self.in_fp8:
            return self.original(*args, **kwargs)
        with autocast(enabled=False):
            return self.original(*args, **kwargs)

    def replay(self, *args: Any, **kwargs: Any) -> Any:
        """What the module's forward becomes."""
        calls = {name: value for name, value in kwargs.items() if name != "is_first_microbatch"}
        tensors, rest = _tensors_and_rest(args, calls)
        is_as_captured = self.module.training == self.training and torch.is_grad_enabled()
        if not is_as_captured or rest != _tensors_and_rest(self.args, self.kwargs)[1]:
            return self.original(*args, **kwargs)
        note_replay(self.states)
        return self(*tensors)


def _tensors_and_rest(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[tuple[Tensor, ...], list[Any]]:
    """The tensors among arguments, in the order of the names, and the others with the tensors' places."""
    everything = [*enumerate(args), *sorted(kwargs.items())]
    tensors = tuple(value for _, value in everything if isinstance(value, Tensor))
    return tensors, [(key, None if isinstance(value, Tensor) else value) for key, value in everything]
