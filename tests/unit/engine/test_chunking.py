"""Cutting prompts into chunks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.chunking import cut
from tests.tiny_workers import REPEATABLE_SETTINGS


@pytest.mark.parametrize(
    ("start", "end", "budget_tokens", "expected"),
    [
        (0, 5, 8, 5),  # all of it
        (0, 5, 5, 5),
        (0, 9, 5, 4),  # up to the last page edge within the budget
        (4, 9, 3, 2),
        (4, 9, 1, 0),  # no edge within the budget
        (3, 9, 1, 1),  # the rest of a page that is begun
        (0, 9, 0, 0),
    ],
)
def test_cut_ends_on_a_page_edge_or_at_the_end(start: int, end: int, budget_tokens: int, expected: int):
    assert cut(start, end, budget_tokens, page_size=2) == expected


@REPEATABLE_SETTINGS
@given(st.integers(0, 40), st.integers(1, 40), st.integers(0, 20), st.integers(1, 5))
def test_a_cut_is_the_longest_that_may_be(start: int, length: int, budget_tokens: int, page_size: int):
    end = start + length
    num_tokens = cut(start, end, budget_tokens, page_size)
    may_be = [n for n in range(min(budget_tokens, length) + 1) if n in (0, length) or (start + n) % page_size == 0]
    assert num_tokens == max(may_be)


@REPEATABLE_SETTINGS
@given(st.integers(1, 40), st.integers(1, 5), st.integers(0, 9))
def test_a_budget_of_one_page_always_reaches_the_end(end: int, page_size: int, more: int):
    start = num_steps = 0
    while start < end:
        start += cut(start, end, page_size + more, page_size)
        num_steps += 1
        assert num_steps <= end
    assert start == end
