"""The index of cached pages, and the reader that fills it from cache events."""

from __future__ import annotations

from typing import Any

import pytest

from baton.domain.ids import Incarnation, PageKey
from baton.kv.events.codec import join_keys
from baton.rpc.gen import worker_pb2
from baton.services.router.dispatch.cache_index.index import EXPECTED_S, MAX_OLD_BITS, CacheIndex
from baton.services.router.dispatch.cache_index.reader import CacheEventReader
from baton.telemetry.metrics import INDEX_GAP_TOTAL

A, B = Incarnation(1), Incarnation(2)


def keys(*numbers: int) -> list[PageKey]:
    return [PageKey(number.to_bytes(16, "big")) for number in numbers]


def index_of(*numbers: int, max_keys: int = 100) -> CacheIndex:
    index = CacheIndex(max_keys)
    index.clear(A)
    index.update(A, keys(*numbers), ())
    return index


def test_leading_confirmed_pages_are_hits_of_their_worker_only():
    index = index_of(1, 2, 4)
    assert index.num_hit_pages(A, keys(1, 2, 3, 4), 0.0) == 2
    assert index.num_hit_pages(B, keys(1), 0.0) == 0


def test_a_removed_page_is_no_hit_even_if_it_was_expected():
    index = index_of(1, 2)
    index.expect(A, keys(1, 2), 0.0)
    index.update(A, (), keys(2))
    assert index.num_hit_pages(A, keys(1, 2), 0.0) == 1


def test_expected_pages_are_hits_for_ten_seconds():
    index = index_of(1)
    index.expect(A, keys(2, 3), 5.0)
    assert index.num_hit_pages(A, keys(1, 2, 3), 5.0 + EXPECTED_S - 0.1) == 3
    assert index.num_hit_pages(A, keys(1, 2, 3), 5.0 + EXPECTED_S) == 1
    assert index.confirmed(A) == {*keys(1)}, "an expectation was taken for an event"


def test_the_least_recently_used_keys_are_dropped():
    index = index_of(1, 2, 3, max_keys=3)
    index.num_hit_pages(A, keys(1), 0.0)
    index.update(A, keys(4), ())
    assert index.confirmed(A) == {*keys(1, 2, 4)}


def test_the_roots_of_a_chain_are_the_last_to_be_dropped():
    """Without its root the rest of a chain would be no hit, and only take room."""
    index = index_of(max_keys=3)
    index.update(A, keys(1, 2, 3, 4, 5), ())
    assert index.num_hit_pages(A, keys(1, 2, 3, 4, 5), 0.0) == 3


def test_expectations_are_bounded():
    index = index_of(max_keys=2)
    index.expect(A, keys(1, 2, 3), 0.0)
    assert [index.num_hit_pages(A, [key], 0.0) for key in keys(1, 2, 3)] == [0, 1, 1]


def test_a_forgotten_worker_has_nothing_and_leaves_others_alone():
    index = index_of(1, 2)
    index.clear(B)
    index.update(B, keys(2, 3), ())
    index.forget(A)
    assert index.confirmed(A) == frozenset()
    assert index.confirmed(B) == {*keys(2, 3)}


def test_old_bits_are_swept_with_their_keys():
    index = index_of(1)
    for number in range(2, 3 * MAX_OLD_BITS):
        index.clear(B)
        index.update(B, keys(number), ())
    assert index.confirmed(A) == {*keys(1)}
    assert index.confirmed(B) == {*keys(number)}
    assert len(index) <= MAX_OLD_BITS + 2, "keys of cleared workers pile up"


def delta(after: int, seq: int, *stored: int, **fields: Any) -> worker_pb2.CacheDelta:
    return worker_pb2.CacheDelta(after_seq=after, seq=seq, stored=join_keys(keys(*stored)), **fields)


def gaps() -> float:
    return float(INDEX_GAP_TOTAL._value.get())


def reading() -> tuple[CacheIndex, CacheEventReader]:
    index = CacheIndex()
    reader = CacheEventReader(A, index)
    assert reader.begin().from_seq == 0
    return index, reader


def test_deltas_in_order_are_no_gap():
    index, reader = reading()
    before = gaps()
    assert reader.apply(delta(0, 2, 1, 2))
    assert reader.apply(delta(2, 3, removed=join_keys(keys(1))))
    assert reader.apply(delta(3, 5, 9, reset=True))  # the cache was cleared
    assert index.confirmed(A) == {*keys(9)}
    assert (reader.begin().from_seq, gaps() - before) == (5, 0)


def test_a_first_snapshot_is_no_gap_and_a_later_one_is():
    index, reader = reading()
    before = gaps()
    assert reader.apply(delta(0, 70, 1, reset=True))
    assert gaps() == before
    assert reader.apply(delta(0, 900, 2, reset=True))
    assert index.confirmed(A) == {*keys(2)}
    assert (reader.seq, gaps() - before) == (900, 1)


def test_missing_numbers_are_a_gap_and_the_stream_begins_again():
    index, reader = reading()
    before = gaps()
    assert reader.apply(delta(0, 2, 1, 2))
    assert not reader.apply(delta(3, 4, 3)), "a delta for another position was applied"
    assert gaps() - before == 1
    assert reader.begin().from_seq == 0
    assert index.confirmed(A) == frozenset()


def test_a_delta_whose_end_is_lost_changes_nothing():
    index, reader = reading()
    assert reader.apply(delta(0, 2, 1, 2))
    assert reader.apply(delta(0, 9, 5, reset=True, more=True))
    assert index.confirmed(A) == {*keys(1, 2)}
    assert reader.begin().from_seq == 2
    assert reader.apply(delta(2, 3, 3))
    assert index.confirmed(A) == {*keys(1, 2, 3)}


@pytest.mark.parametrize("cut", [worker_pb2.CacheDelta(stored=b"short"), worker_pb2.CacheDelta(removed=b"short")])
def test_cut_keys_begin_the_stream_again(cut: worker_pb2.CacheDelta):
    _, reader = reading()
    assert reader.apply(delta(0, 2, 1))
    cut.after_seq, cut.seq = 2, 3
    assert not reader.apply(cut)
    assert reader.begin().from_seq == 0


def test_a_delta_without_end_is_given_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("baton.services.router.dispatch.cache_index.reader.MAX_DELTA_BYTES", 100)
    _, reader = reading()
    taken = [reader.apply(delta(0, 9, number, more=True)) for number in range(6)]
    assert taken[0]
    assert not taken[-1], "a worker fills the router's memory"
