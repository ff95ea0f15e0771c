"""The work of a step by formula, against a count of what a model really multiplies; and the device's ceilings."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from fusestep.fp8 import support
from fusestep.ladder import ceilings, work
from fusestep.models import GPT, PRESETS, GPTConfig

ODD = GPTConfig(vocab_size=37, width=24, heads=3, layers=3, ffn_width=40, context=10, form="seed")


def test_flops_are_those_that_a_model_is_counted_to_do_but_for_what_its_mask_hides() -> None:
    """The form `seed` multiplies what its mask then hides, so the count has attention's whole square in it."""
    model = GPT(ODD)
    tokens = torch.randint(37, (2, 10))
    # The counter looks into products, not into fused attention.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    hidden = 3 * 3 * 2 * (2 * 24 * (10 * 10 - 10 * 11 // 2) * 2)  # layers, passes, samples; two products of 2·24 each
    assert work.flops_per_step(ODD, 2) == counter.get_total_flops() - hidden


def test_flops_of_a_large_model_are_close_to_six_times_its_parameters_a_token() -> None:
    config = PRESETS["scaleup"]
    parameters = GPT(config, device="meta").parameter_count()
    assert work.flops_per_step(config, 32) / (32 * 256) == pytest.approx(6 * parameters, rel=0.03)


def test_bytes_follow_the_formula_and_fall_with_the_precision() -> None:
    parameters, tokens = 1000, 20
    weights = 3 * (4 * 24 * 24 + 2 * 24 * 40) + 24 * 37
    between = 3 * (8 * 24 + 2 * 40) + 24 + 37
    fp32 = work.bytes_per_step(ODD, parameters, 2, "fp32")
    assert fp32 == 32 * parameters + 2 * 4 * weights + 5 * 4 * between * tokens
    bf16 = work.bytes_per_step(ODD, parameters, 2, "bf16")
    assert bf16 == 32 * parameters + 2 * 2 * weights + 5 * 2 * between * tokens
    # The blocks' weights at one byte each, read twice; the head stays in BF16.
    assert bf16 - work.bytes_per_step(ODD, parameters, 2, "fp8") == 2 * (weights - 24 * 37)


def test_ceilings_are_the_best_size_and_count_both_ways_of_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([0.5, 1.0, 4.0, 0.25, 8.0])  # the copy, two FP32 products, two BF16 ones
    monkeypatch.setattr(ceilings, "_median_seconds", lambda work, clock: next(seconds))
    found = ceilings.measure(torch.device("cpu"), sizes=(8, 16), copied=1000)
    assert found.copy == 2 * 4 * 1000 / 0.5
    assert found.products == {"fp32": max(2 * 8**3 / 1.0, 2 * 16**3 / 4.0), "bf16": 2 * 8**3 / 0.25}


def test_the_time_of_a_call_is_between_its_marks() -> None:
    class Clock:
        """Ten calls that take 1, 2, … 13 ms."""

        now = 0.0

        def mark(self) -> float:
            return self.now

        def elapsed_ms(self, start: float, end: float) -> float:
            return end - start

        def synchronize(self) -> None:
            self.is_synchronized = True

    clock, calls = Clock(), iter(range(1, 14))

    def call() -> None:
        clock.now += next(calls)

    # The first three warm up; the median of 4 to 13 ms.
    assert ceilings._median_seconds(call, clock) == pytest.approx(8.5e-3)  # type: ignore[arg-type]
    assert clock.is_synchronized


@pytest.mark.gpu
def test_a_gpu_has_plausible_ceilings() -> None:
    device = torch.device("cuda")
    found = ceilings.measure(device)
    assert found.products["bf16"] > 2 * found.products["fp32"] > 1e12
    assert found.copy > 1e11
    if support(device)[0]:
        assert found.products["fp8"] > 1.2 * found.products["bf16"]
