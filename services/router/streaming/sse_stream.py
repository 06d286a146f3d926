"""Sends a response as server-sent events: one event a token, pings, the tail, or an error event.

`respond` and `resume` run it over a `TokenStream`. Events before the cursor of the client are counted, not sent. Head
and end are ASGI messages; what lies between them is written to a `BodySink`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

import structlog
from starlette.types import Scope, Send

from baton.domain.errors import ModelReplaced
from baton.services.router.edge import sse
from baton.services.router.edge.disconnect import CLOSE_TIMEOUT_S, hang_up
from baton.services.router.edge.http_errors import error_response, is_internal_error
from baton.services.router.edge.sink import AsgiSink, BodySink
from baton.services.router.openai.request_parser import ParsedRequest
from baton.services.router.openai.valid_request import StreamOptions
from baton.services.router.streaming.choice_reader import ANSWER_REPLACED
from baton.services.router.streaming.cursor import Cursor
from baton.services.router.streaming.renderer import EventRenderer
from baton.services.router.streaming.token_stream import TokenStream
from baton.services.router.text.choice_text import TokenEvent
from baton.telemetry.sequence_timer import SequenceTimer

HEADER_GRACE_S = 1.0
"""Longest wait of the headers for a first token. An earlier error still is a status, and clients try again."""

MAX_EVENTS = 64
"""Events of one write. Other callbacks run before the next one."""

BLOCKED_S = 1.0
"""A client that does not read gets no pings; when the stream's time is over is looked up again after this time."""

log = structlog.get_logger(__name__)


class EventRelay:
    """Passes events from a token stream to a sink, by callbacks: no task switch and no timer a token.

    Choices call it when they add events; it writes all that is there once, later in the same pass of the loop. While
    the client does not read it takes none: they wait in the stream, packed and bounded. `line` makes the bytes of an
    event, b"" for one that is not sent.
    """

    def __init__(
        self, stream: TokenStream, sink: BodySink, line: Callable[[TokenEvent], bytes], ping_interval_s: float
    ) -> None:
        self._stream = stream
        self._sink = sink
        self._line = line
        self._ping_interval_s = ping_interval_s
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._scheduled: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._moved_s = 0.0
        self._last = b""

    async def run(self) -> bytes:
        """Returns when no choice is left, or at the latest when `TokenStream.next` has an error to raise or to survive.

        Returns the lines that end the last choice: the response's end goes out with them.
        Raises the errors of `line` and of the sink, after all events before them are written.
        """
        self._stream.on_news = self._on_news
        self._sink.on_writable(self._schedule)
        self._moved_s = self._loop.time()
        self._timer = self._loop.call_at(
            min(self._moved_s + self._ping_interval_s, self._stream.deadline), self._on_timer
        )
        self._move()
        try:
            await self._ended
            return self._last
        finally:
            self._stream.on_news = None
            self._sink.on_writable(None)
            if self._scheduled is not None:
                self._scheduled.cancel()
            if self._timer is not None:
                self._timer.cancel()

    def _on_news(self, is_last: bool) -> None:
        """What is there is written later in this pass of the loop. The end is taken now: nothing follows it."""
        if not is_last:
            self._schedule()
            return
        if self._scheduled is not None:
            self._scheduled.cancel()
        self._move()

    def _schedule(self) -> None:
        if self._scheduled is None:
            self._scheduled = self._loop.call_soon(self._move)

    def _move(self) -> None:
        self._scheduled = None
        if self._sink.blocked or self._ended.done():
            return
        stream, lines, num_left = self._stream, list[bytes](), MAX_EVENTS
        error: Exception | None = None
        try:
            while num_left and (event := stream.take()) is not None:
                num_left -= 1
                lines.append(self._line(event))
        except Exception as raised:
            error = raised
        if lines:
            self._moved_s = self._loop.time()
            data = b"".join(lines)
            if not stream.num_running and error is None:
                self._last = data
            elif data:
                try:
                    self._sink.write(data)
                except Exception as raised:
                    error = raised
        if error is not None:
            self._fail(error)
        elif not stream.num_running or stream.has_error:
            self._ended.set_result(None)
        elif not num_left:
            self._schedule()

    def _on_timer(self) -> None:
        """One timer serves all tokens: it is set again when it fires too early."""
        now = self._loop.time()
        if self._sink.blocked:
            self._timer = self._loop.call_at(now + BLOCKED_S, self._on_timer)
            return
        if self._ended.done():
            return
        if now >= self._stream.deadline:
            self._ended.set_result(None)
            return
        if now >= self._moved_s + self._ping_interval_s:
            self._moved_s = now
            try:
                self._sink.write(sse.PING)
            except Exception as error:
                self._fail(error)
                return
        at = min(self._moved_s + self._ping_interval_s, self._stream.deadline)
        self._timer = self._loop.call_at(at, self._on_timer)

    def _fail(self, error: Exception) -> None:
        if not self._ended.done():
            self._ended.set_exception(error)


