"""The load notices wrong tokens and errors, and counts only calls that began after a fault."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from tests.compose.load import ExactLoad, Expected
from tests.stream_client import ResumableCall

EXPECTED = [Expected((1, 2), (3, 4)), Expected((5,), (6, 7))]


def answers(call: ResumableCall) -> Sequence[int | None]:
    """The right tokens, and the end of the stream behind them."""
    return {(1, 2): [3, 4, None], (5,): [6, 7, None]}[tuple(call.body["prompt"])]


def test_right_answers_are_counted():
    load = ExactLoad("http://nowhere", EXPECTED, num_clients=2, ask=answers)
    with load.running():
        load.wait_for_calls(5.0, each=3)
    assert load.problems == []
    assert load.num_right >= 6


@pytest.mark.parametrize("wrong", [[3], [3, 5, None], [3, 4, 4, None], []])
def test_a_wrong_a_missing_or_a_further_token_is_a_problem(wrong):
    load = ExactLoad("http://nowhere", EXPECTED[:1], num_clients=1, ask=lambda call: wrong)
    with load.running():
        load.wait_for_calls(5.0)
    assert load.num_right == 0
    assert "instead of (3, 4)" in load.problems[0]


def test_an_error_of_a_client_is_a_problem():
    def fails(call: ResumableCall) -> Sequence[int | None]:
        raise AssertionError("502 bad gateway")

    load = ExactLoad("http://nowhere", EXPECTED, num_clients=1, ask=fails)
    with load.running():
        load.wait_for_calls(5.0)
    assert load.problems == ["client 0: AssertionError: 502 bad gateway"]


def test_a_call_that_ran_at_the_fault_does_not_count():
    began, go_on, free = threading.Semaphore(0), threading.Semaphore(0), threading.Event()

    def ask(call: ResumableCall) -> Sequence[int | None]:
        began.release()
        assert free.is_set() or go_on.acquire(timeout=10)
        return answers(call)

    load = ExactLoad("http://nowhere", EXPECTED, num_clients=1, ask=ask)
    with load.running():
        assert began.acquire(timeout=10)
        waiter = threading.Thread(target=load.wait_for_calls, args=(10.0, 1))
        waiter.start()
        while not load._begun:  # the wait has begun
            waiter.join(0.001)
        go_on.release()
        assert began.acquire(timeout=10)
        waiter.join(0.05)
        assert waiter.is_alive(), "only the call of before has ended"
        free.set()
        go_on.release()
        waiter.join(10)
        assert not waiter.is_alive()
    assert load.problems == []


def test_a_wait_in_vain_says_which_clients_are_stuck():
    stuck = threading.Event()

    def ask(call: ResumableCall) -> Sequence[int | None]:
        stuck.wait(10)
        return answers(call)

    load = ExactLoad("http://nowhere", EXPECTED, num_clients=1, ask=ask)
    with load.running():
        try:
            with pytest.raises(TimeoutError, match="0: -1"):
                load.wait_for_calls(0.05)
        finally:
            stuck.set()
