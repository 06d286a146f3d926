"""What is written together, what at once and what later, counted in round trips to the store."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from baton.domain.ids import AttemptId, OwnerId, RequestId, owner_tag
from baton.domain.lifecycle import RequestEvent, RequestState
from baton.domain.request import FinishReason, OutputToken
from baton.store.memory_store import MemoryStore
from baton.store.store import CallOwner, CallRecord, CallStatus, SequenceRecord, StoreUnavailable
from baton.store.write_behind.flush_pacer import FlushPacer
from baton.store.write_behind.flusher import WriterOptions
from baton.store.write_behind.writer import StoreWriter
from baton.store.write_chain import AdvanceSequence, ChainedWrite, EndCall, PutCall, WriteJournal, WriteResult

OWNER = OwnerId("router-0/1")
TAG = owner_tag(OWNER)
WAIT_S = 10.0
NEVER_S = 3600.0
OPENING = ["PutCall", "PutSequence"]


class CountingStore(MemoryStore):
    """Keeps the chains of every round trip."""

    def __init__(self) -> None:
        super().__init__()
        self.trips: list[list[list[ChainedWrite]]] = []
        self.refuse = RequestId("")
        self.written = asyncio.Event()

    async def write_chains(self, chains: Sequence[Sequence[ChainedWrite]]) -> list[list[WriteResult]]:
        self.trips.append([list(chain) for chain in chains])
        if any(isinstance(write, PutCall) and write.id == self.refuse for chain in chains for write in chain):
            raise ValueError("cannot be encoded")
        results = await super().write_chains(chains)
        self.written.set()
        return results

    async def next_trip(self) -> list[list[str]]:
        """The names of the writes of the next round trip."""
        async with asyncio.timeout(WAIT_S):
            await self.written.wait()
        self.written.clear()
        return names(self.trips[-1])


def names(trip: list[list[ChainedWrite]]) -> list[list[str]]:
    return [[type(write).__name__ for write in chain] for chain in trip]


class Call:
    """One call of one sequence, as its router drives it."""

    def __init__(self, writer: StoreWriter, name: str) -> None:
        self.writer, self.id = writer, RequestId(name)
        self.sequence = AttemptId(RequestId(f"{name}-0"), 1, TAG)

    def open(self, body: bytes = b"{}") -> None:
        ids = (self.sequence.request_id,)
        self.writer.open_call(CallRecord(self.id, OWNER, 1, CallStatus.OPEN, "/x", body, "", 0, 7, ids, owner_tag=TAG))
        self.writer.create(SequenceRecord(ids[0], 1, RequestState.RECEIVED, "router-0", "m", 3, owner_tag=TAG))
        self.writer.advance(self.sequence, RequestEvent.ENQUEUE)

    def reserve(self) -> None:
        self.writer.advance(self.sequence, RequestEvent.RESERVE, fingerprint="f00d")
        self.writer.advance(self.sequence, RequestEvent.DECODE)

    def emit(self, *indices: int, **news: Any) -> None:
        tokens = [OutputToken(index, 40 + index) for index in indices]
        self.writer.write_tokens(self.sequence, tokens, num_cached_tokens=0, **news)

    def finish(self) -> None:
        self.emit(finish=FinishReason.STOP)
        self.writer.advance(self.sequence, RequestEvent.FINISH, num_emitted=2)
        self.end()

    def end(self) -> None:
        self.writer.end_call(self.id, CallStatus.ENDED)


@pytest.fixture
async def store() -> AsyncIterator[CountingStore]:
    made = CountingStore()
    yield made
    await made.close()


@asynccontextmanager
async def idle_writer(store: CountingStore, opening_s: float) -> AsyncIterator[StoreWriter]:
    """A writer that waits for work."""
    async with StoreWriter(store, WriterOptions(journal_interval_s=NEVER_S, opening_s=opening_s)) as made:
        await asyncio.sleep(0)
        yield made


@pytest.fixture
async def writer(store: CountingStore) -> AsyncIterator[StoreWriter]:
    async with StoreWriter(store, WriterOptions(journal_interval_s=NEVER_S)) as made:
        yield made


async def test_a_short_call_is_three_round_trips(store: CountingStore, writer: StoreWriter) -> None:
    call = Call(writer, "c")
    call.open()
    assert await store.next_trip() == [["PutCall", "PutSequence"]]
    call.reserve()
    assert await store.next_trip() == [["AdvanceSequence"]]
    for index in range(2):
        call.emit(index)
        await asyncio.sleep(0)
    call.finish()
    assert await writer.flush(WAIT_S) == 0
    assert await store.next_trip() == [["WriteJournal", "AdvanceSequence", "EndCall"]]
    assert len(store.trips) == 3


@pytest.mark.parametrize("num_beside", [0, 2])
async def test_a_call_that_gets_workers_soon_opens_with_their_fingerprint(
    store: CountingStore, num_beside: int
) -> None:
    """And with it all calls that have opened meanwhile."""
    async with idle_writer(store, NEVER_S) as writer:
        call, beside = Call(writer, "c"), [Call(writer, f"d{number}") for number in range(num_beside)]
        for each in (call, *beside):
            each.open()
        await asyncio.sleep(0)
        call.reserve()
        assert await store.next_trip() == [OPENING] * (1 + num_beside)
        record = await store.get(call.sequence.request_id)
        assert record is not None
        assert (record.state, record.fingerprint) == (RequestState.DECODING, "f00d")


async def test_a_call_that_somebody_waits_for_opens_without_workers(store: CountingStore) -> None:
    async with idle_writer(store, NEVER_S) as writer:
        Call(writer, "c").open()
        writer.write_new_calls()
        assert await store.next_trip() == [OPENING]
        Call(writer, "d").open()
        assert await writer.flush(WAIT_S) == 0
        assert len(store.trips) == 2


async def test_a_call_that_ends_before_it_has_workers_is_written_whole(store: CountingStore) -> None:
    async with idle_writer(store, NEVER_S) as writer:
        call = Call(writer, "c")
        call.open()
        await asyncio.sleep(0)
        writer.advance(call.sequence, RequestEvent.CANCEL)
        call.end()
        assert await store.next_trip() == [[*OPENING, "EndCall"]]


async def test_a_full_queue_of_new_calls_wakes_nobody(store: CountingStore) -> None:
    """Each waits for the first one's time, and goes with it."""
    async with idle_writer(store, 0.02) as writer:
        for name in "abc":
            Call(writer, name).open()
            await asyncio.sleep(0)
        assert store.trips == []
        assert await store.next_trip() == [OPENING] * 3