class SseStream:
    """Sends the events of `stream` after the cursor `after`."""

    def __init__(
        self,
        send: Send,
        parsed: ParsedRequest,
        stream: TokenStream,
        *,
        with_ids: bool,
        after: Cursor | None = None,
        sink: BodySink | None = None,
    ) -> None:
        """`sink`: takes the events; None: they are sent by `send`, as the head and the end are."""
        self.started = False  # the status is sent; errors become events
        self._send = send
        self._sink = AsgiSink(send) if sink is None else sink
        self._id = parsed.request.id
        self._id_bytes = self._id.encode()
        self._builder = parsed.response_builder
        self._renderer = EventRenderer(parsed.response_builder, parsed.request)
        self._stream = stream
        self._options = parsed.request.stream_options or StreamOptions()
        self._with_ids = with_ids
        self._after = after or Cursor(self._id, (0,) * len(stream.counts))
        self._num_tail = 0
        self._timers: Sequence[SequenceTimer] = ()

    async def run(
        self,
        headers: Callable[[], Awaitable[Mapping[str, str]]],
        ping_interval_s: float,
        timers: Sequence[SequenceTimer] = (),
    ) -> None:
        """Sends the whole response. Calls `headers` once, before the first byte. `timers`: of the choices."""
        stream, sink, timeout_s, last = self._stream, self._sink, min(HEADER_GRACE_S, ping_interval_s), b""
        self._timers = timers
        self._builder.use_scores(stream.prompt_scores)
        try:
            async with stream:
                while stream.num_running:
                    event = await stream.next(timeout_s)  # the first one, and after an error that the stream survives
                    if not self.started:
                        await self._start(await headers())
                        timeout_s = ping_interval_s
                    if event is None:
                        data = sse.PING
                    elif stream.prompt_scores and stream.counts[event.choice] == 1:
                        data = await asyncio.to_thread(self._line, event)  # a long prompt's scores take seconds
                    else:
                        data = self._line(event)
                    if not stream.num_running:
                        last = data
                        break
                    if data:
                        sink.write(data)
                    await sink.drain()
                    if not stream.prompt_scores:
                        last = await EventRelay(stream, sink, self._line, ping_interval_s).run()
            await self._finish(last)
        except asyncio.CancelledError:
            sink.close()
            raise

    def _line(self, event: TokenEvent) -> bytes:
        """The bytes of an event, b"" if the client has it. Stamps its token."""
        stream, choice = self._stream, event.choice
        if self._after.digests:
            self._compare(event)
        line = self._renderer.line(event, stream.usage() if self._options.continuous_usage else None)
        if self._timers:
            if event.token is not None:
                self._timers[choice].token(time.monotonic())
            if event.finish is not None:
                self._timers[choice].finish(event.finish._value_)
        if stream.counts[choice] <= self._after.counts[choice]:
            return b""
        return b"id: %b\n%b" % (self._event_id(), line) if self._with_ids else line

    async def fail(self, scope: Scope, error: Exception) -> None:
        """Sends the error event and ends. Hangs up a client that does not read after `CLOSE_TIMEOUT_S`.

        The event has no id: a client resumes from the last event of the answer.
        """
        if is_internal_error(error):
            log.error("response_failed", request_id=self._id, exc_info=error)
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._sink.drain()
                body = sse.event(error_response(error).json(), None)
                await self._send({"type": "http.response.body", "body": body, "more_body": False})
        except TimeoutError:
            log.warning("client_too_slow", request_id=self._id)
            hang_up(scope)

    async def _start(self, headers: Mapping[str, str]) -> None:
        self.started = True
        self._sink.hold()
        pairs = [(name.encode(), value.encode()) for name, value in {**sse.HEADERS, **headers}.items()]
        await self._send({"type": "http.response.start", "status": 200, "headers": pairs})

    async def _finish(self, last: bytes) -> None:
        """Sends the `last` lines of the choices, the events after them, and the end: one write."""
        tail, left = [sse.DONE], [last]
        if self._options.include_usage:
            tail.insert(0, self._builder.usage_chunk(self._stream.usage()))
        for data in tail:
            self._num_tail += 1
            if self._num_tail > self._after.num_tail:
                left.append(sse.event(data, self._event_id() if self._with_ids else None))
        await self._sink.drain()
        await self._send({"type": "http.response.body", "body": b"".join(left), "more_body": False})

    def _event_id(self) -> bytes:
        """The cursor after this event. A choice that is behind `after` keeps its part from there."""
        stream, after = self._stream, self._after
        if len(stream.counts) == 1 and 0 < stream.counts[0] >= after.counts[0] and not self._num_tail:
            return b"%b:%d~%08x" % (self._id_bytes, stream.counts[0], stream.digests[0])
        counts, digests = list(stream.counts), list[int | None](stream.digests)
        for choice, seen in enumerate(after.counts):
            if counts[choice] < seen:
                counts[choice], digests[choice] = seen, after.digests[choice] if after.digests else None
        return str(Cursor(self._id, tuple(counts), self._num_tail, tuple(digests))).encode()

    def _compare(self, event: TokenEvent) -> None:
        """Raises `ModelReplaced` if the client has other tokens of this choice than the answer that continues here."""
        choice = event.choice
        seen, known = self._after.counts[choice], self._after.digests[choice]
        given = self._stream.counts[choice]
        ended_early = event.finish is not None and given < seen
        if known is not None and (ended_early or (given == seen and self._stream.digests[choice] != known)):
            raise ModelReplaced(ANSWER_REPLACED)


def num_tail_events(options: StreamOptions | None) -> int:
    """Number of events after all choices: usage, if requested, and `[DONE]`."""
    return 2 if options is not None and options.include_usage else 1
