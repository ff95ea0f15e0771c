"""Plans beside measurements, and that the figures, the page and the results belong together."""

from __future__ import annotations

import json
import re

import pytest

import figures
import plan_cases
import plan_page
import plan_rates
from fusestep.plan import SHAPES, Rates, Work, estimate, measured_rates
from fusestep.plan.rates import between

RESULTS = plan_cases.read(figures.RESULTS)
RATES = measured_rates()
CASES = plan_cases.cases(RESULTS)


def off(case: plan_cases.Case) -> list[str]:
    """What a case is off by beyond what is allowed."""
    peak = case.peak_off(RATES)
    found = []
    step_within, peak_within = case.within(RATES)
    if abs(case.step_off(RATES)) > step_within:
        found.append(f"{case.name}: step {case.step_off(RATES):+.1%}")
    if peak is not None and abs(peak) > peak_within:
        found.append(f"{case.name}: peak {peak:+.1%}")
    return found


def test_the_rates_are_those_of_the_results() -> None:
    assert plan_rates.FILE.read_text() == plan_rates.text(plan_rates.rates_data(RESULTS)), "run make figures"


def test_plans_come_as_close_to_measured_steps_as_is_said_or_it_is_said_why_not() -> None:
    assert len(CASES) >= 8
    assert sum(not case.fitted for case in CASES) >= 6
    beyond = {case.name: off(case) for case in CASES if off(case)}
    assert beyond.keys() == plan_cases.EXPLAINED.keys(), beyond


def test_every_kind_of_result_becomes_cases() -> None:
    model = {"vocab_size": 96, "width": 768, "heads": 12, "layers": 4, "ffn_width": 3072, "context": 256}
    rows = [{"kind": "weak", "ranks": ranks, "batch": 32 * ranks, "ms": 4.0 + ranks} for ranks in (1, 2)]
    here = {"gpu": "NVIDIA H200"}
    over_ranks = {"parallel": "fsdp", "precision": "bf16", "model": model, "environment": here, "rows": rows}
    row = {"model": "c", "configuration": "fusestep fp8 delayed, masters", "precision": "fp8", "weights": "bf16"}
    steps = {"part": "steps-c", "rows": [row | {"device_ms": 30.0, "peak_reserved_bytes": 9e9}, row | {"failed": "so"}]}
    recipe = {
        "form": "fused",
        "norm": "fused",
        "optimizer": "fused",
        "precision": "fp8",
        "loss": "fused",
        "graph": True,
    }
    rung = {"name": "graph", "recipe": recipe, "step_ms": 3.0, "peak_bytes": 3e9, "peak_allocated_bytes": 1e9}
    ladder = {"plan": {"preset": "mini", "model": model, "batch": 32}, "environment": here, "rungs": [rung]}
    one, two, step, last = plan_cases.cases([over_ranks, steps, ladder])
    assert (one.work.gpus, one.work.parallel, two.work.gpus, two.work.parallel) == (1, "none", 2, "fsdp")
    assert two.work.batch == 64
    assert (step.work.weights, step.work.graph, step.step_ms, step.is_reserved) == ("bf16", True, 30.0, True)
    assert step.work.shape.vocab_size == 50304
    assert (last.peak_bytes, last.is_reserved, last.work.precision) == (3e9, True, "fp8")
    assert last.peak_off(RATES) is not None


def test_a_fitted_case_says_so_and_its_fit_is_close() -> None:
    fitted = {case.name: case for case in CASES if case.fitted}
    assert len(fitted) == len(plan_cases.FITTED) + 1
    for case in fitted.values():
        # The fit is to the device's time; the step's has the host's share of one loop in it.
        assert abs(case.step_off(RATES)) < 0.05


