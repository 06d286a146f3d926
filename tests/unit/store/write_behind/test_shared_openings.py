"""Calls that have their workers wait a little for others, and for nothing that cannot wait (docs/adr/0162)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from baton.domain.lifecycle import RequestEvent
from baton.store.write_behind.flusher import WriterOptions
from baton.store.write_behind.writer import StoreWriter
from tests.unit.store.write_behind.test_chains import NEVER_S, OPENING, WAIT_S, Call, CountingStore


@pytest.fixture
async def store() -> AsyncIterator[CountingStore]:
    made = CountingStore()
    yield made
    await made.close()


@asynccontextmanager
async def busy_writer(store: CountingStore, gap_s: float = NEVER_S) -> AsyncIterator[tuple[StoreWriter, Call]]:
    """A writer that has just opened a call."""
    options = WriterOptions(journal_interval_s=NEVER_S, opening_s=NEVER_S, opening_gap_s=gap_s)
    async with StoreWriter(store, options) as writer:
        first = Call(writer, "first")
        first.open()
        first.reserve()
        assert await store.next_trip() == [OPENING]  # nothing was written before: at once
        yield writer, first


async def opened(writer: StoreWriter, name: str) -> Call:
    """A call with its workers, after the writer has had its turn."""
    call = Call(writer, name)
    call.open()
    call.reserve()
    for _ in range(3):
        await asyncio.sleep(0)
    return call


async def test_calls_that_get_workers_soon_after_another_share_a_trip(store: CountingStore) -> None:
    async with busy_writer(store) as (writer, _):
        for name in "abc":
            await opened(writer, name)
        assert len(store.trips) == 1
        writer.write_new_calls()  # the headers of one of them ask
        assert await store.next_trip() == [OPENING] * 3


async def test_an_opening_waits_no_longer_than_the_gap(store: CountingStore) -> None:
    async with busy_writer(store, gap_s=0.02) as (writer, _):
        await opened(writer, "a")
        assert await store.next_trip() == [OPENING]


async def test_the_end_of_a_call_does_not_wait_for_the_gap(store: CountingStore) -> None:
    async with busy_writer(store) as (writer, _):
        call = await opened(writer, "a")
        await opened(writer, "b")
        writer.advance(call.sequence, RequestEvent.CANCEL)
        call.end()
        assert await store.next_trip() == [[*OPENING, "EndCall"], OPENING]


async def test_the_workers_of_a_later_attempt_do_not_wait_for_the_gap(store: CountingStore) -> None:
    """The store has had the call: tokens may follow at once."""
    async with busy_writer(store) as (writer, first):
        await opened(writer, "a")
        writer.advance(first.sequence, RequestEvent.INTERRUPT)
        first.sequence = first.sequence.next()
        writer.advance(first.sequence, RequestEvent.RETRY)
        writer.advance(first.sequence, RequestEvent.RESERVE, fingerprint="beef")
        assert sorted(await store.next_trip()) == [["AdvanceSequence"], OPENING]


async def test_a_flush_does_not_wait_for_the_gap(store: CountingStore) -> None:
    async with busy_writer(store) as (writer, _):
        await opened(writer, "a")
        assert await writer.flush(WAIT_S) == 0
        assert len(store.trips) == 2


async def test_a_reset_of_the_store_does_not_wait_for_the_gap(store: CountingStore) -> None:
    async with busy_writer(store) as (writer, _):
        call = await opened(writer, "a")
        assert await store.get(call.sequence.request_id) is None
        writer.put_again()
        while await store.get(call.sequence.request_id) is None:
            await store.next_trip()
