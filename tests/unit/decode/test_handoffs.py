"""Handoffs: which leases are renewed, over which link, and what is said at the end. Prefill is a list of calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import grpc
import pytest

from baton.domain.errors import WorkerLost
from baton.domain.ids import AttemptId, Incarnation, RequestId, WorkerId
from baton.domain.worker import LinkRecord
from baton.engine.intake import Intake
from baton.engine.mailbox import Mailbox
from baton.rpc import codec
from baton.rpc.gen import common_pb2, handoff_pb2
from services.decode.commands import ChunkArrived, CommitAnswered, DecodeCommand, LeasesRenewed, SourceLost
from services.decode.handoffs import Handoffs
from services.decode.links import Link

ONE, TWO = (AttemptId(RequestId(name), 1) for name in ("one", "two"))
CHUNK = handoff_pb2.HandoffEvent(chunk=handoff_pb2.ChunkReady(first_page=0, pages=[3], digests=[7]))


def link(incarnation: int) -> Link:
    record = LinkRecord(WorkerId("prefill-0"), Incarnation(incarnation), "stream", 1e9, 64)
    return Link(record, f"address-{incarnation}", "stream")


class Prefill:
    """Every link's stub: announces what it is told to and remembers what it hears."""

    def __init__(self) -> None:
        self.announced: dict[str, asyncio.Queue[handoff_pb2.HandoffEvent | None]] = {}
        self.renewals: asyncio.Queue[tuple[int, list[str]]] = asyncio.Queue()
        self.ended: list[AttemptId] = []
        self.lease_s: float | None = None
        self.answers_late: Callable[[], Awaitable[None]] | None = None
        self.reachable = True
        self.commits: asyncio.Queue[str] = asyncio.Queue()
        self.aborts: asyncio.Queue[str] = asyncio.Queue()

    def stub(self, link: Link) -> Prefill:
        return self

    async def Watch(self, request: handoff_pb2.WatchRequest) -> AsyncIterator[handoff_pb2.HandoffEvent]:
        queue = self.announced.setdefault(request.id.request_id, asyncio.Queue())
        while (event := await queue.get()) is not None:
            yield event

    async def Renew(self, request: handoff_pb2.RenewRequest, timeout: float) -> handoff_pb2.RenewReply:
        await self.renewals.put((request.incarnation, [id.request_id for id in request.ids]))
        if self.answers_late is not None:
            await self.answers_late()
        return handoff_pb2.RenewReply(ended=[codec.encode_id(id) for id in self.ended], lease_s=self.lease_s)

    async def Commit(self, request: handoff_pb2.CommitRequest, timeout: float) -> handoff_pb2.CommitReply:
        await self.commits.put(request.id.request_id)
        if not self.reachable:
            raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata())
        return handoff_pb2.CommitReply(valid=True)

    async def Abort(self, request: common_pb2.AbortRequest, timeout: float) -> common_pb2.AbortReply:
        await self.aborts.put(request.id.request_id)
        return common_pb2.AbortReply()


class Room:
    """Handoffs between a mailbox and a scripted prefill."""

    def __init__(self, renew_interval_s: float = 0.01) -> None:
        self.prefill = Prefill()
        self.mailbox: Mailbox[DecodeCommand] = Mailbox(16)
        self.handoffs = Handoffs(self.prefill, self.mailbox, renew_interval_s, Intake(1000, 1000))  # type: ignore[arg-type]
        self.tasks: list[asyncio.Task[None]] = []

    async def follow(self, id: AttemptId, link: Link, *events: handoff_pb2.HandoffEvent | None) -> None:
        queue = self.prefill.announced.setdefault(id.request_id, asyncio.Queue())
        for event in events:
            queue.put_nowait(event)
        self.tasks.append(asyncio.create_task(self.handoffs.follow(id, link)))
        for _ in events:
            await self.heard()

    async def heard(self) -> list[DecodeCommand]:
        return await asyncio.to_thread(self.mailbox.take, 10.0)

    async def renewal(self) -> tuple[int, list[str]]:
        return await asyncio.wait_for(self.prefill.renewals.get(), 10.0)


@asynccontextmanager
async def room() -> AsyncIterator[Room]:
    one = Room()
    renewing = asyncio.create_task(one.handoffs.renew_forever())
    try:
        yield one
    finally:
        for task in (renewing, *one.tasks):
            task.cancel()
        await asyncio.wait([renewing, *one.tasks], timeout=10.0)
        await one.handoffs.close()


