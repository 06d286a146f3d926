"""Landings one by one: promises, windows, pages read again, what ends one, and what is kept of it."""

from __future__ import annotations

import pytest

from baton.domain.errors import ContextOverflow, IntegrityFailure, LinkBroken, Superseded
from baton.domain.handoff import LandingState
from baton.domain.ids import AttemptId, PageId, RequestId, WorkerId
from baton.domain.request import SampledToken
from baton.kv.keys import page_keys
from baton.kv.pages import Hold, Owner, PagePool
from baton.kv.radix import RadixCache
from baton.transfer.base import Pull, PullEvent, PullOutcome
from services.decode.boarding import Busy, Promised, SealInfo
from services.decode.landing import LandingBook, LandingLimits
from tests.worlds import NUM_PAGES, PAGE_SIZE, assert_idle, engine_request

SOURCE = WorkerId("prefill-0")
REQUEST = engine_request("r", [0, 1, 1, 0, 1, 0, 1])  # 4 pages, the last one half full
ID = REQUEST.id
KEYS = page_keys(REQUEST.tokens, PAGE_SIZE, "")


class Desk:
    """A landing book and the few words that every test needs."""

    def __init__(self, max_rows: int = 4, max_window_pages: int = 2) -> None:
        self.cache = RadixCache(PagePool(NUM_PAGES))
        limits = LandingLimits(PAGE_SIZE, max_rows, max_window_pages, pull_deadline_s=1.0)
        self.book = LandingBook(self.cache, limits)

    def promise(self, id: AttemptId = ID, num_tokens: int = 7, num_rows: int = 0) -> Promised | Busy:
        return self.book.promise(id, num_tokens, KEYS if id == ID else [], num_rows, now=0.0, deadline_s=5.0)

    def claimed(self) -> Promised:
        promised = self.promise()
        assert isinstance(promised, Promised)
        assert self.book.claim(promised.id, REQUEST, SOURCE, deadline=9.0)
        return promised

    def chunk(self, first: int, end: int, digests: bool = True) -> list[Pull]:
        pages = [PageId(100 + i) for i in range(first, end)]
        return self.book.chunk(ID, first, pages, [7] * len(pages) if digests else None, now=1.0)

    def end(self, pull: Pull, outcome: PullOutcome = PullOutcome.DONE, *corrupt: int, now: float = 2.0) -> list[Pull]:
        return self.book.pulled(PullEvent(pull, outcome, 64, 0.1, "", corrupt), now)

    def land(self, first: int, end: int) -> None:
        pulls = self.chunk(first, end)
        while pulls:
            pulls += self.end(pulls.pop())

    def seal(self) -> None:
        self.book.sealed(ID, SealInfo(SampledToken(1), None, 4), now=3.0)


def test_a_promise_sets_pages_aside_and_binds_them_late():
    desk = Desk()
    assert desk.claimed().prefix_len == 0
    assert desk.book.num_reserved_pages == 4
    assert desk.cache.pool.num_free == NUM_PAGES
    desk.chunk(0, 1)
    assert desk.book.num_reserved_pages == 0
    assert desk.cache.pool.counts()[Owner.PROMISED] == 4


def test_the_same_attempt_gets_the_same_promise():
    desk = Desk()
    assert desk.promise() == desk.promise()
    assert desk.book.num_reserved_pages == 4


@pytest.mark.parametrize(("num_tokens", "fits"), [(NUM_PAGES * PAGE_SIZE - 1, True), (NUM_PAGES * PAGE_SIZE, False)])
def test_what_can_never_fit(num_tokens: int, fits: bool):
    desk = Desk()
    if fits:
        assert isinstance(desk.promise(num_tokens=num_tokens), Promised)
    else:
        with pytest.raises(ContextOverflow):
            desk.promise(num_tokens=num_tokens)


def test_what_is_promised_to_one_is_not_promised_to_another():
    desk = Desk()
    assert isinstance(desk.promise(), Promised)
    assert desk.promise(AttemptId(RequestId("s"), 1), num_tokens=8) == Busy(4)
    assert isinstance(desk.promise(AttemptId(RequestId("s"), 1), num_tokens=7), Promised)
    assert desk.book.num_promisable == 0


