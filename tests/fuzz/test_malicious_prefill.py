"""A malicious prefill worker: decode fails the link or the attempt, and keeps running."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.domain.errors import Broken, LinkBroken, from_code
from baton.domain.ids import Incarnation, WorkerId
from baton.domain.worker import WorkerRecord
from baton.engine.fake_runner import fake_slots
from baton.rpc.gen import common_pb2, decode_pb2, decode_pb2_grpc, handoff_pb2, handoff_pb2_grpc
from baton.rpc.server import RunningServer, ServerAuth, start_server
from tests.fuzz.grpc_messages import FUZZ, arbitrary_message
from tests.fuzz.worker_pair import (
    NUM_PAGES,
    PAGE_BYTES,
    TIMEOUT_S,
    VOCAB_SIZE,
    WorkerPair,
    prefill_record,
    running_pair,
)

PROMPT = (1, 2, 3, 4, 5)
MALICIOUS, INCARNATION = WorkerId("malicious"), Incarnation(0xCC)
LISTEN_S = 0.1
VALID_SOURCE = handoff_pb2.SourceInfo(
    worker_id=MALICIOUS, incarnation=INCARNATION, transport="stream", num_pages=NUM_PAGES, page_bytes=PAGE_BYTES
)


class MaliciousPrefill(handoff_pb2_grpc.HandoffServicer):
    """Returns the replies that a test sets."""

    def __init__(self) -> None:
        self.hello = handoff_pb2.HelloReply(source=VALID_SOURCE)
        self.events: list[handoff_pb2.HandoffEvent] = []
        self.renewal = handoff_pb2.RenewReply()
        slots = b"".join(fake_slots(PROMPT))
        self.pages = [slots[at : at + PAGE_BYTES].ljust(PAGE_BYTES, b"\0") for at in range(0, len(slots), PAGE_BYTES)]

    def truth(self) -> handoff_pb2.HandoffEvent:
        """Announcement of a correct worker for `PROMPT`."""
        return chunk(0, list(range(len(self.pages))), [xxhash.xxh3_64_intdigest(page) for page in self.pages])

    async def Hello(self, request: Any, context: Any) -> handoff_pb2.HelloReply:
        return self.hello

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[handoff_pb2.HandoffEvent]:
        for event in self.events:
            yield event
        if self.events:  # the stream's end would be a fault of its own
            await asyncio.Event().wait()

    async def ReadPages(self, request: Any, context: Any) -> AsyncIterator[handoff_pb2.PageBytes]:
        pages = (self.pages[page] if page < len(self.pages) else bytes(PAGE_BYTES) for page in request.pages)
        yield handoff_pb2.PageBytes(data=b"".join(pages))

    async def Commit(self, request: Any, context: Any) -> handoff_pb2.CommitReply:
        return handoff_pb2.CommitReply(valid=True)

    async def Renew(self, request: Any, context: Any) -> handoff_pb2.RenewReply:
        return self.renewal

    async def Abort(self, request: Any, context: Any) -> common_pb2.AbortReply:
        return common_pb2.AbortReply()


class MaliciousCluster:
    """The pair, and a malicious worker that decode connects to."""

    def __init__(self, pair: WorkerPair) -> None:
        self.pair = pair
        self.malicious = MaliciousPrefill()

    async def start(self) -> None:
        def register(server: grpc.aio.Server) -> None:
            handoff_pb2_grpc.add_HandoffServicer_to_server(self.malicious, server)

        self._server: RunningServer = await start_server("127.0.0.1", 0, register, ServerAuth(INCARNATION))
        self.record: WorkerRecord = prefill_record(f"127.0.0.1:{self._server.port}", MALICIOUS, INCARNATION)

    async def stop(self) -> None:
        await self._server.stop()

    async def connect(self) -> bool:
        """Lets decode connect; returns whether a link was made."""
        links = self.pair.decode.links
        await links._connect(self.record)
        try:
            links.get(MALICIOUS, INCARNATION)
        except LinkBroken:
            return False
        return True

    async def generate(self, listen_s: float = LISTEN_S) -> str | None:
        """The error code of an attempt with the malicious worker; None while it waits."""
        pair = self.pair
        request = pair.next_request(PROMPT)
        reserved = await pair.reserve(request)
        claim = pair.generate(request, reserved.reservation_id)
        claim.prefill_id, claim.prefill_incarnation = MALICIOUS, INCARNATION
        stub = decode_pb2_grpc.DecodeStub(pair.to_decode)
        call = stub.Generate(claim, timeout=TIMEOUT_S)
        events: list[decode_pb2.GenerateEvent] = []
        try:
            async with asyncio.timeout(listen_s):
                events = [event async for event in call]
        except TimeoutError:
            call.cancel()
        pair.check_alive()
        return events[-1].failed.code if events else None


@pytest.fixture(scope="module")
def cluster() -> Iterator[MaliciousCluster]:
    with running_pair() as pair:
        cluster = MaliciousCluster(pair)
        pair.run(cluster.start())
        yield cluster
        pair.run(cluster.stop())


@pytest.fixture(autouse=True)
def check_unharmed(cluster: MaliciousCluster) -> Iterator[None]:
    yield
    cluster.malicious.hello = handoff_pb2.HelloReply(source=VALID_SOURCE)
    assert cluster.pair.run(cluster.connect())
    cluster.pair.run(cluster.pair.check_still_serves())


@FUZZ
@given(arbitrary_message(handoff_pb2.HelloReply.DESCRIPTOR))
def test_arbitrary_hellos_make_no_link(cluster: MaliciousCluster, hello: handoff_pb2.HelloReply) -> None:
    cluster.malicious.hello = hello
    cluster.pair.run(cluster.connect())
    cluster.pair.check_alive()


@pytest.mark.parametrize(
    "change",
    [
        {"worker_id": "prefill-0"},
        {"incarnation": 1},
        {"transport": "nixl"},
        {"transport": ""},
        {"page_bytes": PAGE_BYTES + 1},
        {"page_bytes": 2**64 - 1},
        {"num_pages": 0},
        {"base_address": 2**64 - 1},
    ],
    ids=str,
)
def test_a_source_with_one_wrong_field_makes_no_link(cluster: MaliciousCluster, change: dict[str, Any]) -> None:
    """No process may take another worker's place."""
    source = handoff_pb2.SourceInfo()
    source.CopyFrom(VALID_SOURCE)
    for name in change:
        source.ClearField(name)
    source.MergeFrom(handoff_pb2.SourceInfo(**change))
    cluster.malicious.hello = handoff_pb2.HelloReply(source=source)
    assert not cluster.pair.run(cluster.connect())


