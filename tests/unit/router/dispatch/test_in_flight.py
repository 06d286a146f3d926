"""Announced loads plus recent placements."""

from __future__ import annotations

from baton.domain.ids import AttemptId, RequestId
from baton.services.router.dispatch.in_flight import InFlight
from baton.services.router.dispatch.placement.pair import Pair
from tests.unit.router.dispatch.test_placement import decode, prefill

PAIR = Pair(prefill(0, waiting_tokens=5), decode(0, running_rows=1))


def attempt(name: str) -> AttemptId:
    return AttemptId(RequestId(name), 1)


def test_a_placed_attempt_counts_on_both_its_workers_only():
    in_flight = InFlight(window_s=1.0)
    in_flight.add(attempt("a"), PAIR, 10, now=0.0)
    in_flight.add(attempt("b"), PAIR, 3, now=0.0)
    busy_prefill = in_flight.adjust(PAIR.prefill, now=0.5).load
    assert (busy_prefill.waiting_requests, busy_prefill.waiting_tokens) == (2, 18)
    busy_decode = in_flight.adjust(PAIR.decode, now=0.5).load
    assert (busy_decode.running_rows, busy_decode.available_pages) == (3, 50 - 3 - 1)
    assert in_flight.adjust(prefill(1), now=0.5) == prefill(1)
    assert in_flight.adjust(decode(1), now=0.5) == decode(1)


def test_cached_tokens_are_no_load_at_prefill_but_take_pages_at_decode():
    in_flight = InFlight(window_s=1.0)
    in_flight.add(attempt("a"), PAIR, 10, now=0.0, num_cached=8)
    assert in_flight.adjust(PAIR.prefill, now=0.5).load.waiting_tokens == 5 + 2
    assert in_flight.adjust(PAIR.decode, now=0.5).load.available_pages == 50 - 3


def test_an_attempt_counts_until_it_ends_or_is_announced():
    in_flight = InFlight(window_s=1.0)
    in_flight.add(attempt("a"), PAIR, 10, now=0.0)
    in_flight.add(attempt("b"), PAIR, 20, now=0.6)
    in_flight.remove(attempt("b"))
    in_flight.remove(attempt("b"))
    assert in_flight.adjust(PAIR.prefill, now=1.0).load.waiting_tokens == 15
    assert in_flight.adjust(PAIR.prefill, now=1.1) == PAIR.prefill


def test_placing_an_attempt_again_moves_it():
    in_flight = InFlight(window_s=1.0)
    in_flight.add(attempt("a"), PAIR, 10, now=0.0)
    in_flight.add(attempt("a"), Pair(PAIR.prefill, decode(1)), 10, now=0.9)
    assert in_flight.adjust(PAIR.decode, now=1.0) == PAIR.decode
    assert in_flight.adjust(decode(1), now=1.5).load.running_rows == 1


def test_a_burst_never_makes_pages_negative():
    in_flight = InFlight(window_s=1.0)
    for number in range(20):
        in_flight.add(attempt(str(number)), PAIR, 40, now=0.0)
    assert in_flight.adjust(PAIR.decode, now=0.0).load.available_pages == 0
