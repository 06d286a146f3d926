"""The Decode service for routers: `Reserve`, `Generate` and `Abort`. Translates messages; makes no decisions.

Runs in the asyncio loop. Commands go to the engine's mailbox, an `AttemptServer` gives the events.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

import grpc

from baton.domain.errors import BatonError, Draining, InvalidRequest, Overloaded
from baton.domain.ids import PageKey
from baton.domain.trace_context import TraceContext
from baton.engine.mailbox import Mailbox
from baton.engine.messages import Abort
from baton.engine.reply import Reply
from baton.kv.keys import KEY_BYTES
from baton.rpc import codec
from baton.rpc.gen import common_pb2, decode_pb2, decode_pb2_grpc
from baton.rpc.request_metadata import received_trace_context
from baton.services.decode.commands import DecodeCommand, Reserve
from baton.services.decode.kv_import import Busy, Reserved
from baton.services.decode.serving.attempts import AttemptServer, ServicerConfig
from baton.services.decode.serving.event_codec import encode_call_events
from baton.worker.request_validator import MAX_NAME_CHARS, clamp_duration, validate_id

ENGINE_TIMEOUT_S = 30.0
BUSY_RETRY_S = 0.05


class DecodeServicer(decode_pb2_grpc.DecodeServicer):
    """Serves one `Generate` stream per attempt. Closing the stream aborts the attempt."""

    def __init__(self, mailbox: Mailbox[DecodeCommand], attempts: AttemptServer, config: ServicerConfig) -> None:
        self._mailbox = mailbox
        self._attempts = attempts
        self._config = config

    async def Reserve(
        self, request: decode_pb2.ReserveRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> decode_pb2.ReserveReply:
        """See decode.proto."""
        return await self.reserve(request)

    async def Generate(
        self, request: decode_pb2.GenerateRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> AsyncGenerator[decode_pb2.GenerateEvent, None]:
        """See decode.proto."""
        async with aclosing(self._attempts.events(request, received_trace_context(context))) as events:
            async for event in events:
                for message in encode_call_events(event):
                    yield message

    async def Abort(
        self, request: common_pb2.AbortRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> common_pb2.AbortReply:
        """See decode.proto."""
        self.abort(request)
        return common_pb2.AbortReply()

    async def reserve(
        self, request: decode_pb2.ReserveRequest, trace: TraceContext | None = None
    ) -> decode_pb2.ReserveReply:
        """Asks the engine for room; the reply has its refusals, too. Also for sessions."""
        try:
            return _encode_reservation(await self._reserve(request))
        except BatonError as error:
            return decode_pb2.ReserveReply(refused=codec.encode_failure(error))

    def abort(self, request: common_pb2.AbortRequest) -> None:
        """Ends an attempt in every state. Also for sessions. Raises `InvalidRequest` for an id that is none."""
        self._mailbox.put(Abort(validate_id(request.id), request.reason[:MAX_NAME_CHARS]))

    async def _reserve(self, request: decode_pb2.ReserveRequest) -> Reserved | Busy:
        if self._config.is_draining():
            raise Draining("this decode worker is draining", retry_after_s=1.0)
        if not request.num_tokens or any(len(key) != KEY_BYTES for key in request.page_keys):
            raise InvalidRequest("a reservation needs tokens, and page keys of 16 bytes")
        id = validate_id(request.id)
        reply: Reply[Reserved | Busy] = Reply()
        keys = tuple(PageKey(key) for key in request.page_keys)
        deadline_s = min(clamp_duration(request.deadline_s, "deadline_s"), self._config.max_reservation_s)
        command = Reserve(
            id, request.num_tokens, keys, deadline_s, reply, request.max_new_tokens, request.computes_prompt
        )
        if not self._mailbox.try_put(command):
            raise Overloaded("this decode worker's mailbox is full", retry_after_s=1.0)
        return await reply.wait(ENGINE_TIMEOUT_S)


def _encode_reservation(answer: Reserved | Busy) -> decode_pb2.ReserveReply:
    match answer:
        case Reserved(id, prefix_len):
            return decode_pb2.ReserveReply(
                reserved=decode_pb2.Reserved(reservation_id=id, decode_prefix_len=prefix_len)
            )
        case Busy(queued_pages, no_prompts):
            busy = decode_pb2.Busy(retry_after_s=BUSY_RETRY_S, queued_pages=max(0, queued_pages), no_prompts=no_prompts)
            return decode_pb2.ReserveReply(busy=busy)
