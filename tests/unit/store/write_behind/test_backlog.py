"""More ends than one round trip takes: the rest follows at once, and is not looked through for every trip."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from baton.store.write_behind.flush_pacer import FlushPacer
from baton.store.write_behind.flusher import WriterOptions
from baton.store.write_behind.record_sync import RecordSync
from baton.store.write_behind.sync_queue import MAX_CHAINED_WRITES, MAX_ENTRIES, SyncQueue
from baton.store.write_behind.writer import StoreWriter
from baton.store.write_chain import ChainedWrite, WriteResult
from tests.unit.store.write_behind.test_chains import NEVER_S, WAIT_S, Call, CountingStore, names
from tests.unit.store.write_behind.test_sync_queue import decoding, finish

NUM_CALLS = MAX_CHAINED_WRITES
"""Their ends fill several round trips: each is a journal, the end of its sequence, and its own."""


class EndsStore(CountingStore):
    """Tells when it has the ends of `num_left` more calls."""

    def __init__(self, num_left: int) -> None:
        super().__init__()
        self.num_left = num_left
        self.ended = asyncio.Event()

    async def write_chains(self, chains: Sequence[Sequence[ChainedWrite]]) -> list[list[WriteResult]]:
        results = await super().write_chains(chains)
        self.num_left -= sum(chain[-1:] == ["EndCall"] for chain in names(self.trips[-1]))
        if self.num_left <= 0:
            self.ended.set()
        return results


async def test_what_a_flush_leaves_follows_without_a_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the store took: else ends come faster than they are written."""
    store, record, left = EndsStore(NUM_CALLS), FlushPacer.record, list[bool]()

    def record_an_hour(pacer: FlushPacer, began: float, ended: float, *, more: bool = False) -> None:
        left.append(more)
        record(pacer, ended - NEVER_S, ended, more=more)

    async with StoreWriter(store, WriterOptions(journal_interval_s=0.0)) as writer:
        calls = [Call(writer, f"c{number}") for number in range(NUM_CALLS)]
        for call in calls:
            call.open()
            call.reserve()
        assert await writer.flush(WAIT_S) == 0
        store.trips.clear()
        monkeypatch.setattr(FlushPacer, "record", record_an_hour)
        for call in calls:
            call.emit(0, 1)
            call.finish()
        async with asyncio.timeout(WAIT_S):
            await store.ended.wait()
        *full, _ = [sum(map(len, trip)) for trip in store.trips]
        assert full
        assert min(full) >= MAX_CHAINED_WRITES
        assert left[: len(full)] == [True] * len(full)
    await store.close()


def test_a_round_trip_looks_at_no_more_than_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = SyncQueue(max_ended=100_000, max_ended_tokens=100_000)
    for number in range(4 * MAX_CHAINED_WRITES):
        finish(queue, decoding(queue, str(number), num_tokens=1))
    looked, root = list[RecordSync](), SyncQueue._root

    def look(queue: SyncQueue, sync: RecordSync) -> object:
        looked.append(sync)
        return root(queue, sync)

    monkeypatch.setattr(SyncQueue, "_root", look)
    batch = queue.next_batch(due=True)
    assert not batch.complete
    assert batch.leaves_chains
    assert sum(map(len, batch.chains)) == MAX_CHAINED_WRITES
    assert len(looked) <= MAX_CHAINED_WRITES + 1


def test_journals_that_do_not_fit_are_no_reason_to_go_on_at_once():
    """Streams that go on have new tokens each time: flushes without a rest would take a token or two of each."""
    queue = SyncQueue(max_ended=100_000, max_ended_tokens=100_000)
    for number in range(MAX_ENTRIES + 1):
        decoding(queue, str(number), num_tokens=1)
    batch = queue.next_batch(due=True)
    assert len(batch.journals.entries) == MAX_ENTRIES
    assert not batch.complete
    assert not batch.leaves_chains
