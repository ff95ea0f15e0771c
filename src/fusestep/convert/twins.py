"""Running a module for a trial without leaving a trace: twins, and what a run of one gives.

A twin shares the weights' memory with a module, but neither its gradients nor its hooks. Runs happen in a fork of
torch's random generators.
"""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from fusestep import dispatch

_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)

#: What a forward may write to in place: a twin has its own.
_CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict)

#: Outputs and gradients of a run, by what they are in words.
Results = dict[str, Tensor | None]


def twin(module: nn.Module, change: Callable[[Tensor], Tensor] | None = None) -> nn.Module:
    """A module that shares the weights' memory, without hooks; `change` is applied to each tensor that it holds."""
    modules: dict[int, nn.Module] = {}
    parameters: dict[int, nn.Parameter] = {}

    def changed(tensor: Tensor) -> Tensor:
        return tensor if change is None else change(tensor)

    def parameter(old: nn.Parameter) -> nn.Parameter:
        if type(old) is not nn.Parameter and not old.is_floating_point():
            return old  # quantised: what its class knows of it would be lost, and a run leaves it as it is
        if id(old) not in parameters:
            parameters[id(old)] = nn.Parameter(changed(old.detach()), requires_grad=old.requires_grad)
        return parameters[id(old)]

    def copied(old: nn.Module) -> nn.Module:
        if id(old) in modules:
            return modules[id(old)]
        if type(old).__name__ == "OptimizedModule" and "_orig_mod" in old._modules:
            return copied(old._orig_mod)  # type: ignore[arg-type]  # what torch.compile made runs the module's own code
        new: nn.Module = object.__new__(type(old))
        modules[id(old)] = new
        new.__dict__.update(old.__dict__)
        new.__dict__.pop("_compiled_call_impl", None)  # of module.compile(), and bound to the module
        for name in _HOOKS:
            new.__dict__[name] = OrderedDict()
        new.__dict__["_parameters"] = {k: None if p is None else parameter(p) for k, p in old._parameters.items()}
        new.__dict__["_buffers"] = {k: None if b is None else changed(b.clone()) for k, b in old._buffers.items()}
        new.__dict__["_modules"] = {k: None if m is None else copied(m) for k, m in old._modules.items()}
        for name, value in old.__dict__.items():
            if isinstance(value, nn.Module) and id(value) in modules:  # held beside the children, and one of them
                new.__dict__[name] = modules[id(value)]
            elif type(value) in _CONTAINERS and new.__dict__.get(name) is value:
                new.__dict__[name] = copy.copy(value)
        return new

    return copied(module)


def run(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    region: Callable[[], AbstractContextManager[Any]],
    dtype: torch.dtype | None,
    used: Sequence[nn.Module] = (),
    outcome: Callable[[Any], Any] | None = None,
) -> Results:
    """Outputs, and the gradients of the inputs and of the module's own parameters.

    Those of its children are the children's own affair: their outputs' gradients pass on to the inputs.

    Args:
        args: floating tensors among them get gradients.
        kwargs: floating tensors among them get gradients if they require them.
        region: makes the context of the forward.
        dtype: what floating inputs are cast to; None: they stay.
        used: children whose parameters count as the module's own.
        outcome: makes of forward's output what is looked at.
    """
    leaves: dict[str, Tensor] = {}
    seen: dict[int, Any] = {}

    def ready(name: str, value: Any, is_leaf: bool) -> Any:
        if isinstance(value, tuple):
            return tuple(ready(f"{name}[{i}]", one, is_leaf) for i, one in enumerate(value))
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        if id(value) not in seen:  # a tensor that is passed twice, as query and as key, stays one
            copy = value.detach().to(value.dtype if dtype is None else dtype)
            if is_leaf or value.requires_grad:
                leaves[f"the gradient of {name}"] = copy.requires_grad_()
            seen[id(value)] = copy
        return seen[id(value)]

    given = tuple(ready(f"input {i}", value, is_leaf=True) for i, value in enumerate(args))
    named = {name: ready(name, value, is_leaf=False) for name, value in kwargs.items()}
    leaves |= {
        f"the gradient of {name}": p for name, p in module._parameters.items() if p is not None and p.requires_grad
    }
    for number, child in enumerate(used):
        leaves |= {
            f"the gradient of {name} of child {number}": p for name, p in child.named_parameters() if p.requires_grad
        }
    with torch.enable_grad():
        with region():
            # Not __call__: neither global hooks nor checkpointing belong to a trial.
            output = module.forward(*given, **named)
            if outcome is not None:
                output = outcome(output)
        results: Results = dict(_named("output", output))
        ys = [y for y in results.values() if y is not None and y.requires_grad]
        if not ys or not leaves:
            return {name: y if y is None else y.detach() for name, y in results.items()}
        generator = torch.Generator().manual_seed(3)
        dys = [_dy_of(y, generator) for y in ys]
        gradients = torch.autograd.grad(ys, list(leaves.values()), dys, allow_unused=True)
    found = {name: y if y is None else y.detach() for name, y in results.items()}
    return found | dict(zip(leaves, gradients, strict=True))


