"""An importer's session at its exporter: serves watches, exports, commits, renewals and aborts, each in a stream.

One task serves a stream. What is posted in one pass of the loop leaves in one frame, so the chunks of a prefill step
that go to one importer are one message. Nothing here waits for the network.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

import structlog.contextvars

from baton.domain.errors import BatonError, InvalidRequest, LinkBroken, Overloaded, WorkerLost
from baton.domain.trace_context import read_trace_context
from baton.rpc.codec import decode_id, encode_failure
from baton.rpc.gen import session_pb2 as pb
from baton.rpc.request_budget import MAX_CONTROL_BYTES
from baton.rpc.request_metadata import log_fields, request_metadata
from baton.session.pump import SessionPump
from baton.session.streams import StreamTable
from baton.telemetry.logs import get_logger
from baton.telemetry.series.session_series import SESSION_EVENTS_TOTAL
from baton.worker.handoff.handoff_handlers import HandoffHandlers

MAX_STREAMS = 4096
"""Open streams of a session, beyond the handoffs of any pair of workers."""
_KINDS_WITH_ID = frozenset({"watch", "open_export", "commit", "abort"})

log = get_logger(__name__)


@dataclass(slots=True)
class _ServedRequest:
    task: asyncio.Task[None] | None = None


class ServedLink:
    """`SessionOwner` of an exporter. Owned by one event loop."""

    def __init__(self, pump: SessionPump, handlers: HandoffHandlers) -> None:
        self._pump = pump
        self._handlers = handlers
        self._streams: StreamTable[_ServedRequest] = StreamTable()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()

    def __len__(self) -> int:
        return len(self._streams)

    def apply(self, messages: list[pb.StreamMessage]) -> None:
        """See `SessionOwner`."""
        for message in messages:
            match message.WhichOneof("kind"):
                case "link_request":
                    self._open(message.stream, message.link_request)
                case "abort":
                    self._close(message.stream)
                case "reconcile":
                    self._reconcile(message.reconcile)

    def on_ended(self, reason: str) -> None:
        """See `SessionOwner`. Ends all watches; pins stay as long as their leases."""
        for stream in self._streams.close_all():
            if stream.task is not None:
                stream.task.cancel()

    def _open(self, number: int, request: pb.LinkRequest) -> None:
        stream = _ServedRequest()
        try:
            self._streams.accept(number, stream, self._loop.time())
        except LinkBroken as error:
            log.error("session_stream_refused", stream=number, why=str(error))
            return
        if len(self._streams) > MAX_STREAMS:
            self._fail(number, Overloaded("too many requests are open in this session", retry_after_s=1.0))
            return
        if request.ByteSize() > MAX_CONTROL_BYTES:
            self._fail(number, InvalidRequest(f"a request has at most {MAX_CONTROL_BYTES} bytes"))
            return
        name = f"link-{request.WhichOneof('request')}"
        stream.task = self._loop.create_task(self._run(number, request), name=name)
        self._tasks.add(stream.task)
        stream.task.add_done_callback(self._tasks.discard)

    async def _run(self, number: int, request: pb.LinkRequest) -> None:
        try:
            _bind_log_context(request)
            async with aclosing(self._answer(request)) as replies:
                async for reply in replies:
                    self._pump.post(pb.StreamMessage(stream=number, link_reply=reply))
            self._streams.close(number)
        except BatonError as error:
            self._fail(number, error)
        except Exception as error:  # a bug: the importer hears of it, as gRPC would tell
            log.exception("session_stream_failed")
            self._fail(number, WorkerLost(f"an unexpected error: {type(error).__name__}"))

    async def _answer(self, request: pb.LinkRequest) -> AsyncGenerator[pb.LinkReply, None]:
        handlers = self._handlers
        match request.WhichOneof("request"):
            case "watch":
                async with aclosing(handlers.watch(request.watch)) as events:
                    async for event in events:
                        yield pb.LinkReply(event=event)
            case "renew":
                yield pb.LinkReply(renew=await handlers.renew(request.renew))
            case "commit":
                yield pb.LinkReply(commit=await handlers.commit(request.commit))
            case "abort":
                yield pb.LinkReply(abort=await handlers.abort(request.abort))
            case "open_export":
                yield pb.LinkReply(open_export=await handlers.open_export(request.open_export))
            case "hello":
                yield pb.LinkReply(hello=await handlers.hello(request.hello))
            case _:
                raise InvalidRequest("a request of a kind that is not known here")

    def _fail(self, number: int, error: BatonError) -> None:
        """Ends a stream with an error, unless the importer has ended it."""
        if self._streams.close(number) is not None:
            self._post_end(number, error)

    def _post_end(self, number: int, error: BatonError) -> None:
        self._pump.post(pb.StreamMessage(stream=number, ended=pb.Ended(failure=encode_failure(error))))

    def _close(self, number: int) -> None:
        stream = self._streams.close(number)
        if stream is None:
            SESSION_EVENTS_TOTAL.labels("late_message").inc()
        elif stream.task is not None:
            stream.task.cancel()

    def _reconcile(self, message: pb.Reconcile) -> None:
        found = self._streams.compare(message.streams, self._loop.time())
        for number, _ in found.unlisted:
            SESSION_EVENTS_TOTAL.labels("reconciled").inc()
            log.error("session_stream_unlisted", stream=number)
            self._close(number)
        for number in found.unknown:  # its reply may be on its way; then the importer drops this one
            self._post_end(number, WorkerLost("the request is not here any more"))


def _bind_log_context(request: pb.LinkRequest) -> None:
    """Binds the ids of a request about one attempt. Raises `InvalidRequest` for a malformed id."""
    structlog.contextvars.clear_contextvars()
    kind = request.WhichOneof("request")
    if kind in _KINDS_WITH_ID:
        trace = read_trace_context(request.http_request_id, request.traceparent)
        id = decode_id(getattr(request, kind).id)
        structlog.contextvars.bind_contextvars(**log_fields(request_metadata(id, trace)))
