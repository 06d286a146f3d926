"""One session with a worker: opens streams, and hands what comes to them. Owned by one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from baton.domain.errors import WorkerLost
from baton.domain.trace_context import TraceContext
from baton.rpc.gen import common_pb2, decode_pb2, prefill_pb2
from baton.rpc.gen import session_pb2 as pb
from baton.services.router.dispatch.sessions.session_stream import (
    ATTEMPT,
    PROMPT,
    RESERVATION,
    SessionEvent,
    SessionStream,
    StreamKind,
)
from baton.session.dialler import SessionDialler
from baton.session.lifecycle import ENDED_STATES, SessionState
from baton.session.prompts import split_prompt
from baton.session.streams import StreamTable
from baton.telemetry.series.session_series import SESSION_EVENTS_TOTAL

RECONCILE_S = 10.0


class WorkerSession:
    """`SessionOwner` of a router."""

    def __init__(self, dialler: SessionDialler) -> None:
        self._dialler = dialler
        self._streams: StreamTable[SessionStream] = StreamTable()
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(RECONCILE_S, self._reconcile)
        self.task = self._loop.create_task(dialler.run(self), name="worker-session")
        # A task that is cancelled before its first step runs no `finally` of its own.
        self.task.add_done_callback(lambda _: self.on_ended("this process has ended the session"))

    @property
    def has_ended(self) -> bool:
        """True once the session was lost or closed."""
        return self._dialler.session.state in ENDED_STATES

    @property
    def other_version(self) -> bool:
        """True if the worker has refused the session because it speaks another protocol version."""
        return self._dialler.other_version

    def open(self, request: decode_pb2.GenerateRequest, trace: TraceContext) -> SessionStream:
        """Starts an attempt. Raises `LinkBroken` if the session has no stream numbers left."""
        number, stream = self._draw(ATTEMPT)
        tokens = list(request.request.tokens)
        opened = pb.Open(
            request=request.request,
            reservation_id=request.reservation_id,
            prefill_id=request.prefill_id,
            prefill_incarnation=request.prefill_incarnation,
            deadline_s=request.deadline_s,
            traceparent=trace.traceparent,
            http_request_id=trace.http_request_id,
        )
        del opened.request.tokens[:]
        self._post_with_prompt(pb.StreamMessage(stream=number, open=opened), tokens)
        return stream

    def reserve(self, request: decode_pb2.ReserveRequest, trace: TraceContext) -> SessionStream:
        """Asks for room; a `ReserveReply` comes. Raises `LinkBroken` if the session has no stream numbers left."""
        number, stream = self._draw(RESERVATION)
        opened = pb.OpenReserve(request=request, traceparent=trace.traceparent, http_request_id=trace.http_request_id)
        self._dialler.pump.post(pb.StreamMessage(stream=number, reserve=opened))
        return stream

    def prefill(self, request: prefill_pb2.PrefillRequest, trace: TraceContext) -> SessionStream:
        """Starts a prompt; `PrefillEvent`s come. Raises `LinkBroken` if the session has no stream numbers left."""
        number, stream = self._draw(PROMPT)
        opened = pb.OpenPrefill(request=request, traceparent=trace.traceparent, http_request_id=trace.http_request_id)
        del opened.request.request.tokens[:]
        self._post_with_prompt(pb.StreamMessage(stream=number, prefill=opened), request.request.tokens)
        return stream

    def abort(self, request: common_pb2.AbortRequest) -> bool:
        """Sends an abort behind all opens. Returns False, and sends none, once the session has ended or leaves."""
        state = self._dialler.session.state
        if state in ENDED_STATES or state is SessionState.LEAVING:
            return False
        self._dialler.pump.post(pb.StreamMessage(abort_attempt=request))
        return True

    def leave(self, reason: str) -> None:
        """Ends the session as planned. `task` ends when the worker has heard of it, or after `leave_s`."""
        self._dialler.pump.leave(reason)
        if self.has_ended:  # it may be within a dial
            self.task.cancel()

    def apply(self, messages: list[pb.StreamMessage]) -> None:
        """See `SessionOwner`."""
        streams, handlers = self._streams, self._streams.handlers
        for message in messages:
            match message.WhichOneof("kind"):
                case "step":
                    for row in message.step.rows:
                        stream = handlers.get(row.stream)
                        if stream is None:
                            SESSION_EVENTS_TOTAL.labels("late_message").inc()
                            continue
                        stream.put_row(row)
                        if row.finish_reason:
                            streams.close(row.stream)
                            stream.end()
                case "joined":
                    joined = message.joined
                    imported = decode_pb2.Imported(
                        times=joined.times if joined.HasField("times") else None,
                        first_token=joined.first_token if joined.HasField("first_token") else None,
                    )
                    self._put(message.stream, decode_pb2.GenerateEvent(imported=imported))
                case "scores":
                    self._put(message.stream, decode_pb2.GenerateEvent(scores=message.scores))
                case "reserve_reply":
                    self._put(message.stream, message.reserve_reply, ends=True)
                case "prefill_event":
                    event = message.prefill_event
                    self._put(message.stream, event, ends=event.HasField("sealed") or event.HasField("failed"))
                case "ended":
                    if (stream := self._find(message.stream)) is not None:
                        stream.put_failure(message.ended.failure)
                        self._end(message.stream, stream)

    def on_ended(self, reason: str) -> None:
        """See `SessionOwner`. Every attempt in it has lost its worker."""
        self._timer.cancel()
        for stream in self._streams.close_all():
            stream.end(WorkerLost(f"the session with a worker has ended: {reason}"))

    def _draw(self, kind: StreamKind) -> tuple[int, SessionStream]:
        stream = SessionStream(lambda: self._abort(number), kind)
        number = self._streams.draw(stream, self._loop.time())
        return number, stream

    def _post_with_prompt(self, opened: pb.StreamMessage, tokens: Iterable[int]) -> None:
        self._dialler.pump.post(opened)
        for part in split_prompt(tokens):
            self._dialler.pump.post(pb.StreamMessage(stream=opened.stream, prompt=part))

    def _put(self, number: int, event: SessionEvent, *, ends: bool = False) -> None:
        if (stream := self._find(number)) is not None:
            stream.put(event)
            if ends and stream.brings(event):  # else its reader ends it, here and at the worker
                self._end(number, stream)

    def _find(self, number: int) -> SessionStream | None:
        stream = self._streams.get(number)
        if stream is None:
            SESSION_EVENTS_TOTAL.labels("late_message").inc()
        return stream

    def _end(self, number: int, stream: SessionStream) -> None:
        self._streams.close(number)
        stream.end()

    def _abort(self, number: int) -> None:
        if self._streams.close(number) is not None:
            self._dialler.pump.post(pb.StreamMessage(stream=number, abort=pb.Abort(reason="not wanted any more")))

    def _reconcile(self) -> None:
        """Tells the worker what is open here. Both ends agree, unless one of them has a bug."""
        self._timer = self._loop.call_later(RECONCILE_S, self._reconcile)
        self._dialler.pump.post(pb.StreamMessage(reconcile=pb.Reconcile(streams=self._streams.numbers)))