def test_attention_and_narrow_fp32_products_are_as_fast_as_measured_where_they_were() -> None:
    rows = [
        {"operation": "attention", "shape": f"1 x {length} x 2 x {size}", "length": length, "flops_per_second": rate}
        for length, size, rate in (
            (256, 128, 2e14),
            (256, 128, 3e14),
            (256, 128, 2.6e14),
            (256, 64, 1e14),
            (8192, 128, 5e14),
            (1024, 64, 4e14),
        )
    ] + [
        {"operation": "products, fp32", "side": side, "flops_per_second": rate}
        for side, rate in ((768, 40e12), (2048, 50e12))
    ]
    others = [result for result in RESULTS if result.get("part") != "rates"]
    data = plan_rates.rates_data([*others, {"part": "rates", "file": "rates.json", "rows": rows}])
    rates = Rates.read(json.dumps(data))
    assert rates.product("fp32", 768) == pytest.approx(0.8 * rates.product("fp32", 2048), rel=1e-4)
    # The larger model's step stays what it was fitted to.
    (fitted,) = (case for case in CASES if case.name == "scaleup, fused-norm")
    assert fitted.step_off(rates) == pytest.approx(fitted.step_off(RATES), abs=2e-3)
    shape = SHAPES["llama-8b"]
    found = estimate(Work(shape, batch=3, precision="bf16"), rates)
    (line,) = (line for line in found.time.lines if line.name == "attention")
    # Half a square of scores for each of 32 layers and 3 sequences of 8192 tokens, 4096 wide, six times two FLOPs.
    assert line.amount == pytest.approx(32 * 3 * 6 * 4096 * 8192 * 8193 / 5e14)
    assert rates.described("attention")["source"] == "rates.json"
    short = estimate(Work(shape.changed({"context": 256}), batch=3, precision="bf16"), rates)
    (line,) = (line for line in short.time.lines if line.name == "attention")
    assert line.amount == pytest.approx(32 * 3 * 6 * 4096 * 256 * 257 / 2.6e14)
    # Heads of 96 are nearer to those of 128, heads of 64 were measured; where only one size was, it stands for all.
    assert [rates.attend(256, size) for size in (64, 80, 96, 128)] == [1e14, 1e14, 2.6e14, 2.6e14]
    assert [rates.attend(1024, size) for size in (64, 128)] == [4e14, 4e14]


def test_rates_lie_between_their_neighbours_and_end_with_the_last() -> None:
    pairs = [(64.0, 2.0), (256.0, 4.0), (1024.0, 3.0)]
    assert [between(pairs, side) for side in (8, 64, 128, 256, 512, 1024, 9999)] == [2, 2, 3, 4, 3.5, 3, 3]


def test_a_newer_file_of_rates_is_refused() -> None:
    newer = json.loads(plan_rates.FILE.read_text()) | {"schema": 99}
    with pytest.raises(ValueError, match="the rates have schema 99"):
        Rates.read(json.dumps(newer))


def test_the_page_is_made_from_plans_and_results() -> None:
    text = plan_page.PAGE.read_text()
    assert set(re.findall(r"<!-- begin ([\w-]+) -->", text)) == set(plan_page.PARTS)
    assert text == plan_page.page(text), "run make figures"


def test_what_the_page_says_of_meshes_is_what_the_plans_say() -> None:
    plans = {name: plan_page.planned(name) for name in plan_page.MESHES}
    fits = {name for name, plan in plans.items() if plan.fits}
    assert plans.keys() - fits == {"`fsdp`, nothing recomputed", "`fsdp,tp=8`"}
    same = {name for name in fits if plans[name].work.shape.context == 8192}
    by_time = sorted((plans[name].seconds, name) for name in same if "FP8" not in name)
    assert by_time[0][1] == "`fsdp`"
    # Groups of tensor parallelism wait: the larger the longer.
    seconds = [plans[name].seconds for name in ("`fsdp`", "`fsdp,tp=2,sp`", "`fsdp,tp=4,sp`", "`fsdp,tp=8,sp`")]
    assert seconds == sorted(seconds)
    hybrid = plans["`fsdp --shard-over 128` (HSDP)"]
    assert hybrid.seconds == pytest.approx(plans["`fsdp`"].seconds, rel=0.01)
    assert hybrid.peak_bytes > plans["`fsdp`"].peak_bytes
    several = plan_page.planned("`fsdp`", batch=1024, accumulate=2)
    assert not several.fits
    eight = plans["`fsdp`, FP8"]
    halves = ("gather weights, forward", "gather weights, backward")
    sent = [sum(line.sent or 0 for line in plan.sent if line.name in halves) for plan in (eight, plans["`fsdp`"])]
    assert sent[0] == pytest.approx(sent[1] / 2)


def test_the_command_on_the_page_is_the_one_that_is_planned() -> None:
    (options,) = re.findall(r"`fusestep plan (--preset llama-70b .*?)` prints", plan_page.PAGE.read_text(), re.DOTALL)
    given = dict(re.findall(r"--([\w-]+)(?:\s+(?!--)(\S+))?", options))
    work = plan_page.chosen().work
    assert given == {
        "preset": plan_page.MODEL,
        "gpus": str(work.gpus),
        "parallel": work.parallel,
        "batch": str(work.batch),
        "precision": work.precision,
        "activation-checkpointing": "",
        "tokens": f"{plan_page.TOKENS:.2g}".replace("e+12", "e12"),
    }
