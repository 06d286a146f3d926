"""Ends of sequences, and stop tokens that are banned by `min_tokens`."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.domain.ids import AttemptId, RequestId, first_attempt, new_incarnation
from baton.domain.request import FinishReason, StopParams, banned_tokens, finish_reason
from tests.tiny_workers import REPEATABLE_SETTINGS, engine_request

STOP = StopParams(max_tokens=3, min_tokens=1, stop_token_ids=frozenset({7}))


@pytest.mark.parametrize(
    ("token", "num_output_tokens", "expected"),
    [
        (7, 1, None),  # too early: min_tokens come first
        (7, 2, FinishReason.STOP),
        (5, 2, None),
        (5, 3, FinishReason.LENGTH),
        (7, 3, FinishReason.STOP),  # a stop token as the last allowed one is still a stop
        (5, 4, FinishReason.LENGTH),
    ],
)
def test_finish_reason_by_stop_token_and_length(token: int, num_output_tokens: int, expected: FinishReason | None):
    assert finish_reason(STOP, token, num_output_tokens) is expected


def test_stop_tokens_are_banned_until_min_tokens():
    assert [banned_tokens(STOP, num_outputs) for num_outputs in range(3)] == [{7}, set(), set()]


@REPEATABLE_SETTINGS
@given(st.integers(1, 6), st.integers(0, 6), st.integers(0, 7))
def test_a_stop_token_either_stops_or_was_banned(max_tokens: int, min_tokens: int, num_outputs: int):
    stop = StopParams(max_tokens, min_tokens, frozenset({7}))
    stops = finish_reason(stop, 7, num_outputs + 1) is FinishReason.STOP
    assert stops != (7 in banned_tokens(stop, num_outputs))


def test_tokens_of_earlier_attempts_count():
    request = engine_request("r", [1, 0, 1], attempt=2, emitted=[1, 1])
    assert (request.num_emitted, len(request.tokens)) == (2, 5)


def test_attempts_are_ordered_by_epoch_then_owner_tag_then_number():
    ids = [AttemptId(RequestId("r"), *key) for key in [(1, 9), (2, 9), (1001, 3), (1003, 3), (1001, 4), (2001, 0)]]
    assert sorted(reversed(ids), key=lambda id: id.order) == ids
    assert [id.ballot for id in ids] == [(1, 9), (1, 9), (2, 3), (2, 3), (2, 4), (3, 0)]
    assert (str(ids[1]), ids[2].next()) == ("r/2", AttemptId(RequestId("r"), 1002, 3))


def test_the_last_attempt_of_an_epoch_is_below_the_next_epoch():
    last = AttemptId(RequestId("r"), first_attempt(3) - 1, owner_tag=2**32 - 1)
    assert (last.epoch, last.order < AttemptId(RequestId("r"), first_attempt(3)).order) == (2, True)


def test_incarnations_are_odd_63_bit_numbers_and_differ():
    drawn = {new_incarnation() for _ in range(8)}
    assert len(drawn) == 8
    assert all(0 < one < 2**63 and one % 2 for one in drawn)