async def test_a_handoff_is_renewed_from_its_first_chunk_on():
    """Before that prefill may not know it yet, would call it ended, and it would never be renewed again."""
    async with room() as here:
        await here.follow(TWO, link(1))
        await here.follow(ONE, link(1), CHUNK)
        assert await here.renewal() == (1, ["one"])
        here.prefill.announced["two"].put_nowait(CHUNK)
        assert isinstance((await here.heard())[0], ChunkArrived)
        while (renewed := await here.renewal()) == (1, ["one"]):
            pass
        assert sorted(renewed[1]) == ["one", "two"]


async def test_two_incarnations_of_a_worker_are_not_mixed():
    async with room() as here:
        await here.follow(ONE, link(1), CHUNK)
        await here.follow(TWO, link(2), CHUNK)
        seen = [await here.renewal() for _ in range(5)]
        assert {(1, ("one",)), (2, ("two",))} >= {(incarnation, tuple(ids)) for incarnation, ids in seen}
        assert {incarnation for incarnation, _ in seen[-2:]} == {1, 2}


async def test_what_has_ended_is_renewed_no_more():
    async with room() as here:
        await here.follow(ONE, link(1), CHUNK)
        await here.renewal()
        here.prefill.ended = [ONE]
        await here.follow(TWO, link(1), CHUNK)
        while (await here.renewal())[1] != ["two"]:
            pass
        assert len(here.handoffs) == 1


@pytest.mark.parametrize("answer", [True, False])
async def test_a_commit_is_said_once_and_answered_if_wanted(answer: bool):
    async with room() as here:
        await here.follow(ONE, link(1), CHUNK)
        here.handoffs.commit(ONE, answer)
        assert await asyncio.wait_for(here.prefill.commits.get(), 10.0) == "one"
        if answer:
            assert await here.heard() == [CommitAnswered(ONE, True)]
        here.handoffs.commit(ONE, answer=True)
        assert await here.heard() == [CommitAnswered(ONE, False)], "there is nothing left that could be valid"
        assert here.prefill.commits.empty()


async def test_a_prefill_that_cannot_be_asked_says_nothing():
    async with room() as here:
        await here.follow(ONE, link(1), CHUNK)
        here.prefill.reachable = False
        here.handoffs.commit(ONE, answer=True)
        assert await here.heard() == [CommitAnswered(ONE, None)]


async def test_a_lease_is_measured_from_the_sending_of_its_renewal(monkeypatch: pytest.MonkeyPatch):
    """However long the answer took: prefill may have started the lease as soon as the renewal was sent."""
    now = 100.0
    monkeypatch.setattr("services.decode.handoffs.Clock", lambda: now)
    async with room() as here:
        here.prefill.lease_s = 5.0
        here.prefill.ended = [TWO]

        async def much_later() -> None:
            nonlocal now
            now = 103.0
            here.prefill.answers_late = None

        here.prefill.answers_late = much_later
        await here.follow(ONE, link(1), CHUNK)
        assert await here.heard() == [LeasesRenewed((ONE,), 105.0)]
        here.prefill.lease_s = None


async def test_what_has_ended_has_no_lease():
    async with room() as here:
        here.prefill.lease_s, here.prefill.ended = 5.0, [ONE]
        await here.follow(ONE, link(1), CHUNK)
        await here.follow(TWO, link(1), CHUNK)
        renewed: set[AttemptId] = set()
        while not renewed:
            renewed = {id for one in await here.heard() if isinstance(one, LeasesRenewed) for id in one.ids}
        assert renewed == {TWO}


async def test_an_abort_is_said_once():
    async with room() as here:
        await here.follow(ONE, link(1), CHUNK)
        here.handoffs.abort(ONE)
        here.handoffs.abort(ONE)
        assert await asyncio.wait_for(here.prefill.aborts.get(), 10.0) == "one"
        await here.handoffs.close()
        assert here.prefill.aborts.empty()


async def test_a_stream_that_ends_without_a_seal_is_a_lost_source():
    async with room() as here:
        here.prefill.announced["one"] = asyncio.Queue()
        here.prefill.announced["one"].put_nowait(None)
        await here.follow(ONE, link(1))
        (lost,) = await here.heard()
        assert isinstance(lost, SourceLost)
        assert isinstance(lost.error, WorkerLost)
