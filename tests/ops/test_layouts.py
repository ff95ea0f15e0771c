"""Makers give the tensors that torch would, and rows are seen without a copy where they can be."""

from __future__ import annotations

import pytest
import torch

from fusestep.ops import layouts
from fusestep.ops.layouts import keep, maker

CPU = torch.device("cpu")


@pytest.mark.parametrize("shape", [(), (7,), (3, 5), (2, 3, 5), (0, 4), (4, 0), (1, 6)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.float8_e5m2])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("is_known", [True, False])
def test_makers_give_tensors_of_their_own(
    shape: tuple[int, ...], dtype: torch.dtype, transposed: bool, is_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_known:  # a device for which nothing allocates without a dispatch
        monkeypatch.setattr(layouts, "_ALLOCATORS", {})
    wanted = torch.empty(shape, dtype=dtype)
    if transposed:
        wanted = wanted.permute(tuple(reversed(range(wanted.dim()))))
    make = maker(shape, dtype, CPU, transposed=transposed)
    one, other = make(), make()
    for made in (one, other):
        assert (made.shape, made.stride(), made.dtype, made.device) == (wanted.shape, wanted.stride(), dtype, CPU)
        assert made.data_ptr() % 16 == 0
        assert not made.requires_grad
    if one.numel():
        assert one.data_ptr() != other.data_ptr()
        one.view(torch.uint8).fill_(1) if dtype is not torch.float32 else one.fill_(1)


def test_what_is_kept_is_let_go_before_it_is_too_much() -> None:
    known: dict[int, int] = {}
    for key in range(5):
        assert keep(known, key, key * key, most=3) == key * key
        assert len(known) <= 3
    assert known == {3: 9, 4: 16}


@pytest.mark.gpu
def test_on_the_device_too() -> None:
    device = torch.device("cuda", 0)
    made = maker((48, 32), torch.float8_e4m3fn, device, transposed=True)()
    assert (made.shape, made.stride(), made.dtype, made.device) == ((32, 48), (1, 32), torch.float8_e4m3fn, device)
