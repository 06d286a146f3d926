"""One session with a decode worker: opens streams, and hands what comes to them. Owned by one event loop."""

from __future__ import annotations

import asyncio

from baton.domain.errors import WorkerLost
from baton.domain.trace_context import TraceContext
from baton.rpc.gen import decode_pb2
from baton.rpc.gen import session_pb2 as pb
from baton.services.router.dispatch.sessions.session_stream import SessionStream
from baton.session.dialler import SessionDialler
from baton.session.lifecycle import ENDED_STATES
from baton.session.prompts import split_prompt
from baton.session.streams import StreamTable
from baton.telemetry.metrics import SESSION_EVENTS_TOTAL

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
        stream = SessionStream(lambda: self._abort(number))
        number = self._streams.draw(stream, self._loop.time())
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
        self._dialler.pump.post(pb.StreamMessage(stream=number, open=opened))
        for part in split_prompt(tokens):
            self._dialler.pump.post(pb.StreamMessage(stream=number, prompt=part))
        return stream

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
                case "ended":
                    failed = decode_pb2.GenerateEvent(failed=message.ended.failure)
                    self._put(message.stream, failed, ends=True)

    def on_ended(self, reason: str) -> None:
        """See `SessionOwner`. Every attempt in it has lost its worker."""
        self._timer.cancel()
        for stream in self._streams.close_all():
            stream.end(WorkerLost(f"the session with decode has ended: {reason}"))

    def _put(self, number: int, event: decode_pb2.GenerateEvent, *, ends: bool = False) -> None:
        stream = self._streams.get(number)
        if stream is None:
            SESSION_EVENTS_TOTAL.labels("late_message").inc()
            return
        stream.put(event)
        if ends:
            self._streams.close(number)
            stream.end()

    def _abort(self, number: int) -> None:
        if self._streams.close(number) is not None:
            self._dialler.pump.post(pb.StreamMessage(stream=number, abort=pb.Abort(reason="not wanted any more")))

    def _reconcile(self) -> None:
        """Tells the worker what is open here. Both ends agree, unless one of them has a bug."""
        self._timer = self._loop.call_later(RECONCILE_S, self._reconcile)
        self._dialler.pump.post(pb.StreamMessage(reconcile=pb.Reconcile(streams=self._streams.numbers)))
