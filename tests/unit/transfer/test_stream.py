"""Each end of the stream alone: refusals and message sizes of the source, and a puller that gets wrong bytes."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import Any

import grpc
import pytest

from baton.domain.ids import Incarnation, WorkerId
from baton.kv.memory import PageMemory
from baton.rpc.gen import handoff_pb2, handoff_pb2_grpc
from baton.transfer.base import Pull, PullEvent, PullOutcome, SourceInfo
from baton.transfer.stream.mover import StreamPuller
from baton.transfer.stream.source import MAX_MESSAGE_BYTES, StreamSource
from tests.staged_memory import staged_memory
from tests.unit.transfer.rigs import EventLog, page_ids
from tests.unit.transfer.source_process import filled_memory

INCARNATION = Incarnation(7)


class Aborted(Exception):
    pass


class Context:
    async def abort(self, code: grpc.StatusCode, details: str = "") -> None:
        raise Aborted(code.name)


async def messages(source: StreamSource, pages: list[int], incarnation: int = INCARNATION) -> list[bytes]:
    request = handoff_pb2.ReadPagesRequest(incarnation=incarnation, pages=pages)
    context: Any = Context()
    return [message.data async for message in source.read_pages(request, context)]


@pytest.mark.parametrize(
    ("page_bytes", "num_messages"), [(MAX_MESSAGE_BYTES // 4, 3), (300_000, 3), (MAX_MESSAGE_BYTES + 8, 9)]
)
async def test_messages_hold_whole_pages_in_order(page_bytes, num_messages):
    memory = filled_memory(10, page_bytes, seed=1)
    pages = [9, 0, 3, 3, 1, 2, 4, 5, 8]
    with closing(StreamSource(INCARNATION, memory)) as source:
        got = await messages(source, pages)
    assert b"".join(got) == b"".join(memory.page(page) for page in pages)
    assert len(got) == num_messages
    assert all(len(data) % page_bytes == 0 for data in got)
    assert all(len(data) <= max(MAX_MESSAGE_BYTES, page_bytes) for data in got)


async def test_pages_of_a_device_are_served_by_way_of_the_host():
    memory = staged_memory(4, 4096)
    contents = [bytes([page]) * 4096 for page in range(4)]
    memory.write(range(4), [memoryview(content) for content in contents])
    with closing(StreamSource(INCARNATION, memory)) as source:
        assert await messages(source, [2, 0, 3]) == [contents[2] + contents[0] + contents[3]]


async def test_invalid_reads_are_refused():
    source = StreamSource(INCARNATION, PageMemory(4, 64))
    with pytest.raises(Aborted, match="FAILED_PRECONDITION"):
        await messages(source, [0], incarnation=8)
    with pytest.raises(Aborted, match="OUT_OF_RANGE"):
        await messages(source, [0, 4])
    assert await messages(source, []) == []
    source.close()
    source.close()
    with pytest.raises(Aborted, match="UNAVAILABLE"):
        await messages(source, [0])


class WrongServicer(handoff_pb2_grpc.HandoffServicer):
    """Answers every read with the same messages."""

    def __init__(self, answers: list[bytes]) -> None:
        self.answers = answers

    def ReadPages(self, request: Any, context: Any) -> Iterator[handoff_pb2.PageBytes]:
        return (handoff_pb2.PageBytes(data=data) for data in self.answers)


@contextmanager
def served(answers: list[bytes], servicer: handoff_pb2_grpc.HandoffServicer | None = None) -> Iterator[str]:
    """Address of a server of wrong bytes, or of `servicer`."""
    with ThreadPoolExecutor(1) as threads:
        server = grpc.server(threads)
        handoff_pb2_grpc.add_HandoffServicer_to_server(servicer or WrongServicer(answers), server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            server.stop(grace=None).wait()


def pull_from(address: str, memory: PageMemory) -> PullEvent:
    events, prefill = EventLog(), WorkerId("p")
    puller = StreamPuller(memory, events)
    try:
        puller.connect(SourceInfo(prefill, INCARNATION, address, "stream", b"", 0, 4, 64))
        pull = Pull(1, prefill, page_ids([0, 1]), page_ids([0, 1]), None, 10.0)
        puller.submit(pull)
        return events.terminal(pull)
    finally:
        puller.close()


@pytest.mark.parametrize(
    ("answers", "problem"),
    [
        ([bytes(64)], "ended after 1 pages"),
        ([bytes(65)], "65 bytes are not"),
        ([bytes(64)] * 3, "not at most 0 pages"),
        ([], "ended after 0 pages"),
    ],
    ids=["too few", "not whole", "too many", "none"],
)
def test_wrong_bytes_are_a_failure(answers, problem):
    with served(answers) as address:
        event = pull_from(address, PageMemory(4, 64))
    assert event.outcome is PullOutcome.FAILED
    assert problem in event.reason


def test_right_bytes_are_written():
    memory = PageMemory(4, 64)
    with served([b"a" * 64, b"b" * 64]) as address:
        assert pull_from(address, memory).outcome is PullOutcome.DONE
    assert memory.buffer == b"a" * 64 + b"b" * 64 + bytes(128)


class DamagedServicer(handoff_pb2_grpc.HandoffServicer):
    """Fails every read on its first connection, as damaged headers do; answers with two pages on any other."""

    def __init__(self) -> None:
        self.peers: list[str] = []

    def ReadPages(self, request: Any, context: Any) -> Iterator[handoff_pb2.PageBytes]:
        if context.peer() not in self.peers:
            self.peers.append(context.peer())
        if context.peer() == self.peers[0]:
            context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        yield handoff_pb2.PageBytes(data=b"a" * 128)


def test_a_damaged_connection_fails_one_pull_and_not_the_next():
    servicer, memory = DamagedServicer(), PageMemory(4, 64)
    with served([], servicer) as address:
        events, prefill = EventLog(), WorkerId("p")
        puller = StreamPuller(memory, events)
        try:
            puller.connect(SourceInfo(prefill, INCARNATION, address, "stream", b"", 0, 4, 64))
            outcomes = []
            for number in (1, 2, 3):
                pull = Pull(number, prefill, page_ids([0, 1]), page_ids([0, 1]), None, 10.0)
                puller.submit(pull)
                outcomes.append(events.terminal(pull).outcome)
        finally:
            puller.close()
    assert outcomes == [PullOutcome.FAILED, PullOutcome.DONE, PullOutcome.DONE]
    assert len(servicer.peers) == 2


def test_an_unreachable_source_is_a_failure():
    with served([]) as address:
        pass
    event = pull_from(address, PageMemory(4, 64))
    assert event.outcome is PullOutcome.FAILED
    assert event.seconds < 5.0
