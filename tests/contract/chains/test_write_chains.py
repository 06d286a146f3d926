"""One suite for every store: chains of writes in one round trip, and what a refused write leaves undone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.domain.ids import AttemptId, OwnerId, RequestId, first_attempt
from baton.domain.lifecycle import RequestEvent, RequestState
from baton.domain.request import FinishReason
from baton.store.store import CallOwner, CallRecord, CallStatus, JournalEntry, SequenceRecord, StateStore, WriteOutcome
from baton.store.write_chain import AdvanceSequence, EndCall, PutCall, PutSequence, WriteJournal

E = RequestEvent
OURS, THEIRS = OwnerId("router-0/a1"), OwnerId("router-1/b2")
TRACE = b"a trace"


def new_call(name: str, tag: int = 5) -> CallRecord:
    ids = (RequestId(f"{name}-0"),)
    return CallRecord(RequestId(name), OURS, 1, CallStatus.OPEN, "/x", b"{}", "", 2**31, 7, ids, owner_tag=tag)


def new_sequence(name: str, tag: int = 5) -> SequenceRecord:
    return SequenceRecord(RequestId(f"{name}-0"), 1, RequestState.QUEUED, "router-0", "tiny", 7, owner_tag=tag)


def tokens(name: str, first: int, *values: int, finish: FinishReason | None = None) -> WriteJournal:
    return WriteJournal((JournalEntry(AttemptId(RequestId(f"{name}-0"), 1, 5), first, values, finish=finish),))


def whole_call(name: str) -> list[PutCall | PutSequence | AdvanceSequence | WriteJournal | EndCall]:
    id = AttemptId(RequestId(f"{name}-0"), 1, 5)
    return [
        PutCall(new_call(name)),
        PutSequence(new_sequence(name)),
        AdvanceSequence(id, (E.RESERVE, E.DECODE), num_emitted=1, fingerprint="f00d"),
        tokens(name, 0, 11, 12, finish=FinishReason.STOP),
        AdvanceSequence(id, (E.FINISH,), num_emitted=2),
        EndCall(RequestId(name), (1, 5), CallStatus.ENDED, TRACE, (RequestId(f"{name}-0"),)),
    ]


async def check_ended(store: StateStore, name: str) -> None:
    id = RequestId(f"{name}-0")
    assert await store.get_call(RequestId(name)) == replace(new_call(name), status=CallStatus.ENDED, trace=TRACE)
    ended = replace(new_sequence(name), state=RequestState.FINISHED, num_emitted=2, fingerprint="f00d")
    assert await store.get(id) == ended
    part = await store.read_journal(id, 0, 0.0)
    assert ([token.token for token in part.tokens], part.finish) == ([11, 12], FinishReason.STOP)


async def test_a_whole_call_is_written_in_one_chain(store: StateStore) -> None:
    [first, second] = await store.write_chains([whole_call("a"), whole_call("b")])
    for name, results in (("a", first), ("b", second)):
        assert [result.accepted for result in results] == [True] * 6
        assert results[0].owner == CallOwner(OURS, (1, 5), CallStatus.OPEN)
        assert results[1].record == new_sequence(name)
        assert results[3].outcomes == (WriteOutcome.DONE,)
        await check_ended(store, name)
    assert await store.write_chains([]) == []


async def test_a_chain_that_was_written_can_be_written_again(store: StateStore) -> None:
    """Its answer was lost: the sequence has ended, so the chain ends there, and nothing changes."""
    await store.write_chains([whole_call("a")])
    [results] = await store.write_chains([whole_call("a")])
    assert [result.accepted for result in results] == [True, False]
    assert results[0].owner == CallOwner(OURS, (1, 5), CallStatus.ENDED)
    await check_ended(store, "a")


async def test_the_call_of_another_owner_stops_its_chain_only(store: StateStore) -> None:
    await store.put_call(new_call("a", tag=6))
    [stopped, other] = await store.write_chains([whole_call("a"), whole_call("b")])
    assert [result.accepted for result in stopped] == [False]
    assert stopped[0].owner == CallOwner(OURS, (1, 6), CallStatus.OPEN)
    assert await store.get(RequestId("a-0")) is None
    assert (await store.read_journal(RequestId("a-0"), 0, 0.0)).tokens == ()
    assert await store.get_call(RequestId("a")) == new_call("a", tag=6)
    assert len(other) == 6
    await check_ended(store, "b")


@pytest.mark.parametrize("stored", ["higher", "ended"])
async def test_a_sequence_that_is_not_put_stops_its_chain(store: StateStore, stored: str) -> None:
    held = new_sequence("a", tag=6) if stored == "higher" else replace(new_sequence("a"), state=RequestState.FAILED)
    await store.put_request(held)
    [results] = await store.write_chains([whole_call("a")])
    assert [result.accepted for result in results] == [True, False]
    assert results[1].record == held
    assert await store.get(held.id) == held
    call = await store.get_call(RequestId("a"))
    assert call == new_call("a")  # entered, and not ended


@pytest.mark.parametrize("events", [(E.SEAL,), (E.RESERVE, E.SEAL)])
async def test_an_event_that_does_not_apply_stops_its_chain(
    store: StateStore, events: tuple[RequestEvent, ...]
) -> None:
    chain = whole_call("a")
    chain[2] = AdvanceSequence(AttemptId(RequestId("a-0"), 1, 5), events)
    [results] = await store.write_chains([chain])
    assert [result.accepted for result in results] == [True, True, False]
    assert await store.get(RequestId("a-0")) == new_sequence("a")


async def test_a_claim_stops_every_chain_of_the_old_owner(store: StateStore) -> None:
    await store.write_chains([whole_call("a")[:2]])
    claimed = await store.claim_call(RequestId("a"), (1, 5), THEIRS)
    assert claimed is not None
    chains = [[write] for write in whole_call("a")]
    found = await store.write_chains(chains)
    assert [result.accepted for [result] in found] == [False] * 6
    assert found[3][0].outcomes == (WriteOutcome.SUPERSEDED,)
    assert await store.get_call(RequestId("a")) == claimed
    record = await store.get(RequestId("a-0"))
    assert record is not None
    assert (record.state, record.attempt) == (RequestState.QUEUED, first_attempt(2))
    assert (await store.read_journal(RequestId("a-0"), 0, 0.0)).tokens == ()


async def test_a_gap_in_a_journal_keeps_the_call_open(store: StateStore) -> None:
    chain = whole_call("a")
    chain[3] = tokens("a", 1, 12, finish=FinishReason.STOP)
    [results] = await store.write_chains([chain])
    assert [result.accepted for result in results] == [True, True, True, False]
    assert results[3].outcomes == (WriteOutcome.GAP,)
    record = await store.get(RequestId("a-0"))
    assert record is not None
    assert record.state is RequestState.DECODING
    assert await store.get_call(RequestId("a")) == new_call("a")


async def test_a_live_sequence_keeps_its_call_open(store: StateStore) -> None:
    chain = [*whole_call("a")[:4], whole_call("a")[5]]
    [results] = await store.write_chains([chain])
    assert [result.accepted for result in results] == [True, True, True, True, False]
    assert await store.get_call(RequestId("a")) == new_call("a")


async def test_entries_of_many_sequences_are_one_write(store: StateStore) -> None:
    await store.write_chains([whole_call(name)[:2] for name in "abc"])
    entries = [entry for name in "abc" for entry in tokens(name, 0, 1).entries]
    entries[1] = replace(entries[1], first=5)
    [[result]] = await store.write_chains([[WriteJournal(tuple(entries))]])
    assert result.outcomes == (WriteOutcome.DONE, WriteOutcome.GAP, WriteOutcome.DONE)
