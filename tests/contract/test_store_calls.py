"""One suite for every store: calls, their owners and the journals of their tokens (`baton.store.store.CallStore`)."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import pytest
from redis.asyncio import Redis

from baton.domain.errors import Broken, Superseded
from baton.domain.ids import AttemptId, OwnerId, RequestId, first_attempt, owner_tag
from baton.domain.lifecycle import TERMINAL, RequestEvent, RequestState
from baton.domain.request import FinishReason, OutputToken, TokenLogprobs
from baton.store.connect import connect
from baton.store.options import StoreOptions
from baton.store.redis.keys import RedisKeys
from baton.store.store import (
    CallOwner,
    CallRecord,
    CallStatus,
    JournalEntry,
    JournalPart,
    RecordLost,
    SequenceRecord,
    StateStore,
    StoreUnavailable,
    WriteOutcome,
)
from tests.contract.stores import DEADLINE_S, RARE, OpenStore, journal_entry
from tests.redis_server import frozen, running_redis

E = RequestEvent
SEQUENCES = (RequestId("j0"), RequestId("j1"))
OURS, THEIRS = OwnerId("router-0/a1"), OwnerId("router-1/b2")
NOW_S = int(time.time())
THEIR_TAG = owner_tag(THEIRS)
BODY = b'{"prompt": "\xc3\xa9"}\xff'
CALL = CallRecord(
    *(RequestId("c"), OURS, 1, CallStatus.OPEN, "/v1/completions", BODY, "tenant", NOW_S, 2**63 - 1, SEQUENCES),
    text_digest="text",
    prompt_digest="prompt",
)
EMPTY = JournalPart((), 0, None, "")
LEAVES = replace(RARE, owner_ttl_s=0.05)


def sequence(id: RequestId = SEQUENCES[0], attempt: int = 1) -> SequenceRecord:
    return SequenceRecord(id, attempt, RequestState.RECEIVED, "router-0", "tiny", num_prompt_tokens=7)


def tokens(start: int, end: int) -> tuple[OutputToken, ...]:
    return tuple(OutputToken(index, 1000 + index) for index in range(start, end))


def entry(
    start: int, end: int, *, attempt: int = 1, tag: int = 0, id: RequestId = SEQUENCES[0], **end_of_it: Any
) -> JournalEntry:
    return journal_entry(AttemptId(id, attempt, tag), tokens(start, end), num_cached_tokens=3, **end_of_it)


async def in_state(store: StateStore, id: RequestId, *events: RequestEvent) -> None:
    await store.create(sequence(id))
    for event in events:
        await store.advance(AttemptId(id, 1), event, num_emitted=2)


# Calls


async def test_a_call_is_put_once_under_one_ballot_and_read_back_unchanged(store: StateStore) -> None:
    assert await store.get_call(CALL.id) is None
    opened = CallOwner(OURS, (1, 0), CallStatus.OPEN)
    assert await store.put_call(CALL) == opened
    assert await store.put_call(replace(CALL, owner=THEIRS, body=b"{}")) == opened
    assert await store.get_call(CALL.id) == CALL


@pytest.mark.parametrize("status", [CallStatus.ABANDONED, CallStatus.ENDED])
async def test_only_open_calls_are_opened_and_none_ends_open(store: StateStore, status: CallStatus) -> None:
    with pytest.raises(Broken, match="cannot be opened"):
        await store.put_call(replace(CALL, status=status))
    await store.put_call(CALL)
    with pytest.raises(Broken, match="cannot end"):
        await store.end_call(CALL.id, (1, 0), CallStatus.OPEN)
    assert await store.get_call(CALL.id) == CALL


async def test_only_its_owner_ends_a_call(store: StateStore) -> None:
    assert not await store.end_call(CALL.id, (1, 0), CallStatus.ABANDONED)
    await store.put_call(CALL)
    assert await store.end_call(CALL.id, (1, 0), CallStatus.ABANDONED)
    claimed = await store.claim_call(CALL.id, (1, 0), THEIRS)
    assert not await store.end_call(CALL.id, (1, 0), CallStatus.ENDED)
    assert await store.get_call(CALL.id) == claimed == replace(CALL, owner=THEIRS, epoch=2, owner_tag=THEIR_TAG)
    assert await store.end_call(CALL.id, (2, THEIR_TAG), CallStatus.ENDED)
    assert await store.get_call(CALL.id) == replace(
        CALL, owner=THEIRS, epoch=2, owner_tag=THEIR_TAG, status=CallStatus.ENDED
    )


async def test_a_call_does_not_end_while_the_store_has_its_sequence_live(store: StateStore) -> None:
    """The store was rolled back to before the end of the sequence, and nobody has noticed yet."""
    await store.put_call(CALL)
    await in_state(store, SEQUENCES[0], E.ENQUEUE)
    for status in (CallStatus.ENDED, CallStatus.ABANDONED):
        with pytest.raises(RecordLost, match="call c cannot end: its sequence j0 is live in the store"):
            await store.end_call(CALL.id, (1, 0), status, b"a trace", SEQUENCES)
    assert await store.get_call(CALL.id) == CALL
    await store.advance(AttemptId(SEQUENCES[0], 1), E.CANCEL)
    assert await store.end_call(CALL.id, (1, 0), CallStatus.ENDED, b"", SEQUENCES)  # nobody needs the other: it is lost


async def test_only_sequences_that_have_ended_are_asked_for(store: StateStore) -> None:
    """One that was given up stays live for its next owner."""
    await store.put_call(CALL)
    await in_state(store, SEQUENCES[0], E.ENQUEUE)
    assert await store.end_call(CALL.id, (1, 0), CallStatus.ABANDONED, b"", SEQUENCES[1:])


async def test_the_end_of_a_claim_that_the_store_has_lost_is_stored(store: StateStore) -> None:
    """It was rolled back to before the claim: its first owner would hold the call for ever."""
    await store.put_call(CALL)
    assert await store.end_call(CALL.id, (2, THEIR_TAG), CallStatus.ENDED)
    ended = replace(CALL, epoch=2, owner_tag=THEIR_TAG, status=CallStatus.ENDED)
    assert await store.get_call(CALL.id) == ended
    assert await store.put_call(CALL) == CallOwner(CALL.owner, (2, THEIR_TAG), CallStatus.ENDED)
    assert not await store.end_call(CALL.id, (1, 0), CallStatus.ABANDONED)
    assert await store.list_orphans() == []
    assert await store.get_call(CALL.id) == ended


async def test_a_claim_resumes_sequences_and_fences_earlier_attempts(store: StateStore) -> None:
    ways = {
        RequestState.RECEIVED: (),
        RequestState.DECODING: (E.ENQUEUE, E.RESERVE, E.DECODE),
        RequestState.CANCELLED: (E.ENQUEUE, E.CANCEL),
        RequestState.FINISHED: (E.ENQUEUE, E.RESERVE, E.DECODE, E.FINISH),
        RequestState.FAILED: (E.FAIL,),
    }
    ids = {state: RequestId(state.value) for state in ways}
    for state, events in ways.items():
        await in_state(store, ids[state], *events)
    before = {state: await store.get(id) for state, id in ids.items()}
    await store.put_call(replace(CALL, sequence_ids=(*ids.values(), RequestId("unknown"))))
    assert await store.claim_call(CALL.id, (1, 0), THEIRS) is not None
    for state, id in ids.items():
        was, now = before[state], await store.get(id)
        assert was is not None
        if state in TERMINAL and state is not RequestState.CANCELLED:
            assert now == was
            continue
        first = first_attempt(2)
        assert now == replace(was, state=RequestState.QUEUED, attempt=first, owner_tag=THEIR_TAG, router_id="router-1")
        for unwritten in (1, 2, first - 1):
            with pytest.raises(Superseded):
                await store.advance(AttemptId(id, unwritten), E.FAIL)
        assert await store.advance(AttemptId(id, first, THEIR_TAG), E.RESERVE) is RequestState.RESERVED


async def test_after_a_claim_the_old_owner_cannot_create_sequences(store: StateStore) -> None:
    await store.put_call(CALL)
    await in_state(store, SEQUENCES[0], E.ENQUEUE)
    assert await store.claim_call(CALL.id, (1, 0), THEIRS) is not None
    assert not await store.create(sequence(SEQUENCES[1]))
    record = await store.get(SEQUENCES[1])
    assert record is not None
    assert (record.id, record.state, record.attempt, record.router_id) == (
        *(SEQUENCES[1], RequestState.QUEUED),
        *(first_attempt(2), "router-1"),
    )
    assert await store.advance(AttemptId(SEQUENCES[1], first_attempt(2), THEIR_TAG), E.RESERVE) is RequestState.RESERVED


async def test_a_trace_is_stored_with_the_end_of_a_call(store: StateStore) -> None:
    trace = bytes(range(256)) * 32
    await store.put_call(CALL)
    with pytest.raises(Broken, match="8193 bytes"):
        await store.end_call(CALL.id, (1, 0), CallStatus.ENDED, trace + b"x")
    assert await store.end_call(CALL.id, (1, 0), CallStatus.ABANDONED, trace)
    assert await store.get_call(CALL.id) == replace(CALL, status=CallStatus.ABANDONED, trace=trace)
    assert await store.claim_call(CALL.id, (1, 0), THEIRS) is not None
    assert not await store.end_call(CALL.id, (1, 0), CallStatus.ENDED, b"late")
    assert await store.end_call(CALL.id, (2, THEIR_TAG), CallStatus.ENDED)
    expected = replace(CALL, owner=THEIRS, epoch=2, owner_tag=THEIR_TAG, status=CallStatus.ENDED, trace=trace)
    assert await store.get_call(CALL.id) == expected


async def test_of_many_claims_one_wins(store: StateStore) -> None:
    await store.put_call(CALL)
    await in_state(store, SEQUENCES[0], E.ENQUEUE)
    claims = [store.claim_call(CALL.id, (1, 0), OwnerId(f"router-{number}/x")) for number in range(20)]
    won = [claimed for claimed in await asyncio.gather(*claims) if claimed is not None]
    assert len(won) == 1
    assert (
        await store.get_call(CALL.id)
        == won[0]
        == replace(CALL, owner=won[0].owner, epoch=2, owner_tag=owner_tag(won[0].owner))
    )
    record = await store.get(SEQUENCES[0])
    assert record is not None
    assert record.attempt == first_attempt(2)


async def test_ended_or_unknown_calls_cannot_be_claimed(store: StateStore) -> None:
    assert await store.claim_call(CALL.id, (1, 0), THEIRS) is None
    await store.put_call(CALL)
    assert await store.claim_call(CALL.id, (2, 0), THEIRS) is None
    await in_state(store, SEQUENCES[0], E.ENQUEUE)
    await store.end_call(CALL.id, (1, 0), CallStatus.ENDED)
    assert await store.claim_call(CALL.id, (1, 0), THEIRS) is None
    record = await store.get(SEQUENCES[0])
    assert record is not None
    assert record.attempt == 1


# Journals


async def test_a_journal_is_read_from_any_token(store: StateStore) -> None:
    await store.create(sequence())
    assert await store.read_journal(SEQUENCES[0], 0, 0.0) == EMPTY
    assert await store.write_journal([]) == []
    assert await store.write_journal([entry(0, 3), entry(3, 4), entry(4, 9)]) == [WriteOutcome.DONE] * 3
    for start in range(9):
        assert await store.read_journal(SEQUENCES[0], start, 5.0) == JournalPart(tokens(start, 9), 3, None, "")
    assert await store.read_journal(SEQUENCES[0], 9, 0.0) == EMPTY
    assert await store.read_journal(RequestId("unknown"), 0, 0.0) == EMPTY


async def test_a_long_journal_is_read_whole(store: StateStore) -> None:
    await store.create(sequence())
    written = [entry(index, index + 1) for index in range(3000)]
    assert await store.write_journal(written) == [WriteOutcome.DONE] * 3000
    assert (await store.read_journal(SEQUENCES[0], 0, 0.0)).tokens == tokens(0, 3000)


async def test_a_journal_keeps_its_tokens_and_refuses_a_gap(store: StateStore) -> None:
    await store.create(sequence())
    await store.write_journal([entry(0, 4)])
    other = tuple(OutputToken(index, 7) for index in range(2, 6))
    outcomes = await store.write_journal(
        [entry(2, 3), replace(entry(2, 6), tokens=(7, 7, 7, 7)), entry(7, 9), entry(0, 6)]
    )
    assert outcomes == [WriteOutcome.DONE, WriteOutcome.DONE, WriteOutcome.GAP, WriteOutcome.DONE]
    for start in range(6):
        assert (await store.read_journal(SEQUENCES[0], start, 0.0)).tokens == (*tokens(0, 4), *other[2:])[start:]


async def test_logprobs_and_large_ids_round_trip(store: StateStore) -> None:
    await store.create(sequence())
    known = TokenLogprobs(-0.1, ((2**31, -0.1), (5, -3.25)))
    written = (OutputToken(0, 2**31), OutputToken(1, 5, known), OutputToken(2, 0, TokenLogprobs(-7.0)))
    await store.write_journal([journal_entry(AttemptId(SEQUENCES[0], 1), written)])
    assert (await store.read_journal(SEQUENCES[0], 0, 0.0)).tokens == written
    assert (await store.read_journal(SEQUENCES[0], 1, 0.0)).tokens == written[1:]


@pytest.mark.parametrize(
    ("last", "first_unread"),
    [(entry(2, 5, finish=FinishReason.LENGTH), 5), (entry(1, 2, finish=FinishReason.STOP), 2), (entry(0, 0), 2)],
    ids=["with its last tokens", "with a token that it has", "by itself"],
)
async def test_an_ended_journal_accepts_no_more(store: StateStore, last: JournalEntry, first_unread: int) -> None:
    last = last if last.finish else replace(last, failure_code="worker_lost")
    await store.create(sequence())
    assert await store.write_journal([entry(0, 2), last, entry(first_unread, 9)]) == [WriteOutcome.DONE] * 3
    for start in range(first_unread + 1):
        expected = JournalPart(tokens(start, first_unread), 3, last.finish, last.failure_code)
        assert await store.read_journal(SEQUENCES[0], start, 5.0) == expected
    assert await store.read_journal(SEQUENCES[0], first_unread + 1, 0.0) == EMPTY


async def test_an_empty_journal_can_end(store: StateStore) -> None:
    await store.create(sequence())
    assert await store.write_journal([entry(0, 0, failure_code="deadline_exceeded")]) == [WriteOutcome.DONE]
    assert await store.read_journal(SEQUENCES[0], 0, 5.0) == JournalPart((), 3, None, "deadline_exceeded")


async def test_older_attempts_cannot_write_journals_and_newer_can(store: StateStore) -> None:
    assert await store.write_journal([entry(0, 2)]) == [WriteOutcome.GAP]  # the sequence is unknown
    await store.put_call(CALL)
    for id in SEQUENCES:
        await in_state(store, id, E.ENQUEUE)
    assert await store.write_journal([entry(0, 2), entry(0, 1, id=SEQUENCES[1])]) == [WriteOutcome.DONE] * 2
    await store.claim_call(CALL.id, (1, 0), THEIRS)
    newer = first_attempt(2)
    outcomes = await store.write_journal(
        [
            entry(2, 3),
            entry(1, 3, attempt=newer, tag=THEIR_TAG),
            entry(1, 2, id=SEQUENCES[1]),
            entry(0, 2, attempt=newer, tag=THEIR_TAG, id=SEQUENCES[1]),
        ]
    )
    assert outcomes == [WriteOutcome.SUPERSEDED, WriteOutcome.DONE] * 2
    assert (await store.read_journal(SEQUENCES[0], 0, 0.0)).tokens == tokens(0, 3)
    assert (await store.read_journal(SEQUENCES[1], 0, 0.0)).tokens == tokens(0, 2)


async def test_many_readers_wait_for_the_same_and_other_tokens(store: StateStore) -> None:
    ids = [RequestId(f"j{number}") for number in range(50)]
    for id in ids:
        await store.create(sequence(id))
    async with asyncio.timeout(2 * DEADLINE_S), asyncio.TaskGroup() as group:
        readers = [group.create_task(store.read_journal(id, 0, DEADLINE_S)) for id in ids for _ in range(2)]
        early = group.create_task(store.read_journal(ids[0], 1, DEADLINE_S))
        await store.ping()  # waiting readers block nothing
        assert await store.write_journal([entry(0, 1, id=id) for id in ids]) == [WriteOutcome.DONE] * 50
        parts = await asyncio.gather(*readers)
        assert not early.done()
        await store.write_journal([entry(1, 2, id=ids[0])])
        assert (await early).tokens == tokens(1, 2)
    assert {part.tokens for part in parts} <= {tokens(0, 1), tokens(0, 2)}


async def test_a_cancelled_reader_leaves_the_others_waiting(store: StateStore) -> None:
    await store.create(sequence())
    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as group:
        leaving, staying = (group.create_task(store.read_journal(SEQUENCES[0], 0, DEADLINE_S)) for _ in range(2))
        assert await store.read_journal(SEQUENCES[0], 0, 0.01) == EMPTY  # both wait now
        leaving.cancel()
        await store.write_journal([entry(0, 1)])
        assert (await staying).tokens == tokens(0, 1)
    assert leaving.cancelled()


async def test_calls_and_journals_expire(open_store: OpenStore) -> None:
    store = await open_store(StoreOptions(retention_s=0.1, owner_ttl_s=0.05, timeout_s=5.0))
    await store.create(sequence())
    await store.put_call(CALL)
    await store.write_journal([entry(0, 1)])
    async with asyncio.timeout(DEADLINE_S):
        while await store.get_call(CALL.id) or (await store.read_journal(SEQUENCES[0], 0, 0.0)).tokens:
            await store.read_journal(RequestId("none"), 0, 0.01)  # lets time pass
    assert await store.list_orphans() == []
    assert (await store.put_call(CALL)).status is CallStatus.OPEN


async def test_a_closed_store_answers_no_call(store: StateStore) -> None:
    await store.close()
    calls = (
        store.put_call(CALL),
        store.end_call(CALL.id, (1, 0), CallStatus.ENDED),
        store.get_call(CALL.id),
        store.claim_call(CALL.id, (1, 0), THEIRS),
        store.hold_lease(OURS, 1),
        store.release_lease(OURS),
        store.list_orphans(),
        store.write_journal([entry(0, 1)]),
        store.read_journal(SEQUENCES[0], 0, 1.0),
    )
    for call in calls:
        with pytest.raises(StoreUnavailable, match="closed"):
            await call


# Redis only


async def test_every_call_in_redis_expires(redis_store: tuple[StateStore, RedisKeys, Redis]) -> None:
    store, keys, outside = redis_store
    await store.create(sequence())
    await store.put_call(CALL)
    await store.write_journal([entry(0, 1)])
    assert await outside.pexpire(keys.journal(SEQUENCES[0]), 50_000)
    assert await outside.pexpire(keys.sequence(SEQUENCES[0]), 50_000)
    await store.write_journal([entry(1, 2)])
    for key in (keys.journal(SEQUENCES[0]), keys.sequence(SEQUENCES[0])):  # a live sequence is kept
        assert await outside.pttl(key) > 50_000
    await store.claim_call(CALL.id, (1, 0), THEIRS)
    await store.hold_lease(THEIRS, 1)
    names = [key async for key in outside.scan_iter(match=f"{keys.prefix}*")]
    assert len(names) == 9  # call, two sequences, journal, owners, the new owner's calls, two leases, generation
    assert [name for name in names if await outside.pttl(name) == -1] == []


async def test_an_unreadable_orphan_is_skipped(redis_store: tuple[StateStore, RedisKeys, Redis]) -> None:
    store, keys, outside = redis_store
    await store.put_call(replace(CALL, id=RequestId("strange")))
    await store.put_call(CALL)
    await outside.hset(keys.call(RequestId("strange")), "sealed", "many")
    await store.put_call(replace(CALL, id=RequestId("strange")))
    await store.put_call(CALL)
    await outside.hset(keys.call(RequestId("strange")), "seed", "many")
    await store.release_lease(OURS)
    assert await store.list_orphans() == [CALL]


async def test_readers_of_a_frozen_server_time_out() -> None:
    with running_redis() as server:
        store = await connect(server.url, StoreOptions(timeout_s=0.5))
        with frozen(server):
            reads = [store.read_journal(SEQUENCES[0], 0, 0.5) for _ in range(100)]
            outcomes = await asyncio.wait_for(asyncio.gather(*reads, return_exceptions=True), DEADLINE_S)
        assert {type(outcome) for outcome in outcomes} == {StoreUnavailable}
        assert await store.read_journal(SEQUENCES[0], 0, 0.0) == EMPTY
        await store.close()
