"""An importer's session with one exporter: asks what `HandoffStub` asks by calls, each in a stream.

A session that breaks resumes, so a question waits for its reply. A session that is lost ends every stream in it with
`WorkerLost`, as a broken call would. Owned by one event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

from baton.domain.errors import BatonError, LinkBroken, WorkerLost
from baton.rpc.codec import decode_failure
from baton.rpc.gen import common_pb2, handoff_pb2
from baton.rpc.gen import session_pb2 as pb
from baton.rpc.request_metadata import Metadata, trace_context
from baton.session.dialled_session import DialledSession
from baton.session.dialler import SessionDialler


class LinkStream:
    """The replies to one request. `on_cancel` tells the exporter that the rest is not wanted."""

    def __init__(self, kind: str, on_cancel: Callable[[], None]) -> None:
        self.kind = kind  # of its replies
        self._on_cancel = on_cancel
        self._unread: deque[pb.LinkReply] = deque()
        self._end: BatonError | None = None
        self._has_ended = False
        self._waiter: asyncio.Future[None] | None = None

    def put(self, reply: pb.LinkReply) -> None:
        """Adds a reply."""
        self._unread.append(reply)
        self._wake()

    def end(self, error: BatonError | None = None) -> None:
        """Nothing more comes; after what is unread `read` raises `error`."""
        if not self._has_ended:
            self._has_ended, self._end = True, error
            self._wake()

    def cancel(self) -> None:
        """Ends the stream here and, unless it has ended, at the exporter. Idempotent."""
        if not self._has_ended:
            self._has_ended = True
            self._on_cancel()

    async def read(self) -> pb.LinkReply | None:
        """The next reply; None at the end. Raises what the stream has ended with."""
        while not self._unread:
            if self._end is not None:
                raise self._end
            if self._has_ended:
                return None
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._unread.popleft()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class LinkSession(DialledSession[LinkStream]):
    """`SessionOwner` of an importer. Its methods are those of `HandoffStub`, and raise `BatonError`."""

    def __init__(self, dialler: SessionDialler) -> None:
        super().__init__(dialler, "link-session")

    async def Hello(self, request: handoff_pb2.HelloRequest, timeout: float) -> handoff_pb2.HelloReply:
        """See handoff.proto."""
        return (await self._ask(pb.LinkRequest(hello=request), timeout)).hello

    def Watch(
        self, request: handoff_pb2.WatchRequest, metadata: Metadata = ()
    ) -> AsyncIterator[handoff_pb2.HandoffEvent]:
        """See handoff.proto. A reader that is cancelled ends the watch."""
        return _EventsInSession(self.open(_with_trace(pb.LinkRequest(watch=request), metadata)))

    async def OpenExport(
        self, request: handoff_pb2.OpenExportRequest, timeout: float, metadata: Metadata = ()
    ) -> handoff_pb2.OpenExportReply:
        """See handoff.proto."""
        asked = _with_trace(pb.LinkRequest(open_export=request), metadata)
        return (await self._ask(asked, timeout)).open_export

    async def Commit(
        self, request: handoff_pb2.CommitRequest, timeout: float, metadata: Metadata = ()
    ) -> handoff_pb2.CommitReply:
        """See handoff.proto."""
        return (await self._ask(_with_trace(pb.LinkRequest(commit=request), metadata), timeout)).commit

    async def Renew(self, request: handoff_pb2.RenewRequest, timeout: float) -> handoff_pb2.RenewReply:
        """See handoff.proto."""
        return (await self._ask(pb.LinkRequest(renew=request), timeout)).renew

    async def Abort(
        self, request: common_pb2.AbortRequest, timeout: float, metadata: Metadata = ()
    ) -> common_pb2.AbortReply:
        """See handoff.proto."""
        return (await self._ask(_with_trace(pb.LinkRequest(abort=request), metadata), timeout)).abort

    def open(self, request: pb.LinkRequest) -> LinkStream:
        """Asks. Raises `LinkBroken` if the session has no stream numbers left."""
        kind = request.WhichOneof("request") or ""
        stream = LinkStream("event" if kind == "watch" else kind, lambda: self._abort(number))
        number = self._streams.draw(stream, self._loop.time())
        self._dialler.pump.post(pb.StreamMessage(stream=number, link_request=request))
        return stream

    def apply(self, messages: list[pb.StreamMessage]) -> None:
        """See `SessionOwner`."""
        for message in messages:
            match message.WhichOneof("kind"):
                case "link_reply":
                    self._put(message.stream, message.link_reply)
                case "ended":
                    if self._find(message.stream) is not None:
                        self._end(message.stream, decode_failure(message.ended.failure))

    async def _ask(self, request: pb.LinkRequest, timeout: float) -> pb.LinkReply:
        stream = self.open(request)
        try:
            async with asyncio.timeout(timeout):
                reply = await stream.read()
        except TimeoutError:
            raise WorkerLost("a worker has not replied in time") from None
        finally:
            stream.cancel()
        if reply is None:
            raise WorkerLost("a worker has ended a request without a reply")
        return reply

    def _put(self, number: int, reply: pb.LinkReply) -> None:
        stream, kind = self._find(number), reply.WhichOneof("reply")
        if stream is None:
            return
        if kind != stream.kind:  # it is damaged or lies
            self._abort(number)
            stream.end(LinkBroken(f"a reply of kind {kind} to a request for {stream.kind}"))
            return
        stream.put(reply)
        if kind != "event" or not reply.event.HasField("chunk"):
            self._end(number)

    def _end(self, number: int, error: BatonError | None = None) -> None:
        stream = self._streams.close(number)
        if stream is not None:
            stream.end(error)


class _EventsInSession:
    """The events of a watch. It needs no closing: a reader that is cancelled while it waits ends it."""

    def __init__(self, stream: LinkStream) -> None:
        self._stream = stream

    def __aiter__(self) -> _EventsInSession:
        return self

    async def __anext__(self) -> handoff_pb2.HandoffEvent:
        try:
            reply = await self._stream.read()
        except asyncio.CancelledError:
            self._stream.cancel()
            raise
        if reply is None:
            raise StopAsyncIteration
        return reply.event


def _with_trace(request: pb.LinkRequest, metadata: Metadata) -> pb.LinkRequest:
    trace = trace_context(dict(metadata))
    request.traceparent, request.http_request_id = trace.traceparent, trace.http_request_id
    return request
