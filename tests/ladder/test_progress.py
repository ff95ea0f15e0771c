from __future__ import annotations

import pytest
import torch

from fusestep.ladder import profiling
from fusestep.ladder.profiling import shortened
from fusestep.ladder.progress import Remaining


def test_nothing_is_said_before_anything_is_known() -> None:
    assert Remaining([("gate", "a")]).in_words() == ""


def test_a_job_takes_what_its_last_took_else_what_its_kind_takes() -> None:
    jobs = [("gate", "a"), ("gate", "b"), ("time", "a"), ("time", "b"), ("time", "a"), ("time", "b")]
    remaining = Remaining(jobs)
    remaining.done("gate", "a", 10.0)
    assert remaining.seconds() == 10.0 * 5  # the median of all that is known
    remaining.done("gate", "b", 20.0)
    remaining.done("time", "a", 3.0)
    assert remaining.seconds() == 3.0 * 3
    remaining.done("time", "b", 50.0)  # it compiled
    assert remaining.seconds() == 3.0 + 50.0
    remaining.done("time", "b", 5.0)
    assert remaining.in_words() == "about 3 s left"
    remaining.done("time", "a", None)  # it came from a journal, which tells nothing
    assert remaining.seconds() == 0.0


def test_minutes_are_said_where_seconds_are_too_many() -> None:
    remaining = Remaining([("time", "a")] * 4)
    remaining.done("time", "a", 100.0)
    assert remaining.in_words() == "about 5 min left"


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("void at::native::vectorized_elementwise_kernel<4, at::native::Add>(int, at::native::Add)", "vectorized_elem"),
        ("_layer_norm_forward_kernel", "_layer_norm_forward_kernel"),
        ("void (anonymous namespace)::softmax_warp_forward<float, 9>(float*)", "softmax_warp_forward"),
        ("Memcpy DtoD (Device -> Device)", "Memcpy DtoD"),
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NTT", "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NTT"),
        ("x" * 90, "xxx"),
    ],
)
def test_a_kernels_name_is_said_as_a_person_says_it(name: str, short: str) -> None:
    found = shortened(name)
    assert found.startswith(short)
    assert len(found) <= 44
    assert "<" not in found


def test_the_profile_counts_a_step_and_its_shares_are_of_all() -> None:
    x, y = torch.randn(96, 160), torch.randn(160, 64)

    def step() -> None:
        with torch.profiler.record_function("a range of somebody's"):
            for _ in range(3):
                x @ y

    kernels = profiling.measure(step, torch.device("cpu"), steps=2)
    products = next(kernel for kernel in kernels if kernel.name == "aten::mm")
    assert products.calls == 3
    assert products.share > 0.3
    assert sum(kernel.share for kernel in kernels) <= 1.0001
    assert sum(kernel.ms for kernel in kernels) == pytest.approx(products.ms / products.share, rel=0.2)