def test_rows_are_promised_like_pages():
    desk = Desk(max_rows=2)
    assert isinstance(desk.promise(num_tokens=1, num_rows=2), Busy)
    assert isinstance(desk.promise(num_tokens=1, num_rows=1), Promised)
    assert isinstance(desk.promise(AttemptId(RequestId("s"), 1), num_tokens=1, num_rows=1), Busy)


def test_an_older_attempt_is_superseded():
    desk = Desk()
    desk.promise(AttemptId(ID.request_id, 3))
    with pytest.raises(Superseded, match="attempt 3"):
        desk.promise(AttemptId(ID.request_id, 2))


def test_a_promise_is_claimed_once_by_its_own_request():
    desk = Desk()
    promised = desk.promise()
    assert isinstance(promised, Promised)
    other = engine_request("r", [0, 1])
    assert not desk.book.claim(promised.id, other, SOURCE, 9.0), "of another length than was promised"
    assert desk.book.claim(promised.id, REQUEST, SOURCE, 9.0)
    assert not desk.book.claim(promised.id, REQUEST, SOURCE, 9.0)


def test_reads_stay_within_the_window():
    desk = Desk(max_window_pages=2)
    desk.claimed()
    (first,) = desk.chunk(0, 4)
    assert first.remote_pages == (100, 101)
    assert desk.chunk(0, 4) == [], "what was announced before is not read again"
    (second,) = desk.end(first)
    assert second.remote_pages == (102, 103)
    assert desk.end(second) == []


def test_what_is_cached_here_is_not_read():
    desk = Desk()
    desk.claimed()
    desk.land(0, 4)
    desk.seal()
    desk.book.commit(ID, 4.0).table.release()
    again = AttemptId(ID.request_id, 2)
    promised = desk.book.promise(again, 7, KEYS, 0, 5.0, 5.0)
    assert isinstance(promised, Promised)
    assert promised.prefix_len == 6
    request = engine_request("r", list(REQUEST.tokens), attempt=2)
    assert desk.book.claim(promised.id, request, SOURCE, 9.0)
    (pull,) = desk.book.chunk(again, 0, [PageId(i) for i in range(4)], None, 6.0)
    assert pull.remote_pages == (3,), "a read into cached pages could harm others"


def test_a_corrupt_page_is_read_once_more_and_then_fails():
    desk = Desk()
    desk.claimed()
    (pull,) = desk.chunk(0, 2)
    (again,) = desk.end(pull, PullOutcome.CORRUPT, 1)
    assert (again.remote_pages, again.local_pages) == (pull.remote_pages[1:], pull.local_pages[1:])
    with pytest.raises(IntegrityFailure, match="twice"):
        desk.end(again, PullOutcome.CORRUPT, 0)


def test_a_corrupt_page_that_is_right_the_second_time():
    desk = Desk()
    desk.claimed()
    (pull,) = desk.chunk(0, 2)
    (again,) = desk.end(pull, PullOutcome.CORRUPT, 0)
    assert desk.end(again) == []
    desk.land(2, 4)
    assert not desk.book.ready(ID)
    desk.seal()
    assert desk.book.ready(ID)
    boarding = desk.book.commit(ID, now=5.0)
    assert (boarding.num_pages, boarding.prefix_len, boarding.exposed_s) == (4, 0, 2.0)
    assert boarding.pull_s == 4.0


@pytest.mark.parametrize(("first", "end"), [(1, 2), (0, 5)])
def test_pages_that_do_not_continue(first: int, end: int):
    desk = Desk()
    desk.claimed()
    with pytest.raises(LinkBroken, match="do not continue"):
        desk.chunk(first, end)


def test_a_chunk_whose_digests_do_not_match_in_number():
    desk = Desk()
    desk.claimed()
    with pytest.raises(LinkBroken, match="1 digests came with 2 pages"):
        desk.book.chunk(ID, 0, [PageId(1), PageId(2)], [7], 1.0)


def test_a_seal_with_pages_missing():
    desk = Desk()
    desk.claimed()
    desk.land(0, 3)
    with pytest.raises(LinkBroken, match="3 of 4 pages"):
        desk.seal()
    assert not desk.book.ready(ID)


@pytest.mark.parametrize("outcome", [PullOutcome.FAILED, PullOutcome.LATE])
def test_a_read_that_fails_or_is_late(outcome: PullOutcome):
    desk = Desk()
    desk.claimed()
    (pull,) = desk.chunk(0, 2)
    with pytest.raises(LinkBroken):
        desk.end(pull, outcome)
    assert desk.book.abort(ID) == SOURCE
    late = outcome is PullOutcome.LATE
    assert desk.book.num_draining == late, "a late read may still land"
    assert desk.cache.pool.counts()[Owner.DRAINING] == (4 if late else 0)
    if late:
        desk.end(pull, PullOutcome.FAILED)
    assert_idle(desk.cache)


