"""Offers: pins, leases, fencing, and a commit that says the truth every time it is asked."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from baton.domain.errors import Broken, Superseded
from baton.domain.ids import AttemptId, PageId, RequestId
from baton.kv.pages import Hold, Owner, PagePool
from services.prefill.offers import OfferBook

LEASE_S = 5.0
ID = AttemptId(RequestId("r"), 1)
NEXT = AttemptId(RequestId("r"), 2)


@pytest.fixture
def pool() -> PagePool:
    return PagePool(8)


@pytest.fixture
def offers(pool: PagePool) -> OfferBook:
    return OfferBook(pool, LEASE_S)


def publish(pool: PagePool, offers: OfferBook, id: AttemptId, num_pages: int, now: float = 0.0) -> list[PageId]:
    """Pages of a prompt that is no longer in progress: the offer's pins alone hold them."""
    pages = pool.allocate(num_pages, Hold.LIVE)
    assert pages is not None
    offers.publish(id, pages, now)
    pool.drop(pages, Hold.LIVE)
    return pages


def test_pins_hold_pages_until_the_commit(pool: PagePool, offers: OfferBook):
    offers.open(ID)
    pages = publish(pool, offers, ID, 2)
    assert {pool.owner(page) for page in pages} == {Owner.PINNED}
    offers.seal(ID)
    assert offers.commit(ID)
    assert pool.num_free == 8


def test_a_commit_may_be_repeated(pool: PagePool, offers: OfferBook):
    offers.open(ID)
    publish(pool, offers, ID, 1)
    offers.seal(ID)
    assert [offers.commit(ID), offers.commit(ID)] == [True, True]


def test_a_commit_before_the_seal_changes_nothing(pool: PagePool, offers: OfferBook):
    offers.open(ID)
    publish(pool, offers, ID, 1)
    assert not offers.commit(ID)
    offers.seal(ID)
    assert offers.commit(ID)


def test_a_commit_after_the_lease_is_not_valid_and_stays_so(pool: PagePool, offers: OfferBook):
    offers.open(ID)
    publish(pool, offers, ID, 2, now=1.0)
    offers.seal(ID)
    assert offers.next_deadline() == 1.0 + LEASE_S
    assert offers.expire(1.0 + LEASE_S) == [ID]
    assert pool.num_free == 8
    assert [offers.commit(ID), offers.commit(ID)] == [False, False]


def test_a_commit_of_what_never_was(offers: OfferBook):
    assert not offers.commit(ID)


def test_renewing_starts_the_lease_afresh(pool: PagePool, offers: OfferBook):
    offers.open(ID)
    publish(pool, offers, ID, 1, now=0.0)
    assert offers.renew([ID, NEXT], now=4.0) == [NEXT]
    assert offers.expire(4.0 + LEASE_S - 0.1) == []
    assert offers.expire(4.0 + LEASE_S) == [ID]
    assert offers.renew([ID], now=9.0) == [ID]


def test_the_lease_runs_from_the_first_page(pool: PagePool, offers: OfferBook):
    offers.open(ID)
    assert offers.renew([ID], now=1.0) == []
    assert offers.next_deadline() is None
    publish(pool, offers, ID, 1, now=7.0)
    publish(pool, offers, ID, 1, now=9.0)
    assert offers.next_deadline() == 7.0 + LEASE_S


def test_a_newer_attempt_ends_the_older(pool: PagePool, offers: OfferBook):
    offers.open(ID)
    publish(pool, offers, ID, 2)
    assert offers.open(NEXT) == ID
    assert pool.num_free == 8
    assert not offers.is_open(ID)
    assert offers.is_open(NEXT)


@pytest.mark.parametrize("late", [ID, NEXT])
def test_an_attempt_that_is_not_newer_is_refused(offers: OfferBook, late: AttemptId):
    offers.open(ID)
    offers.abort(ID)
    assert offers.open(NEXT) is None  # the older one had ended by itself
    with pytest.raises(Superseded, match="attempt 2 was seen"):
        offers.open(late)
    assert len(offers) == 1


def test_an_abort_unpins_now_and_may_be_repeated(pool: PagePool, offers: OfferBook):
    offers.open(ID)
    publish(pool, offers, ID, 2)
    assert [offers.abort(ID), offers.abort(ID)] == [True, False]
    assert pool.num_free == 8
    assert not offers.commit(ID)


def granting(pool: PagePool, *, renewed: bool = True) -> OfferBook:
    """One that lets decode count on its leases, with a published offer until 6.0."""
    offers = OfferBook(pool, LEASE_S, grants_leases=True)
    offers.open(ID)
    publish(pool, offers, ID, 2)
    if renewed:
        assert offers.renew([ID], now=1.0) == []
    return offers


def test_a_granted_lease_outlives_the_attempt(pool: PagePool):
    offers = granting(pool)
    assert [offers.abort(ID), offers.abort(ID)] == [True, False]
    assert not offers.is_open(ID)
    assert offers.renew([ID], now=2.0) == [ID], "it is not held any longer than was granted"
    assert offers.expire(5.9) == []
    assert pool.counts()[Owner.PINNED] == 2
    assert offers.expire(6.0) == [ID]
    assert pool.num_free == 8


@pytest.mark.parametrize("word", [OfferBook.release, OfferBook.commit])
def test_decode_s_word_ends_a_granted_lease(pool: PagePool, word: Callable[[OfferBook, AttemptId], bool]):
    offers = granting(pool)
    offers.abort(ID)
    word(offers, ID)
    assert pool.num_free == 8
    assert len(offers) == 0
    assert not offers.commit(ID), "an attempt that was given up is not committed"


def test_a_newer_attempt_does_not_end_a_granted_lease(pool: PagePool):
    offers = granting(pool)
    assert offers.open(NEXT) == ID
    assert pool.counts()[Owner.PINNED] == 2
    assert len(offers) == 2


def test_before_the_first_renewal_nothing_was_granted(pool: PagePool):
    offers = granting(pool, renewed=False)
    offers.abort(ID)
    assert pool.num_free == 8


def test_a_page_that_two_offers_share_is_held_until_both_end(pool: PagePool, offers: OfferBook):
    other = AttemptId(RequestId("s"), 1)
    offers.open(ID)
    offers.open(other)
    pages = publish(pool, offers, ID, 1)
    offers.publish(other, pages, 0.0)
    offers.abort(ID)
    assert pool.owner(pages[0]) is Owner.PINNED
    offers.abort(other)
    assert pool.owner(pages[0]) is Owner.FREE


def test_a_sealed_offer_publishes_nothing_more(pool: PagePool, offers: OfferBook):
    offers.open(ID)
    offers.seal(ID)
    pages = pool.allocate(1, Hold.LIVE)
    assert pages is not None
    with pytest.raises(Broken, match="cannot publish"):
        offers.publish(ID, pages, 0.0)
    assert pool.owner(pages[0]) is Owner.LIVE
    pool.drop(pages, Hold.LIVE)
    assert pool.num_free == 8, "a refused publish pinned its pages"
