"""The page pool against a model that counts holds; and corruption that `check` must detect."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from baton.domain.errors import Broken
from baton.domain.ids import PageId
from baton.kv.pages import Hold, Owner, PagePool
from tests.tiny_workers import NUM_PAGES, REPEATABLE_SETTINGS

HOLDS = st.sampled_from(Hold)
OWNERS = {
    Hold.DRAINING: Owner.DRAINING,
    Hold.RESERVED: Owner.RESERVED,
    Hold.LIVE: Owner.LIVE,
    Hold.IN_FLIGHT: Owner.LIVE,
    Hold.PINNED: Owner.PINNED,
}


class PoolMachine(RuleBasedStateMachine):
    """Rules hold and drop pages; the model counts the holds."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(NUM_PAGES)
        self.holds: Counter[tuple[PageId, Hold]] = Counter()
        self.cached: set[PageId] = set()

    @rule(num_pages=st.integers(0, NUM_PAGES + 1), hold=HOLDS)
    def allocate(self, num_pages: int, hold: Hold) -> None:
        free = {page for page in range(NUM_PAGES) if self._owner(PageId(page)) is Owner.FREE}
        pages = self.pool.allocate(num_pages, hold)
        if pages is None:
            assert num_pages > len(free)
            return
        assert len(pages) == len(set(pages)) == num_pages
        assert set(pages) <= free, "a held page was handed out"
        self.holds.update((page, hold) for page in pages)

    @precondition(lambda self: self._used())
    @rule(data=st.data(), hold=HOLDS)
    def hold_more(self, data: st.DataObject, hold: Hold) -> None:
        pages = data.draw(st.lists(st.sampled_from(self._used()), max_size=4))
        self.pool.hold(pages, hold)
        self.holds.update((page, hold) for page in pages)

    @precondition(lambda self: +self.holds)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        page, hold = data.draw(st.sampled_from(sorted(+self.holds)))
        self.pool.drop([page], hold)
        self.holds[page, hold] -= 1

    @precondition(lambda self: +self.holds)
    @rule(data=st.data(), new=HOLDS)
    def move(self, data: st.DataObject, new: Hold) -> None:
        page, old = data.draw(st.sampled_from(sorted(+self.holds)))
        self.pool.move([page], old, new)
        self.holds[page, old] -= 1
        self.holds[page, new] += 1

    @precondition(lambda self: self._used())
    @rule(data=st.data(), cached=st.booleans())
    def cache(self, data: st.DataObject, cached: bool) -> None:
        page = data.draw(st.sampled_from(self._used()))
        self.pool.set_cached(page, cached)
        (self.cached.add if cached else self.cached.discard)(page)

    @rule(page=st.integers(0, NUM_PAGES - 1), hold=HOLDS)
    def refuse_what_is_not_there(self, page: int, hold: Hold) -> None:
        if not self.holds[PageId(page), hold]:
            with pytest.raises(Broken, match=r"no .* hold to drop"):
                self.pool.drop([PageId(page)], hold)
        if self._owner(PageId(page)) is Owner.FREE:
            with pytest.raises(Broken, match="is free"):
                self.pool.hold([PageId(page)], hold)

    @invariant()
    def every_page_is_in_one_book(self) -> None:
        self.pool.check()
        owners = [self._owner(PageId(page)) for page in range(NUM_PAGES)]
        assert [self.pool.owner(PageId(page)) for page in range(NUM_PAGES)] == owners
        assert self.pool.counts() == {owner: owners.count(owner) for owner in Owner}
        assert sum(self.pool.counts().values()) == NUM_PAGES
        assert self.pool.num_free == owners.count(Owner.FREE)
        assert self.pool.num_cached == owners.count(Owner.CACHED)

    def _owner(self, page: PageId) -> Owner:
        strongest = next((OWNERS[hold] for hold in OWNERS if self.holds[page, hold]), None)
        return strongest or (Owner.CACHED if page in self.cached else Owner.FREE)

    def _used(self) -> list[PageId]:
        return [PageId(page) for page in range(NUM_PAGES) if self._owner(PageId(page)) is not Owner.FREE]


def test_page_pool():
    run_state_machine_as_test(PoolMachine, settings=REPEATABLE_SETTINGS)


def check_in_slices(pool: PagePool) -> None:
    for start in range(0, NUM_PAGES, 3):
        pool.check_pages(start, min(NUM_PAGES, start + 3))


@pytest.fixture(params=[PagePool.check, check_in_slices])
def check(request: pytest.FixtureRequest) -> Callable[[PagePool], None]:
    return request.param


class TestCheckCanFail:
    def pool(self) -> tuple[PagePool, list[PageId]]:
        pool = PagePool(NUM_PAGES)
        pages = pool.allocate(2, Hold.LIVE)
        assert pages is not None
        pool.check()
        check_in_slices(pool)
        return pool, pages

    def test_a_used_page_on_the_free_list(self, check: Callable[[PagePool], None]):
        pool, pages = self.pool()
        pool._free.append(pages[0])
        with pytest.raises(Broken, match="7 pages are on the free list, 6 are free"):
            check(pool)

    def test_a_used_page_in_the_place_of_a_free_one(self, check: Callable[[PagePool], None]):
        pool, pages = self.pool()
        pool._free[-1] = pages[0]
        with pytest.raises(Broken, match="is FREE, the free list says otherwise"):
            check(pool)

    def test_a_page_freed_twice(self, check: Callable[[PagePool], None]):
        pool, _ = self.pool()
        pool._free[0] = pool._free[1]
        with pytest.raises(Broken, match="the free list says otherwise"):
            check(pool)

    def test_a_lost_page(self, check: Callable[[PagePool], None]):
        pool, _ = self.pool()
        pool._free.pop()
        with pytest.raises(Broken, match="5 pages are on the free list, 6 are free"):
            check(pool)

    def test_a_hold_that_was_not_counted(self, check: Callable[[PagePool], None]):
        pool, pages = self.pool()
        pool._holds[Hold.LIVE][pages[0]] = 0
        with pytest.raises(Broken, match="is counted as LIVE, is FREE"):
            check(pool)

    def test_counts_that_drifted(self):
        pool, _ = self.pool()
        pool._num_owned[Owner.CACHED] += 1
        with pytest.raises(Broken, match="counts"):
            pool.check()
