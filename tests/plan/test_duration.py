"""Which of device, host and network a step waits for."""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import pytest

from fusestep.errors import UserError
from fusestep.models.config import Form
from fusestep.plan import SHAPES, Estimate, Rates, Work, estimate, measured_rates

RATES = measured_rates()
FORMS: tuple[Form, ...] = ("fused", "plain")


def lines(plan: Estimate) -> dict[str, float]:
    return {line.name: line.amount for line in plan.time.lines}


def spread(rates: Rates = RATES, **options: Any) -> Estimate:
    settings: dict[str, Any] = {"batch": 8, "precision": "bf16", "parallel": "fsdp", "gpus": 8, "graph": True}
    return estimate(Work(SHAPES["llama-8b"], **{**settings, **options}), rates)


def test_a_small_step_waits_for_the_host_unless_it_is_one_graph() -> None:
    eager = estimate(Work(SHAPES["mini"], batch=4, precision="bf16"))
    graph = estimate(Work(SHAPES["mini"], batch=4, precision="bf16", graph=True))
    assert graph.time.host == 0
    assert graph.seconds == pytest.approx(graph.time.device)
    assert lines(eager)["waiting for the host"] > 0
    assert eager.seconds == pytest.approx(eager.time.host + lines(eager)["optimizer"])
    large = estimate(Work(SHAPES["scaleup"], batch=64, precision="bf16"))
    assert lines(large)["waiting for the host"] == 0


def test_remainders_of_masters_are_less_to_keep_and_to_move() -> None:
    whole, stored = (
        estimate(Work(SHAPES["gpt2"], precision="bf16", weights="bf16", remainders=store), RATES)
        for store in (False, True)
    )
    parameters = whole.work.shape.parameters
    moved = lines(whole)["optimizer"] - lines(stored)["optimizer"]
    assert moved == pytest.approx(2 * parameters / (RATES["copy"] * RATES["adam"]))
    held = [sum(line.amount for line in plan.memory) for plan in (whole, stored)]
    assert held[0] - held[1] == pytest.approx(2 * parameters)
    with pytest.raises(UserError, match="remainders are of masters of bf16 weights, and --weights is fp32"):
        Work(SHAPES["gpt2"], precision="bf16", remainders=True)


def test_what_is_sent_beside_computing_counts_as_far_as_it_is_longer() -> None:
    fast = RATES.with_changes({"link": 1e15, "hop": 1e-12})
    assert spread(fast).seconds == pytest.approx(spread(fast).time.device, rel=1e-3)
    slow = spread(RATES.with_changes({"link": 1e8}))
    sent = {line.name: line.amount for line in slow.sent}
    layers = 32
    # All computing is hidden now; the first gather and the last reduction have nothing beside them in any case.
    ends = (sent["gather weights, forward"] + sent["reduce and scatter gradients"]) / layers
    expected = sum(sent.values()) + ends + lines(slow)["optimizer"]
    assert slow.seconds == pytest.approx(expected, rel=1e-6)


def test_tensor_parallelism_waits_for_all_that_it_sends() -> None:
    plan = spread(parallel="tp=8")
    assert lines(plan)["sent with nothing beside it"] == pytest.approx(sum(line.amount for line in plan.sent))
    assert plan.seconds == pytest.approx(plan.time.device + sum(line.amount for line in plan.sent))


def test_recomputation_takes_a_third_more_products_and_micro_batches_gather_anew() -> None:
    once, again = spread(), spread(activation_checkpointing=True)
    products = "products of blocks"
    assert lines(again)[products] == pytest.approx(8 / 6 * lines(once)[products])
    several = spread(accumulate=3)
    sent, sent_once = ({line.name: line.sent for line in plan.sent} for plan in (several, once))
    assert lines(several)[products] == pytest.approx(3 * lines(once)[products])
    for name, amount in sent_once.items():
        assert amount is not None
        times = 3 if name.startswith("gather") else 1
        assert sent[name] == pytest.approx(times * amount)


def test_narrower_products_on_more_ranks_take_their_own_rate() -> None:
    rates = dataclasses.replace(RATES, products={**RATES.products, "bf16": [(512.0, 2e14), (4096.0, 6e14)]})
    alone, shared = spread(rates, parallel="ddp"), spread(rates, parallel="tp=8", batch=1)
    # The same tokens, each rank with an eighth of every weight: rows of 768, 512 columns, rows of 3584, 1792 columns.
    products = "products of blocks"
    flops = [6 * 8192 * weights for weights in (6144 * 4096, 4096 * 4096, 28672 * 4096, 4096 * 14336)]
    assert lines(alone)[products] == pytest.approx(32 * sum(flops) / 6e14)
    sides = [rates.product("bf16", side) for side in (768, 512, 3584, 1792)]
    assert sides[1] == 2e14 < sides[0] < sides[3] < sides[2] < 6e14
    assert lines(shared)[products] == pytest.approx(32 / 8 * sum(map(operator.truediv, flops, sides)))


def test_a_head_takes_the_rate_of_heads_where_it_was_measured() -> None:
    name = "product of the head, loss"
    known = dataclasses.replace(RATES, products={**RATES.products, "head": [(4096.0, 5e14)]})
    found = spread(known, parallel="ddp")
    product, passes = 6 * 8192 * 4096 * 128256 / 5e14, 8192 * 128256 * 6 / RATES["copy"]
    assert lines(found)[name] == pytest.approx(product + passes)
    (line,) = (line for line in found.time.lines if line.name == name)
    assert line.figures[0] == "products:head"
    # In FP32 a head is a product like others.
    assert known.head("fp32") == "fp32"
    given = RATES.with_changes({}, product=4e14)
    product *= 5 / 4
    assert lines(spread(given, parallel="ddp"))[name] == pytest.approx(product + passes)
    assert given.described("products:head")["source"] == "given on the command line"


def test_current_scaling_casts_weights_after_the_step_and_reads_all_that_it_casts_once_more() -> None:
    delayed, current = (
        lines(spread(parallel="ddp", precision="fp8", recipe=recipe)) for recipe in ("delayed", "current")
    )
    assert delayed["casts to FP8"] < current["casts to FP8"]
    assert delayed["products of blocks"] == current["products of blocks"]
    weights = 32 * (6144 + 4096 + 28672 + 14336) * 4096
    assert "weights cast to FP8" not in delayed
    assert current["weights cast to FP8"] == pytest.approx((4 + 2) * weights / (RATES["copy"] * RATES["casts"]))
    stepped = "optimizer, weights of blocks"
    late, at_once = current[stepped], delayed[f"{stepped} with FP8 copies"]
    assert at_once - late == pytest.approx(2 * weights / (RATES["copy"] * RATES["adam_copies"]))
    outside = "optimizer, outside of blocks"
    assert delayed[outside] == current[outside] > 0


def test_weights_are_cast_in_the_forms_that_have_no_copies_of_them() -> None:
    """The fused form reads copies that the optimizer wrote, and writes gradients in the dtype of the weights."""
    name = "casts and sums of weights' gradients"
    fused, plain = (lines(estimate(Work(SHAPES["gpt2"], precision="bf16", form=form)))[name] for form in FORMS)
    assert fused == 0
    assert plain == pytest.approx(2 * (4 + 2) * SHAPES["gpt2"].parameters / RATES["copy"])
