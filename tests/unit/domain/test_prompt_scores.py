"""Packing, cutting and joining scores loses nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.domain.scores.prompt_scores import PromptScores, ScoredToken, join_scores, pack_scores

FLOAT32 = st.floats(width=32, allow_nan=False)
UINT32 = st.integers(0, 2**32 - 1)


@st.composite
def scored_tokens(draw: st.DrawFn) -> list[ScoredToken]:
    k = draw(st.integers(0, 4))
    top = st.lists(st.tuples(UINT32, FLOAT32), min_size=k, max_size=k).map(tuple)
    return draw(st.lists(st.builds(ScoredToken, FLOAT32, UINT32, top), min_size=1, max_size=12))


@given(scored_tokens(), st.integers(1, 9), st.integers(0, 60))
def test_parts_join_to_the_whole(tokens: list[ScoredToken], first: int, max_numbers: int):
    whole = pack_scores(first, tokens)
    parts = whole.split(max_numbers)
    assert join_scores(parts) == whole
    assert [part.first for part in parts[1:]] == [part.end for part in parts[:-1]]
    assert all(len(part) == 1 or 2 * len(part) * (whole.k + 1) <= max_numbers for part in parts)
    assert whole.tokens(99) == tokens
    assert whole.tokens(1) == [ScoredToken(one.logprob, one.rank, one.top[:1]) for one in tokens]


@pytest.mark.parametrize(
    ("first", "k", "sizes"), [(0, 0, (4, 4, 0, 0)), (1, 1, (4, 4, 4, 0)), (1, 0, (4, 8, 0, 0)), (1, 0, (3, 3, 0, 0))]
)
def test_numbers_that_do_not_fit_together_are_refused(first: int, k: int, sizes: tuple[int, ...]):
    with pytest.raises(ValueError, match="do not fit"):
        PromptScores(first, k, *map(bytes, sizes))
