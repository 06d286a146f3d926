"""HandoffClient against a scripted prefill: renewals per link, commits and aborts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import grpc
import pytest

from baton.domain.errors import LinkBroken, PageVerdict, WorkerLost
from baton.domain.handoff import PublishedChunk, Suspect
from baton.domain.ids import AttemptId, Incarnation, PageId, PageKey, RequestId, WorkerId
from baton.domain.worker import LinkRecord
from baton.engine.handoff.import_commands import CommitReplied, LeasesRenewed, QuarantineArrived, VerdictArrived
from baton.engine.mailbox import Mailbox
from baton.kv.page_tags import TAG_BYTES
from baton.rpc import codec
from baton.rpc.gen import common_pb2, handoff_pb2
from baton.rpc.request_metadata import Metadata
from baton.services.decode.commands import DecodeCommand, SourceLost
from baton.services.decode.handoff_client import HandoffClient
from baton.worker.handoff.links import PeerLink
from baton.worker.request_validator import EngineRequestValidator

ONE, TWO = (AttemptId(RequestId(name), 1) for name in ("one", "two"))
CHUNK = handoff_pb2.HandoffEvent(chunk=handoff_pb2.ChunkReady(first_page=0, pages=[3], digests=[7]))


def link(incarnation: int) -> PeerLink:
    record = LinkRecord(WorkerId("prefill-0"), Incarnation(incarnation), "stream", 1e9, 64)
    return PeerLink(record, f"address-{incarnation}", "stream")


class Prefill:
    """Stub of every link: sends scripted events and records the calls."""

    def __init__(self) -> None:
        self.published: dict[str, asyncio.Queue[handoff_pb2.HandoffEvent | None]] = {}
        self.renewals: asyncio.Queue[tuple[int, list[str]]] = asyncio.Queue()
        self.ended: list[AttemptId] = []
        self.lease_s: float | None = None
        self.delay_reply: Callable[[], Awaitable[None]] | None = None
        self.reachable = True
        self.links: tuple[PeerLink, ...] = ()
        self.quarantined: list[bytes] = []
        self.seen: list[int] = []
        self.suspects: list[common_pb2.SuspectPage] = []
        self.verdict = common_pb2.PAGE_VERDICT_UNSPECIFIED
        self.commits: asyncio.Queue[str] = asyncio.Queue()
        self.aborts: asyncio.Queue[str] = asyncio.Queue()

    def up(self) -> tuple[PeerLink, ...]:
        return self.links

    def stub(self, link: PeerLink) -> Prefill:
        return self

    async def Watch(
        self, request: handoff_pb2.WatchRequest, metadata: Metadata
    ) -> AsyncIterator[handoff_pb2.HandoffEvent]:
        queue = self.published.setdefault(request.id.request_id, asyncio.Queue())
        while (event := await queue.get()) is not None:
            yield event

    async def Renew(self, request: handoff_pb2.RenewRequest, timeout: float) -> handoff_pb2.RenewReply:
        await self.renewals.put((request.incarnation, [id.request_id for id in request.ids]))
        self.seen.append(request.quarantine_seen)
        if self.delay_reply is not None:
            await self.delay_reply()
        return handoff_pb2.RenewReply(
            ended=[codec.encode_id(id) for id in self.ended],
            lease_s=self.lease_s,
            quarantined=self.quarantined[request.quarantine_seen :],
            quarantine_number=len(self.quarantined),
        )

    async def Commit(
        self, request: handoff_pb2.CommitRequest, timeout: float, metadata: Metadata
    ) -> handoff_pb2.CommitReply:
        await self.commits.put(request.id.request_id)
        if not self.reachable:
            raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata())
        return handoff_pb2.CommitReply(valid=True)

    async def Abort(
        self, request: common_pb2.AbortRequest, timeout: float, metadata: Metadata
    ) -> common_pb2.AbortReply:
        await self.aborts.put(request.id.request_id)
        self.suspects = list(request.suspects)
        if not self.reachable:
            raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata())
        return common_pb2.AbortReply(verdict=self.verdict)


class HandoffHarness:
    """A HandoffClient between a mailbox and a scripted prefill."""

    def __init__(self, renew_interval_s: float = 0.01, num_parts: int = 1) -> None:
        self.prefill = Prefill()
        self.mailbox: Mailbox[DecodeCommand] = Mailbox(16)
        validator = EngineRequestValidator(1000, 1000)
        self.handoffs = HandoffClient(self.prefill, self.mailbox, renew_interval_s, validator, num_parts)  # type: ignore[arg-type]
        self.tasks: list[asyncio.Task[None]] = []

    async def watch(self, id: AttemptId, link: PeerLink, *events: handoff_pb2.HandoffEvent | None) -> None:
        queue = self.prefill.published.setdefault(id.request_id, asyncio.Queue())
        for event in events:
            queue.put_nowait(event)
        self.tasks.append(asyncio.create_task(self.handoffs.watch(id, link)))
        for _ in events:
            await self.next_commands()

    async def next_commands(self) -> list[DecodeCommand]:
        return await asyncio.to_thread(self.mailbox.take_all, 10.0)

    async def renewal(self) -> tuple[int, list[str]]:
        return await asyncio.wait_for(self.prefill.renewals.get(), 10.0)


@asynccontextmanager
async def handoff_harness(num_parts: int = 1) -> AsyncIterator[HandoffHarness]:
    one = HandoffHarness(num_parts=num_parts)
    renewing = asyncio.create_task(one.handoffs.renew_forever())
    try:
        yield one
    finally:
        for task in (renewing, *one.tasks):
            task.cancel()
        await asyncio.wait([renewing, *one.tasks], timeout=10.0)
        await one.handoffs.close()


async def test_a_handoff_is_renewed_from_its_first_chunk_on():
    """Before its first chunk prefill may not know a handoff and would report it as ended."""
    async with handoff_harness() as harness:
        await harness.watch(TWO, link(1))
        await harness.watch(ONE, link(1), CHUNK)
        assert await harness.renewal() == (1, ["one"])
        harness.prefill.published["two"].put_nowait(CHUNK)
        assert isinstance((await harness.next_commands())[0], PublishedChunk)
        while (renewed := await harness.renewal()) == (1, ["one"]):
            pass
        assert sorted(renewed[1]) == ["one", "two"]


async def test_two_incarnations_of_a_worker_are_not_mixed():
    async with handoff_harness() as harness:
        await harness.watch(ONE, link(1), CHUNK)
        await harness.watch(TWO, link(2), CHUNK)
        seen = [await harness.renewal() for _ in range(5)]
        assert {(1, ("one",)), (2, ("two",))} >= {(incarnation, tuple(ids)) for incarnation, ids in seen}
        assert {incarnation for incarnation, _ in seen[-2:]} == {1, 2}


async def test_an_ended_handoff_is_not_renewed():
    async with handoff_harness() as harness:
        await harness.watch(ONE, link(1), CHUNK)
        await harness.renewal()
        harness.prefill.ended = [ONE]
        await harness.watch(TWO, link(1), CHUNK)
        while (await harness.renewal())[1] != ["two"]:
            pass
        assert len(harness.handoffs) == 1


@pytest.mark.parametrize("wants_reply", [True, False])
async def test_a_commit_is_sent_once_and_answered_on_demand(wants_reply: bool):
    async with handoff_harness() as harness:
        await harness.watch(ONE, link(1), CHUNK)
        harness.handoffs.commit(ONE, wants_reply)
        assert await asyncio.wait_for(harness.prefill.commits.get(), 10.0) == "one"
        if wants_reply:
            assert await harness.next_commands() == [CommitReplied(ONE, True)]
        harness.handoffs.commit(ONE, wants_reply=True)
        assert await harness.next_commands() == [CommitReplied(ONE, False)], "there is nothing left that could be valid"
        assert harness.prefill.commits.empty()


async def test_an_unreachable_prefill_gives_an_empty_answer():
    async with handoff_harness() as harness:
        await harness.watch(ONE, link(1), CHUNK)
        harness.prefill.reachable = False
        harness.handoffs.commit(ONE, wants_reply=True)
        assert await harness.next_commands() == [CommitReplied(ONE, None)]


async def test_a_lease_is_measured_from_the_sending_of_its_renewal(monkeypatch: pytest.MonkeyPatch):
    """Prefill may start the lease as soon as the renewal is sent, however long the answer takes."""
    now = 100.0
    monkeypatch.setattr("baton.worker.handoff.handoff_calls.monotonic_s", lambda: now)
    async with handoff_harness() as harness:
        harness.prefill.lease_s = 5.0
        harness.prefill.ended = [TWO]

        async def much_later() -> None:
            nonlocal now
            now = 103.0
            harness.prefill.delay_reply = None

        harness.prefill.delay_reply = much_later
        await harness.watch(ONE, link(1), CHUNK)
        assert await harness.next_commands() == [LeasesRenewed((ONE,), 105.0)]
        harness.prefill.lease_s = None


async def test_an_ended_handoff_has_no_lease():
    async with handoff_harness() as harness:
        harness.prefill.lease_s, harness.prefill.ended = 5.0, [ONE]
        await harness.watch(ONE, link(1), CHUNK)
        await harness.watch(TWO, link(1), CHUNK)
        renewed: set[AttemptId] = set()
        while not renewed:
            renewed = {id for one in await harness.next_commands() if isinstance(one, LeasesRenewed) for id in one.ids}
        assert renewed == {TWO}


async def test_an_abort_is_sent_once():
    async with handoff_harness() as harness:
        await harness.watch(ONE, link(1), CHUNK)
        harness.handoffs.abort(ONE)
        harness.handoffs.abort(ONE)
        assert await asyncio.wait_for(harness.prefill.aborts.get(), 10.0) == "one"
        await harness.handoffs.close()
        assert harness.prefill.aborts.empty()


async def test_a_stream_that_ends_without_a_seal_is_a_lost_source():
    async with handoff_harness() as harness:
        harness.prefill.published["one"] = asyncio.Queue()
        harness.prefill.published["one"].put_nowait(None)
        await harness.watch(ONE, link(1))
        (lost,) = await harness.next_commands()
        assert isinstance(lost, SourceLost)
        assert isinstance(lost.error, WorkerLost)


@pytest.mark.parametrize(
    ("answer", "reachable", "verdict"),
    [
        (common_pb2.PAGE_VERDICT_SOURCE, True, PageVerdict.SOURCE),
        (common_pb2.PAGE_VERDICT_LINK, True, PageVerdict.LINK),
        (common_pb2.PAGE_VERDICT_UNSPECIFIED, True, None),
        (7, True, None),
        (common_pb2.PAGE_VERDICT_SOURCE, False, None),
    ],
)
async def test_the_sources_verdict_on_suspects_reaches_the_engine(
    answer: common_pb2.PageVerdict, reachable: bool, verdict: PageVerdict | None
):
    async with handoff_harness() as harness:
        await harness.watch(ONE, link(1), CHUNK)
        harness.prefill.verdict, harness.prefill.reachable = answer, reachable
        harness.handoffs.ask_verdict(ONE, [Suspect(2, PageId(3), 7)], "twice")
        assert await harness.next_commands() == [VerdictArrived(ONE, verdict, "twice")]
        assert harness.prefill.suspects == [common_pb2.SuspectPage(index=2, page=3, digests=[7])]
        harness.handoffs.ask_verdict(ONE, [], "once more")
        assert await harness.next_commands() == [VerdictArrived(ONE, None, "once more")]


TAG = bytes(TAG_BYTES)


@pytest.mark.parametrize(
    ("digests", "tags", "why"),
    [
        ([1, 2], [], "2 digests came with 2 pages of 2 parts"),
        ([1, 2, 3], [], "3 digests"),
        ([1, 2, 3, 4, 5], [], "5 digests"),
        ([1, 2, 3, 4], [TAG] * 2, "need 4 tags"),
        ([1, 2, 3, 4], [TAG] * 3 + [TAG[1:]], "need 4 tags"),
    ],
)
async def test_a_chunk_without_one_digest_a_part_breaks_the_link(digests: list[int], tags: list[bytes], why: str):
    async with handoff_harness(num_parts=2) as harness:
        chunk = handoff_pb2.ChunkReady(first_page=0, pages=[4, 5], digests=digests, tags=tags)
        harness.prefill.published["one"] = asyncio.Queue()
        harness.prefill.published["one"].put_nowait(handoff_pb2.HandoffEvent(chunk=chunk))
        await harness.watch(ONE, link(1))
        (lost,) = await harness.next_commands()
        assert isinstance(lost, SourceLost)
        assert isinstance(lost.error, LinkBroken)
        assert why in str(lost.error)


async def test_digests_and_tags_of_parts_are_joined_page_by_page():
    async with handoff_harness(num_parts=2) as harness:
        tags = [bytes([number]) * TAG_BYTES for number in range(4)]
        chunk = handoff_pb2.ChunkReady(first_page=3, pages=[4, 5], digests=[1, 2, 3, 2**64 - 1], tags=tags)
        harness.prefill.published["one"] = asyncio.Queue()
        harness.prefill.published["one"].put_nowait(handoff_pb2.HandoffEvent(chunk=chunk))
        await harness.watch(ONE, link(1))
        digests = (1 + (2 << 64), 3 + ((2**64 - 1) << 64))
        wanted = PublishedChunk(ONE, 3, (PageId(4), PageId(5)), digests, (tags[0] + tags[1], tags[2] + tags[3]))
        assert await harness.next_commands() == [wanted]
        harness.handoffs.ask_verdict(ONE, [Suspect(4, PageId(5), digests[1])], "twice")
        await harness.next_commands()
        assert harness.prefill.suspects == [common_pb2.SuspectPage(index=4, page=5, digests=[3, 2**64 - 1])]


async def test_quarantined_keys_arrive_without_a_handoff_and_after_a_lost_reply():
    async with handoff_harness() as harness:
        failures = 2

        async def lose() -> None:
            nonlocal failures
            failures -= 1
            if failures >= 0:
                raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata())

        harness.prefill.delay_reply = lose
        harness.prefill.quarantined = [b"a" * 16, b"short", b"b" * 16]
        harness.prefill.links = (link(1),)
        assert await harness.next_commands() == [
            QuarantineArrived(WorkerId("prefill-0"), (PageKey(b"a" * 16), PageKey(b"b" * 16)))
        ]
        harness.prefill.quarantined.append(b"c" * 16)
        assert await harness.next_commands() == [QuarantineArrived(WorkerId("prefill-0"), (PageKey(b"c" * 16),))]
        assert harness.prefill.seen[:3] == [0, 0, 0]
        assert 3 in harness.prefill.seen


async def test_a_slow_source_does_not_delay_the_renewals_of_others():
    async with handoff_harness() as harness:

        async def hang() -> None:
            harness.prefill.delay_reply = None
            await asyncio.Event().wait()

        harness.prefill.delay_reply = hang
        harness.prefill.links = (link(1),)
        await harness.renewal()
        harness.prefill.links = (link(1), link(2))
        assert [(await harness.renewal())[0] for _ in range(3)] == [2, 2, 2]
