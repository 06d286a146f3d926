"""`StoreWriter` converges through slow calls and through lost calls, answers and records; no caller waits for it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.domain.errors import Broken, Superseded
from baton.domain.ids import AttemptId, RequestId
from baton.domain.lifecycle import TABLE, RequestEvent, RequestState
from baton.store.connect import connect
from baton.store.memory_store import MemoryStore
from baton.store.options import StoreOptions
from baton.store.store import SequenceRecord, StateStore
from baton.store.write_behind.flusher import WriterOptions
from baton.store.write_behind.writer import StoreWriter
from tests.property.store.faulty_store import OPTIONS, Fault, FaultyStore
from tests.redis_server import running_redis


def new_request(id: RequestId) -> SequenceRecord:
    return SequenceRecord(id, 1, RequestState.RECEIVED, "router", "tiny", num_prompt_tokens=3)


def new_writer(store: FaultyStore, reported: list[bool], max_ended: int = 10_000) -> StoreWriter:
    options = WriterOptions(max_ended=max_ended, retry_s=0.001, journal_interval_s=0.001)
    return StoreWriter(cast(StateStore, store), options, on_degraded=reported.append)


FAULTS = st.lists(st.sampled_from([Fault.NONE, Fault.NOT_RECEIVED, Fault.ANSWER_LOST]), max_size=20)
LET_PASS = st.none()
STEP = st.tuples(st.integers(0, 1), st.integers(0, 4))  # which sequence, which of its possible events


@given(script=st.lists(LET_PASS | STEP, max_size=50), faults=FAULTS, losses=st.lists(st.integers(0, 20), max_size=2))
@settings(max_examples=100, deadline=None)
def test_the_writer_converges_through_any_outage(
    script: list[tuple[int, int] | None], faults: list[Fault], losses: list[int]
) -> None:
    for position in losses:
        faults.insert(position, Fault.RECORDS_LOST)
    asyncio.run(_run_script(script, faults, may_forget=bool(losses)))


async def _run_script(script: list[tuple[int, int] | None], faults: list[Fault], *, may_forget: bool) -> None:
    """Two sequences; between the steps, some store operations of the writer pass."""
    store, reported = FaultyStore(faults, shut=True), list[bool]()
    records = [new_request(RequestId(name)) for name in "ab"]
    async with asyncio.timeout(30), new_writer(store, reported) as writer:
        for record in records:
            writer.create(record)
        for step in script:
            if step is not None and (events := _events(records[step[0]])):
                records[step[0]] = _step(writer, records[step[0]], events[step[1] % len(events)])
            elif step is None and writer.num_pending:
                await store.release_one()
        store.open()
        assert await writer.flush(timeout_s=20) == 0
    for record in records:
        stored = await store.inner.get(record.id)
        assert stored == record or (stored is None and may_forget)
    assert reported == [n % 2 == 0 for n in range(len(reported))]
    assert not writer.degraded


def _events(record: SequenceRecord) -> list[RequestEvent]:
    return [event for state, event in TABLE if state is record.state and not state.terminal]


def _step(writer: StoreWriter, record: SequenceRecord, event: RequestEvent) -> SequenceRecord:
    code = "worker_lost" if event is RequestEvent.INTERRUPT else ""
    number = record.attempt + (event in (RequestEvent.RETRY, RequestEvent.RESUME))
    after = replace(
        record,
        attempt=number,
        state=TABLE[record.state, event],
        num_emitted=record.num_emitted + 1,
        failure_code=code,
    )
    new_state = writer.advance(AttemptId(record.id, number), event, num_emitted=after.num_emitted, failure_code=code)
    assert new_state is after.state
    return after


async def test_a_hung_store_blocks_nobody_and_updates_coalesce() -> None:
    store = FaultyStore(shut=True)
    writer = new_writer(store, [])
    writer.start()
    record = new_request(RequestId("a"))
    writer.create(record)
    async with asyncio.timeout(10):
        await store.next_call()
    for _ in range(100):
        for event in (RequestEvent.ENQUEUE, RequestEvent.RESERVE, RequestEvent.INTERRUPT, RequestEvent.RETRY):
            if (record.state, event) in TABLE:
                record = _step(writer, record, event)
    assert (writer.num_pending, store.num_calls) == (1, 1)
    assert await writer.close(timeout_s=0.05) == 1
    assert record.attempt == 101


async def test_the_oldest_ended_sequences_are_dropped_when_the_queue_is_full() -> None:
    store, reported = FaultyStore(), list[bool]()
    writer = new_writer(store, reported, max_ended=2)
    names = [RequestId(name) for name in ("a", "b", "c", "d", "live")]
    for id in names:
        writer.create(new_request(id))
    for id in names[:4]:
        writer.advance(AttemptId(id, 1), RequestEvent.CANCEL)
    assert (writer.num_pending, writer.num_dropped, writer.degraded) == (3, 2, True)
    async with writer:
        assert await writer.flush(timeout_s=10) == 0
        stored = [await store.inner.get(id) for id in names]
        states = [record.state if record else None for record in stored]
        assert states == [None, None, *[RequestState.CANCELLED] * 2, RequestState.RECEIVED]
        for id in names[:4]:  # written sequences do not count
            writer.create(new_request(id))
            writer.advance(AttemptId(id, 1), RequestEvent.REFUSE)
            assert await writer.flush(timeout_s=10) == 0
    assert (writer.num_dropped, reported) == (2, [True, False])


async def test_a_lost_record_is_created_again_every_time() -> None:
    store, record = FaultyStore(), new_request(RequestId("a"))
    async with new_writer(store, []) as writer:
        writer.create(record)
        for event in (RequestEvent.ENQUEUE, RequestEvent.RESERVE, RequestEvent.PREFILL, RequestEvent.SEAL):
            assert await writer.flush(timeout_s=10) == 0
            store.inner = MemoryStore(OPTIONS)
            record = _step(writer, record, event)
        assert await writer.flush(timeout_s=10) == 0
    assert await store.inner.get(record.id) == record


async def test_a_retry_whose_answer_was_lost_is_not_superseded() -> None:
    store, record = FaultyStore(), new_request(RequestId("a"))
    async with new_writer(store, []) as writer:
        writer.create(record)
        for event in (RequestEvent.ENQUEUE, RequestEvent.RESERVE, RequestEvent.INTERRUPT):
            record = _step(writer, record, event)
        assert await writer.flush(timeout_s=10) == 0
        store.faults = [Fault.ANSWER_LOST]
        for event in (RequestEvent.RETRY, RequestEvent.RESERVE):
            record = _step(writer, record, event)
            assert await writer.flush(timeout_s=10) == 0
    assert await store.inner.get(record.id) == record


async def test_a_sequence_of_another_router_is_left_alone() -> None:
    store, reported = FaultyStore(), list[bool]()
    await store.inner.create(replace(new_request(RequestId("a")), router_id="other"))
    writer = new_writer(store, reported)
    writer.start()
    for name in "ab":
        writer.create(new_request(RequestId(name)))
        writer.advance(AttemptId(RequestId(name), 1), RequestEvent.ENQUEUE)
    assert await writer.close(timeout_s=10) == 0
    taken, own = await store.inner.get(RequestId("a")), await store.inner.get(RequestId("b"))
    assert taken is not None
    assert (taken.router_id, taken.state) == ("other", RequestState.RECEIVED)
    assert own is not None
    assert own.state is RequestState.QUEUED
    assert reported == []


async def test_an_idle_writer_notices_an_outage_and_its_end() -> None:
    store = FaultyStore([Fault.NOT_RECEIVED, Fault.NOT_RECEIVED])
    reported: asyncio.Queue[bool] = asyncio.Queue()
    writer = StoreWriter(
        cast(StateStore, store), WriterOptions(retry_s=0.001, idle_ping_s=0.001), on_degraded=reported.put_nowait
    )
    async with asyncio.timeout(10), writer:
        assert await reported.get() is True
        assert await reported.get() is False


async def test_the_writer_refuses_illegal_events() -> None:
    writer = new_writer(FaultyStore(), [])
    writer.create(new_request(RequestId("a")))
    with pytest.raises(Broken, match="already"):
        writer.create(new_request(RequestId("a")))
    with pytest.raises(Broken, match="cannot seal"):
        writer.advance(AttemptId(RequestId("a"), 1), RequestEvent.SEAL)
    with pytest.raises(Superseded):
        writer.advance(AttemptId(RequestId("a"), 0), RequestEvent.ENQUEUE)
    with pytest.raises(Broken, match="no such request"):
        writer.advance(AttemptId(RequestId("z"), 1), RequestEvent.ENQUEUE)
    assert await writer.close() == 1


async def test_records_are_rewritten_to_a_restarted_server() -> None:
    with running_redis() as server:
        store = await connect(server.url, StoreOptions(timeout_s=1.0))
        reported: asyncio.Queue[bool] = asyncio.Queue()
        writer = StoreWriter(store, WriterOptions(retry_s=0.02, idle_ping_s=0.02), on_degraded=reported.put_nowait)
        record = new_request(RequestId("a"))
        async with asyncio.timeout(10), writer:
            writer.create(record)
            server.kill()
            assert await reported.get() is True
            for event in (RequestEvent.ENQUEUE, RequestEvent.RESERVE, RequestEvent.INTERRUPT, RequestEvent.RETRY):
                record = _step(writer, record, event)
            server.start()
            assert await reported.get() is False
            assert await store.get(record.id) == record
        await store.close()
