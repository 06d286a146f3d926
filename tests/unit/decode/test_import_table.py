"""KV imports: reservations, read windows, repeated reads, failures, and the pages that stay cached."""

from __future__ import annotations

import pytest

from baton.domain.errors import Broken, ContextOverflow, IntegrityFailure, LinkBroken, PageVerdict, Superseded
from baton.domain.handoff import ImportState, PublishedChunk
from baton.domain.ids import AttemptId, PageId, RequestId, WorkerId
from baton.domain.request import SampledToken
from baton.kv.keys import page_keys
from baton.kv.pages import Hold, Owner, PagePool
from baton.kv.prefix_cache import PrefixCache
from baton.services.decode.import_table import ImportTable
from baton.services.decode.kv_import import Busy, ImportLimits, ProofKind, Reserved, SealInfo
from baton.transfer.base import Pull, PullEvent, PullOutcome
from tests.tiny_workers import NUM_PAGES, PAGE_SIZE, assert_idle, engine_request

SOURCE = WorkerId("prefill-0")
REQUEST = engine_request("r", [0, 1, 1, 0, 1, 0, 1])  # 4 pages, the last one half full
ID = REQUEST.id
KEYS = page_keys(REQUEST.tokens, PAGE_SIZE, "")


class ImportDriver:
    """An import table and shortcuts of its calls."""

    def __init__(self, max_rows: int = 4, max_window_pages: int = 2) -> None:
        self.cache = PrefixCache(PagePool(NUM_PAGES))
        limits = ImportLimits(PAGE_SIZE, max_rows, max_window_pages, pull_deadline_s=1.0)
        self.imports = ImportTable(self.cache, limits)

    def reserve(self, id: AttemptId = ID, num_tokens: int = 7, num_rows: int = 0) -> Reserved | Busy:
        return self.imports.reserve(id, num_tokens, KEYS if id == ID else [], num_rows, now=0.0, deadline_s=5.0)

    def claim(self) -> Reserved:
        reserved = self.reserve()
        assert isinstance(reserved, Reserved)
        assert self.imports.claim(reserved.id, REQUEST, SOURCE, deadline=9.0, received_at=0.5)
        return reserved

    def chunk(self, first: int, end: int, digests: bool = True) -> list[Pull]:
        pages = tuple(PageId(100 + i) for i in range(first, end))
        return self.imports.on_chunk(PublishedChunk(ID, first, pages, (7,) * len(pages) if digests else None), now=1.0)

    def end(self, pull: Pull, outcome: PullOutcome = PullOutcome.DONE, *corrupt: int, now: float = 2.0) -> list[Pull]:
        return self.imports.on_pull_event(PullEvent(pull, outcome, 64, 0.1, "", corrupt), now)

    def import_pages(self, first: int, end: int) -> None:
        pulls = self.chunk(first, end)
        while pulls:
            pulls += self.end(pulls.pop())

    def seal(self) -> None:
        self.imports.on_seal(ID, SealInfo(SampledToken(1), None, 4), now=3.0)


def test_a_reservation_allocates_pages_at_the_first_chunk():
    driver = ImportDriver()
    assert driver.claim().prefix_len == 0
    assert driver.imports.num_reserved_pages == 4
    assert driver.cache.pool.num_free == NUM_PAGES
    driver.chunk(0, 1)
    assert driver.imports.num_reserved_pages == 0
    assert driver.cache.pool.counts()[Owner.RESERVED] == 4


def test_pages_that_retire_fail_the_import_that_counted_on_them():
    driver = ImportDriver()
    pool = driver.cache.pool
    worn = pool.allocate(NUM_PAGES - 4, Hold.LIVE)
    assert worn is not None
    assert driver.claim().prefix_len == 0, "the last four pages are reserved"
    in_use = pool.allocate(1, Hold.LIVE)  # as a reserved page that retires leaves one less
    assert in_use is not None
    for now in (0.0, 1.0):
        pool.digests.record_fault(worn[0], now)
    pool.drop(worn[:1], Hold.LIVE)
    assert pool.num_owned(Owner.RETIRED) == 1
    with pytest.raises(IntegrityFailure) as failure:
        driver.chunk(0, 1)
    assert failure.value.verdict is PageVerdict.PULLER
    assert driver.imports.abort(ID) == SOURCE
    assert (driver.imports.num_reserved_pages, len(driver.imports)) == (0, 0)


