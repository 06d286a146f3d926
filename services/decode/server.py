"""The decode worker's gRPC surface: `Promise`, `Generate`, `Abort` for routers. Translates messages; decides nothing.

Lives in the asyncio loop; speaks to the engine through its mailbox and hears from it through `Streams`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace

import grpc

from baton.domain.errors import BatonError, DeadlineExceeded, Draining, InvalidRequest, Overloaded
from baton.domain.ids import AttemptId, Incarnation, PageKey, PromiseId, WorkerId
from baton.engine.intake import MAX_NAME_CHARS, Intake, read_duration, read_id
from baton.engine.mailbox import Mailbox
from baton.engine.reply import Reply
from baton.engine.streams import Streams
from baton.kv.keys import KEY_BYTES
from baton.rpc import codec
from baton.rpc.gen import common_pb2, decode_pb2, decode_pb2_grpc
from services.decode.boarding import Busy, Promised
from services.decode.commands import Abort, AskPromise, Claim, DecodeCommand
from services.decode.effects import EmitTokens, Fail, ReportLanded
from services.decode.handoffs import Handoffs
from services.decode.links import Links

StreamEvent = ReportLanded | EmitTokens | Fail
EVENT_TIMEOUT_S = 600.0
"""Longest silence of a running row: preempted rows wait their turn, but not for ever."""
ENGINE_TIMEOUT_S = 30.0
BUSY_RETRY_S = 0.05


class DecodeServicer(decode_pb2_grpc.DecodeServicer):
    """One `Generate` stream a request; closing it aborts."""

    def __init__(
        self,
        mailbox: Mailbox[DecodeCommand],
        streams: Streams[StreamEvent],
        links: Links,
        handoffs: Handoffs,
        is_draining: Callable[[], bool],
        max_promise_s: float,
        intake: Intake,
        itself: tuple[WorkerId, Incarnation] | None = None,
    ) -> None:
        """`itself`: what this worker is called when a prompt is to be computed here; None: it computes none."""
        self._mailbox = mailbox
        self._streams = streams
        self._links = links
        self._handoffs = handoffs
        self._is_draining = is_draining
        self._max_promise_s = max_promise_s
        self._intake = intake
        self._itself = itself

    async def Promise(
        self, request: decode_pb2.PromiseRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> decode_pb2.PromiseReply:
        """See decode.proto."""
        try:
            return _encode_promise(await self._promise(request))
        except BatonError as error:
            return decode_pb2.PromiseReply(refused=codec.encode_failure(error))

    async def Generate(
        self, request: decode_pb2.GenerateRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> AsyncGenerator[decode_pb2.GenerateEvent, None]:
        """See decode.proto."""
        id = codec.decode_id(request.request.id)
        try:
            claim = self._read(request)
            self._streams.open(id)
        except BatonError as error:
            yield _encode(Fail(id, error))
            return
        ended = False
        watch: asyncio.Task[None] | None = None
        try:
            watch = self._land(claim, WorkerId(request.prefill_id), Incarnation(request.prefill_incarnation))
            async for event in self._follow(id):
                ended = event.HasField("failed") or event.tokens.finish_reason != 0
                yield event
        except BatonError as error:
            yield _encode(Fail(id, error))
        finally:
            if watch is not None:
                watch.cancel()
            self._streams.close(id)
            self._handoffs.abort(id)
            if not ended:
                self._mailbox.post(Abort(id, "the router closed the stream"))

    async def Abort(
        self, request: common_pb2.AbortRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> common_pb2.AbortReply:
        """See decode.proto."""
        self._mailbox.post(Abort(read_id(request.id), request.reason[:MAX_NAME_CHARS]))
        return common_pb2.AbortReply()

    async def _promise(self, request: decode_pb2.PromiseRequest) -> Promised | Busy:
        if self._is_draining():
            raise Draining("this decode worker is draining", retry_after_s=1.0)
        if not request.num_tokens or any(len(key) != KEY_BYTES for key in request.page_keys):
            raise InvalidRequest("a promise needs tokens, and page keys of 16 bytes")
        id = read_id(request.id)
        reply: Reply[Promised | Busy] = Reply()
        keys = tuple(PageKey(key) for key in request.page_keys)
        deadline_s = min(read_duration(request.deadline_s, "deadline_s"), self._max_promise_s)
        ask = AskPromise(id, request.num_tokens, keys, deadline_s, reply)
        if not self._mailbox.offer(ask):
            raise Overloaded("this decode worker's mailbox is full", retry_after_s=1.0)
        return await reply.wait(ENGINE_TIMEOUT_S)

    def _read(self, request: decode_pb2.GenerateRequest) -> Claim:
        deadline_s = read_duration(request.deadline_s, "deadline_s")
        sequence = self._intake.sequence(request.request)
        return Claim(PromiseId(request.promise_id), sequence, None, deadline_s)

    def _land(self, claim: Claim, source: WorkerId, incarnation: Incarnation) -> asyncio.Task[None] | None:
        """Claims the promise and starts to follow the handoff, if there is to be one. Raises `LinkBroken`."""
        if self._itself == (source, incarnation):
            self._mailbox.post(claim)
            return None
        link = self._links.get(source, incarnation)
        self._mailbox.post(replace(claim, source=source))
        return asyncio.create_task(self._handoffs.follow(claim.request.id, link))

    async def _follow(self, id: AttemptId) -> AsyncGenerator[decode_pb2.GenerateEvent, None]:
        while True:
            try:
                event = await self._streams.next(id, EVENT_TIMEOUT_S)
            except DeadlineExceeded as error:
                self._mailbox.post(Abort(id, str(error)))
                event = Fail(id, error)
            yield _encode(event)
            if isinstance(event, Fail) or (isinstance(event, EmitTokens) and event.finish is not None):
                return


def _encode_promise(answer: Promised | Busy) -> decode_pb2.PromiseReply:
    match answer:
        case Promised(id, prefix_len):
            return decode_pb2.PromiseReply(promised=decode_pb2.Promised(promise_id=id, decode_prefix_len=prefix_len))
        case Busy(queued_pages):
            busy = decode_pb2.Busy(retry_after_s=BUSY_RETRY_S, queued_pages=max(0, queued_pages))
            return decode_pb2.PromiseReply(busy=busy)


def _encode(event: StreamEvent) -> decode_pb2.GenerateEvent:
    match event:
        case EmitTokens(_, tokens, finish):
            encoded = [codec.encode_token(token) for token in tokens]
            message = decode_pb2.Tokens(tokens=encoded, finish_reason=codec.encode_finish(finish))
            return decode_pb2.GenerateEvent(tokens=message)
        case ReportLanded():
            return decode_pb2.GenerateEvent(
                landed=decode_pb2.Landed(
                    num_bytes_moved=event.num_bytes,
                    num_pages_moved=event.num_pages,
                    pull_s=event.pull_s,
                    exposed_s=event.exposed_s,
                )
            )
        case Fail(_, error):
            return decode_pb2.GenerateEvent(failed=codec.encode_failure(error))
