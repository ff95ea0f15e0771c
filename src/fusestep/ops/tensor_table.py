"""The addresses of many tensors, in device memory, so that one launch serves them all.

A table has one column a parameter. Its rows are 64-bit integers: first what every kernel reads (the rows named below),
then the addresses that an op adds (an optimizer: the parameter, its moments, its master). The work is cut into chunks
of BLOCK elements; `chunk_tensor` says for each chunk which parameter it belongs to, so a program searches nothing.

Two kinds of parameter share a table:

- flat: all of its tensors lie in the same order in memory, aligned to 16 bytes. A chunk is a run of memory.
- strided: anything else (views, slices, transposed or expanded gradients, odd addresses). `dims` holds, from the
  innermost outwards, rows of (size, stride of the parameter, stride of the gradient), and the walk follows the order
  of the op's dense state.

Kernels that walk matrices in tiles (adam_copies.py) read the same tables, with a list of tiles beside that of chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fusestep.language import tl, triton

#: Elements a chunk. On an H200 Adam with one block of 1,024 a program (4 warps) moved 0.99 of what a copy moves at
#: 124 M parameters; 2,048 moved 0.7–0.8 and 4,096 0.68.
BLOCK = 1024

#: Rows of a table that every kernel reads. A gradient's address of 0 means: no gradient in this step.
GRADIENT: tl.constexpr = tl.constexpr(0)
NUMEL: tl.constexpr = tl.constexpr(1)
FIRST_CHUNK: tl.constexpr = tl.constexpr(2)
FIRST_DIM: tl.constexpr = tl.constexpr(3)
DIM_COUNT: tl.constexpr = tl.constexpr(4)
#: As DIM_COUNT, for a kernel that reads the gradient alone, in whatever order: 0 where that is one aligned run.
GRADIENT_DIM_COUNT: tl.constexpr = tl.constexpr(5)
COMMON_ROWS = 6

Dims = tuple[tuple[int, int, int], ...]


def walk(state: Tensor, parameter: Tensor, gradient: Tensor) -> Dims:
    """Rows of (size, parameter's stride, gradient's stride), innermost first, in the memory order of a dense `state`.

    Neighbouring dimensions that all three cross in one stride become one; () means one element.
    """
    by_stride = sorted(
        (state_stride, size, parameter_stride, gradient_stride)
        for size, state_stride, parameter_stride, gradient_stride in zip(
            state.shape, state.stride(), parameter.stride(), gradient.stride(), strict=True
        )
        if size != 1
    )
    dims: list[tuple[int, int, int]] = []
    for _, size, parameter_stride, gradient_stride in by_stride:
        if dims:
            inner_size, inner_parameter, inner_gradient = dims[-1]
            if parameter_stride == inner_size * inner_parameter and gradient_stride == inner_size * inner_gradient:
                dims[-1] = (inner_size * size, inner_parameter, inner_gradient)
                continue
        dims.append((size, parameter_stride, gradient_stride))
    return tuple(dims)


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill one run of memory, each place once, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return tensor.numel() == 0
            expected *= size
    return True


def flat(dense: Tensor) -> Tensor:
    """A dense tensor's elements as they lie in memory."""
    return dense.as_strided((dense.numel(),), (1,))


class DeviceArray:
    """A device tensor and the host's list that it was filled from: `update` uploads only what changed.

    The copy comes from pinned memory and does not wait. Under CUDA graph capture it becomes a node of the graph that
    reads its pinned source at every replay, so that source was allocated before and is kept for good.
    """

    def __init__(self, values: Sequence[object], tensor: Tensor, *, capturable: bool = False) -> None:
        self.tensor = tensor
        self.values: Sequence[object] | None = None
        is_pinned = capturable and tensor.device.type == "cuda"
        self._reserve = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) if is_pinned else None
        self._captured: Tensor | None = None
        self.update(values)

    def update(self, values: Sequence[object]) -> None:
        """Make the device hold these values.

        Raises: RuntimeError for a second change under capture: the graph would then depend on which came last.
        """
        if values == self.values:
            return
        if self.tensor.device.type != "cuda":
            self.tensor.copy_(torch.tensor(values, dtype=self.tensor.dtype))
        elif not torch.cuda.is_current_stream_capturing():
            # The host allocator hands this pinned block out again only after the copy is done.
            source = torch.tensor(values, dtype=self.tensor.dtype, pin_memory=True)
            self.tensor.copy_(source, non_blocking=True)
        elif self._reserve is None:
            raise RuntimeError("a table that was built for capture may change once in a CUDA graph")
        else:
            self._captured, self._reserve = self._reserve, None
            self._captured.copy_(torch.tensor(values, dtype=self.tensor.dtype))
            self.tensor.copy_(self._captured, non_blocking=True)
        self.values = values


@dataclass(frozen=True)
class TableEntry:
    """One parameter of a table: its number of elements, its walk, the addresses of its op's rows, and its gradient's.

    `dims` of () makes it flat. `is_run` says that the gradient by itself is one aligned run of memory.
    """

    numel: int
    dims: Dims
    gradient: int
    is_run: bool
    rows: tuple[int, ...] = ()