def test_the_stream_ignores_page_addresses(cluster: MaliciousCluster) -> None:
    """The stream reads pages by number. `test_nixl_metadata` covers addresses."""
    source = handoff_pb2.SourceInfo()
    source.CopyFrom(VALID_SOURCE)
    source.num_pages, source.base_address = 2**32 - 1, 12345
    cluster.malicious.hello = handoff_pb2.HelloReply(source=source)
    assert cluster.pair.run(cluster.connect())


@settings(FUZZ, max_examples=40)
@given(st.lists(arbitrary_message(handoff_pb2.HandoffEvent.DESCRIPTOR), max_size=4))
def test_arbitrary_announcements_end_only_the_attempt(
    cluster: MaliciousCluster, events: list[handoff_pb2.HandoffEvent]
) -> None:
    cluster.pair.run(_connected(cluster))
    cluster.malicious.events = events
    code = cluster.pair.run(cluster.generate())
    assert code is None or not isinstance(from_code(code, ""), Broken)


@pytest.mark.parametrize("renewal", [{"lease_s": float("nan")}, {"lease_s": float("inf")}, {"lease_s": -1.0}], ids=str)
def test_arbitrary_renewals_do_no_harm(cluster: MaliciousCluster, renewal: dict[str, float]) -> None:
    cluster.pair.run(_connected(cluster))
    ended = common_pb2.AttemptId(request_id="", attempt=2**32 - 1)
    cluster.malicious.renewal = handoff_pb2.RenewReply(ended=[ended], lease_s=renewal["lease_s"])
    cluster.malicious.events = [chunk(0, [0, 1], [1, 2])]
    cluster.pair.run(cluster.generate())


def chunk(first_page: int, pages: list[int], digests: list[int]) -> handoff_pb2.HandoffEvent:
    return handoff_pb2.HandoffEvent(chunk=handoff_pb2.ChunkReady(first_page=first_page, pages=pages, digests=digests))


def seal(token: int, num_pages: int = 3) -> handoff_pb2.HandoffEvent:
    first = common_pb2.OutputToken(token=token)
    return handoff_pb2.HandoffEvent(seal=handoff_pb2.Seal(first_token=first, num_pages=num_pages))


@pytest.mark.parametrize(
    ("events", "code"),
    [
        ([chunk(0, [NUM_PAGES], [1])], "link_broken"),
        ([chunk(0, [2**32 - 1], [1])], "link_broken"),
        ([chunk(1, [0], [1])], "link_broken"),
        ([chunk(2**32 - 1, [0], [1])], "link_broken"),
        ([chunk(0, list(range(16)), list(range(16)))], "link_broken"),
        ([chunk(0, [0, 1], [1])], "link_broken"),
        ([chunk(0, [0, 1], [])], "link_broken"),
        ([chunk(0, [0, 0, 0], [1, 1, 1])], "integrity_failure"),
        ([seal(1)], "link_broken"),
        ([handoff_pb2.HandoffEvent()], "worker_lost"),
        ([], "worker_lost"),
    ],
    ids=repr,
)
def test_each_wrong_announcement_has_an_error_code(
    cluster: MaliciousCluster, events: list[handoff_pb2.HandoffEvent], code: str
) -> None:
    cluster.pair.run(_connected(cluster))
    cluster.malicious.events = events
    assert cluster.pair.run(cluster.generate(TIMEOUT_S)) == code


@pytest.mark.parametrize("token", [VOCAB_SIZE, 2**31, 2**32 - 1])
def test_a_first_token_outside_the_vocabulary_is_refused(cluster: MaliciousCluster, token: int) -> None:
    cluster.pair.run(_connected(cluster))
    cluster.malicious.events = [cluster.malicious.truth(), seal(token)]
    assert cluster.pair.run(cluster.generate(TIMEOUT_S)) == "link_broken"


def test_correct_announcements_are_accepted(cluster: MaliciousCluster) -> None:
    """Proves that decode accepts this prefill worker, so the other tests mean something."""
    cluster.pair.run(_connected(cluster))
    cluster.malicious.events = [cluster.malicious.truth(), seal(3)]
    assert cluster.pair.run(cluster.generate(TIMEOUT_S)) == ""


async def _connected(cluster: MaliciousCluster) -> None:
    cluster.malicious.hello = handoff_pb2.HelloReply(source=VALID_SOURCE)
    cluster.malicious.renewal = handoff_pb2.RenewReply()
    cluster.malicious.events = []
    try:
        cluster.pair.decode.links.get(MALICIOUS, INCARNATION)
    except LinkBroken:
        assert await cluster.connect()
