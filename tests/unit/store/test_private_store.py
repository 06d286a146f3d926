"""Private calls stay in memory, within bounds; the store behind gets the others, and never a private token."""

from __future__ import annotations

from dataclasses import replace

from baton.domain.ids import AttemptId, OwnerId, RequestId
from baton.domain.lifecycle import RequestState
from baton.store.memory_store import MemoryStore
from baton.store.options import StoreOptions
from baton.store.private_store import PrivateStore
from baton.store.store import CallRecord, CallStatus, JournalEntry, SequenceRecord, WriteOutcome

OWNER = OwnerId("router-0/a1")


def call(id: str, *, private: bool = True, body: bytes = b"{}") -> CallRecord:
    sequence_ids = (RequestId(f"{id}-0"),)
    record = CallRecord(RequestId(id), OWNER, 1, CallStatus.OPEN, "/v1/completions", body, "", 17, 5, sequence_ids)
    return replace(record, private=private)


def sequence(id: str) -> SequenceRecord:
    return SequenceRecord(RequestId(id), 1, RequestState.RECEIVED, "router-0", "tiny", 7)


def entry(id: str, *tokens: int) -> JournalEntry:
    return JournalEntry(AttemptId(RequestId(id), 1), 0, tokens)


async def ended(store: PrivateStore, record: CallRecord) -> None:
    await store.put_call(record)
    await store.end_call(record.id, record.ballot, CallStatus.ENDED)


async def test_each_call_has_its_own_place():
    shared = MemoryStore()
    store = PrivateStore(shared, StoreOptions())
    for name, private in (("p", True), ("s", False)):
        await store.put_call(call(name, private=private))
        await store.create(sequence(f"{name}-0"))
    outcomes = await store.write_journal([entry("s-0", 1), entry("p-0", 2), entry("x-0", 3), entry("s-0", 1, 4)])
    assert outcomes == [WriteOutcome.DONE, WriteOutcome.DONE, WriteOutcome.GAP, WriteOutcome.DONE]
    for name, tokens in (("p", [2]), ("s", [1, 4])):
        assert await store.get_call(RequestId(name)) is not None
        part = await store.read_journal(RequestId(f"{name}-0"), 0, 0.0)
        assert [token.token for token in part.tokens] == tokens
    assert await shared.get_call(RequestId("p")) is None
    assert await shared.get(RequestId("p-0")) is None
    assert await shared.get_call(RequestId("s")) is not None
    await store.close()


async def test_beyond_the_bounds_the_oldest_ended_call_is_forgotten():
    store = PrivateStore(MemoryStore(), StoreOptions(), max_calls=3, max_bytes=100)
    await store.put_call(call("running"))
    for number in range(5):
        await ended(store, call(f"ended-{number}"))
    kept = [name for name in ["running", *(f"ended-{n}" for n in range(5))] if await store.get_call(RequestId(name))]
    assert kept == ["running", "ended-3", "ended-4"]
    await ended(store, call("large", body=b"x" * 99))
    assert await store.get_call(RequestId("ended-4")) is None
    assert await store.get_call(RequestId("large")) is not None
    assert await store.get_call(RequestId("running")) is not None


async def test_a_running_call_is_never_forgotten_however_many_there_are():
    shared = MemoryStore()
    store = PrivateStore(shared, StoreOptions(), max_calls=2)
    for number in range(5):
        await store.put_call(call(f"call-{number}"))
        await store.create(sequence(f"call-{number}-0"))
    outcomes = await store.write_journal([entry(f"call-{number}-0", 1) for number in range(5)])
    assert set(outcomes) == {WriteOutcome.DONE}
    assert await shared.get(RequestId("call-0-0")) is None


async def test_a_forgotten_private_call_is_not_entered_elsewhere():
    shared = MemoryStore()
    store = PrivateStore(shared, StoreOptions())
    assert await store.claim_call(RequestId("p"), (0, 0), OWNER, seed=call("p")) is None
    assert await shared.get_call(RequestId("p")) is None