def test_reserved_pages_that_nobody_retired_are_there():
    driver = ImportDriver()
    driver.claim()
    assert driver.cache.pool.allocate(NUM_PAGES - 3, Hold.LIVE) is not None
    with pytest.raises(Broken):
        driver.chunk(0, 1)


def test_the_same_attempt_gets_the_same_reservation():
    driver = ImportDriver()
    assert driver.reserve() == driver.reserve()
    assert driver.imports.num_reserved_pages == 4


@pytest.mark.parametrize(("num_tokens", "fits"), [(NUM_PAGES * PAGE_SIZE - 1, True), (NUM_PAGES * PAGE_SIZE, False)])
def test_a_prompt_that_never_fits_is_refused(num_tokens: int, fits: bool):
    driver = ImportDriver()
    if fits:
        assert isinstance(driver.reserve(num_tokens=num_tokens), Reserved)
    else:
        with pytest.raises(ContextOverflow):
            driver.reserve(num_tokens=num_tokens)


def test_pages_are_reserved_once():
    driver = ImportDriver()
    assert isinstance(driver.reserve(), Reserved)
    assert driver.reserve(AttemptId(RequestId("s"), 1), num_tokens=8) == Busy(4)
    assert isinstance(driver.reserve(AttemptId(RequestId("s"), 1), num_tokens=7), Reserved)
    assert driver.imports.num_reservable_pages == 0


def test_rows_are_reserved_like_pages():
    driver = ImportDriver(max_rows=2)
    assert isinstance(driver.reserve(num_tokens=1, num_rows=2), Busy)
    assert isinstance(driver.reserve(num_tokens=1, num_rows=1), Reserved)
    assert isinstance(driver.reserve(AttemptId(RequestId("s"), 1), num_tokens=1, num_rows=1), Busy)


def test_an_older_attempt_is_superseded():
    driver = ImportDriver()
    driver.reserve(AttemptId(ID.request_id, 3))
    with pytest.raises(Superseded, match="attempt 3"):
        driver.reserve(AttemptId(ID.request_id, 2))


def test_a_reservation_is_claimed_once_by_its_own_request():
    driver = ImportDriver()
    reserved = driver.reserve()
    assert isinstance(reserved, Reserved)
    other = engine_request("r", [0, 1])
    assert not driver.imports.claim(reserved.id, other, SOURCE, 9.0), "of another length than was reserved"
    assert driver.imports.claim(reserved.id, REQUEST, SOURCE, 9.0)
    assert not driver.imports.claim(reserved.id, REQUEST, SOURCE, 9.0)


def test_reads_stay_within_the_window():
    driver = ImportDriver(max_window_pages=2)
    driver.claim()
    (first,) = driver.chunk(0, 4)
    assert first.remote_pages == (100, 101)
    assert driver.chunk(0, 4) == [], "what was announced before is not read again"
    (second,) = driver.end(first)
    assert second.remote_pages == (102, 103)
    assert driver.end(second) == []


def test_cached_pages_are_not_read():
    driver = ImportDriver()
    driver.claim()
    driver.import_pages(0, 4)
    driver.seal()
    driver.imports.commit(ID, ProofKind.DIGESTS, 4.0).table.release()
    again = AttemptId(ID.request_id, 2)
    reserved = driver.imports.reserve(again, 7, KEYS, 0, 5.0, 5.0)
    assert isinstance(reserved, Reserved)
    assert reserved.prefix_len == 6
    request = engine_request("r", list(REQUEST.tokens), attempt=2)
    assert driver.imports.claim(reserved.id, request, SOURCE, 9.0)
    (pull,) = driver.imports.on_chunk(PublishedChunk(again, 0, tuple(PageId(i) for i in range(4))), 6.0)
    assert pull.remote_pages == (3,), "a read into cached pages could harm others"


