"""Reservations, prompts and aborts in a session, at the worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from baton.domain.errors import InvalidRequest
from baton.domain.ids import AttemptId, RequestId
from baton.domain.trace_context import TraceContext
from baton.domain.worker import WorkerRole
from baton.rpc.codec import decode_failure, encode_id
from baton.rpc.gen import common_pb2, decode_pb2, prefill_pb2
from baton.rpc.gen import session_pb2 as pb
from baton.services.router.dispatch.worker_errors import AttemptFailure, FaultSource, classify_reported
from baton.session.prompts import split_prompt
from baton.worker.sessions import served_streams
from baton.worker.sessions.served_streams import ServedStreams
from baton.worker.sessions.session_handlers import SessionHandlers

ID = encode_id(AttemptId(RequestId("a"), 1))
SEALED = prefill_pb2.PrefillEvent(sealed=prefill_pb2.Sealed(num_cached_tokens=3))
REPLY = decode_pb2.ReserveReply(reserved=decode_pb2.Reserved(reservation_id="r-1"))


@dataclass
class HandlerRig:
    """Streams of a worker without attempts. A reservation is answered, and a prompt sealed, once `go` is set."""

    posted: list[pb.StreamMessage] = field(default_factory=list)
    asked: list[object] = field(default_factory=list)
    traces: list[TraceContext] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    go: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.use(SessionHandlers(self.asked.append, reserve=self.reserve, prefill=self.prefill))

    def use(self, handlers: SessionHandlers) -> None:
        self.streams = ServedStreams(cast(Any, self), handlers, 1 << 10)

    def post(self, message: pb.StreamMessage) -> None:
        self.posted.append(message)

    def post_tokens(self, stream: int, first_index: int, tokens: list[int]) -> None:
        raise AssertionError("no row is written")

    async def reserve(self, request: decode_pb2.ReserveRequest, trace: TraceContext) -> decode_pb2.ReserveReply:
        self.asked.append(request)
        self.traces.append(trace)
        try:
            await self.go.wait()
            return REPLY
        finally:
            self.ended.append("reserve")

    async def prefill(
        self, request: prefill_pb2.PrefillRequest, trace: TraceContext
    ) -> AsyncGenerator[prefill_pb2.PrefillEvent, None]:
        self.asked.append(list(request.request.tokens))
        self.traces.append(trace)
        try:
            await self.go.wait()
            yield SEALED
        finally:
            self.ended.append("prefill")

    async def apply(self, *messages: pb.StreamMessage) -> None:
        self.streams.apply(list(messages))
        for _ in range(5):
            await asyncio.sleep(0)


def reserve(number: int) -> pb.StreamMessage:
    request = decode_pb2.ReserveRequest(id=ID, num_tokens=2)
    return pb.StreamMessage(stream=number, reserve=pb.OpenReserve(request=request, http_request_id="http-1"))


def prefill(number: int, *tokens: int) -> list[pb.StreamMessage]:
    request = prefill_pb2.PrefillRequest(request=common_pb2.EngineRequest(id=ID))
    opened = pb.StreamMessage(stream=number, prefill=pb.OpenPrefill(request=request, http_request_id="http-1"))
    return [opened, *(pb.StreamMessage(stream=number, prompt=part) for part in split_prompt(tokens))]


async def test_a_reservation_starts_at_once_and_ends_with_its_reply():
    rig = HandlerRig()
    await rig.apply(reserve(4))
    assert (rig.asked, rig.traces[0].http_request_id) == ([reserve(4).reserve.request], "http-1")
    assert (rig.posted, len(rig.streams)) == ([], 1)
    rig.go.set()
    await rig.apply()
    assert rig.posted == [pb.StreamMessage(stream=4, reserve_reply=REPLY)]
    assert len(rig.streams) == 0


async def test_a_prompt_starts_when_it_is_whole_and_ends_with_its_seal():
    rig = HandlerRig()
    opened, part = prefill(3, 7, 8)
    await rig.apply(opened)
    assert rig.asked == []
    await rig.apply(part)
    assert (rig.asked, rig.traces[0].http_request_id) == ([[7, 8]], "http-1")
    rig.go.set()
    await rig.apply()
    assert rig.posted == [pb.StreamMessage(stream=3, prefill_event=SEALED)]
    assert len(rig.streams) == 0


async def test_an_abort_of_a_stream_ends_what_serves_it():
    rig = HandlerRig()
    await rig.apply(reserve(1), *prefill(2, 7))
    await rig.apply(*(pb.StreamMessage(stream=number, abort=pb.Abort()) for number in (1, 2)))
    assert (sorted(rig.ended), rig.posted, len(rig.streams)) == (["prefill", "reserve"], [], 0)


async def test_an_abort_of_a_stream_in_its_frame_starts_nothing():
    rig = HandlerRig()
    await rig.apply(reserve(1), *prefill(2, 7), *(pb.StreamMessage(stream=n, abort=pb.Abort()) for n in (1, 2)))
    assert (rig.asked, rig.posted, len(rig.streams)) == ([], [], 0)


async def test_a_lost_session_ends_prompts_and_reservations():
    rig = HandlerRig()
    await rig.apply(reserve(1), *prefill(2, 7))
    rig.streams.on_ended("lost")
    await rig.apply()
    assert (sorted(rig.ended), len(rig.streams)) == (["prefill", "reserve"], 0)


async def test_an_abort_of_an_attempt_follows_what_was_opened():
    rig = HandlerRig()
    aborted = common_pb2.AbortRequest(id=ID, reason="cancelled")
    await rig.apply(reserve(1))
    await rig.apply(pb.StreamMessage(abort_attempt=aborted))
    assert rig.asked[1:] == [aborted]


async def test_a_malformed_abort_harms_no_stream():
    rig = HandlerRig()

    def refuse(request: common_pb2.AbortRequest) -> None:
        raise InvalidRequest("no id")

    rig.use(SessionHandlers(refuse, reserve=rig.reserve))
    await rig.apply(reserve(1), pb.StreamMessage(abort_attempt=common_pb2.AbortRequest()))
    assert len(rig.streams) == 1


async def test_what_a_worker_does_not_serve_is_refused_on_its_stream():
    rig = HandlerRig()
    await rig.apply(pb.StreamMessage(stream=1, open=pb.Open()))
    rig.use(SessionHandlers())
    await rig.apply(reserve(1), *prefill(2, 7), pb.StreamMessage(abort_attempt=common_pb2.AbortRequest(id=ID)))
    ends = [(message.stream, message.ended.failure.code) for message in rig.posted]
    assert sorted(ends) == [(number, "invalid_request") for number in (0, 1, 1, 2)]
    assert (rig.asked, len(rig.streams)) == ([], 0)


async def test_a_part_of_a_prompt_is_no_part_of_a_reservation():
    rig = HandlerRig()
    await rig.apply(reserve(1), pb.StreamMessage(stream=1, prompt=pb.PromptPart(tokens=bytes(4), last=True)))
    assert [(message.stream, message.ended.failure.code) for message in rig.posted] == [(1, "invalid_request")]
    assert len(rig.streams) == 0


async def test_a_bug_blames_the_worker_that_has_it():
    async def fail(request: object, trace: TraceContext) -> decode_pb2.ReserveReply:
        raise ZeroDivisionError

    rig = HandlerRig()
    rig.use(SessionHandlers(rig.asked.append, reserve=fail))
    await rig.apply(reserve(1))
    [message] = rig.posted
    for role, source in ((WorkerRole.PREFILL, FaultSource.PREFILL), (WorkerRole.DECODE, FaultSource.DECODE)):
        failure = classify_reported(decode_failure(message.ended.failure), role)
        assert isinstance(failure, AttemptFailure)
        assert (failure.fault_source, failure.second_hand) == (source, False), "not the peer, and not the link"


async def test_whole_prompts_count_until_they_end(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(served_streams, "MAX_PROMPT_BYTES", 20)
    rig = HandlerRig()
    await rig.apply(*prefill(1, 5, 6, 7, 8))
    await rig.apply(*prefill(2, 5, 6))
    assert [(message.stream, message.ended.failure.code) for message in rig.posted] == [(2, "overloaded")]
    rig.go.set()
    await rig.apply()
    await rig.apply(*prefill(3, 5, 6, 7, 8))
    assert rig.asked == [[5, 6, 7, 8], [5, 6, 7, 8]]
