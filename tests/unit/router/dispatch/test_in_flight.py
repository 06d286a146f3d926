"""Announced loads plus recent placements."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

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


def test_several_workers_are_adjusted_as_each_alone():
    in_flight = InFlight(window_s=1.0)
    in_flight.add(attempt("old"), PAIR, 7, now=0.0)
    in_flight.add(attempt("a"), PAIR, 10, now=0.9)
    workers = [PAIR.prefill, PAIR.decode, prefill(1)]
    adjusted = in_flight.adjust_all(workers, now=1.5)
    assert adjusted == [in_flight.adjust(worker, now=1.5) for worker in workers]
    assert adjusted[0].load.waiting_tokens == 5 + 10


def test_a_burst_never_makes_pages_negative():
    in_flight = InFlight(window_s=1.0)
    for number in range(20):
        in_flight.add(attempt(str(number)), PAIR, 40, now=0.0)
    assert in_flight.adjust(PAIR.decode, now=0.0).load.available_pages == 0


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from([None, 0, 1, 2]), st.integers(1, 40)), max_size=40))
def test_totals_are_the_sum_of_what_is_placed(steps: list[tuple[int, int | None, int]]):
    """Attempts placed, placed again and removed, on pairs and on workers that prefill for themselves."""
    pairs = [PAIR, Pair(prefill(1), decode(0)), Pair(decode(0), decode(0))]
    in_flight, placed = InFlight(window_s=1.0), dict[int, tuple[Pair, int]]()
    for name, pair, num_tokens in steps:
        if pair is None:
            in_flight.remove(attempt(str(name)))
            placed.pop(name, None)
        else:
            in_flight.add(attempt(str(name)), pairs[pair], num_tokens, now=0.0)
            placed[name] = pairs[pair], num_tokens
    for record in (prefill(0, waiting_tokens=5), prefill(1), decode(0, running_rows=1)):
        prompts = [num for pair, num in placed.values() if pair.prefill.incarnation == record.incarnation]
        rows = [num for pair, num in placed.values() if pair.decode.incarnation == record.incarnation]
        num_pages = sum(-(-(num + 1) // record.page_size) for num in rows)
        expected = record.with_load(record.load.with_work(len(prompts), sum(prompts), len(rows), num_pages))
        assert in_flight.adjust(record, now=0.5) == (expected if prompts or rows else record)
    assert in_flight.adjust(decode(0), now=2.0) == decode(0), "all are announced by now"
