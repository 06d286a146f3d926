"""One suite for every store: ballots, floors, seeds and tombstones of calls, and what a lease renewal finds."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from baton.domain.errors import Superseded
from baton.domain.ids import AttemptId, OwnerId, RequestId, first_attempt, owner_tag
from baton.domain.lifecycle import RequestEvent, RequestState
from baton.domain.request import FinishReason
from baton.store.options import StoreOptions
from baton.store.store import (
    NO_BALLOT,
    CallOwner,
    CallRecord,
    CallStatus,
    JournalEntry,
    RecordLost,
    SequenceRecord,
    StateStore,
    WriteOutcome,
)
from tests.contract.stores import DEADLINE_S, RARE, OpenStore

OURS, THEIRS = OwnerId("router-0/a1"), OwnerId("router-1/b2")
SEQUENCE = RequestId("j0")
CALL = CallRecord(RequestId("c"), OURS, 2, CallStatus.OPEN, "/x", b"{}", "", 2**31, 7, (SEQUENCE,), owner_tag=5)
LEAVES = replace(RARE, owner_ttl_s=0.05)


def sequence(attempt: int = 1, tag: int = 0, state: RequestState = RequestState.QUEUED) -> SequenceRecord:
    return SequenceRecord(SEQUENCE, attempt, state, "router-0", "tiny", num_prompt_tokens=7, owner_tag=tag)


@pytest.mark.parametrize("ballot", [(1, 9), (2, 4)], ids=["epoch", "owner tag"])
async def test_a_put_replaces_a_call_of_a_lower_ballot(store: StateStore, ballot: tuple[int, int]) -> None:
    lower = replace(CALL, epoch=ballot[0], owner_tag=ballot[1], owner=THEIRS, body=b"other")
    await store.put_call(lower)
    await store.end_call(CALL.id, ballot, CallStatus.ENDED)
    assert await store.put_call(CALL) == CallOwner(OURS, (2, 5), CallStatus.OPEN)
    assert await store.get_call(CALL.id) == CALL
    await store.hold_lease(OURS, 1)
    await store.release_lease(THEIRS)
    assert await store.list_orphans() == []


@pytest.mark.parametrize("ballot", [(3, 0), (2, 6), (2, 5)], ids=["epoch", "owner tag", "same"])
async def test_a_put_never_replaces_a_higher_ballot(store: StateStore, ballot: tuple[int, int]) -> None:
    higher = replace(CALL, epoch=ballot[0], owner_tag=ballot[1], owner=THEIRS, body=b"other")
    await store.put_call(higher)
    await store.end_call(CALL.id, ballot, CallStatus.ABANDONED)
    assert await store.put_call(CALL) == CallOwner(THEIRS, ballot, CallStatus.ABANDONED)
    assert await store.get_call(CALL.id) == replace(higher, status=CallStatus.ABANDONED)


@pytest.mark.parametrize("ballot", [(1, 5), (2, 4), (2, 6), (3, 5)])
async def test_only_the_stored_ballot_claims_a_call_and_no_lower_ends_it(
    store: StateStore, ballot: tuple[int, int]
) -> None:
    await store.put_call(CALL)
    assert await store.claim_call(CALL.id, ballot, THEIRS, seed=CALL) is None
    assert await store.get_call(CALL.id) == CALL
    is_newer = ballot > CALL.ballot
    assert await store.end_call(CALL.id, ballot, CallStatus.ENDED) is is_newer
    ended = replace(CALL, epoch=ballot[0], owner_tag=ballot[1], status=CallStatus.ENDED)
    assert await store.get_call(CALL.id) == (ended if is_newer else CALL)


async def test_a_claim_goes_above_the_floor_and_above_its_sequences(store: StateStore) -> None:
    await store.put_call(CALL)
    claimed = await store.claim_call(CALL.id, CALL.ballot, THEIRS, floor=6)
    assert claimed == replace(CALL, owner=THEIRS, epoch=7, owner_tag=owner_tag(THEIRS))
    await store.put_request(sequence(first_attempt(9), tag=3))
    claimed = await store.claim_call(CALL.id, claimed.ballot, OURS)
    assert claimed == replace(CALL, owner=OURS, epoch=10, owner_tag=owner_tag(OURS))
    expected = sequence(first_attempt(10), tag=owner_tag(OURS))
    assert await store.get(SEQUENCE) == expected


async def test_a_claim_with_a_seed_enters_a_missing_call(store: StateStore) -> None:
    assert await store.claim_call(CALL.id, NO_BALLOT, THEIRS) is None
    assert await store.claim_call(CALL.id, CALL.ballot, THEIRS, seed=CALL) is None
    claimed = await store.claim_call(CALL.id, NO_BALLOT, THEIRS, floor=1, seed=CALL)
    assert claimed == replace(CALL, owner=THEIRS, epoch=3, owner_tag=owner_tag(THEIRS))
    assert await store.get_call(CALL.id) == claimed
    record = await store.get(SEQUENCE)
    assert record is not None
    assert record.attempt_id == AttemptId(SEQUENCE, first_attempt(3), owner_tag(THEIRS))
    assert [call.id for call in await store.list_orphans()] == [CALL.id]
    assert await store.claim_call(CALL.id, NO_BALLOT, OURS, seed=CALL) is None


async def test_the_end_of_a_lost_call_leaves_a_tombstone(open_store: OpenStore) -> None:
    store = await open_store(RARE)
    assert not await store.end_call(CALL.id, (2, 5), CallStatus.ABANDONED)
    assert await store.end_call(CALL.id, (2, 5), CallStatus.ENDED)
    found = await store.get_call(CALL.id)
    assert found is not None
    assert (found.ballot, found.status, found.body, found.sequence_ids) == ((2, 5), CallStatus.ENDED, b"", ())
    assert await store.claim_call(CALL.id, (2, 5), THEIRS, seed=CALL) is None
    assert await store.list_orphans() == []


async def test_a_tombstone_expires(open_store: OpenStore) -> None:
    store = await open_store(StoreOptions(tombstone_s=0.2, timeout_s=5.0))
    assert await store.end_call(CALL.id, (2, 5), CallStatus.ENDED)
    async with asyncio.timeout(DEADLINE_S):
        while await store.get_call(CALL.id):
            await store.read_journal(SEQUENCE, 0, 0.01)  # lets time pass


async def test_a_put_request_replaces_lower_attempts_only(store: StateStore) -> None:
    first = replace(sequence(2), num_emitted=4)
    assert await store.put_request(first) == first
    later = sequence(2, state=RequestState.DECODING)
    assert await store.put_request(later) == replace(later, num_emitted=4)
    ended = sequence(2, state=RequestState.FINISHED)
    assert await store.put_request(ended) == replace(ended, num_emitted=4)
    assert await store.put_request(later) == replace(ended, num_emitted=4)
    assert await store.put_request(sequence(1, tag=1)) == sequence(1, tag=1)  # a higher tag
    assert await store.put_request(sequence(900)) == sequence(1, tag=1)
    assert await store.put_request(sequence(1001)) == sequence(1001)  # a higher epoch
    assert await store.put_request(replace(sequence(1001), router_id="router-1")) == sequence(1001)


async def test_events_of_other_ballots_are_refused_with_what_was_seen(store: StateStore) -> None:
    stored = sequence(1002, tag=5)
    await store.put_request(stored)
    for lower in (AttemptId(SEQUENCE, 1002, 4), AttemptId(SEQUENCE, 1009, 4), AttemptId(SEQUENCE, 999, 9)):
        with pytest.raises(Superseded) as caught:
            await store.advance(lower, RequestEvent.RESERVE)
        assert caught.value.seen == stored.attempt_id
    for higher in (AttemptId(SEQUENCE, 1001, 6), AttemptId(SEQUENCE, 2001)):
        with pytest.raises(RecordLost):
            await store.advance(higher, RequestEvent.RESERVE)
    assert await store.advance(stored.attempt_id, RequestEvent.RESERVE) is RequestState.RESERVED


async def test_a_journal_write_of_a_higher_ballot_raises_the_record(store: StateStore) -> None:
    await store.put_request(sequence(1001, tag=5))
    lower, higher = AttemptId(SEQUENCE, 1900, 4), AttemptId(SEQUENCE, 1001, 6)
    assert await store.write_journal([JournalEntry(lower, 0, (1, 2))]) == [WriteOutcome.SUPERSEDED]
    assert await store.write_journal([JournalEntry(higher, 1, (1, 2))]) == [WriteOutcome.GAP]
    assert (await store.get(SEQUENCE)) == sequence(1001, tag=5)
    assert await store.write_journal([JournalEntry(higher, 0, (1, 2))]) == [WriteOutcome.DONE]
    assert (await store.get(SEQUENCE)) == sequence(1001, tag=6)
    own = AttemptId(SEQUENCE, 1001, 5)
    assert await store.write_journal([JournalEntry(own, 2, (3,))]) == [WriteOutcome.SUPERSEDED]


@pytest.mark.parametrize("state", list(RequestState))
async def test_a_journal_write_of_a_higher_ballot_resumes_the_record(store: StateStore, state: RequestState) -> None:
    """The store was rolled back to before a claim: what it shows is the earlier owner's state."""
    await store.put_request(sequence(3, state=state))
    id = AttemptId(SEQUENCE, 1001, 6)
    assert await store.write_journal([JournalEntry(id, 0, (1, 2))]) == [WriteOutcome.DONE]
    is_final = state.terminal and state is not RequestState.CANCELLED
    assert await store.get(SEQUENCE) == sequence(1001, tag=6, state=state if is_final else RequestState.QUEUED)


