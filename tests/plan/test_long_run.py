"""Checkpoints, failures and the length of a run."""

from __future__ import annotations

import math

import pytest

from fusestep.plan import SHAPES, Work, estimate, measured_rates
from fusestep.plan.long_run import interval_seconds, lost_share, saving_seconds

RATES = measured_rates().with_changes({"storage": 2e9, "failures": 9000.0, "restart": 300.0})
SHAPE = SHAPES["llama-8b"]
SPREAD = Work(SHAPE, batch=64, precision="bf16", parallel="fsdp", gpus=64, activation_checkpointing=True)


def test_all_machines_write_their_part_of_a_sharded_checkpoint_and_one_a_whole_one() -> None:
    # fp32 weights and two moments, by eight machines.
    assert saving_seconds(SPREAD, RATES) == pytest.approx(12 * SHAPE.parameters / 8 / 2e9)
    whole = Work(SHAPE, batch=64, precision="bf16", weights="bf16", parallel="ddp", gpus=64)
    # bf16 weights, masters and two moments, by one.
    assert saving_seconds(whole, RATES) == pytest.approx(14 * SHAPE.parameters / 2e9)


def test_no_other_interval_between_checkpoints_loses_less() -> None:
    every, saving, apart = interval_seconds(SPREAD, RATES), saving_seconds(SPREAD, RATES), 9000 * 3600 / 64

    def lost(seconds: float) -> float:
        return saving / seconds + (seconds / 2 + 300) / apart

    assert lost_share(SPREAD, RATES) == pytest.approx(lost(every))
    assert lost(every) < min(lost(0.9 * every), lost(1.1 * every))


def test_a_run_is_as_long_as_its_steps_and_what_is_lost() -> None:
    tokens = 1e12
    plan = estimate(SPREAD, RATES, tokens=tokens)
    steps = math.ceil(tokens / (64 * 8192))
    seconds = steps * plan.seconds / (1 - lost_share(SPREAD, RATES))
    assert plan.run[-1].amount == pytest.approx(seconds)
    assert plan.totals()["gpu_hours"] == pytest.approx(64 * seconds / 3600)
    assert "gpu_hours" not in estimate(SPREAD, RATES).totals()
