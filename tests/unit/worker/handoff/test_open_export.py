"""`OpenExport` on the wire: what is asked, what is answered, and what is refused."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import grpc
import pytest

from baton.domain.errors import BatonError, InvalidRequest, LinkBroken, Superseded
from baton.domain.fingerprint import Fingerprint
from baton.domain.handoff import PublishedChunk
from baton.domain.ids import AttemptId, Incarnation, PageId, PageKey, RequestId, WorkerId
from baton.engine.handoff.export_commands import ExportCommand, OpenExport
from baton.rpc import codec
from baton.rpc.gen import handoff_pb2
from baton.worker.handoff.handoff_calls import decode_chunk
from baton.worker.handoff.handoff_handlers import LinkConfig
from baton.worker.handoff.handoff_log import HandoffLog
from baton.worker.handoff.handoff_server import HandoffServicer

CONTEXT = cast("grpc.aio.ServicerContext[Any, Any]", None)
ID = AttemptId(RequestId("a"), 1)
KEY = PageKey(bytes(16))


class Engine:
    """Answers a question at once."""

    def __init__(self, answer: PublishedChunk | BatonError) -> None:
        self.answer = answer
        self.commands: list[ExportCommand] = []

    def put(self, command: ExportCommand) -> None:
        self.commands.append(command)
        assert isinstance(command, OpenExport)
        command.reply.send(self.answer)


def ask(engine: Engine, gives: bool, *keys: bytes, num_parts: int = 2) -> handoff_pb2.OpenExportReply:
    terms = LinkConfig(
        WorkerId("decode-0"), Incarnation(1), "m", Fingerprint(()), {"stream": b""}, 0, 8, 64, 1.0,
        num_page_parts=num_parts, gives_cached=gives,
    )  # fmt: skip
    servicer = HandoffServicer(terms, engine, HandoffLog(), None)
    request = handoff_pb2.OpenExportRequest(id=codec.encode_id(ID), incarnation=1, page_keys=keys, first_page=3)
    return asyncio.run(servicer.OpenExport(request, CONTEXT))


def test_the_engine_s_answer_comes_with_the_digests_of_all_parts():
    chunk = PublishedChunk(ID, 3, (PageId(4), PageId(7)), (1 << 64 | 2, 3 << 64 | 4))
    engine = Engine(chunk)
    reply = ask(engine, True, KEY)
    (command,) = engine.commands
    assert isinstance(command, OpenExport)
    assert (command.id, command.keys, command.first_page) == (ID, (KEY,), 3)
    assert decode_chunk(ID, reply.chunk, 2) == chunk


def test_nothing_to_give_is_an_answer():
    reply = ask(Engine(PublishedChunk(ID, 3, (), ())), True, KEY)
    assert reply.WhichOneof("reply") == "chunk"
    assert not reply.chunk.pages


@pytest.mark.parametrize(
    ("gives", "key", "error"),
    [(False, KEY, LinkBroken), (True, b"short", InvalidRequest)],
)
def test_a_question_that_cannot_be_answered_is_refused(gives: bool, key: bytes, error: type[BatonError]):
    engine = Engine(PublishedChunk(ID, 0, ()))
    assert ask(engine, gives, key).refused.code == error.code
    assert engine.commands == []


def test_an_error_of_the_engine_is_the_answer():
    reply = ask(Engine(Superseded("seen", ID)), True, KEY)
    assert isinstance(codec.decode_failure(reply.refused), Superseded)
