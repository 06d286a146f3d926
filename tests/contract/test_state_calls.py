"""One suite for every book: calls, their owners and the journals of their tokens (`baton.state.base.CallStore`)."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from redis.asyncio import Redis

from baton.domain.errors import Broken, Superseded
from baton.domain.ids import AttemptId, OwnerId, RequestId
from baton.domain.lifecycle import TERMINAL, RequestEvent, RequestState
from baton.domain.request import FinishReason, OutputToken, TokenLogprobs
from baton.state.base import (
    CallRecord,
    CallStatus,
    JournalEntry,
    JournalPart,
    RequestRecord,
    StateBook,
    StateUnavailable,
    Written,
)
from baton.state.connect import connect
from baton.state.keys import Keys
from baton.state.ledger import first_attempt
from baton.state.options import BookOptions
from tests.contract.books import DEADLINE_S, RARE, OpenBook
from tests.redis_server import frozen, running_redis

E = RequestEvent
JOBS = (RequestId("j0"), RequestId("j1"))
OURS, THEIRS = OwnerId("router-0/a1"), OwnerId("router-1/b2")
CALL = CallRecord(
    RequestId("c"),
    OURS,
    1,
    CallStatus.OPEN,
    "/v1/completions",
    b'{"prompt": "\xc3\xa9"}\xff',
    "tenant",
    17,
    2**63 - 1,
    JOBS,
)
EMPTY = JournalPart((), 0, None, "")
LEAVES = replace(RARE, owner_ttl_s=0.05)


def job(id: RequestId = JOBS[0], attempt: int = 1) -> RequestRecord:
    return RequestRecord(id, attempt, RequestState.RECEIVED, "router-0", "tiny", num_prompt_tokens=7)


def tokens(start: int, end: int) -> tuple[OutputToken, ...]:
    return tuple(OutputToken(index, 1000 + index) for index in range(start, end))


def entry(start: int, end: int, *, attempt: int = 1, id: RequestId = JOBS[0], **end_of_it: Any) -> JournalEntry:
    return JournalEntry(AttemptId(id, attempt), tokens(start, end), num_cached_tokens=3, **end_of_it)


async def in_state(book: StateBook, id: RequestId, *events: RequestEvent) -> None:
    await book.create(job(id))
    for event in events:
        await book.advance(AttemptId(id, 1), event, num_emitted=2)


# Calls


async def test_a_call_is_opened_once_and_comes_back_as_it_was(book: StateBook) -> None:
    assert await book.get_call(CALL.id) is None
    assert await book.open_call(CALL)
    assert not await book.open_call(replace(CALL, owner=THEIRS, body=b"{}"))
    assert await book.get_call(CALL.id) == CALL


@pytest.mark.parametrize("status", [CallStatus.ABANDONED, CallStatus.ENDED])
async def test_only_open_calls_are_entered_and_none_ends_by_being_open(book: StateBook, status: CallStatus) -> None:
    with pytest.raises(Broken, match="cannot be entered"):
        await book.open_call(replace(CALL, status=status))
    await book.open_call(CALL)
    with pytest.raises(Broken, match="cannot end"):
        await book.end_call(CALL.id, 1, CallStatus.OPEN)
    assert await book.get_call(CALL.id) == CALL


async def test_a_call_is_ended_by_its_owner_only(book: StateBook) -> None:
    assert not await book.end_call(CALL.id, 1, CallStatus.ENDED)
    await book.open_call(CALL)
    assert await book.end_call(CALL.id, 1, CallStatus.ABANDONED)
    claimed = await book.claim_call(CALL.id, 1, THEIRS)
    assert not await book.end_call(CALL.id, 1, CallStatus.ENDED)
    assert await book.get_call(CALL.id) == claimed == replace(CALL, owner=THEIRS, epoch=2)
    assert await book.end_call(CALL.id, 2, CallStatus.ENDED)
    assert await book.get_call(CALL.id) == replace(CALL, owner=THEIRS, epoch=2, status=CallStatus.ENDED)


async def test_a_claim_resumes_what_may_be_and_fences_the_rest_of_an_attempt(book: StateBook) -> None:
    ways = {
        RequestState.RECEIVED: (),
        RequestState.DECODING: (E.ENQUEUE, E.PROMISE, E.DECODE),
        RequestState.CANCELLED: (E.ENQUEUE, E.CANCEL),
        RequestState.FINISHED: (E.ENQUEUE, E.PROMISE, E.DECODE, E.FINISH),
        RequestState.FAILED: (E.FAIL,),
    }
    ids = {state: RequestId(state.value) for state in ways}
    for state, events in ways.items():
        await in_state(book, ids[state], *events)
    before = {state: await book.get(id) for state, id in ids.items()}
    await book.open_call(replace(CALL, jobs=(*ids.values(), RequestId("unknown"))))
    assert await book.claim_call(CALL.id, 1, THEIRS) is not None
    for state, id in ids.items():
        was, now = before[state], await book.get(id)
        assert was is not None
        if state in TERMINAL and state is not RequestState.CANCELLED:
            assert now == was
            continue
        first = first_attempt(2)
        assert now == replace(was, state=RequestState.QUEUED, attempt=first, router_id="router-1")
        for unwritten in (1, 2, first - 1):
            with pytest.raises(Superseded):
                await book.advance(AttemptId(id, unwritten), E.FAIL)
        assert await book.advance(AttemptId(id, first), E.PROMISE) is RequestState.PROMISED


async def test_a_claim_leaves_no_job_to_be_entered_by_its_old_owner(book: StateBook) -> None:
    await book.open_call(CALL)
    await in_state(book, JOBS[0], E.ENQUEUE)
    assert await book.claim_call(CALL.id, 1, THEIRS) is not None
    assert not await book.create(job(JOBS[1]))
    record = await book.get(JOBS[1])
    assert record is not None
    assert (record.id, record.state, record.attempt, record.router_id) == (
        *(JOBS[1], RequestState.QUEUED),
        *(first_attempt(2), "router-1"),
    )
    assert await book.advance(AttemptId(JOBS[1], first_attempt(2)), E.PROMISE) is RequestState.PROMISED


async def test_of_many_claims_one_wins(book: StateBook) -> None:
    await book.open_call(CALL)
    await in_state(book, JOBS[0], E.ENQUEUE)
    claims = [book.claim_call(CALL.id, 1, OwnerId(f"router-{number}/x")) for number in range(20)]
    won = [claimed for claimed in await asyncio.gather(*claims) if claimed is not None]
    assert len(won) == 1
    assert await book.get_call(CALL.id) == won[0] == replace(CALL, owner=won[0].owner, epoch=2)
    record = await book.get(JOBS[0])
    assert record is not None
    assert record.attempt == first_attempt(2)


async def test_what_has_ended_or_is_unknown_cannot_be_claimed(book: StateBook) -> None:
    assert await book.claim_call(CALL.id, 1, THEIRS) is None
    await book.open_call(CALL)
    assert await book.claim_call(CALL.id, 2, THEIRS) is None
    await in_state(book, JOBS[0], E.ENQUEUE)
    await book.end_call(CALL.id, 1, CallStatus.ENDED)
    assert await book.claim_call(CALL.id, 1, THEIRS) is None
    record = await book.get(JOBS[0])
    assert record is not None
    assert record.attempt == 1


# Owners


async def test_calls_whose_owner_is_gone_are_orphans_the_oldest_first(book: StateBook) -> None:
    others = [replace(CALL, id=RequestId(f"o{number}"), owner=OwnerId(f"r/{number % 2}")) for number in range(5)]
    await book.hold(OURS)
    for call in (CALL, *others):
        await book.open_call(call)
    assert await book.orphans() == []
    await book.let_go(OwnerId("r/0"))
    await book.let_go(OwnerId("r/0"))
    assert await book.orphans() == others[::2]
    await book.let_go(OwnerId("r/1"))
    assert await book.orphans() == others
    await book.end_call(others[0].id, 1, CallStatus.ENDED)
    await book.end_call(others[1].id, 1, CallStatus.ABANDONED)
    assert await book.claim_call(others[2].id, 1, OURS) is not None
    assert await book.orphans() == others[3:]
    await book.hold(OwnerId("r/1"))
    assert await book.orphans() == others[4:]


async def test_orphans_come_a_bounded_number_at_a_time(open_book: OpenBook) -> None:
    book = await open_book(replace(RARE, max_orphans=3))
    calls = [replace(CALL, id=RequestId(f"{9 - number}"), owner=OwnerId(f"r/{number % 2}")) for number in range(8)]
    for call in calls:
        await book.open_call(call)
    await book.hold(THEIRS)
    for number in range(2):
        await book.let_go(OwnerId(f"r/{number}"))
    for taken in (calls[:3], calls[3:6], calls[6:]):
        assert await book.orphans() == taken
        for call in taken:
            await book.claim_call(call.id, 1, THEIRS)
    assert await book.orphans() == []


async def test_a_lease_ends_by_itself(open_book: OpenBook) -> None:
    book = await open_book(LEAVES)
    await book.open_call(CALL)
    async with asyncio.timeout(DEADLINE_S):
        while not await book.orphans():
            await book.read_journal(JOBS[0], 0, 0.01)  # lets time pass
    assert await book.orphans() == [CALL]


# Journals


async def test_a_journal_is_read_from_any_token_on(book: StateBook) -> None:
    await book.create(job())
    assert await book.read_journal(JOBS[0], 0, 0.0) == EMPTY
    assert await book.write_journal([]) == []
    assert await book.write_journal([entry(0, 3), entry(3, 4), entry(4, 9)]) == [Written.DONE] * 3
    for start in range(9):
        assert await book.read_journal(JOBS[0], start, 5.0) == JournalPart(tokens(start, 9), 3, None, "")
    assert await book.read_journal(JOBS[0], 9, 0.0) == EMPTY
    assert await book.read_journal(RequestId("unknown"), 0, 0.0) == EMPTY


async def test_a_long_journal_comes_whole(book: StateBook) -> None:
    await book.create(job())
    written = [entry(index, index + 1) for index in range(3000)]
    assert await book.write_journal(written) == [Written.DONE] * 3000
    assert (await book.read_journal(JOBS[0], 0, 0.0)).tokens == tokens(0, 3000)


async def test_a_journal_keeps_what_it_has_and_takes_no_gap(book: StateBook) -> None:
    await book.create(job())
    await book.write_journal([entry(0, 4)])
    other = tuple(OutputToken(index, 7) for index in range(2, 6))
    outcomes = await book.write_journal([entry(2, 3), replace(entry(0, 0), tokens=other), entry(7, 9), entry(0, 6)])
    assert outcomes == [Written.DONE, Written.DONE, Written.GAP, Written.DONE]
    for start in range(6):
        assert (await book.read_journal(JOBS[0], start, 0.0)).tokens == (*tokens(0, 4), *other[2:])[start:]


async def test_logprobs_and_large_ids_come_back(book: StateBook) -> None:
    await book.create(job())
    known = TokenLogprobs(-0.1, ((2**31, -0.1), (5, -3.25)))
    written = (OutputToken(0, 2**31), OutputToken(1, 5, known), OutputToken(2, 0, TokenLogprobs(-7.0)))
    await book.write_journal([JournalEntry(AttemptId(JOBS[0], 1), written)])
    assert (await book.read_journal(JOBS[0], 0, 0.0)).tokens == written
    assert (await book.read_journal(JOBS[0], 1, 0.0)).tokens == written[1:]


@pytest.mark.parametrize(
    ("last", "first_unread"),
    [(entry(2, 5, finish=FinishReason.LENGTH), 5), (entry(1, 2, finish=FinishReason.STOP), 2), (entry(0, 0), 2)],
    ids=["with its last tokens", "with a token that it has", "by itself"],
)
async def test_an_ended_journal_says_so_and_takes_no_more(
    book: StateBook, last: JournalEntry, first_unread: int
) -> None:
    last = last if last.finish else replace(last, failure_code="worker_lost")
    await book.create(job())
    assert await book.write_journal([entry(0, 2), last, entry(first_unread, 9)]) == [Written.DONE] * 3
    for start in range(first_unread + 1):
        expected = JournalPart(tokens(start, first_unread), 3, last.finish, last.failure_code)
        assert await book.read_journal(JOBS[0], start, 5.0) == expected
    assert await book.read_journal(JOBS[0], first_unread + 1, 0.0) == EMPTY


async def test_an_empty_journal_can_end(book: StateBook) -> None:
    await book.create(job())
    assert await book.write_journal([entry(0, 0, failure_code="deadline_exceeded")]) == [Written.DONE]
    assert await book.read_journal(JOBS[0], 0, 5.0) == JournalPart((), 3, None, "deadline_exceeded")


async def test_older_attempts_cannot_write_and_newer_ones_go_on(book: StateBook) -> None:
    assert await book.write_journal([entry(0, 2)]) == [Written.GAP]  # nothing is known of the request
    await book.open_call(CALL)
    for id in JOBS:
        await in_state(book, id, E.ENQUEUE)
    assert await book.write_journal([entry(0, 2), entry(0, 1, id=JOBS[1])]) == [Written.DONE] * 2
    await book.claim_call(CALL.id, 1, THEIRS)
    newer = first_attempt(2)
    outcomes = await book.write_journal(
        [entry(2, 3), entry(1, 3, attempt=newer), entry(1, 2, id=JOBS[1]), entry(0, 2, attempt=newer, id=JOBS[1])]
    )
    assert outcomes == [Written.SUPERSEDED, Written.DONE] * 2
    assert (await book.read_journal(JOBS[0], 0, 0.0)).tokens == tokens(0, 3)
    assert (await book.read_journal(JOBS[1], 0, 0.0)).tokens == tokens(0, 2)


async def test_entries_out_of_order_in_themselves_are_refused(book: StateBook) -> None:
    await book.create(job())
    with pytest.raises(Broken, match="do not follow"):
        await book.write_journal([replace(entry(0, 2), tokens=(*tokens(0, 1), *tokens(2, 3)))])
    assert await book.read_journal(JOBS[0], 0, 0.0) == EMPTY


async def test_many_readers_wait_for_the_same_and_for_other_tokens(book: StateBook) -> None:
    ids = [RequestId(f"j{number}") for number in range(50)]
    for id in ids:
        await book.create(job(id))
    async with asyncio.timeout(2 * DEADLINE_S), asyncio.TaskGroup() as group:
        readers = [group.create_task(book.read_journal(id, 0, DEADLINE_S)) for id in ids for _ in range(2)]
        early = group.create_task(book.read_journal(ids[0], 1, DEADLINE_S))
        await book.ping()  # nobody stands in the way
        assert await book.write_journal([entry(0, 1, id=id) for id in ids]) == [Written.DONE] * 50
        parts = await asyncio.gather(*readers)
        assert not early.done()
        await book.write_journal([entry(1, 2, id=ids[0])])
        assert (await early).tokens == tokens(1, 2)
    assert {part.tokens for part in parts} <= {tokens(0, 1), tokens(0, 2)}


async def test_a_reader_that_goes_away_leaves_the_others_waiting(book: StateBook) -> None:
    await book.create(job())
    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as group:
        leaving, staying = (group.create_task(book.read_journal(JOBS[0], 0, DEADLINE_S)) for _ in range(2))
        assert await book.read_journal(JOBS[0], 0, 0.01) == EMPTY  # by now both wait
        leaving.cancel()
        await book.write_journal([entry(0, 1)])
        assert (await staying).tokens == tokens(0, 1)
    assert leaving.cancelled()


async def test_calls_and_journals_are_forgotten(open_book: OpenBook) -> None:
    book = await open_book(BookOptions(retention_s=0.1, owner_ttl_s=0.05, timeout_s=5.0))
    await book.create(job())
    await book.open_call(CALL)
    await book.write_journal([entry(0, 1)])
    async with asyncio.timeout(DEADLINE_S):
        while await book.get_call(CALL.id) or (await book.read_journal(JOBS[0], 0, 0.0)).tokens:
            await book.read_journal(RequestId("none"), 0, 0.01)  # lets time pass
    assert await book.orphans() == []
    assert await book.open_call(CALL)


async def test_a_closed_book_answers_no_call(book: StateBook) -> None:
    await book.close()
    calls = (
        book.open_call(CALL),
        book.end_call(CALL.id, 1, CallStatus.ENDED),
        book.get_call(CALL.id),
        book.claim_call(CALL.id, 1, THEIRS),
        book.hold(OURS),
        book.let_go(OURS),
        book.orphans(),
        book.write_journal([entry(0, 1)]),
        book.read_journal(JOBS[0], 0, 1.0),
    )
    for call in calls:
        with pytest.raises(StateUnavailable, match="closed"):
            await call


# What only Redis can get wrong


async def test_every_call_in_redis_expires(redis_book: tuple[StateBook, Keys, Redis]) -> None:
    book, keys, outside = redis_book
    await book.create(job())
    await book.open_call(CALL)
    await book.write_journal([entry(0, 1)])
    assert await outside.pexpire(keys.journal(JOBS[0]), 50_000)
    assert await outside.pexpire(keys.request(JOBS[0]), 50_000)
    await book.write_journal([entry(1, 2)])
    for key in (keys.journal(JOBS[0]), keys.request(JOBS[0])):  # a job that goes on is kept
        assert await outside.pttl(key) > 50_000
    await book.claim_call(CALL.id, 1, THEIRS)
    await book.hold(THEIRS)
    names = [key async for key in outside.scan_iter(match=f"{keys.prefix}*")]
    assert len(names) == 8  # the call, its two jobs, a journal, owners, the new owner's calls, and two leases
    assert [name for name in names if await outside.pttl(name) == -1] == []


async def test_an_orphan_of_another_version_hides_nobody(redis_book: tuple[StateBook, Keys, Redis]) -> None:
    book, keys, outside = redis_book
    await book.open_call(replace(CALL, id=RequestId("strange")))
    await book.open_call(CALL)
    await outside.hset(keys.call(RequestId("strange")), "seed", "many")
    await book.let_go(OURS)
    assert await book.orphans() == [CALL]


async def test_readers_of_a_frozen_server_are_told_in_time() -> None:
    with running_redis() as server:
        book = await connect(server.url, BookOptions(timeout_s=0.5))
        with frozen(server):
            reads = [book.read_journal(JOBS[0], 0, 0.5) for _ in range(100)]
            outcomes = await asyncio.wait_for(asyncio.gather(*reads, return_exceptions=True), DEADLINE_S)
        assert {type(outcome) for outcome in outcomes} == {StateUnavailable}
        assert await book.read_journal(JOBS[0], 0, 0.0) == EMPTY
        await book.close()
