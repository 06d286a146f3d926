"""The log of cache events: deltas, the ring's end, snapshots, and messages of bounded size."""

from __future__ import annotations

import pytest

from baton.domain.ids import PageKey
from baton.kv.events.codec import join_keys, split_delta, split_keys
from baton.kv.events.event import CacheDelta, CacheEvent, ClearedEvent, RemovedEvent, StoredEvent
from baton.kv.events.log import CacheEventLog
from baton.kv.pages import Hold, PagePool
from baton.kv.prefix_cache import PrefixCache
from baton.worker.event_log import SharedEventLog


def key(number: int) -> PageKey:
    return PageKey(number.to_bytes(16, "big"))


def stored(number: int) -> StoredEvent:
    return StoredEvent(key(number), None)


def logged(*events: CacheEvent, max_events: int = 100) -> CacheEventLog:
    log = CacheEventLog(max_events)
    log.extend(events)
    return log


def test_nothing_new_is_no_delta():
    assert logged().since(0) is None
    assert logged(stored(1)).since(1) is None


def test_a_delta_holds_the_last_state_of_each_key():
    log = logged(stored(1), stored(2), RemovedEvent(key(1)), stored(3), RemovedEvent(key(3)), stored(3))
    assert log.since(1) == CacheDelta(1, 6, stored=(key(2), key(3)), removed=(key(1),))


def test_a_clear_resets_and_keeps_what_follows():
    log = logged(stored(1), stored(2), ClearedEvent(), stored(3))
    assert log.since(1) == CacheDelta(1, 4, stored=(key(3),), reset=True)


@pytest.mark.parametrize("cursor", [1, 99], ids=["overwritten", "of another log"])
def test_an_unknown_cursor_gets_a_snapshot_and_its_number(cursor: int):
    log = logged(stored(1), stored(2), stored(3), RemovedEvent(key(2)), max_events=2)
    delta = log.since(cursor)
    assert delta == CacheDelta(0, 4, stored=(key(1), key(3)), reset=True)
    assert log.since(delta.seq) is None, "the cursor stayed behind: endless snapshots"


def test_the_oldest_kept_event_is_still_a_delta():
    log = logged(stored(1), stored(2), stored(3), max_events=2)
    assert log.since(1) == CacheDelta(1, 3, stored=(key(2), key(3)))


@pytest.mark.parametrize("num_keys", [0, 1, 4, 5, 9])
def test_parts_of_a_delta_join_to_it(num_keys: int):
    keys = tuple(map(key, range(num_keys)))
    delta = CacheDelta(3, 9, stored=keys[: num_keys // 2], removed=keys[num_keys // 2 :], reset=True)
    parts = list(split_delta(delta, max_keys=4))
    assert [more for _, more in parts] == [True] * (len(parts) - 1) + [False]
    assert [part.reset for part, _ in parts] == [True] + [False] * (len(parts) - 1)
    assert all(len(part.stored) + len(part.removed) <= 4 for part, _ in parts)
    assert tuple(key for part, _ in parts for key in part.stored) == delta.stored
    assert tuple(key for part, _ in parts for key in part.removed) == delta.removed


def test_joined_keys_of_another_length_are_refused():
    assert split_keys(join_keys([key(1), key(2)])) == (key(1), key(2))
    with pytest.raises(ValueError, match="16 bytes"):
        split_keys(b"x" * 17)


def test_clearing_an_unheld_cache_is_one_event():
    cache, log = PrefixCache(PagePool(4)), SharedEventLog()
    log.attach(cache)
    pages = cache.allocate(3, Hold.LIVE)
    assert pages is not None
    cache.insert(None, [key(1), key(2), key(3)], pages, Hold.LIVE)
    cache.pool.drop(pages, Hold.LIVE)
    cache.clear()
    assert log.since(0) is None, "events of an unfinished turn are visible"
    assert cache.events is not None
    cache.events.flush()
    assert log.since(0) == CacheDelta(0, 4, reset=True)
