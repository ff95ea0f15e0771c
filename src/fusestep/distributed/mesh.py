"""What `--parallel` asks for, and the mesh of ranks that it makes.

    ddp           every rank holds the whole model and trains on its share of each batch
    fsdp          as ddp, but each rank holds its part of every weight, gradient and moment (FSDP2)
    tp=N          groups of N neighbouring ranks share each product; in front of it ddp or fsdp, for more ranks than N
    tp=N,sp       ... and hold activations between the products by parts of the sequence
    none          one process

The mesh has two dimensions, `data` and `tensor`; ranks of one tensor group are neighbours, so that they share a
machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from fusestep.errors import UserError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

DATA, TENSOR = "data", "tensor"

FORMS = "none, ddp, fsdp, tp=N, or a list such as fsdp,tp=2 or tp=2,sp"


@dataclass(frozen=True)
class Parallel:
    """How ranks share the work.

    Attributes:
        data: what is done with the ranks that train on different sequences; None: there is one such rank.
        tensor: ranks that share each product; 1: none do.
        by_sequence: whether those ranks also share the norms and adds between the products.
        is_alone: nothing was asked for: one process without a process group.
    """

    data: Literal["ddp", "fsdp"] | None = None
    tensor: int = 1
    by_sequence: bool = False
    is_alone: bool = True

    @classmethod
    def of(cls, text: str) -> Parallel:
        """Read `--parallel`. Raises: UserError."""
        words = [word.strip() for word in text.split(",")]
        if words == ["none"]:
            return cls()
        data: Literal["ddp", "fsdp"] | None = None
        tensor, by_sequence = 0, False
        for word in words:
            name, _, number = word.partition("=")
            if word == "ddp" and data is None:
                data = "ddp"
            elif word == "fsdp" and data is None:
                data = "fsdp"
            elif name == "tp" and number.isdecimal() and int(number) and not tensor:
                tensor = int(number)
            elif word == "sp" and not by_sequence:
                by_sequence = True
            else:
                raise UserError(f"--parallel is {text!r}, of which {word!r} cannot be; pass {FORMS}.")
        if by_sequence and not tensor:
            raise UserError(f"--parallel is {text!r}, and sp goes with tensor parallelism; pass tp=N,sp.")
        return cls(data, tensor or 1, by_sequence, is_alone=False)

    def data_ranks(self, size: int) -> int:
        """How many ranks train on different sequences, of `size` in all.

        Raises: UserError where the ranks do not make whole groups.
        """
        if size % self.tensor:
            raise UserError(
                f"--parallel asks for groups of {self.tensor} ranks (tp={self.tensor}) and there are {size}; start a "
                f"multiple of {self.tensor} processes, or pass another --parallel, which is none for one process."
            )
        ranks = size // self.tensor
        if self.data is None and ranks > 1:
            raise UserError(
                f"--parallel asks for one group of {self.tensor} ranks (tp={self.tensor}) and there are {size}; add "
                f"ddp or fsdp for what the {ranks} groups do, as in --parallel fsdp,tp={self.tensor}."
            )
        return ranks

    def mesh(self, device_type: str, size: int) -> DeviceMesh:
        """The (data, tensor) mesh of all ranks; collective."""
        from torch.distributed.device_mesh import init_device_mesh

        return init_device_mesh(device_type, (self.data_ranks(size), self.tensor), mesh_dim_names=(DATA, TENSOR))
