"""A Redis server without free memory: workers stay, leases hold, calls end and are claimed; only new records wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

import pytest
from redis.asyncio import Redis
from redis.exceptions import OutOfMemoryError

from baton.domain.ids import AttemptId, Incarnation, OwnerId, RequestId, WorkerId, first_attempt
from baton.domain.lifecycle import RequestEvent, RequestState
from baton.domain.request import OutputToken
from baton.domain.worker import WorkerRecord, WorkerRole
from baton.store.connect import connect
from baton.store.options import StoreOptions
from baton.store.store import (
    CallRecord,
    CallStatus,
    JournalEntry,
    SequenceRecord,
    StateStore,
    StoreUnavailable,
    WriteOutcome,
)
from baton.store.write_behind.flusher import WriterOptions
from baton.store.write_behind.writer import StoreWriter
from baton.store.write_chain import ChainedWrite, EndCall, PutCall, PutSequence, WriteJournal
from tests.contract.stores import DEADLINE_S
from tests.redis_server import running_redis

OURS, THEIRS = OwnerId("router-0/a"), OwnerId("router-1/b")
WORKER = WorkerRecord(
    WorkerId("decode-0"), WorkerRole.DECODE, Incarnation(1), "10.0.0.1:7", "tiny", "f00d", 16, 4096, 32000
)  # fmt: skip


def new_request(id: str) -> SequenceRecord:
    return SequenceRecord(RequestId(id), 1, RequestState.RECEIVED, "router-0", "tiny", num_prompt_tokens=7)


def new_call(id: str) -> CallRecord:
    body = b"{}" + b" " * 1000
    sequence = RequestId(f"{id}-0")
    return CallRecord(RequestId(id), OURS, 1, CallStatus.OPEN, "/v1/completions", body, "", 17, 5, (sequence,))


@dataclass(slots=True)
class SmallServer:
    """A store on a server of its own, whose memory can be filled and freed."""

    store: StateStore
    outside: Redis

    async def fill(self) -> None:
        """Sets a memory limit below what the server uses."""
        await self.outside.config_set("maxmemory-policy", "noeviction")
        await self.outside.config_set("maxmemory", 1)
        with pytest.raises(OutOfMemoryError):
            await self.outside.set("more", "x")

    async def make_space(self) -> None:
        await self.outside.config_set("maxmemory", 0)


@pytest.fixture
async def small() -> AsyncIterator[SmallServer]:
    with running_redis() as server:
        store, outside = await connect(server.url, StoreOptions(timeout_s=5.0)), Redis.from_url(server.url)
        yield SmallServer(store, outside)
        await outside.aclose()
        await store.close()


async def test_a_server_that_takes_no_writes_proves_no_worker_lost(small: SmallServer) -> None:
    """Their records expire, since it refuses them: as on a full disk, where nothing can be saved."""
    assert await small.store.announce(WORKER)
    await small.outside.config_set("min-replicas-to-write", 1)
    with pytest.raises(StoreUnavailable, match="cannot list workers"):
        await small.store.workers()
    await small.outside.config_set("min-replicas-to-write", 0)
    assert [record.id for record in await small.store.workers()] == [WORKER.id]


async def test_a_full_server_keeps_workers_leases_and_claims(small: SmallServer) -> None:
    store = small.store
    await store.put_call(new_call("c"))
    await store.put_call(new_call("d"))
    await store.create(new_request("c-0"))
    await store.announce(WORKER)
    await small.fill()

    assert await store.announce(WORKER)
    newcomers = [replace(WORKER, id=WorkerId(f"decode-{n}")) for n in range(1, 4)]
    for worker in newcomers:
        assert await store.announce(worker)
    await store.withdraw(WORKER.id, WORKER.incarnation)
    assert await store.workers() == newcomers

    await store.hold_lease(OURS, 1)
    await store.hold_lease(THEIRS, 1)
    assert await store.list_orphans() == []
    await store.release_lease(OURS)
    assert [call.id for call in await store.list_orphans()] == ["c", "d"]
    assert await store.claim_call(RequestId("c"), (1, 0), THEIRS) is not None
    record = await store.get(RequestId("c-0"))
    assert record is not None
    assert (record.state, record.attempt) == (RequestState.QUEUED, first_attempt(2))
    assert await store.end_call(RequestId("d"), (1, 0), CallStatus.ENDED)
    assert await store.list_orphans() == []


async def test_a_full_server_refuses_new_records_atomically(small: SmallServer) -> None:
    store = small.store
    await store.create(new_request("c-0"))
    await small.fill()
    entries = [JournalEntry(AttemptId(RequestId("c-0"), 1), index, (5,)) for index in range(3)]
    for call in (
        store.create(new_request("new")),
        store.put_call(new_call("new")),
        store.write_journal(entries),
    ):
        with pytest.raises(StoreUnavailable, match="maxmemory"):
            await call
    assert (await store.read_journal(RequestId("c-0"), 0, 0.0)).tokens == ()
    assert await store.get(RequestId("new")) is None
    assert await store.get_call(RequestId("new")) is None
    await small.make_space()
    assert await store.write_journal(entries) == [WriteOutcome.DONE] * 3


async def test_a_full_server_refuses_chains_as_a_whole(small: SmallServer) -> None:
    store = small.store
    await store.put_call(new_call("c"))
    await store.create(new_request("c-0"))
    await small.fill()
    journal = WriteJournal((JournalEntry(AttemptId(RequestId("c-0"), 1), 0, (5,)),))
    end = EndCall(RequestId("c"), (1, 0), CallStatus.ENDED)
    opening: list[ChainedWrite] = [PutCall(new_call("d")), PutSequence(new_request("d-0"))]
    refused: list[list[list[ChainedWrite]]] = [[opening], [[journal], [end]], [opening, [journal, end]]]
    for chains in refused:
        with pytest.raises(StoreUnavailable, match="maxmemory"):
            await store.write_chains(chains)
    assert (await store.read_journal(RequestId("c-0"), 0, 0.0)).tokens == ()
    assert [await store.get_call(RequestId("d")), await store.get(RequestId("d-0"))] == [None, None]
    assert await store.get_call(RequestId("c")) == new_call("c")
    assert (await store.write_chains([[end]]))[0][0].accepted  # an end needs no memory
    await small.make_space()
    [results] = await store.write_chains([opening])
    assert [result.accepted for result in results] == [True, True]


async def test_everything_is_written_once_there_is_memory_again(small: SmallServer) -> None:
    store, heard = small.store, asyncio.Queue[bool]()
    await small.fill()
    writer = StoreWriter(store, WriterOptions(retry_s=0.02), on_degraded=heard.put_nowait)
    async with asyncio.timeout(2 * DEADLINE_S), writer:
        assert writer.open_call(new_call("c"))
        writer.create(new_request("c-0"))
        id = AttemptId(RequestId("c-0"), 1)
        for event in (RequestEvent.ENQUEUE, RequestEvent.RESERVE, RequestEvent.DECODE):
            writer.advance(id, event)
        writer.write_tokens(id, [OutputToken(index, 5) for index in range(100)], num_cached_tokens=0)
        assert await heard.get() is True
        await small.make_space()
        assert await heard.get() is False
        assert await writer.flush(DEADLINE_S) == 0
        part = await store.read_journal(RequestId("c-0"), 0, 0.0)
        record = await store.get(RequestId("c-0"))
    assert [token.index for token in part.tokens] == list(range(100))
    assert record is not None
    assert record.state is RequestState.DECODING
    assert await store.get_call(RequestId("c")) == new_call("c")
