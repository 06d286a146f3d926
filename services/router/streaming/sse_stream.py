"""Sends a response as server-sent events: one event a token, pings, the tail, or an error event.

`respond` and `resume` run it over a `TokenStream`. Events before the cursor of the client are counted, not sent.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

import structlog
from starlette.types import Scope, Send

from baton.domain.errors import ModelReplaced
from baton.telemetry.sequence_timer import SequenceTimer
from services.router.edge import sse
from services.router.edge.disconnect import CLOSE_TIMEOUT_S, hang_up
from services.router.edge.http_errors import error_response, is_internal_error
from services.router.openai.request_parser import ParsedRequest
from services.router.openai.valid_request import StreamOptions
from services.router.streaming.cursor import Cursor
from services.router.streaming.renderer import EventRenderer
from services.router.streaming.token_stream import ANSWER_REPLACED, TokenStream
from services.router.text.choice_text import TokenEvent

HEADER_GRACE_S = 1.0
"""Longest wait of the headers for a first token. An earlier error still is a status, and clients try again."""

log = structlog.get_logger(__name__)


class SseStream:
    """Sends the events of `stream` after the cursor `after`."""

    def __init__(
        self, send: Send, parsed: ParsedRequest, stream: TokenStream, *, with_ids: bool, after: Cursor | None = None
    ) -> None:
        self.started = False  # the status is sent; errors become events
        self._send = send
        self._id = parsed.request.id
        self._id_bytes = self._id.encode()
        self._builder = parsed.response_builder
        self._renderer = EventRenderer(parsed.response_builder, parsed.request)
        self._stream = stream
        self._options = parsed.request.stream_options or StreamOptions()
        self._with_ids = with_ids
        self._after = after or Cursor(self._id, (0,) * len(stream.counts))
        self._num_tail = 0

    async def run(
        self,
        headers: Callable[[], Awaitable[Mapping[str, str]]],
        ping_interval_s: float,
        timers: Sequence[SequenceTimer] = (),
    ) -> None:
        """Sends the whole response. Calls `headers` once, before the first byte. `timers`: of the choices."""
        stream, line, seen = self._stream, self._renderer.line, self._after.counts
        timeout_s = min(HEADER_GRACE_S, ping_interval_s)
        self._builder.use_scores(stream.prompt_scores)
        async with stream:
            while stream.num_running:
                event = await stream.next(timeout_s)
                if not self.started:
                    await self._start(await headers())
                    timeout_s = ping_interval_s
                if event is None:
                    await self._send_body(sse.PING)
                    continue
                if self._after.digests:
                    self._compare(event)
                shown = stream.usage() if self._options.continuous_usage else None
                if stream.prompt_scores and stream.counts[event.choice] == 1:
                    data = await asyncio.to_thread(line, event, shown)  # a long prompt's scores take seconds
                else:
                    data = line(event, shown)
                if stream.counts[event.choice] > seen[event.choice]:
                    if self._with_ids:
                        data = b"id: %b\n%b" % (self._event_id(), data)
                    await self._send({"type": "http.response.body", "body": data, "more_body": True})
                if timers and event.token is not None:
                    timers[event.choice].token(time.monotonic())
                if timers and event.finish is not None:
                    timers[event.choice].finish(event.finish.value)
        await self._finish()

    async def fail(self, scope: Scope, error: Exception) -> None:
        """Sends the error event and ends. Hangs up a client that does not read after `CLOSE_TIMEOUT_S`.

        The event has no id: a client resumes from the last event of the answer.
        """
        if is_internal_error(error):
            log.error("response_failed", request_id=self._id, exc_info=error)
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._send_body(sse.event(error_response(error).json(), None), more=False)
        except TimeoutError:
            log.warning("client_too_slow", request_id=self._id)
            hang_up(scope)

    async def _start(self, headers: Mapping[str, str]) -> None:
        self.started = True
        pairs = [(name.encode(), value.encode()) for name, value in {**sse.HEADERS, **headers}.items()]
        await self._send({"type": "http.response.start", "status": 200, "headers": pairs})

    async def _finish(self) -> None:
        """Sends the events after all choices."""
        tail = [sse.DONE]
        if self._options.include_usage:
            tail.insert(0, self._builder.usage_chunk(self._stream.usage()))
        for data in tail:
            self._num_tail += 1
            if self._num_tail > self._after.num_tail:
                await self._send_body(sse.event(data, self._event_id() if self._with_ids else None))
        await self._send_body(b"", more=False)

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

    async def _send_body(self, body: bytes, *, more: bool = True) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": more})


def num_tail_events(options: StreamOptions | None) -> int:
    """Number of events after all choices: usage, if requested, and `[DONE]`."""
    return 2 if options is not None and options.include_usage else 1