def test_a_corrupt_page_is_read_once_more_and_then_fails():
    driver = ImportDriver()
    driver.claim()
    (pull,) = driver.chunk(0, 2)
    (again,) = driver.end(pull, PullOutcome.CORRUPT, 1)
    assert (again.remote_pages, again.local_pages) == (pull.remote_pages[1:], pull.local_pages[1:])
    with pytest.raises(IntegrityFailure, match="twice"):
        driver.end(again, PullOutcome.CORRUPT, 0)


def test_a_corrupt_page_that_matches_the_second_time():
    driver = ImportDriver()
    driver.claim()
    (pull,) = driver.chunk(0, 2)
    (again,) = driver.end(pull, PullOutcome.CORRUPT, 0)
    assert driver.end(again) == []
    driver.import_pages(2, 4)
    assert not driver.imports.is_ready(ID)
    driver.seal()
    assert driver.imports.is_ready(ID)
    imported = driver.imports.commit(ID, ProofKind.DIGESTS, now=5.0)
    times = imported.times
    assert (times.pages, times.re_reads, imported.prefix_len, times.proof) == (4, 1, 0, "v3")
    assert (times.first_chunk_us, times.pull_us, times.exposed_us, times.commit_us) == (
        500_000, 1_000_000, 2_000_000, 4_500_000,
    )  # fmt: skip


@pytest.mark.parametrize(("first", "end"), [(1, 2), (0, 5)])
def test_a_chunk_that_leaves_a_gap_is_refused(first: int, end: int):
    driver = ImportDriver()
    driver.claim()
    with pytest.raises(LinkBroken, match="do not continue"):
        driver.chunk(first, end)


def test_a_chunk_needs_one_digest_per_page():
    driver = ImportDriver()
    driver.claim()
    with pytest.raises(LinkBroken, match="1 digests came with 2 pages"):
        driver.imports.on_chunk(PublishedChunk(ID, 0, (PageId(1), PageId(2)), (7,)), 1.0)


def test_a_seal_before_the_last_page_is_refused():
    driver = ImportDriver()
    driver.claim()
    driver.import_pages(0, 3)
    with pytest.raises(LinkBroken, match="3 of 4 pages"):
        driver.seal()
    assert not driver.imports.is_ready(ID)


@pytest.mark.parametrize("outcome", [PullOutcome.FAILED, PullOutcome.LATE])
def test_a_failed_or_late_read_fails_the_import(outcome: PullOutcome):
    driver = ImportDriver()
    driver.claim()
    (pull,) = driver.chunk(0, 2)
    with pytest.raises(LinkBroken):
        driver.end(pull, outcome)
    assert driver.imports.abort(ID) == SOURCE
    late = outcome is PullOutcome.LATE
    assert driver.imports.num_draining == late, "a late read may still land"
    assert driver.cache.pool.counts()[Owner.DRAINING] == (4 if late else 0)
    if late:
        driver.end(pull, PullOutcome.FAILED)
    assert_idle(driver.cache)


def test_an_abort_waits_for_the_last_read():
    driver = ImportDriver(max_window_pages=4)
    driver.claim()
    (one,), (other,) = driver.chunk(0, 2), driver.chunk(2, 4)
    assert driver.imports.abort(ID) == SOURCE
    assert driver.imports.abort(ID) is None
    assert driver.end(one) == []
    assert driver.imports.num_draining == 1
    assert driver.cache.pool.num_free == NUM_PAGES - 4
    driver.end(other)
    assert driver.imports.num_draining == 0
    assert driver.cache.pool.num_free == NUM_PAGES
    assert driver.end(other) == []  # an event of an ended import


@pytest.mark.parametrize(("digests", "num_kept"), [(True, 2), (False, 0)])
def test_only_validated_leading_pages_are_kept(digests: bool, num_kept: int):
    driver = ImportDriver()
    driver.claim()
    (pull,) = driver.chunk(0, 2, digests)
    driver.end(pull)
    (pull,) = driver.chunk(2, 4, digests)
    driver.imports.abort(ID)
    driver.end(pull)
    assert driver.cache.num_matching(KEYS) == num_kept
    assert_idle(driver.cache)


