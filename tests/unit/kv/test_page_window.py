"""Pages without their window part: which prefixes may be used, and what the cache and the swap space keep of it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from baton.domain.ids import PageId, PageKey
from baton.kv import page_table
from baton.kv.events.event import CacheDelta, CacheEvent, PageContent, RemovedEvent, StoredEvent, page_contents
from baton.kv.events.source import EventSource
from baton.kv.geometry import KVGeometry, LayerGeometry, PageWindow
from baton.kv.keys import next_key, page_keys
from baton.kv.page_digests import PageDigests
from baton.kv.page_table import PageTable
from baton.kv.pages import Hold, Owner, PagePool
from baton.kv.prefix_cache import PrefixCache
from baton.kv.swap_space import SwapSpace
from baton.worker.event_log import SharedEventLog

SIZE, WINDOW = 4, PageWindow(10, 4, 1)
NUM_PAGES = 24


def keys(num_pages: int, label: str = "k") -> list[PageKey]:
    return [PageKey(f"{label}{number}".encode()) for number in range(num_pages)]


def windowed_cache(num_pages: int = NUM_PAGES) -> PrefixCache:
    cache = PrefixCache(PagePool(num_pages))
    cache.window = WINDOW
    return cache


def enter(cache: PrefixCache, chain: list[PageKey], windowless: list[int], hold: Hold = Hold.LIVE) -> list[PageId]:
    """Enters a chain of pages and goes on holding the pages that are used for it, and those that did not enter."""
    pages = cache.allocate(len(chain), hold)
    assert pages is not None
    cache.pool.digests.mark_windowless(pages[at] for at in windowless)
    used = cache.insert(None, chain, pages, hold)
    return [*used, *pages[len(used) :]]


class CountingHasher:
    """All pages are alike."""

    num_pages = 0

    def digests(self, pages: Sequence[PageId]) -> list[int]:
        self.num_pages += len(pages)
        return [0] * len(pages)


def test_the_window_of_a_geometry():
    geometry = KVGeometry.of_layers((LayerGeometry(1, 64, 64),) * 2, "float32", SIZE)
    assert PageWindow.of(geometry) is None
    assert PageWindow.of(geometry.with_window_part(10, (1,))) == WINDOW


@pytest.mark.parametrize("position", range(40))
def test_the_first_page_is_the_one_of_the_oldest_key_that_is_read(position: int):
    oldest = next(key for key in itertools.count() if key > position - WINDOW.num_tokens)
    assert WINDOW.first_page(position) == oldest // SIZE


@pytest.mark.parametrize("seed", range(200))
def test_the_longest_prefix_whose_windows_are_there_is_used(seed: int):
    """Against all prefixes, each looked at key by key."""
    rng = random.Random(seed)
    pages = [PageId(page) for page in range(rng.randrange(12))]
    digests = PageDigests(12)
    digests.mark_windowless(page for page in pages if rng.random() < 0.3)
    fixed = rng.choice([None, rng.randrange(60)])

    def serves(num_pages: int) -> bool:
        position = num_pages * SIZE if fixed is None else fixed
        read = [key for key in range(num_pages * SIZE) if key > position - WINDOW.num_tokens]
        return not any(digests.is_windowless(pages[key // SIZE]) for key in read)

    wanted = max(number for number in range(len(pages) + 1) if serves(number))
    assert WINDOW.num_usable(pages, digests.is_windowless, fixed) == wanted


def test_a_match_needs_the_window_parts_that_its_next_token_reads():
    cache, chain = windowed_cache(), keys(8)
    pages = enter(cache, chain, [0, 1, 2])
    assert cache.match(chain, Hold.LIVE) == pages, "the next token reads from page 5 on"
    assert cache.match(chain[:5], Hold.LIVE) == [], "it would read page 2"
    assert cache.match(chain[:5], Hold.LIVE, next_position=8 * SIZE) == pages[:5], "a later token is computed"
    assert (cache.num_matching(chain), cache.num_matching(chain[:5])) == (8, 0)
    assert (cache.num_givable(pages), cache.num_givable(pages[3:])) == (0, 5)


def test_a_page_that_is_freed_may_have_its_window_part_again():
    cache = windowed_cache(2)
    pages = enter(cache, keys(2), [0, 1])
    cache.pool.drop(pages, Hold.LIVE)
    cache.clear()
    assert not any(map(cache.pool.digests.is_windowless, pages))


def test_a_whole_page_takes_the_place_of_an_unheld_windowless_one():
    cache, chain = windowed_cache(), keys(6)
    first = enter(cache, chain, [0, 1, 2])
    cache.pool.drop(first, Hold.LIVE)
    second = enter(cache, chain, [])
    assert second[3:] == first[3:], "equal pages replace their duplicates"
    assert not set(second[:3]) & set(first)
    assert {cache.pool.owner(page) for page in first[:3]} == {Owner.FREE}
    assert cache.num_givable(second) == 6
    cache.check()
    cache.pool.check()


def test_a_whole_page_does_not_give_way_to_a_held_windowless_one():
    """The row with whole pages reads their window parts; the row that holds the other page needs none."""
    cache, chain = windowed_cache(), keys(4)
    held = enter(cache, chain, [0, 1])
    own = cache.allocate(4, Hold.LIVE)
    assert own is not None
    assert cache.insert(None, chain, own, Hold.LIVE) == []
    assert [cache.page_of(key) for key in chain] == held
    cache.pool.drop(held, Hold.LIVE)
    assert cache.insert(None, chain, own, Hold.LIVE) == [*own[:2], *held[2:]], "once it is not held it is replaced"
    cache.check()
    cache.pool.check()


def test_only_pages_that_can_be_given_are_announced():
    cache, chain, events = windowed_cache(), keys(6), list[CacheEvent]()
    cache.events = EventSource(events.extend, with_content=True)
    pages = enter(cache, chain, [1, 2])
    cache.events.flush()
    assert events == [StoredEvent(chain[0], None)], "an export ends before page 1"
    cache.pool.drop(pages, Hold.LIVE)
    own = cache.allocate(5, Hold.LIVE)
    assert own is not None
    contents = page_contents(list(range(5 * SIZE)), (), SIZE, 0, 5)
    own = cache.insert(None, chain[:5], own, Hold.LIVE, contents)
    cache.events.flush()
    assert contents[4] == PageContent(tuple(range(4 * SIZE, 5 * SIZE)))
    assert events[1:] == [StoredEvent(chain[at], chain[at - 1], contents[at]) for at in range(1, 5)], (
        "they are whole now, and so is all of the prompt before them"
    )
    cache.pool.drop(own, Hold.LIVE)
    assert cache.allocate(NUM_PAGES, Hold.LIVE) is not None
    cache.events.flush()
    assert events[5:] == [RemovedEvent(key) for key in reversed(chain[:5])], "page 5 was not announced"


def test_readers_of_a_cache_that_announces_no_page_know_that():
    cache, log = windowed_cache(), SharedEventLog()
    log.attach(cache)
    assert cache.events is not None
    enter(cache, keys(3, "a"), [0, 1])
    cache.events.flush()
    assert log.since(0) == CacheDelta(0, 1, reset=True)
    enter(cache, keys(3, "b"), [0, 1])
    cache.events.flush()
    assert log.since(1) is None, "once is enough"


@pytest.mark.parametrize("num_before", [0, 2])
def test_a_row_behind_a_held_windowless_page_tries_again_once_it_may(num_before: int, monkeypatch: pytest.MonkeyPatch):
    """It makes no key and hashes no page meanwhile, however long the other row lives; its own pages settle."""
    hasher = CountingHasher()
    cache, tokens = PrefixCache(PagePool(NUM_PAGES), hasher), [1] * (12 * SIZE)
    cache.window = WINDOW
    made: list[PageKey] = []

    def make_key(*arguments: object) -> PageKey:
        made.append(next_key(*arguments))  # type: ignore[arg-type]
        return made[-1]

    monkeypatch.setattr(page_table, "next_key", make_key)
    other, row = (PageTable(cache, SIZE, "", Hold.LIVE) for _ in range(2))
    assert other.extend(4 * SIZE)
    assert row.extend(len(tokens))
    cache.pool.digests.mark_windowless(other.pages[num_before:4])
    other.cache_full_pages(tokens, 4 * SIZE)
    row.cache_full_pages(tokens, 4 * SIZE)
    assert len(row.cached_keys) == num_before
    num_made, num_hashed = len(made), hasher.num_pages
    for num_pages in range(5, 12):
        row.cache_full_pages(tokens, num_pages * SIZE)
        assert cache.pool.digests.is_settled(row.pages[num_pages - 1])
    assert (len(made) - num_made, hasher.num_pages - num_hashed) == (0, 7)
    other.release()
    row.cache_full_pages(tokens, len(tokens))
    assert list(row.cached_keys) == page_keys(tokens, SIZE, "")
    assert not row.windowless(12)
    cache.check()
    row.release()
    assert cache.allocate(NUM_PAGES, Hold.LIVE) is not None, "all pages can be evicted"


@pytest.mark.parametrize("seed", range(40))
def test_a_sequence_never_reads_a_window_part_that_is_not_there(seed: int):
    """Random worlds of rows that share beginnings: imported up to some length, or computed behind a match.

    Each row checks the pages that it reads after every change, its own or another's.
    """
    rng = random.Random(seed)
    cache, rows = windowed_cache(), dict[int, tuple[PageTable, int]]()
    labels = [[rng.choice([0, 1]) for _ in range(8 * SIZE)] for _ in range(3)]
    for number in range(120):
        if rows and rng.random() < 0.4:
            rows.pop(rng.choice(list(rows)))[0].release()
        else:
            tokens = labels[rng.randrange(3)][: rng.randrange(SIZE, 8 * SIZE)]
            table = PageTable(cache, SIZE, "", Hold.LIVE)
            imported = rng.random() < 0.6
            matched = _match(table, tokens, imported)
            if not table.extend(len(tokens)):
                table.release()
                continue
            if imported:
                first = WINDOW.first_page(len(tokens))
                cache.pool.digests.mark_windowless(table.pages[matched:first])
            table.cache_full_pages(tokens, len(tokens))
            rows[number] = table, len(tokens)
        for table, num_tokens in rows.values():
            read = table.pages[WINDOW.first_page(num_tokens) :]
            assert not any(map(cache.pool.digests.is_windowless, read))
        cache.check()
        cache.pool.check()


def _match(table: PageTable, tokens: list[int], imported: bool) -> int:
    """Matches a prompt as decode and prefill do; returns the number of pages."""
    prompt_keys = page_keys(tokens, SIZE, "")[: (len(tokens) - 1) // SIZE]
    return table.match(prompt_keys, len(tokens) if imported else None) // SIZE


def test_the_swap_space_keeps_which_pages_have_no_window_part():
    """A page that comes back as a whole one would be matched, and its window part read."""
    cache, host = windowed_cache(), SwapSpace(4)
    table = PageTable(cache, SIZE, "", Hold.LIVE)
    assert table.extend(4 * SIZE)
    cache.pool.digests.mark_windowless(table.pages[:2])
    slots = host.allocate(4)
    assert slots is not None
    host.keep(slots, [], table.windowless(4))
    table.release()
    assert table.extend(4 * SIZE)
    table.settle(*host.kept(slots, 4))
    assert table.windowless(4) == [0, 1]
    host.free(slots)
    assert host.kept(slots, 4) == ([], [])