async def test_a_journal_write_of_a_later_attempt_keeps_the_state(store: StateStore) -> None:
    await store.put_request(sequence(1001, tag=6, state=RequestState.DECODING))
    id = AttemptId(SEQUENCE, 1002, 6)
    assert await store.write_journal([JournalEntry(id, 0, (1, 2))]) == [WriteOutcome.DONE]
    assert await store.get(SEQUENCE) == sequence(1002, tag=6, state=RequestState.DECODING)


async def test_an_owner_tag_identifies_an_owner_whatever_the_name(store: StateStore) -> None:
    await store.put_request(sequence())
    await store.write_journal([JournalEntry(AttemptId(SEQUENCE, 1001, 6), 0, (1, 2))])
    ours = replace(sequence(1001, tag=6, state=RequestState.SEALED), router_id="router-1")
    assert await store.put_request(ours) == ours


async def test_a_renewal_returns_the_last_one_and_the_generation(store: StateStore) -> None:
    first = await store.hold_lease(OURS, 3)
    assert (first.number, bool(first.generation)) == (0, True)
    assert (await store.hold_lease(OURS, 4)).number == 3
    assert (await store.hold_lease(OURS, 2)).number == 4  # it came late, and changes nothing
    again = await store.hold_lease(OURS, 5)
    assert (again.number, again.generation) == (4, first.generation)
    assert await store.hold_lease(THEIRS, 1) == replace(first, number=0)
    await store.release_lease(OURS)
    assert (await store.hold_lease(OURS, 6)).number == 0


