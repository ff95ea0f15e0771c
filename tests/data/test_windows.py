"""Windows of a long sequence, and its held-out end."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fusestep.data.windows import draw_windows, part
from fusestep.errors import UserError


@given(length=st.integers(0, 3000), context=st.integers(1, 200))
def test_the_parts_touch_and_never_overlap(length: int, context: int) -> None:
    begin, boundary = part(length, context, held_out=False)
    assert (begin, part(length, context, held_out=True)) == (0, (boundary, length))
    # Whoever has room for two windows has both parts, each of at least one.
    if length >= 2 * (context + 1):
        assert boundary >= context + 1
        assert length - boundary == max(length // 10, context + 1)
    else:
        assert boundary == length


@given(length=st.integers(2, 400), context=st.integers(1, 60), seed=st.integers(0, 2**63 - 1), held_out=st.booleans())
def test_windows_are_consecutive_tokens_inside_their_part(length: int, context: int, seed: int, held_out: bool) -> None:
    tokens = torch.arange(length)
    begin, end = part(length, context, held_out=held_out)
    if end - begin <= context:
        with pytest.raises(UserError, match="needs at least"):
            draw_windows(tokens, seed, 5, 20, context, held_out=held_out, who="test")
        return
    starts, windows = draw_windows(tokens, seed, 5, 20, context, held_out=held_out, who="test")
    assert windows.shape == (20, context + 1)
    # A token's value is its position here.
    assert torch.equal(windows, starts[:, None] + torch.arange(context + 1))
    assert int(windows.min()) >= begin
    assert int(windows.max()) < end


@pytest.mark.parametrize("held_out", [False, True])
def test_every_window_is_reached_the_first_and_the_last_included(held_out: bool) -> None:
    tokens, context = torch.arange(100), 6
    begin, end = part(100, context, held_out=held_out)
    starts, _ = draw_windows(tokens, 0, 0, 3000, context, held_out=held_out, who="test")
    assert set(starts.tolist()) == set(range(begin, end - context))


@pytest.mark.parametrize(("length", "works"), [(0, False), (8, False), (9, True), (10, True), (18, True)])
def test_lengths_about_the_context(length: int, works: bool) -> None:
    """Context 8: a window is 9 tokens."""
    tokens = torch.arange(length)
    if not works:
        with pytest.raises(
            UserError, match=rf"^corpus has {length} tokens and a context of 8 needs at least 9 .*; give"
        ):
            draw_windows(tokens, 0, 0, 1, 8, held_out=False, who="corpus")
        return
    _, windows = draw_windows(tokens, 0, 0, 200, 8, held_out=False, who="corpus")
    assert int(windows.max()) == (length if length < 18 else 9) - 1


def test_a_held_out_part_without_room_is_refused_with_what_it_needs() -> None:
    with pytest.raises(
        UserError, match=r"corpus has 17 tokens and a context of 8 needs at least 18 for a held-out part .*, or train"
    ):
        draw_windows(torch.arange(17), 0, 0, 1, 8, held_out=True, who="corpus")


def test_no_samples_are_an_empty_batch() -> None:
    starts, windows = draw_windows(torch.arange(50), 0, 0, 0, 8, held_out=False, who="corpus")
    assert (starts.shape, windows.shape) == ((0,), (0, 9))