def entry(state: Tensor, gradient: Tensor, others: Sequence[Tensor] = (), rows: tuple[int, ...] = ()) -> TableEntry:
    """An entry whose walk follows `state` (dense); others[0], where given, is the parameter, the rest are like state.

    `rows` are values for the op's rows beyond the addresses of `others`.
    """
    parameter = others[0] if others else gradient
    addresses = tuple(tensor.data_ptr() for tensor in others)
    dims = walk(state, parameter, gradient)
    in_line = not dims or (len(dims) == 1 and dims[0][1:] == (1, 1))
    aligned = all(address % 16 == 0 for address in (gradient.data_ptr(), *addresses))
    if in_line and aligned:
        dims = ()
    elif not dims:
        dims = ((1, 1, 1),)
    is_run = not dims or (gradient.data_ptr() % 16 == 0 and is_dense(gradient))
    return TableEntry(gradient.numel(), dims, gradient_address(gradient), is_run, (*addresses, *rows))


def gradient_address(gradient: Tensor | None) -> int:
    """What a table's GRADIENT row holds; an empty gradient has no memory and still counts as one."""
    return 0 if gradient is None else gradient.data_ptr() or 1


#: Triton's types of `TensorTable.arguments`, by the names that every kernel over a table gives its first parameters.
TABLE_SIGNATURE = {"rows": "*i64", "tensors": "i32", "chunk_tensor": "*i32", "chunks": "i32", "dims": "*i64"}


@dataclass(eq=False)
class TensorTable:
    """The table of one device, as kernels read it.

    `rows`: (COMMON_ROWS + the op's, count) int64; `chunk_tensor`: (chunks,) int32; `dims`: (n, 3) int64.
    """

    device: torch.device
    count: int
    chunks: int
    is_strided: bool
    has_strided_gradients: bool
    rows: Tensor
    chunk_tensor: Tensor
    dims: Tensor
    gradients: DeviceArray

    @property
    def arguments(self) -> tuple[Tensor, int, Tensor, int, Tensor]:
        """The first arguments of a kernel over this table."""
        return self.rows, self.count, self.chunk_tensor, self.chunks, self.dims


def build_table(device: torch.device, entries: Sequence[TableEntry], *, capturable: bool = False) -> TensorTable:
    """Upload a table for these parameters. No synchronisation with the device."""
    chunk_counts = [-(-e.numel // BLOCK) for e in entries]
    chunks = sum(chunk_counts)
    first_chunks: list[int] = []
    first_dims: list[int] = []
    all_dims: list[tuple[int, int, int]] = []
    chunk = 0
    for e, chunk_count in zip(entries, chunk_counts, strict=True):
        first_chunks.append(chunk)
        first_dims.append(len(all_dims))
        all_dims.extend(e.dims)
        chunk += chunk_count
    columns = [
        (e.gradient, e.numel, first_chunk, first_dim, len(e.dims), 0 if e.is_run else len(e.dims), *e.rows)
        for e, first_chunk, first_dim in zip(entries, first_chunks, first_dims, strict=True)
    ]
    rows = upload([list(row) for row in zip(*columns, strict=True)], torch.int64, device)
    # Built on the device: a model of 10^12 elements has 10^9 chunks.
    chunk_tensor = torch.repeat_interleave(
        torch.arange(len(entries), dtype=torch.int32, device=device),
        upload(chunk_counts, torch.int64, device),
        output_size=chunks,
    )
    return TensorTable(
        device=device,
        count=len(entries),
        chunks=chunks,
        is_strided=bool(all_dims),
        has_strided_gradients=not all(e.is_run for e in entries),
        rows=rows,
        chunk_tensor=chunk_tensor,
        dims=upload(all_dims or [(0, 0, 0)], torch.int64, device),
        gradients=DeviceArray([e.gradient for e in entries], rows[0], capturable=capturable),
    )


def upload(values: Sequence[object], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A new device tensor with these values, copied from pinned memory without waiting."""
    return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)


@triton.jit
def strided_offsets(index, dims, first_dim, dim_count):
    """Offsets into parameter and gradient of elements `index` (int64, in the order of the walk)."""
    rest = index
    parameter_offset = index * 0
    gradient_offset = index * 0
    # The outermost dimension needs no remainder, so a flat view at an odd address divides nothing.
    for d in range(first_dim, first_dim + dim_count - 1):
        size = tl.load(dims + d * 3)
        within = rest % size
        rest = rest // size
        parameter_offset += within * tl.load(dims + d * 3 + 1)
        gradient_offset += within * tl.load(dims + d * 3 + 2)
    last = dims + (first_dim + dim_count - 1) * 3
    parameter_offset += rest * tl.load(last + 1)
    gradient_offset += rest * tl.load(last + 2)
    return parameter_offset, gradient_offset
