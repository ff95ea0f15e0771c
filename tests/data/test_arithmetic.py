"""Arithmetic sequences."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusestep.data import arithmetic_sequences, strides
from fusestep.errors import UserError


def test_sequences_follow_the_rule_and_targets_are_one_token_later() -> None:
    inputs, targets = arithmetic_sequences(seed=3).batch(10, 200, 31)
    assert inputs.shape == targets.shape == (200, 31)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    steps = (targets - inputs) % 96
    assert (steps == steps[:, :1]).all()
    assert set(steps[:, 0].tolist()) == {1, 2, 3, 4, 5, 6}
    assert int(inputs.min()) >= 0
    assert int(targets.max()) < 96


@settings(max_examples=30)
@given(vocab_size=st.integers(8, 200), seed=st.integers(0, 2**63 - 1))
def test_held_out_sequences_never_occur_in_training(vocab_size: int, seed: int) -> None:
    source = arithmetic_sequences(vocab_size, seed=seed)
    parts = []
    for held_out in (False, True):
        inputs, targets = source.batch(0, 300, 2, held_out=held_out)
        parts.append({tuple(row) for row in torch.cat((inputs, targets[:, -1:]), 1).tolist()})
        assert parts[-1]
    assert not parts[0] & parts[1]


@pytest.mark.parametrize("vocab_size", [8, 9, 96])
def test_the_parts_are_all_sequences_and_every_stride_is_held_out(vocab_size: int) -> None:
    source = arithmetic_sequences(vocab_size)
    counts = []
    for held_out in (False, True):
        inputs, _ = source.batch(0, 100 * vocab_size, 2, held_out=held_out)
        counts.append(len(set(map(tuple, inputs.tolist()))))
        assert set(((inputs[:, 1] - inputs[:, 0]) % vocab_size).tolist()) == {1, 2, 3, 4, 5, 6}
    assert sum(counts) == 6 * vocab_size
    assert 6 * vocab_size // 12 <= counts[1] <= 6 * vocab_size // 8 + 6


def test_the_split_is_the_same_for_every_seed() -> None:
    held_out = [
        set(map(tuple, arithmetic_sequences(seed=s).batch(0, 3000, 2, held_out=True)[0].tolist())) for s in (0, 1)
    ]
    assert held_out[0] == held_out[1]


@given(first=st.integers(0, 10**9), cut=st.integers(0, 12), seed=st.integers(0, 2**63 - 1), held_out=st.booleans())
def test_sample_k_is_the_same_however_it_is_asked_for(first: int, cut: int, seed: int, held_out: bool) -> None:
    source, again = arithmetic_sequences(seed=seed), arithmetic_sequences(seed=seed)
    whole = source.batch(first, 12, 5, held_out=held_out)
    parts = [again.batch(first, cut, 5, held_out=held_out), again.batch(first + cut, 12 - cut, 5, held_out=held_out)]
    for i in range(2):
        assert torch.equal(torch.cat([part[i] for part in parts]), whole[i])


def test_seeds_give_other_streams() -> None:
    assert not torch.equal(
        arithmetic_sequences(seed=0).batch(0, 8, 4)[0], arithmetic_sequences(seed=1).batch(0, 8, 4)[0]
    )


def test_too_small_a_vocabulary_and_impossible_batches_are_refused() -> None:
    with pytest.raises(UserError, match="vocab_size is 7; give at least 8"):
        arithmetic_sequences(7)
    for first, count, context in ((-1, 1, 1), (0, -1, 1), (0, 1, 0)):
        with pytest.raises(UserError, match="give counts of at least 0"):
            arithmetic_sequences().batch(first, count, context)


def test_ids_are_written_as_numbers() -> None:
    source = arithmetic_sequences()
    assert source.encode(" 3, 5 95") == [3, 5, 95]
    assert source.decode([3, 5, 95]) == "3 5 95"
    for bad in ("96", "-1", "hello", "3.5", "²", "9" * 5000):
        with pytest.raises(UserError, match="is not a token id"):
            source.encode(bad)


def test_strides_are_differences_within_the_vocabulary() -> None:
    assert strides([94, 95, 1, 0], 96) == [1, 2, 95]
    assert strides([5], 96) == []
