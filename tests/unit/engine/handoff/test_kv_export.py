"""KV exports: pins, leases, fencing, and commits that can be repeated."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from baton.domain.errors import Broken, Superseded
from baton.domain.ids import AttemptId, PageId, RequestId
from baton.engine.handoff.kv_export import ExportTable
from baton.kv.pages import Hold, Owner, PagePool

LEASE_S = 5.0
ID = AttemptId(RequestId("r"), 1)
NEXT = AttemptId(RequestId("r"), 2)


@pytest.fixture
def pool() -> PagePool:
    return PagePool(8)


@pytest.fixture
def exports(pool: PagePool) -> ExportTable:
    return ExportTable(pool, LEASE_S)


def publish(pool: PagePool, exports: ExportTable, id: AttemptId, num_pages: int, now: float = 0.0) -> list[PageId]:
    """Publishes pages that only the export's pins hold."""
    pages = pool.allocate(num_pages, Hold.LIVE)
    assert pages is not None
    exports.publish(id, pages, now)
    pool.drop(pages, Hold.LIVE)
    return pages


def test_pins_hold_pages_until_the_commit(pool: PagePool, exports: ExportTable):
    exports.open(ID)
    pages = publish(pool, exports, ID, 2)
    assert {pool.owner(page) for page in pages} == {Owner.PINNED}
    exports.seal(ID)
    assert exports.commit(ID)
    assert pool.num_free == 8


def test_a_commit_may_be_repeated(pool: PagePool, exports: ExportTable):
    exports.open(ID)
    publish(pool, exports, ID, 1)
    exports.seal(ID)
    assert [exports.commit(ID), exports.commit(ID)] == [True, True]


def test_a_commit_before_the_seal_changes_nothing(pool: PagePool, exports: ExportTable):
    exports.open(ID)
    publish(pool, exports, ID, 1)
    assert not exports.commit(ID)
    exports.seal(ID)
    assert exports.commit(ID)


def test_a_commit_after_the_lease_is_not_valid_and_stays_so(pool: PagePool, exports: ExportTable):
    exports.open(ID)
    publish(pool, exports, ID, 2, now=1.0)
    exports.seal(ID)
    assert exports.next_deadline() == 1.0 + LEASE_S
    assert exports.expire(1.0 + LEASE_S) == [ID]
    assert pool.num_free == 8
    assert [exports.commit(ID), exports.commit(ID)] == [False, False]


def test_a_commit_of_an_unknown_attempt_is_invalid(exports: ExportTable):
    assert not exports.commit(ID)


def test_a_renewal_restarts_the_lease(pool: PagePool, exports: ExportTable):
    exports.open(ID)
    publish(pool, exports, ID, 1, now=0.0)
    assert exports.renew([ID, NEXT], now=4.0) == [NEXT]
    assert exports.expire(4.0 + LEASE_S - 0.1) == []
    assert exports.expire(4.0 + LEASE_S) == [ID]
    assert exports.renew([ID], now=9.0) == [ID]


def test_the_lease_runs_from_the_first_page(pool: PagePool, exports: ExportTable):
    exports.open(ID)
    assert exports.renew([ID], now=1.0) == []
    assert exports.next_deadline() is None
    publish(pool, exports, ID, 1, now=7.0)
    publish(pool, exports, ID, 1, now=9.0)
    assert exports.next_deadline() == 7.0 + LEASE_S


def test_a_newer_attempt_ends_the_older(pool: PagePool, exports: ExportTable):
    exports.open(ID)
    publish(pool, exports, ID, 2)
    assert exports.open(NEXT) == ID
    assert pool.num_free == 8
    assert exports.renew([ID, NEXT], 0.0) == [ID]


def test_a_lower_ballot_opens_no_export_and_learns_the_newest(exports: ExportTable):
    newer = AttemptId(ID.request_id, 1, owner_tag=7)
    exports.open(newer)
    for late in (ID, AttemptId(ID.request_id, 9, owner_tag=6)):
        with pytest.raises(Superseded) as refused:
            exports.open(late)
        assert refused.value.seen == newer
    assert len(exports) == 1


@pytest.mark.parametrize("late", [ID, NEXT])
def test_an_attempt_that_is_not_newer_is_refused(exports: ExportTable, late: AttemptId):
    exports.open(ID)
    exports.abort(ID)
    assert exports.open(NEXT) is None  # the older one had ended already
    with pytest.raises(Superseded, match="attempt 2 was seen"):
        exports.open(late)
    assert len(exports) == 1


def test_an_abort_unpins_now_and_may_be_repeated(pool: PagePool, exports: ExportTable):
    exports.open(ID)
    publish(pool, exports, ID, 2)
    assert [exports.abort(ID), exports.abort(ID)] == [True, False]
    assert pool.num_free == 8
    assert not exports.commit(ID)


def granting(pool: PagePool, *, renewed: bool = True) -> ExportTable:
    """A table that grants leases, with a published export whose lease ends at 6.0."""
    exports = ExportTable(pool, LEASE_S, grants_leases=True)
    exports.open(ID)
    publish(pool, exports, ID, 2)
    if renewed:
        assert exports.renew([ID], now=1.0) == []
    return exports


def test_a_granted_lease_outlives_the_attempt(pool: PagePool):
    exports = granting(pool)
    assert [exports.abort(ID), exports.abort(ID)] == [True, False]
    assert exports.renew([ID], 0.0) == [ID]
    assert exports.renew([ID], now=2.0) == [ID], "it is not held any longer than was granted"
    assert exports.expire(5.9) == []
    assert pool.counts()[Owner.PINNED] == 2
    assert exports.expire(6.0) == [ID]
    assert pool.num_free == 8


@pytest.mark.parametrize("word", [ExportTable.release, ExportTable.commit])
def test_a_commit_or_release_ends_a_granted_lease(pool: PagePool, word: Callable[[ExportTable, AttemptId], bool]):
    exports = granting(pool)
    exports.abort(ID)
    assert word(exports, ID) is (word is ExportTable.release), "an attempt that was given up is not committed"
    assert pool.num_free == 8
    assert len(exports) == 0
    assert not exports.commit(ID)


def test_a_newer_attempt_does_not_end_a_granted_lease(pool: PagePool):
    exports = granting(pool)
    assert exports.open(NEXT) == ID
    assert pool.counts()[Owner.PINNED] == 2
    assert len(exports) == 2


def test_before_the_first_renewal_an_abort_unpins_at_once(pool: PagePool):
    exports = granting(pool, renewed=False)
    exports.abort(ID)
    assert pool.num_free == 8


def test_a_page_that_two_exports_share_is_held_until_both_end(pool: PagePool, exports: ExportTable):
    other = AttemptId(RequestId("s"), 1)
    exports.open(ID)
    exports.open(other)
    pages = publish(pool, exports, ID, 1)
    exports.publish(other, pages, 0.0)
    exports.abort(ID)
    assert pool.owner(pages[0]) is Owner.PINNED
    exports.abort(other)
    assert pool.owner(pages[0]) is Owner.FREE


def test_a_sealed_export_publishes_nothing_more(pool: PagePool, exports: ExportTable):
    exports.open(ID)
    exports.seal(ID)
    pages = pool.allocate(1, Hold.LIVE)
    assert pages is not None
    with pytest.raises(Broken, match="cannot publish"):
        exports.publish(ID, pages, 0.0)
    assert pool.owner(pages[0]) is Owner.LIVE
    pool.drop(pages, Hold.LIVE)
    assert pool.num_free == 8, "a refused publish pinned its pages"
