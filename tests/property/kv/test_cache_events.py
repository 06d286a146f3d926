"""Readers of cache events see the worker's cache, whatever happened to it and however slowly they read."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from baton.domain.ids import PageId, PageKey
from baton.kv.events.event import CacheDelta
from baton.kv.events.log import CacheEventLog
from baton.kv.events.source import EventSource
from baton.kv.page_table import PageTable
from baton.kv.pages import Hold, PagePool
from baton.kv.prefix_cache import PrefixCache
from tests.tiny_workers import PAGE_SIZE

NUM_PAGES, NUM_STEPS, RING = 8, 150, 6


class CachingWorker:
    """A cache under random requests, with a ring so short that slow readers need snapshots."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.cache = PrefixCache(PagePool(NUM_PAGES))
        self.log = CacheEventLog(RING)
        self.cache.events = EventSource(self.log.extend)
        self.open: list[PageTable] = []

    @property
    def cached(self) -> set[PageKey]:
        keys = (self.cache.key_of(page) for page in map(PageId, range(NUM_PAGES)))
        return {key for key in keys if key is not None}

    def request(self) -> None:
        tokens = self.random.choices((0, 1), k=self.random.randint(1, 4 * PAGE_SIZE))
        table = PageTable(self.cache, PAGE_SIZE, "", Hold.LIVE)
        table.match_tokens(tokens)
        if not table.extend(len(tokens)):
            table.release()
            return
        table.cache_full_pages(tokens, len(tokens))
        self.open.append(table)

    def finish(self) -> None:
        if self.open:
            self.open.pop(self.random.randrange(len(self.open))).release()

    def quarantine(self) -> None:
        if cached := sorted(self.cached):
            self.cache.quarantine(self.random.choice(cached))

    def clear(self) -> None:
        self.cache.clear()

    def end_turn(self) -> None:
        assert self.cache.events is not None
        self.cache.events.flush()


class EventReader:
    """Applies deltas as the protocol says."""

    def __init__(self) -> None:
        self.seq = 0
        self.keys: set[PageKey] = set()

    def apply(self, delta: CacheDelta) -> None:
        assert delta.reset or delta.after_seq == self.seq, "a delta for another position"
        kept = set() if delta.reset else self.keys - {*delta.removed}
        self.keys, self.seq = kept | {*delta.stored}, delta.seq


def run_world(seed: int, seen: Counter[str]) -> None:
    random = Random(seed)
    worker, readers = CachingWorker(random), [EventReader(), EventReader()]
    acts = [worker.request] * 5 + [worker.finish] * 5 + [worker.clear, worker.quarantine]
    for _ in range(NUM_STEPS):
        random.choice(acts)()
        worker.end_turn()
        number = random.choice((0, 0, 0, 1, None, None))  # the first reads often, the second seldom
        if number is None:
            continue
        if random.random() < 0.05:
            readers[number] = EventReader()
            seen["restarts"] += 1
        reader = readers[number]
        delta = worker.log.since(reader.seq)
        if delta is not None:
            kind = "snapshot" if delta.reset and delta.after_seq == 0 else "clear" if delta.reset else "delta"
            seen[kind] += 1
            seen["removed"] += len(delta.removed)
            reader.apply(delta)
        assert reader.keys == worker.cached, "a reader sees another cache"
        assert reader.seq == worker.log.seq


def run_worlds() -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in range(60):
        run_world(seed, seen)
    return seen


def test_every_reader_sees_the_cache_at_its_position():
    seen = run_worlds()
    rare = {kind: seen[kind] for kind in ("delta", "clear", "snapshot", "removed", "restarts") if seen[kind] < 50}
    assert not rare, f"the worlds hardly reach {rare}"


@pytest.mark.parametrize("lost", ["stored", "removed"])
def test_a_lost_event_would_be_seen(lost: str, monkeypatch: pytest.MonkeyPatch):
    """The check above can fail: each kind of event matters."""
    monkeypatch.setattr(EventSource, lost, lambda self, *arguments: None)
    with pytest.raises(AssertionError, match="sees another cache"):
        run_worlds()
