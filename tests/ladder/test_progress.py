from __future__ import annotations

import pytest
import torch

from fusestep.ladder import profiling
from fusestep.ladder.profiling import shortened
from fusestep.ladder.progress import Remaining


def test_nothing_is_said_before_each_job_that_is_left_was_done_once() -> None:
    """A curve of the gate takes seconds where a library compiles for a minute: neither tells of the other."""
    jobs = [("gate", "a"), ("gate", "b"), ("time", "a"), ("time", "b"), ("time", "a"), ("time", "b")]
    remaining = Remaining(jobs)
    for kind, name, seconds in (("gate", "a", 10.0), ("gate", "b", 20.0), ("time", "a", 3.0)):
        assert remaining.in_words() == ""
        remaining.done(kind, name, seconds)
    assert remaining.in_words() == ""
    remaining.done("time", "b", 50.0)
    assert remaining.seconds() == 3.0 + 50.0


def test_by_a_first_time_which_compiled_the_next_takes_at_most_as_long() -> None:
    remaining = Remaining([("time", name) for name in "ab"] * 3)
    remaining.done("time", "a", 3.0)
    remaining.done("time", "b", 50.0)
    assert remaining.in_words() == "at most about 2 min left"
    remaining.done("time", "b", 5.0)
    assert remaining.in_words() == "at most about 11 s left"
    remaining.done("time", "a", 4.0)
    assert remaining.in_words() == "about 9 s left"
    remaining.done("time", "a", None)
    assert remaining.seconds() == 5.0


def test_what_falls_away_is_not_waited_for_and_what_a_journal_held_tells_nothing() -> None:
    remaining = Remaining([("time", "a"), ("time", "b")] * 3)
    for name in "ab":
        remaining.done("time", name, None)  # of an earlier sitting, which compiled
    assert remaining.in_words() == ""
    remaining.done("time", "a", 100.0)
    assert remaining.in_words() == ""
    for _ in range(2):
        remaining.done("time", "b", None)
    assert remaining.in_words() == "about 2 min left"


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
