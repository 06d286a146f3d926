"""The path that a stream puller names is the one that its last pages came by."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from baton.domain.ids import Incarnation, WorkerId
from baton.kv.memory import PageMemory
from baton.rpc.gen import handoff_pb2, handoff_pb2_grpc
from baton.transfer.base import Pull, PullOutcome, SourceInfo
from baton.transfer.stream import CALLS_PATH, PAGES_PATH, TRANSPORT, link
from baton.transfer.stream.mover import StreamPuller
from baton.transfer.stream.source import PageEndpoint, StreamSource
from tests.unit.transfer.rigs import EventLog, page_ids
from tests.unit.transfer.source_process import filled_memory
from tests.unit.transfer.test_stream import served

PREFILL, INCARNATION = WorkerId("p"), Incarnation(7)
NUM_PAGES, PAGE_BYTES = 4, 64


class Servicer(handoff_pb2_grpc.HandoffServicer):
    """Answers reads by calls from `memory`."""

    def __init__(self, memory: PageMemory) -> None:
        self._memory = memory

    def ReadPages(self, request: Any, context: Any) -> Iterator[handoff_pb2.PageBytes]:
        return (handoff_pb2.PageBytes(data=bytes(self._memory.page(page))) for page in request.pages)


def test_the_path_follows_the_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The source's port of page connections goes and comes back: the calls between are named, and nothing else."""
    memory, events = filled_memory(NUM_PAGES, PAGE_BYTES, seed=3), EventLog()
    with (
        served([], Servicer(memory)) as address,
        closing(StreamPuller(PageMemory(NUM_PAGES, PAGE_BYTES), events)) as puller,
    ):
        numbers = iter(range(1, 9))

        def path_of_a_pull() -> str:
            pull = Pull(next(numbers), PREFILL, page_ids([1, 2]), page_ids([0, 1]), None, 20.0)
            puller.submit(pull)
            assert events.terminal(pull).outcome is PullOutcome.DONE
            return puller.path(PREFILL)

        with closing(StreamSource(INCARNATION, memory)) as source:
            metadata = source.metadata()
            info = SourceInfo(PREFILL, INCARNATION, address, TRANSPORT, metadata, 0, NUM_PAGES, PAGE_BYTES)
            puller.connect(info)
            assert puller.path(PREFILL) == TRANSPORT, "nothing has come yet"
            assert path_of_a_pull() == PAGES_PATH
        assert path_of_a_pull() == CALLS_PATH
        with closing(StreamSource(INCARNATION, memory, endpoint=PageEndpoint(port=int(metadata)))):
            assert path_of_a_pull() == CALLS_PATH, "connections are not tried again at once"
            monkeypatch.setattr(link, "CALLS_S", 0.0)
            puller.connect(info)
            assert puller.path(PREFILL) == TRANSPORT
            assert path_of_a_pull() == PAGES_PATH
