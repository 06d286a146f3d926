"""The streams of one router's session at a worker: assembles prompts, serves attempts, posts what they emit.

One task serves a stream; plain tokens pass it by. What is posted in one pass of the loop leaves in one frame, so a step
of the engine is one message. Nothing here waits for the network: what a router does not take joins in the outbox.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial

import structlog.contextvars

from baton.domain.errors import BatonError, InvalidRequest, LinkBroken, Overloaded, WorkerLost
from baton.domain.trace_context import TraceContext, read_trace_context
from baton.rpc.codec import decode_id, encode_failure
from baton.rpc.gen import decode_pb2
from baton.rpc.gen import session_pb2 as pb
from baton.rpc.request_metadata import log_fields, request_metadata
from baton.session.prompts import ReceivedPrompt
from baton.session.pump import SessionPump
from baton.session.streams import StreamTable
from baton.telemetry.logs import get_logger
from baton.telemetry.metrics import SESSION_EVENTS_TOTAL

MAX_STREAMS = 4096
"""Open streams of a session, beyond the rows of any worker."""
MAX_PROMPT_BYTES = 64 << 20
"""Prompts of a session that have not come whole."""

log = get_logger(__name__)

Answer = pb.StreamMessage | pb.TokenRow
WriteTokens = Callable[[int, list[int]], None]
"""Posts the next tokens of one stream, from an index on. Neither raises nor waits; keeps the list."""
ServeAttempt = Callable[[decode_pb2.GenerateRequest, TraceContext, WriteTokens], AsyncGenerator[Answer, None]]
"""Serves one attempt until it ends or is closed. Sets no stream number. Ends after a row with a finish or `Ended`.

Tokens may be written instead of given, while the stream is served and all answers before them have been taken.
"""


@dataclass(slots=True)
class _ServedStream:
    request: decode_pb2.GenerateRequest
    trace: TraceContext
    prompt: ReceivedPrompt
    task: asyncio.Task[None] | None = field(default=None)


class ServedStreams:
    """`SessionOwner` of a worker. Owned by one event loop."""

    def __init__(self, pump: SessionPump, serve: ServeAttempt, max_prompt_tokens: int) -> None:
        self._pump = pump
        self._serve = serve
        self._max_prompt_tokens = max_prompt_tokens
        self._streams: StreamTable[_ServedStream] = StreamTable()
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_prompt_bytes = 0
        self._clock = asyncio.get_running_loop().time

    def __len__(self) -> int:
        return len(self._streams)

    def apply(self, messages: list[pb.StreamMessage]) -> None:
        """See `SessionOwner`."""
        for message in messages:
            try:
                self._apply(message)
            except BatonError as error:
                self._end(message.stream, error)

    def on_ended(self, reason: str) -> None:
        """See `SessionOwner`. Aborts all attempts."""
        for stream in self._streams.close_all():
            if stream.task is not None:
                stream.task.cancel()

    def _apply(self, message: pb.StreamMessage) -> None:
        match message.WhichOneof("kind"):
            case "open":
                self._open(message.stream, message.open)
            case "prompt":
                self._add_prompt(message.stream, message.prompt)
            case "abort":
                self._close(message.stream)
            case "reconcile":
                self._reconcile(message.reconcile)

    def _open(self, number: int, message: pb.Open) -> None:
        request = decode_pb2.GenerateRequest(
            request=message.request,
            reservation_id=message.reservation_id,
            prefill_id=message.prefill_id,
            prefill_incarnation=message.prefill_incarnation,
            deadline_s=message.deadline_s,
        )
        trace = read_trace_context(message.http_request_id, message.traceparent)
        stream = _ServedStream(request, trace, ReceivedPrompt(self._max_prompt_tokens))
        try:
            self._streams.accept(number, stream, self._clock())
        except LinkBroken as error:
            log.error("session_stream_refused", stream=number, why=str(error))
            return
        if len(self._streams) > MAX_STREAMS:
            raise Overloaded("too many attempts are open in this session", retry_after_s=1.0)

    def _add_prompt(self, number: int, part: pb.PromptPart) -> None:
        stream = self._streams.get(number)
        if stream is None:
            SESSION_EVENTS_TOTAL.labels("late_message").inc()
            return
        if stream.task is not None:
            raise InvalidRequest("a part of a prompt after its last one")
        before = stream.prompt.num_bytes
        stream.prompt.add(part)
        self._num_prompt_bytes += stream.prompt.num_bytes - before
        if self._num_prompt_bytes > MAX_PROMPT_BYTES:
            raise Overloaded("too many bytes of prompts are open in this session", retry_after_s=1.0)
        if stream.prompt.is_complete:
            self._num_prompt_bytes -= stream.prompt.num_bytes
            stream.request.request.tokens.extend(stream.prompt.tokens())
            stream.task = asyncio.create_task(self._run(number, stream), name=f"stream-{number}")
            self._tasks.add(stream.task)
            stream.task.add_done_callback(self._tasks.discard)

    async def _run(self, number: int, stream: _ServedStream) -> None:
        structlog.contextvars.clear_contextvars()
        try:
            id = decode_id(stream.request.request.id)
            structlog.contextvars.bind_contextvars(**log_fields(request_metadata(id, stream.trace)))
            write = partial(self._pump.post_tokens, number)
            async with aclosing(self._serve(stream.request, stream.trace, write)) as answers:
                async for answer in answers:
                    self._post(number, answer)
        except BatonError as error:
            self._end(number, error)
        except Exception as error:  # a bug: the router hears of it, as gRPC would tell
            log.exception("session_stream_failed")
            self._end(number, WorkerLost(f"decode failed: {type(error).__name__}"))
        finally:
            self._streams.close(number)

    def _post(self, number: int, answer: Answer) -> None:
        answer.stream = number
        if isinstance(answer, pb.TokenRow):
            self._pump.post_rows([answer])
        else:
            self._pump.post(answer)

    def _close(self, number: int) -> None:
        stream = self._streams.close(number)
        if stream is None:
            SESSION_EVENTS_TOTAL.labels("late_message").inc()
        elif stream.task is not None:
            stream.task.cancel()
        else:
            self._num_prompt_bytes -= stream.prompt.num_bytes

    def _end(self, number: int, error: BatonError) -> None:
        """Ends a stream with an error."""
        self._close(number)
        self._pump.post(pb.StreamMessage(stream=number, ended=pb.Ended(failure=encode_failure(error))))

    def _reconcile(self, message: pb.Reconcile) -> None:
        found = self._streams.compare(message.streams, self._clock())
        for number, _ in found.unlisted:
            SESSION_EVENTS_TOTAL.labels("reconciled").inc()
            log.error("session_stream_unlisted", stream=number)
            self._close(number)
        for number in found.unknown:  # its end may be on its way; then the router drops this one
            ended = pb.Ended(failure=encode_failure(WorkerLost("the worker does not have this attempt any more")))
            self._pump.post(pb.StreamMessage(stream=number, ended=ended))
