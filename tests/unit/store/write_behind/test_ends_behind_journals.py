"""The end of a sequence is written behind its journal, and both behind the attempt and the workers of its tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from baton.domain.lifecycle import RequestEvent, RequestState
from baton.store.write_behind.flusher import WriterOptions
from baton.store.write_behind.writer import StoreWriter
from tests.unit.store.write_behind.test_chains import NEVER_S, OPENING, WAIT_S, Call, CountingStore, names


@pytest.fixture
async def store() -> AsyncIterator[CountingStore]:
    made = CountingStore()
    yield made
    await made.close()


@pytest.fixture
async def writer(store: CountingStore) -> AsyncIterator[StoreWriter]:
    async with StoreWriter(store, WriterOptions(journal_interval_s=NEVER_S)) as made:
        yield made


@pytest.mark.parametrize("fails", [False, True])
async def test_an_end_behind_its_journal_is_one_change_of_the_record(
    store: CountingStore, writer: StoreWriter, fails: bool
) -> None:
    """The store needs no state between: it reads attempts and fingerprints before it takes a journal."""
    call = Call(writer, "c")
    call.open()
    writer.advance(call.sequence, RequestEvent.RESERVE, fingerprint="f00d")
    assert await store.next_trip() == [OPENING]
    for event in (RequestEvent.PREFILL, RequestEvent.SEAL, RequestEvent.DECODE):
        writer.advance(call.sequence, event)
    call.emit(0, 1)
    if fails:
        call.emit(failure_code="worker_lost")
        writer.advance(call.sequence, RequestEvent.FAIL, num_emitted=2, failure_code="worker_lost")
        call.end()
    else:
        call.finish()
    assert await writer.flush(WAIT_S) == 0
    assert names(store.trips[-1]) == [["WriteJournal", "AdvanceSequence", "EndCall"]]
    record = await store.get(call.sequence.request_id)
    assert record is not None
    state = RequestState.FAILED if fails else RequestState.FINISHED
    assert (record.state, record.num_emitted, record.failure_code) == (state, 2, "worker_lost" if fails else "")
    journal = await store.read_journal(call.sequence.request_id, 0, 0.0)
    assert ([token.index for token in journal.tokens], journal.ended) == ([0, 1], True)


async def test_a_journal_waits_for_the_workers_of_its_tokens(store: CountingStore, writer: StoreWriter) -> None:
    """Also where a request has its workers, its tokens and its end before the writer has its turn."""
    call = Call(writer, "c")
    call.open()
    assert await store.next_trip() == [OPENING]
    call.reserve()
    call.emit(0, 1)
    call.finish()
    assert await writer.flush(WAIT_S) == 0
    assert names(store.trips[-1]) == [["AdvanceSequence", "WriteJournal", "AdvanceSequence", "EndCall"]]


async def test_a_journal_of_a_later_attempt_waits_for_its_record(store: CountingStore, writer: StoreWriter) -> None:
    """Its attempt, and the fingerprint of its workers, are stored first."""
    call = Call(writer, "c")
    call.open()
    call.reserve()
    assert await store.next_trip() == [OPENING]
    writer.advance(call.sequence, RequestEvent.INTERRUPT)
    call.sequence = call.sequence.next()
    writer.advance(call.sequence, RequestEvent.RETRY)
    call.reserve()
    call.emit(0, 1)
    call.finish()
    assert await writer.flush(WAIT_S) == 0
    written = [name for trip in store.trips[1:] for chain in names(trip) for name in chain]
    assert written == ["AdvanceSequence", "WriteJournal", "AdvanceSequence", "EndCall"]
