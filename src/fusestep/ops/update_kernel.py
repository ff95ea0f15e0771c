"""What the kernels of several updates do alike: find a program's parameter, its elements, and its step's number.

Rows of the table: see adam_kernel.py. The states of a parameter are fp32.
"""

from __future__ import annotations

from fusestep.language import tl, triton
from fusestep.ops.adam_kernel import EXP_AVG, EXP_AVG_SQ, GROUP, LEARNING_RATE, MASTER, PARAMETER, ROW_FLOATS, STEP
from fusestep.ops.tensor_table import DIM_COUNT, FIRST_CHUNK, FIRST_DIM, NUMEL, strided_offsets


@triton.jit
def pointers(rows, tensors, tensor, gradient_address, PARAMETER_DTYPE: tl.constexpr, GRADIENT_DTYPE: tl.constexpr):
    """Parameter, gradient, first and second state, master."""
    column = rows + tensor
    parameter = tl.load(column + tensors * PARAMETER).to(tl.pointer_type(PARAMETER_DTYPE))
    gradient = gradient_address.to(tl.pointer_type(GRADIENT_DTYPE))
    first = tl.load(column + tensors * EXP_AVG).to(tl.pointer_type(tl.float32))
    second = tl.load(column + tensors * EXP_AVG_SQ).to(tl.pointer_type(tl.float32))
    master = tl.load(column + tensors * MASTER).to(tl.pointer_type(tl.float32))
    return parameter, gradient, first, second, master


@triton.jit
def options(rows, tensors, tensor, hyper, steps_before):
    """The learning rate, the row of the parameter's group in `hyper`, and the number of steps before this one."""
    lr = tl.load(tl.load(rows + tensors * LEARNING_RATE + tensor).to(tl.pointer_type(tl.float32)))
    group = hyper + tl.load(rows + tensors * GROUP + tensor) * ROW_FLOATS
    step = tl.load(steps_before + tl.load(rows + tensors * STEP + tensor))
    return lr, group, step


@triton.jit
def chunk_of(rows, tensors, tensor, chunk, IS_STRIDED: tl.constexpr, CHUNK: tl.constexpr):
    """A chunk's first element, its tensor's length and dims, and whether it is a whole run of aligned memory."""
    numel = tl.load(rows + tensors * NUMEL + tensor)
    start = (chunk - tl.load(rows + tensors * FIRST_CHUNK + tensor)) * CHUNK
    is_plain = start + CHUNK <= numel
    first_dim = tl.full([], 0, tl.int64)
    dim_count = tl.full([], 0, tl.int64)
    if IS_STRIDED:
        first_dim = tl.load(rows + tensors * FIRST_DIM + tensor)
        dim_count = tl.load(rows + tensors * DIM_COUNT + tensor)
        is_plain = is_plain & (dim_count == 0)
    return start, numel, first_dim, dim_count, is_plain


@triton.jit
def places(at, dims, first_dim, dim_count):
    """Where elements `at` of the walk lie in the parameter and in the gradient."""
    at_parameter = at
    at_gradient = at
    if dim_count != 0:
        at_parameter, at_gradient = strided_offsets(at, dims, first_dim, dim_count)
    return at_parameter, at_gradient