def test_an_abort_waits_for_the_last_read():
    desk = Desk(max_window_pages=4)
    desk.claimed()
    (one,), (other,) = desk.chunk(0, 2), desk.chunk(2, 4)
    assert desk.book.abort(ID) == SOURCE
    assert desk.book.abort(ID) is None
    assert desk.end(one) == []
    assert desk.book.num_draining == 1
    assert desk.cache.pool.num_free == NUM_PAGES - 4
    desk.end(other)
    assert desk.book.num_draining == 0
    assert desk.cache.pool.num_free == NUM_PAGES
    assert desk.end(other) == []  # an event of nobody


@pytest.mark.parametrize(("digests", "num_kept"), [(True, 2), (False, 0)])
def test_only_validated_leading_pages_are_kept(digests: bool, num_kept: int):
    desk = Desk()
    desk.claimed()
    (pull,) = desk.chunk(0, 2, digests)
    desk.end(pull)
    (pull,) = desk.chunk(2, 4, digests)
    desk.book.abort(ID)
    desk.end(pull)
    assert desk.cache.num_matching(KEYS) == num_kept
    assert_idle(desk.cache)


@pytest.mark.parametrize(("lease_ends_at", "num_kept"), [(None, 0), (2.0, 0), (2.1, 1), (3.1, 2)])
def test_pages_read_inside_a_lease_are_kept(lease_ends_at: float | None, num_kept: int):
    """A read that is over when the lease ends came too late: prefill may have reused the page in that instant."""
    desk = Desk()
    desk.claimed()
    (pull,) = desk.chunk(0, 1, digests=False)
    desk.end(pull, now=2.0)
    (pull,) = desk.chunk(1, 2, digests=False)
    desk.end(pull, now=3.0)
    if lease_ends_at is not None:
        desk.book.renewed([ID, AttemptId(RequestId("nobody"), 1)], lease_ends_at)
        desk.book.renewed([ID], lease_ends_at - 1.0)  # an older answer that came late
    desk.book.abort(ID)
    assert desk.cache.num_matching(KEYS) == num_kept
    assert_idle(desk.cache)


@pytest.mark.parametrize("lease_ends_at", [2.0, 2.1])
def test_a_landing_is_proven_by_a_lease_that_covers_every_read(lease_ends_at: float):
    desk = Desk(max_window_pages=4)
    desk.claimed()
    (pull,) = desk.chunk(0, 4, digests=False)
    desk.end(pull, now=2.0)
    desk.seal()
    assert desk.book.ready(ID)
    assert not desk.book.proven(ID)
    desk.book.renewed([ID], lease_ends_at)
    assert desk.book.proven(ID) == (lease_ends_at > 2.0)


def test_a_landing_is_unfinished_until_everything_was_read():
    desk = Desk(max_window_pages=4)
    desk.claimed()
    (pull,) = desk.chunk(0, 4)
    desk.seal()
    assert desk.book.unfinished(SOURCE) == [ID]
    assert desk.book.unfinished(WorkerId("prefill-1")) == []
    desk.end(pull)
    assert desk.book.unfinished(SOURCE) == []


def test_a_promise_that_nobody_claims_ends():
    desk = Desk()
    desk.promise()
    assert desk.book.next_deadline() == 5.0
    assert desk.book.expire(4.9) == []
    assert desk.book.expire(5.0) == [ID]
    assert desk.book.abort(ID) is None
    assert desk.book.num_reserved_pages == 0
    assert_idle(desk.cache)


def test_states_follow_the_table():
    desk = Desk()
    desk.claimed()
    landing = desk.book.get(ID)
    assert landing is not None
    assert landing.state is LandingState.PROMISED
    desk.land(0, 4)
    assert landing.state.value == "pulling"
    desk.seal()
    boarding = desk.book.commit(ID, 4.0)
    assert landing.state.value == "committed"
    assert {desk.cache.pool.owner(page) for page in boarding.table.pages} == {Owner.LIVE}
    boarding.table.release()
    assert desk.cache.pool.allocate(1, Hold.LIVE) is not None
