"""What placement knows of caches: events where a worker sends them, what was routed elsewhere."""

from __future__ import annotations

from dataclasses import replace

from baton.domain.ids import Incarnation, PageKey
from baton.domain.worker import LOWER_TIER
from baton.services.router.dispatch.cache_index.index import EXPECTED_S, CacheIndex
from baton.services.router.dispatch.cache_index.known_pages import KnownPages
from tests.unit.router.dispatch.test_placement import PAGE, prefill

KEYS = tuple(PageKey(bytes([n]) * 16) for n in range(6))
SENDS, SILENT = Incarnation(1), Incarnation(2)


class Caches:
    """All keys were routed to both workers long ago; one of them has told that it has three."""

    def __init__(self) -> None:
        self.now = 0.0
        self.index = CacheIndex()
        self.pages = KnownPages(100, self.index, lambda: self.now)
        for worker in (SENDS, SILENT):
            self.pages.add(worker, KEYS)
        self.index.clear(SENDS)
        self.index.update(SENDS, KEYS[:3], ())

    def hits(self) -> tuple[int, int]:
        return self.pages.num_hit_pages(SENDS, KEYS), self.pages.num_hit_pages(SILENT, KEYS)


def test_evicted_pages_count_only_where_nobody_tells_of_them():
    assert Caches().hits() == (3, 6)


def test_evicted_pages_of_a_worker_with_a_lower_tier_count_as_routed():
    """They went to host memory or a file: no event tells that, and another worker would compute them again."""
    caches, worker = Caches(), replace(prefill(1), incarnation=SENDS)
    assert caches.pages.num_cached_pages(worker, KEYS) == 3
    assert caches.pages.num_cached_pages(replace(worker, capabilities=(LOWER_TIER,)), KEYS) == 6


def test_pages_that_were_just_routed_count_before_an_event_confirms_them():
    caches = Caches()
    caches.index.expect(SENDS, KEYS, now=0.0)
    assert caches.hits() == (6, 6)
    caches.now = EXPECTED_S + 1.0
    assert caches.hits() == (3, 6)


def test_until_its_first_event_a_worker_counts_as_one_that_sends_none():
    """A stream that begins again has nothing until its snapshot; so has one that a worker does not serve."""
    caches = Caches()
    caches.index.clear(SENDS)
    caches.index.clear(SILENT)
    assert caches.hits() == (6, 6)
    caches.index.update(SENDS, KEYS[:1], ())
    assert caches.hits() == (1, 6)
    caches.index.forget(SENDS)
    assert not caches.index.follows(SENDS)


def test_hits_are_tokens_by_the_worker_s_own_page_size():
    caches, worker = Caches(), replace(prefill(1), incarnation=SENDS)
    assert caches.pages.num_hit_tokens(worker, {PAGE: KEYS, 2 * PAGE: ()}) == 3 * PAGE
    assert caches.pages.num_hit_tokens(worker, {2 * PAGE: KEYS}) == 0