async def test_a_journal_beside_a_new_call_waits_one_interval(store: CountingStore, monkeypatch: Any) -> None:
    """It runs from the first token that is due, not from the end of the wait for the new call's workers."""
    begun, begin = list[float](), FlushPacer.begin

    def record(self: FlushPacer, now: float) -> None:
        begun.append(now)
        begin(self, now)

    async with idle_writer(store, NEVER_S) as writer:
        call = Call(writer, "c")
        call.open()
        call.reserve()
        assert await store.next_trip() == [OPENING]
        await asyncio.sleep(0)
        monkeypatch.setattr(FlushPacer, "begin", record)
        other = RequestId("d")
        writer.open_call(CallRecord(other, OWNER, 1, CallStatus.OPEN, "/x", b"{}", "", 0, 7, (), owner_tag=TAG))
        assert begun == []
        call.emit(0)
        call.emit(1)
        assert len(begun) == 1


async def test_calls_that_open_together_are_one_round_trip(store: CountingStore, writer: StoreWriter) -> None:
    for name in "abc":
        Call(writer, name).open()
    assert await store.next_trip() == [["PutCall", "PutSequence"]] * 3


async def test_a_round_trip_has_a_bound_of_bytes(store: CountingStore, writer: StoreWriter) -> None:
    """Five bodies of 250 KiB go together, the sixth with the next round trip."""
    for number in range(6):
        Call(writer, f"c{number}").open(bytes(250 << 10))
    assert await writer.flush(WAIT_S) == 0
    assert [names(trip) for trip in store.trips] == [[OPENING] * 5, [OPENING]]


async def test_a_chain_that_cannot_be_written_costs_no_journal(store: CountingStore, writer: StoreWriter) -> None:
    """A round trip with it fails as a whole. Then records go alone, and journals by themselves."""
    streaming, wrong = Call(writer, "c"), Call(writer, "wrong")
    streaming.open()
    await store.next_trip()
    streaming.reserve()
    await store.next_trip()
    store.refuse = wrong.id
    streaming.emit(0)
    wrong.open()
    assert await writer.flush(WAIT_S) == 0, "alone it can be written"
    journal = await store.read_journal(streaming.sequence.request_id, 0, 0.0)
    assert [token.index for token in journal.tokens] == [0]


async def test_the_fingerprint_is_stored_before_the_journal_is_due(store: CountingStore, writer: StoreWriter) -> None:
    """A client may have the tokens first: a takeover then needs workers of the same model."""
    call = Call(writer, "c")
    call.open()
    await store.next_trip()
    call.reserve()
    await store.next_trip()
    record = await store.get(call.sequence.request_id)
    assert record is not None
    assert (record.state, record.fingerprint) == (RequestState.DECODING, "f00d")


async def test_changes_without_news_for_a_takeover_wait_for_the_journal(
    store: CountingStore, writer: StoreWriter
) -> None:
    call = Call(writer, "c")
    call.open()
    call.reserve()
    await store.next_trip()
    writer.advance(call.sequence, RequestEvent.INTERRUPT, failure_code="worker_lost")
    other = Call(writer, "d")
    other.open()  # at once, and alone
    assert await store.next_trip() == [["PutCall", "PutSequence"]]
    assert await writer.flush(WAIT_S) == 0
    record = await store.get(call.sequence.request_id)
    assert record is not None
    assert (record.state, record.failure_code) == (RequestState.INTERRUPTED, "worker_lost")


