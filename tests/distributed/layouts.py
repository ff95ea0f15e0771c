"""A small model of odd sizes, laid out over processes in the usual ways, and a step of training; for the tests here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import harness

IN, WIDTH, OUT, ROWS = 7, 12, 3, 12


class Net(nn.Module):
    """Parameters that no number of ranks divides, one of a single element, and one whose gradient is rarely large."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(IN, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.second = nn.Linear(WIDTH, 6)
        self.last = nn.Linear(6, OUT, bias=False)
        self.scale = nn.Parameter(torch.tensor([1.3]))

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.second(torch.tanh(self.first(x)))
        return self.last(torch.relu(hidden)) * self.scale + self.norm(x.repeat(1, 2)[:, :WIDTH])[:, :OUT]


def net(dtype: torch.dtype = torch.float32) -> Net:
    """The same weights everywhere."""
    generator = torch.Generator().manual_seed(5)
    model = Net()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            start = 1.0 if name in ("norm.weight", "scale") else 0.0
            parameter.copy_(start + 0.4 * torch.randn(parameter.shape, generator=generator))
    return model.to(dtype)


def batch(step: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """All rows of a step."""
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randn(ROWS, IN, generator=generator).to(dtype), torch.randn(ROWS, OUT, generator=generator).to(dtype)


class Layout:
    """A model over all processes, and which rows are this one's.

    Args:
        kind: "ddp", "fsdp", "hsdp" (sharded over pairs of neighbours, replicated over these), "tp", or "fsdp-tp"
            (tensor parallelism over pairs of neighbours); "alone" for no processes.
    """

    def __init__(self, kind: str, dtype: torch.dtype = torch.float32) -> None:
        self.model: nn.Module = net(dtype)
        size = torch.distributed.get_world_size() if kind != "alone" else 1
        rank = torch.distributed.get_rank() if kind != "alone" else 0
        self.data_rank, self.data_size = rank, size
        plan: Any = {"first": ColwiseParallel(), "second": RowwiseParallel()}
        if kind == "ddp":
            self.model = nn.parallel.DistributedDataParallel(self.model)
        elif kind in ("fsdp", "hsdp"):
            shape = (size,) if kind == "fsdp" else (size // 2, 2)
            mesh = init_device_mesh(harness.device_type, shape, mesh_dim_names=("replicas", "parts")[-len(shape) :])
            fully_shard(self.model.first, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        elif kind == "tp":
            parallelize_module(self.model, init_device_mesh(harness.device_type, (size,)), plan)
            self.data_rank, self.data_size = 0, 1
        elif kind == "fsdp-tp":
            mesh = init_device_mesh(harness.device_type, (size // 2, 2), mesh_dim_names=("data", "tensor"))
            parallelize_module(self.model, mesh["tensor"], plan)
            fully_shard(self.model.first, mesh=mesh["data"])
            fully_shard(self.model, mesh=mesh["data"])
            self.data_rank, self.data_size = rank // 2, size // 2

    def backward(self, step: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Gradients of the mean loss of all rows; returns that loss."""
        x, y = (all_rows.chunk(self.data_size)[self.data_rank] for all_rows in batch(step, dtype))
        loss = (self.model(x) - y).square().mean()
        loss.backward()
        total = loss.detach().clone()
        if self.data_size > 1 or torch.distributed.is_initialized():
            torch.distributed.all_reduce(total)
            total /= torch.distributed.get_world_size()
        return total

    def train(self, optimizer: torch.optim.Optimizer, steps: int, first: int = 0) -> list[float]:
        """The losses of so many steps."""
        losses = []
        for step in range(first, first + steps):
            losses.append(self.backward(step).item())
            optimizer.step()
            optimizer.zero_grad()
        return losses


def whole(model: nn.Module) -> dict[str, Tensor]:
    """The weights, put together, under plain names."""
    return {
        name.removeprefix("module."): (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
        for name, value in model.state_dict().items()
    }


Make = Callable[[Any], torch.optim.Optimizer]