async def test_calls_without_a_live_owner_are_orphans_oldest_first(store: StateStore) -> None:
    others = [replace(CALL, id=RequestId(f"o{number}"), owner=OwnerId(f"r/{number % 2}")) for number in range(5)]
    await store.hold_lease(OURS, 1)
    for call in (CALL, *others):
        await store.put_call(call)
    assert await store.list_orphans() == []
    await store.release_lease(OwnerId("r/0"))
    await store.release_lease(OwnerId("r/0"))
    assert await store.list_orphans() == others[::2]
    await store.release_lease(OwnerId("r/1"))
    assert await store.list_orphans() == others
    await store.end_call(others[0].id, (2, 5), CallStatus.ENDED)
    await store.end_call(others[1].id, (2, 5), CallStatus.ABANDONED)
    assert await store.claim_call(others[2].id, (2, 5), OURS) is not None
    assert await store.list_orphans() == others[3:]
    await store.hold_lease(OwnerId("r/1"), 1)
    assert await store.list_orphans() == others[4:]


async def test_orphans_are_listed_in_bounded_batches(open_store: OpenStore) -> None:
    store = await open_store(replace(RARE, max_orphans=3))
    calls = [replace(CALL, id=RequestId(f"{9 - number}"), owner=OwnerId(f"r/{number % 2}")) for number in range(8)]
    for call in calls:
        await store.put_call(call)
    await store.hold_lease(THEIRS, 1)
    for number in range(2):
        await store.release_lease(OwnerId(f"r/{number}"))
    for taken in (calls[:3], calls[3:6], calls[6:]):
        assert await store.list_orphans() == taken
        for call in taken:
            await store.claim_call(call.id, (2, 5), THEIRS)
    assert await store.list_orphans() == []


async def test_calls_of_another_tokenizer_are_no_orphans_here(open_store: OpenStore) -> None:
    options = replace(RARE, text_digest="ours", max_orphans=4)
    store = await open_store(options)
    for number in range(3 * options.max_orphans):
        await store.put_call(replace(CALL, id=RequestId(f"foreign-{number}"), text_digest="theirs"))
    mine = [replace(CALL, id=RequestId(f"mine-{digest}"), text_digest=digest) for digest in ("ours", "")]
    for call in mine:
        await store.put_call(call)
    await store.release_lease(OURS)
    for _ in range(6):  # each list reaches past the foreign calls of the one before
        orphans = await store.list_orphans()
    assert orphans == mine
    assert await store.get_call(mine[0].id) == mine[0]


async def test_a_lease_expires(open_store: OpenStore) -> None:
    store = await open_store(LEAVES)
    await store.put_call(CALL)
    async with asyncio.timeout(DEADLINE_S):
        while not await store.list_orphans():
            await store.read_journal(SEQUENCE, 0, 0.01)  # lets time pass
    assert await store.list_orphans() == [CALL]


async def test_a_journal_names_the_attempts_that_wrote_it(store: StateStore) -> None:
    await store.create(sequence(state=RequestState.RECEIVED))
    assert (await store.read_journal(SEQUENCE, 0, 0.0)).writers == ()
    attempts = [AttemptId(SEQUENCE, number) for number in (1, 2, 3)]
    await store.write_journal(
        [
            JournalEntry(attempts[0], 0, (5, 6, 7)),
            JournalEntry(attempts[1], 2, (7, 8, 9)),
            JournalEntry(attempts[2], 5, (), finish=FinishReason.STOP),
        ]
    )
    for start, first in ((0, 0), (2, 0), (3, 1), (5, 2)):
        part = await store.read_journal(SEQUENCE, start, 0.0)
        assert list(dict.fromkeys(part.writers)) == attempts[first:], start
