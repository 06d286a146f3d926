"""Checks of settled pages, the scrubber's pace, and quarantine: what is checked, when, and what goes with it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from baton.domain.ids import PageId, PageKey
from baton.kv.keys import page_keys
from baton.kv.page_checks import BUSY_INTERVAL_S, ROUND_S, SLICE_BYTES, PageChecks, Scrubber
from baton.kv.page_digests import PageState
from baton.kv.page_table import PageTable
from baton.kv.pages import Hold, Owner, PagePool
from baton.kv.prefix_cache import PrefixCache
from baton.kv.quarantine import INCIDENT_S, INCIDENTS_WINDOW_S, Quarantine

NUM_PAGES = 64
TOKENS = list(range(40))


class DictHasher:
    """Pages whose bytes are one number each. Counts the hashed pages."""

    def __init__(self) -> None:
        self.contents = list(range(NUM_PAGES))
        self.hashed: list[PageId] = []

    def digests(self, pages: Sequence[PageId]) -> list[int]:
        self.hashed += pages
        return [self.contents[page] for page in pages]


class World:
    """A cache over flippable pages."""

    def __init__(self, sample: int = 1, hashes: bool = True) -> None:
        self.hasher = DictHasher()
        self.cache = PrefixCache(PagePool(NUM_PAGES), self.hasher if hashes else None)
        self.checks = PageChecks(self.cache, sample)
        self.quarantine = Quarantine(self.cache)

    def fill(self, tokens: list[int], hold: bool = False) -> PageTable:
        """Computes a prompt of one token a page."""
        table = PageTable(self.cache, 1, "", Hold.LIVE)
        table.match_checked(self.keys(tokens), self.checks, self.quarantine, 0.0)
        assert table.extend(len(tokens))
        table.cache_full_pages(tokens, len(tokens))
        if not hold:
            table.release()
        return table

    def pages(self, tokens: list[int]) -> list[PageId]:
        return [self.cache.page_of(key) for key in page_keys(tokens, 1, "")]

    def flip(self, page: PageId) -> None:
        self.hasher.contents[page] ^= 1 << 60

    def keys(self, tokens: list[int]) -> list[PageKey]:
        return page_keys(tokens, 1, "")


def test_a_page_is_hashed_once_when_it_enters_the_cache():
    world = World()
    table = world.fill([1, 2, 3], hold=True)
    assert world.hasher.hashed == table.pages
    table.cache_full_pages([1, 2, 3], 3)
    assert len(world.hasher.hashed) == 3


def test_a_page_with_the_announced_digest_is_not_hashed_again():
    world = World()
    table = PageTable(world.cache, 1, "", Hold.RESERVED)
    assert table.extend(2)
    world.cache.pool.digests.set(table.pages[0], 123)
    table.cache_full_pages([1, 2], 2)
    assert world.hasher.hashed == [table.pages[1]]
    assert world.cache.pool.digests.digest(table.pages[0]) == 123


def test_a_duplicate_gives_way_to_pages_that_are_checked():
    world = World()
    first, second = (PageTable(world.cache, 1, "", Hold.LIVE) for _ in range(2))
    for table in (first, second):
        assert table.extend(2)
        table.cache_full_pages([1, 2], 2)
    assert world.hasher.hashed == [0, 1, 0, 1], "at their settling, and when the duplicates came"
    assert first.pages == second.pages


def test_all_matched_pages_are_checked_by_default():
    world = World()
    world.fill(TOKENS)
    world.hasher.hashed.clear()
    world.fill(TOKENS)
    assert world.hasher.hashed == world.pages(TOKENS)


def test_a_sample_checks_every_page_in_turn():
    world = World(sample=16)
    world.fill(TOKENS)
    world.hasher.hashed.clear()
    for _ in range(14):
        world.fill(TOKENS)
    assert len(world.hasher.hashed) == 14 * 3, "40 pages of which one in 16 is checked, rounded up"
    assert set(world.hasher.hashed) == set(world.pages(TOKENS))


@pytest.mark.parametrize(("sample", "hashes"), [(0, True), (1, False)])
def test_nothing_is_checked_when_it_is_off(sample: int, hashes: bool):
    world = World(sample, hashes)
    world.fill(TOKENS)
    world.hasher.hashed.clear()
    world.fill(TOKENS)
    assert not world.hasher.hashed
    assert Scrubber(world.checks, 1024).next_slice_at(0.0) is None


def test_a_match_of_a_wrong_page_takes_its_subtree_out():
    world = World()
    world.fill([1, 2, 3, 4])
    world.fill([1, 2, 9])
    world.flip(world.pages([1, 2])[1])
    table = world.fill([1, 2, 3], hold=True)
    assert world.quarantine.num_pages == 4, "[1 2], [1 2 3], [1 2 3 4] and [1 2 9]"
    assert world.cache.num_matching(world.keys([1, 2, 3, 4])) == 3
    assert world.cache.num_matching(world.keys([1, 2, 9])) == 2
    assert not table.is_tainted
    world.cache.check()
    world.cache.pool.check()


def test_a_table_over_a_quarantined_page_enters_nothing_more():
    world = World()
    table = PageTable(world.cache, 1, "", Hold.LIVE)
    assert table.extend(4)
    table.cache_full_pages([1, 2, 3, 4], 3)
    page = table.pages[0]
    world.quarantine.add_pages([page], 0.0)
    assert table.is_tainted
    table.cache_full_pages([1, 2, 3, 4], 4)
    assert len(world.cache) == 0
    assert world.cache.pool.digests.state(page) is PageState.CONDEMNED
    table.release()
    assert world.cache.pool.num_free == NUM_PAGES
    world.cache.pool.check()


def test_another_prompt_computes_a_quarantined_prefix_anew():
    world = World()
    held = world.fill([1, 2], hold=True)
    world.quarantine.add_keys([world.keys([1])[0]])
    world.fill([1, 2])
    held.release()
    assert world.cache.num_matching(world.keys([1, 2])) == 2
    world.cache.check()


def test_a_peer_s_key_takes_foreign_pages_and_their_descendants_only():
    world = World()
    keys = world.keys([1, 2, 3, 4])
    world.fill([1])
    (first,) = world.pages([1])
    table = PageTable(world.cache, 1, "", Hold.LIVE)
    table.match(keys)
    assert table.extend(2)
    world.cache.insert(keys[0], keys[1:2], table.pages[1:], Hold.LIVE, foreign=True)
    table.release()
    world.fill([1, 2, 3, 4])
    world.fill([1, 7])
    assert world.quarantine.add_foreign_keys(keys[:1]) == 3
    assert world.cache.num_matching(world.keys([1, 2])) == 1
    assert world.cache.num_matching(world.keys([1, 7])) == 2
    assert world.quarantine.since(0) == (tuple(keys[1:2]), 1), "what was spared is not passed on"
    assert world.quarantine.add_foreign_keys(keys) == 0
    assert world.cache.find(keys[0]) == first


def test_a_page_that_is_computed_again_is_no_foreign_one():
    world = World()
    keys = world.keys([1])
    (page,) = world.cache.allocate(1, Hold.LIVE) or []
    world.cache.insert(None, keys, [page], Hold.LIVE, foreign=True)
    world.cache.pool.drop([page], Hold.LIVE)
    assert world.quarantine.add_foreign_keys(keys) == 1
    world.fill([1])
    assert world.quarantine.add_foreign_keys(keys) == 0


def test_a_round_of_the_scrubber_visits_every_settled_page():
    world = World()
    world.fill(TOKENS)
    world.hasher.hashed.clear()
    scrubber, now, num_slices = Scrubber(world.checks, SLICE_BYTES // 16), 0.0, 0
    while not scrubber.num_rounds:
        due_at = scrubber.next_slice_at(now)
        assert due_at is not None
        assert not scrubber.run_slice(due_at - 0.001, busy=False)
        now, num_slices = due_at, num_slices + 1
        scrubber.run_slice(now, busy=False)
    assert sorted(world.hasher.hashed) == sorted(world.pages(TOKENS))
    assert num_slices == NUM_PAGES // 16
    assert now == pytest.approx(ROUND_S)


def test_a_busy_worker_is_scrubbed_once_a_second_at_most():
    world = World()
    world.fill(TOKENS)
    scrubber = Scrubber(world.checks, SLICE_BYTES * 100)
    interval_s = ROUND_S / NUM_PAGES
    assert scrubber.next_slice_at(0.0) == interval_s
    large = Scrubber(PageChecks(PrefixCache(PagePool(100_000), DictHasher())), SLICE_BYTES)
    assert large.next_slice_at(0.0) == pytest.approx(0.006)
    large.run_slice(0.5, busy=True)
    assert large.next_slice_at(0.5) == pytest.approx(0.006), "it has not run"
    large.run_slice(BUSY_INTERVAL_S, busy=True)
    assert large.next_slice_at(1.0) == pytest.approx(1.006)


def test_the_scrubber_returns_what_differs():
    world = World()
    table = world.fill(TOKENS, hold=True)
    scrubber = Scrubber(world.checks, 1)
    scrubber.next_slice_at(0.0)
    world.flip(table.pages[5])
    assert scrubber.run_slice(ROUND_S, busy=False) == [table.pages[5]]


def test_quarantined_keys_are_numbered_so_that_a_lost_reply_loses_nothing():
    world = World()
    for first in (1, 2, 3):
        world.fill([first, 0])
    keys = [world.keys([first])[0] for first in (1, 2, 3)]
    world.quarantine.add_keys(keys[:1])
    seen, number = world.quarantine.since(0)
    assert (seen, number) == ((keys[0],), 1)
    world.quarantine.add_pages([world.pages([2])[0]], 0.0)
    assert world.quarantine.since(number) == ((keys[1],), 2)
    assert world.quarantine.since(number) == ((keys[1],), 2), "asked again after a lost reply"
    world.quarantine.add_keys([keys[2], keys[2]])
    assert world.quarantine.since(0) == (tuple(keys), 3)
    assert world.quarantine.since(3) == ((), 3)
    assert world.quarantine.since(99) == (tuple(keys), 3), "a number of an earlier incarnation"


@pytest.mark.parametrize(
    ("times", "unfit"),
    [
        ((0.0, 20.0, INCIDENTS_WINDOW_S), True),
        ((0.0, 20.0, INCIDENTS_WINDOW_S + 1.0), False),
        ((0.0, 1.0, 2.0, INCIDENT_S), False),
        ((0.0, 20.0), False),
        ((0.0, 300.0, 700.0, 800.0), True),
    ],
)
def test_three_incidents_in_ten_minutes_make_a_worker_unfit(times: tuple[float, ...], unfit: bool):
    world = World()
    for number, now in enumerate(times):
        world.fill([number])
        world.quarantine.add_pages([world.pages([number])[0]], now)
    assert world.quarantine.is_unfit(times[-1]) == unfit


def test_a_hurried_round_runs_at_once_even_on_a_busy_worker():
    world = World()
    world.fill(TOKENS)
    world.hasher.hashed.clear()
    scrubber = Scrubber(world.checks, SLICE_BYTES // 16)
    assert not scrubber.run_slice(1.0, busy=True)
    scrubber.hurry()
    for _ in range(NUM_PAGES // 16):
        assert scrubber.next_slice_at(1.0) == 1.0
        scrubber.run_slice(1.0, busy=True)
    assert sorted(world.hasher.hashed) == sorted(world.pages(TOKENS))
    assert scrubber.next_slice_at(1.0) == 1.0 + ROUND_S * 16 / NUM_PAGES


def test_a_page_that_is_held_and_not_cached_is_condemned_alone():
    world = World()
    world.fill([5])
    tail = world.cache.allocate(1, Hold.PINNED)
    assert tail is not None
    world.quarantine.add_pages(tail, 0.0)
    assert world.cache.pool.digests.is_condemned(tail[0])
    assert len(world.cache) == 1
    world.cache.pool.drop(tail, Hold.PINNED)
    assert world.cache.pool.owner(tail[0]) is Owner.FREE


def test_all_pages_of_a_chain_that_are_wrong_twice_are_retired():
    """Those that are freed with the first one, too: seed 9200293 used them again, and a reservation lacked them."""
    world, tokens = World(), list(range(NUM_PAGES))
    for now in (0.0, 1.0):
        pages = world.fill(tokens, hold=True)
        chain = list(pages.pages)
        pages.release()
        world.quarantine.add_pages(chain, now)
        world.cache.check()
    assert world.cache.pool.num_owned(Owner.RETIRED) == NUM_PAGES


def test_pages_that_retire_as_they_are_evicted_are_made_up_for():
    world = World()
    chain = world.fill(list(range(NUM_PAGES)), hold=True)
    pool, worn = world.cache.pool, list(chain.pages[-2:])  # the first to be evicted
    chain.release()
    for page in worn:
        for now in (0.0, 1.0):
            pool.digests.record_fault(page, now)
    taken = world.cache.allocate(NUM_PAGES // 2, Hold.LIVE)
    assert taken is not None
    assert not set(taken) & set(worn)
    assert pool.num_usable == NUM_PAGES - 2
    pool.check()
