"""The prefix cache and page tables against a dictionary of prefixes; and corruption that `check` must detect."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from baton.domain.errors import Broken
from baton.domain.ids import PageId, PageKey
from baton.kv.events.event import PageContent
from baton.kv.eviction import EvictionPolicy
from baton.kv.keys import page_keys
from baton.kv.page_table import PageTable
from baton.kv.pages import Hold, Owner, PagePool
from baton.kv.prefix_cache import PrefixCache
from tests.tiny_workers import NUM_PAGES, PAGE_SIZE, REPEATABLE_SETTINGS, assert_idle, check_invariants

Prefix = tuple[str, tuple[int, ...]]  # salt, and all tokens up to a page's end
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=4 * PAGE_SIZE + 1)


@dataclass
class User:
    """Page table of one request and its number of computed tokens."""

    table: PageTable
    tokens: list[int]
    num_filled: int

    def prefixes(self) -> list[Prefix]:
        """Prefixes of the full pages that are computed."""
        ends = range(PAGE_SIZE, self.num_filled + 1, PAGE_SIZE)
        return [(self.table.salt, tuple(self.tokens[:end])) for end in ends]


class CacheMachine(RuleBasedStateMachine):
    """Rules start, advance and end requests. A cached page must be found under its exact prefix or be evicted."""

    policy = EvictionPolicy.LRU

    def __init__(self) -> None:
        super().__init__()
        self.cache = PrefixCache(PagePool(NUM_PAGES), policy=self.policy)
        self.users: list[User] = []
        self.cached: dict[Prefix, PageId] = {}

    @rule(tokens=TOKENS, salt=st.sampled_from(["", "tenant"]), hold=st.sampled_from([Hold.LIVE, Hold.RESERVED]))
    def come(self, tokens: list[int], salt: str, hold: Hold) -> None:
        table = PageTable(self.cache, PAGE_SIZE, salt, hold)
        expected = self._longest(tokens, salt)
        assert self.cache.num_matching(page_keys(tokens, PAGE_SIZE, salt)) == len(expected)
        num_matched = table.match_tokens(tokens)
        assert table.pages == expected, "not the longest cached prefix under this salt"
        assert num_matched == len(expected) * PAGE_SIZE
        num_missing, num_available = table.num_missing(len(tokens)), self.cache.num_available
        assert table.extend(len(tokens)) == (num_missing <= num_available), "reserved by num_available, refused"
        if table.num_slots < len(tokens):
            assert len(table.pages) == len(expected)
            table.release()
            return
        self._see_evictions()
        assert len(set(table.pages)) == len(table.pages)
        others = {page for user in self.users for page in user.table.pages} | set(self.cached.values())
        assert not set(table.pages[len(expected) :]) & others, "a page in use was handed out"
        self.users.append(User(table, tokens, num_matched))

    @precondition(lambda self: self.users)
    @rule(data=st.data(), num_tokens=st.integers(1, 4))
    def compute(self, data: st.DataObject, num_tokens: int) -> None:
        user = data.draw(st.sampled_from(self.users))
        user.num_filled = min(len(user.tokens), user.num_filled + num_tokens)
        mine = list(user.table.pages)
        user.table.cache_full_pages(user.tokens, user.num_filled)
        for index, prefix in enumerate(user.prefixes()):
            expected = self.cached.setdefault(prefix, mine[index])
            assert user.table.pages[index] == expected, "an equal page was cached and not taken"
        held = {page for one in self.users for page in one.table.pages}
        swapped = set(mine) - set(user.table.pages) - held
        assert all(self.cache.pool.owner(page) is Owner.FREE for page in swapped), "a duplicate was not given back"

    @precondition(lambda self: self.users)
    @rule(data=st.data())
    def go(self, data: st.DataObject) -> None:
        user = data.draw(st.sampled_from(self.users))
        self.users.remove(user)
        user.table.release()

    @precondition(lambda self: self.users)
    @rule(data=st.data(), hold=st.sampled_from(Hold))
    def change_hold(self, data: st.DataObject, hold: Hold) -> None:
        data.draw(st.sampled_from(self.users)).table.change_hold(hold)

    @rule()
    def clear(self) -> None:
        num_unheld = self.cache.pool.num_cached
        assert self.cache.clear() == num_unheld
        assert self.cache.pool.num_cached == 0
        self._see_evictions()

    @invariant()
    def books_agree(self) -> None:
        check_invariants(self.cache)
        assert len(self.cache) == len(self.cached)
        for page in (page for user in self.users for page in user.table.pages):
            assert self.cache.pool.owner(page) not in (Owner.FREE, Owner.CACHED), "a page in use may be reused"

    def teardown(self) -> None:
        for user in self.users:
            user.table.release()
        assert_idle(self.cache)
        self.cache.clear()
        assert self.cache.pool.num_free == NUM_PAGES

    def _longest(self, tokens: list[int], salt: str) -> list[PageId]:
        pages = []
        for end in range(PAGE_SIZE, len(tokens) + 1, PAGE_SIZE):
            page = self.cached.get((salt, tuple(tokens[:end])))
            if page is None:
                break
            pages.append(page)
        return pages

    def _see_evictions(self) -> None:
        kept = {}
        for (salt, tokens), page in self.cached.items():
            if self.cache.num_matching(page_keys(tokens, PAGE_SIZE, salt)) == len(tokens) // PAGE_SIZE:
                kept[salt, tokens] = page
        held = {page for user in self.users for page in user.table.pages}
        evicted = {page for prefix, page in self.cached.items() if prefix not in kept}
        assert not evicted & held, "a held page was evicted"
        self.cached = kept


@pytest.mark.parametrize("policy", EvictionPolicy)
def test_prefix_cache(policy: EvictionPolicy):
    machine = type(f"{policy.name}CacheMachine", (CacheMachine,), {"policy": policy})
    run_state_machine_as_test(machine, settings=REPEATABLE_SETTINGS)


def fill(cache: PrefixCache, tokens: list[int], priority: int = 0) -> bool:
    """Runs one request to its end; returns whether its pages fitted."""
    table = PageTable(cache, PAGE_SIZE, "", Hold.LIVE)
    table.set_priority(priority)
    table.match_tokens(tokens)
    filled = table.extend(len(tokens))
    if filled:
        table.cache_full_pages(tokens, len(tokens))
    table.release()
    return filled


RANKS: dict[EvictionPolicy, Callable[[int, int], tuple[int, ...]]] = {
    EvictionPolicy.LRU: lambda last_use, num_hits: (last_use,),
    EvictionPolicy.LFU: lambda last_use, num_hits: (num_hits, last_use),
    EvictionPolicy.SLRU: lambda last_use, num_hits: (num_hits > 0, last_use),
    EvictionPolicy.PRIORITY: lambda last_use, num_hits: (last_use,),  # all requests have one priority
}


@pytest.mark.parametrize("policy", EvictionPolicy)
@REPEATABLE_SETTINGS
@given(prompts=st.lists(TOKENS, min_size=1, max_size=8))
def test_eviction_takes_the_leaf_that_ranks_first(policy: EvictionPolicy, prompts: list[list[int]]):
    cache = PrefixCache(PagePool(8 * (4 + 1)), policy=policy)  # room for all pages: nothing is evicted meanwhile
    last_used: dict[tuple[int, ...], int] = {}
    num_hits: dict[tuple[int, ...], int] = {}
    for now, tokens in enumerate(prompts):
        assert fill(cache, tokens)
        for prefix in (tuple(tokens[:end]) for end in range(PAGE_SIZE, len(tokens) + 1, PAGE_SIZE)):
            num_hits[prefix] = num_hits[prefix] + 1 if prefix in last_used else 0
            last_used[prefix] = now
    while last_used:
        leaves = [one for one in last_used if not any(one == other[: len(one)] != other for other in last_used)]
        first = min(leaves, key=lambda leaf: RANKS[policy](last_used[leaf], num_hits[leaf]))
        taken = cache.allocate(cache.pool.num_free + 1, Hold.LIVE)
        assert taken is not None
        assert cache.num_matching(page_keys(first, PAGE_SIZE, "")) == len(first) // PAGE_SIZE - 1
        del last_used[first]
        assert len(cache) == len(last_used)
        cache.pool.drop(taken, Hold.LIVE)


@pytest.mark.parametrize(("policy", "survives"), [("lru", False), ("lfu", True), ("slru", True)])
def test_a_shared_prefix_survives_a_scan_of_unique_prompts(policy: str, survives: bool):
    """What `lfu` and `slru` are for: two requests share a prefix, then more unique pages pass than the pool has."""
    cache = PrefixCache(PagePool(NUM_PAGES), policy=EvictionPolicy(policy))
    shared = [1] * PAGE_SIZE
    fill(cache, shared)
    fill(cache, shared)
    for number in range(2 * NUM_PAGES):
        fill(cache, [2 + number] * PAGE_SIZE)
    assert cache.num_matching(page_keys(shared, PAGE_SIZE, "")) == survives


@REPEATABLE_SETTINGS
@given(requests=st.lists(st.tuples(TOKENS, st.integers(-2, 2)), min_size=1, max_size=8))
def test_pages_of_low_priority_go_first(requests: list[tuple[list[int], int]]):
    """A page has the highest priority of the requests that used it, so leaves hold up no worse ones."""
    cache = PrefixCache(PagePool(8 * (4 + 1)), policy=EvictionPolicy.PRIORITY)
    expected: dict[tuple[int, ...], tuple[int, int]] = {}  # highest priority, last use
    for now, (tokens, priority) in enumerate(requests):
        assert fill(cache, tokens, priority)
        for prefix in (tuple(tokens[:end]) for end in range(PAGE_SIZE, len(tokens) + 1, PAGE_SIZE)):
            expected[prefix] = max(priority, expected.get(prefix, (priority, 0))[0]), now
    order = []
    while expected:
        leaves = [one for one in expected if not any(one == other[: len(one)] != other for other in expected)]
        first = min(leaves, key=lambda leaf: expected[leaf])
        taken = cache.allocate(cache.pool.num_free + 1, Hold.LIVE)
        assert taken is not None
        assert cache.num_matching(page_keys(first, PAGE_SIZE, "")) == len(first) // PAGE_SIZE - 1
        order.append(expected.pop(first)[0])
        cache.pool.drop(taken, Hold.LIVE)
    assert order == sorted(order)


def test_a_request_without_room_raises_no_priority():
    cache = PrefixCache(PagePool(NUM_PAGES), policy=EvictionPolicy.PRIORITY)
    fill(cache, [0] * PAGE_SIZE, priority=-1)
    (key,) = page_keys([0] * PAGE_SIZE, PAGE_SIZE, "")
    table = PageTable(cache, PAGE_SIZE, "", Hold.LIVE)
    table.set_priority(5)
    table.match([key])
    assert not table.extend((NUM_PAGES + 1) * PAGE_SIZE)
    table.release()
    assert cache._nodes[key].use.priority == -1


def test_a_request_without_room_counts_no_hit_however_often_it_tries():
    cache = PrefixCache(PagePool(NUM_PAGES), policy=EvictionPolicy.LFU)
    fill(cache, [0] * PAGE_SIZE)
    (key,) = page_keys([0] * PAGE_SIZE, PAGE_SIZE, "")
    for _ in range(5):
        table = PageTable(cache, PAGE_SIZE, "", Hold.LIVE)
        table.match([key])
        assert not table.extend((NUM_PAGES + 1) * PAGE_SIZE)
        table.release()
    assert cache._nodes[key].use.num_hits == 0
    fill(cache, [0] * PAGE_SIZE)
    assert cache._nodes[key].use.num_hits == 1


def test_stale_entries_do_not_pile_up():
    cache = PrefixCache(PagePool(NUM_PAGES))
    for _ in range(100):
        fill(cache, [0] * PAGE_SIZE)
    assert len(cache._leaves._heap) <= 2 * len(cache._leaves) + 8


def check_in_slices(cache: PrefixCache) -> None:
    for start in range(0, NUM_PAGES, 3):
        cache.check_pages(start, min(NUM_PAGES, start + 3))


@pytest.fixture(params=[PrefixCache.check, check_in_slices])
def check(request: pytest.FixtureRequest) -> Callable[[PrefixCache], None]:
    return request.param


class TestCheckCanFail:
    def cache(self) -> PrefixCache:
        cache = PrefixCache(PagePool(NUM_PAGES))
        fill(cache, [0, 1, 1, 0])
        cache.check()
        check_in_slices(cache)
        return cache

    def test_a_page_without_the_one_before_it(self, check: Callable[[PrefixCache], None]):
        cache = self.cache()
        root = page_keys([0, 1], PAGE_SIZE, "")[0]
        page = cache._nodes[root].page
        del cache._nodes[root]
        cache._keys[page] = None
        cache.pool.set_cached(page, False)
        with pytest.raises(Broken, match="without the page before"):
            check(cache)

    def test_a_key_that_leads_elsewhere(self, check: Callable[[PrefixCache], None]):
        cache = self.cache()
        del cache._nodes[page_keys([0, 1, 1, 0], PAGE_SIZE, "")[1]]
        with pytest.raises(Broken, match="is not where its key leads"):
            check(cache)

    def test_a_cached_page_that_the_pool_does_not_know(self, check: Callable[[PrefixCache], None]):
        cache = self.cache()
        cache.pool.set_cached(cache._nodes[page_keys([0, 1, 1, 0], PAGE_SIZE, "")[1]].page, False)
        with pytest.raises(Broken, match="for the pool or for the tree"):
            check(cache)

    def test_children_that_were_miscounted(self):
        cache = self.cache()
        cache._nodes[page_keys([0, 1], PAGE_SIZE, "")[0]].num_children += 1
        with pytest.raises(Broken, match="counts 2 children, has 1"):
            cache.check()

    def test_a_page_that_no_order_of_eviction_has(self):
        cache = self.cache()
        cache._leaves.forget(page_keys([0, 1, 1, 0], PAGE_SIZE, "")[1])
        with pytest.raises(Broken, match="in no order of eviction"):
            cache.check()

    def test_one_page_under_two_keys(self):
        cache = self.cache()
        first, second = cache._nodes.values()
        first.page = second.page
        with pytest.raises(Broken, match="two keys"):
            cache.check()

    def test_a_held_page_after_one_that_may_be_evicted(self, check: Callable[[PrefixCache], None]):
        """The held leaf keeps its unheld parent, which counts as evictable: eviction would never end."""
        cache = self.cache()
        leaf = cache._nodes[page_keys([0, 1, 1, 0], PAGE_SIZE, "")[1]]
        cache.pool.hold([leaf.page], Hold.PINNED)
        with pytest.raises(Broken, match="the page before it is not"):
            check(cache)


class CountingCache(PrefixCache):
    """Counts the inserted pages."""

    num_inserted = 0

    def insert(
        self,
        parent: PageKey | None,
        keys: Sequence[PageKey],
        pages: Sequence[PageId],
        hold: Hold,
        contents: Sequence[PageContent] = (),
        *,
        foreign: bool = False,
    ) -> list[PageId]:
        self.num_inserted += len(keys)
        return super().insert(parent, keys, pages, hold, contents, foreign=foreign)


def test_a_page_enters_the_cache_once_however_long_the_row():
    cache = CountingCache(PagePool(64))
    tokens = [index % 2 for index in range(60 * PAGE_SIZE)]
    table = PageTable(cache, PAGE_SIZE, "", Hold.LIVE)
    assert table.extend(len(tokens))
    for num_filled in range(1, len(tokens) + 1):
        table.cache_full_pages(tokens, num_filled)
    assert cache.num_inserted == len(cache) == 60


def test_a_chain_counts_as_used_until_it_is_released():
    """Pages of a long row are evicted after those of a prompt that ended before it."""
    cache = PrefixCache(PagePool(6))
    row = PageTable(cache, PAGE_SIZE, "", Hold.LIVE)
    assert row.extend(3 * PAGE_SIZE)
    row.cache_full_pages([0] * 3 * PAGE_SIZE, PAGE_SIZE)
    fill(cache, [1] * 2 * PAGE_SIZE)
    row.cache_full_pages([0] * 3 * PAGE_SIZE, 3 * PAGE_SIZE)
    row.release()
    assert cache.allocate(3, Hold.LIVE) is not None
    assert cache.num_matching(page_keys([0] * 3 * PAGE_SIZE, PAGE_SIZE, "")) == 3
    assert cache.num_matching(page_keys([1] * 2 * PAGE_SIZE, PAGE_SIZE, "")) == 0
