"""The n-gram drafter: what it proposes, what it costs a step, what it keeps, and that requests share nothing."""

from __future__ import annotations

from baton.domain.ids import AttemptId, RequestId
from baton.engine.drafts.base import NO_PROPOSAL, Proposal
from baton.engine.drafts.ngram import MAX_GRADED_TOKENS, NGramDrafter

A, B = (AttemptId(RequestId(name), 1) for name in "ab")
REPEATED = [1, 2, 3, 4, 5, 6, 0, 2, 3, 4]


def test_what_followed_the_same_tokens_is_proposed():
    drafter = NGramDrafter()
    drafter.begin(A, REPEATED)
    assert drafter.propose(A, 2) == Proposal((5, 6), grade=3)
    assert drafter.propose(A, 4) == Proposal((5, 6, 0, 2), grade=3)


def test_a_match_of_two_tokens_is_too_short():
    drafter = NGramDrafter()
    drafter.begin(A, [1, 2, 3, 0, 1, 2])
    assert drafter.propose(A, 4) == NO_PROPOSAL


def test_output_is_indexed_too():
    drafter = NGramDrafter()
    drafter.begin(A, [7, 8, 9])
    assert drafter.propose(A, 4) == NO_PROPOSAL
    drafter.accepted(A, [1, 7])
    drafter.accepted(A, [8, 9])
    assert drafter.propose(A, 1).tokens == (1,)


def test_long_matches_are_one_grade():
    drafter = NGramDrafter()
    drafter.begin(A, [*range(50), *range(50)])
    assert drafter.propose(A, 1).grade == MAX_GRADED_TOKENS


def test_requests_share_nothing():
    drafter = NGramDrafter()
    drafter.begin(A, REPEATED)
    drafter.begin(B, [9, 2, 3, 4])
    drafter.propose(A, 4)
    assert drafter.propose(B, 4) == NO_PROPOSAL


def test_a_long_prompt_is_indexed_over_several_steps():
    drafter = NGramDrafter(max_step_tokens=8)
    drafter.begin(A, [*range(10), *range(10)])
    drafter.begin(B, REPEATED)
    proposals = []
    for _ in range(6):
        proposals.append((drafter.propose(A, 1).tokens, drafter.propose(B, 1).tokens))
        assert drafter._num_left >= 0
    assert [bool(a) for a, _ in proposals] == [False, False, True, True, True, True]
    assert [bool(b) for _, b in proposals] == [False, False, False, True, True, True]  # it gets what A leaves


def test_what_is_kept_is_bounded_and_ends_with_the_rows():
    drafter = NGramDrafter(max_indexed_tokens=12)
    drafter.begin(A, REPEATED)
    drafter.begin(B, REPEATED)  # does not fit
    assert drafter.num_tokens == len(REPEATED)
    assert drafter.propose(B, 4) == NO_PROPOSAL
    drafter.accepted(B, [1])
    drafter.accepted(A, [5, 6])
    assert drafter.propose(A, 1).tokens == (0,)
    drafter.accepted(A, [0])  # the bound is reached
    assert drafter.propose(A, 1) == NO_PROPOSAL
    drafter.end(B)
    drafter.end(A)
    drafter.end(A)
    assert (drafter.num_tokens, drafter._indexes, drafter._asked) == (0, {}, set())
