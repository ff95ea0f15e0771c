"""apex.parallel.distributed over torch's DistributedDataParallel and all-reduce."""

# Annotations are objects here, not strings: DistributedDataParallel looks at those of a hook.

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch._C._distributed_c10d import GradBucket

from fusestep.compat.report import not_served, served

__all__ = ["DistributedDataParallel", "Reducer", "flat_dist_call"]


class DistributedDataParallel(nn.parallel.DistributedDataParallel):
    """torch's own, with Apex's arguments; the module is already on its device.

    Args:
        module: what to train; its parameters are broadcast from rank 0.
        message_size: the elements of a bucket.
        delay_allreduce: allow parameters that get no gradient.
        allreduce_always_fp32: reduce 16-bit gradients in fp32.
        gradient_predivide_factor: divide by this before the sum.
        gradient_average: divide by the rest of the number of ranks after it; False leaves sums.
        retain_allreduce_buffers, num_allreduce_streams, prof: without effect on the result; torch has its own ways.
        shared_param, allreduce_trigger_params, allreduce_communicators, gradient_average_split_factor: not served.
    """

    def __init__(
        self,
        module: nn.Module,
        message_size: int = 10000000,
        delay_allreduce: bool = False,
        shared_param: Any = None,
        allreduce_trigger_params: Any = None,
        retain_allreduce_buffers: bool = False,  # noqa: ARG002
        allreduce_always_fp32: bool = False,
        num_allreduce_streams: int = 1,  # noqa: ARG002
        allreduce_communicators: Any = None,
        gradient_average: bool = True,
        gradient_predivide_factor: float = 1.0,
        gradient_average_split_factor: Any = None,
        prof: bool = False,  # noqa: ARG002
    ) -> None:
        for name, value in (
            ("shared_param", shared_param),
            ("allreduce_trigger_params", allreduce_trigger_params),
            ("allreduce_communicators", allreduce_communicators),
            ("gradient_average_split_factor", gradient_average_split_factor),
        ):
            if value is not None:
                raise not_served(
                    f"apex.parallel.DistributedDataParallel({name}=…)",
                    "leave it out, or use torch.nn.parallel.DistributedDataParallel with a communication hook",
                )
        width = max((p.element_size() for p in module.parameters()), default=4)
        super().__init__(module, bucket_cap_mb=message_size * width / 2**20, find_unused_parameters=delay_allreduce)
        served("apex.parallel.DistributedDataParallel", "torch.nn.parallel.DistributedDataParallel")
        if allreduce_always_fp32 or not gradient_average or gradient_predivide_factor != 1.0:
            world = self.process_group.size()
            after = gradient_predivide_factor / world if gradient_average else 1.0
            self.register_comm_hook(
                (self.process_group, allreduce_always_fp32, gradient_predivide_factor, after), _reduced
            )


def _reduced(
    state: tuple[distributed.ProcessGroup, bool, float, float], bucket: GradBucket
) -> torch.futures.Future[Tensor]:
    """All-reduce a bucket with factors before and after, in fp32 if asked."""
    group, in_fp32, before, after = state
    buffer: Tensor = bucket.buffer()
    total = buffer.float() if in_fp32 else buffer
    if before != 1.0:
        total.div_(before)
    work = distributed.all_reduce(total, group=group, async_op=True)
    assert work is not None

    def finish(future: torch.futures.Future[list[Tensor]]) -> Tensor:
        return buffer.copy_(future.value()[0].mul_(after))

    reduced: torch.futures.Future[Tensor] = work.get_future().then(finish)
    return reduced


class Reducer:
    """Averages gradients over all ranks when `reduce` is called.

    Args:
        module_or_grads_list: a module, whose parameters are broadcast from rank 0 now; or the tensors to average.
    """

    def __init__(self, module_or_grads_list: nn.Module | Iterable[Tensor]) -> None:
        served("apex.parallel.Reducer", "torch.distributed.all_reduce")
        self._module = module_or_grads_list if isinstance(module_or_grads_list, nn.Module) else None
        self._tensors = [] if isinstance(module_or_grads_list, nn.Module) else list(module_or_grads_list)
        if self._module is not None:
            flat_dist_call(self._module.parameters(), distributed.broadcast, (0,))

    def reduce(self) -> None:
        """One all-reduce for each dtype and device."""
        if self._module is not None:
            self._tensors = [p.grad for p in self._module.parameters() if p.grad is not None]
        flat_dist_call(self._tensors, distributed.all_reduce)


def flat_dist_call(
    tensors: Iterable[Tensor], call: Callable[..., Any], extra_args: Sequence[Any] | None = None
) -> None:
    """Call a collective once for each dtype and device, on all tensors of it in one piece.

    Args:
        tensors: written in place.
        call: takes a tensor and extra_args; torch.distributed.all_reduce gives averages, as in Apex.
    """
    together: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        together.setdefault((tensor.dtype, tensor.device), []).append(tensor.detach())
    for own in together.values():
        flat = torch._utils._flatten_dense_tensors(own)
        call(flat, *(extra_args or ()))
        if call is distributed.all_reduce:
            flat /= distributed.get_world_size()
        torch._foreach_copy_(own, list(torch._utils._unflatten_dense_tensors(flat, own)))
