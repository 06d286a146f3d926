"""One session with a worker: opens streams, and hands what comes to them. Owned by one event loop."""

from __future__ import annotations

from collections.abc import Sequence

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
from baton.session.dialled_session import DialledSession
from baton.session.dialler import SessionDialler
from baton.session.prompts import MAX_OPEN_TOKENS, split_prompt
from baton.telemetry.series.session_series import SESSION_EVENTS_TOTAL


class WorkerSession(DialledSession[SessionStream]):
    """`SessionOwner` of a router."""

    def __init__(self, dialler: SessionDialler, *, opens_with_prompts: bool = False) -> None:
        """`opens_with_prompts`: the worker takes short prompts in the messages that open their streams."""
        super().__init__(dialler, "worker-session")
        self._max_open_tokens = MAX_OPEN_TOKENS if opens_with_prompts else 0

    def open(self, request: decode_pb2.GenerateRequest, trace: TraceContext) -> SessionStream:
        """Starts an attempt. Raises `LinkBroken` if the session has no stream numbers left."""
        number, stream = self._draw(ATTEMPT)
        message = pb.StreamMessage(stream=number)
        opened = message.open  # in place: a message that is given to a constructor is copied
        opened.request.CopyFrom(request.request)
        opened.reservation_id = request.reservation_id
        opened.prefill_id = request.prefill_id
        opened.prefill_incarnation = request.prefill_incarnation
        opened.deadline_s = request.deadline_s
        if trace.trace_id:
            opened.traceparent = trace.traceparent
        opened.http_request_id = trace.http_request_id
        self._post_with_prompt(message, opened.request, request.request.tokens)
        return stream

    def reserve(self, request: decode_pb2.ReserveRequest, trace: TraceContext) -> SessionStream:
        """Asks for room; a `ReserveReply` comes. Raises `LinkBroken` if the session has no stream numbers left."""
        number, stream = self._draw(RESERVATION)
        message = pb.StreamMessage(stream=number)
        opened = message.reserve
        opened.request.CopyFrom(request)
        if trace.trace_id:
            opened.traceparent = trace.traceparent
        opened.http_request_id = trace.http_request_id
        self._dialler.pump.post(message)
        return stream

    def prefill(self, request: prefill_pb2.PrefillRequest, trace: TraceContext) -> SessionStream:
        """Starts a prompt; `PrefillEvent`s come. Raises `LinkBroken` if the session has no stream numbers left."""
        number, stream = self._draw(PROMPT)
        message = pb.StreamMessage(stream=number)
        opened = message.prefill
        opened.request.CopyFrom(request)
        if trace.trace_id:
            opened.traceparent = trace.traceparent
        opened.http_request_id = trace.http_request_id
        self._post_with_prompt(message, opened.request.request, request.request.tokens)
        return stream

    def abort(self, request: common_pb2.AbortRequest) -> bool:
        """Sends an abort behind all opens. Returns False, and sends none, once the session has ended or leaves."""
        if not self.is_usable:
            return False
        self._dialler.pump.post(pb.StreamMessage(abort_attempt=request))
        return True

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
                        if row.finish_reason:
                            streams.close(row.stream)
                            stream.put_last(row)
                        else:
                            stream.put_row(row)
                case "joined":
                    joined = pb.Joined()
                    joined.CopyFrom(message.joined)  # which keeps the memory of its whole frame
                    self._put(message.stream, joined)
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

    def _draw(self, kind: StreamKind) -> tuple[int, SessionStream]:
        stream = SessionStream(lambda: self._abort(number), kind)
        number = self._streams.draw(stream, self._loop.time())
        return number, stream

    def _post_with_prompt(
        self, message: pb.StreamMessage, opened: common_pb2.EngineRequest, tokens: Sequence[int]
    ) -> None:
        """Posts the opening of a stream, in which `opened` has `tokens`. Longer prompts follow in parts instead."""
        if 0 < len(tokens) <= self._max_open_tokens:  # without any, it could not be told from one with parts
            self._dialler.pump.post(message)
            return
        del opened.tokens[:]
        self._dialler.pump.post(message)
        for part in split_prompt(tokens):
            self._dialler.pump.post(pb.StreamMessage(stream=message.stream, prompt=part))

    def _put(self, number: int, event: SessionEvent, *, ends: bool = False) -> None:
        if (stream := self._find(number)) is None:
            return
        if ends and stream.brings(event):  # else its reader ends it, here and at the worker
            self._streams.close(number)
            stream.put_last(event)
        else:
            stream.put(event)

    def _end(self, number: int, stream: SessionStream) -> None:
        self._streams.close(number)
        stream.end()
