"""Requests that are about to be sent to prefill."""

from __future__ import annotations

from baton.domain.ids import RequestId
from baton.services.router.dispatch.prefill.coming import MAX_AGE_S, ComingPrompts

A, B = RequestId("a"), RequestId("b")
OF_A, OF_B = [1, 2], [1, 2]


def test_a_request_counts_until_prefill_has_it():
    coming = ComingPrompts()
    coming.add(A, OF_A, 1.0)
    coming.add(B, OF_B, 1.0)
    assert coming.count(1.0) == 2
    coming.discard(A)
    coming.discard(A)
    assert coming.count(1.0) == 1


def test_a_request_that_waits_for_room_is_not_about_to_be_sent():
    coming = ComingPrompts()
    coming.add(A, OF_A, 1.0)
    coming.add(B, OF_B, 1.0 + MAX_AGE_S)
    assert coming.count(1.0 + 1.5 * MAX_AGE_S) == 1
    assert coming.count(1.0 + 3 * MAX_AGE_S) == 0


def test_choices_of_one_prompt_count_once():
    coming, prompt = ComingPrompts(), OF_A
    coming.add(A, prompt, 1.0)
    coming.add(B, prompt, 1.0)
    assert coming.count(1.0) == 1
    coming.discard(B)
    assert coming.count(1.0) == 1
    coming.discard(A)
    assert coming.count(1.0) == 0
    coming.add(B, prompt, 1.0)
    assert coming.count(1.0) == 1
