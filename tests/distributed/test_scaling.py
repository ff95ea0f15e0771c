"""Rows of a ladder over ranks."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import harness
from fusestep.cli.scaling import page
from fusestep.distributed.launch import join
from fusestep.distributed.mesh import Parallel
from fusestep.errors import UserError
from fusestep.ladder import scaling
from fusestep.models import GPTConfig
from harness import module_of

CONFIG = GPTConfig(vocab_size=96, width=16, heads=2, layers=1, ffn_width=24, context=8)


def of_runs() -> ModuleType:
    """What test_train.py has to run several ranks."""
    return module_of(Path(__file__).with_name("test_train.py"))


def measure(rank: int, port: int, folder: Path) -> list[Any]:
    worlds = of_runs().launched(port)
    scaling.ROUNDS = 2
    found = []
    for asked, batch in (("ddp", 3), ("fsdp", 4), ("tp=2", 2)):
        next(worlds)
        with join(harness.device_type, 30.0) as world:
            rows = scaling.scaling(world, Parallel.of(asked), asked, CONFIG, batch=batch, steps=1)
            if rank == 0:
                rows.save(folder / asked)
            found.append((rows.as_dict(), page(rows)))
    return found


@pytest.mark.usefixtures("ranks_device")
def test_rows_of_one_and_two_ranks_begin_with_the_same_loss_and_add_up(tmp_path: Path) -> None:
    (ddp, fsdp, tp), other = of_runs().launch(measure, tmp_path, timeout=90)
    assert [ddp[0]["rows"], fsdp[0]["rows"], tp[0]["rows"]] == [one[0]["rows"] for one in other]
    # Three sequences cannot be shared by two.
    assert [(row["kind"], row["ranks"], row["batch"]) for row in ddp[0]["rows"]] == [
        ("strong", 1, 3),
        ("weak", 1, 3),
        ("weak", 2, 6),
    ]
    assert ddp[0]["left_out"] == ("strong, 2 ranks: 2 of them cannot share 3 sequences evenly",)
    assert "left out: strong, 2 ranks" in ddp[1]
    rows = {(row["kind"], row["ranks"]): row for row in fsdp[0]["rows"]}
    assert set(rows) == {("strong", 1), ("strong", 2), ("weak", 1), ("weak", 2)}
    for row in rows.values():
        assert row["failure"] is None
        assert row["tokens_per_second"] == pytest.approx(row["batch"] * 8 / row["ms"] * 1e3)
        assert row["low"] <= row["ms"] <= row["high"]
        assert 0 <= row["communication"] <= 1
    one, two = rows["strong", 1], rows["strong", 2]
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-5)
    assert two["efficiency"] == pytest.approx(one["ms"] / (2 * two["ms"]))
    assert rows["weak", 2]["efficiency"] == pytest.approx(rows["weak", 1]["ms"] / rows["weak", 2]["ms"])
    # The fewest ranks of a tensor group are the group.
    assert [(row["ranks"], row["efficiency"], row["communication"]) for row in tp[0]["rows"]] == [(2, 1.0, None)] * 2
    kept = json.loads((tmp_path / "fsdp" / "scaling.json").read_text())
    assert kept["schema"] == scaling.SCHEMA
    assert kept["rows"] == list(fsdp[0]["rows"])
    with (tmp_path / "fsdp" / "scaling.csv").open() as file:
        assert [row["ranks"] for row in csv.DictReader(file)] == ["1", "2", "1", "2"]


def test_ranks_are_doubled_up_to_all_of_them() -> None:
    assert scaling.rank_counts(1, 1) == [1]
    assert scaling.rank_counts(6, 1) == [1, 2, 4, 6]
    assert scaling.rank_counts(8, 2) == [2, 4, 8]


def test_what_cannot_be_measured_is_said_first() -> None:
    with pytest.raises(UserError, match="--parallel says nothing of them"):
        scaling.check(Parallel.of("none"), 1, 1)
    with pytest.raises(UserError, match="--batch is -1"):
        scaling.check(Parallel.of("ddp"), -1, 1)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("ddp,fsdp", "'fsdp' cannot be"),
        ("tp=0", "'tp=0' cannot be"),
        ("sp", "sp goes with tensor parallelism"),
        ("", "'' cannot be"),
        ("none,ddp", "'none' cannot be"),
    ],
)
def test_words_of_parallel_that_cannot_be_are_refused(text: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        Parallel.of(text)


def test_ranks_that_make_no_whole_groups_are_refused() -> None:
    assert Parallel.of("fsdp,tp=2").data_ranks(8) == 4
    with pytest.raises(UserError, match=r"groups of 4 ranks .* there are 6; start a multiple of 4 processes, or pass"):
        Parallel.of("fsdp,tp=4").data_ranks(6)
    with pytest.raises(UserError, match="add ddp or fsdp for what the 2 groups do, as in --parallel fsdp,tp=2"):
        Parallel.of("tp=2").data_ranks(4)