def _dy_of(y: Tensor, generator: torch.Generator) -> Tensor:
    """What flows in from above: random numbers; into a loss what training puts there, a power of two."""
    if y.dim() == 0:
        return torch.full_like(y, 0.5)
    return torch.randn(y.shape, generator=generator, dtype=torch.float64, device="cpu").to(y.device, y.dtype)


def _named(name: str, value: Any) -> Iterator[tuple[str, Tensor | None]]:
    """The tensors of an output by where in it they are: a tensor and a tuple of one are not the same."""
    if isinstance(value, (tuple, list, dict)):
        kind = "" if type(value) is tuple else f" ({type(value).__name__})"
        for key, one in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _named(f"{name}{kind}[{key!r}]", one)
    elif value is None or isinstance(value, Tensor):
        yield name, value
    else:
        yield f"{name} ({type(value).__name__})", None


def materialised(tensor: Tensor) -> Tensor:
    """Random numbers for a tensor on the meta device."""
    if tensor.device.type != "meta":
        return tensor
    if not tensor.is_floating_point():
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")
    spread = tensor.shape[-1] ** -0.5 if tensor.dim() > 1 else 1.0
    return (torch.randn(tensor.shape, device="cpu") * spread).to(tensor.dtype)


#: Attributes that number layers, by which those that are alike differ all the same.
_NUMBERS = frozenset(("layer_idx", "layer_id", "layer_index", "layer_number", "block_idx"))


def signature(module: nn.Module) -> tuple[Any, ...]:
    """All that the result of a trial depends on where the weights' values are not known."""
    plain = (bool, int, float, str, torch.dtype, type(None))
    return tuple(
        (
            name,
            type(one),
            tuple((k, None if p is None else (p.shape, p.dtype, p.requires_grad)) for k, p in one._parameters.items()),
            tuple((k, v) for k, v in one.__dict__.items() if isinstance(v, plain) and k not in _NUMBERS),
        )
        for name, one in module.named_modules(remove_duplicate=False)
    )


def seed(device: torch.device) -> None:
    """Seed the generators of the CPU and of this device, and of no other."""
    torch.default_generator.manual_seed(7)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(7)


@contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Nothing of a trial is seen outside: random generators, announcements of fallbacks, warnings.

    And nothing of what is outside is seen in it: inference mode, autocast, a default device without data.
    """
    devices: Sequence[torch.device] = [device] if device.type == "cuda" else []
    with (
        torch.random.fork_rng(devices),
        dispatch.examination(),
        torch.inference_mode(False),
        torch.autocast(device.type, enabled=False),
        torch.device(device) if torch.get_default_device().type == "meta" else nullcontext(),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield
