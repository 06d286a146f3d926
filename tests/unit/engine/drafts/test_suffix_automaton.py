"""The automaton's longest match is that of the definition, and what it proposes follows an earlier occurrence."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.drafts.suffix_automaton import SuffixAutomaton


def longest_repeated_suffix(tokens: Sequence[int]) -> int:
    """Length of the longest suffix that also ends earlier: the definition."""
    num_tokens = len(tokens)
    for length in range(num_tokens - 1, 0, -1):
        suffix = tokens[num_tokens - length :]
        if any(tokens[at : at + length] == suffix for at in range(num_tokens - length)):
            return length
    return 0


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 2), max_size=40) | st.lists(st.integers(0, 9), max_size=40))
def test_the_longest_match_is_found_after_every_token(tokens: list[int]):
    automaton = SuffixAutomaton()
    for count, token in enumerate(tokens, start=1):
        automaton.append(token)
        length, end = automaton.match_length, automaton.match_end
        assert length == longest_repeated_suffix(tokens[:count])
        assert len(automaton) == count
        if length:
            assert end < count
            assert tokens[end - length : end] == tokens[count - length : count]


def of(tokens: Sequence[int]) -> SuffixAutomaton:
    automaton = SuffixAutomaton()
    for token in tokens:
        automaton.append(token)
    return automaton


def test_the_latest_occurrence_is_continued():
    automaton = of([1, 2, 3, 7, 0, 1, 2, 3, 8, 0, 5, 1, 2, 3])
    assert automaton.match_length == 3
    assert automaton.continuation(2) == (8, 0)


@pytest.mark.parametrize(("tokens", "expected"), [([4, 4, 4, 4], (4,) * 5), ([1, 2, 1, 2, 1], (2, 1, 2, 1, 2))])
def test_a_period_goes_on_behind_the_end(tokens: list[int], expected: tuple[int, ...]):
    assert of(tokens).continuation(5) == expected


def test_an_automaton_has_at_most_two_states_a_token():
    automaton = of([(n * n // 7) % 11 for n in range(2000)])
    assert len(automaton._length) <= 2 * 2000
