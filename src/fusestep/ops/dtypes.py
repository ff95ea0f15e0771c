"""Dtypes by their names: torch's for a reader, Triton's for a kernel."""

from __future__ import annotations

import torch

from fusestep.language import tl

#: What the kernels load and store; they compute in fp32.
KERNEL_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

#: The same as a signature of Triton's writes them, '*' standing before those of pointers.
SHORT_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}

#: Formats of eight bits that matrices are cast to and multiplied in, and what they are cast from.
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
CASTABLE = tuple(KERNEL_DTYPES)


def dtype_name(dtype: torch.dtype) -> str:
    """torch.bfloat16 as 'bfloat16'."""
    return str(dtype).removeprefix("torch.")
