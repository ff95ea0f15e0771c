"""Which of device, host and network a step waits for."""

from __future__ import annotations

from typing import Any

import pytest

from fusestep.errors import UserError
from fusestep.plan import SHAPES, Estimate, Rates, Work, estimate, measured_rates

RATES = measured_rates()


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


def test_narrower_products_on_more_ranks_are_slower_for_each_flop() -> None:
    alone, shared = spread(parallel="ddp"), spread(parallel="tp=8", batch=1)
    # The same tokens, each rank with an eighth of every weight.
    products = "products of blocks"
    assert lines(shared)[products] > lines(alone)[products] / 8
