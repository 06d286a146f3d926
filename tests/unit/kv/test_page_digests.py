"""Digests of settled pages: set once, gone with the page, retired after two faults in an hour."""

from __future__ import annotations

import pytest

from baton.domain.errors import Broken
from baton.domain.ids import PageId
from baton.kv.page_digests import FAULT_WINDOW_S, PageState
from baton.kv.pages import Hold, Owner, PagePool


@pytest.fixture
def pool() -> PagePool:
    return PagePool(2)


def settle(pool: PagePool, digest: int = 7) -> PageId:
    pages = pool.allocate(1, Hold.LIVE)
    assert pages is not None
    pool.digests.set(pages[0], digest)
    return pages[0]


def fault(pool: PagePool, now: float) -> PageId:
    """A settled page that is found wrong and then freed."""
    page = settle(pool)
    pool.digests.record_fault(page, now)
    pool.condemn(page)
    pool.drop([page], Hold.LIVE)
    return page


def test_a_digest_is_set_once(pool: PagePool):
    page = settle(pool)
    with pytest.raises(Broken, match="SETTLED and cannot settle"):
        pool.digests.set(page, 8)
    assert pool.digests.digest(page) == 7


def test_a_freed_page_has_no_digest(pool: PagePool):
    page = settle(pool)
    pool.drop([page], Hold.LIVE)
    assert pool.digests.state(page) is PageState.NONE
    with pytest.raises(Broken, match="NONE and has no digest"):
        pool.digests.digest(page)


def test_a_condemned_page_has_no_digest_and_goes_with_its_last_hold(pool: PagePool):
    page = settle(pool)
    pool.hold([page], Hold.PINNED)
    pool.condemn(page)
    pool.drop([page], Hold.LIVE)
    assert pool.digests.is_condemned(page)
    with pytest.raises(Broken, match="CONDEMNED"):
        pool.digests.digest(page)
    pool.drop([page], Hold.PINNED)
    assert pool.owner(page) is Owner.FREE
    pool.check()


def test_two_faults_within_an_hour_retire_a_page(pool: PagePool):
    page = fault(pool, now=0.0)
    assert pool.owner(page) is Owner.FREE
    assert fault(pool, now=FAULT_WINDOW_S) == page
    assert pool.owner(page) is Owner.RETIRED
    assert (pool.num_free, pool.num_usable) == (1, 1)
    assert pool.allocate(2, Hold.LIVE) is None
    with pytest.raises(Broken, match="cannot be held"):
        pool.hold([page], Hold.LIVE)
    pool.check()


def test_faults_more_than_an_hour_apart_do_not_retire(pool: PagePool):
    page = fault(pool, now=0.0)
    assert fault(pool, now=FAULT_WINDOW_S + 1.0) == page
    assert pool.owner(page) is Owner.FREE


def test_a_free_page_with_a_digest_is_found(pool: PagePool):
    pool.digests.condemn(PageId(0))
    with pytest.raises(Broken, match="free and CONDEMNED"):
        pool.check()