async def test_an_end_without_tokens_goes_behind_all_that_needs_memory(
    store: CountingStore, writer: StoreWriter
) -> None:
    """A full server refuses a script at its first write that needs memory, and takes all after one that needs none."""
    calls = [Call(writer, name) for name in "abc"]
    for call in calls:
        call.open()
        call.reserve()
        call.emit(0)
    writer.give_up(calls[0].sequence.request_id)
    assert await writer.flush(WAIT_S) == 0
    calls[0].end()
    calls[1].finish()
    calls[2].emit(1)
    assert await writer.flush(WAIT_S) == 0
    trip = store.trips[-1]
    assert [type(write) for write in trip[0]] == [WriteJournal]
    assert [type(write) for write in trip[1]] == [WriteJournal, AdvanceSequence, EndCall]
    assert [type(write) for write in trip[2]] == [EndCall]
    assert not any(isinstance(write, PutCall) for chain in trip for write in chain)


class FullStore(CountingStore):
    """A server without memory for anything but ends of calls: it refuses every round trip with another write."""

    def __init__(self) -> None:
        super().__init__()
        self.full = False
        self.refused: list[list[list[str]]] = []

    async def write_chains(self, chains: Sequence[Sequence[ChainedWrite]]) -> list[list[WriteResult]]:
        if self.full and any(not isinstance(write, EndCall) for chain in chains for write in chain):
            self.refused.append(names([list(chain) for chain in chains]))
            raise StoreUnavailable("out of memory")
        return await super().write_chains(chains)

    async def put_call(self, record: CallRecord) -> CallOwner:
        if self.full and await self.get_call(record.id) is None:
            raise StoreUnavailable("out of memory")
        return await super().put_call(record)


@pytest.mark.parametrize("streaming", [False, True])
async def test_an_end_passes_a_call_that_a_full_store_refuses(streaming: bool) -> None:
    """Both are in one round trip, which fails. `streaming`: so do the journals of a third call, again and again."""
    store = FullStore()
    writer = StoreWriter(store, WriterOptions(retry_s=0.001, journal_interval_s=NEVER_S))
    writer.start()
    running, new, third = (Call(writer, name) for name in ("running", "new", "third"))
    for call in (running, third):
        call.open()
        call.reserve()
    writer.give_up(running.sequence.request_id)
    assert await writer.flush(WAIT_S) == 0
    store.full = True
    indices = itertools.count()
    async with asyncio.timeout(WAIT_S):
        while streaming and len(store.refused) < 5:
            third.emit(next(indices))
            await writer.flush(0.01)
        store.refused.clear()
        running.end()
        new.open()
        while True:
            if streaming:
                third.emit(next(indices))
            await writer.flush(0.01)
            found = await store.get_call(running.id)
            if found is not None and found.status is CallStatus.ENDED:
                break
    assert store.refused[0][-2:] == [["PutCall", "PutSequence"], ["EndCall"]]
    assert await store.get_call(new.id) is None
    await writer.close(0.0)
    await store.close()


class LosingStore(CountingStore):
    """Refuses the next chain, then loses the answer to the write that is repeated alone, as the sequence goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.refuses = False
        self.meanwhile: Callable[[], None] | None = None

    async def write_chains(self, chains: Sequence[Sequence[ChainedWrite]]) -> list[list[WriteResult]]:
        if self.refuses:
            self.refuses = False
            return [[WriteResult(accepted=False)] for _ in chains]
        return await super().write_chains(chains)

    async def advance(self, *args: Any, **fields: Any) -> Any:
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            meanwhile()
            raise StoreUnavailable("no answer")
        return await super().advance(*args, **fields)


async def test_a_sequence_that_ends_while_its_write_is_lost_is_written():
    """Seed 9506868: it waited for the next journals, which leave out a record that has to be read first."""
    store = LosingStore()
    async with StoreWriter(store, WriterOptions(journal_interval_s=NEVER_S, retry_s=0.01)) as writer:
        call = Call(writer, "c")
        call.open()
        call.reserve()
        await writer.flush(WAIT_S)
        second = AttemptId(call.sequence.request_id, 2, TAG)

        def go_on() -> None:
            call.sequence = second
            call.reserve()
            call.emit(0, 1)
            call.finish()

        store.refuses, store.meanwhile = True, go_on
        writer.advance(call.sequence, RequestEvent.INTERRUPT)
        writer.advance(second, RequestEvent.RETRY)
        await writer.flush(2.0)
        assert call.sequence == second, "its write was repeated alone"
        assert writer.num_pending == 0
        record = await store.get(call.sequence.request_id)
        assert record is not None
        assert (record.state, record.attempt) == (RequestState.FINISHED, 2)
    await store.close()
