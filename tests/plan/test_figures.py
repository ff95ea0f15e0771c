"""How measured results become the plan's figures."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

import figures
import plan_cases
import plan_rates
from fusestep.plan import Rates, passes
from fusestep.plan.duration import duration

RESULTS = plan_cases.read(figures.RESULTS)


@pytest.fixture
def ladders(tmp_path: Path) -> list[dict[str, Any]]:
    """Two ladders on the model that figures are fitted to: the newer has `amp` anew, and a rung that failed."""
    found = [one for one in RESULTS if "rungs" in one and one["plan"]["preset"] == plan_cases.FITTED_TO]
    rungs = {rung["name"]: rung for one in found for rung in one["rungs"]}
    plan = {**found[-1]["plan"], "factory": None}
    old = {"plan": plan, "environment": found[-1]["environment"], "rungs": [rungs["fused-norm"], rungs["amp"]]}
    new = copy.deepcopy({**old, "rungs": [rungs["amp"], {**rungs["amp"], "name": "loss", "step_ms": None}]})
    # Sums of gradients of all outputs of 12 blocks, 8192 tokens of 2 bytes, at 10^12 bytes a second.
    sums = 2 * 12 * 8192 * (6144 + 2048 + 8192 + 2048) / 1e12
    kernels = [{"name": "void at::native::reduce_kernel<bf16>", "calls": 48.0, "ms": 1e3 * sums}]
    new["rungs"][0] |= {"host_ms": 48.0, "device_ms": 80.0, "step_ms": 81.0, "kernels": kernels}
    for date, one in (("2026-01-01", old), ("2026-01-02", new), ("2025-12-31", old)):
        (tmp_path / f"{date}-a-gpu-ladder-scaleup.json").write_text(json.dumps(one))
    return plan_cases.read(tmp_path)


def test_rungs_are_the_newest_of_each_name(ladders: list[dict[str, Any]]) -> None:
    named = [(one["file"][:10], [rung["name"] for rung in one["rungs"]]) for one in ladders]
    assert named == [("2026-01-01", ["fused-norm"]), ("2026-01-02", ["amp", "loss"])]
    found = {case.name: case.step_ms for case in plan_cases.cases(ladders)}
    assert found["scaleup, amp"] == 81.0
    assert found.keys() == {"scaleup, fused-norm", "scaleup, amp"}


def test_figures_are_fitted_to_rungs_of_several_ladders(ladders: list[dict[str, Any]]) -> None:
    others = [one for one in RESULTS if "rungs" not in one]
    data = plan_rates.rates_data([*others, *ladders])
    newer, older = "2026-01-02-a-gpu-ladder-scaleup.json", "2026-01-01-a-gpu-ladder-scaleup.json"
    assert data["host_layer"]["seed/bf16"] == [48.0e-3 / 12, newer]
    assert (data["sources"]["products:fp32"], data["figures"]["separate"]["source"]) == (older, newer)
    rates = Rates.read(json.dumps(data))
    rungs = plan_rates.fitted_rungs(ladders)
    # What was fitted explains what it was fitted to.
    for name, seconds in (("amp", 80.0e-3), ("fused-norm", rungs["fused-norm"].rung["device_ms"] * 1e-3)):
        assert duration(rungs[name].work, rates).device == pytest.approx(seconds, rel=1e-4)
    # A layer of 8192 × 8192 takes its products, and the sum of its bias's gradient at 10^12 bytes a second.
    (fp8,) = (one for one in RESULTS if one.get("part") == "fp8")
    (row,) = (one for one in fp8["rows"] if one["implementation"] == "torch bf16" and one["inputs"] == 8192)
    expected = 6 * 8192**3 / (row["device_ms"] * 1e-3 - 2 * 8192**2 / 1e12)
    assert rates.product("bf16", 8192) == pytest.approx(expected, rel=1e-4)


def test_shares_of_casts_and_of_the_step_with_copies_are_those_of_the_profile() -> None:
    (steps,) = (one for one in RESULTS if one.get("part") == f"steps-{plan_cases.PROFILED[0]}")
    (case,) = (one for one in plan_cases.step_cases(steps) if one.fitted)
    (row,) = (one for one in steps["rows"] if one["configuration"] == plan_cases.PROFILED[1])
    rates = Rates.read(json.dumps(plan_rates.rates_data(RESULTS)))
    named = {line.name: line.amount for line in duration(case.work, rates).lines}
    taken = {kernel["name"]: (kernel["ms"] * 1e-3, kernel["calls"]) for kernel in row["kernels"]}

    def bare(*names: str) -> float:
        return sum(taken[name][0] - taken[name][1] * rates["kernel"] for name in names)

    assert named["casts to FP8"] == pytest.approx(bare("_quantize_kernel", "_quantize_joined_kernel"), rel=1e-4)
    stepped = named["optimizer, weights of blocks with FP8 copies"]
    assert stepped == pytest.approx(bare("_adam_copies_kernel"), rel=1e-4)
    assert passes.forward(case.work).casts + passes.backward(case.work).casts == 64 * case.work.shape.width


def test_a_norm_is_as_fast_as_it_was_measured() -> None:
    """Its bytes at the share of a copy's rate, and a start and an end for each of its three kernels."""
    (norms,) = (one for one in RESULTS if one.get("part") == "norms")
    rates = Rates.read(json.dumps(plan_rates.rates_data(RESULTS)))
    for row in norms["rows"]:
        if row["implementation"] == "fusestep" and row["kind"] == "layer_norm":
            floor = row["forward_us"] * row["forward_of_floor"] + row["backward_us"] * row["backward_of_floor"]
            taken = floor / rates.norm(row["width"]) + 3 * rates["kernel"] * 1e6
            assert taken == pytest.approx(row["forward_us"] + row["backward_us"], rel=1e-4)
