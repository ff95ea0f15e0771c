"""What this process takes, and which errors mean that there is no more."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from fusestep import memory


def test_only_exhausted_memory_counts_as_such() -> None:
    assert memory.ran_out(MemoryError())
    assert memory.ran_out(torch.OutOfMemoryError("CUDA out of memory"))
    assert not memory.ran_out(RuntimeError("shapes cannot be multiplied"))
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**60, dtype=torch.uint8)
    assert memory.ran_out(raised.value)


def test_a_gpu_s_memory_is_told_from_the_host_s() -> None:
    assert memory.ran_out_on_gpu(torch.OutOfMemoryError("CUDA out of memory"))
    assert not memory.ran_out_on_gpu(MemoryError())


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_large_parent_does_not_show_in_its_child_s_peak() -> None:
    held = bytearray(b"x") * (256 << 20)
    child = "from fusestep.memory import peak_resident; print(peak_resident())"
    said = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, check=True).stdout
    assert int(said) < len(held) < (memory.peak_resident() or 0)


def test_the_size_of_an_allocation_that_failed_is_read_from_the_error() -> None:
    assert memory.asked(RuntimeError("CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has ...")) == 3 * 2**29
    assert memory.asked(RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB.")) == 20 * 2**20
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**60, dtype=torch.uint8)
    assert memory.asked(raised.value) == 2**60
    assert memory.asked(MemoryError()) == 0