@pytest.mark.parametrize(("lease_ends_at", "num_kept"), [(None, 0), (2.0, 0), (2.1, 1), (3.1, 2)])
def test_pages_read_inside_a_lease_are_kept(lease_ends_at: float | None, num_kept: int):
    """A read that ends with the lease is too late: prefill may have reused the page at that instant."""
    driver = ImportDriver()
    driver.claim()
    (pull,) = driver.chunk(0, 1, digests=False)
    driver.end(pull, now=2.0)
    (pull,) = driver.chunk(1, 2, digests=False)
    driver.end(pull, now=3.0)
    if lease_ends_at is not None:
        driver.imports.on_leases_renewed([ID, AttemptId(RequestId("nobody"), 1)], lease_ends_at)
        driver.imports.on_leases_renewed([ID], lease_ends_at - 1.0)  # an older answer that came late
    driver.imports.abort(ID)
    assert driver.cache.num_matching(KEYS) == num_kept
    assert_idle(driver.cache)


@pytest.mark.parametrize("lease_ends_at", [2.0, 2.1])
def test_a_lease_that_covers_every_read_proves_an_import(lease_ends_at: float):
    driver = ImportDriver(max_window_pages=4)
    driver.claim()
    (pull,) = driver.chunk(0, 4, digests=False)
    driver.end(pull, now=2.0)
    driver.seal()
    assert driver.imports.is_ready(ID)
    assert not driver.imports.is_proven(ID)
    driver.imports.on_leases_renewed([ID], lease_ends_at)
    assert driver.imports.is_proven(ID) == (lease_ends_at > 2.0)


@pytest.mark.parametrize(("condemned", "num_usable"), [(None, 4), (3, 3), (1, 1), (0, 0), (4, 4)])
def test_pages_are_usable_up_to_the_first_condemned_one(condemned: int | None, num_usable: int):
    """Page 4 is the first output token's, and no page of the prompt."""
    driver = ImportDriver()
    reserved = driver.imports.reserve(ID, 8, KEYS, 0, now=0.0, deadline_s=5.0)
    assert isinstance(reserved, Reserved)
    request = engine_request("r", [*REQUEST.tokens, 1])
    assert driver.imports.claim(reserved.id, request, SOURCE, deadline=9.0)
    kv_import, digests = driver.imports._imports[ID], driver.cache.pool.digests
    assert kv_import.num_usable(PAGE_SIZE, digests) == 0, "none has come"
    driver.import_pages(0, 2)
    assert kv_import.num_usable(PAGE_SIZE, digests) == 2
    driver.import_pages(2, 4)
    assert len(kv_import.table.pages) == 5
    if condemned is not None:
        digests.condemn(kv_import.table.pages[condemned])
    assert kv_import.num_usable(PAGE_SIZE, digests) == num_usable
    assert driver.imports.is_proven(ID) == (num_usable == 4)


def test_an_import_is_unfinished_until_every_page_was_read():
    driver = ImportDriver(max_window_pages=4)
    driver.claim()
    (pull,) = driver.chunk(0, 4)
    driver.seal()
    assert driver.imports.unfinished(SOURCE) == [ID]
    assert driver.imports.unfinished(WorkerId("prefill-1")) == []
    driver.end(pull)
    assert driver.imports.unfinished(SOURCE) == []


def test_an_unclaimed_reservation_expires():
    driver = ImportDriver()
    driver.reserve()
    assert driver.imports.next_deadline() == 5.0
    assert driver.imports.expire(4.9) == []
    assert driver.imports.expire(5.0) == [ID]
    assert driver.imports.abort(ID) is None
    assert driver.imports.num_reserved_pages == 0
    assert_idle(driver.cache)


def test_states_follow_the_table():
    driver = ImportDriver()
    driver.claim()
    kv_import = driver.imports.get(ID)
    assert kv_import is not None
    assert kv_import.state is ImportState.RESERVED
    driver.import_pages(0, 4)
    assert kv_import.state.value == "pulling"
    driver.seal()
    imported = driver.imports.commit(ID, ProofKind.DIGESTS, 4.0)
    assert kv_import.state.value == "committed"
    assert {driver.cache.pool.owner(page) for page in imported.table.pages} == {Owner.LIVE}
    imported.table.release()
    assert driver.cache.pool.allocate(1, Hold.LIVE) is not None
