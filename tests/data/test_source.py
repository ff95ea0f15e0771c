"""The random stream that chooses samples, and the words that open a source."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fusestep.data import TextFiles, TokenFile, open_source, write_token_file
from fusestep.data.source import random_below
from fusestep.errors import UserError

MASK = (1 << 64) - 1


def splitmix64(state: int) -> int:
    """The published generator, on Python's integers."""
    z = (state + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def test_splitmix64_gives_the_published_first_value() -> None:
    assert splitmix64(1234567) == 6457827717110365317


@given(
    bound=st.integers(1, 2**40),
    seed=st.integers(0, 2**63 - 1),
    stream=st.integers(0, 3),
    first=st.integers(0, 2**50),
)
def test_stream_equals_splitmix64_on_unsigned_integers(bound: int, seed: int, stream: int, first: int) -> None:
    start = splitmix64(seed ^ splitmix64(stream + 1))
    expected = [(splitmix64((start + k * 0x9E3779B97F4A7C15) & MASK) >> 1) % bound for k in range(first, first + 5)]
    assert random_below(bound, seed, stream, first, 5).tolist() == expected


@given(cut=st.integers(0, 20), seed=st.integers(0, 1000))
def test_the_kth_number_does_not_depend_on_how_the_stream_is_cut(cut: int, seed: int) -> None:
    whole = random_below(1000, seed, 0, 100, 20)
    assert torch.equal(
        torch.cat((random_below(1000, seed, 0, 100, cut), random_below(1000, seed, 0, 100 + cut, 20 - cut))), whole
    )


def test_seeds_and_streams_differ_and_numbers_spread_evenly() -> None:
    draws = [random_below(10, seed, stream, 0, 20_000) for seed in (0, 1) for stream in (0, 1)]
    for i, draw in enumerate(draws):
        # Five standard deviations of a fair ten-sided die.
        assert (torch.bincount(draw, minlength=10) - 2000).abs().max() < 5 * (20_000 * 0.09) ** 0.5
        for other in draws[i + 1 :]:
            assert 0.05 < (draw == other).double().mean() < 0.15


def test_every_word_opens_its_source(tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("some text")
    ids = tmp_path / "a.tokens"
    write_token_file(ids, range(50), 60)
    assert open_source("synthetic").vocab_size == 96
    assert isinstance(open_source(f"text:{text}"), TextFiles)
    assert isinstance(open_source(f"tokens:{ids}"), TokenFile)
    assert open_source("synthetic", seed=7).describe()["seed"] == 7
    assert open_source(f"text:{text}", seed=7).describe()["seed"] == 7
    assert open_source(f"tokens:{ids}", seed=7).describe()["seed"] == 7


@pytest.mark.parametrize("spec", ["", "text", "text:", "tokens:", "synthetic:x", "csv:a", "Text:a"])
def test_another_word_is_refused_by_name(spec: str) -> None:
    with pytest.raises(UserError, match=r"data is .*; choose synthetic, text:PATH"):
        open_source(spec)


def test_a_path_may_hold_colons(tmp_path: Path) -> None:
    path = tmp_path / "a:b.txt"
    path.write_text("some text")
    assert open_source(f"text:{path}").describe()["bytes"] == 9
