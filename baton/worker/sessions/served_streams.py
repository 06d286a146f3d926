"""The streams of one router's session at a worker: assembles prompts, runs the handlers, posts what they give.

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

from baton.domain.errors import BatonError, Broken, InvalidRequest, LinkBroken, Overloaded
from baton.domain.trace_context import TraceContext, read_trace_context
from baton.rpc.codec import decode_id, encode_failure
from baton.rpc.gen import common_pb2, decode_pb2
from baton.rpc.gen import session_pb2 as pb
from baton.rpc.request_metadata import log_fields, request_metadata
from baton.session.prompts import TOKEN_BYTES, ReceivedPrompt
from baton.session.pump import SessionPump
from baton.session.streams import StreamTable
from baton.telemetry.logs import get_logger
from baton.telemetry.series.session_series import SESSION_EVENTS_TOTAL
from baton.worker.sessions.session_handlers import Answer, SessionHandlers

MAX_STREAMS = 4096
"""Open streams of a session, beyond the rows of any worker."""
MAX_PROMPT_BYTES = 256 << 20
"""Prompts of a session's open streams."""

log = get_logger(__name__)


@dataclass(slots=True)
class _ServedStream:
    """`serve` begins it, once its prompt has come whole and `request` has its tokens; a reservation has no prompt.

    A prompt comes in parts, or in the message that opens its stream.
    """

    id: common_pb2.AttemptId
    trace: TraceContext
    serve: Callable[[], AsyncGenerator[Answer, None]]
    request: common_pb2.EngineRequest | None
    prompt: ReceivedPrompt
    num_bytes: int = 0  # of the prompt, as far as it has come
    task: asyncio.Task[None] | None = field(default=None)


class ServedStreams:
    """`SessionOwner` of a worker. Owned by one event loop."""

    def __init__(self, pump: SessionPump, handlers: SessionHandlers, max_prompt_tokens: int) -> None:
        self._pump = pump
        self._handlers = handlers
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
            case "reserve":
                self._open_reserve(message.stream, message.reserve)
            case "prefill":
                self._open_prefill(message.stream, message.prefill)
            case "abort_attempt":
                self._handlers.abort(message.abort_attempt)
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
        if self._handlers.generate is None:
            raise InvalidRequest("this worker decodes nothing")
        trace = read_trace_context(message.http_request_id, message.traceparent)
        serve = partial(self._handlers.generate, request, trace, partial(self._pump.post_tokens, number))
        self._accept_prompt(number, trace, serve, request.request)

    def _open_prefill(self, number: int, message: pb.OpenPrefill) -> None:
        request, trace = message.request, read_trace_context(message.http_request_id, message.traceparent)
        serve = partial(self._handlers.prompt_answers, request, trace)
        self._accept_prompt(number, trace, serve, request.request)

    def _open_reserve(self, number: int, message: pb.OpenReserve) -> None:
        request, trace = message.request, read_trace_context(message.http_request_id, message.traceparent)
        serve = partial(self._handlers.reserve_answers, request, trace)
        if (stream := self._accept(number, trace, serve, request.id)) is not None:
            self._start(number, stream)

    def _accept_prompt(
        self,
        number: int,
        trace: TraceContext,
        serve: Callable[[], AsyncGenerator[Answer, None]],
        request: common_pb2.EngineRequest,
    ) -> None:
        """Opens a stream with a prompt, and starts it if that is here. Raises `InvalidRequest` for one too long."""
        stream = self._accept(number, trace, serve, request.id, request)
        num_tokens = len(request.tokens)
        if stream is None or not num_tokens:
            return
        if num_tokens > self._max_prompt_tokens:
            raise InvalidRequest(f"a prompt of more than {self._max_prompt_tokens} tokens")
        self._count_bytes(stream, TOKEN_BYTES * num_tokens)
        self._start(number, stream)

    def _count_bytes(self, stream: _ServedStream, num_bytes: int) -> None:
        """Counts a part of a prompt. Raises `Overloaded` if the session has too many bytes of them."""
        stream.num_bytes += num_bytes
        self._num_prompt_bytes += num_bytes
        if self._num_prompt_bytes > MAX_PROMPT_BYTES:
            raise Overloaded("too many bytes of prompts are open in this session", retry_after_s=1.0)

    def _accept(
        self,
        number: int,
        trace: TraceContext,
        serve: Callable[[], AsyncGenerator[Answer, None]],
        id: common_pb2.AttemptId,
        request: common_pb2.EngineRequest | None = None,
    ) -> _ServedStream | None:
        """Opens a stream; None for a number that was used. Raises `Overloaded` if there are too many."""
        stream = _ServedStream(id, trace, serve, request, ReceivedPrompt(self._max_prompt_tokens))
        try:
            self._streams.accept(number, stream, self._clock())
        except LinkBroken as error:
            log.error("session_stream_refused", stream=number, why=str(error))
            return None
        if len(self._streams) > MAX_STREAMS:
            raise Overloaded("too many attempts are open in this session", retry_after_s=1.0)
        return stream

    def _add_prompt(self, number: int, part: pb.PromptPart) -> None:
        stream = self._streams.get(number)
        if stream is None:
            SESSION_EVENTS_TOTAL.labels("late_message").inc()
            return
        if stream.task is not None or stream.request is None:
            raise InvalidRequest("a part of a prompt after its last one, or of a stream without a prompt")
        stream.prompt.add(part)
        self._count_bytes(stream, len(part.tokens))
        if stream.prompt.is_complete:
            stream.request.tokens.extend(stream.prompt.take_tokens())
            self._start(number, stream)

    def _start(self, number: int, stream: _ServedStream) -> None:
        stream.task = asyncio.create_task(self._run(number, stream), name=f"stream-{number}")
        self._tasks.add(stream.task)
        stream.task.add_done_callback(self._tasks.discard)

    async def _run(self, number: int, stream: _ServedStream) -> None:
        structlog.contextvars.clear_contextvars()
        try:
            id = decode_id(stream.id)
            structlog.contextvars.bind_contextvars(**log_fields(request_metadata(id, stream.trace)))
            async with aclosing(stream.serve()) as answers:
                async for answer in answers:
                    self._post(number, answer)
        except BatonError as error:
            self._end(number, error)
        except Exception as error:  # a bug: the router hears of it, as gRPC would tell
            log.exception("session_stream_failed")
            self._end(number, Broken(f"an unexpected error: {type(error).__name__}"))
        finally:
            self._drop(number)

    def _post(self, number: int, answer: Answer) -> None:
        answer.stream = number
        if isinstance(answer, pb.TokenRow):
            self._pump.post_rows([answer])
        else:
            self._pump.post(answer)

    def _close(self, number: int) -> None:
        stream = self._drop(number)
        if stream is None:
            SESSION_EVENTS_TOTAL.labels("late_message").inc()
        elif stream.task is not None:
            stream.task.cancel()

    def _drop(self, number: int) -> _ServedStream | None:
        """Forgets a stream and its prompt."""
        stream = self._streams.close(number)
        if stream is not None:
            self._num_prompt_bytes -= stream.num_bytes
        return stream

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
            ended = pb.Ended(failure=encode_failure(Broken("the attempt is not here any more")))
            self._pump.post(pb.StreamMessage(stream=number, ended=ended))
