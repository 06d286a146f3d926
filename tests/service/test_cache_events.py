"""The stream of cache events over a real connection: deltas, a reader that resumes, slow readers, other processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import grpc
import pytest

from baton.domain.ids import Incarnation, PageKey
from baton.kv.events.codec import MAX_KEYS, join_keys
from baton.kv.events.event import RemovedEvent, StoredEvent
from baton.rpc.gen import worker_pb2, worker_pb2_grpc
from baton.rpc.server import ServerAuth, start_server
from baton.worker.event_log import SharedEventLog
from baton.worker.recent_attempts import RecentAttempts
from baton.worker.server import WorkerServicer

INCARNATION = Incarnation(7)
WAIT_S = 30.0


class Drainable:
    """The part of a worker's lifecycle that the stream reads."""

    def __init__(self) -> None:
        self.drained = asyncio.Event()


class World:
    """A worker with nothing but its event log."""

    def __init__(self, max_events: int) -> None:
        self.events = SharedEventLog(max_events)
        self.lifecycle = Drainable()
        self.stub: Any = None

    def register(self, server: grpc.aio.Server) -> None:
        lifecycle = cast(Any, self.lifecycle)
        servicer = WorkerServicer(INCARNATION, lifecycle, lambda: 0, RecentAttempts(), self.events, cast(Any, None))
        worker_pb2_grpc.add_WorkerServicer_to_server(servicer, server)

    def read(self, from_seq: int, incarnation: Incarnation = INCARNATION) -> Any:
        request = worker_pb2.CacheEventsRequest(incarnation=incarnation, from_seq=from_seq)
        return self.stub.CacheEvents(request, timeout=WAIT_S)


@asynccontextmanager
async def world(max_events: int = 1000) -> AsyncIterator[World]:
    one = World(max_events)
    server = await start_server("127.0.0.1", 0, one.register, ServerAuth(INCARNATION))
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            one.stub = cast(Any, worker_pb2_grpc.WorkerStub)(channel)
            yield one
    finally:
        await server.stop(0.0)


def key(number: int) -> PageKey:
    return PageKey(number.to_bytes(16, "big"))


def stored(*numbers: int) -> list[StoredEvent]:
    return [StoredEvent(key(number), None) for number in numbers]


async def test_a_reader_gets_what_was_and_what_comes():
    async with world() as one:
        one.events.extend(stored(1, 2))
        stream = one.read(0)
        first = await stream.read()
        assert (first.seq, first.stored) == (2, join_keys([key(1), key(2)]))
        await asyncio.to_thread(one.events.extend, [RemovedEvent(key(2))])  # as the engine thread does
        second = await stream.read()
        assert (second.after_seq, second.seq, second.removed, second.reset) == (2, 3, key(2), False)


async def test_a_reader_that_comes_back_gets_only_what_it_missed():
    async with world() as one:
        one.events.extend(stored(1, 2, 3))
        delta = await one.read(2).read()
        assert (delta.after_seq, delta.seq, delta.stored, delta.reset) == (2, 3, key(3), False)


async def test_a_reader_that_is_too_slow_gets_a_snapshot_once():
    async with world(max_events=4) as one:
        one.events.extend(stored(*range(10)))
        stream = one.read(1)
        snapshot = await stream.read()
        assert (snapshot.after_seq, snapshot.seq, snapshot.reset) == (0, 10, True)
        assert snapshot.stored == join_keys([key(number) for number in range(10)])
        one.events.extend(stored(10))
        delta = await stream.read()
        assert (delta.after_seq, delta.seq, delta.reset) == (10, 11, False), "the cursor did not become the snapshot's"


async def test_a_large_snapshot_comes_in_parts():
    async with world(max_events=4) as one:
        one.events.extend(stored(*range(MAX_KEYS + 1)))
        stream = one.read(0)
        first, second = await stream.read(), await stream.read()
        assert (first.reset, first.more, len(first.stored)) == (True, True, 16 * MAX_KEYS)
        assert (second.reset, second.more, second.stored) == (False, False, key(MAX_KEYS))


async def test_another_incarnation_is_refused():
    async with world() as one:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await one.read(0, Incarnation(8)).read()
        assert caught.value.code() is grpc.StatusCode.ABORTED


async def test_streams_end_with_the_drain():
    async with world() as one:
        stream = one.read(0)
        await stream.wait_for_connection()
        one.lifecycle.drained.set()
        assert await stream.read() is grpc.aio.EOF
