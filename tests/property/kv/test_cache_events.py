"""Routers that read cache events see the worker's cache, whatever happened to it and to their connection."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from baton.domain.ids import Incarnation, PageId, PageKey
from baton.kv.events.codec import split_delta
from baton.kv.events.log import CacheEventLog
from baton.kv.events.source import EventSource
from baton.kv.geometry import PageWindow
from baton.kv.keys import page_keys
from baton.kv.page_table import PageTable
from baton.kv.pages import Hold, PagePool
from baton.kv.prefix_cache import PrefixCache
from baton.services.router.dispatch.cache_index.index import CacheIndex
from baton.services.router.dispatch.cache_index.reader import CacheEventReader
from baton.worker.server import encode_delta
from tests.tiny_workers import PAGE_SIZE

NUM_PAGES, NUM_STEPS, RING = 8, 150, 6
WINDOW = PageWindow(3, PAGE_SIZE, 1)


class CachingWorker:
    """A cache under random requests, with a ring so short that slow readers need snapshots.

    Most workers have pages with a window part. Their requests are computed here or imported, without it where no
    window reaches. `announced` follows by itself what readers should see of them.
    """

    def __init__(self, random: Random, incarnation: Incarnation, seen: Counter[str]) -> None:
        self.seen = seen
        self.random = random
        self.incarnation = incarnation
        self.cache = PrefixCache(PagePool(NUM_PAGES))
        self.cache.window = random.choice((None, WINDOW, WINDOW, WINDOW))
        self.announced: set[PageKey] = set()
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
        imported = self.cache.window is not None and self.random.random() < 0.5
        table.match(page_keys(tokens, PAGE_SIZE, ""), len(tokens) if imported else None)
        if not table.extend(len(tokens)):
            table.release()
            return
        num_matched = len(table.cached_keys)
        if imported:
            self.cache.pool.digests.mark_windowless(table.pages[num_matched : WINDOW.first_page(len(tokens))])
        old = self.cached
        self.announced &= old
        table.cache_full_pages(tokens, len(tokens))
        for at in range(num_matched, len(table.cached_keys)):
            key = table.cached_keys[at]
            follows = at == 0 or table.cached_keys[at - 1] in self.announced
            if follows and at not in table.windowless(at + 1) and key not in self.announced:
                self.announced.add(key)
                self.seen["made whole"] += key in old
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
        self.announced &= self.cached
        self.seen["not announced"] += len(self.cached) - len(self.announced)
        self.check_announced()
        assert self.cache.events is not None
        self.cache.events.flush()

    def check_announced(self) -> None:
        """All pages of the chain of an announced page are whole; without windows all pages are announced."""
        for key in self.announced:
            assert not self.cache.pool.digests.is_windowless(self.cache.page_of(key))
            parent = self.cache.parent_of(key)
            assert parent is None or parent in self.announced
        assert self.cache.window is not None or self.announced == self.cached


class RouterView:
    """A router's index and reader of one worker, over messages that may stop in between."""

    def __init__(self, index: CacheIndex, worker: CachingWorker) -> None:
        self.index, self.worker = index, worker
        self.reader = CacheEventReader(worker.incarnation, index)
        self.connected = False

    def read(self, broken_after: int | None, seen: Counter[str]) -> bool:
        """Reads what is new. `broken_after`: the connection is lost after as many messages. True if all arrived."""
        if not self.connected:
            self.seq, self.connected = self.reader.begin().from_seq, True
        delta = self.worker.log.since(self.seq)
        if delta is None:
            return self.reader.seq == self.worker.log.seq
        seen["snapshot" if delta.reset and not delta.after_seq else "clear" if delta.reset else "delta"] += 1
        seen["removed"] += len(delta.removed)
        for number, (part, more) in enumerate(split_delta(delta, max_keys=2)):
            if number == broken_after:
                self.connected = False
                seen["broken"] += 1
                return False
            seen["parts"] += more
            assert self.reader.apply(encode_delta(part, more)), "a reader refused the worker's own delta"
        self.seq = delta.seq
        return True


def run_world(seed: int, seen: Counter[str]) -> None:
    """One worker, restarted at times, and two routers. The first reads often, the second seldom."""
    random = Random(seed)
    worker, indices = CachingWorker(random, Incarnation(1), seen), [CacheIndex(), CacheIndex()]
    views = [RouterView(index, worker) for index in indices]
    for step in range(NUM_STEPS):
        random.choice([worker.request] * 5 + [worker.finish] * 5 + [worker.clear, worker.quarantine])()
        worker.end_turn()
        if random.random() < 0.02:
            seen["restarts"] += 1
            for index in indices:
                index.forget(worker.incarnation)
            worker = CachingWorker(random, Incarnation(2 + step), seen)
            views = [RouterView(index, worker) for index in indices]
        number = random.choice((0, 0, 0, 1, None, None))
        if number is not None and views[number].read(random.choice((None, None, 0, 1)), seen):
            assert indices[number].confirmed(worker.incarnation) == worker.announced, "a reader sees another cache"


def run_worlds() -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in range(80):
        run_world(seed, seen)
    return seen


def test_every_index_equals_the_cache_of_its_worker():
    seen = run_worlds()
    of_messages = ("delta", "clear", "snapshot", "removed", "restarts", "broken", "parts")
    kinds = (*of_messages, "not announced", "made whole")
    rare = {kind: seen[kind] for kind in kinds if seen[kind] < 50}
    assert not rare, f"the worlds hardly reach {rare}"


@pytest.mark.parametrize("lost", ["stored", "removed"])
def test_a_lost_event_would_be_seen(lost: str, monkeypatch: pytest.MonkeyPatch):
    """The check above can fail: each kind of event matters."""
    monkeypatch.setattr(EventSource, lost, lambda self, *arguments: None)
    with pytest.raises(AssertionError, match="sees another cache"):
        run_worlds()
