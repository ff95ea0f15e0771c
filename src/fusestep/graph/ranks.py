"""What a step needs where several ranks train a model together: when gradients are reduced, what a graph can hold.

- DistributedDataParallel looks at its first steps itself (it orders its buckets anew and samples its timings), so it
  takes more steps before a capture. It has to be made on another stream than the default one. Source: PyTorch
  documentation, "CUDA semantics", usage of graphs with DDP.
- NCCL's collectives are kernels, which a graph holds. Those of other backends are work of the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fusestep.distributed.groups import any_dtensor

#: Steps of DistributedDataParallel that run one launch at a time before a capture.
WARM_UP = 11


def warm_up(model: nn.Module, usual: int) -> int:
    """How many steps come before the first capture of a model, `usual` for one without ranks."""
    return max(usual, WARM_UP) if any(isinstance(one, DistributedDataParallel) for one in model.modules()) else usual


def obstacle(model: nn.Module) -> str | None:
    """Why no graph can hold what the ranks of a model do together, or None."""
    groups: list[Any] = [one.process_group for one in model.modules() if isinstance(one, DistributedDataParallel)]
    if not groups and any_dtensor(model.parameters()):
        groups = [None]
    for group in groups:
        backend = torch.distributed.get_backend(group)
        if "nccl" not in backend:
            return (
                f"the ranks reduce gradients over {backend}, whose collectives are work of the host; make the process "
                "group with NCCL"
            )
    return None


@contextmanager
def micro_batch(model: nn.Module, *, is_last: bool) -> Iterator[None]:
    """Around a forward and backward pass: ranks reduce gradients in the last one alone."""
    with ExitStack() as quiet:
        for module in model.modules():
            if isinstance(module, DistributedDataParallel):
                if not is_last:
                    quiet.enter_context(module.no_sync())
            elif hasattr(module, "set_requires_gradient_sync"):  # FSDP2's, which reaches the modules below
                sharded: Any = module
                sharded.set_requires_gradient_sync(is_last, recurse=False)
        yield
